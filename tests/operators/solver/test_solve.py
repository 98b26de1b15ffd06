"""Division problems, priced by hand and solved against every choice there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from atorch_ns.errors import InputError
from atorch_ns.operators.solver.problem import (
    ConversionCost,
    Group,
    Input,
    Label,
    OperatorNode,
    Option,
    PlacementProblem,
    Price,
    Use,
    price,
)
from atorch_ns.operators.solver.solve import solve
from atorch_ns.text import bytes_text

_LABELS = ("R", "P", "0", "1")
_FREE = {(one, one): ConversionCost() for one in _LABELS}


def _random(rng: random.Random) -> PlacementProblem:
    """Up to 8 nodes of up to 3 options, with shared uses, several instances, and groups of all kinds."""
    groups = {}
    if rng.random() < 0.6:
        groups["g"] = Group(count=rng.randint(1, 3), recomputed=rng.choice([None, None, True, False]))
    if rng.random() < 0.3:
        groups["h"] = Group(count=rng.randint(1, 3), recomputed=rng.choice([None, True]))
    nodes: list[OperatorNode] = []
    uses: list[Use] = []
    for number in range(rng.randint(1, 8)):
        group, inputs = rng.choice(["", *groups]), []
        for _ in range(rng.randint(0, 3) if nodes else 0):
            shared = sorted({read.use for node in nodes if node.group == group for read in node.inputs})
            if not shared or rng.random() < 0.4:
                shared = [len(uses)]
                uses.append(_random_use(rng, rng.randrange(len(nodes))))
            inputs.append(Input(rng.choice(shared), rng.random() < 0.5))
        options = tuple(_random_option(rng, len(inputs)) for _ in range(rng.randint(1, 3)))
        node = OperatorNode(
            name=f"node {number}", options=options, inputs=tuple(inputs), count=rng.randint(1, 3), group=group
        )
        nodes.append(node)
    return PlacementProblem(tuple(nodes), tuple(uses), groups)


def _random_use(rng: random.Random, node: int) -> Use:
    pairs = [pair for pair in itertools.product(_LABELS, repeat=2) if rng.random() < 0.8]
    costs = {
        pair: ConversionCost(*(rng.randint(0, most) for most in (9, 9, 4, rng.choice((0, 30)))))
        for pair in pairs
    }
    return Use(
        node=node,
        conversions=costs | _FREE,
        saved={label: rng.randint(0, 40) for label in _LABELS},
        count=rng.randint(1, 3),
        enters=rng.random() < 0.3,
    )


def _random_option(rng: random.Random, num_inputs: int) -> Option:
    return Option(
        outputs=(rng.choice(_LABELS),),
        needs=tuple(rng.choice(_LABELS) for _ in range(num_inputs)),
        seconds=rng.randint(0, 20),
        forward_seconds=rng.randint(0, 8),
        resident=rng.randint(0, 90),
        gradients=rng.choice((0, rng.randint(0, 90))),
        saved=rng.choice((0, rng.randint(0, 40))),
        transient=rng.randint(0, 60),
    )


def _prices(problem: PlacementProblem) -> Iterator[Price]:
    """The price of every legal choice."""
    free = [name for name, group in problem.groups.items() if group.recomputed is None]
    every = itertools.product(*(range(len(node.options)) for node in problem.nodes))
    for choices, marks in itertools.product(every, list(itertools.product((False, True), repeat=len(free)))):
        recomputed = problem.always_recomputed | set(itertools.compress(free, marks))
        try:
            yield price(problem, choices, recomputed)
        except InputError:
            continue


@pytest.mark.parametrize("seed", range(10))
def test_the_solver_finds_what_trying_every_choice_finds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        problem = _random(rng)
        prices = list(_prices(problem))
        limits: list[float | None] = [None]
        if prices:
            least = min(one.memory for one in prices)
            most = min(prices, key=lambda one: one.seconds).memory
            limits += [least - 1, least, rng.uniform(least, most)]
        for limit in limits:
            legal = [one for one in prices if limit is None or one.memory <= limit]
            if not legal:
                with pytest.raises(InputError):
                    solve(problem, memory_limit=limit)
                continue
            outcome = solve(problem, memory_limit=limit)
            assert outcome.status == "optimal"
            assert outcome.gap <= 1e-5
            assert outcome.price.seconds == pytest.approx(min(one.seconds for one in legal))
            assert outcome.price == price(problem, outcome.choices, outcome.recomputed)
            assert limit is None or outcome.price.memory <= limit


def _node(
    name: str, *options: Option, reads: tuple[Input, ...] = (), count: int = 1, group: str = ""
) -> OperatorNode:
    return OperatorNode(name=name, options=options, inputs=reads, count=count, group=group)


def test_a_host_that_starts_operators_slower_than_they_run_bounds_the_price() -> None:
    node = _node("product", *(Option(outputs=("R",), needs=(), seconds=seconds) for seconds in (1.0, 2.0)))
    solved = solve(PlacementProblem((node,), (), {}, host_seconds=5.0))
    assert (solved.choices, solved.price.seconds, solved.bound, solved.gap) == ((0,), 5.0, 5.0, 0.0)


def test_readers_of_a_use_share_a_conversion_and_what_is_saved() -> None:
    costs = {("0", "R"): ConversionCost(5.0, 7.0), ("0", "1"): ConversionCost(2.0, 3.0)}
    use = Use(node=0, conversions=costs, saved={"R": 100.0, "1": 10.0}, count=4)
    source = _node("source", Option(outputs=("0",), seconds=1.0, resident=50.0))
    whole, divided = Option(needs=("R",), transient=8.0), Option(needs=("1",), transient=6.0)
    readers = [
        _node("saves", whole, divided, reads=(Input(0, True),), count=4),
        _node("saves too", whole, divided, reads=(Input(0, True),)),
        _node("saves nothing", whole, divided, reads=(Input(0),)),
    ]
    problem = PlacementProblem((source, *readers), (use,))
    same = price(problem, (0, 0, 0, 0))
    assert (same.conversion_seconds, same.bytes_moved, same.saved, same.transient) == (
        20.0,
        28.0,
        400.0,
        16.0,
    )
    other = price(problem, (0, 1, 1, 0))
    assert (other.conversion_seconds, other.bytes_moved, other.saved, other.transient) == (
        28.0,
        40.0,
        40.0,
        14.0,
    )
    assert (other.seconds, other.memory) == (29.0, 50.0 + 40.0 + 14.0)


def test_what_an_option_saves_is_held_until_the_backward_pass_or_while_its_group_is_recomputed() -> None:
    options = Option(outputs=("R",), saved=12.0), Option(outputs=("R",), saved=8.0, seconds=1.0)
    problem = PlacementProblem(
        (_node("outside", *options), _node("inside", *options, count=4, group="blocks")),
        groups={"blocks": Group(count=4)},
    )
    keeps, again = (price(problem, (0, 1), groups) for groups in ((), ("blocks",)))
    assert (keeps.saved, keeps.recomputing, again.saved, again.recomputing) == (20.0, 0.0, 12.0, 2.0)
    assert solve(replace(problem, groups={}, nodes=problem.nodes[:1]), memory_limit=8.0).choices == (1,)


def _group(recomputed: bool | None) -> PlacementProblem:
    """Two instances of ``enter -> inner -> last``, of which the last two save what they read."""
    costs = {("R", "R"): ConversionCost(1.0, 0.0, 0.25)}
    return PlacementProblem(
        (
            _node("outside", Option(outputs=("R",))),
            *(
                _node(
                    name,
                    Option(outputs=("R",), needs=("R",), seconds=6.0, forward_seconds=2.0),
                    reads=(Input(use, use > 0),),
                    count=2,
                    group="blocks",
                )
                for use, name in enumerate(("enter", "inner", "last"))
            ),
        ),
        (
            Use(node=0, conversions=costs, saved={"R": 10.0}, count=2, enters=True),
            Use(node=1, conversions=costs, saved={"R": 100.0}, count=2),
            Use(node=2, conversions=costs, saved={"R": 200.0}, count=2),
        ),
        {"blocks": Group(count=2, recomputed=recomputed)},
    )


def test_a_recomputed_group_saves_what_enters_and_pays_its_forward_pass_again() -> None:
    kept, again = price(_group(False), (0, 0, 0, 0)), price(_group(True), (0, 0, 0, 0))
    assert (kept.compute_seconds, kept.conversion_seconds, kept.saved, kept.recomputing) == (18, 6, 600, 0)
    assert (again.compute_seconds, again.conversion_seconds, again.saved, again.recomputing) == (
        24,
        7,
        20,
        300,
    )


def test_groups_are_recomputed_only_where_memory_demands_it() -> None:
    assert solve(_group(None), memory_limit=600.0).recomputed == frozenset()
    assert solve(_group(None), memory_limit=599.0).recomputed == {"blocks"}
    with pytest.raises(InputError, match="needs the least needs 320 B"):
        solve(_group(None), memory_limit=300.0)


def test_what_enters_a_recomputed_group_is_in_the_bound() -> None:
    with pytest.raises(InputError, match="at least 20 B are needed"):
        solve(_group(True), memory_limit=10.0)


def test_too_little_memory_names_the_bound_and_what_needs_most() -> None:
    heavy = _node("layers.*.mlp", Option(resident=4 * 2**30), Option(resident=2 * 2**30))
    light = [_node(f"light {number}", Option(resident=float(number))) for number in range(6)]
    with pytest.raises(InputError) as raised:
        solve(PlacementProblem((heavy, *light)), memory_limit=2.0**30)
    text = str(raised.value)
    assert f"no division fits in {bytes_text(2**30)}" in text
    assert f"at least {bytes_text(2 * 2**30 + 15)} are needed" in text
    assert f"are states of layers.*.mlp ({bytes_text(2 * 2**30)}), states of light 5 (5 B)" in text
    assert "light 1" not in text


def test_the_proof_of_the_search_is_the_least_memory() -> None:
    """What needs little alone cannot be joined: the bound of all parts fits, the search tells that nothing does."""
    source = _node("source", Option(outputs=("0",), resident=10.0), Option(outputs=("1",), resident=90.0))
    reader = _node(
        "reader", Option(needs=("1",), resident=10.0), Option(needs=("0",), resident=80.0), reads=(Input(0),)
    )
    with pytest.raises(InputError, match="the division that needs the least needs 90 B"):
        solve(PlacementProblem((source, reader), (Use(node=0, conversions=_FREE),)), memory_limit=50.0)


def test_labels_without_a_conversion_are_refused_with_both_names() -> None:
    source, reader = (
        _node("source", Option(outputs=("P",))),
        _node("reader", Option(needs=("0",)), reads=(Input(0),)),
    )
    problem = PlacementProblem((source, reader), (Use(node=0, conversions=_FREE),))
    with pytest.raises(InputError, match="source cannot be joined to reader"):
        solve(problem)
    with pytest.raises(InputError, match="source gives P, but reader needs 0"):
        price(problem, (0, 0))


def _chain(num_nodes: int, num_options: int) -> PlacementProblem:
    """Every node reads the one before; each pair of labels has a cost of its own."""
    labels = _LABELS[:num_options]
    costs: dict[tuple[Label, Label], ConversionCost] = {
        (one, other): ConversionCost(float(1 + 4 * place + number) if one != other else 0.0)
        for place, one in enumerate(labels)
        for number, other in enumerate(labels)
    }
    nodes = [
        _node(
            f"node {number}",
            *(
                Option(outputs=(one,), needs=(one,) * bool(number), seconds=float(place))
                for place, one in enumerate(labels)
            ),
            reads=(Input(number - 1),) if number else (),
        )
        for number in range(num_nodes)
    ]
    return PlacementProblem(
        tuple(nodes), tuple(Use(node=number, conversions=costs) for number in range(num_nodes - 1))
    )


def test_the_program_has_a_column_for_each_option_and_conversion_and_no_more() -> None:
    outcome = solve(_chain(30, 3))
    # The constant 1, the options, the conversions, and the bound of the two largest peaks, which are certain here.
    assert outcome.num_columns == 1 + 30 * 3 + 29 * 9 + 1
    # One option for each node, and for each use its labels given and needed.
    assert outcome.num_rows == 30 + 29 * (3 + 3)
    assert outcome.price.seconds == 0.0


def test_fixed_and_dominated_options_cost_no_column() -> None:
    fixed = _chain(30, 1)
    assert solve(fixed).num_columns == 2
    node = fixed.nodes[0]
    slower = Option(outputs=("R",), seconds=9.0)
    assert (
        solve(
            PlacementProblem((_node(node.name, slower, *node.options), *fixed.nodes[1:]), fixed.uses)
        ).num_columns
        == 2
    )


def test_an_option_that_is_slower_but_smaller_is_no_longer_dominated_within_a_limit() -> None:
    problem = PlacementProblem(
        (_node("node", Option(seconds=1.0, resident=9.0), Option(seconds=2.0, resident=5.0)),)
    )
    assert solve(problem).choices == (0,)
    assert solve(problem, memory_limit=8.0).choices == (1,)


def test_the_search_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve(_chain(5, 3))
    assert capfd.readouterr() == ("", "")
