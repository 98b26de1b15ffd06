"""The device mesh of a job: torch's ``DeviceMesh`` over the groups that :func:`layout` names.

Pure functions give the groups of ranks along each axis, so that any world size can be checked.
The first axis named is the innermost: its groups are neighbouring ranks. With
``[("tensor", 4), ("pipeline", 2), ("data", 2)]`` on 16 ranks, tensor groups are ``[0, 1, 2, 3], …``, pipeline
groups ``[0, 4], …`` and data groups ``[0, 8], …``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from atorch_ns.cluster.agreement import agree
from atorch_ns.cluster.memory_limit import require_room_for_threads
from atorch_ns.errors import LayoutError
from atorch_ns.text import clip_text, count_noun
from atorch_ns.torch_compat import flatten_mesh

AXES = ("data", "zero", "tensor", "sequence", "pipeline", "expert")
"""The axes a mesh may have. ``pipe`` is read as ``pipeline``."""

_ALIASES = {"pipe": "pipeline"}

Axes = Sequence[tuple[str, int]]


def check_axes(axes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Checks names and sizes, and replaces aliases.

    Raises:
        LayoutError: with every unknown name, repeated name, and size that is not a positive integer.
    """
    pairs = [(_ALIASES.get(name, name), size) for name, size in axes]
    names = [name for name, _ in pairs]
    problems = [f"the axis {name!r} is named twice." for name in AXES if names.count(name) > 1]
    for name, size in pairs:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            problems.append(f"{name}={size!r} is not a size: give a positive integer.")
    unknown = [repr(name) for name in names if name not in AXES]
    if unknown:
        problems.append(f"unknown axis {', '.join(unknown)}. Axes are {', '.join(AXES)}.")
    if problems:
        raise LayoutError(" ".join(problems))
    return tuple(pairs)


def fit(axes: Iterable[tuple[str, int]], world_size: int) -> tuple[tuple[str, int], ...]:
    """Sets the size of ``data`` so that all sizes multiply to the number of processes.

    A missing ``data`` axis is added, outermost, where the other sizes leave room for it.

    Raises:
        LayoutError: if the other sizes do not divide ``world_size``.
    """
    pairs = check_axes(axes)
    others = [(name, size) for name, size in pairs if name != "data"]
    product = math.prod(size for _, size in others)
    if world_size % product:
        raise LayoutError(_indivisible_message(others, product, world_size))
    data = world_size // product
    if all(name != "data" for name, _ in pairs):
        return (*pairs, ("data", data)) if data > 1 or not pairs else pairs
    return tuple((name, data if name == "data" else size) for name, size in pairs)


def layout(
    axes: Iterable[tuple[str, int]], world_size: int, rank_order: Sequence[int] | None = None
) -> dict[str, list[list[int]]]:
    """The groups of ranks along each axis.

    Args:
        axes: ``(name, size)``, innermost first. The size of ``data`` is fitted to ``world_size``.
        world_size: number of processes.
        rank_order: ``rank_order[i]`` is the rank at position ``i``; ``None`` for 0, 1, 2, ….

    Returns:
        For every axis its groups, each a list of ranks in mesh order.

    Raises:
        LayoutError: if sizes or rank order do not describe ``world_size`` processes.

    Example:
        >>> layout([("tensor", 2), ("data", 2)], 4)
        {'tensor': [[0, 1], [2, 3]], 'data': [[0, 2], [1, 3]]}
    """
    sized_axes = fit(axes, world_size)
    ranks = mesh_ranks(sized_axes, world_size, rank_order)
    groups: dict[str, list[list[int]]] = {}
    for position, (name, size) in enumerate(reversed(sized_axes)):  # the array's dims are outermost first
        lines = np.moveaxis(ranks, position, -1).reshape(-1, size)  # [groups, size]
        groups[name] = lines.tolist()
    return {name: groups[name] for name, _ in sized_axes}


def mesh_ranks(
    axes: Iterable[tuple[str, int]], world_size: int, rank_order: Sequence[int] | None = None
) -> np.ndarray:
    """The ranks as an array with one dimension per axis, outermost axis first (as ``DeviceMesh`` wants it).

    Raises:
        LayoutError: if sizes do not multiply to ``world_size`` or ``rank_order`` is not a permutation.
    """
    sizes = [size for _, size in check_axes(axes)]
    if math.prod(sizes) != world_size:
        raise LayoutError(f"the sizes multiply to {math.prod(sizes)}, but there are {world_size} processes.")
    order = list(range(world_size)) if rank_order is None else list(rank_order)
    if sorted(order) != list(range(world_size)):
        raise LayoutError(
            f"the rank order must name each of the ranks 0 to {world_size - 1} once; it is {clip_text(repr(order), 80)}."
        )
    return np.asarray(order).reshape(list(reversed(sizes)))


def _indivisible_message(others: Axes, product: int, world_size: int) -> str:
    sizes = " × ".join(f"{name}={size}" for name, size in others)
    total = f" (= {product})" if len(others) > 1 else ""
    advice = f"Start {product * max(1, round(world_size / product))} processes"
    if len(others) == 1:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        advice = (
            f"Use {others[0][0]} in {{{', '.join(map(str, divisors[:12]))}}} or start {product} processes"
        )
    return f"{sizes}{total} does not divide {world_size} processes. {advice}."


