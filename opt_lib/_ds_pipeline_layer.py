"""A pipeline stage as the one layer that DeepSpeed's pipeline engine sees on a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atorch_ns.pipeline import StageModule
from opt_lib._ds_pipeline_wire import Entry, Wire, anchor, pack, read_header, unpack

__all__ = ["StageLayer"]


class StageLayer(nn.Module):
    """Calls a stage with what arrived, and packs what it returns.

    The engine runs the micro-batches of a batch forward in order, on every stage.

    Args:
        stage: the stage; its modules are not registered here, for what the engine would do to them is done.
        parameters: those that the engine may know of.
        device: where the stage computes.

    Attributes:
        losses: of the micro-batches since :meth:`begin`, 0-d float32 and detached; only filled on the last stage.
    """

    def __init__(
        self, stage: StageModule, *, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        super().__init__()
        self.known = nn.ParameterList(parameters)
        self.losses: list[torch.Tensor] = []
        self._stage = [stage]  # in a list, so that it is no child
        self._device = device
        self._count = 0
        self._entries: tuple[Entry, ...] | None = None

    def begin(self, *, reset: bool) -> None:
        """The next forward pass is that of the first micro-batch of a batch.

        Args:
            reset: whether what stages exchange may have other shapes than in the last batch.
        """
        self._count = 0
        self.losses.clear()
        if reset:
            self._entries = None

    def forward(self, arrived: torch.Tensor | Wire) -> torch.Tensor | Wire:
        """One micro-batch: what the previous stage packed in, what the next one unpacks out.

        Args:
            arrived: on the first stage any tensor; it is not looked at.
        """
        index = torch.tensor(self._count, device=self._device)
        self._count += 1
        received = self._unpacked(arrived) if isinstance(arrived, tuple) else []
        output = self._stage[0](*received, index=index)
        with_grad = arrived[0] if isinstance(arrived, tuple) and arrived[0].requires_grad else None
        if self._stage[0].is_last:
            loss: torch.Tensor = output.reshape(())
            self.losses.append(loss.detach().float())
            return loss if with_grad is None else anchor(loss, with_grad)
        wire = pack([output] if isinstance(output, torch.Tensor) else output)
        if with_grad is None or not wire[0].requires_grad:
            return wire
        return (anchor(wire[0], with_grad), *wire[1:])

    def _unpacked(self, wire: Wire) -> list[torch.Tensor]:
        if self._entries is None:
            self._entries = read_header(wire)
        return unpack(wire, self._entries)
