"""DeepSpeed's ZeRO as a backend of zero1, zero2 and ds_3d_parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import BackendError, InputError, Problem
from atorch_ns.job import OPTIMIZER, Job, StateSpec, keeps_blocks, make_user_optimizer, parameter_names
from atorch_ns.job.states import groups_of_all_stages
from atorch_ns.method import Conflict
from atorch_ns.strategy import Plan
from atorch_ns.text import error_text
from opt_lib._config_checks import missing_problem, one_axis_only, require
from opt_lib._deepspeed.optimizer import DeepSpeedOptimizer
from opt_lib._deepspeed.states import FlatStates, ParameterPiece
from opt_lib._sharded.units import broadcast_from_first

INSTALL = "pip install --no-build-isolation 'atorch-ns[deepspeed]'"
"""Without isolation: its build reads the installed torch."""

_WHY_NOT_HALF = (
    "DeepSpeed keeps the fp32 copies of half-precision weights itself and leaves the optimizer's steps to none "
    "but its own. Use amp_native with bf16, or another backend."
)
_WHY_NOT_FP16 = (
    "DeepSpeed scales fp16 losses by a scheme of its own, and refuses fp16 on the CPU. Use bf16, or another "
    "backend."
)
_DEVICE = "DS_ACCELERATOR"  # names the device; DeepSpeed reads it when it is imported
_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default reduce_bucket_size
_PIECE_MULTIPLE = 2  # pieces begin at multiples of this many elements (nccl_start_alignment_factor)


def conflicts(uses: Callable[[Any], bool]) -> tuple[Conflict, ...]:
    """Methods that conflict with DeepSpeed, where ``uses`` says that a method's config chooses DeepSpeed."""
    return (
        Conflict("half", _WHY_NOT_HALF, when=lambda mine, _: uses(mine)),
        Conflict("amp_native", _WHY_NOT_FP16, when=lambda mine, amp: uses(mine) and amp.dtype == "float16"),
        one_axis_only(uses, "DeepSpeed"),
    )


def check(method: str, cluster: Cluster) -> list[Problem]:
    """The package must be there, and use the device that the job uses."""
    with environment_default(_DEVICE, cluster.device_type):
        problems = missing_problem(method, "deepspeed", install=INSTALL)
    if problems:
        return problems
    # It may have been imported before, for another device.
    device_name = _import_deepspeed(cluster.device_type).accelerator.get_accelerator().device_name()
    if device_name == cluster.device_type:
        return []
    return [
        Problem(
            message=f"DeepSpeed was imported for the device {device_name!r}, but this job runs on "
            f"{cluster.device_type!r}. Set DS_ACCELERATOR={cluster.device_type} before DeepSpeed is imported",
            method=method,
        )
    ]


def plan(plan: Plan) -> Plan:
    """The plan under ZeRO 1: the optimizer updates fp32 pieces of the model as one vector."""
    return plan.changed(
        gradient_sync="all_reduce",
        sharding={
            "optimizer_over": plan.shard_axes,
            "layout": "flat",
            "units": (),
            "flat_multiple": _PIECE_MULTIPLE,
            "updates_copy": True,
            "frees_gradients": True,
        },
    )


