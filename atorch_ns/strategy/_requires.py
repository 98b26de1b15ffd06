"""What a saved strategy was resolved for."""

from __future__ import annotations

from dataclasses import dataclass

from atorch_ns.strategy._values import JSON

__all__ = ["Requires"]


@dataclass(frozen=True, kw_only=True)
class Requires:
    """The setting a strategy was resolved for. ``None`` means that it was not recorded.

    Attributes:
        world_size: number of processes.
        device: ``"cpu"`` or ``"cuda"``.
        torch: version of torch, as ``"2.13"``.
    """

    world_size: int | None = None
    device: str | None = None
    torch: str | None = None

    def as_json(self) -> dict[str, JSON]:
        """Only what is known."""
        fields: dict[str, JSON] = {
            "world_size": self.world_size,
            "device": self.device,
            "torch": self.torch,
        }
        return {name: value for name, value in fields.items() if value is not None}
