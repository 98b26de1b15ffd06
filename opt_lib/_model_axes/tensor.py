"""Settings of tensor_parallel, and the loss on logits divided over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import nn

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.cluster import Cluster, layout
from atorch_ns.data import call_model
from atorch_ns.errors import InputError
from atorch_ns.job import Job
from atorch_ns.method import Flag, MethodConfig
from atorch_ns.sharding import (
    LOSS_TOLERANCE,
    ChosenPlan,
    LayerGraph,
    Layout,
    LogitOutputs,
    LogitUses,
    LossStudy,
    TensorPlan,
    compare_losses,
    kind_of,
    study_logits,
    style_named,
)
from atorch_ns.strategy import Plan
from atorch_ns.text import error_line, first_few
from atorch_ns.torch_compat import plain_name

_MERAK_STYLES = {"col": "colwise", "row": "rowwise"}


class TensorParallelConfig(MethodConfig):
    """Which layers are divided, and how. With no plan, the model's own is used, or one is found."""

    plan: dict[str, str] | None = Field(
        default=None,
        description="Style by module: colwise, rowwise, colwise_gather_output, embedding_rowwise, replicate or "
        "sequence by dotted path, which may hold *, or by the end of paths. Layers that are not named stay whole.",
    )
    attributes: tuple[str, ...] = Field(
        default=(),
        description="Paths of numbers that code divides by, as h.*.attn.num_heads; made smaller too.",
    )
    parts: dict[str, tuple[int, ...]] = Field(
        default_factory=dict, description="Sizes of the outputs of fused layers, by path, as [768, 768, 768]."
    )
    narrow_inputs: tuple[str, ...] = Field(
        default=(),
        description="Arguments of modules' forward, as h.*.attn.x, whose width code takes for that of its "
        "results: the code sees the share of one rank, its layers the whole.",
    )
    source: Literal["auto", "model", "found"] = Field(
        default="auto",
        description="Where a plan comes from if none is given: the model's own (as models of transformers "
        "have) or a found one; auto tries them in this order.",
    )
    sequence: Flag = Field(
        default=False,
        description="Divide the sequence between divided layers: activations there take a part of the memory.",
    )
    sequence_dim: int = Field(default=1, ge=0, description="The dimension of the sequence in hidden states.")
    overlap: Flag = Field(
        default=False,
        description="Reduce the first half of a batch while the second half is computed, in row-wise layers forward and "
        "in column-wise layers backward; not with sequence. Estimates do not count what it saves.",
    )
    asynchronous: Flag = Field(
        default=False,
        description="Exchange a piece of the sequence while another one is multiplied, by torch's compiler, "
        "which joins the gathers and scattered sums of sequence with the products beside them: needs "
        "sequence, compile by inductor, and an axis of CUDA devices of one node.",
    )
    self_test: Flag = Field(
        default=True,
        description="Compare each distinct block, divided and whole, on a small input before use. Without it "
        "a plan that reshapes heads wrongly trains wrongly and says nothing.",
    )
    parallel_loss: Flag | Literal["auto"] = Field(
        default="auto",
        description="Leave logits divided over the vocabulary and compute cross-entropy on the parts, in "
        "train_step. auto: where a test of the loss on a small batch gives the same loss and gradients, and "
        "nothing else needs the logits whole.",
    )
    undivided: Literal["error", "keep"] = Field(
        default="error",
        description="What becomes of attention whose heads, or heads of keys and values, the degree does not "
        "divide: an error that names degrees that would work, or it is kept whole on every rank.",
    )
    vocabulary: Flag = Field(
        default=True,
        description="Divide the embedding of the vocabulary and the head too, where the plan is not given.",
    )
    col_para_list: tuple[str, ...] = Field(default=(), description="As in Merak: layers that are colwise.")
    row_para_list: tuple[str, ...] = Field(default=(), description="As in Merak: layers that are rowwise.")
    tp_attr_list: tuple[str, ...] = Field(default=(), description="As in Merak: attributes.")
    weight_change_list: tuple[tuple[str, int], ...] = Field(
        default=(), description="As in Merak: (layer, dimension of its weight that is divided)."
    )
    input_output_mapping: tuple[tuple[float, float, str], ...] = Field(
        default=(),
        description="As in Merak: (input, output, 'row' or 'col'): the style of layers by their ratio.",
    )

    @model_validator(mode="after")
    def _overlaps_sums_alone(self) -> Self:
        if self.overlap and self.sequence:
            raise ValueError(
                "overlap splits batches for all-reduces, but sequence has none: leave one of them out"
            )
        if self.asynchronous and not self.sequence:
            raise ValueError(
                "asynchronous overlaps all-gathers and reduce-scatters of the sequence with matmuls, but without sequence there "
                "are all-reduces instead: set sequence=True too, or leave asynchronous out"
            )
        return self

    @field_validator("plan")
    @classmethod
    def _known_styles(cls, plan: dict[str, str] | None) -> dict[str, str] | None:
        return None if plan is None else {pattern: style_named(style) for pattern, style in plan.items()}

    @field_validator("input_output_mapping")
    @classmethod
    def _known_ratios(
        cls, ratios: tuple[tuple[float, float, str], ...]
    ) -> tuple[tuple[float, float, str], ...]:
        for inputs, outputs, style in ratios:
            if style not in _MERAK_STYLES or inputs <= 0 or outputs <= 0:
                raise ValueError(f"({inputs}, {outputs}, {style!r}): write two sizes and 'row' or 'col'")
        return ratios


