"""The built-in methods pass the suite that third parties are given."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from atorch_ns.method import Method
from atorch_ns.testing import BF16_GLOBAL_BATCH
from atorch_ns.testing.conformance import MethodConformance
from atorch_ns.testing.networks import DecoderBlock, ResidualBlock
from opt_lib.amp_native import AmpNative
from opt_lib.checkpoint import Checkpoint
from opt_lib.compile import Compile
from opt_lib.ddp import Ddp
from opt_lib.fsdp import Fsdp
from opt_lib.gradient_accumulation import GradientAccumulation
from opt_lib.half import Half
from opt_lib.module_replace import ModuleReplace
from opt_lib.parallel_mode import ParallelMode
from opt_lib.sequence_parallel import SequenceParallel
from opt_lib.tensor_parallel import TensorParallel
from opt_lib.zero1 import Zero1
from opt_lib.zero2 import Zero2


class TestParallelMode(MethodConformance):
    method = ParallelMode
    configs = (None, [("data", 2)], ([("data", 2)], [1, 0]), [("zero", 2), ("data", 1)])
    bad_configs = ((3, None), ({"axis": []}, "axis"), ([("dta", 2)], "axes"))
    cases = ("mlp",)


class TestModuleReplace(MethodConformance):
    method = ModuleReplace
    configs = (None, ("fused_rms_norm",), {"exclude": ["sdpa_attention"]})
    bad_configs = (
        (("fused_rms",), "include"),
        ({"exclude": ["no_such"]}, "exclude"),
        ({"includes": []}, "includes"),
    )
    cases = ("mlp", "hf_llama")


class TestCheckpoint(MethodConformance):
    method = Checkpoint
    configs = (None, ("*blocks.*",), {"no_reentrant": False, "every_n": 2})
    bad_configs = (
        (("NoSuchBlock",), "wrap_class"),
        ({"every_n": 0}, "every_n"),
        ({"save_operators": ["aten.no_such"]}, "save_operators"),
        ({"reentrant": True}, "reentrant"),
    )
    cases = ("mlp",)


class TestGradientAccumulation(MethodConformance):
    method = GradientAccumulation
    configs = (None, 2, {"num_micro_batches": 4})
    bad_configs = ((0, "num_micro_batches"), ({"num_micro_batch": 2}, "num_micro_batch"))
    cases = ("mlp",)


class TestDdp(MethodConformance):
    method = Ddp
    bad_configs = (({"no_such": 1}, "no_such"),)
    cases = ("mlp",)


class TestZero1(MethodConformance):
    method = Zero1
    bad_configs = (({"use_ds_zero": "perhaps"}, "use_ds_zero"),)
    cases = ("mlp",)


class TestZero2(MethodConformance):
    method = Zero2
    configs = (None, {"atorch_wrap_cls": (ResidualBlock,)})
    bad_configs = (({"atorch_wrap_cls": "NoSuchBlock"}, "atorch_wrap_cls"),)
    cases = ("mlp",)


class TestFsdp(MethodConformance):
    method = Fsdp
    configs = (None, {"atorch_wrap_cls": (DecoderBlock,)})
    bad_configs = (
        ({"atorch_wrap_cls": ("NoSuchBlock",)}, "atorch_wrap_cls"),
        ({"forward_prefetching": True}, "forward_prefetching"),
    )
    cases = ("tied_llama",)


class TestAmpNative(MethodConformance):
    method = AmpNative
    configs = ("bf16", {"dtype": torch.bfloat16, "skip_if_nonfinite": True})
    bad_configs = (("bf61", "dtype"), ("fp32", "dtype"), ({"init_scale": 0}, "init_scale"))
    cases = ("mlp",)
    global_batch = BF16_GLOBAL_BATCH
    reference: ClassVar = {"autocast_dtype": torch.bfloat16}
    param_tol = 0.15
    loss_tol = 1e-3


class TestHalf(MethodConformance):
    """fp32 master weights; compared with plain fp32, so that only a lost gradient is out of tolerance."""

    method = Half
    configs = (None, {"dtype": "bf16", "master_weights": True})
    bad_configs = (("fp8", "dtype"), ({"master_weights": False}, None))
    cases = ("mlp",)
    global_batch = BF16_GLOBAL_BATCH
    param_tol = 0.5
    loss_tol = 2e-2


class TestCompile(MethodConformance):
    method = Compile
    configs = ("aot_eager", {"backend": "eager", "fullgraph": True})
    bad_configs = (("no_such_backend", "backend"), ({"mode": "fastest"}, "mode"))
    cases = ("mlp",)


@pytest.mark.processes
@pytest.mark.parametrize("call", [1, 200, 2000, None])
@pytest.mark.parametrize(("axis", "kind"), [("tensor", TensorParallel), ("sequence", SequenceParallel)])
def test_self_tests_that_fail_on_one_rank_end_all(
    axis: str, kind: type[Method[Any]], call: int | None
) -> None:
    """Most calls of ``apply`` are those of self-tests."""

    class Divided(MethodConformance):
        method = kind
        partners = (("parallel_mode", [(axis, 2)]),)
        cases = ("hf_llama",)
        failing_rank = 0 if axis == "tensor" else -1  # the first one finds the plan for all

    Divided().test_a_failure_on_one_rank_ends_all_with_its_cause(call)
