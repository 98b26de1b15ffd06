"""Merak's groups of ranks: ``init``, the grid of the job, and the getters of ranks, sizes and process groups.

Ranks lie as Merak lays them out, the ranks that divide layers next to each other and stages outermost::

    rank = ((pipe * dp + data) * sp + sequence) * tp + model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final, Literal, get_args

import torch.distributed as dist

from atorch_ns.cluster import Cluster, Mesh, join_process_group
from atorch_ns.errors import InputError

Degree = int | Literal["auto"] | None
"""Ranks along an axis. ``"auto"`` for a search, ``None`` for the remaining ranks (dp) or 1."""

Axis = Literal["pipe", "data", "sequence", "model"]
AXES: Final[tuple[Axis, ...]] = get_args(Axis)
"""Merak's axes, outermost first."""

_NAMES: Final[dict[Axis, str]] = {  # axes of parallel_mode
    "pipe": "pipeline",
    "data": "data",
    "sequence": "sequence",
    "model": "tensor",
}


@dataclass(frozen=True)
class Grid:
    """The ranks of a job along Merak's axes.

    Attributes:
        sizes: ranks along each axis of :data:`AXES`.
        rank: this process.
        mesh: the process groups; ``None`` for a single process.
    """

    sizes: tuple[int, int, int, int]
    rank: int
    mesh: Mesh | None = field(default=None, repr=False, compare=False)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes in the order of ``parallel_mode``, innermost first."""
        return tuple((_NAMES[axis], self.get_dim(axis)) for axis in reversed(AXES))

    def get_dim(self, axis: Axis) -> int:
        """The size of an axis."""
        return self.sizes[AXES.index(axis)]

    def get_rank(self, **places: int) -> int:
        """The rank at a place along every axis that is larger than 1."""
        self._check_coords(places)
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + places.get(axis, 0)  # row-major: model changes fastest
        return rank

    def get_coord(self, rank: int) -> dict[Axis, int]:
        """The place of a rank along each axis."""
        if not 0 <= rank < self.world_size():
            raise InputError(f"rank {rank} is not in a grid of {self.world_size()} ranks.")
        coords: dict[Axis, int] = {}
        for axis, size in reversed(tuple(zip(AXES, self.sizes, strict=True))):
            rank, coords[axis] = divmod(rank, size)  # innermost axis first
        return {axis: coords[axis] for axis in AXES}

    def get_axis_comm_lists(self, axis: Axis) -> list[list[int]]:
        """The ranks of every group along an axis."""
        others = [range(1 if name == axis else size) for name, size in zip(AXES, self.sizes, strict=True)]
        return [
            [
                self.get_rank(**{**dict(zip(AXES, places, strict=True)), axis: index})
                for index in range(self.get_dim(axis))
            ]
            for places in product(*others)
        ]

    def position(self, axis: Axis) -> int:
        """This rank's place along an axis."""
        return self.get_coord(self.rank)[axis]

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """This rank's process group along an axis; ``None`` for a single process."""
        return None if self.mesh is None else self.mesh.axis(_NAMES[axis]).get_group()

    def get_global_rank(self) -> int:
        """Global rank of this process."""
        return self.rank

    def world_size(self) -> int:
        """Number of processes in the job."""
        pipe, data, sequence, model = self.sizes
        return pipe * data * sequence * model

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return self.position("pipe")

    def get_data_parallel_id(self) -> int:
        """This rank's part of the data."""
        return self.position("data")

    def stage_to_global(self, stage_id: int, data: int | None = None, model: int | None = None) -> int:
        """The rank of a stage, with this rank's other places where none are given."""
        places = {**self.get_coord(self.rank), "pipe": stage_id}
        places |= {} if data is None else {"data": data}
        places |= {} if model is None else {"model": model}
        return self.get_rank(**places)

    def _check_coords(self, places: dict[str, int]) -> None:
        for axis, index in places.items():
            if axis not in AXES or not 0 <= index < self.get_dim(axis):
                sizes = ", ".join(f"{name}={self.get_dim(name)}" for name in AXES)
                raise InputError(f"the grid {sizes} has no position {axis}={index}.")


@dataclass
class _World:
    """Decisions of :func:`init` for this process."""

    asked: dict[str, Degree] | None = None  # the degrees that the user gave
    grid: Grid | None = None  # None while degrees are searched for


_WORLD: Final = _World()


