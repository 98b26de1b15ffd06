"""Pairs registered in the user's process are known where trials run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.pickling import describe_unpicklable, pack, unpack
from atorch_ns.engine.trial.worker import TrialWorker
from atorch_ns.method import load_registry
from opt_lib._replacements.registry import known_replacements, registered_pairs, set_registered_pairs
from tests.engine.inputs import case_inputs
from tests.engine.trials import task
from tests.opt_lib.replacements.modules import FastLinear


def test_a_trial_in_another_process_uses_the_pair(register: Callable[..., Any], tmp_path: Path) -> None:
    class Local(FastLinear):
        """Nothing that another process could import."""

    register("local", pair_cls=(nn.Linear, Local))
    strategy = ("module_replace", {"include": ["local"]})
    carried = load_registry().carried()
    with TrialWorker(
        case_inputs("mlp"), Cluster(), rendezvous=None, log_dir=tmp_path, carried=carried
    ) as worker:
        known = worker.run(task(1, strategy), lambda: False)
    assert known.status == "ok", known.reason


def test_what_is_carried_replaces_what_is_registered(register: Callable[..., Any]) -> None:
    class Local(FastLinear):
        pass

    register("local", pair_cls=(nn.Linear, Local), config={"bias": True})
    received = unpack(pack(case_inputs("mlp"), carried=load_registry().carried())).carried
    (pair,) = received["module_replace"].values()
    assert (pair.name, pair.source, pair.config) == ("local", nn.Linear, {"bias": True})
    before = registered_pairs()
    try:
        set_registered_pairs({})
        assert "local" not in known_replacements()
        load_registry().restore({**received, "a_method_that_is_absent": 1})
        assert known_replacements()["local"] is pair
    finally:
        set_registered_pairs(before)


def test_a_pair_that_cannot_be_sent_is_named(register: Callable[..., Any]) -> None:
    import threading

    lock = threading.Lock()

    def convert(old: nn.Module) -> nn.Module:
        with lock:
            return FastLinear(1, 1)

    register("locked", replaces=nn.Linear)(convert)
    reason = describe_unpicklable(case_inputs("mlp"), load_registry().carried())
    assert reason is not None
    assert "what was registered for module_replace cannot be pickled" in reason


@pytest.mark.parametrize("carried", [None, {}])
def test_nothing_carried(carried: Any) -> None:
    assert unpack(pack(case_inputs("mlp"), carried=carried)).carried == {}
