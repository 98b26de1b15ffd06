"""Divided tokens give what whole ones give: values, and each rank's share of the gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atorch_ns.errors import StepError
from atorch_ns.sharding.collectives import SimulatedGroup, simulate
from atorch_ns.sharding.divided_tensor import LogitUses, whole_logits
from atorch_ns.sharding.sequence.plan import SequenceLayout
from atorch_ns.sharding.sequence.tokens import DividedTokens, TokenPart

B, T, D, V, RANKS = 2, 9, 4, 6, 3  # three ranks hold 9 positions in order, and with padding in zigzag
CPU = torch.device("cpu")
torch.manual_seed(0)
HIDDEN, TABLE = torch.randn(B, T, D), torch.randn(V, D)
LABELS = torch.randint(V, (B, T))
LABELS[0, :5] = -100
MASK = (torch.rand(B, T) > 0.4).float()
WEIGHTS = torch.rand(V)

Loss = Callable[[Tensor, Tensor], Tensor]


def _next(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.T)[:, :-1].reshape(-1, V), LABELS[:, 1:].reshape(-1))


def _as_transformers(x: Tensor, w: Tensor) -> Tensor:
    labels = F.pad(LABELS, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(F.linear(x, w).float().view(-1, V), labels.view(-1), reduction="sum") / 7


def _masked(x: Tensor, w: Tensor) -> Tensor:
    each = F.cross_entropy(F.linear(x, w).transpose(1, 2), LABELS.clamp(min=0), reduction="none")
    return (each * MASK).sum() / MASK.sum()


def _normed(x: Tensor, w: Tensor) -> Tensor:
    x = F.layer_norm(x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3), (D,), w[0])
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), LABELS.flatten(), WEIGHTS, label_smoothing=0.1)


def _back_into_positions(x: Tensor, w: Tensor) -> Tensor:
    return _next(x + x.mean(1, keepdim=True) * w[0], w) + F.softmax(x @ w.T, -1).square().mean()


def _chosen(x: Tensor, w: Tensor) -> Tensor:
    logs = -F.log_softmax(F.linear(x, w)[..., 1:, :], dim=-1)
    picked = logs.gather(dim=-1, index=LABELS[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(LABELS[:, 1:] == -100, 0.0).sum() + logs.sum(-1).mean()


def _of_samples(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).sum(1).tanh().square().sum()


def _deviated(x: Tensor, w: Tensor) -> Tensor:
    """By the forms with flags, of which the first says whether the deviation is unbiased."""
    spread = x.var(0, True).tanh().sum(1).mean() + x.std(0, False, True).tanh().sum(2).mean()
    return spread + w.square().mean()


def _whole(x: Tensor, w: Tensor) -> Tensor:
    return (x.flip(1).cumsum(1) @ w.T).logsumexp(-1).sum() + x[:, 0].square().sum()


ON_PARTS = (_next, _as_transformers, _masked, _normed, _back_into_positions, _chosen, _of_samples, _deviated)


def _run(loss: Loss, zigzag: bool) -> tuple[list[tuple[Tensor, Tensor, Tensor]], LogitUses]:
    """Of each rank the loss, the gradient of the hidden states, whole, and that of the table."""
    uses = LogitUses()

    def work(group: SimulatedGroup) -> tuple[Tensor, Tensor, Tensor]:
        layout = SequenceLayout(T, RANKS, group.rank(), zigzag)
        at = TokenPart(layout, group, 1, length=T)
        part = at.select(HIDDEN, 1, (B,)).requires_grad_()
        table = TABLE.clone().requires_grad_()
        value = loss(DividedTokens.of(part, at, uses), table)
        of_part, of_table = torch.autograd.grad(value, (part, table))
        return value.detach(), layout.gather(of_part, 1, group), of_table

    return simulate(RANKS, work, CPU), uses


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("loss", [*ON_PARTS, _whole])
def test_losses_and_gradients_are_those_of_whole_samples(loss: Loss, zigzag: bool) -> None:
    hidden, table = HIDDEN.clone().requires_grad_(), TABLE.clone().requires_grad_()
    wanted = loss(hidden, table)
    of_hidden, of_table = torch.autograd.grad(wanted, (hidden, table))
    ranks, uses = _run(loss, zigzag)
    for value, gradient, _ in ranks:
        torch.testing.assert_close(value, wanted.detach())
        torch.testing.assert_close(gradient / RANKS, of_hidden)
    torch.testing.assert_close(torch.stack([each[2] for each in ranks]).mean(0), of_table)
    assert bool(uses.gathered) == (loss is _whole)


def test_changes_in_place_are_refused_and_outputs_become_whole() -> None:
    def work(group: SimulatedGroup) -> Tensor:
        at = TokenPart(SequenceLayout(T, RANKS, group.rank()), group, 1, length=T)
        tokens = DividedTokens.of(at.select(HIDDEN, 1, (B,)), at)
        with pytest.raises(StepError, match="parallel_loss=False in the config of sequence_parallel"):
            tokens.mul_(2)
        with pytest.raises(StepError, match="relu would change, in place"):
            F.relu(tokens, 1)  # type: ignore[arg-type]
        with pytest.raises(StepError, match="add would change, in place"):
            torch.add(HIDDEN, 1, out=tokens)
        whole: Tensor = whole_logits({"logits": tokens.view(-1, D)})["logits"]
        return whole

    for found in simulate(RANKS, work, CPU):
        assert type(found) is Tensor
        torch.testing.assert_close(found, HIDDEN.view(-1, D))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, out: torch.add(x, 1, out=out), (B, T, D)),
        (lambda x, out: torch.sum(x, -1, out=out), (B, T)),
        (lambda x, out: torch.mean(x, 1, out=out), (B, D)),
        (lambda x, out: torch.matmul(x, TABLE.T, out=out), (B, T, V)),
    ],
)
def test_a_plain_tensor_given_as_out_gets_the_whole_result(function: Loss, shape: tuple[int, ...]) -> None:
    def work(group: SimulatedGroup) -> Tensor:
        at = TokenPart(SequenceLayout(T, RANKS, group.rank()), group, 1, length=T)
        out = torch.empty(shape)
        function(DividedTokens.of(at.select(HIDDEN, 1, (B,)), at), out)
        return out

    wanted = function(HIDDEN, torch.empty(shape))
    with torch.no_grad():
        outs = simulate(RANKS, work, CPU)
    for out in outs:
        torch.testing.assert_close(out, wanted)


def test_dropout_in_evaluation_leaves_tokens_divided_under_both_names_of_its_mode() -> None:
    at = TokenPart(SequenceLayout(T, RANKS, 0), None, 1, length=T)
    tokens = DividedTokens.of(at.select(HIDDEN, 1, (B,)), at)
    for dropped in (torch.dropout(tokens, p=0.5, train=False), F.dropout(tokens, 0.5, False, True)):
        assert type(dropped) is DividedTokens


def test_tokens_become_whole_on_another_device() -> None:
    at = TokenPart(SequenceLayout(T, RANKS, 0), None, 1, length=T)
    tokens = DividedTokens.of(at.select(HIDDEN, 1, (B,)), at)
    assert type(tokens.to("meta")) is Tensor
    assert type(tokens.to("cpu")) is DividedTokens