def init(
    *positional: object, dp: Degree = None, tp: Degree = None, pp: Degree = None, sp: Degree = None
) -> None:
    """Joins the ranks of the job and arranges them. Collective.

    Args:
        positional: refused, since Merak's documents and code give positions in different orders.
        dp: ranks that see different data; ``None`` for the remaining ranks.
        tp: ranks that divide layers.
        pp: stages.
        sp: ranks that divide the sequence.

    With ``"auto"`` for a degree, or without degrees on several processes, :class:`MerakTrainer` searches
    for the missing numbers, and the grid exists after the search.

    Raises:
        InputError: if the degrees do not fit the number of processes.
    """
    if positional:
        arguments = ", ".join(map(repr, positional))
        raise InputError(
            f"init({arguments}): name the degrees, as in init(dp=2, tp=1, pp=4). Merak's documents use the order "
            "(dp, tp, pp), but its code and examples use (pp, tp, dp), so positions are ambiguous."
        )
    degrees: dict[str, Degree] = {"dp": dp, "tp": tp, "pp": pp, "sp": sp}
    for name, degree in degrees.items():
        if (
            degree is not None
            and degree != "auto"
            and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1)
        ):
            raise InputError(f"init: {name} must be a number of ranks or 'auto'; got {degree!r}.")
    reset()
    cluster = Cluster.detect()
    join_process_group(cluster)
    open_ = "auto" in degrees.values() or (cluster.world_size > 1 and not any(degrees.values()))
    if not open_:
        # A wrong degree ends all ranks before groups are made.
        sizes = cluster.agree(lambda: _axis_sizes(degrees, cluster.world_size), what="laying out the ranks")
        decide(sizes, cluster)
    _WORLD.asked = degrees


def reset() -> None:
    """Resets the grid before another job of this process."""
    _WORLD.asked, _WORLD.grid = None, None


def decide(sizes: Sequence[int], cluster: Cluster) -> Grid:
    """Creates the grid of the job with its process groups. Collective."""
    pipe, data, sequence, model = sizes
    grid = Grid((pipe, data, sequence, model), cluster.rank)
    mesh = Mesh(grid.axes, device_type=cluster.device_type) if cluster.distributed else None
    _WORLD.grid = Grid(grid.sizes, cluster.rank, mesh)
    return _WORLD.grid


def asked_degrees() -> dict[str, Degree]:
    """The arguments of :func:`init`.

    Raises:
        InputError: before :func:`init`.
    """
    if _WORLD.asked is None:
        raise InputError("call init(dp=…, tp=…, pp=…) first: it lays out the ranks.")
    return dict(_WORLD.asked)


def is_decided() -> bool:
    """Returns whether the grid exists. It does not before :func:`init` or a search for its degrees."""
    return _WORLD.grid is not None


def get_grid() -> Grid:
    """The grid of the job.

    Raises:
        InputError: before :func:`init`, and before ``"auto"`` degrees have been found.
    """
    if _WORLD.grid is None:
        asked_degrees()
        raise InputError(
            "MerakTrainer searches for the degrees when training starts; the grid does not exist before."
        )
    return _WORLD.grid


get_topo = get_grid
"""Alias from Merak, where the topology is a separate object. :class:`Grid` has its methods, too."""


def _functions_of(
    axis: Axis,
) -> tuple[Callable[[], int], Callable[[], int], Callable[[], dist.ProcessGroup | None]]:
    """This rank's place along an axis, the number of its ranks, and their process group, as functions."""
    return (
        lambda: get_grid().position(axis),
        lambda: get_grid().get_dim(axis),
        lambda: get_grid().group(axis),
    )


get_data_parallel_rank, get_data_parallel_world_size, get_data_parallel_group = _functions_of("data")
"""Ranks that see different data."""

get_model_parallel_rank, get_model_parallel_world_size, get_model_parallel_group = _functions_of("model")
"""Ranks that divide layers."""

get_pipe_parallel_rank, get_pipe_parallel_world_size, get_pipe_parallel_group = _functions_of("pipe")
"""Ranks along the pipeline."""

get_sequence_parallel_rank, get_sequence_parallel_world_size, get_sequence_parallel_group = _functions_of(
    "sequence"
)
"""Ranks that divide the sequence."""


def _axis_sizes(degrees: dict[str, Degree], world_size: int) -> tuple[int, int, int, int]:
    numbers = {name: degree for name, degree in degrees.items() if isinstance(degree, int)}
    shared = numbers.get("tp", 1) * numbers.get("pp", 1) * numbers.get("sp", 1)
    data = numbers.get("dp", world_size // shared)  # the remaining ranks
    if data * shared != world_size:
        product_text = " × ".join(f"{name}={numbers.get(name, 1)}" for name in ("tp", "pp", "sp"))
        raise InputError(
            f"init: dp={numbers.get('dp', 'the rest')} × {product_text} do not match the {world_size} process(es) started. "
            f"{_suggest_degrees(world_size)}"
        )
    return numbers.get("pp", 1), data, numbers.get("sp", 1), numbers.get("tp", 1)  # in the order of AXES


def _suggest_degrees(world_size: int) -> str:
    if world_size == 1:
        return "Start more with torchrun --nproc-per-node N."
    examples = ", ".join(f"(dp={dp}, tp={tp}, pp={pp})" for dp, tp, pp in list(_list_degrees(world_size))[:4])
    return f"Such as {examples} would be."


def _list_degrees(world_size: int) -> Iterator[tuple[int, int, int]]:
    for tp, pp in product(range(1, world_size + 1), repeat=2):
        if world_size % (tp * pp) == 0:
            yield world_size // (tp * pp), tp, pp
