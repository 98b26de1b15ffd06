"""The device mesh of a job: torch's ``DeviceMesh`` over the groups that :func:`layout` names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from atorch_ns.cluster._layout import check_axes, mesh_ranks
from atorch_ns.torch_compat import flatten_mesh

__all__ = ["Mesh"]

# The order of the mesh's dimensions. The groups along each axis are those of the user's order of axes, which
# the array of ranks keeps; but torch slices a mesh only in its own order, and hybrid sharding wants
# (replicate, shard), tensor parallelism its axis last.
_MESH_ORDER = ("pipeline", "data", "expert", "zero", "sequence", "tensor")


class Mesh:
    """The ranks of a job arranged along named axes.

    Creating one is collective: every rank of the job must do it, with the same axes.

    Args:
        axes: ``(name, size)``, innermost first; sizes multiply to the number of processes.
        device_type: ``"cpu"`` or ``"cuda"``.
        rank_order: the rank at each position; ``None`` for 0, 1, 2, ….

    Attributes:
        axes: the axes, innermost first.
        device_mesh: torch's mesh over all axes, in the order pipeline, data, expert, zero, sequence, tensor.
    """

    def __init__(
        self,
        axes: Iterable[tuple[str, int]],
        *,
        device_type: str,
        rank_order: Sequence[int] | None = None,
    ) -> None:
        self.axes = check_axes(axes)
        if not {"data", "zero"} & {name for name, _ in self.axes}:
            self.axes = (*self.axes, ("data", 1))
        ranks = mesh_ranks(self.axes, dist.get_world_size(), rank_order)
        written = [name for name, _ in reversed(self.axes)]
        names = [name for name in _MESH_ORDER if name in written]
        ranks = ranks.transpose([written.index(name) for name in names])
        self.device_mesh = DeviceMesh(device_type, torch.tensor(ranks), mesh_dim_names=tuple(names))
        self._data = self._flat(tuple(name for name in names if name in ("data", "zero", "expert")))
        self._copies = self._flat(tuple(name for name in names if name in ("data", "zero")))
        self._replicas = tuple(name for name in names if name in ("data", "expert") and self.size(name) > 1)
        if self.size("zero") > 1 and len(self._replicas) > 1:
            self._flat(self._replicas)

    @property
    def divides_model(self) -> bool:
        """Whether ranks hold different parts of the model or of a sample."""
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
        """Those of :attr:`data` that hold the same experts: ``data`` and ``zero`` together, as one dimension."""
        return self._copies

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The process group of :attr:`data`."""
        return self._data.get_group()

    @property
    def shard(self) -> DeviceMesh:
        """Where states are sharded: ``zero`` if it is larger than 1, else ``data``."""
        return self.axis("zero") if self.size("zero") > 1 else self._data

    @property
    def replicate_and_shard(self) -> DeviceMesh:
        """For fully sharded training: ``(replicate, shard)`` where zero is not alone, else one dimension.

        What is not sharded over ``expert`` is replicated there, as it is over ``data``.
        """
        if self._replicas and self.size("zero") > 1:
            return self.device_mesh["_".join(self._replicas), "zero"]
        return self.shard

    def _flat(self, names: tuple[str, ...]) -> DeviceMesh:
        if len(names) == 1:
            return self.device_mesh[names[0]]
        return flatten_mesh(self.device_mesh[names], "_".join(names))
