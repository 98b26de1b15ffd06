"""What leaves the device, and peaks against their prediction, on a model large enough for both to show."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from atorch_ns import auto_accelerate
from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.estimate import Workload, estimate
from atorch_ns.job import StepOptimizer, agreement, is_out_of_memory, limit_memory
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import profile_model
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Strategy
from benchmarks._llama import Llama, next_token_loss, random_batch

pytestmark = pytest.mark.gpu

MODEL = Llama(vocab_size=8192, width=1024, hidden=2752, num_layers=8, num_heads=8)
BATCH, TOKENS = 8, 512
STRATEGIES: dict[str, list[Any]] = {
    "nothing": [],
    "bf16": [("amp_native", "bf16")],
    "half": [("half", "bf16")],
    "checkpoint": ["checkpoint"],
    "checkpoint, bf16": ["checkpoint", ("amp_native", "bf16")],
    "checkpoint, offload": [("checkpoint", {"offload": True})],
    "optimizer_offload": ["optimizer_offload"],
}


def _result(strategy: list[Any], model: Llama = MODEL) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result, _ = auto_accelerate(
            model.build(),
            torch.optim.AdamW,
            loss_func=next_token_loss,
            model_input_format="unpack_dict",
            optim_args={"lr": 1e-4},
            load_strategy=strategy,
        )
    return result


def _peak(strategy: list[Any], model: Llama = MODEL) -> int:
    """Bytes at the worst moment of the third step, what was there before taken off."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    result = _result(strategy, model)
    for seed in range(3):
        if seed == 2:
            torch.cuda.reset_peak_memory_stats()
        result.train_step(random_batch(model, BATCH, TOKENS, seed=seed))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _predicted(strategy: list[Any]) -> float:
    cluster = Cluster.detect()
    profile = profile_model(
        MODEL.build("meta"),
        random_batch(MODEL, BATCH, TOKENS, seed=0),
        lambda model, batch: next_token_loss(batch, model(**batch)),
        find_dims,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        device="cuda",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = resolve(Strategy.load(strategy), cluster, load_registry(), profile=profile).plan
    priced = cluster if cluster.hardware is not None else cluster_from_spec("1xH100-80GB")
    return estimate(plan, profile, priced, Workload(global_batch=BATCH, num_tokens=TOKENS)).allocated_bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_predicted_is_measured(name: str) -> None:
    assert _predicted(STRATEGIES[name]) == pytest.approx(_peak(STRATEGIES[name]), rel=0.05)


def test_offloading_takes_less() -> None:
    # With so many words the worst moment is in the loss, when the inputs of all blocks are kept.
    wordy = replace(MODEL, vocab_size=8 * MODEL.vocab_size)
    kept = MODEL.num_layers * BATCH * TOKENS * MODEL.width * 4
    offloaded = _peak([("checkpoint", {"offload": True})], wordy)
    assert offloaded < _peak(["checkpoint"], wordy) - kept / 4  # half of it on an H200
    num_parameters = MODEL.num_parameters
    assert (
        _peak(["optimizer_offload"]) < _peak([]) - 7 * num_parameters
    )  # two fp32 states, less what is rounded up


def test_offloaded_weights_are_pinned() -> None:
    result = _result(["optimizer_offload"])
    assert isinstance(result.optim, StepOptimizer)
    assert result.optim.masters is not None
    for parameter, master in result.optim.masters.pairs():
        assert parameter.is_cuda
        assert master.is_pinned()


def test_out_of_memory_is_recognised() -> None:
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2 * free, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)


def test_a_limit_is_enforced() -> None:
    device, kept = torch.device("cuda"), torch.empty(2**26, dtype=torch.uint8, device="cuda")
    with limit_memory(2**28, device):
        inside = torch.empty(2**27, dtype=torch.uint8, device=device)
    message = r"of the limit of 128 MiB .* 256\.00 MiB more"
    with pytest.raises(MemoryError, match=message) as caught, limit_memory(2**27, device):
        torch.empty(2**28, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    assert torch.empty(2**28, dtype=torch.uint8, device=device).nbytes > inside.nbytes > kept.nbytes


def test_checksums_of_weights_and_of_options_travel_together() -> None:
    weights, options = torch.ones((), device="cuda", dtype=torch.int64), torch.ones((), dtype=torch.int64)
    assert agreement._on_cpu([options, weights], 0).tolist() == [1, 1]
