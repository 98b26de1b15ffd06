"""Code between blocks sees whole hidden states under sequence_parallel, and its weights get whole gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.errors import InputError
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import (
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
    whole_parameters,
)
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.sequence_cases import check, strategy
from tests.sharding.sequence.blocks import WIDTH, FlagBlock

VOCAB = 64


class Plain(nn.Module):
    """Four blocks; subclasses see what is between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(FlagBlock() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            h = self.between(block(h), index)
        out: Tensor = self.head(self.norm(h))
        return out

    def between(self, h: Tensor, index: int) -> Tensor:
        return h


class RootParameter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.bias = nn.Parameter(torch.linspace(-0.1, 0.1, WIDTH))

    def between(self, h: Tensor, index: int) -> Tensor:
        return h * self.scale + self.bias if index < 2 else h


class Mean(Plain):
    def between(self, h: Tensor, index: int) -> Tensor:
        return h + h.mean(1, keepdim=True)


class Item(Plain):
    def between(self, h: Tensor, index: int) -> Tensor:
        return h * 1.5 if h[:, : h.size(1) // 2].mean().item() > h.mean().item() else h * 0.7


class Tied(Plain):
    """The embedding is the head and a memory between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def between(self, h: Tensor, index: int) -> Tensor:
        return h + F.softmax(self.head(h), -1) @ self.embed.weight if index == 1 else h


class BlockWeight(Plain):
    """A block's weight is used between blocks as well."""

    def between(self, h: Tensor, index: int) -> Tensor:
        return h + F.linear(h, self.blocks[0].out.weight) if index == 1 else h


class Early(Plain):
    """An early result is used late, and in training alone."""

    def between(self, h: Tensor, index: int) -> Tensor:
        if index == 0:
            self.early = h
        return h + self.early.flip(1) if index == 2 and self.training else h


class Counting(Plain):
    """Counts the tokens that it is trained on, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def between(self, h: Tensor, index: int) -> Tensor:
        if self.training and index == 1:
            self.seen += h[..., 0].numel()
        return h


class Aside(Plain):
    """A block keeps a value that the model uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_forward_hook(
            lambda block, args, out: setattr(block, "kept", out.square().mean())
        )

    def between(self, h: Tensor, index: int) -> Tensor:
        return h + self.blocks[1].kept if index == 2 else h


class Penalised(Plain):
    """Its loss has a penalty on the weights of its blocks."""


class PenalisedLoss:
    """Sees the model that was built last."""

    model: nn.Module

    def build(self) -> nn.Module:
        self.model = Penalised()
        return self.model

    def __call__(self, batch: Tensor, output: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for name, p in self.model.named_parameters() if "out" in name)
        return get_case("tied_llama").loss_func(batch, output) + 0.1 * penalty


def _case(build: Callable[[], nn.Module], **changes: Any) -> Case:
    given = {"name": build.__name__, "build": build, "block": "FlagBlock", **changes}
    return dataclasses.replace(get_case("tied_llama"), **given)


_PENALISED = PenalisedLoss()
GLUE = (
    *(_case(cls) for cls in (RootParameter, Mean, Item, Tied, BlockWeight, Early, Counting)),
    _case(_PENALISED.build, name="penalised", loss_func=_PENALISED),
)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_code_between_blocks_trains_as_in_one_process(num_ranks: int) -> None:
    check(num_ranks, [(case, strategy("auto", sequence=num_ranks)) for case in GLUE])


def _reports() -> list[str]:
    return [
        str(accelerate_case(_case(cls), strategy("auto")).applied) for cls in (Plain, RootParameter, Mean)
    ]


def test_hidden_states_stay_divided_where_nothing_is_between() -> None:
    (plain, parameter, mean), _ = run_ranks(_reports, 2)
    assert "stay divided after 3 block(s)" in plain
    assert "stay divided after 1 block(s)" in parameter
    assert "stay divided after 0 block(s)" in mean


class HybridBlock(FlagBlock):
    """Attends, or takes the mean of all positions before each one."""

    def __init__(self, attends: bool, rate: float = 0.0) -> None:
        super().__init__()
        self.attends = attends
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D]."""
        if self.attends:
            return self.dropout(super().forward(x))
        places = torch.arange(1, x.size(1) + 1, device=x.device)
        return x + self.dropout(self.feed(self.out(x).cumsum(1) / places[:, None]))


class Hybrid(Plain):
    """Recurrent blocks between those of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HybridBlock(place in (0, 3)) for place in range(4))


