"""Rank context of divided layers: the tensor group, its regions, a rank's parts, and its own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atorch_ns.capture.random_states import random_states_kept, save_generators
from atorch_ns.sharding.collectives import (
    Group,
    SimulatedGroup,
    all_gather,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
    traced_gather,
    traced_scatter,
)

T = TypeVar("T")

Gather = Callable[[torch.Tensor, int, ProcessGroup], torch.Tensor]
"""``(piece, dim, group) -> whole``."""

_REGION_STRIDE = 7_919  # between the seeds of two ranks in a region; a prime

_SEEDS = 2**62  # seeds of RankRandomness are below it: with a rank added they stay in int64


def unit_dim(
    shape: Sequence[int], ranks: int | np.ndarray, *, is_divided: bool | np.ndarray = False
) -> np.ndarray:
    """The dimension along which ``fully_shard`` divides a parameter of a unit, for each number of ranks.

    It is the first, unless rows would leave ranks with nothing or are divided already, as those of experts
    over their axis. Then it is another one that divides evenly, if there is one.
    """
    if len(shape) < 2:
        return np.zeros_like(ranks)
    is_even = [np.asarray((np.remainder(size, ranks) == 0) & (size > 0)) for size in shape[1:]]
    other = np.select(is_even, list(range(1, len(shape))))
    return np.where((shape[0] >= np.asarray(ranks)) & np.logical_not(is_divided), 0, other)


def local_part(parameter: Any) -> torch.Tensor:
    """This rank's part of a divided parameter, with gradients. A plain tensor is returned as it is."""
    local: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local


def divide_class(module: nn.Module, style: type) -> None:
    """Makes a module's class a subclass of it and ``style``. Layers of equal classes share the subclass."""
    whole: Any = type(module)
    module.__class__ = _divided_subclass(style, whole)


@cache
def _divided_subclass(style: Any, whole: Any) -> Any:
    body = {
        "whole_forward": whole.forward,  # for styles that run the code of the module's own class
        "whole_class": whole,
        "__doc__": f"{whole.__name__}: {style.__doc__}",
    }
    return type(f"{style.__name__.removeprefix('_')}{whole.__name__}", (style, whole), body)


