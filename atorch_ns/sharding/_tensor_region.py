"""What the ranks of a tensor group do differently: their place, and random numbers inside divided regions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from atorch_ns.sharding._collectives import (
    all_gather,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)

__all__ = ["Division", "Region"]

_STRIDE = 7_919


class Division:
    """This rank's place among those that layers are divided over.

    Args:
        mesh: the tensor axis; ``None`` to compute shapes without ranks to talk to: nothing is communicated.
        degree: the number of ranks; needed without a mesh.
    """

    def __init__(self, mesh: DeviceMesh | None, *, degree: int = 0) -> None:
        self.mesh = mesh
        self.degree = degree or (mesh.size() if mesh is not None else 1)
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.group: dist.ProcessGroup | None = None if mesh is None else mesh.get_group()

    def __deepcopy__(self, memo: Any) -> Division:
        return self

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that all ranks hold alike, to compute parts of results with; its gradient is summed."""
        return x if self.group is None else copy_to(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of partial results, whole on every rank."""
        return x if self.group is None else reduce_from(x, self.group)

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of what lies in pieces along ``dim``, for all ranks to do the same with."""
        return torch.cat([x] * self.degree, dim) if self.group is None else gather_from(x, dim, self.group)

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's piece of what all hold alike."""
        return x.chunk(self.degree, dim)[0] if self.group is None else scatter_to(x, dim, self.group)

    def enter_whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of what lies in pieces along ``dim``, to compute parts of results with; gradients are summed."""
        return torch.cat([x] * self.degree, dim) if self.group is None else all_gather(x, dim, self.group)

    def leave_in_pieces(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's piece along ``dim`` of the sum of partial results."""
        return x.chunk(self.degree, dim)[0] if self.group is None else reduce_scatter(x, dim, self.group)


class Region:
    """The stretch of a forward pass between divided columns and the rows that sum their results.

    Columns that take one tensor enter with it once, so that its gradient is summed once. While it is inside a
    region in training, each rank draws random numbers of its own, since it holds other features; outside, all
    draw alike. The state at the beginning is a function of the default generator's, so recomputation draws
    the same again.

    Args:
        division: this rank's place.
        num_rows: row layers that end the region.
        random: whether random numbers are drawn inside.
        sequence_dim: the dimension along which each rank holds a piece of the sequence outside the region;
            ``None`` where all hold the whole.
    """

    def __init__(
        self, division: Division, *, num_rows: int, random: bool, sequence_dim: int | None = None
    ) -> None:
        self.random = random
        self.sequence_dim = sequence_dim
        self.gathers = sequence_dim is not None
        """Whether columns gather their input; else a module around them has done it."""
        self._division = division
        self._num_rows = num_rows
        self._rows_left = 0
        self._entered: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self._saved: tuple[torch.Tensor, torch.Tensor | None, torch.device] | None = None

    def __deepcopy__(self, memo: Any) -> Region:
        made = Region(
            self._division, num_rows=self._num_rows, random=self.random, sequence_dim=self.sequence_dim
        )
        made.gathers = self.gathers
        memo[id(self)] = made
        return made

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a column, ready to be computed with."""
        if not torch.is_grad_enabled():
            return self._enter(x)
        if self._entered is not None and self._entered[0] is x and self._entered[1] == x._version:
            return self._entered[2]
        entered = self._enter(x)
        self._entered = (x, x._version, entered)
        return entered

    def entered(self, x: torch.Tensor) -> None:
        """``x`` is ready to be computed with as it is: its gradient is summed already."""
        self._entered = (x, x._version, x)

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        if self.gathers and self.sequence_dim is not None:
            return self._division.enter_whole(x, self.sequence_dim)
        return self._division.enter(x)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of a row's partial results, whole or this rank's piece of the sequence."""
        if self.sequence_dim is None:
            return self._division.leave(partial)
        return self._division.leave_in_pieces(partial, self.sequence_dim)

    def inside(self, training: bool, device: torch.device) -> None:
        """A column is done: from here on ranks hold different features."""
        if self.random and training and self._saved is None:
            self._rows_left = self._num_rows
            self._draw_apart(device)

    def outside(self) -> None:
        """A row begins: what follows is alike on all ranks again."""
        self._entered = None
        if self._saved is not None:
            self._restore()
            self._rows_left -= 1

    def after_row(self, device: torch.device) -> None:
        """A row is done; other rows of the region may still be to come."""
        if self._rows_left > 0 and self._saved is None:
            self._draw_apart(device)

    def watch(self, module: nn.Module) -> None:
        """Ends the region with ``module``, which holds it, however its forward pass ends."""
        module.register_forward_hook(self._end, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._entered = None
        self._rows_left = 0
        if self._saved is not None:
            self._restore()

    def _draw_apart(self, device: torch.device) -> None:
        seed = int(torch.empty((), dtype=torch.int64).random_())
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._saved = (torch.get_rng_state(), cuda, device)
        torch.manual_seed((seed + (self._division.rank + 1) * _STRIDE) % 2**63)

    def _restore(self) -> None:
        assert self._saved is not None
        cpu, cuda, device = self._saved
        self._saved = None
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
