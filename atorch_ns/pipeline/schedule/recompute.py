"""Recomputation by stage: the share of its blocks that each stage of a pipeline recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atorch_ns.errors import InputError
from atorch_ns.strategy import Recomputation
from atorch_ns.text import count_noun

ByStage = Literal["same", "level", "merak"]


@dataclass(frozen=True)
class RecomputeShare:
    """The amount of recomputation in each stage.

    Attributes:
        share: recomputed share (0 to 1) of the recomputable blocks: of the first stage, or a list by stage
            whose last entry repeats; ``"auto"`` for the least share of each stage that fits in memory.
        by_stage: rule for the other stages' shares: ``same``, ``level`` for equal bytes, ``merak``'s formula.
    """

    share: float | tuple[float, ...] | Literal["auto"] = 1.0
    by_stage: ByStage = "same"

    def __post_init__(self) -> None:
        shares = (self.share,) if isinstance(self.share, (int, float)) else self.share
        if shares != "auto" and not (shares and all(0.0 <= share <= 1.0 for share in shares)):
            raise InputError(f"shares of recomputed blocks must be numbers from 0 to 1, not {self.share}.")
        if self.by_stage != "same" and not isinstance(self.share, (int, float)):
            raise InputError(
                f"by_stage={self.by_stage!r} computes the shares of all stages from one number, the first stage's share; "
                f"share is {self.share!r}."
            )

    @classmethod
    def of(cls, recomputation: Recomputation) -> RecomputeShare:
        """Reads a plan's recomputation. Every n-th block counts as a share of 1/n."""
        if recomputation.kind == "none":
            return cls(0.0)
        share = recomputation.share
        return cls(1.0 / recomputation.every) if share is None else cls(share, recomputation.by_stage)

    def check(self, num_stages: int) -> None:
        """Raises an :class:`InputError` if there are more numbers than stages."""
        if isinstance(self.share, tuple) and len(self.share) > num_stages:
            raise InputError(
                f"share of recomputed blocks has {len(self.share)} numbers, {list(self.share)}, for "
                f"{count_noun(num_stages, 'stage')}. Give one for each."
            )

    @property
    def is_chosen(self) -> bool:
        """Whether the shares are chosen to fit in memory."""
        return self.share == "auto"

    @property
    def depends_on_cuts(self) -> bool:
        """Whether the shares depend on the bytes of the stages."""
        return self.is_chosen or self.by_stage == "level"

    def of_stages(
        self, live: Sequence[int], kept_share: float = 0.0, *, keeps_last: bool = False
    ) -> tuple[float, ...]:
        """The share of each stage for equal blocks, before the model is cut; 1 for ``auto``.

        Args:
            live: peak number of micro-batches whose activations a stage holds, by stage.
            kept_share: memory kept under recomputation, as a share of what a block's backward pass needs.
            keeps_last: whether the last stage recomputes nothing in the schedule.
        """
        num = len(live)
        if self.share == "auto":
            shares = [1.0] * num  # until the cut is known
        elif not isinstance(self.share, (int, float)):
            shares = [self.share[min(stage, len(self.share) - 1)] for stage in range(num)]
        elif self.by_stage == "level":
            shares = [level_share(self.share, live[0] / each, kept_share) for each in live]
        elif self.by_stage == "merak":
            shares = [merak_share(self.share, stage, num) for stage in range(num)]
        else:
            shares = [self.share] * num
        if keeps_last and num > 1:  # two of Merak's schedules
            shares[-1] = 0.0
        return tuple(shares)


def level_share(first: float, fewer: float, part: float) -> float:
    """The share of a stage that holds ``1 / fewer`` times the first one's micro-batches, and as many bytes.

    With shares c and c' not recomputed, equal bytes mean c' + (1 - c') part = fewer (c + (1 - c) part).

    Example:
        >>> level_share(0.75, 2.0, 0.0)
        0.5
    """
    bytes_kept = fewer * (1.0 - first * (1.0 - part))  # of a stage's whole activations
    return max(0.0, min(1.0, (1.0 - bytes_kept) / (1.0 - part))) if part < 1.0 else 0.0  # 1.0: saves nothing


def merak_share(first: float, stage: int, num_stages: int) -> float:
    """Merak's stage-aware share: the part not recomputed grows with (S - 1) / (S - 1 - stage), and the last
    stage recomputes nothing (``activation_checkpoint_ratio`` of its pipeline module).

    Example:
        >>> [merak_share(0.75, stage, 4) for stage in range(4)]
        [0.75, 0.625, 0.25, 0.0]
    """
    if stage == num_stages - 1 and num_stages > 1:  # the formula divides by zero there
        return 0.0
    whole = num_stages - 1
    return max(0.0, 1.0 - (1.0 - first) * whole / (whole - stage)) if whole else first
