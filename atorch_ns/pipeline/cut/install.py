"""Installation of a rank's pipeline stages in a model: its units, stand-ins for others', memory released."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import NamedModule
from atorch_ns.capture.random_states import seed_generators
from atorch_ns.errors import StepError
from atorch_ns.pipeline.cut.crossing import Crossing, plan_crossings, stage_parameters
from atorch_ns.pipeline.cut.graph import CallGraph
from atorch_ns.pipeline.run.forward_pass import PassSwitch, StageRange
from atorch_ns.pipeline.run.stage import StageModule, StageUnit, Stub
from atorch_ns.pipeline.schedule.schedules import train_step_only


@dataclass(frozen=True, kw_only=True)
class StageAssignment:
    """Assignment of units and parameters to stages, and of stages to ranks.

    Attributes:
        ranges: the stages.
        rank_of: the rank (along the pipeline) of each stage.
        unit_stages: the stages that call each unit, by path. A unit that is never called belongs to the
            stages that read its parameters, or else to the first stage.
        parameter_stages: the stages that need each parameter, by its first name.
    """

    ranges: tuple[StageRange, ...]
    rank_of: tuple[int, ...]
    unit_stages: Mapping[str, tuple[int, ...]]
    parameter_stages: Mapping[str, tuple[int, ...]]

    def ranks_holding(self, parameter: str) -> tuple[int, ...]:
        """The ranks that hold a parameter, in ascending order."""
        return tuple(sorted({self.rank_of[stage] for stage in self.parameter_stages[parameter]}))

    @property
    def shared_on_rank(self) -> tuple[str, ...]:
        """Parameters that several stages of one rank need."""
        ranks = {name: [self.rank_of[s] for s in stages] for name, stages in self.parameter_stages.items()}
        return tuple(name for name, holders in ranks.items() if len(set(holders)) < len(holders))

    @property
    def shared(self) -> tuple[str, ...]:
        """Parameters that several ranks hold."""
        return tuple(name for name in self.parameter_stages if len(self.ranks_holding(name)) > 1)


def ranges(graph: CallGraph, cuts: Sequence[int]) -> tuple[StageRange, ...]:
    """The stages into which cuts divide a pass."""
    crossings: list[Crossing | None] = [None, *plan_crossings(graph, cuts), None]
    edges = [0, *cuts, len(graph.calls)]
    return tuple(
        StageRange(begin=begin, end=end, received=received, sent=sent)
        for (begin, end), (received, sent) in zip(pairwise(edges), pairwise(crossings), strict=True)
    )


def divide_parameters(
    model: nn.Module,
    units: Sequence[NamedModule],
    graph: CallGraph,
    cuts: Sequence[int],
    *,
    rank_of: Sequence[int],
) -> StageAssignment:
    """Assigns units and parameters to stages; the model is cut before the calls ``cuts``."""
    stages = ranges(graph, cuts)
    callers: dict[str, set[int]] = {unit.name: set() for unit in units}
    for number, stage in enumerate(stages):
        for call in graph.calls[stage.begin : stage.end]:
            callers[call.path].add(number)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    param_stages: dict[str, set[int]] = {name: set() for name in names.values()}
    for unit in units:
        for parameter in unit.module.parameters():
            param_stages[names[id(parameter)]] |= callers[unit.name]
    # Every stage whose results need the code between units gets the parameters that this code reads.
    for number, stage in enumerate(stages):
        between = stage_parameters(graph, stage.begin, stage.end, received=stage.received, sent=stage.sent)
        for name in between:
            param_stages[name].add(number)
    for unit in units:
        if not callers[unit.name]:  # all of it goes to the stages that read its parameters
            param_names = {names[id(parameter)] for parameter in unit.module.parameters()}
            callers[unit.name] = set().union(*(param_stages[name] for name in param_names)) or {0}
            param_stages |= {name: param_stages[name] | callers[unit.name] for name in param_names}
    return StageAssignment(
        ranges=stages,
        rank_of=tuple(rank_of),
        unit_stages={path: tuple(sorted(numbers)) for path, numbers in callers.items()},
        parameter_stages={name: tuple(sorted(numbers or {0})) for name, numbers in param_stages.items()},
    )


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """The settings that all stages of a rank share.

    Attributes:
        model_input_format: how a batch is passed to the model.
        method: the name of the method that cuts the model, for messages.
    """

    device: torch.device
    model_input_format: str | None
    method: str = "pipeline"


def install_stages(
    model: nn.Module,
    units: Sequence[NamedModule],
    assignment: StageAssignment,
    rank: int,
    *,
    settings: StageSettings,
) -> tuple[StageModule, ...]:
    """Changes ``model`` into this rank's part of it and returns its stages, in the order of the model.

    Other ranks' units lose their memory. The model keeps its attributes and other parameters their names.

    Args:
        rank: this rank's place along the pipeline.
    """
    numbers = [stage for stage, holder in enumerate(assignment.rank_of) if holder == rank]
    own_names = {
        name
        for name, stages in assignment.parameter_stages.items()
        if any(stage in numbers for stage in stages)
    }
    ids = {name: id(parameter) for name, parameter in model.named_parameters()}  # names of the whole model
    kept_ids = {ids[name] for name in own_names}
    mine = {
        path for path, stages in assignment.unit_stages.items() if any(stage in numbers for stage in stages)
    }
    # Look all of this up while the model is whole. Below, memory is released and modules are replaced.
    in_use = _modules_in_use(model, units, mine)
    switch = PassSwitch()
    places = _find_registrations(model)
    params = {module: param for module in model.modules() if (param := _asked_for(module)) is not None}
    modules: dict[str, nn.Module] = {}
    for unit in units:
        new_module: nn.Module
        if unit.name in mine:
            new_module = StageUnit(unit.module, unit.name, switch, settings.method)
        else:
            new_module = _make_stub(
                unit.module, unit.name, switch, kept_ids, in_use=in_use, settings=settings
            )
        modules[unit.name] = new_module
        for parent, name in places[id(unit.module)]:  # a shared module has several
            parent._modules[name] = new_module
        if unit.module in params:
            params[new_module] = params[unit.module]
    _replace_references(model, {unit.module: modules[unit.name] for unit in units})
    _release_between(model, units, kept_ids, settings.device)
    for module, parameter in params.items():
        if module is not model and next(module.parameters(), None) is None:  # all are on other ranks
            module.__dict__["parameters"] = partial(
                _placeholder_parameters, _without_memory(parameter, settings.device)
            )
    model.register_forward_pre_hook(_make_seed_hook(switch, settings))
    return tuple(
        StageModule(
            model,
            _modules_of_stage(model, modules, assignment, stage, ids=ids) if len(numbers) > 1 else [model],
            number=stage,
            is_last=stage == len(assignment.ranges) - 1,
            switch=switch,
            device=settings.device,
            model_input_format=settings.model_input_format,
        )
        for stage in numbers
    )


_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that torch manages, such as _modules


def _replace_references(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replaces units also in a module's own lists of children, which its code may call."""

    def swap_modules(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return replacements.get(value, value)
        if type(value) is dict:  # the constructor of a subclass may take other arguments
            return {key: swap_modules(item) for key, item in value.items()}
        return type(value)(map(swap_modules, value)) if type(value) in (list, tuple) else value

    for module in [each for each in model.modules() if not isinstance(each, StageUnit)]:
        attributes = vars(module)
        attributes.update(
            {
                name: swap_modules(value)
                for name, value in attributes.items()
                if name not in _OF_MODULES and type(value) in (list, tuple, dict)
            }
        )


def _asked_for(module: nn.Module) -> nn.Parameter | None:
    """The first parameter of a class that reads its dtype or device, as classes of transformers do."""
    kind = type(module)
    if not any(isinstance(getattr(kind, name, None), property) for name in ("dtype", "device")):
        return None
    return next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)