_GROUP_THREADS = 3
"""Threads that a process group of gloo starts (torch 2.13)."""

# The order of the mesh's dimensions. The groups along each axis are those of the user's order of axes, which
# the array of ranks keeps; but torch slices a mesh only in its own order, and hybrid sharding wants
# (replicate, shard), tensor parallelism its axis last.
_MESH_ORDER = ("pipeline", "data", "expert", "zero", "sequence", "tensor")


class Mesh:
    """The ranks of a job arranged along named axes.

    Creation is collective. Every rank of the job must create it with the same axes.

    Args:
        axes: ``(name, size)``, innermost first; sizes multiply to the number of processes.
        device_type: ``"cpu"`` or ``"cuda"``.
        rank_order: the rank at each position; ``None`` for 0, 1, 2, ….

    Attributes:
        axes: the axes, innermost first.
        device_mesh: torch's mesh over all axes, in the order pipeline, data, expert, zero, sequence, tensor.
    """

    def __init__(
        self, axes: Iterable[tuple[str, int]], *, device_type: str, rank_order: Sequence[int] | None = None
    ) -> None:
        self.axes = check_axes(axes)
        if not {"data", "zero"} & {name for name, _ in self.axes}:
            self.axes = (*self.axes, ("data", 1))  # the data group must exist
        # First: a rank that waits for others to make groups does not notice that one of them has ended.
        num_groups = sum(size > 1 for _, size in self.axes) if len(self.axes) > 1 else 0

        def arrange() -> np.ndarray:
            require_room_for_threads(
                num_groups * _GROUP_THREADS,
                torch.device(device_type),
                what=count_noun(num_groups, "process group"),
            )
            return mesh_ranks(self.axes, dist.get_world_size(), rank_order)

        ranks = agree(arrange, what="arranging the ranks", distributed=True)
        order = [name for name, _ in reversed(self.axes)]
        names = [name for name in _MESH_ORDER if name in order]
        ranks = ranks.transpose([order.index(name) for name in names])
        self.device_mesh = DeviceMesh(device_type, torch.tensor(ranks), mesh_dim_names=tuple(names))
        self._data = self._flatten_axes(tuple(name for name in names if name in ("data", "zero", "expert")))
        self._copies = self._flatten_axes(tuple(name for name in names if name in ("data", "zero")))
        self._replicas = tuple(name for name in names if name in ("data", "expert") and self.size(name) > 1)
        if self.size("zero") > 1 and len(self._replicas) > 1:  # for replicate_and_shard
            self._flatten_axes(self._replicas)
        # With a zero axis, states are sharded over it alone; data and expert hold replicas.
        sharding = ("zero",) if self.size("zero") > 1 else ("data", "zero", "expert")
        with_sequence = tuple(name for name in names if name in (*sharding, "sequence"))
        self._unit_shard = self._flatten_axes(with_sequence) if self.size("sequence") > 1 else self.shard

    @property
    def divides_model(self) -> bool:
        """True if ranks hold different parts of the model or of a sample."""
        return any(self.size(name) > 1 for name in ("tensor", "sequence", "pipeline", "expert"))

    def size(self, name: str) -> int:
        """The size of an axis; 1 if the mesh has no such axis."""
        return dict(self.axes).get(name, 1)

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of this rank along ``name``."""
        return self.device_mesh[name]

    @property
    def data(self) -> DeviceMesh:
        """The ranks that see different data: ``data``, ``zero`` and ``expert`` together, as one dimension."""
        return self._data

    @property
    def copies(self) -> DeviceMesh:
        """Ranks of :attr:`data` with the same experts: ``data`` and ``zero`` together, as one dimension."""
        return self._copies

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The process group of :attr:`data`."""
        return self._data.get_group()

    @property
    def shard(self) -> DeviceMesh:
        """The mesh over which states are sharded: ``zero`` if it is larger than 1, else ``data``."""
        return self.axis("zero") if self.size("zero") > 1 else self._data

    @property
    def unit_shard(self) -> DeviceMesh:
        """Ranks that divide sharded states: :attr:`shard` and ``sequence`` (equal parameters), as one dim."""
        return self._unit_shard

    @property
    def replicate_and_shard(self) -> DeviceMesh:
        """Mesh for fully sharded training: ``(replicate, shard)``, or one dimension where zero is alone.

        States that are not sharded over ``expert`` are replicated there, as over ``data``.
        """
        if self._replicas and self.size("zero") > 1:
            sharding = (self._unit_shard.mesh_dim_names or ())[0]
            return self.device_mesh["_".join(self._replicas), sharding]
        return self._unit_shard

    def _flatten_axes(self, names: tuple[str, ...]) -> DeviceMesh:
        if len(names) == 1:
            return self.device_mesh[names[0]]
        return flatten_mesh(self.device_mesh[names], "_".join(names))
