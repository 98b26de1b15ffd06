"""Plan: what a strategy decides, in the terms that an estimate needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple

AxisSize = tuple[str, int]

DATA_AXES = ("data", "zero", "expert")
"""Axes whose ranks see different data."""

MODEL_AXES = ("tensor", "sequence", "pipeline", "expert")
"""Axes whose ranks hold different parts of the model, or of a sample."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A cost of a method that no other field of a plan expresses.

    Attributes:
        method: the method that has this cost.
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
        dtype: the name under which a device has its FLOP/s: ``"float8"``.
        include: parts of names, one of which a layer's name must contain; ``None`` for all.
        exclude: parts of names that it may not contain.
        multiple: the number of which both dims of a layer's weight are multiples.
        casts_per_operand: bytes moved to find scales and round, in units of a product's reads and writes.
        share: of a layer's products, forward and backward, that are in fewer bits.
        rate: of these products, over that of the device's best ones in this dtype.
        gathered: whether asynchronous gathers along ``tensor``, too, are in fewer bits.
    """

    dtype: str
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    multiple: int = 16
    casts_per_operand: float = 0.0
    share: float = 1.0
    rate: float = 1.0
    gathered: bool = False


def _only_where(condition: str, default: Any) -> Any:
    """A field that matters only under ``condition``, one of ``search.space.equivalence``."""
    return field(default=default, metadata={"only_where": condition})


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a plan, named as in ``torch.<name>``; ``None`` means that of the parameters.

    Attributes:
        parameter_dtype: dtype of the weights between steps.
        master_dtype: dtype of a second copy that the optimizer updates; ``None`` when there is none.
        compute_dtype: dtype of matrix products, where it differs (autocast, or FSDP's mixed precision).
        loss_scaling: whether the loss is scaled dynamically.
        narrow: linear layers whose matrix products are in fewer bits; ``None`` where there are none.
    """

    parameter_dtype: str = "float32"
    master_dtype: str | None = None
    compute_dtype: str | None = None
    loss_scaling: bool = False
    narrow: NarrowProducts | None = None


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Division of parameters, gradients and optimizer states over ranks, with gathering and reduction.

    Attributes:
        parameters_over, gradients_over, optimizer_over: the axes over which each is sharded.
        layout: how a tensor is divided: ``rows`` of each parameter (fully_shard), ``flat`` (all of a unit as
            one vector), or whole ``parameters`` given to ranks (ZeroRedundancyOptimizer).
        units: what is gathered together where parameters are sharded: selectors of modules, ``None`` for the
            repeated blocks, ``()`` for the whole model at once.
        keeps_gathered: whether gathered parameters stay from the forward to the backward pass.
        gather_dtype: dtype of gathered parameters, where it differs.
        reduce_dtype: dtype of reduced gradients, where it differs.
        bucket_bytes: gradients are reduced in buckets of about this size; 0 for unit by unit.
        bucket_views: when gradients lie in the buckets that are reduced: ``always``, once they are
            ``reduced`` (those of earlier micro-batches lie beside), or ``never``: both are kept.
        flat_multiple: in the layout ``flat``, divisor of the elements of each rank's piece.
        updates_copy: whether the optimizer updates a copy of its share, although the weights have its dtype.
        frees_gradients: whether no gradient is alive once the optimizer has stepped.
        follows_compute: whether parameters are gathered in the compute dtype of a method that comes later.
        reduces_each: whether gradients are reduced and sharded after every micro-batch, not kept whole until
            the last; ``None`` for :meth:`Plan.reduces_each` to decide.
    """

    parameters_over: tuple[str, ...] = ()
    gradients_over: tuple[str, ...] = ()
    optimizer_over: tuple[str, ...] = ()
    layout: Literal["rows", "flat", "parameters"] = _only_where("shards", "rows")
    units: tuple[str, ...] | None = _only_where("shards_model", None)
    keeps_gathered: bool = _only_where("shards_model", False)
    gather_dtype: str | None = _only_where("shards_model", None)
    reduce_dtype: str | None = _only_where("shards_model", None)
    bucket_bytes: int = _only_where("reduces", 0)
    bucket_views: Literal["always", "reduced", "never"] = "always"
    flat_multiple: int = 1
    updates_copy: bool = False
    frees_gradients: bool = False
    follows_compute: bool = False
    reduces_each: bool | None = _only_where("shards_model", False)


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Recomputation in the backward pass.

    Attributes:
        kind: whole ``blocks``, or ``selective``: all but the results of some operators.
        every: every n-th block is recomputed, where there is no share.
        share: of the blocks, which is recomputed: of all, of each stage of a pipeline, or ``"auto"``;
            ``None`` for every n-th of them. See :class:`~atorch_ns.pipeline.RecomputeShare`.
        by_stage: how the share of the first stage gives those of the others.
        chunk: neighbouring blocks that are recomputed as one.
        selectors: selectors of the recomputed modules, ``None`` for the repeated blocks.
        saved_operators: operators whose results are kept: names, or a rule of
            :func:`~atorch_ns.capture.operators.is_saved`.
        offload_activations: whether the inputs of recomputation stay in host memory.
    """

    kind: Literal["none", "blocks", "selective"] = "none"
    every: int = _only_where("recomputes", 1)
    share: float | tuple[float, ...] | Literal["auto"] | None = _only_where("recomputes", None)
    by_stage: Literal["same", "level", "merak"] = _only_where("recomputes", "same")
    chunk: int = _only_where("recomputes", 1)
    selectors: tuple[str, ...] | None = _only_where("recomputes", None)
    saved_operators: tuple[str, ...] | Literal["every_second_product", "all_but_attention"] = _only_where(
        "recomputes", ()
    )
    offload_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorParallelism:
    """Use of the axis ``tensor``.

    Attributes:
        sequence: whether the residual stream between these layers is divided by tokens, as in Megatron.
        parallel_loss: whether logits stay divided over the vocabulary, and the loss is computed on the parts.
        asynchronous: whether exchanges of a divided stream go on while the products beside them are computed.
    """

    sequence: bool = False
    parallel_loss: bool = False
    asynchronous: bool = False


