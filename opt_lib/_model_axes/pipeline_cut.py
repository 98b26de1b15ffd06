"""Cutting a job's model into stages, for every engine that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from atorch_ns.capture.nests import tensors_of
from atorch_ns.cluster import gather_values
from atorch_ns.errors import BatchSizeError, StepError
from atorch_ns.job import Job, is_on_meta, parameter_names
from atorch_ns.pipeline import (
    CallGraph,
    HowToRun,
    Signature,
    StageAssignment,
    StageSet,
    StageSettings,
    divide_parameters,
    get_schedule,
    install_stages,
    signature,
    train_step_only,
    without_memory,
)
from atorch_ns.text import first_few, seconds_text
from atorch_ns.torch_compat import group_timeout, plain_name
from opt_lib._model_axes.pipeline_plan import PipelineParallelConfig, PipelinePlan, plan_pipeline, splitter
from opt_lib._sharded.units import broadcast_from_first


@torch.no_grad()
def share_parameters(job: Job, assignment: StageAssignment) -> None:
    """Gives parameters on several pipeline ranks the values of the first. Collective over all ranks.

    Their gradients are summed once a step; only the first rank counts them in norms. The model must be whole.
    """
    assert job.mesh is not None
    rank = job.mesh.axis("pipeline").get_local_rank()
    names = {aliases[0]: aliases for aliases in parameter_names(job.module).values()}
    parameters = {plain_name(name): parameter for name, parameter in job.module.named_parameters()}
    groups = pipeline_groups(job, sorted({assignment.ranks_holding(name) for name in assignment.shared}))
    materialiser = job.materialiser()
    for name in assignment.shared:
        holders = assignment.ranks_holding(name)
        if rank not in holders:
            continue
        group = groups[holders]
        parameter = parameters[name]
        if parameter.is_meta:  # drawn by its path, so the same everywhere
            owners = [job.module.get_submodule(alias.rpartition(".")[0]) for alias in names[name]]
            materialiser.materialise(owners, recurse=False)
        else:
            broadcast_from_first(job, [parameter], group=group)
        job.gradients.sums.add(names[name], group)
        if rank != holders[0]:
            job.gradients.remote_norm_names.update(names[name])
    for name in assignment.shared_on_rank:
        if rank in assignment.ranks_holding(name):
            job.gradients.kept_whole.add(name)
            job.gradients.sums.add(names[name], job.mesh.data_group, mean=True)


def pipeline_groups(job: Job, sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group for each set of places along the pipeline. Collective over all ranks."""
    assert job.mesh is not None
    mesh = job.mesh.device_mesh
    names = mesh.mesh_dim_names or ()
    dim = names.index("pipeline")
    # A rank that waits for others to make groups does not notice that one of them has ended.
    job.cluster.agree(lambda: None, what="reaching the groups of the pipeline")
    lines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.shape[dim]).tolist()  # [pipelines][ranks]
    rank_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    timeout = group_timeout(job.device)
    for places in sets:
        for line in lines:
            ranks = [line[position] for position in places]
            group = dist.new_group(ranks, timeout=timeout)  # collective over all ranks
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                rank_groups[places] = group
    return rank_groups


def cut_pipeline(job: Job, method: str, config: PipelineParallelConfig) -> StageSet:
    """Cuts ``job.module`` into this rank's stages, which become ``job.parts.stages``. Collective.

    The job has a mesh with the axis ``pipeline``; its plan holds the decisions afterwards.

    Raises:
        InputError: if the model cannot be cut so; on all ranks.
        RankError: if the ranks would cut differently.
    """
    assert job.mesh is not None
    plan = job.cluster.agree(lambda: plan_pipeline(job, config), what="cutting the model into stages")
    job.cluster.same_everywhere({"units, in the order of their calls": ", ".join(plan.graph.paths)})
    plan = _as_first_rank(job, plan)
    find_thawed = _finding_thawed(job)  # before the cut takes parameters away
    make_weights_equal(job, method)
    num_ranks = job.mesh.size("pipeline")
    rank_of = plan.rank_of(num_ranks)
    assignment = divide_parameters(job.module, plan.units, plan.graph, plan.cuts, rank_of=rank_of)
    _place_what_lies_between(job, plan)
    # Methods that divide layers look at the whole model, most of which this rank gives up.
    if any(job.mesh.size(axis) > 1 for axis in ("tensor", "sequence", "expert")):
        job.parts.full_structure = without_memory(job.module)
    share_parameters(job, assignment)
    stages = install_stages(
        job.module,
        plan.units,
        assignment,
        job.mesh.axis("pipeline").get_local_rank(),
        settings=StageSettings(
            device=job.device, model_input_format=job.inputs.model_input_format, method=method
        ),
    )
    job.parts.stages = stages
    job.parts.pipeline = plan.step
    if job.plan.recomputation.share is not None:
        job.step.recomputed_blocks, job.step.recomputed_shares = plan.recomputed, plan.shares
    job.step.num_micro_batches = plan.num_micro_batches
    job.step.split = splitter(plan, num_ranks)
    job.plan = job.plan.changed(
        num_micro_batches=plan.num_micro_batches,
        pipeline={"schedule": plan.info.name, "stages_per_rank": plan.stages_per_rank},
    )
    _explain_cuts(job, method, plan, num_ranks, num_shared=len(assignment.shared))
    return StageSet(
        stages,
        plan.cuts,
        rank_of,
        plan.graph.paths,
        trace=_make_trace_function(job, plan),
        draw_seed=lambda: _next_seed(job),
        find_thawed=find_thawed,
    )


