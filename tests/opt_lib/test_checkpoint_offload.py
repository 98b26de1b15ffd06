"""Recomputation from inputs in host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.estimate import Workload, estimate
from atorch_ns.profile import profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case
from opt_lib import _recompute as _recompute_module
from opt_lib import checkpoint as module_under_test
from opt_lib._recompute import offload_saved
from opt_lib.checkpoint import ActivationCheckpointConfig

GPU = torch.device("cuda")


class Recorded(torch.autograd.graph.saved_tensors_hooks):
    """In the place of ``save_on_cpu``, which needs a GPU for pinned memory: keeps copies, and says of what."""

    packed: ClassVar[list[tuple[int, ...]]] = []
    options: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        Recorded.options.append(options)
        super().__init__(self._pack, lambda kept: kept)

    @staticmethod
    def _pack(tensor: torch.Tensor) -> torch.Tensor:
        Recorded.packed.append(tuple(tensor.shape))
        return tensor.clone()


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorded.packed, Recorded.options = [], []
    monkeypatch.setattr(_recompute_module, "save_on_cpu", Recorded)


@pytest.mark.parametrize("reentrant", [True, False])
def test_inputs_of_blocks_are_kept_and_nothing_else(reentrant: bool) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    config = ActivationCheckpointConfig(no_reentrant=not reentrant)
    run = offload_saved(module_under_test._make_recompute_function(config), GPU)
    gradients = []
    for call in (run, lambda block, x: checkpoint(block, x, use_reentrant=False)):
        x = start = torch.ones(5, 8, requires_grad=True)
        for block in blocks:
            x = call(block, x)  # type: ignore[no-untyped-call]
        x.square().sum().backward()
        gradients.append(
            [
                start.grad,
                *(p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None),
            ]
        )
        for block in blocks:
            block.zero_grad()
    assert [shape for shape in Recorded.packed if shape] == [(5, 8)] * 3
    assert all(options == {"pin_memory": True, "device_type": "cuda"} for options in Recorded.options)
    for mine, plain in zip(*gradients, strict=True):
        assert torch.equal(mine, plain)


def test_on_a_cpu_nothing_is_copied_and_a_notice_says_so() -> None:
    def function() -> None:
        pass

    assert offload_saved(function, torch.device("cpu")) is function
    with pytest.warns(UserWarning, match="offload is not used: activations are in host memory already"):
        result = accelerate_case(get_case("mlp"), [("checkpoint", {"offload": True})])
    assert any("recomputed" in row.why for row in result.report.rows)


def test_a_compiled_block_offloads_its_input() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    run = offload_saved(module_under_test._make_recompute_function(ActivationCheckpointConfig()), GPU)
    compiled = torch.compile(lambda x: run(block, x), backend="aot_eager")
    found = []
    for call in (compiled, block):
        block.zero_grad()
        call(torch.ones(5, 8, requires_grad=True)).square().sum().backward()
        found.append([p.grad.clone() for p in block.parameters() if p.grad is not None])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)


def test_the_estimate_trades_memory_for_transfers() -> None:
    case = get_case("tied_llama")
    profile = profile_model(
        case.build(),
        case.make_batch(4, 0),
        lambda model, batch: case.loss_func(batch, case.call(model, batch)),
        find_dims,
        make_optimizer=torch.optim.AdamW,
    )
    assert profile.trace is not None
    workload = Workload(global_batch=512, num_tokens=profile.trace.num_tokens)
    plain = Plan().changed(recomputation={"kind": "blocks"})
    gpu = cluster_from_spec("1xH100-80GB")
    kept, moved = (
        estimate(plan, profile, gpu, workload)
        for plan in (plain, plain.changed(recomputation={"offload_activations": True}))
    )
    assert moved.memory.activations < kept.memory.activations
    assert moved.time.offload > kept.time.offload == 0
