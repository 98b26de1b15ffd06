"""fairscale as a backend of zero1 and zero2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster, gather_values
from atorch_ns.errors import BackendError, InputError, Problem, StepError
from atorch_ns.job import Job, ParameterStates, explained_groups
from atorch_ns.method import Conflict
from atorch_ns.strategy import Plan
from opt_lib._config_checks import missing_problem, one_axis_only, require
from opt_lib._optimizer_parts import clip_parts, local_state_view, with_checkpoint_hint

INSTALL = "pip install --no-build-isolation 'atorch-ns[fairscale]'"
"""Without isolation: its build reads the installed torch."""

_WHY_NO_MASTERS = (
    "ShardedDataParallel reduces the gradients of the optimizer's own parameters, so these cannot be fp32 copies. "
    "Use amp_native, half in bf16 without master_weights, or another backend."
)
_STATES = partial(ParameterStates, holder=attrgetter("optim"))  # this rank's optimizer is inside OSS


def conflicts(uses: Callable[[Any], bool]) -> tuple[Conflict, ...]:
    """Methods that conflict with ShardedDataParallel; ``uses`` says that a method's config chooses it."""
    return (
        Conflict("half", _WHY_NO_MASTERS, when=lambda mine, half: uses(mine) and half.keeps_masters),
        one_axis_only(uses, "ShardedDataParallel"),
    )


def check(method: str, cluster: Cluster) -> list[Problem]:
    """The package must be there."""
    return missing_problem(method, "fairscale", install=INSTALL)


def plan(plan: Plan) -> Plan:
    """The plan under ShardedDataParallel: each gradient goes to the rank that updates the parameter."""
    axes = plan.shard_axes
    return plan.changed(
        gradient_sync="reduce_scatter",
        sharding={"gradients_over": axes, "optimizer_over": axes, "layout": "parameters"},
    )


def shard_optimizer(job: Job, method: str) -> None:
    """Uses OSS with any method that averages the gradients."""
    job.optimizer.make = partial(_sharded_optimizer, job)
    job.optimizer.takes_frozen = False
    job.make_states = _STATES
    job.explain(method, "OSS of fairscale")


