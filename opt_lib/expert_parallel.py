"""expert_parallel: divides the experts of mixture-of-experts models over the expert axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, final

from pydantic import Field
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, Problem
from atorch_ns.job import Job, is_on_meta
from atorch_ns.method import Method, MethodConfig, ModuleSelectors, Phase
from atorch_ns.profile import Profile
from atorch_ns.sharding import (
    FoundExperts,
    GlobalBalance,
    ListedExperts,
    UnfitExperts,
    divide_expert_list,
    divide_experts,
    find_experts,
    why_not_answerable,
    why_not_dividable,
)
from atorch_ns.strategy import Plan
from atorch_ns.torch_compat import plain_name
from opt_lib._config_checks import unmatched_problem
from opt_lib._sharded.units import broadcast_from_first

Experts = FoundExperts | ListedExperts

_STACK = (
    "Stack their parameters in one module with forward(hidden_states, top_k_index, top_k_weights), or leave the expert "
    "axis out of parallel_mode."
)


class ExpertParallelConfig(MethodConfig):
    """Modules that hold experts, and the balance of their router. A tuple is shorthand for ``experts``."""

    experts: ModuleSelectors | None = Field(
        default=None, description="Modules that hold experts, by class or name; null for all that are found."
    )
    balance: Literal["auto", "global", "rank"] = Field(
        default="auto",
        description="Over which tokens the model's auxiliary loss balances the router: those of all ranks, "
        "as one process does (global; an error if the model's loss does not allow it), each rank's own "
        "(rank), or global where possible (auto).",
    )

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """``("MixtralExperts",)``."""
        return {"experts": value}


@final
class ExpertParallel(Method[ExpertParallelConfig]):
    """Divides the experts of mixture-of-experts models over the expert axis.

    Tokens travel to the ranks that hold their experts and back; none is dropped. Ranks along the axis see
    different data. Experts are whole within the tensor axis: its ranks compute the same tokens alike.
    """

    name = "expert_parallel"
    phase = Phase.SHARD_EXPERTS
    Config = ExpertParallelConfig
    provides = ("axis:expert",)
    default_for = "axis:expert"
    needs_process_group = True
    refuses_by = ()

    def check(self, config: ExpertParallelConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """The selected modules must exist."""
        return unmatched_problem(self.name, "experts", config.experts, profile)

    def plan(self, plan: Plan, config: ExpertParallelConfig) -> Plan:
        """Experts are divided."""
        return plan.changed(expert={"modules": config.experts})

    def apply(self, job: Job, config: ExpertParallelConfig) -> None:
        """Divides the experts. Collective."""
        assert job.mesh is not None
        degree = job.mesh.size("expert")
        if degree == 1:
            job.explain(self.name, "the mesh has no expert axis larger than 1, so experts stay whole")
            return
        layers, unfit = job.cluster.agree(lambda: _find_local_experts(job, config), what="finding experts")
        job.cluster.agree(lambda: _try_division(job, layers), what="trying experts on a small input")
        for experts in layers:
            _divide_layer(job, experts)
        job.parts.experts = tuple(layer.module for layer in layers if isinstance(layer, FoundExperts))
        job.parts.listed_experts = tuple(
            e for layer in layers if isinstance(layer, ListedExperts) for e in layer.experts
        )
        if config.balance != "rank":
            is_required = config.balance == "global"
            GlobalBalance(job.module, job.mesh.data_group, demanded=is_required).attach()
        sizes = sorted({experts.num_experts for experts in layers})
        numbers = ", ".join(map(str, sizes))
        text = f"{len(layers)} module(s) of {numbers} experts, 1/{degree} of them on each rank"
        job.explain(self.name, "; ".join([text, *(f"whole: {layer}" for layer in unfit)]))


def _find_local_experts(job: Job, config: ExpertParallelConfig) -> tuple[list[Experts], list[UnfitExperts]]:
    """The experts to divide on this rank, and modules that look like experts but stay whole."""
    assert job.mesh is not None
    layers, unfit = find_experts(job.module, config.experts)
    modules = {module for root in job.roots for module in root.modules()}  # of this rank's stages
    layers = [experts for experts in layers if _expert_layer(experts) in modules]
    # Modules that the user names must fit; a stage may hold no experts.
    if (unfit and config.experts is not None) or (not layers and not job.parts.stages):
        lines = "".join(f"\n  {layer}" for layer in unfit[:8])
        reasons = lines or " No module takes tokens, indices and weights."
        raise InputError(
            f"expert_parallel finds no experts to divide in {job.original.model_class}.{reasons}\n"
            "Name others in its key experts, or leave the expert axis out of parallel_mode."
        )
    degree = job.mesh.size("expert")
    for experts in layers:
        if experts.num_experts % degree:
            fitting = [str(d) for d in range(2, experts.num_experts + 1) if experts.num_experts % d == 0]
            raise InputError(
                f"expert={degree} does not divide the {experts.num_experts} experts of {experts}. Use one of "
                f"{', '.join(fitting)} for expert in parallel_mode."
            )
    return layers, unfit


def _try_division(job: Job, layers: Iterable[Experts]) -> None:
    """Tries one module of each kind on a small input; a stage of a pipeline may have none."""
    assert job.mesh is not None
    tried_kinds: set[Any] = set()
    for experts in layers:
        layer = _expert_layer(experts)
        # Modules of one class and equal shapes divide alike.
        kind = (type(layer), *(tuple(p.shape) for p in layer.parameters()))
        if kind in tried_kinds:
            continue
        tried_kinds.add(kind)
        _move_to_device(job, experts)
        if isinstance(experts, ListedExperts):
            reason = why_not_answerable(experts)
        else:
            reason = why_not_dividable(experts, job.mesh.size("expert"))
        if reason is not None:
            advice = f" {_STACK}" if isinstance(experts, ListedExperts) else ""
            raise InputError(f"the experts of {experts} cannot be divided: {reason}.{advice}")


def _divide_layer(job: Job, experts: Experts) -> None:
    assert job.mesh is not None
    mesh = job.mesh.axis("expert")
    equal = _move_to_device(job, experts)  # no other module is whole on the device now
    if isinstance(experts, FoundExperts):
        divide_experts(experts, mesh, equal=equal)
        job.gradients.sums.add([f"{experts.name}.{name}" for name in experts.whole], mesh.get_group())
        return
    divide_expert_list(experts, mesh, equal=equal)
    job.gradients.sums.add([plain_name(name) for name in experts.whole(mesh.size())], mesh.get_group())
    # fsdp and ddp leave listed experts alone, so ranks with the same parts average them here.
    if job.mesh.copies.size() > 1:
        inside = {id(parameter) for expert in experts.experts for parameter in expert.parameters()}
        pairs = job.module.named_parameters(remove_duplicate=False)
        copies = job.mesh.copies.get_group()
        broadcast_from_first(job, (p for e in experts.experts for p in e.parameters()), group=copies)
        job.gradients.sums.add([plain_name(name) for name, p in pairs if id(p) in inside], copies, mean=True)


def _expert_layer(experts: Experts) -> nn.Module:
    return experts.layer if isinstance(experts, ListedExperts) else experts.module


def _move_to_device(job: Job, experts: Experts) -> bool:
    layer = _expert_layer(experts)
    equal = is_on_meta(layer)  # initial values are drawn by path, so the same on every rank
    job.materialiser().materialise([layer])
    layer.to(job.device)
    return equal
