"""Plan: what a strategy decides, in the words that an estimate needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["DATA_AXES", "MODEL_AXES", "AxisSize", "Extra", "NarrowProducts", "Plan"]

AxisSize = tuple[str, int]

DATA_AXES = ("data", "zero", "expert")
"""Axes whose ranks see different data."""

MODEL_AXES = ("tensor", "sequence", "pipeline", "expert")
"""Axes whose ranks hold different parts of the model, or of a sample."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A cost of a method that no other field of a plan expresses.

    Attributes:
        method: whose.
        parameter_copies: bytes on every rank, in units of all the model's parameters as they are stored.
        gradient_copies: the same, only while gradients are alive.
        fixed_bytes: bytes on every rank, whatever the model.
        compute_factor: factor on the time of all computation (0.8 for a kernel that saves a fifth).
        seconds_per_step: time added to each step.
    """

    method: str
    parameter_copies: float = 0.0
    gradient_copies: float = 0.0
    fixed_bytes: int = 0
    compute_factor: float = 1.0
    seconds_per_step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NarrowProducts:
    """Matrix products of linear layers in fewer bits than all else computes in.

    Attributes:
        dtype: as the device's FLOP/s are named: ``"float8"``.
        include: parts of names, one of which a layer's name must contain; ``None`` for all.
        exclude: parts of names that it may not contain.
        multiple: what both dims of a layer's weight are multiples of.
        casts_per_operand: bytes that finding scales and rounding move, in units of the bytes that a product reads and
            writes.
    """

    dtype: str
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    multiple: int = 16
    casts_per_operand: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the methods of a strategy decide together, before anything is applied.

    Each method adds its part by ``plan``; all methods read the whole. dtypes are named as in
    ``torch.<name>``; ``None`` for a dtype means that of the parameters.

    Attributes:
        axes: the mesh, ``(name, size)``, innermost first.
        rank_order: the ranks in mesh order; ``None`` for 0, 1, 2, ….
        gradient_sync: how gradients of different data are combined.
        parameters_over, gradients_over, optimizer_over: the axes over which each is sharded.
        parameter_dtype: of the weights that the model computes with between steps.
        master_dtype: of a second copy that the optimizer updates; ``None`` when there is none.
        compute_dtype: of matrix products, where it differs (autocast, or FSDP's mixed precision).
        loss_scaling: whether the loss is scaled dynamically.
        recompute: what is recomputed in the backward pass.
        recompute_every: every n-th block is recomputed.
        offload: whether parameters, gradients and optimizer states stay in host memory.
        offload_optimizer: whether the optimizer updates copies of the weights in host memory, so that they and its
            states are kept there.
        offload_activations: whether what recomputation begins from stays in host memory.
        compiled: whether blocks are compiled.
        replaced: whether modules are replaced by fused ones.
        narrow: linear layers whose matrix products are in fewer bits; ``None`` where there are none.
        num_micro_batches: passes over parts of a rank's batch that gradients are accumulated over.
        units: what is gathered together where parameters are sharded: selectors of modules, ``None`` for the
            repeated blocks, ``()`` for the whole model at once.
        keeps_gathered: whether gathered parameters stay from the forward to the backward pass.
        gather_dtype: of gathered parameters, where it differs.
        reduce_dtype: of reduced gradients, where it differs.
        prefetched_units: units gathered ahead of the one that computes.
        bucket_bytes: gradients are reduced in buckets of about this size; 0 for unit by unit.
        shard_layout: how a tensor is divided: ``rows`` of each parameter (fully_shard), ``flat`` (all of a
            unit as one vector), or whole ``parameters`` given to ranks (ZeroRedundancyOptimizer).
        recomputed: selectors of what is recomputed, ``None`` for the repeated blocks.
        saved_operators: operators whose results recomputation keeps.
        flat_alignment: in the layout ``flat``, bytes whose multiple each parameter begins at; 0 for none.
        flat_multiple: in the layout ``flat``, elements whose multiple each rank's piece is.
        updates_copy: whether the optimizer updates a copy of its share, although the weights are in its dtype.
        frees_gradients: whether no gradient is alive once the optimizer has stepped.
        bucket_views: whether gradients lie in the buckets that are reduced; else both are kept.
        follows_compute: whether parameters are gathered in the compute dtype of a method that comes later.
        compiler: the backend that compiles blocks; empty where nothing is compiled.
        tensor_sequence: whether the residual stream is divided along its tokens over the axis ``tensor`` between
            the layers that this axis divides (Megatron's sequence parallelism).
        parallel_loss: whether logits stay divided over the vocabulary along the axis ``tensor``, and the loss is
            computed on the parts.
        sequence_exchange: how attention over the axis ``sequence`` sees the tokens of other ranks: heads against
            tokens (``ulysses``), or keys and values that travel from rank to rank (``ring``).
        sequence_blocks: selectors of what runs on a part of a sample, ``None`` for the repeated blocks.
        schedule: the order of a pipeline's passes, by its name; ``auto`` for the fastest that fits.
        stages_per_rank: stages of a pipeline on each rank; 0 for what the schedule needs.
        split_method: how a pipeline is cut: ``auto`` (the stages that take least time), ``uniform`` (equal
            numbers of blocks), ``parameters`` (equal numbers of parameters), ``custom`` (at split_points).
        split_points: modules that begin a stage, where the user names them.
        experts: selectors of the modules whose experts are divided, ``None`` for all that are found.
        extras: costs that none of the fields above expresses.
    """

    axes: tuple[AxisSize, ...] = ()
    rank_order: tuple[int, ...] | None = None
    gradient_sync: Literal["none", "all_reduce", "reduce_scatter"] = "none"
    parameters_over: tuple[str, ...] = ()
    gradients_over: tuple[str, ...] = ()
    optimizer_over: tuple[str, ...] = ()
    parameter_dtype: str = "float32"
    master_dtype: str | None = None
    compute_dtype: str | None = None
    loss_scaling: bool = False
    recompute: Literal["none", "blocks", "selective"] = "none"
    recompute_every: int = 1
    offload: bool = False
    offload_optimizer: bool = False
    offload_activations: bool = False
    compiled: bool = False
    replaced: bool = False
    narrow: NarrowProducts | None = None
    num_micro_batches: int = 1
    units: tuple[str, ...] | None = None
    keeps_gathered: bool = False
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    prefetched_units: int = 1
    bucket_bytes: int = 0
    shard_layout: Literal["rows", "flat", "parameters"] = "rows"
    recomputed: tuple[str, ...] | None = None
    saved_operators: tuple[str, ...] = ()
    flat_alignment: int = 0
    flat_multiple: int = 1
    updates_copy: bool = False
    frees_gradients: bool = False
    bucket_views: bool = True
    follows_compute: bool = False
    compiler: str = ""
    tensor_sequence: bool = False
    parallel_loss: bool = False
    sequence_exchange: Literal["ulysses", "ring"] = "ulysses"
    sequence_blocks: tuple[str, ...] | None = None
    schedule: str = "1F1B"
    stages_per_rank: int = 0
    split_method: Literal["auto", "uniform", "parameters", "custom"] = "auto"
    split_points: tuple[str, ...] = ()
    experts: tuple[str, ...] | None = None
    extras: tuple[Extra, ...] = ()

    def size(self, names: str | Iterable[str]) -> int:
        """The product of the sizes of the named axes; an absent axis counts 1."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        product = 1
        for name, size in self.axes:
            if name in wanted:
                product *= size
        return product

    @property
    def whole_backward(self) -> bool:
        """Whether a pipeline never takes backward passes apart: compiled blocks and selective recomputation compute
        the gradients of inputs and weights at once, and only once."""
        return self.compiled or self.recompute == "selective"

    @property
    def num_data_ranks(self) -> int:
        """How many ranks see different data."""
        return self.size(DATA_AXES)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that sharded states are divided over: ``zero`` where there is one, else ``data``."""
        return ("zero",) if self.size("zero") > 1 else ("data",)