def shard(job: Job, method: str, *, stage: int) -> None:
    """Lets DeepSpeed make model and optimizer; stage 1 shards optimizer states, stage 2 gradients as well."""
    if job.inputs.optim_func is None:
        raise InputError("DeepSpeed makes model and optimizer together, so auto_accelerate needs optim_func.")
    require_elementwise(job)
    require_fp32(job)
    job.place()
    job.optimizer.use_optim_backward = True
    job.optimizer.requires_boundary = True

    def take_over(groups: list[dict[str, Any]]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        assert job.mesh is not None
        engine = _make_engine(job, groups, stage)
        optimizer = DeepSpeedOptimizer(
            engine, group=job.mesh.data_group, skip_if_nonfinite=job.precision.skip_if_nonfinite
        )
        job.gradients.clip = optimizer.clip_gradients
        job.make_states = partial(states, engine.optimizer)
        return engine, optimizer

    job.optimizer.take_over = take_over
    job.optimizer.takes_frozen = False
    job.explain(method, f"DeepSpeed ZeRO stage {stage}, which does not clip gradients itself")


def require_fp32(job: Job) -> None:
    """Checks that ZeRO's flat fp32 partitions can hold every parameter.

    Raises:
        InputError: naming the first that they cannot.
    """
    for name, parameter in job.module.named_parameters():
        if parameter.dim() == 0 or (parameter.requires_grad and parameter.dtype != torch.float32):
            raise InputError(
                f"DeepSpeed shards only fp32 parameters with at least one dimension, but {name} has shape "
                f"{tuple(parameter.shape)} and dtype {parameter.dtype}. Change the model or use another backend."
            )


_ROWS, _COLUMNS, _STEPS = 4, 6, 2  # for the trial of an optimizer: a matrix, and steps


def require_elementwise(job: Job) -> None:
    """Tries the user's optimizer on a small matrix and on the same matrix cut into two flat pieces.

    ZeRO updates flat pieces: optimizers of whole parameters, such as Muon, would train wrongly in silence.

    Raises:
        BackendError: if the two differ.
    """
    if job.inputs.optim_func is None:
        return
    _warn_of_blocks(job)
    generator = torch.Generator().manual_seed(0)
    # [rows, columns] each: the weights, and one gradient a step.
    start, *gradients = torch.randn(1 + _STEPS, _ROWS, _COLUMNS, generator=generator)
    cut = _ROWS * _COLUMNS // 3  # inside a row: at 8 elements, where a row has 6
    try:
        whole = _apply_updates(job, [start], [[gradient] for gradient in gradients])
    except Exception:  # it does not support such a parameter, so the trial shows nothing
        return
    try:
        flat = [_split_flat(gradient, cut) for gradient in gradients]
        pieces = _apply_updates(job, _split_flat(start, cut), flat)
    except Exception as error:
        raise _not_elementwise(job, f"it fails on flat pieces with {error_text(error)}") from error
    if not torch.allclose(whole, pieces, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise _not_elementwise(job, "it updates a matrix differently if the matrix is in pieces")


def _warn_of_blocks(job: Job) -> None:
    try:
        optimizer = make_user_optimizer(job, [{"params": [nn.Parameter(torch.zeros(_ROWS, _COLUMNS))]}])
    except Exception:  # the user's error, which is reported where the optimizer is made
        return
    if not keeps_blocks(optimizer):
        return
    text = (
        f"{type(optimizer).__name__}: its 8-bit states have scales of blocks of elements, which cannot be put together "
        "from the flat pieces of DeepSpeed, so checkpoint.save will refuse them. To save them use zero1 or "
        "('zero2', {'not_use_fsdp': True})"
    )
    job.explain(OPTIMIZER, text)
    job.warn(text)


def _split_flat(matrix: torch.Tensor, position: int) -> list[torch.Tensor]:
    flat = matrix.flatten()
    return [flat[:position], flat[position:]]


def _apply_updates(job: Job, start: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> torch.Tensor:
    parameters = [nn.Parameter(piece.clone()) for piece in start]  # optimizers write to their parameters
    optimizer = make_user_optimizer(job, [{"params": parameters}])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _not_elementwise(job: Job, why: str) -> BackendError:
    name = getattr(job.inputs.optim_func, "__name__", "the optimizer")
    return BackendError(
        f"DeepSpeed updates flat pieces of parameters, but {name} looks at each parameter as a whole: {why}. "
        "Use an optimizer that works element by element, or a backend that keeps parameters whole (zero1, ddp)."
    )


def _make_engine(job: Job, groups: list[dict[str, Any]], stage: int) -> Any:
    deepspeed = start(job.cluster.device_type)
    optimizer = make_user_optimizer(job, groups)
    if optimizer.state:
        raise BackendError(
            f"{type(optimizer).__name__} keeps state from its construction, which DeepSpeed does not carry "
            "over to the flat partitions it updates. Use another optimizer or another backend."
        )
    broadcast_from_first(job, job.module.buffers())  # DeepSpeed sends parameters only
    num_elements = sum(parameter.numel() for parameter in job.module.parameters())
    engine, *_ = deepspeed.initialize(
        model=job.module,
        optimizer=optimizer,
        config=_engine_config(stage, num_elements),
        dist_init_required=False,
    )
    return engine


def states(zero: Any, job: Job, _: torch.optim.Optimizer | None) -> FlatStates:
    """The states in flat pieces of DeepSpeed's optimizer ``zero``. Collective over pipeline stages."""
    assert job.mesh is not None
    names = {parameter: aliases[0] for parameter, aliases in parameter_names(job.module).items()}
    specs: dict[str, StateSpec] = {}
    pieces: dict[str, ParameterPiece] = {}
    for parameters, partition in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in parameters:
            # Names that are left over belong to no group: those parameters are whole on every rank.
            name, mapping = names.pop(parameter), parameter._hp_mapping
            specs[name] = StateSpec(tuple(parameter.shape), partition.dtype)
            # A part is in this rank's partition: ``hp`` is its place there, ``lp`` in the parameter.
            if mapping is not None:
                ours, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                weight = partition.detach()[ours.start : ours.start + ours.numel]
                pieces[name] = ParameterPiece(weight, whole.start, partition, ours.start, partition.numel())
    of_groups = iter(specs)  # in the order of the groups
    return FlatStates(
        specs=specs,
        pieces=pieces,
        whole={name: parameter for parameter, name in names.items()},
        optimizer=zero.optimizer,
        groups=groups_of_all_stages(job, [[next(of_groups) for _ in group] for group in zero.bit16_groups]),
        mesh=job.mesh.data,
        device=job.device,
        publish=zero.update_lp_params,
    )


def _engine_config(stage: int, num_elements: int) -> dict[str, Any]:
    # Buckets are allocated whole, so no larger than the model; DeepSpeed wants even sizes.
    bucket = min(_BUCKET_ELEMENTS, num_elements + num_elements % 2)
    return {
        # Sizes of batches only count samples here. Dividing by the number of micro-batches is the caller's,
        # and the step, not a counter of backward passes, ends an accumulation.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # the default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "compute_grad_norm": False,  # with it, steps with infinite gradients are skipped unasked
        },
        "timers": {"throughput": {"enabled": False}},
    }


def start(device_type: str) -> ModuleType:
    """Returns DeepSpeed on the existing process group, without state of earlier engines in this process."""
    deepspeed = _import_deepspeed(device_type)
    deepspeed.utils.groups.mpu = None  # left by the last pipeline; any engine would use its groups
    with _without_shared_memory_build(deepspeed):
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed


def _import_deepspeed(device_type: str) -> ModuleType:
    with environment_default(_DEVICE, device_type):
        return require("deepspeed", needed_by="ZeRO by DeepSpeed", install=INSTALL)


@contextmanager
def environment_default(name: str, value: object) -> Iterator[None]:
    """Sets an environment variable inside unless the user has: DeepSpeed reads some settings only there."""
    if name in os.environ:
        yield
        return
    os.environ[name] = str(value)
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _without_shared_memory_build(deepspeed: ModuleType) -> Iterator[None]:
    """Inside, DeepSpeed starts without compiling its shared-memory collectives; gloo does them."""
    # A build takes minutes, and a killed build leaves a lock on which every later run hangs.
    table, name = vars(deepspeed.ops), "__compatible_ops__"
    before = table.get(name)
    table[name] = {}
    try:
        yield
    finally:
        if before is None:
            del table[name]
        else:
            table[name] = before