@dataclass(frozen=True, kw_only=True)
class SequenceParallelism:
    """Use of the axis ``sequence``.

    Attributes:
        exchange: how attention sees tokens of other ranks: heads against tokens (``ulysses``), or keys and
            values that travel from rank to rank (``ring``).
        blocks: selectors of modules that run on a part of a sample; ``None`` for the repeated blocks.
        parallel_loss: whether the code after the last block (head and loss) runs on parts too.
    """

    exchange: Literal["ulysses", "ring"] = "ulysses"
    blocks: tuple[str, ...] | None = None
    parallel_loss: bool = False


@dataclass(frozen=True, kw_only=True)
class PipelineParallelism:
    """Use of the axis ``pipeline``.

    Attributes:
        schedule: the order of passes, by its name; ``auto`` for the fastest that fits.
        stages_per_rank: stages on each rank; 0 for what the schedule needs.
        split_method: where the model is cut: ``auto`` (the stages that take least time), ``uniform`` (equal
            numbers of blocks, the first stages one more), ``uniform_floor`` (the same, the stages after the
            first one more), ``parameters`` (equal numbers of parameters), ``custom`` (at split_points).
        split_points: modules that begin a stage, where the user names them.
        recomputed: the share of its blocks that each stage recomputes, once known; empty without shares.
    """

    schedule: str = "1F1B"
    stages_per_rank: int = 0
    split_method: Literal["auto", "uniform", "uniform_floor", "parameters", "custom"] = "auto"
    split_points: tuple[str, ...] = ()
    recomputed: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpertParallelism:
    """Use of the axis ``expert``.

    Attributes:
        modules: selectors of the modules whose experts are divided, ``None`` for all that are found.
    """

    modules: tuple[str, ...] | None = None


# Share of a device's memory that whole gradients may take, where nothing else decides whether they are kept.
_WHOLE_GRADIENTS = 0.25


class AxisUse(NamedTuple):
    """Fields of a :class:`Plan` for the axes that divide the model, unused for one rank."""

    tensor: TensorParallelism = TensorParallelism()
    sequence: SequenceParallelism = SequenceParallelism()
    pipeline: PipelineParallelism = PipelineParallelism()
    expert: ExpertParallelism = ExpertParallelism()

    @classmethod
    def of(cls, plan: Plan) -> AxisUse:
        """The axis use of a plan."""
        return cls(plan.tensor, plan.sequence, plan.pipeline, plan.expert)

    def onto(self, plan: Plan) -> Plan:
        """The plan with its axes used like this."""
        return plan if AxisUse.of(plan) == self else replace(plan, **self._asdict())

    @cache  # noqa: B019 there are few uses
    def over(self, use: AxisUse) -> AxisUse:
        """This use, where ``use`` does not say otherwise already."""
        return AxisUse(*(_merge_fields(mine, other) for mine, other in zip(use, self, strict=True)))