def _placeholder_parameters(parameter: torch.Tensor, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Replaces the method ``parameters`` of a module without parameters here: yields one without memory."""
    return iter((parameter,) if recurse else ())


def _make_seed_hook(switch: PassSwitch, settings: StageSettings) -> Callable[..., None]:
    def seed(module: nn.Module, inputs: Any) -> None:
        if switch.running is None:  # the user calls the model: an error on every rank alike
            raise StepError(
                f"the model is cut over the ranks of a pipeline: {train_step_only(settings.method)}, or leave "
                "the axis pipeline out of parallel_mode."
            )
        seed_generators(switch.running.seed, settings.device)  # code between units draws alike on all stages

    return seed


def _modules_of_stage(
    model: nn.Module,
    modules: dict[str, nn.Module],
    assignment: StageAssignment,
    stage: int,
    *,
    ids: dict[str, int],
) -> list[nn.Module]:
    members = [module for path, module in modules.items() if stage in assignment.unit_stages[path]]
    stage_ids = {ids[name] for name, stages in assignment.parameter_stages.items() if stage in stages}
    # A stand-in may hold a parameter too, such as a tied embedding that a function uses as the head.
    members += [
        module
        for module in modules.values()
        if isinstance(module, Stub) and any(id(p) in stage_ids for p in module.parameters())
    ]
    member_ids = {id(p) for module in members for p in module.parameters()}
    return members + _parameter_holders(model, modules.values(), stage_ids - member_ids)


def _parameter_holders(model: nn.Module, modules: Iterable[nn.Module], ids: set[int]) -> list[nn.Module]:
    inside = {id(child) for module in modules for child in module.modules()}
    holders = []
    for owner in model.modules():
        if id(owner) not in inside and any(id(p) in ids for p in owner.parameters(recurse=False)):
            holder = nn.Module()  # for parameters between units
            # One dictionary for both, so that a parameter that is replaced in one is replaced in the other.
            object.__setattr__(holder, "_parameters", owner._parameters)
            holders.append(holder)
    return holders


def _find_registrations(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    parents: dict[int, list[tuple[nn.Module, str]]] = {}  # by id of the child
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                parents.setdefault(id(child), []).append((parent, name))
    return parents


def _modules_in_use(model: nn.Module, units: Sequence[NamedModule], mine: set[str]) -> set[int]:
    away = {id(module) for unit in units if unit.name not in mine for module in unit.module.modules()}
    local_ids = {id(module) for module in model.modules()} - away  # code between units runs on every rank
    for unit in units:  # a submodule may be shared by units of several ranks
        if unit.name in mine:
            local_ids |= {id(module) for module in unit.module.modules()}
    return local_ids


def _make_stub(
    module: nn.Module,
    path: str,
    switch: PassSwitch,
    kept_ids: set[int],
    *,
    in_use: set[int],
    settings: StageSettings,
) -> Stub:
    """A stand-in for ``module``. It takes the parameters that this rank needs, other memory is freed."""
    stub, device = Stub(module, path, switch, settings.method), settings.device
    for name, child in module.named_children():
        if any(id(p) in kept_ids for p in child.parameters()):
            stub._modules[name] = _make_stub(
                child, f"{path}.{name}", switch, kept_ids, in_use=in_use, settings=settings
            )
        else:
            for inner in child.modules():
                _release_memory(inner, in_use, device)
    _release_memory(module, in_use, device, kept_ids)
    if id(module) not in in_use:
        # For code that reads parts of a module that never runs, such as a list.
        module._modules.update(stub._modules)
    stub.__dict__["_parameters"] = module._parameters  # only those that this rank keeps are left in it
    return stub


def _release_memory(
    module: nn.Module, in_use: set[int], device: torch.device, kept_ids: Collection[int] = ()
) -> None:
    """Frees the memory of a module that does not run here, except tensors with ``kept_ids``."""
    if id(module) in in_use:
        return
    for tensors in (module._parameters, module._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None and id(tensor) not in kept_ids:
                del tensors[name]
                object.__setattr__(module, name, _without_memory(tensor, device))  # code may read its shape


def _release_between(
    model: nn.Module, units: Sequence[NamedModule], kept_ids: set[int], device: torch.device
) -> None:
    inside = {id(child) for unit in units for child in unit.module.modules()}
    for module in model.modules():
        if id(module) in inside or isinstance(module, (StageUnit, Stub)):  # _make_stub has released these
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in kept_ids:
                del module._parameters[name]
                object.__setattr__(module, name, _without_memory(parameter, device))


def _without_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)  # memory of one element
