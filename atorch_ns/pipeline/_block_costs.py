"""What the blocks of a model take: the numbers that cuts and schedules are chosen by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from atorch_ns.pipeline._partition import StageMemory, stage_ranges
from atorch_ns.pipeline._simulate import StageCosts

__all__ = ["BlockCosts", "split_backward"]

_INPUT_SHARE, _WEIGHT_SHARE = 0.58, 0.48
"""Of a whole backward pass, the passes for the input and for the weights alone.

Measured with torch 2.13's pipelining on one CPU core, two transformer blocks: 0.59 and 0.48 at width 256 with 512
tokens, 0.56 and 0.47 at width 512 with 512 tokens. At width 64 with 128 tokens, where operators take microseconds,
they are 0.91 and 0.82.
"""


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What the blocks of a model take, in the order in which the forward pass calls them.

    Attributes:
        forward: seconds of one micro-batch's forward pass, by block.
        backward_input: seconds of its backward pass for the input, recomputation included, by block.
        backward_weight: seconds of its backward pass for the weights, by block.
        backward: seconds of the whole backward pass where it is not their sum, by block; empty if it is.
        send: seconds to carry what a cut sends one way, at index ``c - 1`` for the cut before block ``c``;
            empty for none.
        state_bytes: parameters, gradients and optimizer state, by block; empty where memory does not matter.
        activation_bytes: kept of one micro-batch between forward and backward, by block; empty as above.
        boundary_bytes: what a cut sends of one micro-batch, indexed like ``send``; empty as above. torch holds
            a buffer of this size on both sides for every micro-batch.
        allowed_cuts: positions that may be cut; ``None`` for all.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] = ()
    send: tuple[float, ...] = ()
    state_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    boundary_bytes: tuple[float, ...] = ()
    allowed_cuts: Collection[int] | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.forward)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Forward and whole backward, by block."""
        whole = self.backward or tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))
        return tuple(map(sum, zip(self.forward, whole, strict=True)))

    def stages(self, cuts: Sequence[int]) -> StageCosts:
        """The costs of the stages that cuts make."""

        def added(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(
                sum(values[block] for block in blocks) for blocks in stage_ranges(cuts, self.num_blocks)
            )

        return StageCosts(
            forward=added(self.forward),
            backward_input=added(self.backward_input),
            backward_weight=added(self.backward_weight),
            backward=added(self.backward) if self.backward else (),
            send=tuple(self.send[cut - 1] for cut in cuts) if self.send else (),
        )

    def memory(self, live: Sequence[int], num_micro_batches: int) -> StageMemory:
        """The bytes of the blocks where stages hold ``live`` micro-batches."""
        none = (0.0,) * self.num_blocks
        return StageMemory(
            states=self.state_bytes or none,
            activations=self.activation_bytes or none,
            live=live,
            edges=tuple(num_micro_batches * size for size in self.boundary_bytes),
        )


def split_backward(
    backward: Sequence[float], recompute: Sequence[float] = ()
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of the input's and the weights' part of whole backward passes, for schedules that split them.

    Both together take 6% longer than the whole: each walks the graph by itself.

    Args:
        backward: seconds of whole backward passes, without recomputation.
        recompute: seconds of recomputing activations, which the input's part begins with; empty for none.

    Example:
        >>> split_backward([1.0], [0.5])
        ((1.08,), (0.48,))
    """
    again = recompute or (0.0,) * len(backward)
    first = tuple(_INPUT_SHARE * seconds + more for seconds, more in zip(backward, again, strict=True))
    return first, tuple(_WEIGHT_SHARE * seconds for seconds in backward)
