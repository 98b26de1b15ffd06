"""build_optimizer: an optimizer of a module with parallel ones, whose steps synchronise gradients first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from atorch_ns.apply import attach_optimizer
from atorch_ns.errors import InputError, StepError
from atorch_ns.job.gradients import clip_gradients
from atorch_ns.job.optimizer.user_optimizer import class_above
from atorch_ns.job.reducer import BucketHook, GradientReducer
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.parallel.module import STEP, ParallelModule, named_parameters, parallel_modules
from atorch_ns.parallel.pieces import PIECES, Pieces, as_part, localise, part_of
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.torch_compat import has_user_hooks

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def build_optimizer(
    module: nn.Module,
    optimizer_fn: type[OptimizerT] | Callable[..., OptimizerT],
    compute_config: ComputeConfig | None = None,
    **kwargs: Any,
) -> OptimizerT:
    """Creates an optimizer for this rank's parameters. Collective.

    It is also a :class:`ParallelOptimizer`. Parameters outside of parallel modules
    take the first rank's values, and their gradients are summed over the scale units.

    Args:
        module: a parallel module, or a module with some in it.
        optimizer_fn: ``(parameters, **kwargs) -> optimizer``, which can group ``module.named_parameters()``.
        compute_config: checked against that of the parallel modules.
        kwargs: arguments of ``optimizer_fn``.

    Raises:
        InputError: if the module has no parallel module, or they do not go together.
    """
    parts = parallel_modules(module)
    config = _common_config(module, parts, compute_config)
    if isinstance(module, ParallelModule):
        module.__dict__["result"] = result = attach_optimizer(module.result, optimizer_fn, **kwargs)
        optimizer = cast("OptimizerT", result.optim)
        reducer = None
        if not config.use_end2end:
            _sum_when_told(module)
    else:
        reducer = reducer_of_the_rest(module, parts, config)
        if reducer is not None:
            reducer.wait_until_told(sums=True)
        for part in parts.values():
            _sum_when_told(part)
        parameters = [parameter for _, parameter in named_parameters(module) if parameter.requires_grad]
        optimizer = optimizer_fn(parameters, **kwargs)
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"optimizer_fn returned {optimizer!r}, which is not a torch.optim.Optimizer.")
    if not isinstance(optimizer, ParallelOptimizer):
        optimizer.__class__ = class_above(ParallelOptimizer, type(optimizer))  # the user's own object
    cast("ParallelOptimizer", optimizer)._attach_modules(module, tuple(parts.values()), config, reducer)
    return optimizer


class ParallelOptimizer(Optimizer):
    """Methods and behaviour that :func:`build_optimizer` adds to an optimizer.

    Gradients are local to each rank until :meth:`sync_shard_grad`, which ``step()`` calls after its closure.
    """

    _module: nn.Module
    _parts: tuple[ParallelModule, ...]
    _config: ComputeConfig
    _non_parallel_module_reducer: GradientReducer | None
    _is_synchronised: bool

    def _attach_modules(
        self,
        module: nn.Module,
        parts: tuple[ParallelModule, ...],
        config: ComputeConfig,
        reducer: GradientReducer | None,
    ) -> None:
        self._module, self._parts, self._config = module, parts, config
        self._non_parallel_module_reducer = reducer
        self._is_synchronised = False
        for root in {module, *parts}:  # a module may be its own only part
            root.register_forward_pre_hook(self._begin_forward)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Updates the weights after :meth:`sync_shard_grad`, also of a closure's gradients. Collective."""
        self.sync_shard_grad()
        if closure is None:
            return super().step(**kwargs)

        def sync_closure() -> Any:
            loss = closure()
            self.sync_shard_grad()
            return loss

        return super().step(sync_closure, **kwargs)

    def _begin_forward(self, *_: Any) -> None:
        _refuse_gradient_hooks(self._parts)
        if torch.is_grad_enabled() and self._is_synchronised:  # gradients accumulate further
            self._is_synchronised = False
            self._multiply_means(1 / self._config.num_units)  # means again, to which the backward pass adds

    @property
    def _mean_parts(self) -> list[ParallelModule]:
        # Without a reducer fully_shard reduces gradients to means over the units, but sums are needed.
        if self._config.use_end2end:
            return []
        return [part for part in self._parts if part.result.job.gradients.reducer is None]

    def sync_shard_grad(self) -> None:
        """Sums gradients over the scale units, unless already done. Collective."""
        if self._is_synchronised:
            return
        turn = max(part.num_calls for part in self._parts)
        with self._parts[0].result.job.cluster.sharing_failures(STEP, turn=turn):
            for part in self._parts:
                job = part.result.job
                job.gradients.complete(job.module)
            self._multiply_means(self._config.num_units)
            if self._non_parallel_module_reducer is not None:
                self._non_parallel_module_reducer.sync_grad()
        self._is_synchronised = True

    def scale_grads(self, scale: float) -> None:
        """Multiplies all gradients by a number.

        Raises:
            StepError: before :meth:`sync_shard_grad`.
        """
        if not self._is_synchronised:
            raise StepError("scale_grads needs gradients of all units: call sync_shard_grad() first.")
        self._scale_gradients(self._list_parameters(), scale)

    def clip_gnorm(self, max_norm: float | None = None) -> torch.Tensor:
        """Synchronises the gradients and clips them by their norm over all ranks. Collective.

        Returns:
            The norm before clipping, 0-d, the same on every rank. Without ``max_norm`` nothing is clipped.
        """
        limit = float("inf") if max_norm is None else max_norm
        if not limit > 0.0:
            raise InputError(f"clip_gnorm needs a positive norm, or None to clip nothing; it got {max_norm}.")
        self.sync_shard_grad()
        if isinstance(self._module, ParallelModule):
            return self._module.result.job.gradients.clip(self._list_parameters(), limit, 2.0)  # 2-norm
        return clip_gradients(self._list_parameters(), limit)

    def register_reducer_pre_hook(self, fn: BucketHook) -> None:
        """Calls ``fn(reducer, gradients)`` with each bucket, 1-d, before it is summed over the units.

        Raises:
            InputError: with ``use_zero``, where torch's ``fully_shard`` sums the gradients.
        """
        for reducer in self._find_reducers():
            reducer.before(fn)

    def register_reducer_post_hook(self, fn: BucketHook) -> None:
        """Calls ``fn(reducer, gradients)`` with each bucket, 1-d, after its sum, like the pre-hook."""
        for reducer in self._find_reducers():
            reducer.after(fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self._is_synchronised = False
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part in plain tensors, with names and places."""
        state = super().state_dict()
        names = self._parameter_names()
        flat = [name for group in names for name in group]
        pieces = self._build_pieces()
        states = {
            index: {key: localise(f"{flat[index]}/{key}", value, pieces) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": states, PIECES: {**pieces.as_state(), "names": names}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's part, or a whole state dict by names."""
        if not {"state", "param_groups"} <= set(state_dict):
            raise InputError("this is not a state dict of an optimizer: it needs 'state' and 'param_groups'.")
        metadata = state_dict.get(PIECES)
        names = self._parameter_names()
        whole = metadata is None or metadata.get("rank") is None  # merged, or a plain optimizer's
        # Numbers of the state dict become names, and names become the numbers of this rank's optimizer.
        like = dict(named_parameters(self._module))
        indices = {name: index for index, name in enumerate(name for group in names for name in group)}
        source = [name for group in (names if metadata is None else metadata["names"]) for name in group]
        if metadata is None:  # a plain optimizer's
            source = self._source_of(state_dict["param_groups"], source)
        state: dict[int, dict[str, Any]] = {}
        for index, values in state_dict["state"].items():
            name = source[index]
            if name not in indices:
                continue  # a parameter of another stage
            target = like[name]
            state[indices[name]] = {key: _of_parameter(value, target, whole) for key, value in values.items()}
        groups = super().state_dict()["param_groups"]
        new_groups = [
            {**{key: value for key, value in theirs.items() if key != "params"}, "params": mine["params"]}
            for mine, theirs in zip(groups, state_dict["param_groups"], strict=True)
        ]
        super().load_state_dict({"state": state, "param_groups": new_groups})

    def _source_of(self, groups: Sequence[Mapping[str, Any]], names: list[str]) -> list[str]:
        count, order = sum(len(group["params"]) for group in groups), list(self._build_pieces().order)
        if count == len(names):
            return names  # of this rank's parameters
        if count == len(order) and len(groups) == 1:
            return order  # of the plain module's parameters
        raise InputError(
            f"the state dict has {count} parameters without names in {len(groups)} groups; the module has {len(order)}, "
            f"of which this rank's optimizer has {len(names)}. Give merge_state_dicts' result, or a state dict of all parameters."
        )

    def _multiply_means(self, factor: float) -> None:
        for part in self._mean_parts:
            self._scale_gradients(part.parameters(), factor)

    @staticmethod
    @torch.no_grad()
    def _scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None and factor != 1:
                parameter.grad.mul_(factor)

    def _list_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _parameter_names(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in named_parameters(self._module)}
        return [[names[id(parameter)] for parameter in group["params"]] for group in self.param_groups]

    def _build_pieces(self) -> Pieces:
        if isinstance(self._module, ParallelModule):
            return Pieces.of(self._config, self._module.result.job)
        order = [name for name, _ in named_parameters(self._module)]
        return Pieces(dist.get_rank() if dist.is_initialized() else 0, self._config.as_json(), order)

    def _find_reducers(self) -> Iterable[GradientReducer]:
        if self._config.use_zero and self._config.num_units > 1:
            raise InputError(
                "with use_zero, torch's fully_shard sums the gradients and has no hooks around that: scale them with "
                "scale_grads after sync_shard_grad, or leave use_zero out."
            )
        reducers = [part.result.job.gradients.reducer for part in self._parts]
        return [reducer for reducer in (*reducers, self._non_parallel_module_reducer) if reducer is not None]


def _of_parameter(value: Any, parameter: torch.Tensor, whole: bool) -> Any:
    # Values with the parameter's shape, such as a momentum, are divided alike. A step count is the same.
    if not isinstance(value, torch.Tensor):
        return value
    value = value.clone()  # torch would go on with the tensors of the state dict themselves
    if whole:
        return part_of(value, parameter) if value.shape == parameter.shape else value
    fits = value.dim() and value.shape == local_part(parameter).shape
    return as_part(value, parameter) if fits else value


def _refuse_gradient_hooks(parts: Iterable[ParallelModule]) -> None:
    # fully_shard gives each rank its part of a gradient without calling hooks on it.
    for part in parts:
        if part.result.job.gradients.reducer is None and part.compute_config.num_units > 1:
            for name, parameter in named_parameters(part):
                if has_user_hooks(parameter):
                    raise InputError(
                        f"{name} has a hook on its gradient, which is not called with use_zero; change gradients between "
                        "sync_shard_grad() and step(), or leave use_zero out."
                    )


def _common_config(
    module: nn.Module, parts: Mapping[str, ParallelModule], argument: ComputeConfig | None
) -> ComputeConfig:
    if not parts:
        raise InputError(
            "build_optimizer needs a module that parallelize made, but this module contains none."
        )
    configs = {path: part.compute_config for path, part in parts.items()}
    first = next(iter(configs.values()))
    sizes = (first.plan_ngpus, first.runtime_ngpus)
    for path, config in (*configs.items(), *([("compute_config", argument)] if argument is not None else [])):
        if (config.plan_ngpus, config.runtime_ngpus) != sizes:
            raise InputError(
                f"all parallel modules need the same plan_ngpus and runtime_ngpus: {path or 'the module'} has "
                f"{config.plan_ngpus} and {config.runtime_ngpus}, another has {sizes[0]} and {sizes[1]}."
            )
    if any(config.use_end2end for config in configs.values()) and not isinstance(module, ParallelModule):
        raise InputError(
            "an end-to-end module is trained by its train_step, so it cannot be part of another module."
        )
    if any(config.inference_only for config in configs.values()):
        raise InputError("a module made with inference_only=True has nothing to optimize.")
    return first


def _sum_when_told(part: ParallelModule) -> None:
    # The user's loop may accumulate, so step() sums gradients over the units, not backward passes.
    job = part.result.job
    if job.gradients.reducer is not None:
        job.gradients.reducer.wait_until_told(sums=True)


def reducer_of_the_rest(
    module: nn.Module, parts: Mapping[str, ParallelModule], config: ComputeConfig
) -> GradientReducer | None:
    """A reducer of other parameters' gradients, or ``None``. They get rank 0's values. Collective."""
    inside = {id(tensor) for part in parts.values() for tensor in (*part.parameters(), *part.buffers())}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in inside]
    if config.runtime_ngpus == 1 or not dist.is_initialized():
        return None
    with torch.no_grad():
        for tensor in (*rest, *(buffer for buffer in module.buffers() if id(buffer) not in inside)):
            dist.broadcast(tensor, src=0)  # ranks may have made other values
    mesh = next(iter(parts.values())).result.job.mesh
    if not rest or mesh is None or config.num_units == 1:
        return None
    return GradientReducer(module, mesh.data_group, rest)