def _merge_fields(mine: Any, other: Any) -> Any:
    diff = {spec.name: value for spec in fields(mine) if (value := getattr(mine, spec.name)) != spec.default}
    return replace(other, **diff)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The joint decisions of a strategy's methods, before anything is applied.

    Each method adds its part by ``plan``; all methods read the whole.

    Attributes:
        axes: the mesh, ``(name, size)``, innermost first.
        rank_order: the ranks in mesh order; ``None`` for 0, 1, 2, ….
        gradient_sync: way of combining gradients of different data.
        num_micro_batches: parts of a rank's batch that gradients are accumulated over.
        precision: the dtypes.
        sharding: the sharding of parameters, gradients and optimizer states.
        recomputation: recomputation in the backward pass.
        offload: whether parameters, gradients and optimizer states stay in host memory.
        offload_optimizer: whether the optimizer updates copies of the weights in host memory, so that
            they and its states are kept there.
        compiled: whether blocks are compiled.
        compiler: the backend that compiles blocks; empty where nothing is compiled.
        replaced: whether modules are replaced by fused ones.
        tensor, sequence, pipeline, expert: the uses of the axes of these names.
        extras: costs that none of the fields above expresses.
    """

    axes: tuple[AxisSize, ...] = ()
    rank_order: tuple[int, ...] | None = None
    gradient_sync: Literal["none", "all_reduce", "reduce_scatter"] = "none"
    num_micro_batches: int = 1
    precision: Precision = Precision()
    sharding: Sharding = Sharding()
    recomputation: Recomputation = Recomputation()
    offload: bool = False
    offload_optimizer: bool = False
    compiled: bool = False
    compiler: str = ""
    replaced: bool = False
    tensor: TensorParallelism = TensorParallelism()
    sequence: SequenceParallelism = SequenceParallelism()
    pipeline: PipelineParallelism = PipelineParallelism()
    expert: ExpertParallelism = ExpertParallelism()
    extras: tuple[Extra, ...] = ()

    def changed(self, **changes: Any) -> Plan:
        """The plan with other values; a mapping changes a group's fields: ``sharding={"units": ()}``."""
        values = {}
        for name, new in changes.items():
            value, old = new, getattr(self, name)
            if isinstance(new, Mapping):
                other = {key: setting for key, setting in new.items() if getattr(old, key) != setting}
                value = replace(old, **other) if other else old  # equal groups stay the same objects
            if value is not old:
                values[name] = value
        return replace(self, **values) if values else self

    def size(self, names: str | Iterable[str]) -> int:
        """The product of the sizes of the named axes; an absent axis counts 1."""
        axes = (names,) if isinstance(names, str) else tuple(names)
        product = 1
        for name, size in self.axes:
            if name in axes:
                product *= size
        return product

    @property
    def whole_backward(self) -> bool:
        """Whether a pipeline never splits backward passes: compiled blocks compute all gradients at once."""
        return self.compiled

    def reduces_each(self, num_trainable: int, memory_bytes: float) -> bool:
        """Whether sharded gradients are reduced after every micro-batch; a pipeline reduces at a step's end.

        Where the plan leaves it open, they are if whole ones would take over a quarter of a device's memory.
        The rest is for memory unknown without a trace: activations, gathered parameters and states.

        Args:
            num_trainable: trainable elements of the whole model.
            memory_bytes: memory of a device; 0 where unknown, so that they are.
        """
        sharding = self.sharding
        if self.size("pipeline") > 1 or not sharding.gradients_over:
            return False
        if sharding.reduces_each is not None:
            return sharding.reduces_each
        # Gradients have the dtype that they are reduced in, else that of gathered or of stored parameters.
        name = sharding.reduce_dtype or sharding.gather_dtype or self.precision.parameter_dtype
        itemsize = 2 if name in ("float16", "bfloat16") else 4  # bytes
        return num_trainable * itemsize / self.size("tensor") > memory_bytes * _WHOLE_GRADIENTS

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that see different data."""
        return self.size(DATA_AXES)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes that sharded states are divided over: ``zero`` where there is one, else ``data``."""
        return ("zero",) if self.size("zero") > 1 else ("data",)

    @property
    def unit_axes(self) -> tuple[str, ...]:
        """The axes that divide fully sharded states: ``sequence`` too, whose ranks hold equal parameters."""
        return (*self.shard_axes, "sequence") if self.size("sequence") > 1 else self.shard_axes
