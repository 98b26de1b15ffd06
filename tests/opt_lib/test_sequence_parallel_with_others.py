"""sequence_parallel trains as one process does together with the other methods."""

from __future__ import annotations

import pytest
import torch

from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import BF16_GLOBAL_BATCH, assert_parity, compare, reference_run
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.sequence_cases import KINDS, check, cut, strategy, train


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_over_four_ranks(kind: str) -> None:
    tied, odd = get_case("tied_llama"), cut("tied_llama", 13)
    two = {"sequence": 2, "data": 2}
    check(
        4,
        [
            (tied, strategy(kind, sequence=4)),
            (get_case("hf_llama"), strategy(kind, sequence=4)),
            (tied, strategy(kind, "ddp", **two)),
            (odd, strategy(kind, "fsdp", "checkpoint", **two)),
            (odd, strategy(kind, "zero2", ("gradient_accumulation", 2), **two)),
        ],
    )


def test_with_compiled_and_recomputed_blocks() -> None:
    case = get_case("tied_llama")
    check(2, [(case, strategy(kind, ("compile", "aot_eager"), "checkpoint")) for kind in KINDS])


def test_where_layers_are_divided_too() -> None:
    axes = ("parallel_mode", ([("tensor", 2), ("sequence", 2)], None))
    ulysses, ring = (("sequence_parallel", {"kind": kind}) for kind in KINDS)
    llama, tied = get_case("hf_llama"), get_case("tied_llama")
    check(
        4,
        [(llama, [axes, "tensor_parallel", ulysses]), (tied, [axes, ring, "tensor_parallel", "checkpoint"])],
    )


def test_where_the_model_is_cut_too() -> None:
    axes = ("parallel_mode", ([("sequence", 2), ("pipeline", 2)], None))
    ulysses, ring = (("sequence_parallel", {"kind": kind}) for kind in KINDS)
    llama, tied = get_case("hf_llama"), get_case("tied_llama")
    check(
        4,
        [
            (llama, [axes, "pipeline_parallel", ring]),
            (tied, [axes, "pipeline_parallel", ulysses, "checkpoint"]),
        ],
    )


@pytest.mark.slow
def test_reduced_precision() -> None:
    """Against one process in the same precision, to the tolerances of rounding."""
    case, large = get_case("tied_llama"), {"global_batch": BF16_GLOBAL_BATCH}
    autocast = reference_run(case, autocast_dtype=torch.bfloat16, **large)
    ((half,),) = run_ranks(train, 1, args=([(case, [("half", "bf16")])], large))
    runs = [(case, strategy(kind, ("amp_native", "bf16"), "checkpoint")) for kind in KINDS]
    runs += [(case, strategy(kind, ("half", "bf16"))) for kind in KINDS]
    found, _ = run_ranks(train, 2, args=(runs, large), timeout_s=100)
    for trajectory in found[:2]:
        assert_parity(compare(autocast, trajectory), param_tol=0.15, loss_tol=1e-3)
    for trajectory in found[2:]:
        assert_parity(compare(half, trajectory), param_tol=0.5, loss_tol=1e-3)