class LateHybrid(Hybrid):
    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.size(0) < 3:
            raise ValueError("too few rows")
        return super().forward(tokens)


class HybridWithDropout(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HybridBlock(place in (0, 3), 0.2) for place in range(4))


class AllRecurrent(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HybridBlock(False) for _ in range(2))


class NormedBlock(FlagBlock):
    """In evaluation it would pass the test of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D]."""
        return self.statistics(super().forward(x).transpose(1, 2)).transpose(1, 2)


class AllNormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(2))


HYBRIDS = tuple(_case(cls, block="HybridBlock") for cls in (Hybrid, LateHybrid))


def test_blocks_that_cannot_be_divided_run_whole_between_those_that_can() -> None:
    check(2, [(case, strategy("auto", "checkpoint")) for case in HYBRIDS])


def _dropping() -> Trajectory:
    return accelerated_run(_case(HybridWithDropout), strategy("auto"))


def test_dropout_in_blocks_that_run_whole_keeps_ranks_together() -> None:
    assert_ranks_agree(run_ranks(_dropping, 2))


def _whole_blocks() -> tuple[str, list[str]]:
    refusals = []
    for case, config in (
        (_case(AllRecurrent), {}),
        (_case(AllNormed), {}),
        (_case(Hybrid), {"blocks": ["HybridBlock"]}),
    ):
        with pytest.raises(InputError) as caught:
            accelerate_case(case, strategy("auto", **config))
        refusals.append(str(caught.value))
    return str(accelerate_case(_case(Hybrid), strategy("auto")).applied), refusals


def test_blocks_that_run_whole_are_named_and_must_not_be_all() -> None:
    (report, refusals), _ = run_ranks(_whole_blocks, 2)
    assert "2 block(s) on 1/2 of each sequence" in report
    assert "blocks.1, blocks.2 run whole on every rank: sequence_parallel cannot divide blocks.1" in report
    assert "cannot divide blocks.0 (HybridBlock)" in refusals[0]
    assert "statistics is a batch norm" in refusals[1]
    assert "cannot divide blocks.1 (HybridBlock)" in refusals[2]


def _refusal() -> str:
    with pytest.raises(InputError) as caught:
        accelerate_case(_case(Aside), strategy("auto"))
    return str(caught.value)


def test_a_value_that_the_code_between_takes_out_of_a_block_is_refused() -> None:
    kept, _ = run_ranks(_refusal, 2)
    assert "a value that block 1 (FlagBlock) computes and does not return" in kept


class Late(Plain):
    """Fails on two rows, so that blocks are joined with the first batch of training."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.size(0) < 3:
            raise ValueError("too few rows")
        return super().forward(tokens)


class LateParameter(Late, RootParameter):
    pass


class LateCounting(Late, Counting):
    pass


class LateDeep(Late):
    """As the plain one; for a root that is sharded."""


LATE = (
    (_case(Late), ()),
    (_case(LateParameter), ("checkpoint",)),
    (_case(LateCounting), (("compile", "aot_eager"),)),
    (_case(LateDeep), ("fsdp",)),
)


def _late() -> list[Any]:
    found = []
    for case, others in LATE:
        data = 2 if "fsdp" in others else 1
        sequence = dist.get_world_size() // data
        result = accelerate_case(case, strategy("auto", *others, sequence=sequence, data=data))
        before = str(result.applied)
        initial, losses = whole_parameters(result), []
        assert result.dataloader is not None
        losses = [float(result.train_step(batch)) for batch in result.dataloader]
        trajectory = Trajectory(losses=losses, initial=initial, final=whole_parameters(result))
        seen = getattr(result.job.module, "seen", None)
        found.append((trajectory, before, str(result.applied), None if seen is None else float(seen)))
    return found


def test_blocks_are_joined_with_the_first_batch_where_the_model_cannot_run_before() -> None:
    references = [reference_run(case) for case, _ in LATE]
    ranks = run_ranks(_late, 4, timeout_s=100)
    for reference, (trajectory, before, _, seen) in zip(references, ranks[0], strict=True):
        assert_parity(compare(reference, trajectory))
        assert "settled with the first batch" in before
        assert seen in (None, 5 * 8 * 16)
    for (_, _, after, _), num_joined in zip(ranks[0], (3, 1, 2, 3), strict=True):
        assert f"attention by ulysses; hidden states stay divided after {num_joined} block(s)" in after