def why_not_asynchronous(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Yields unmet requirements of asynchronous exchanges, each as a sentence with the remedy."""
    if cluster.device_type != "cuda":
        yield (
            f"exchanges go from one GPU's memory to another's, and the device is a {cluster.device_type.upper()}. Leave "
            "asynchronous out here"
        )
        return
    if plan.compiler != "inductor":
        yield (
            "torch's inductor joins exchanges with products in compiled blocks, and nothing is compiled by it. Add "
            "compile, or leave asynchronous out"
        )
    groups = layout(plan.axes, cluster.world_size, plan.rank_order)["tensor"]
    per_node = max(1, cluster.local_world_size)  # ranks are numbered node by node
    apart = next((group for group in groups if len({rank // per_node for rank in group}) > 1), None)
    if apart is not None:
        yield (
            f"ranks along tensor read each other's memory, and {first_few([str(rank) for rank in apart], 8)} are in different nodes of {per_node} "
            "ranks. Put tensor first in parallel_mode with a size of one node at most, or leave asynchronous out"
        )


def users_plan(config: TensorParallelConfig, model: nn.Module) -> TensorPlan | None:
    """The plan that a config spells out; ``None`` if it leaves the plan open.

    Raises:
        InputError: if attributes or parts are given without any layer, or a dimension does not exist.
    """
    styles = {**_by_ratio(config, model), **_by_weight(config, model)}  # lists and plan, added below, win
    styles |= dict.fromkeys(config.col_para_list, "colwise")
    styles |= dict.fromkeys(config.row_para_list, "rowwise")
    styles |= config.plan or {}
    attributes = (*config.attributes, *config.tp_attr_list)
    if not styles:
        if attributes or config.parts or config.narrow_inputs:
            raise InputError(
                "attributes, parts and narrow_inputs of tensor_parallel belong to a plan; give plan (or col_para_list and "
                "row_para_list) as well, or leave them out to find a plan automatically."
            )
        return None
    return TensorPlan(
        styles=styles,
        attributes=attributes,
        parts=config.parts,
        narrow_inputs=config.narrow_inputs,
        where="user",
    )


def _by_ratio(config: TensorParallelConfig, model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    for path, module in model.named_modules():
        kind = kind_of(module)
        if kind is None or isinstance(module, nn.Embedding):
            continue
        own_outputs, own_inputs = kind.sizes(module)
        for inputs, outputs, style in config.input_output_mapping:
            if own_inputs * outputs == own_outputs * inputs:  # the ratios are equal
                styles[path] = _MERAK_STYLES[style]
    return styles


def _by_weight(config: TensorParallelConfig, model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    modules: Mapping[str, Any] = dict(model.named_modules())
    for name, dim in config.weight_change_list:
        layer = name.removesuffix(".weight")
        if not -2 <= dim <= 1:
            raise InputError(
                f"weight_change_list of tensor_parallel names dimension {dim} of {name}, but layer weights have only "
                "two: use 0 or 1."
            )
        for path, module in modules.items():
            kind = kind_of(module)
            if kind is not None and (path == layer or path.endswith(f".{layer}")):
                embedding = isinstance(module, nn.Embedding)
                column = "embedding_rowwise" if embedding else "colwise"
                styles[path] = column if dim % 2 == kind.out_dim else "rowwise"  # -1 means 1
    return styles


ParallelLoss = bool | Literal["auto"]


@dataclass(frozen=True)
class LossOnParts:
    """The decision whether a loss is computed on parts of the logits.

    Attributes:
        heads: paths of the layers whose outputs stay divided; empty where they are gathered.
        note: the decision and its reason, for the report; empty if there is nothing to decide.
    """

    heads: tuple[str, ...] = ()
    note: str = ""


def loss_on_parts(
    job: Job,
    model: nn.Module,
    batch: Any,
    choice: ChosenPlan,
    *,
    graph: LayerGraph,
    degree: int,
    request: ParallelLoss,
    run_numerics: bool,
) -> LossOnParts:
    """Tests the user's loss on a small batch, on divided and on whole logits.

    Raises:
        InputError: if the user wants it and it would be wrong.
    """
    # Divided layers whose gathered outputs are the model's: those that give logits.
    heads = tuple(
        path
        for path, layer in choice.layout.layers.items()
        if layer.style == "colwise_gather_output" and path in graph.outputs
    )
    if request is False or not heads:
        why = "no layer that gives logits is divided" if request is True else ""
        return LossOnParts(note=f"parallel_loss=True changes nothing: {why}" if why else "")
    wrong, idle = _study_split_loss(job, model, batch, heads, degree=degree, run_numerics=run_numerics)
    if request is True and wrong:
        raise InputError(
            f'parallel_loss=True cannot be used with {job.original.model_class}: {wrong}. Set it to "auto" or False.'
        )
    if wrong or (idle and request == "auto"):
        return LossOnParts(note=f"logits are gathered before the loss: {wrong or idle}")
    note = "the loss is computed on parts of the logits" + (f", although {idle}" if idle else "")
    return LossOnParts(heads, note)


def _study_split_loss(
    job: Job, model: nn.Module, batch: Any, heads: tuple[str, ...], *, degree: int, run_numerics: bool
) -> tuple[str, str]:
    """The reasons why a loss on parts would be wrong and would be useless; each may be empty."""
    if job.plan.compiled and not repeated_blocks(model):
        return "the compiler would compile the whole model with its loss", ""

    def run(module: nn.Module, data: Any) -> Any:
        return call_model(module, data, job.inputs.model_input_format)

    with job.step.context():  # outputs stay as they are
        study = study_logits(model, batch, run, heads, degree=degree)
    if study.uses.changed:
        return f"{job.original.model_class} changes them in place, by {study.uses.changed[0]}", ""
    if study.failure:
        return "", f"{job.original.model_class} does not run on parts of them: {study.failure}"
    if not run_numerics:
        return "", "nothing is tested, since self_test=False"
    return loss_by_numbers(job, study, degree)


def loss_by_numbers(job: Job, study: LossStudy, degree: int) -> tuple[str, str]:
    """Tests on a small batch why the user's loss on parts would be wrong or useless."""
    uses = LogitUses()
    error, failure = 0.0, ""
    try:
        error = compare_losses(study, job.inputs.loss_func, degree, job.device, uses=uses)
    except Exception as failed:  # of the user's loss
        failure = error_line(failed)
    if uses.changed:
        return f"loss_func changes them in place, by {uses.changed[0]}", ""
    if failure:
        return "", f"loss_func cannot be tested on a small batch: {failure}"
    if error > LOSS_TOLERANCE:
        return f"on a small batch loss or gradients differ by {error:.1e} of their largest value", ""
    users = {**study.uses.gathered, **uses.gathered}
    if users:
        return "", f"they are needed whole by {', '.join(users.values())}"
    if not (study.uses.losses or uses.losses):
        return "", "no cross_entropy of them is computed"
    return "", ""


def divide_logits(job: Job, loss: LossOnParts, layout: Layout) -> None:
    """Lets the heads that are divided on this rank, by ``layout``, give divided logits in training steps."""
    modules = {plain_name(path): module for path, module in job.module.named_modules()}
    heads = [modules[path] for path in loss.heads if path in layout.layers]
    if heads:
        leave_divided(job, heads)


def leave_divided(job: Job, heads: Sequence[nn.Module] = ()) -> None:
    """Leaves outputs of the model and of ``heads`` divided in training steps, and gathers them elsewhere."""
    outputs, others = LogitOutputs(), job.step.context
    outputs.attach(job.module, heads)

    @contextmanager
    def stay_divided() -> Iterator[None]:
        with others(), outputs.stay_divided():  # contexts of other methods stay around it
            yield

    job.step.context = stay_divided
