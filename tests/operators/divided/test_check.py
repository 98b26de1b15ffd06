"""The check of a division finds mistakes of fourteen kinds, planted one by one, and names the operator."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.tensor import Shard

from atorch_ns.errors import InputError
from atorch_ns.operators import OperatorPlan, Shallow, capture_shallow, division_of, random_plan
from atorch_ns.operators.divided import check as check_module
from atorch_ns.operators.divided.check import check_division
from atorch_ns.operators.divided.divide import OperatorDivision, Piece, pieces
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.sharding import collectives
from tests.operators.networks import network

CPU = torch.device("cpu")
DEGREE = 2


@functools.cache
def captured(name: str) -> tuple[Shallow, Any, list[torch.Tensor]]:
    model, batch = network(name)
    return capture_shallow(copy.deepcopy(model), (), batch, device=CPU), model, list(batch.values())


def division(name: str, plan: OperatorPlan) -> OperatorDivision:
    return division_of(plan, captured(name)[0].graph, DEGREE)


def check(name: str, made: OperatorDivision, run: Sequence[Piece] | None = None) -> None:
    _, model, tensors = captured(name)
    check_division(made, model, tensors, CPU, run=run)


@pytest.mark.parametrize(
    "name", ["llama", "t5", "mixtral", "gpt2", "opt", "qwen2_moe", "bert", "vit", "whisper", "by_hand"]
)
def test_random_plans_are_right(name: str) -> None:
    for seed in range(4):
        plan = random_plan(captured(name)[0].graph, DEGREE, seed)
        assert len(plan.operators) > 10
        check(name, division(name, plan))


class Frozen(torch.nn.Module):
    """A table without gradients, as of sinusoids, and integers that become floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4)
        self.table.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]).float().unsqueeze(-1)
        return self.out(x + self.table.weight + places)


class Alias(torch.nn.Module):
    """A cast that returns its argument, which others use as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(y.float() * 2) + y.sum(-1, keepdim=True)


class Recurrent(torch.nn.Module):
    """An operator with several results that may draw random numbers, and draws none."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Complex(torch.nn.Module):
    """Complex numbers, of which no table speaks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.weight), n=4)
        return found


class Counted(torch.nn.Module):
    """A number that is read off a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * (x > 0).sum().item()