def _as_first_rank(job: Job, plan: PipelinePlan) -> PipelinePlan:
    # Estimates may differ between ranks, by the samples that they have seen or by their nodes.
    mine = (plan.info.name, plan.stages_per_rank, plan.num_micro_batches, plan.cuts, plan.shares)
    name, on_rank, num, cuts, shares = decision = job.cluster.from_first(mine)
    if decision == mine:
        return plan
    return replace(
        plan,
        info=get_schedule(name),
        stages_per_rank=on_rank,
        num_micro_batches=num,
        cuts=cuts,
        shares=shares,
    )


def _finding_thawed(job: Job) -> Callable[[], frozenset[str]]:
    """Gives the names of parameters that are frozen now and trained by a stage of any rank later."""
    assert job.mesh is not None
    frozen = {plain_name(name) for name, p in job.module.named_parameters() if not p.requires_grad}
    group = job.mesh.axis("pipeline").get_group()
    all_thawed: frozenset[str] = frozenset()

    def find_thawed() -> frozenset[str]:
        nonlocal all_thawed
        trainable = {plain_name(name) for name, p in job.module.named_parameters() if p.requires_grad}
        mine = trainable & frozen
        # A flag first: names are sent where there are new ones.
        if any(gather_values(not mine <= all_thawed, distributed=True, group=group)):
            all_thawed = all_thawed.union(*gather_values(sorted(mine), distributed=True, group=group))
        return all_thawed

    # If nothing is frozen, nobody asks: gradients of parameters frozen later are received and ignored.
    return find_thawed if frozen else frozenset


def _make_trace_function(job: Job, plan: PipelinePlan) -> Callable[[Any, bool, frozenset[str]], CallGraph]:
    def trace(micro_batch: Any, outputs: bool, thawed: frozenset[str]) -> CallGraph:
        same = signature(micro_batch) == plan.traced_with
        if plan.tracer is None and not same:
            raise BatchSizeError(
                "the model does not run on fake tensors, so its stages can exchange only the tensors found "
                f"when it was cut, for micro-batches of {_format_shapes(plan.traced_with)}; this one has "
                f"{_format_shapes(signature(micro_batch))}. Use drop_last=True and samples of one length."
            )
        if plan.tracer is None and thawed:
            raise StepError(
                f"{first_few(sorted(thawed))} was frozen when the model was cut into stages, but the model does not run on fake "
                "tensors, which would show what stages must exchange now. Unfreeze it before auto_accelerate."
            )
        # The plan was traced without casts: under them tensors cross cuts in another dtype.
        as_planned = (
            not thawed and same and job.precision.autocast is None and job.precision.input_dtype is None
        )
        if plan.tracer is None or (as_planned and not outputs):
            return plan.graph
        how = HowToRun(
            model_input_format=job.inputs.model_input_format,
            loss_func=job.inputs.loss_func,
            outputs=outputs,
            autocast=None if job.precision.autocast is None else job.precision.autocast.dtype,
            weights=job.precision.input_dtype,
        )
        return plan.tracer.trace(micro_batch, how, thawed)

    return trace


def _format_shapes(shapes: Signature) -> str:
    return ", ".join(str(list(shape)) for shape, _ in shapes)


