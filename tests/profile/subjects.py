"""Models that the tests of the profile trace, and both ways of tracing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import fingerprints, repeated_blocks
from atorch_ns.capture.nests import samples_and_tokens
from atorch_ns.profile import Segment, SegmentCost
from atorch_ns.profile.record.steps import ALL_PRECISIONS, ForwardLoss, StepPrecision, TracedModel
from atorch_ns.profile.tracing import TraceFallbacks
from atorch_ns.sharding import find_dims
from atorch_ns.testing.models import get_case


def case_inputs(name: str, num_samples: int = 8) -> tuple[nn.Module, Any, ForwardLoss]:
    """Model, batch and loss of a reference case."""
    case = get_case(name)
    return (
        case.build(),
        case.make_batch(num_samples, 0),
        lambda model, batch: case.loss_func(batch, case.call(model, batch)),
    )


def subject_of(
    model: nn.Module, batch: Any, forward_loss: ForwardLoss, *, keeps_output: bool = False
) -> TracedModel:
    """What the tracing room passes around."""
    blocks = {block.name: block.module for block in repeated_blocks(model)}
    sizes = samples_and_tokens(batch)
    return TracedModel(model, batch, forward_loss, sizes, sizes, blocks, fingerprints(blocks), keeps_output)


def attempts(
    model: nn.Module,
    batch: Any,
    forward_loss: ForwardLoss,
    keys: Sequence[str] = ALL_PRECISIONS,
    *,
    keeps_output: bool = False,
) -> TraceFallbacks:
    """Ready to trace."""
    subject = subject_of(model, batch, forward_loss, keeps_output=keeps_output)
    return TraceFallbacks(subject, [StepPrecision.parse(key) for key in keys], "cpu", find_dims)


def instances(segments: Sequence[Segment]) -> list[tuple[str, Segment]]:
    """Each block or stretch by its path or name."""
    return [(path, segment) for segment in segments for path in segment.paths or (segment.name,)]


BYTES: dict[str, Callable[[SegmentCost], Any]] = {
    "saved": lambda cost: cost.saved,
    "kept": lambda cost: cost.kept,
    "output": lambda cost: cost.output,
    "forward peak": lambda cost: cost.forward.peak,
    "backward peak": lambda cost: cost.backward.peak,
    "forward flops": lambda cost: cost.forward.flops,
    "backward flops": lambda cost: cost.backward.flops,
    "forward moved": lambda cost: cost.forward.moved,
    "backward moved": lambda cost: cost.backward.moved,
}


def differences(
    predicted: Sequence[Segment], truth: Sequence[Segment], at: Sequence[int], tolerance: float = 0.01
) -> list[str]:
    """Where two traces differ by more than the tolerance, in any instance, precision and batch size."""
    first, second = instances(predicted), instances(truth)
    found = [] if [n for n, _ in first] == [n for n, _ in second] else ["the segments differ"]
    for (name, own), (_, real) in zip(first, second, strict=True):
        for key in own.costs:
            if own.costs[key].cast_parameters != real.costs[key].cast_parameters:
                found.append(f"{name} {key} casts")
            for what, read in BYTES.items():
                for num_samples in at:
                    ours, theirs = (
                        float(read(costs[key]).at(num_samples)) for costs in (own.costs, real.costs)
                    )
                    if abs(ours - theirs) > tolerance * max(abs(theirs), 64.0):
                        found.append(f"{name} {key} {what} at {num_samples}: {ours:.0f}, really {theirs:.0f}")
    return found


class Stack(nn.Module):
    """Linear blocks with what a test wants between them."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss of the output alone."""
    loss: torch.Tensor = model(batch).float().pow(2).mean()
    return loss