@torch.library.custom_op("atorch_ns_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Both halves of the columns, with the number of rows between them."""
    return x[..., :2].clone(), len(x), x[..., 2:].clone()


halves.register_fake(lambda x: (x.new_empty(*x.shape[:-1], 2), x.shape[0], x.new_empty(*x.shape[:-1], 2)))
halves.register_autograd(lambda _, first, count, second: torch.cat([first, second], -1))


class Halves(torch.nn.Module):
    """An operator that gives a number between two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, count, second = torch.ops.atorch_ns_tests.halves(self.out(x))
        return first * count + second


class Cast(torch.nn.Module):
    """An autocast region, in which results are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = self.down(self.up(x).relu())
        return found.float()


def test_what_fp32_rounds_is_judged_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    whole = check_module._check_in
    monkeypatch.setattr(check_module, "TOLERANCE", 1e-12)
    monkeypatch.setattr(
        check_module, "_check_in", lambda dtype, *rest: (judged.append(dtype), whole(dtype, *rest))
    )
    check("llama", division("llama", random_plan(captured("llama")[0].graph, DEGREE, 0)))
    assert judged == [torch.float32, torch.float64]


@pytest.mark.parametrize("kind", [Frozen, Alias, Recurrent, Complex, Counted, Halves, Cast])
def test_random_plans_of_odd_operators_are_right(kind: type[torch.nn.Module]) -> None:
    model, x = kind(), torch.randn(4, 8, 4)
    shallow = capture_shallow(model, (x,), {}, device=CPU)
    for seed in range(8):
        made = division_of(random_plan(shallow.graph, DEGREE, seed), shallow.graph, DEGREE)
        check_division(made, model, [x], CPU)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_fifty_random_plans_are_right(name: str, degree: int) -> None:
    shallow, model, tensors = captured(name)
    for seed in range(50):
        found = division_of(random_plan(shallow.graph, degree, seed), shallow.graph, degree)
        check_division(found, model, tensors, CPU)


def divided_pieces(seed: int) -> tuple[OperatorDivision, list[Piece]]:
    """A division and its pieces, each with a body of its own that may be changed."""
    made = division("llama", random_plan(captured("llama")[0].graph, DEGREE, seed))
    own = [replace(piece, body=copy.deepcopy(piece.body)) for piece in pieces(made)]
    return made, own


def calls_of(run: Sequence[Piece], target: Callable[..., Any]) -> Iterator[tuple[Piece, fx.Node]]:
    for piece in run:
        for node in piece.body.graph.nodes:
            if node.op == "call_function" and node.target is target and node.users:
                yield piece, node


def without(node: fx.Node) -> None:
    """The value goes on as it is."""
    node.target, node.args = _same, (node.args[0],)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def instead(other: Callable[..., Any], *dims: int) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.target, node.args = other, (node.args[0], *dims, node.args[-1])

    return change


def _twice(x: torch.Tensor, group: Any) -> torch.Tensor:
    return collectives.reduce_from(collectives.reduce_from(x, group), group)


def _of_next(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return collectives.scatter_to(torch.roll(x, x.size(dim) // group.size(), dim), dim, group)


def _shifted(x: torch.Tensor, group: Any) -> torch.Tensor:
    return collectives.copy_to(x, group) + float(group.rank())


def _means(x: torch.Tensor, group: Any) -> torch.Tensor:
    return collectives.reduce_from(x, group) / group.size()


def _reversed(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return collectives.gather_from(x, dim, group).flip(dim)


def _unsummed(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    return collectives.scatter_to(x, dim, group)


def dims_kept(other: Callable[..., Any]) -> Callable[[fx.Node], None]:
    def change(node: fx.Node) -> None:
        node.target = other

    return change


def other_dim(node: fx.Node) -> None:
    x, dim, group = node.args
    node.args = (x, 1 if dim != 1 else 0, group)


def swapped(node: fx.Node) -> None:
    x, split, join, group = node.args
    node.args = (x, join, split, group)


C = collectives
MISTAKES = {
    "a missing all-reduce": (C.reduce_from, without),
    "a missing all-reduce of gradients": (C.copy_to, without),
    "an all-reduce twice": (C.reduce_from, dims_kept(_twice)),
    "a mean in place of a sum": (C.reduce_from, dims_kept(_means)),
    "an all-reduce of gradients in place of one of values": (C.reduce_from, dims_kept(C.copy_to)),
    "an all-gather in place of an all-reduce": (C.reduce_from, instead(C.gather_from, 0)),
    "a constant that differs by rank": (C.copy_to, dims_kept(_shifted)),
    "a piece of another rank": (C.scatter_to, dims_kept(_of_next)),
    "a piece along another dim": (C.scatter_to, other_dim),
    "a missing all-gather": (C.gather_from, without),
    "pieces joined in another order": (C.gather_from, dims_kept(_reversed)),
    "gradients that are not summed": (C.all_gather, dims_kept(C.gather_from)),
    "a reduce-scatter that does not sum": (C.reduce_scatter, dims_kept(_unsummed)),
    "an exchange the other way": (C.all_to_all, swapped),
    "a summand of every rank": (C.summand_of, without),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_and_named(mistake: str) -> None:
    target, change = MISTAKES[mistake]
    planted = 0
    for seed in range(8):
        made, run = divided_pieces(seed)
        found = [(piece, node) for piece, node in calls_of(run, target) if _matters(piece, node)][:1]
        for piece, node in found:
            near = _near(piece, node)
            change(node)
            piece.body.recompile()
            with pytest.raises(InputError, match="is divided wrongly") as caught:
                check("llama", made, run)
            planted += 1
            assert any(key in str(caught.value) for key in near), (str(caught.value), near)
        if planted == 3:
            return
    assert planted, f"no plan has {target.__name__}"


def _matters(piece: Piece, node: fx.Node) -> bool:
    """Whether operators that gradients flow through, and to which the order matters, take the value as it is converted."""
    return any(
        one.name not in ("mean", "sum")
        and one.call.outputs[0].requires_grad
        and all(spec.requires_grad for spec in one.call.tensors)
        for one in _users(piece, node)
    )


def _users(piece: Piece, node: fx.Node) -> list[Any]:
    numbers = {other: number for number, other in enumerate(piece.body.graph.nodes)}
    found, left = [], list(node.users)
    while left:
        user = left.pop()
        one = piece.calls.get(numbers[user])
        if one is not None:
            found.append(one)
        else:
            left += list(user.users)
    return found


def _near(piece: Piece, node: fx.Node) -> set[str]:
    """Keys of the operators before and after a node: those that read it, and the one whose result it converts."""
    numbers = {other: number for number, other in enumerate(piece.body.graph.nodes)}
    source: Any = node
    while numbers[source] not in piece.calls and isinstance(source.args, tuple) and source.args:
        source = source.args[0]
    before = piece.calls.get(numbers[source])
    keys = {one.key for one in _users(piece, node)} | ({before.key} if before else set())
    if before is None:  # the value of another segment
        graph = captured("llama")[0].graph
        keys |= {
            one.key
            for one in graph.operators
            if one.name in ("add", "to", "embedding", "cat", "expand", "dropout")
        }
    return keys


def test_a_rule_that_does_not_hold_is_found() -> None:
    """As those that were guessed by trial: softmax along the dim that it looks at."""
    made = division("by_hand", OperatorPlan())
    (one,) = [one for one in made.graph.operators if one.name == "layer_norm"]
    wrong = Rule((Shard(2),), (Shard(2), Shard(0), Shard(0)))
    with pytest.raises(InputError, match=r"norm/layer_norm#0 .* is divided wrongly"):
        check("by_hand", replace(made, rules={**made.rules, one: wrong}))


def test_a_gradient_that_nobody_sums_is_found() -> None:
    made = division("by_hand", random_plan(captured("by_hand")[0].graph, DEGREE, 3))
    assert made.summed
    bare = replace(made, summed=frozenset())
    run = pieces(made)  # whose conversions leave the sum to the end
    with pytest.raises(InputError, match="gradient of"):
        check("by_hand", bare, run)


def test_a_size_that_is_not_divided_is_found() -> None:
    for seed in range(20):
        made, run = divided_pieces(seed)
        for _, node in calls_of(run, torch.ops.aten.reshape.default):
            sizes = list(node.args[1])  # type: ignore[arg-type]
            halves = [
                place
                for place, size in enumerate(sizes)
                if isinstance(size, fx.Node) and size.target is operator.floordiv
            ]
            if halves:
                sizes[halves[0]] = sizes[halves[0]].args[0]
                node.args = (node.args[0], sizes)
                with pytest.raises(InputError, match="fails on pieces"):
                    check("llama", made, run)
                return
    raise AssertionError("no plan divides a size")
