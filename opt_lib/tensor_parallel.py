"""tensor_parallel: divides layers over the tensor axis, as Megatron-LM does."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from torch import nn

from atorch_ns.cluster import Cluster, or_refusal
from atorch_ns.data import call_model
from atorch_ns.errors import InputError, Problem
from atorch_ns.job import Job
from atorch_ns.method import Method, Phase
from atorch_ns.pipeline import StageModule, own_units
from atorch_ns.profile import Profile
from atorch_ns.sharding import (
    ChosenPlan,
    LayerGraph,
    StreamSpec,
    TensorGroup,
    choose_plan,
    divide,
    parameter_dims,
    trace_layers,
)
from atorch_ns.strategy import NarrowProducts, Plan
from atorch_ns.text import error_text, first_few
from atorch_ns.torch_compat import plain_name, share_memory_along
from opt_lib._model_axes.sample_batch import common_sample
from opt_lib._model_axes.tensor import (
    LossOnParts,
    TensorParallelConfig,
    divide_logits,
    loss_on_parts,
    users_plan,
    why_not_asynchronous,
)
from opt_lib._sharded.units import broadcast_from_first

__all__ = ["TensorParallel", "TensorParallelConfig"]


@final
class TensorParallel(Method[TensorParallelConfig]):
    """Divides layers over the tensor axis, as Megatron-LM does."""

    name = "tensor_parallel"
    phase = Phase.SHARD_LAYERS
    Config = TensorParallelConfig
    provides = ("axis:tensor",)
    default_for = "axis:tensor"
    needs_process_group = True
    refuses_by = ("compiled",)  # which a loss on parts may rest on

    def plan(self, plan: Plan, config: TensorParallelConfig) -> Plan:
        """Notes whether the residual stream and the logits in the loss are divided too."""
        return plan.changed(
            tensor={
                "sequence": config.sequence,
                "parallel_loss": config.parallel_loss is not False,
                "asynchronous": config.asynchronous,
            }
        )

    def check_plan(self, config: TensorParallelConfig, plan: Plan, cluster: Cluster) -> list[Problem]:
        """Checks the requirements of asynchronous exchanges."""
        if not config.asynchronous or plan.size("tensor") == 1:
            return []
        return [
            Problem(message=message, method=self.name, key="asynchronous", value="True")
            for message in why_not_asynchronous(plan, cluster)
        ]

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[TensorParallelConfig]:
        """Residual stream whole, or divided: less memory per block for as many bytes sent.

        Never ``asynchronous``, which was not measured on GPUs yet: who wants it names it, with ``included``.
        """
        if cluster.world_size == 1 or profile.trace is None:
            return
        yield TensorParallelConfig()
        if any(segment.is_block and segment.num_rows for segment in profile.trace.segments):
            yield TensorParallelConfig(sequence=True)

    def apply(self, job: Job, config: TensorParallelConfig) -> None:
        """Chooses a plan, tests it and divides the layers in place. Collective."""
        assert job.mesh is not None
        if job.mesh.size("tensor") == 1:
            job.explain(self.name, "the tensor axis has one rank, so nothing is divided")
            return
        group = TensorGroup(job.mesh.axis("tensor"), overlap=config.overlap, traced=config.asynchronous)
        if config.asynchronous and job.device.type == "cuda":
            share_memory_along(job.mesh.axis("tensor").get_group())  # without it inductor joins nothing
        model = job.in_full_precision(
            job.module if job.parts.full_structure is None else job.parts.full_structure
        )
        batch = common_sample(job, self.name)
        stages = dict(ChainMap(*job.cluster.gathered(_stage_of_units(job))))
        # By one rank: one plan, however the numbers are rounded, and the others' cores are free for it.
        outcome = job.cluster.on_first(
            lambda: or_refusal(
                lambda: _make_plan(job, config, model, batch, degree=group.size, stages=stages)
            ),
            what="finding and testing a tensor plan",
        )
        if isinstance(outcome, InputError):  # which every rank raises
            raise outcome
        choice, loss = outcome
        local = _of_this_rank(choice, job.module, job.parts.stages)
        _divide_layers(job, local, group)
        divide_logits(job, loss, local.layout)
        job.step.divides_outputs = True
        job.resolved_settings[self.name] = choice.plan.as_config()
        self._explain_plan(job, choice, config)
        if loss.note:
            job.explain(self.name, loss.note)

    def _explain_plan(self, job: Job, choice: ChosenPlan, config: TensorParallelConfig) -> None:
        where = {"user": "the plan given", "model": "the model's own plan", "found": "found"}
        job.explain(self.name, f"{where[choice.plan.where]}: {choice.plan.describe()}")
        for note in choice.notes:
            job.explain(self.name, note)
        if choice.stream is not None:
            job.explain(self.name, "the sequence is divided between divided layers")
            if len(choice.stream.chains) > 1:
                chains = first_few([_chain_ends(chain) for chain in choice.stream.chains], 6)
                job.explain(
                    self.name, f"it is whole between chains of blocks, where other code may see it: {chains}"
                )
        if config.asynchronous and choice.stream is not None:
            job.explain(self.name, _describe_exchange(choice, job.plan.precision.narrow))
        if config.overlap:
            job.explain(self.name, "layers reduce the first half of a batch while they compute the second")
        if not config.self_test:
            job.explain(self.name, "not tested, since self_test=False")
        whole = [path for path in choice.plan.left if path not in choice.layout.layers]
        if whole:
            text = first_few([f"{path} ({choice.plan.left[path]})" for path in whole], 6)
            job.explain(self.name, f"whole on every rank: {text}")


def _describe_exchange(choice: ChosenPlan, narrow: NarrowProducts | None) -> str:
    assert choice.stream is not None
    regions = [spec for spec in choice.regions if spec.one_input and choice.stream.tight]
    single_use = [spec for spec in regions if spec.one_use]  # nothing else reads the stream there
    rest = ""
    if narrow is not None and not narrow.gathered:
        rest = "; gathers of layers in fp8 with one scale a row are waited for"
    elif narrow is not None:
        rest = f"; what layers in fp8 gather travels in float8 in {len(single_use)} of them"
    if len(regions) < len(choice.regions):
        rest += "; the others read more than the input of the module around them"
    return (
        f"gathers and scattered sums go on while layers multiply, in {len(regions)} of {len(choice.regions)} groups of "
        f"layers{rest}"
    )


def _chain_ends(chain: Sequence[str]) -> str:
    return chain[0] if len(chain) == 1 else f"{chain[0]} to {chain[-1]}"


def _stage_of_units(job: Job) -> dict[str, int]:
    stages = [stage for stage in job.parts.stages if isinstance(stage, StageModule)]
    return {path: stage.number for stage in stages for path in own_units(stage)}


def _make_plan(
    job: Job,
    config: TensorParallelConfig,
    model: nn.Module,
    batch: Any,
    *,
    degree: int,
    stages: Mapping[str, int],
) -> tuple[ChosenPlan, LossOnParts]:
    """A tested plan, and whether the loss is computed on parts; nothing is communicated."""
    graph = replace(_trace_model(job, model, batch, degree, chains=config.sequence), stages=stages)
    choice = choose_plan(
        model,
        degree,
        graph,
        plan=users_plan(config, model),
        source=config.source,
        sequence_dim=config.sequence_dim if config.sequence else None,
        undivided=config.undivided,
        vocabulary=config.vocabulary,
        find_parts=config.plan is None,  # Merak's lists have no place for them
        run_numerics=config.self_test,
        device=job.device,
    )
    loss = loss_on_parts(
        job,
        model,
        batch,
        choice,
        graph=graph,
        degree=degree,
        request=config.parallel_loss,
        run_numerics=config.self_test,
    )
    return choice, loss


def _trace_model(job: Job, model: nn.Module, batch: Any, degree: int, *, chains: bool) -> LayerGraph:
    def run(module: nn.Module, data: Any) -> Any:
        return call_model(module, data, job.inputs.model_input_format)

    try:
        loss = job.inputs.loss_func
        return trace_layers(model, batch, run, multiple_of=degree, chains=chains, loss=loss)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"tensor_parallel cannot run {job.original.model_class} on a sample batch to follow its layers: "
            f"{error_text(error)}"
        ) from error


def _of_this_rank(choice: ChosenPlan, module: nn.Module, stages: Sequence[nn.Module]) -> ChosenPlan:
    modules = {plain_name(path): child for path, child in module.named_modules()}
    # Units of other ranks are stubs, without parameters.
    local = {path for path, child in modules.items() if next(child.parameters(), None) is not None}
    layers = {
        path: layer
        for path, layer in choice.layout.layers.items()
        if path in local and parameter_dims(modules[path], layer)
    }
    names = {plain_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    stream = choice.stream
    if stream is not None:
        stage_of = {id(child): number for number, stage in enumerate(stages) for child in stage.modules()}
        homes = {path: stage_of.get(id(child), -1) for path, child in modules.items() if path in local}
        chains = tuple(part for chain in stream.chains for part in _by_home(chain, homes))
        stream = StreamSpec(chains, dim=stream.dim, tight=stream.tight)
    return replace(
        choice,
        layout=replace(
            choice.layout,
            layers=layers,
            attributes=tuple(name for name in choice.layout.attributes if _is_local_attribute(name, local)),
            narrow_inputs=tuple(n for n in choice.layout.narrow_inputs if n.rpartition(".")[0] in local),
        ),
        regions=tuple(spec for spec in choice.regions if {*spec.columns, *spec.rows} <= local),
        stream=stream,
        partial=choice.partial & names,
    )


def _by_home(chain: Sequence[str], homes: Mapping[str, int]) -> list[tuple[str, ...]]:
    # A stage hands on whole hidden states, so a chain ends at its edge. None: other ranks' blocks.
    parts = itertools.groupby(chain, homes.get)
    return [tuple(part) for home, part in parts if home is not None]


def _is_local_attribute(attribute: str, local: Iterable[str]) -> bool:
    parts = attribute.split(".")
    return any(".".join(parts[:length]) in local for length in range(len(parts) - 1, 0, -1))


def _divide_layers(job: Job, choice: ChosenPlan, group: TensorGroup) -> None:
    assert group.mesh is not None
    ranks = group.mesh.get_group()
    division = divide(job.module, choice.layout, group, choice.regions, stream=choice.stream)
    job.parts.packings.update(division.packings)
    job.gradients.sums.add(choice.partial, ranks)
    names = set(division.dims)
    pairs = job.module.named_parameters(remove_duplicate=False)
    # Parameters that stay whole take the values of the group's first rank.
    whole = {id(p): p for name, p in pairs if plain_name(name) not in names}
    broadcast_from_first(job, (*whole.values(), *job.module.buffers()), group=ranks)
