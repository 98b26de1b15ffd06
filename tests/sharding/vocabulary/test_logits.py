"""Cross-entropy on parts of the logits, and divided logits in other hands, against whole ones.

Legend: B = 4, T = 8, V = 32; two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from atorch_ns.errors import StepError
from atorch_ns.sharding import LogitUses, TensorGroup
from atorch_ns.sharding.divided_tensor import whole_logits
from atorch_ns.sharding.vocabulary.logits import DividedLogits
from atorch_ns.testing.workers import run_ranks

V = 32
LOGITS = torch.randn(4, 8, V, generator=torch.Generator().manual_seed(0))
Y = torch.randint(V, (4, 8), generator=torch.Generator().manual_seed(1))
IGNORED = Y.clone()
IGNORED[0] = -100
WEIGHT = torch.rand(V, generator=torch.Generator().manual_seed(2))
SCALES = torch.arange(32.0).view(4, 8)

Loss = Callable[[Any], Tensor]


class Squares(torch.autograd.Function):
    """As kernels that others write: autograd does not look inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        total: Tensor = x.pow(2).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = 2 * x * gradients[0]
        return gradient


ON_PARTS: dict[str, Loss] = {
    "mean": lambda x: F.cross_entropy(x.view(-1, V), Y.view(-1)),
    "upcast, some ignored": lambda x: F.cross_entropy(x.float().reshape(-1, V), IGNORED.view(-1)),
    "another ignored": lambda x: F.cross_entropy(x.view(-1, V), Y.view(-1), ignore_index=int(Y[0, 0])),
    "sum": lambda x: F.cross_entropy(x.flatten(0, 1), IGNORED.view(-1), reduction="sum"),
    "none": lambda x: (F.cross_entropy(x.transpose(1, 2), IGNORED, reduction="none") * SCALES).sum(),
    "weights": lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), IGNORED[:, 1:].flatten(), weight=WEIGHT),
    "weights, none": lambda x: (
        F.cross_entropy(x.permute(0, 2, 1), IGNORED, weight=WEIGHT, reduction="none").pow(2).sum()
    ),
    "shifted": lambda x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, V), Y[:, 1:].contiguous().view(-1)
    ),
    "by a mask": lambda x: F.cross_entropy(x[IGNORED != -100], IGNORED[IGNORED != -100]),
    "one row": lambda x: F.cross_entropy(x[1, 2], Y[1, 2]),
    "smoothing": lambda x: F.cross_entropy(x.flatten(0, 1), IGNORED.flatten(), label_smoothing=0.1),
    "capped": lambda x: F.cross_entropy((torch.tanh(x / 5) * 5).flatten(0, 1), Y.flatten()),
    "in chunks": lambda x: torch.stack(
        [
            F.cross_entropy(c.flatten(0, 1), y.flatten())
            for c, y in zip(x.chunk(2, 1), Y.chunk(2, 1), strict=True)
        ]
    ).sum(),
    "a module": lambda x: torch.nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), Y.flatten()),
    "all ignored, summed": lambda x: F.cross_entropy(x[0], IGNORED[0], reduction="sum") + x.sum() * 0,
}
GATHERED: dict[str, Loss] = {
    "smoothing and weights": lambda x: F.cross_entropy(
        x.flatten(0, 1), Y.flatten(), WEIGHT, label_smoothing=0.1
    ),
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), LOGITS.flatten(0, 1).softmax(-1)),
    "log_softmax": lambda x: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), Y.flatten()),
    "accuracy": lambda x: F.cross_entropy(x.flatten(0, 1), Y.flatten()) + (x.argmax(-1) == Y).float().mean(),
    "z-loss": lambda x: F.cross_entropy(x.flatten(0, 1), Y.flatten()) + torch.logsumexp(x, -1).pow(2).mean(),
    "a part of the words": lambda x: x[..., : V // 2].pow(2).sum(),
    "rows mixed": lambda x: x.reshape(4, -1).pow(3).sum(),
    "another dimension": lambda x: F.cross_entropy(x, torch.zeros(4, V, dtype=torch.long)),
    "words in groups": lambda x: x.unflatten(-1, (2, V // 2)).logsumexp(-1).sum(),
    "a temperature": lambda x: F.cross_entropy((x * torch.tensor(0.5)).flatten(0, 1), Y.flatten()),
    "a function of its own": Squares.apply,
    "both": lambda x: torch.cat([x, x * 2], 1).softmax(-1).pow(2).sum(),
}
Compared = dict[str, tuple[float, float, int, list[str]]]


def _compared(losses: dict[str, Loss], dtype: torch.dtype) -> Compared:
    """By loss: the error of it and of its gradient, how many were on parts, and what gathered."""
    group = TensorGroup(init_device_mesh("cpu", (2,)))
    found = {}
    for name, loss in losses.items():
        whole = LOGITS.to(dtype, copy=True).requires_grad_()
        part = LOGITS.to(dtype).chunk(2, -1)[group.rank].clone().requires_grad_()
        uses = LogitUses()
        reference, mine = loss(whole), loss(DividedLogits.of(part, group, uses=uses))
        assert type(mine) is Tensor
        assert mine.dtype == reference.dtype
        reference.backward()
        mine.backward()
        assert whole.grad is not None
        assert part.grad is not None
        wanted = whole.grad.chunk(2, -1)[group.rank]
        error = float((part.grad - wanted).abs().max() / whole.grad.abs().max().clamp(min=1e-6))
        loss_error = float((mine - reference).abs() / reference.abs().clamp(min=1e-6))
        found[name] = (loss_error, error, len(uses.losses), list(uses.gathered.values()))
    return found


@pytest.fixture(scope="module")
def on_parts() -> Compared:
    return run_ranks(_compared, 2, args=(ON_PARTS, torch.float32))[1]


@pytest.fixture(scope="module")
def gathered() -> Compared:
    return run_ranks(_compared, 2, args=(GATHERED, torch.float32))[1]


@pytest.mark.parametrize("name", ON_PARTS)
def test_a_cross_entropy_on_parts_is_that_of_the_whole(name: str, on_parts: Compared) -> None:
    loss, gradient, num, needed = on_parts[name]
    assert loss < 1e-6
    assert gradient < 1e-6
    assert num >= 1
    assert needed == (["sum"] if "all ignored" in name else [])


@pytest.mark.parametrize("name", GATHERED)
def test_anything_else_sees_the_whole(name: str, gathered: Compared) -> None:
    loss, gradient, _, needed = gathered[name]
    assert loss < 1e-6
    assert gradient < 1e-6
    assert needed


def test_half_precision() -> None:
    losses = {name: ON_PARTS[name] for name in ("mean", "upcast, some ignored", "sum", "smoothing", "none")}
    for loss, gradient, *_ in run_ranks(_compared, 2, args=(losses, torch.bfloat16))[0].values():
        assert loss < 8e-3  # one rounding of the loss
        assert gradient < 8e-3


def _extremes() -> list[tuple[Tensor, Tensor]]:
    """Losses of logits that overflow if exponentials are taken as they are, and of words that are ruled out."""
    group = TensorGroup(init_device_mesh("cpu", (2,)))
    ruled_out = LOGITS.clone()
    ruled_out[..., : V // 2] = -torch.inf  # all of the first rank's
    found = []
    for logits in (LOGITS * 1e4, ruled_out):
        part = logits.chunk(2, -1)[group.rank].flatten(0, 1)
        targets = Y.flatten() % (V // 2) + V // 2
        found.append(
            (
                F.cross_entropy(DividedLogits.of(part, group), targets),
                F.cross_entropy(logits.flatten(0, 1), targets),
            )
        )
    return found


def test_extreme_logits() -> None:
    for mine, whole in run_ranks(_extremes, 2)[0]:
        assert whole.isfinite()
        torch.testing.assert_close(mine, whole)


def _in_hand() -> dict[str, Any]:
    group = TensorGroup(init_device_mesh("cpu", (2,)))
    part = LOGITS.chunk(2, -1)[group.rank].clone().requires_grad_()
    logits = DividedLogits.of(part, group)
    messages = []
    for change in (
        lambda: logits.__setitem__((..., 3), 0.0),
        lambda: logits.mul_(2),
        lambda: torch.add(LOGITS, 1, out=logits),
        lambda: F.cross_entropy(logits.flatten(0, 1), torch.full((32,), V)),
        lambda: F.cross_entropy(logits.flatten(0, 1), Y),
    ):
        try:
            change()
        except (StepError, IndexError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    output = whole_logits({"logits": logits, "other": [1, part]})
    return {
        "shape": tuple(logits.shape),
        "size": logits.size(-1),
        "needs gradient": logits.requires_grad and not logits.detach().requires_grad,
        "half": str(logits.half().dtype),
        "kept": isinstance(logits[:, 1:].unsqueeze(0).float(), DividedLogits),
        "text": repr(logits)[:13],
        "messages": messages,
        "whole": torch.equal(output["logits"], LOGITS) and type(output["logits"]) is Tensor,
        "list": logits.tolist() == LOGITS.tolist(),
        "on another device": type(logits.to("meta")) is Tensor and type(logits.cpu()) is DividedLogits,
        "without gradient": type(logits.argmax(-1)) is Tensor,
    }


def test_divided_logits_look_like_whole_ones() -> None:
    for found in run_ranks(_in_hand, 2):
        messages = found.pop("messages")
        assert found == {
            "shape": (4, 8, V),
            "size": V,
            "needs gradient": True,
            "half": "torch.float16",
            "kept": True,
            "text": "DividedLogits",
            "whole": True,
            "list": True,
            "on another device": True,
            "without gradient": True,
        }
        in_place, other = messages[:3], messages[3:]
        assert all(
            "would change, in place, a tensor" in text and "parallel_loss=False" in text for text in in_place
        )
        assert other[0] == "IndexError: Target 32 is out of bounds."
        assert "Expected target size [32], got [4, 8]" in other[1]
        assert len(other) == 2


def test_the_memory_of_a_step() -> None:
    """Beside the part: its logarithms, and their gradient; nothing of the size of the whole."""
    from atorch_ns.job import track_memory

    def peak() -> tuple[int, int]:
        group = TensorGroup(init_device_mesh("cpu", (2,)))
        with track_memory(torch.device("cpu")) as memory:
            part = torch.randn(256, 512).requires_grad_()
            F.cross_entropy(DividedLogits.of(part, group), torch.randint(1024, (256,))).backward()
        return memory.peak_bytes, part.nbytes

    for peak_bytes, part_bytes in run_ranks(peak, 2):
        assert peak_bytes < 3.2 * part_bytes
