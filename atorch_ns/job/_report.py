"""Report: what was applied to a job and why, as data."""

from __future__ import annotations

from dataclasses import dataclass

from atorch_ns.strategy import Strategy

__all__ = ["MethodRow", "Report"]


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method of the strategy as applied.

    Attributes:
        name: the method.
        settings: its config where it differs from the defaults, as text.
        why: why it is here and what it chose.
    """

    name: str
    settings: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was decided and done.

    Attributes:
        strategy: as it is saved: with what is left out here and can be used elsewhere.
        rows: one for every method, in order of application.
        notes: methods added, left out and fitted, each a sentence.
        world_size: number of processes.
        axes: the mesh, ``(name, size)``, innermost first.
        device: this rank's device.
        num_parameters: parameter elements of the whole model.
        parameter_bytes_per_rank: bytes of parameters that this rank keeps between steps (measured).
    """

    strategy: Strategy
    rows: tuple[MethodRow, ...]
    notes: tuple[str, ...]
    world_size: int
    axes: tuple[tuple[str, int], ...]
    device: str
    num_parameters: int
    parameter_bytes_per_rank: int

    def __str__(self) -> str:
        mesh = " × ".join(f"{name}={size}" for name, size in self.axes) or "one process"
        mib = self.parameter_bytes_per_rank / 2**20
        lines = [
            f"{_count(self.num_parameters)} parameters on {self.world_size} process(es) ({mesh}), "
            f"{self.device}; {mib:.2f} MiB of parameters per rank (measured)"
        ]
        width = max((len(row.name) for row in self.rows), default=0)
        for row in self.rows:
            settings = f" [{row.settings}]" if row.settings else ""
            lines.append(f"  {row.name:<{width}}  {row.why}{settings}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _count(number: int) -> str:
    if number >= 1_000_000:
        return f"{number / 1e6:.2f} M"
    return f"{number / 1e3:.1f} k" if number >= 1000 else str(number)
