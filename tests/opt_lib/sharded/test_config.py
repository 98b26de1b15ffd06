"""Settings of fsdp and zero2: those of FullyShardedDataParallel are accepted, trained by FSDP2, and noted."""

from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.method import Resolved, load_registry, resolve
from atorch_ns.strategy import Strategy
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import (
    Runs,
    Scenario,
    accumulating_step,
    assert_equals_one_process,
    assert_norms,
    bad_step,
    norms,
    run_scenarios,
)

V1 = {"version": 1}
FP16 = ("amp_native", {"dtype": "fp16", "init_scale": 256.0})
ONLY_IN_FSDP1 = {
    **V1,
    "backward_prefetch": "BACKWARD_POST",
    "limit_all_gathers": False,
    "use_orig_params": False,
    "device_id": 0,
    "mixed_precision": {"param_dtype": "fp32", "buffer_dtype": "fp32"},
}
"""Each without a counterpart in FSDP2."""

MEANT_BY_BOTH = {
    **V1,
    "sharding_strategy": "SHARD_GRAD_OP",
    "forward_prefetch": True,
    "sync_module_states": False,
    "cpu_offload": True,
    "atorch_size_based_min_num_params": 1000,
    "atorch_ignored_cls": "RMSNorm",
}

SCENARIOS = {
    "zero2": Scenario("mlp", [("zero2", V1)]),
    "only in FSDP1": Scenario("tied_llama", [("fsdp", ONLY_IN_FSDP1)]),
    "meant by both": Scenario("tied_llama", [("fsdp", MEANT_BY_BOTH)], {"step": accumulating_step}),
}


def _resolved(name: str, config: dict[str, Any]) -> Resolved:
    cluster = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")
    return resolve(Strategy([(name, config)]), cluster, load_registry())


def _left_out(resolved: Resolved) -> list[str]:
    return [note.text for note in resolved.notes if note.kind == "left out"]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return run_scenarios(SCENARIOS, 2)


@pytest.mark.filterwarnings("ignore:.*left out.*", "ignore:.*FSDP2.*")
@pytest.mark.parametrize("name", SCENARIOS)
def test_version_1_trains_as_one_process(name: str, runs: Runs) -> None:
    assert_equals_one_process(SCENARIOS[name], name, runs)


@pytest.mark.parametrize("name", ["fsdp", "zero2"])
def test_version_1_is_version_2_and_the_report_says_so(name: str) -> None:
    old, new = _resolved(name, V1), _resolved(name, {})
    assert old.plan == new.plan
    assert _left_out(new) == []
    (text,) = _left_out(old)
    assert "version=1" in text
    assert "deprecated" in text
    assert "fully_shard (FSDP2)" in text


def test_what_only_fsdp1_knows_is_accepted_and_each_key_is_noted_with_what_fsdp2_does() -> None:
    texts = _left_out(_resolved("fsdp", ONLY_IN_FSDP1))
    keys = (
        "version",
        "backward_prefetch",
        "limit_all_gathers",
        "use_orig_params",
        "buffer_dtype",
        "device_id",
    )
    assert len(texts) == len(keys)
    for key, text in zip(keys, texts, strict=True):
        assert key in text
    assert _left_out(_resolved("fsdp", MEANT_BY_BOTH)) == _left_out(_resolved("fsdp", V1))


@pytest.mark.parametrize("other", [("half", "bf16"), ("compile", "eager")], ids=["half", "compile"])
def test_version_1_stands_with_what_version_2_stands_with(other: Any) -> None:
    cluster = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")
    for name in ("fsdp", "zero2"):
        resolve(Strategy([(name, V1), other]), cluster, load_registry())


def test_the_norm_is_that_of_one_process_and_clipping_takes_effect() -> None:
    for rank in run_ranks(norms, 2, args=(["fsdp"],)):
        assert_norms(rank)


def _bad_steps() -> list[Any]:
    skipping = ("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True})
    return [bad_step(["fsdp", FP16]), bad_step(["fsdp", skipping])]


def test_all_ranks_skip_a_step_that_one_cannot_take() -> None:
    assert run_ranks(_bad_steps, 2) == [[(True, True, False, True)] * 2] * 2
