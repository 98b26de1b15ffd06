"""Which part of a model the ranks of a plan hold, and how much of each quantity that leaves them.

Legend: R plans of one kind (or stages of them), S segments.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from atorch_ns.estimate._axis_use import AxisUse
from atorch_ns.profile import Trace

__all__ = ["Parts", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the axes, and passes, of R plans.

    Attributes:
        data, zero, tensor, sequence, expert, pipeline: [R].
        micro_batches: [R].
        use: [R] index into ``uses``.
        uses: how the axes are used.
    """

    data: np.ndarray
    zero: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray
    expert: np.ndarray
    pipeline: np.ndarray
    micro_batches: np.ndarray
    use: np.ndarray
    uses: tuple[AxisUse, ...]

    def __len__(self) -> int:
        return len(self.data)

    def take(self, rows: np.ndarray) -> Sizes:
        """Those of some rows."""
        columns = {name: getattr(self, name)[rows] for name in self.__dataclass_fields__ if name != "uses"}
        return Sizes(uses=self.uses, **columns)

    @cached_property
    def tensor_sequence(self) -> np.ndarray:
        """[R] whether the axis ``tensor`` divides the residual stream too."""
        return self._used("tensor_sequence", True)

    @cached_property
    def parallel_loss(self) -> np.ndarray:
        """[R] whether logits stay divided over the axis ``tensor`` in the loss."""
        return self._used("parallel_loss", True)

    @cached_property
    def is_ring(self) -> np.ndarray:
        """[R] whether keys and values travel around the axis ``sequence``."""
        return self._used("sequence_exchange", "ring")

    @cached_property
    def schedules(self) -> tuple[tuple[str, int], ...]:
        """The schedules of pipelines that there are, each with its stages on a rank."""
        return tuple(dict.fromkeys((use.schedule, use.stages_per_rank) for use in self.uses))

    @cached_property
    def schedule(self) -> np.ndarray:
        """[R] index into :attr:`schedules`."""
        found = [self.schedules.index((use.schedule, use.stages_per_rank)) for use in self.uses]
        return np.asarray(np.asarray(found, dtype=np.int64)[self.use])

    def _used(self, name: str, value: object) -> np.ndarray:
        return np.asarray(np.asarray([getattr(use, name) == value for use in self.uses])[self.use])

    @cached_property
    def divides(self) -> bool:
        """Whether any of the plans divides layers, samples or experts."""
        return any(bool((one > 1).any()) for one in (self.tensor, self.sequence, self.expert))

    @cached_property
    def divides_model(self) -> np.ndarray:
        """[R] whether ranks hold different parts of the model or of a sample."""
        return (self.tensor > 1) | (self.sequence > 1) | (self.expert > 1) | (self.pipeline > 1)

    @property
    def num_data_ranks(self) -> np.ndarray:
        """[R] ranks that see different data."""
        return np.asarray(self.data * self.zero * self.expert)

    def num_samples(self, global_batch: int) -> np.ndarray:
        """[R] samples in a micro-batch of one rank."""
        return np.asarray(global_batch / (self.num_data_ranks * self.micro_batches))


@dataclass(frozen=True)
class Parts:
    """What one rank of each of R plans holds.

    Attributes:
        trace: of the whole model.
        sizes: of the axes.
        counts: for each segment the blocks on the rank: one number for all plans, or [R].
        live: [R] micro-batches whose activations are alive at the worst moment.
        accumulates: [R] whether gradients of earlier micro-batches are there then.
        receives, sends: [R] whether the rank's part begins after, or ends before, a cut of a pipeline.
        known: shares that were asked for before, whichever blocks the ranks have.
    """

    trace: Trace
    sizes: Sizes
    counts: tuple[np.ndarray | int, ...]
    live: np.ndarray
    accumulates: np.ndarray
    receives: np.ndarray
    sends: np.ndarray
    known: dict[Hashable, np.ndarray] = field(default_factory=dict)

    @classmethod
    def whole(cls, trace: Trace, sizes: Sizes) -> Parts:
        """Of plans without a pipeline: every rank has a part of every block."""
        ones, no = np.ones(len(sizes), dtype=np.int64), np.zeros(len(sizes), dtype=bool)
        counts = tuple(segment.count for segment in trace.segments)
        many = sizes.micro_batches > 1
        return cls(trace, sizes, counts, ones, many, no, no)

    def staged(
        self,
        counts: np.ndarray,
        live: np.ndarray,
        accumulates: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
    ) -> Parts:
        """The same with [R, S] blocks on each rank."""
        columns = tuple(counts[:, s] for s in range(counts.shape[1]))
        return replace(self, counts=columns, live=live, accumulates=accumulates, receives=~first, sends=~last)

    @cached_property
    def divides(self) -> bool:
        """Whether any of the plans divides the model."""
        return self.is_cut or self.sizes.divides

    @cached_property
    def is_cut(self) -> bool:
        """Whether the plans have stages."""
        return any(isinstance(count, np.ndarray) for count in self.counts)

    def share(self, s: int, divided: float, words: float = 0.0) -> np.ndarray | float:
        """[R] of a quantity of segment ``s`` the share that a rank has.

        Args:
            s: the segment.
            divided: share of the quantity that lies between divided layers.
            words: share of it that lies between the head and the loss.
        """
        if not self.sizes.divides:
            return 1.0
        is_block = self.trace.segments[s].is_block
        key = (divided, words, is_block)
        if key not in self.known:
            inside = np.where(self.sizes.tensor_sequence & is_block, 1.0, divided)
            inside = inside + self.sizes.parallel_loss * words
            share = 1.0 - inside * (1.0 - 1.0 / self.sizes.tensor)
            self.known[key] = share / self.sizes.sequence if is_block else share
        return self.known[key]

    def of_parameters(self, s: int) -> np.ndarray | float:
        """[R] of the elements of segment ``s``'s own parameters the share that a rank has of one block."""
        if not self.sizes.divides:
            return 1.0
        if s not in self.known:
            total, held = 0, np.zeros(len(self.sizes))
            for spec in self.trace.segments[s].parameters:
                if spec.tied_to is None:
                    total += spec.num_elements
                    size = 0 if spec.tensor_dim is None else spec.shape[spec.tensor_dim]
                    divides = (size > 0) & (size % self.sizes.tensor == 0)
                    part = spec.num_elements / np.where(divides, self.sizes.tensor, 1)
                    held = held + (part / self.sizes.expert if spec.is_expert else part)
            self.known[s] = held / total if total else np.ones(len(self.sizes))
        return self.known[s]

    def gathered_inputs(self, s: int) -> np.ndarray | float:
        """[R] inputs of divided layers that are whole again, in units of the segment's output.

        Megatron's sequence parallelism divides the residual stream, and gathers it before each group of divided
        layers; what these keep for their weights' gradients is whole.
        """
        if not self.sizes.tensor_sequence.any():
            return 0.0
        gathered = self.trace.segments[s].num_rows * (1.0 - 1.0 / self.sizes.tensor)
        return np.where(self.sizes.tensor_sequence, gathered, 0.0)

    def has(self, s: int) -> np.ndarray | bool:
        """[R] whether the rank has a block of the segment."""
        count = self.counts[s]
        return count > 0

    def total(self, of: Sequence[np.ndarray | float]) -> np.ndarray | float:
        """The sum of ``of`` (a value for a block of each segment) over all blocks of the rank."""
        return sum(value * count for value, count in zip(of, self.counts, strict=True))
