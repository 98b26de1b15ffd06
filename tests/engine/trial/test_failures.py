"""Failures: real messages of torch, CUDA, cuBLAS, cuDNN and NCCL that mean memory ran out; and who refused."""

from __future__ import annotations

import pytest
import torch

from atorch_ns.apply import apply_strategy
from atorch_ns.cluster import Cluster
from atorch_ns.engine.trial.failures import explain
from atorch_ns.errors import InputError, RankError
from atorch_ns.job import Job, is_out_of_memory
from atorch_ns.method import Chosen, Method, MethodConfig, Phase, Resolved
from atorch_ns.strategy import Plan, Strategy
from tests.engine.inputs import case_inputs

FULL = [
    "CUDA out of memory. Tried to allocate 7.45 GiB. GPU 0 has a total capacity of 14.56 GiB of which 3.24 GiB is "
    "free. Process 1 has 11.32 GiB memory in use. Of the allocated memory 8.40 GiB is allocated by PyTorch, and 2.80 "
    "GiB is reserved by PyTorch but unallocated.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: CUSOLVER_STATUS_ALLOC_FAILED when calling `cusolverDnCreate(handle)`",
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details)\nLast error:\nFailed to CUDA calloc 6291456 bytes",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "Triton Error [CUDA]: out of memory",
]
OTHER = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: device-side assert triggered",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes may help.",
    "mat1 and mat2 shapes cannot be multiplied (8x16 and 32x16)",
    "Connection closed by peer",
]


@pytest.mark.parametrize("text", FULL)
def test_memory_ran_out(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert explain(RuntimeError(text), applying=False).status == "out of memory"


@pytest.mark.parametrize("text", OTHER)
def test_something_else_went_wrong(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_classes_and_causes() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("whatever it says"))
    assert is_out_of_memory(MemoryError())
    wrapped = RuntimeError("the compiled block failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(ValueError("CUDA out of memory is what the user's text says"))


def test_what_torch_raises_here_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


class Picky(Method[MethodConfig]):
    """Refuses every model."""

    name = "picky"
    phase = Phase.SHARD_LAYERS

    def apply(self, job: Job, config: MethodConfig) -> None:
        raise InputError("this model will not do.")


def test_the_method_that_raises_is_named() -> None:
    resolved = Resolved((Chosen(Picky(), MethodConfig()),), Plan(), Strategy(["picky"]), ())
    with pytest.raises(InputError, match="will not do") as caught:
        apply_strategy(case_inputs("mlp"), Cluster(), resolved)
    assert caught.value.refused_by == "picky"
    failure = explain(caught.value, applying=True)
    assert (failure.status, failure.refused_by) == ("refused", "picky")


def test_what_is_no_refusal_is_nobodys() -> None:
    error = InputError("the batch is empty")
    assert explain(error, applying=True).refused_by is None
    error.refused_by = "picky"
    assert explain(error, applying=False).refused_by is None
    other = RankError("rank 0 failed")
    other.refused_by = "picky"  # it was applied while another rank refused
    assert explain(other, applying=True).refused_by is None


def test_a_failure_names_the_innermost_line_of_the_user() -> None:
    def loss(values: list[float]) -> torch.Tensor:
        return torch.stack([torch.zeros(1), torch.zeros(2)]) if values else torch.zeros(0)

    with pytest.raises(RuntimeError) as caught:
        loss([1.0])
    reason = explain(caught.value, applying=False).reason
    assert reason.startswith("RuntimeError: stack expects each tensor to be equal size")
    assert " (in loss, test_failures.py:" in reason
    assert explain(ValueError("x" * 2000), applying=False).reason == f"ValueError: {'x' * 997}..."


def test_an_error_of_this_package_is_a_refusal_only_while_the_strategy_is_applied() -> None:
    assert explain(InputError("no"), applying=True).status == "refused"
    assert explain(InputError("no"), applying=False).status == "raised"
    lost = explain(RuntimeError("Connection closed by peer [127.0.0.1]:29500"), applying=False)
    assert (lost.status, lost.secondary) == ("raised", True)
