"""Neighbouring blocks recomputed as one: the same training, fewer inputs kept, and a refusal where they are no chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from atorch_ns import auto_accelerate
from atorch_ns.errors import AtorchError, StepError
from atorch_ns.job import Result
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case, accelerated_run, assert_parity, compare, reference_run
from atorch_ns.testing.workers import run_ranks


class Block(nn.Module):
    """Gives a tensor or, as transformers' once did, a tuple of one."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.in_tuple = in_tuple
        self.num_calls = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        self.num_calls += 1
        out = x + self.drop(torch.tanh(self.norm(self.layer(x))))
        out = out if scale is None else out * scale
        return (out, None) if self.in_tuple else out


class Net(nn.Module):
    """Blocks in a chain, or with something between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.how = how
        self.blocks = nn.ModuleList(Block(how == "tuples") for _ in range(5))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((8,), 1.1)
        between = []
        for place, block in enumerate(self.blocks[: -1 if self.how == "last skipped" else None]):
            if self.how == "tuples":
                x = block(x)[0]
            elif self.how == "residual outside":
                x = x + block(x)
            elif self.how == "other arguments":
                x = block(x, scale=scale * place)
            else:
                x = block(x, scale=scale)
            between.append(x)
        if self.how == "all results":
            x = x + between[0]
        out: Tensor = self.last(x)
        return out


def _job(how: str, config: Any) -> Result:
    model = Net(how)
    _, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        loss_func=lambda batch, out: out.square().mean(),
        optim_args={"lr": 0.1},
        load_strategy=[] if config is None else [("checkpoint", config)],
    )
    assert result is not None
    return result


@pytest.mark.parametrize("how", ["chain", "tuples"])
@pytest.mark.parametrize("chunk", [2, 5])
def test_chunks_train_as_without_recomputation(how: str, chunk: int) -> None:
    plain, chunked = _job(how, None), _job(how, {"chunk": chunk})
    for step in range(3):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        losses = []
        for result in (plain, chunked):
            torch.manual_seed(step)  # the same dropout
            losses.append(float(result.train_step(batch)))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert float(plain.train_step.evaluate(batch)) == pytest.approx(
            float(chunked.train_step.evaluate(batch)), rel=1e-6
        )
    for one, other in zip(
        plain.model.state_dict().values(), chunked.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other)
    calls = (
        [block.num_calls for block in plain.model.blocks],
        [part._checkpoint_wrapped_module.num_calls for part in chunked.model.blocks],
    )
    assert calls == ([6] * 5, [9] * 5)  # a forward pass, its recomputation, and an evaluation


def _num_kept(config: Any) -> int:
    """Results of blocks whose memory is there after the forward pass."""
    result = _job("chain", config)
    results: list[StorageWeakRef] = []
    for part in result.model.blocks:
        inner = part._checkpoint_wrapped_module
        inner.register_forward_hook(lambda *given: results.append(StorageWeakRef(given[2].untyped_storage())))
    loss = result.model(torch.randn(64, 8)).sum()
    found = sum(not one.expired() for one in results)
    loss.backward()
    return found


def test_chunks_keep_the_input_of_the_first_block_alone() -> None:
    assert [_num_kept({"chunk": size}) for size in (1, 2, 5)] == [5, 3, 1]


@pytest.mark.parametrize("how", ["residual outside", "other arguments"])
def test_blocks_that_are_no_chain_are_refused(how: str) -> None:
    with pytest.raises(StepError, match="chunk=2 recomputes neighbouring blocks as one"):
        _job(how, {"chunk": 2}).train_step(torch.randn(6, 8))


@pytest.mark.parametrize(("how", "size"), [("all results", 2), ("last skipped", 5)])
def test_code_that_uses_a_result_between_is_noticed_where_it_has_a_gradient(how: str, size: int) -> None:
    x, job = torch.randn(6, 8), _job(how, {"chunk": size})
    plain = _job(how, None).train_step.evaluate(x)
    torch.testing.assert_close(job.train_step.evaluate(x), plain)
    with pytest.raises(StepError, match=f"chunk={size} recomputes neighbouring blocks as one"):
        job.train_step(x)


PIPELINE = [("parallel_mode", ([("pipeline", 2)], None)), ("checkpoint", {"chunk": 2})]
STRATEGIES: list[list[Any]] = [
    ["ddp", ("checkpoint", {"chunk": 2})],
    ["zero1", ("checkpoint", {"chunk": 3})],
    PIPELINE,
]


def _runs(name: str) -> list[Any]:
    return [accelerated_run(get_case(name), strategy) for strategy in STRATEGIES]


@pytest.mark.parametrize("name", ["hf_llama", "tied_llama"])
def test_models_train_in_chunks_as_in_one_process(name: str) -> None:
    reference = reference_run(get_case(name))
    for rank in run_ranks(_runs, 2, args=(name,), timeout_s=110):
        for run in rank:
            assert_parity(compare(reference, run))


def _refused() -> list[str]:
    texts = []
    for strategy in (["fsdp"], [("compile", {"backend": "eager"})]):
        try:
            accelerate_case(get_case("tied_llama"), [*strategy, ("checkpoint", {"chunk": 2})])
        except AtorchError as error:
            texts.append(str(error))
    return texts


def test_blocks_that_are_called_one_by_one_are_refused() -> None:
    for gathered, compiled in run_ranks(_refused, 2, timeout_s=60):
        assert "gathered when it is called" in gathered
        assert "compiled one by one" in compiled