def call_in_thread(action: Callable[[], T], device: torch.device) -> T:
    """Runs ``action()`` in a thread of its own, outside autocast, modes and the hooks of a recomputation.

    Such hooks expect the same operators again. Random states, which threads share, are restored.
    """

    def run() -> T:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread begins with device 0
        with random_states_kept(device):
            return action()

    # Autocast, modes and hooks on saved tensors belong to the thread that turned them on.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class TensorGroup:
    """The ranks that layers are divided over, and this rank's place among them.

    Args:
        ranks: the tensor axis; or a simulated group, whose ranks hold their parts as plain tensors; or the
            number of ranks, to compute shapes without communication.
        overlap: whether layers compute in halves, each reduced while the next is computed; tensor axis only.
        traced: whether a compiler takes divided layers and the gathers and scattered sums between them into
            its graphs; where the sequence is divided, and on a tensor axis alone.
    """

    def __init__(
        self, ranks: DeviceMesh | SimulatedGroup | int, *, overlap: bool = False, traced: bool = False
    ) -> None:
        self.overlap = overlap
        self.traced = traced
        self.mesh: DeviceMesh | None = None  # None: parts are plain tensors
        self.process_group: Group | None = None  # None: only shapes are computed
        self.rank = 0
        if isinstance(ranks, int):
            self.size = ranks
            return
        if isinstance(ranks, SimulatedGroup):
            self.process_group = ranks
        else:
            self.mesh, self.process_group = ranks, ranks.get_group()
        self.size, self.rank = self.process_group.size(), self.process_group.rank()

    def __deepcopy__(self, memo: Any) -> TensorGroup:
        return self  # copies of a model keep their ranks

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Prepares a tensor that is equal on all ranks as input of divided layers. Its gradient is summed."""
        return x if self.process_group is None else copy_to(x, self.process_group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of partial results, whole on every rank."""
        return x if self.process_group is None else reduce_from(x, self.process_group)

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The pieces of all ranks joined along ``dim``, for a computation that is the same on all ranks."""
        if self.process_group is None:
            # Without ranks only the shape counts.
            return torch.cat([x] * self.size, dim)
        return gather_from(x, dim, self.process_group)

    def scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's piece along ``dim`` of a tensor that is equal on all ranks."""
        if self.process_group is None:
            return x.chunk(self.size, dim)[0]
        return scatter_to(x, dim, self.process_group)

    def enter_whole(self, x: torch.Tensor, dim: int, gather: Gather | None = None) -> torch.Tensor:
        """The pieces of all ranks joined along ``dim``, as the input of divided layers; gradients are summed.

        In a compiler's graphs, ``gather`` takes the place of :func:`traced_gather`.
        """
        if self.process_group is None:
            return torch.cat([x] * self.size, dim)
        if self.traced and not isinstance(self.process_group, SimulatedGroup):
            return (gather or traced_gather)(x, dim, self.process_group)
        return all_gather(x, dim, self.process_group)

    def leave_in_pieces(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's piece along ``dim`` of the sum of partial results."""
        if self.process_group is None:
            return x.chunk(self.size, dim)[0]
        if self.traced and not isinstance(self.process_group, SimulatedGroup):
            return traced_scatter(x, dim, self.process_group)
        return reduce_scatter(x, dim, self.process_group)


class Region:
    """The part of a forward pass between column-parallel layers and the row-parallel ones that sum results.

    Column-parallel layers of one tensor share the communication at its entry: its gradient is summed once. In
    training each rank draws its own random numbers inside, since it holds other features; outside, all draw
    the same. The initial state follows from the default generator's, so recomputation repeats the draws.

    Args:
        num_rows: row-parallel layers that end the region.
        random: whether random numbers are drawn inside.
        sequence_dim: the dimension along which each rank holds a piece of the sequence outside the region;
            ``None`` where all hold the whole.
        traced: whether a compiler includes its layers in graphs. They then leave this object unchanged.
    """

    def __init__(
        self,
        group: TensorGroup,
        *,
        num_rows: int,
        random: bool,
        sequence_dim: int | None = None,
        traced: bool = False,
    ) -> None:
        self.random = random
        self.traced = traced
        self.sequence_dim = sequence_dim
        self.gathers = sequence_dim is not None
        """True if column-parallel layers gather their input. Otherwise a module around them does."""
        self._group = group
        self._num_rows = num_rows
        self._rows_left = 0  # rows of the region that are still to come in this pass
        self._entry: tuple[torch.Tensor, int, torch.Tensor] | None = None  # input, its version, result
        self._restore: Callable[[], None] | None = None  # back to the shared state; None outside

    def __deepcopy__(self, memo: Any) -> Region:
        region = Region(
            self._group,
            num_rows=self._num_rows,
            random=self.random,
            sequence_dim=self.sequence_dim,
            traced=self.traced,
        )
        region.gathers = self.gathers
        memo[id(self)] = region  # layers of a copied model share one region, as those of the original do
        return region

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a column-parallel layer, communicated once for each tensor."""
        if self.traced:
            return self._enter_input(x) if self.gathers else x
        if not torch.is_grad_enabled():
            return self._enter_input(x)
        if self._entry is not None and self.has_entered(x):
            return self._entry[2]
        result = self._enter_input(x)
        self._entry = (x, x._version, result)  # the version tells changes in place
        return result

    def has_entered(self, x: torch.Tensor) -> bool:
        """Returns whether ``x`` has been communicated and not been changed since."""
        return self._entry is not None and self._entry[0] is x and self._entry[1] == x._version

    def entered(self, x: torch.Tensor, whole: torch.Tensor | None = None) -> None:
        """Marks ``x`` as communicated: :meth:`enter` returns ``whole``, or ``x`` as it is."""
        self._entry = (x, x._version, x if whole is None else whole)

    def _enter_input(self, x: torch.Tensor) -> torch.Tensor:
        if self.gathers and self.sequence_dim is not None:
            return self._group.enter_whole(x, self.sequence_dim)
        return self._group.enter(x)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of a row-parallel layer's partial results, whole or this rank's piece of the sequence."""
        if self.sequence_dim is None:
            return self._group.leave(partial)
        return self._group.leave_in_pieces(partial, self.sequence_dim)

    def inside(self, training: bool, device: torch.device) -> None:
        """Called after a column-parallel layer: from here on ranks hold different features."""
        # Only the first column seeds; the next ones find it done.
        if self.random and training and self._restore is None:
            self._rows_left = self._num_rows
            self._seed_this_rank(device)

    def outside(self) -> None:
        """Called before a row-parallel layer: its results are equal on all ranks again."""
        self._entry = None
        if self._restore is not None:
            self._restore_shared()
            self._rows_left -= 1

    def after_row(self, device: torch.device) -> None:
        """Called after a row-parallel layer; others of the region may follow."""
        if self._rows_left > 0 and self._restore is None:
            self._seed_this_rank(device)

    def watch(self, module: nn.Module) -> None:
        """Ends the region when the forward pass of the enclosing ``module`` ends, even by an error."""
        module.register_forward_hook(self._end_region, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end_region(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._entry = None
        self._rows_left = 0
        self._restore_shared()

    def _seed_this_rank(self, device: torch.device) -> None:
        # The same seed on all ranks, drawn before the state is saved: the next region gets another one.
        seed = int(torch.empty((), dtype=torch.int64).random_())
        self._restore = save_generators(device)
        torch.manual_seed((seed + (self._group.rank + 1) * _REGION_STRIDE) % 2**63)

    def _restore_shared(self) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None


class RankRandomness:
    """Per-rank random numbers. Generator states are derived from the state that ranks share.

    Between :meth:`enter` and :meth:`leave` each rank draws different numbers. Then all ranks continue from
    the state they shared, one draw later. A recomputation from the state of :meth:`enter` draws the same.

    Args:
        rank: this rank's place in its group.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._restore: list[Callable[[], None]] = []  # a stack, for a call inside another one

    def enter(self) -> None:
        """Seeds the generators for this rank."""
        # Drawn before the state is saved, so that the next call gets another seed.
        seed = int(torch.randint(_SEEDS, ()))
        self._restore.append(save_generators(self._device))
        torch.manual_seed(seed + self._rank)

    def leave(self) -> None:
        """Restores the shared state."""
        self._restore.pop()()