def shard_gradients(job: Job, method: str) -> None:
    """OSS with ShardedDataParallel, which leaves each gradient on the rank that updates the parameter.

    Where a parameter takes part in the loss on some ranks only, gradients are lost, as in DDP without
    ``find_unused_parameters``.
    """
    if job.inputs.optim_func is None:
        raise InputError("ShardedDataParallel needs its optimizer, so auto_accelerate needs optim_func.")
    job.place()
    job.make_states = _STATES

    def take_over(groups: list[dict[str, Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
        optimizer = _sharded_optimizer(job, groups)
        return _sharded_model(job, optimizer), optimizer

    job.optimizer.take_over = take_over
    job.optimizer.takes_frozen = False
    job.explain(method, "OSS and ShardedDataParallel of fairscale, gradients reduced one by one")


def _sharded_optimizer(job: Job, groups: list[dict[str, Any]]) -> Any:
    assert job.mesh is not None
    _require_one_dtype(groups)
    oss = require("fairscale.optim.oss", needed_by="OSS", install=INSTALL)
    # OSS gives each parameter in turn to the rank that has least: largest first, the shares come out even.
    groups = [{**group, "params": sorted(group["params"], key=torch.numel, reverse=True)} for group in groups]
    with explained_groups(job, groups):
        optimizer = with_checkpoint_hint(oss.OSS)(
            groups,
            optim=job.inputs.optim_func,
            group=job.mesh.shard.get_group(),
            **dict(job.inputs.optim_args or {}),
        )
    local_state_view(optimizer)
    return optimizer


def _require_one_dtype(groups: list[dict[str, Any]]) -> None:
    dtypes = {p.dtype for group in groups for p in group["params"] if p.requires_grad}
    if len(dtypes) > 1:
        raise BackendError(
            f"OSS packs each rank's parameters into one buffer, but they have {len(dtypes)} dtypes: "
            f"{', '.join(sorted(map(str, dtypes)))}. Use zero1 or zero2 with their default backend (torch)."
        )


def _sharded_model(job: Job, optimizer: Any) -> nn.Module:
    assert job.mesh is not None
    group, device = job.mesh.data_group, job.device
    parallel = require("fairscale.nn.data_parallel", needed_by="ShardedDataParallel", install=INSTALL)
    model: Any = parallel.ShardedDataParallel(
        job.module,
        optimizer,
        process_group=group,
        # Gradients in buffers are not reduced once `zero_grad` has set them to None, as it does by default.
        reduce_buffer_size=0,
        warn_on_trainable_params_changed=False,
    )
    rank = dist.get_rank(group)
    if job.plan.precision.loss_scaling:
        share = [p for part in optimizer.partition_parameters()[rank] for p in part["params"]]
        _require_share(job, share)
    reducer = _ReducedGradients(model, optimizer, num_ranks=job.num_data_ranks)

    def clip(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        # A reduced gradient is left on its owner alone.
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return clip_parts(gradients, max_norm, norm_type, group=group, device=device)

    job.gradients.clip = clip
    job.gradients.skip_sync = reducer.pausing(model.no_sync)
    return model  # type: ignore[no-any-return]


def _require_share(job: Job, parameters: Iterable[torch.Tensor]) -> None:
    """Checks that every data rank holds a part of the trainable parameters. Collective."""
    assert job.mesh is not None
    size = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    # Each rank's gradients decide about its loss scale, so a rank without any cannot take part.
    counts = gather_values(size, distributed=True, group=job.mesh.data_group)
    empty = [rank for rank, count in enumerate(counts) if count == 0]
    if empty:
        raise BackendError(
            f"ShardedDataParallel leaves data ranks {empty} of {len(counts)} without any trainable parameter, but fp16's "
            "loss scaling needs a gradient on every rank. Use fewer processes, bf16, or another backend."
        )


class _ReducedGradients:
    """Keeps accumulation right where ShardedDataParallel would divide earlier gradients again."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._is_paused = False
        self._parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._pending: set[torch.Tensor] = set()  # will be reduced by the next backward pass
        self._with_average: set[torch.Tensor] = set()  # hold an average over the ranks
        self._local: set[torch.Tensor] = set()  # hold gradients of this rank alone
        for parameter in self._parameters:
            self._watch_parameter(parameter)
        model.register_forward_pre_hook(self._before_forward)
        optimizer.register_step_pre_hook(self._before_step)

    def pausing(
        self, no_sync: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """The wrapper's ``no_sync``. This object records its use."""

        @contextmanager
        def skip() -> Iterator[None]:
            self._is_paused = True
            try:
                with no_sync():
                    yield
            finally:
                self._is_paused = False

        return skip

    def _watch_parameter(self, parameter: torch.Tensor) -> None:
        def before(_: torch.Tensor) -> None:
            # The wrapper divides all of ``grad`` by the number of ranks and sums it over them. An average of
            # before, which its owner alone holds, would come out divided once more.
            if parameter in self._with_average and parameter.grad is not None:
                parameter.grad.mul_(self._num_ranks)
            self._with_average.discard(parameter)

        def after(_: torch.Tensor) -> None:
            if self._is_paused or parameter not in self._pending:
                self._local.add(parameter)
            else:
                self._pending.discard(parameter)
                self._local.discard(parameter)
                self._with_average.add(parameter)

        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if model.training:  # in evaluation the wrapper has no hooks
            self._pending.update(self._parameters)
        else:
            self._pending.clear()

    def _before_step(self, *_: Any) -> None:
        if any(parameter.grad is not None for parameter in self._local):
            raise StepError(
                "the last backward pass did not average its gradients over the ranks. ShardedDataParallel does "
                "that once per forward pass, and only in training mode: call model.train(), sum the losses "
                "before one backward pass, and exit the context that skips synchronisation before the last "
                "micro-batch."
            )