def _next_seed(job: Job) -> int:
    assert job.step.randomness is not None
    return job.step.randomness.next_seed()  # goes on after a checkpoint; differs between data ranks


def _place_what_lies_between(job: Job, plan: PipelinePlan) -> None:
    if not is_on_meta(job.module):
        return
    inside = {id(child) for unit in plan.units for child in unit.module.modules()}
    # Every stage computes with the buffers of modules that belong to no unit.
    between = [
        module
        for module in job.module.modules()
        if id(module) not in inside and module._buffers and not module._parameters
    ]
    job.materialiser().materialise(between, recurse=False)


def _explain_cuts(job: Job, method: str, plan: PipelinePlan, num_ranks: int, *, num_shared: int) -> None:
    on_rank = f", {plan.stages_per_rank} on each rank" if plan.stages_per_rank > 1 else ""
    cuts = ", ".join(plan.graph.paths[cut] for cut in plan.cuts)
    text = (
        f"{len(plan.cuts) + 1} stages{on_rank}, cut before {cuts}; {plan.info.name} with "
        f"{plan.num_micro_batches} micro-batches"
    )
    if num_shared:
        text += f"; {num_shared} parameter(s) shared by stages"
    if job.gradients.kept_whole and job.num_data_ranks > 1:
        text += f"; {len(job.gradients.kept_whole)} of them whole on every data rank, since two stages of a rank use them"
    job.explain(method, text)
    if plan.shards:
        job.explain(method, f"stages are made of {plan.shards}")
    job.explain(method, train_step_only(method))
    if plan.choice is not None and len(plan.choice.candidates) > 1:
        options = [option for option in plan.choice.candidates if not option.problem][:3]
        summary = ", ".join(
            f"{option.schedule.name} {seconds_text(option.step_seconds)} with {option.bubble_share:.0%} idle"
            for option in options
        )
        job.explain(method, f"the fastest by simulation (predicted): {summary}")
    if plan.refused:
        cut, reason = next(iter(plan.refused.items()))
        job.explain(
            method,
            f"cannot be cut in {len(plan.refused)} place(s), such as before {plan.graph.paths[cut]}: {reason}",
        )
    if plan.info.note:
        job.explain(method, plan.info.note)


@torch.no_grad()
def make_weights_equal(job: Job, method: str) -> None:
    """Gives all ranks of a pipeline the weights of the first if theirs differ. Collective over them."""
    group = job.stage_group
    if group is None or is_on_meta(job.module):
        return
    tensors = [*job.module.parameters(), *job.module.buffers()]
    sums = [_tensor_checksum(tensor).to(job.device) for tensor in tensors]
    if not sums:
        return
    checksums = torch.stack(sums)
    all_checksums = [torch.empty_like(checksums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_checksums, checksums, group=group)
    differ = torch.stack([(row != all_checksums[0]) for row in all_checksums]).any(0)  # [tensors]
    if not differ.any():
        return
    broadcast_from_first(job, tensors, group=group)
    job.explain(
        method,
        f"{int(differ.sum())} of {len(tensors)} parameters and buffers differed between the ranks of a pipeline, which "
        "were seeded differently; all ranks now use those of the first",
    )


def _tensor_checksum(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
    return value.sum(dtype=torch.float64).nan_to_num()  # NaN would differ from itself


class OutputsAlone(TorchFunctionMode):
    """Refuses the model's parameters in a loss function: a rank has only those of its own stages."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Where nothing gets a gradient, as in a metric, parameters may be read.
        if any(output.requires_grad for output in tensors_of(result)):
            for argument in tensors_of((args, dict(kwargs))):
                if isinstance(argument, nn.Parameter) and id(argument) in self._names:
                    raise StepError(
                        f"loss_func computes with {self._names[id(argument)]}, a parameter of the model. In a pipeline it "
                        "runs on the last stage, which lacks the parameters of the other stages. "
                        "Use the optimizer's weight_decay for a penalty on weights, return from the model what the "
                        "loss needs, or train without pipeline."
                    )
        return result

    @classmethod
    def once(cls, model: nn.Module, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """``loss``, watched at its first call that computes gradients."""
        waiting = [True]

        def watch_loss(batch: Any, output: Any) -> Any:
            if not (waiting and torch.is_grad_enabled()):
                return loss(batch, output)
            waiting.clear()
            with cls({id(parameter): plain_name(name) for name, parameter in model.named_parameters()}):
                return loss(batch, output)

        return watch_loss
