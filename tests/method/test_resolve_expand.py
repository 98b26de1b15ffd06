"""Methods that stand for other methods."""

from __future__ import annotations

from typing import Any, final

import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.errors import Problem, StrategyError
from atorch_ns.job import Job
from atorch_ns.method import Expansion, Method, MethodConfig, Phase, Registry, Resolved, resolve
from atorch_ns.strategy import Plan, Strategy

CLUSTER = Cluster(torch="2.13.0")


class _Config(MethodConfig):
    """Settings."""

    steps: tuple[tuple[Any, Any], ...] = ()
    """What it stands for."""
    alone: bool = False
    """Whether it stands for itself."""
    refused: bool = False
    """Whether it finds something wrong."""
    needs_micro_batches: int = 1
    """What another method must have decided."""


@final
class Many(Method[_Config]):
    """Stands for the methods in its config."""

    name = "many"
    phase = Phase.STEP
    Config = _Config

    def expand(self, config: _Config, others: Plan, cluster: Cluster) -> Expansion | None:
        """What the config says."""
        if config.refused or others.num_micro_batches < config.needs_micro_batches:
            raise StrategyError([Problem(message="not so", key="refused"), Problem(message="nor so")])
        if config.alone:
            return None
        return Expansion(config.steps, ("one is left out",))

    def apply(self, job: Job, config: _Config) -> None:
        """Nothing."""


class _Number(MethodConfig):
    """Settings."""

    number: int = 1
    """A number."""


def _plain(method_name: str, of: Phase) -> type[Method[_Number]]:
    @final
    class Plain(Method[_Number]):
        """Does one thing."""

        name = method_name
        phase = of
        Config = _Number

        def plan(self, plan: Plan, config: _Number) -> Plan:
            """Its number is that of micro-batches."""
            return Plan(num_micro_batches=config.number)

        def apply(self, job: Job, config: _Number) -> None:
            """Nothing."""

    return Plain


REGISTRY = Registry([Many, _plain("first", Phase.MESH), _plain("second", Phase.CAST)])


def _resolve(*steps: Any) -> Resolved:
    return resolve(Strategy(steps), CLUSTER, REGISTRY)


def test_what_it_stands_for_is_there_in_order_and_is_saved() -> None:
    resolved = _resolve(("many", {"steps": [["second", {"number": 3}], ["first", None]]}))
    assert [item.method.name for item in resolved.chosen] == ["first", "second"]
    assert resolved.plan.num_micro_batches == 3
    assert resolved.strategy.names == ("first", "second")
    assert resolved.strategy["second"] == {"number": 3}
    again = resolve(resolved.strategy, CLUSTER, REGISTRY)
    assert (again.strategy, again.plan, again.notes) == (resolved.strategy, resolved.plan, ())


def test_it_is_said() -> None:
    notes = _resolve(("many", {"steps": [["second", None]]})).notes
    assert [(note.kind, note.method, note.text) for note in notes] == [
        ("expanded", "many", "many stands for second"),
        ("left out", "many", "one is left out"),
    ]


def test_it_may_stand_for_itself() -> None:
    resolved = _resolve(("many", {"alone": True}))
    assert resolved.strategy.names == ("many",)
    assert not resolved.notes


def test_it_sees_what_the_others_decide() -> None:
    _resolve(("many", {"needs_micro_batches": 4}), ("first", {"number": 4}))
    with pytest.raises(StrategyError):
        _resolve(("many", {"needs_micro_batches": 4}), ("first", {"number": 3}))


@pytest.mark.parametrize(
    ("config", "others", "words"),
    [
        ({"refused": True}, [], ["many.refused: not so", "many: nor so"]),
        ({"steps": [["no_such", None]]}, [], ["unknown method 'no_such'"]),
        ({"steps": [["first", {"numbr": 1}]]}, [], ["first.numbr: unknown key. Did you mean 'number'?"]),
        ({"steps": [["first", None], ["first", None]]}, [], ["first: named twice"]),
        ({"steps": [["first", None]]}, ["first"], ["first: given twice", "by many"]),
    ],
)
def test_mistakes(config: dict[str, Any], others: list[str], words: list[str]) -> None:
    with pytest.raises(StrategyError) as caught:
        _resolve(("many", config), *others)
    for text in words:
        assert text in str(caught.value)
