"""Sharding a model with torch's ``fully_shard`` (FSDP2), shared by fsdp and zero2."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import is_parametrized

from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.capture.random_states import BatchNorm
from atorch_ns.capture.user_code import nested_codes
from atorch_ns.errors import InputError
from atorch_ns.job import Job, Materialiser, SkipSync
from atorch_ns.job.census import refuse_hidden_outputs
from atorch_ns.job.reducer import require_dense_gradients
from atorch_ns.sharding import unit_dim
from atorch_ns.strategy import MODEL_AXES
from atorch_ns.text import count_noun
from atorch_ns.torch_compat import is_view, plain_name, visit_first
from opt_lib._sharded.config import MixedPrecisionConfig, ShardConfig
from opt_lib._sharded.gather import ShardsBetweenPasses, gather_for_methods, gather_where_read
from opt_lib._sharded.idle import reduce_idle_parameters
from opt_lib._sharded.skipped import call_skipped_units
from opt_lib._sharded.units import (
    average_ignored,
    broadcast_from_first,
    expert_modules,
    expert_parameters,
    ignored_parameters,
    init_function,
    leave_sequence_sums,
    move_to_device,
    own_dtype,
    parameters_kept_whole,
    shard_experts,
    units_of_other_dtypes,
    wrap_units,
)


class _Units(NamedTuple):  # modules that become units, by what makes them one; the roots do in any case
    main: list[nn.Module]  # by the config, parents before children
    norms: list[nn.Module]  # in full precision
    others: list[nn.Module]  # of another dtype than what is around them
    together: list[nn.Module]  # trainable ones, as one unit a dtype (``wrap_trainable_outmost``)


def shard(job: Job, method: str, config: ShardConfig) -> None:
    """Shards parameters, gradients and optimizer states over the mesh. Collective.

    A model on the meta device is materialised unit by unit, so that a rank never holds more than its shard
    and one unit.
    """
    assert job.mesh is not None
    require_dense_gradients(job.module, method)
    materialiser = job.materialiser(init_function(config.param_init_fn))
    ignored_params = ignored_parameters(job.module, config, materialiser)
    options = _shard_options(job, config, ignored_params)
    main = [unit for unit in wrap_units(job.module, config) if unit not in expert_modules(job)]
    # Before the rest, since experts are sharded over fewer ranks.
    shard_experts(job, options, sync=config.sync_module_states)
    options["ignored_params"] = ignored_params | expert_parameters(job) | parameters_kept_whole(job)
    units = _sort_units(job, method, config, main, options=options)
    prepare = partial(_prepare_module, job, config, materialiser)
    _make_units(job, method, units, options, prepare=prepare)
    if keeps_input_dtypes(job, config):
        options = {**options, "mp_policy": replace(options["mp_policy"], cast_forward_inputs=False)}
    for root in job.roots:
        prepare(root)
        fully_shard(root, **options)
    if keeps_input_dtypes(job, config):
        cast_inputs_where_refused(job, units.main)
    # After fully_shard, so that its hooks come before torch's.
    passes = [ShardsBetweenPasses(root, job) for root in job.roots]
    move_to_device(job, ignored_params)
    if config.forward_prefetch:
        _prefetch_following(units.main)
    # Reduction of gradients: when, and of parameters that belong to no unit.
    reduces_each = _reduces_each(job)
    job.gradients.skip_sync = nullcontext if reduces_each else skip_sync(job.roots)
    average_ignored(job, ignored_params)
    leave_sequence_sums(job, options["ignored_params"])
    job.placed = True
    _explain_sharding(job, method, config, units, options=options, num_ignored=len(ignored_params))
    # Uses of parameters outside of the forward pass of their unit.
    gather_where_read(job, method, options)
    reduce_idle_parameters(job, method, options["ignored_params"])
    call_skipped_units(job, method, units.main)
    gather_for_methods(job, passes)
    _refuse_copies(job.module)
    note_separate_head(job, method, units.main)
    if reduces_each:
        job.explain(method, "gradients are reduced and sharded after every micro-batch")
    elif config.reduce_each_micro_batch and job.parts.stages:
        job.explain(
            method, "in a pipeline gradients are reduced at the end of a step, not for each micro-batch"
        )


def _sort_units(
    job: Job, method: str, config: ShardConfig, main: list[nn.Module], *, options: dict[str, Any]
) -> _Units:
    norms = _full_precision_norms(job.module, main, options)
    together = _trainable_modules(job, method, norms) if config.wrap_trainable_outmost else []
    main = [unit for unit in main if unit not in together]
    others = []
    if not together:  # which are all that is trainable
        others = units_of_other_dtypes([*job.roots, *main, *norms], options["ignored_params"])
    return _Units(main, norms, others, together)


def _prefetch_following(units: Iterable[nn.Module]) -> None:
    for current, following in itertools.pairwise(units):
        assert isinstance(current, FSDPModule)
        assert isinstance(following, FSDPModule)
        current.set_modules_to_forward_prefetch([following])


def _keep_read_by_hooks(
    job: Job, method: str, units: Sequence[nn.Module], options: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    # A penalty that hooks compute of weights may have its own backward pass, for which no unit is gathered.
    read = [unit for unit in units if _is_read_by_hooks(unit)]
    if read:
        number = count_noun(len(read), "unit")
        job.explain(method, f"{number} stay gathered: hooks of their modules read weights")
    return {unit: {**options, "reshard_after_forward": False} for unit in read}


def _is_read_by_hooks(unit: nn.Module) -> bool:
    names = {name.rpartition(".")[2] for name, _ in unit.named_parameters()}
    hooks = (hook for module in unit.modules() for hook in module._forward_hooks.values())
    codes = (code for hook in hooks for code in nested_codes(getattr(hook, "__code__", None)))
    return any({"parameters", "named_parameters", *names} & {*code.co_names} for code in codes)


def _make_units(
    job: Job, method: str, units: _Units, options: dict[str, Any], *, prepare: Callable[[nn.Module], None]
) -> None:
    """Makes a unit of each module, and one a dtype of those that are gathered together."""
    in_fp32 = {**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    options_of = dict.fromkeys([*units.main, *units.others], options)
    options_of |= _keep_read_by_hooks(job, method, list(options_of), options)
    options_of |= dict.fromkeys(units.norms, in_fp32)
    of_dtype: dict[torch.dtype | None, list[nn.Module]] = {}
    for module in units.together:
        of_dtype.setdefault(own_dtype(module, options["ignored_params"]), []).append(module)
    gathered_once = {**options, "reshard_after_forward": False}
    paths = {module: plain_name(name) for name, module in job.module.named_modules()}
    inside = {child for module in units.together for child in module.modules()}
    # Children before parents: a unit manages what no unit inside it manages.
    order = [module for module in reversed(paths) if module in options_of]
    steps = [([module], options_of[module]) for module in order if module in inside]
    steps += [(alike, gathered_once) for alike in of_dtype.values()]
    steps += [([module], options_of[module]) for module in order if module not in inside]
    for modules, unit_options in steps:
        for module in modules:
            prepare(module)
            if module in units.main:
                module.register_forward_hook(torch.compiler.disable(_without_views))
                module.register_forward_hook(torch.compiler.disable(refuse_hidden_outputs(paths[module])))
            module.register_forward_hook(torch.compiler.disable(_gather_before_hidden))
        fully_shard(modules, **unit_options)


def _refuse_copies(model: nn.Module) -> None:
    def refuse(_: Any) -> None:
        raise InputError(
            "a model that fsdp or zero2 divides cannot be copied (torch: FSDP does not support deepcopy). For an average of "
            "its weights (EMA), use result.average(decay) instead of AveragedModel or deepcopy; for the weights "
            "themselves, checkpoint.export_state_dict(result). See docs/how-to/average-weights.md."
        )

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__dict__["__deepcopy__"] = refuse  # copy.deepcopy looks here first


def _reduces_each(job: Job) -> bool:
    assert job.mesh is not None
    decision = job.plan.reduces_each(job.original.num_trainable, job.cluster.rank_memory_bytes)
    if job.plan.sharding.reduces_each is None and job.agreeing_group is not None:  # devices may differ
        least = torch.tensor(float(decision), device=job.device)
        dist.all_reduce(least, op=dist.ReduceOp.MAX, group=job.agreeing_group)
        decision = bool(least.item())
    return decision


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    # torch gathers a unit for its backward pass by hooks on its results, and an operator in place on a
    # view would lose them.
    if not any(tensor.requires_grad and is_view(tensor) for tensor in tensors_of(output)):
        return None
    return map_tensors(lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)


def _gather_before_hidden(module: nn.Module, inputs: Any, output: Any) -> None:
    # torch does not see tensors that hooks or attributes keep, such as a penalty on a unit's weights. Their
    # backward pass must come after that of the results, which gathers the unit, or would read freed memory.
    visit_first(tensors_of(output))


def _shard_options(job: Job, config: ShardConfig, ignored_params: set[nn.Parameter]) -> dict[str, Any]:
    assert job.mesh is not None
    num_ranks = job.mesh.unit_shard.size()
    options: dict[str, Any] = {
        "mesh": job.mesh.replicate_and_shard,
        "ignored_params": ignored_params,
        # torch divides the rows of what the tensor axis has divided.
        "shard_placement_fn": lambda parameter: Shard(
            0 if isinstance(parameter, DTensor) else int(unit_dim(parameter.shape, num_ranks))
        ),
    }
    if config.reshard_after_forward is not None:
        options["reshard_after_forward"] = config.reshard_after_forward
    elif job.plan.sharding.keeps_gathered:
        options["reshard_after_forward"] = False
    policy = _mixed_precision(job, config)
    if policy is not None:
        options["mp_policy"] = policy
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=job.device.type == "cuda")
    return options


def _full_precision_norms(
    model: nn.Module, units: Iterable[nn.Module], options: dict[str, Any]
) -> list[nn.Module]:
    """Batch norms and parametrized modules that become units of their own in full precision."""
    policy = options.get("mp_policy")
    if policy is None or policy.param_dtype in (None, torch.float32):
        return []
    own_units = {id(unit) for unit in units}
    # Running statistics and vectors of spectral norms stay fp32, and torch wants weights to match.
    return [
        module
        for module in model.modules()
        if (isinstance(module, BatchNorm) and module.track_running_stats and module.affine)
        or is_parametrized(module)
        if id(module) not in own_units
        and not any(parameter in options["ignored_params"] for parameter in module.parameters())
    ]


def _mixed_precision(job: Job, config: ShardConfig) -> MixedPrecisionPolicy | None:
    """The dtypes of communication and compute; ``None`` for those of the weights."""
    precision = config.mixed_precision
    if precision == "auto":
        if job.plan.precision.compute_dtype is None:
            return None
        # Autocast would cast each gathered fp32 weight anyway; casting before the all-gather halves what is
        # sent and held. Gradients are reduced in fp32. Inputs of units are cast too, but for the user's own:
        # on CPU, normalisation, which autocast leaves alone, refuses fp32 inputs with reduced weights.
        precision = MixedPrecisionConfig(param_dtype=job.plan.precision.compute_dtype, reduce_dtype="float32")
    if precision is None:
        return None
    param, reduce, output = (
        None if name is None else getattr(torch, name)
        for name in (precision.param_dtype, precision.reduce_dtype, precision.output_dtype)
    )
    return MixedPrecisionPolicy(param, reduce, output, precision.cast_forward_inputs)


def _prepare_module(job: Job, config: ShardConfig, materialiser: Materialiser, module: nn.Module) -> None:
    materialiser.materialise([module])
    if config.sync_module_states:
        broadcast_from_first(job, [p for p in module.parameters() if not _is_sharded(p)])
        if module in job.roots:  # buffers are sent once, with the root
            broadcast_from_first(job, list(module.buffers()))


def _is_sharded(parameter: torch.Tensor) -> bool:
    """True if an inner unit manages it. A parameter only on the model's own axes is still to be sharded."""
    # Experts differ between the ranks that share what is around them.
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return any(name == "expert" or name not in MODEL_AXES for name in names or ())


def _trainable_modules(job: Job, method: str, norms: Iterable[nn.Module]) -> list[nn.Module]:
    parameters = list(job.module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError(
            "wrap_trainable_outmost gathers trainable parameters, but no parameter is trainable."
        )
    if all(parameter.requires_grad for parameter in parameters):
        job.explain(
            method,
            "wrap_trainable_outmost is for models that are mostly frozen (LoRA); nothing is frozen here, so units are gathered "
            "as without it",
        )
        return []
    left_alone = {job.module, *norms, *expert_modules(job)}  # the root is a unit in any case
    return [
        module
        for module in job.module.modules()
        if module not in left_alone and any(p.requires_grad for p in module.parameters(recurse=False))
    ]


def skip_sync(roots: Iterable[nn.Module]) -> SkipSync:
    """Keeps gradients of sharded or replicated ``roots`` local for a while."""
    units = [root for root in roots if isinstance(root, FSDPModule)]

    @contextmanager
    def skip() -> Iterator[None]:
        for root in units:
            root.set_requires_gradient_sync(False)  # goes down to all units inside
        try:
            yield
        finally:
            for root in units:
                root.set_requires_gradient_sync(True)

    return skip


def _explain_sharding(
    job: Job, method: str, config: ShardConfig, units: _Units, *, options: dict[str, Any], num_ignored: int
) -> None:
    assert job.mesh is not None
    ranks = job.mesh.unit_shard.size()
    copies = job.num_data_ranks // job.mesh.shard.size()
    text = f"{len(units.main)} unit(s) and the rest, each sharded over {ranks} rank(s)"
    if copies > 1:
        text += f", {copies} replicas"
    elif config.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        text += " and not replicated: hybrid sharding wants both data and zero in parallel_mode"
    policy = options.get("mp_policy")
    if policy is not None and policy.param_dtype is not None:
        text += f", gathered in {str(policy.param_dtype).removeprefix('torch.')}"
    if units.norms:
        text += f", but for {len(units.norms)} batch norm(s), units of their own in full precision"
    if units.others:
        text += f"; {len(units.others)} module(s) of another dtype are units of their own"
    if num_ignored:
        text += f"; {num_ignored} parameter(s) replicated"
    job.explain(method, text)


_REFUSE: Final = (nn.EmbeddingBag, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Modules that autocast leaves alone and that refuse fp32 inputs, or sample weights, with reduced weights."""
_REFUSE_ON_CPU: Final = (nn.LayerNorm, nn.GroupNorm, nn.Bilinear)
"""Modules that autocast computes in fp32 on GPUs and leaves alone on CPUs."""


def keeps_input_dtypes(job: Job, config: ShardConfig) -> bool:
    """Returns whether model inputs keep their dtypes, as under autocast alone.

    Autocast casts where 16 bits suffice, but times and positions need more. ``mixed_precision`` overrides it.
    """
    return config.mixed_precision == "auto" and job.plan.precision.compute_dtype is not None


def cast_inputs_where_refused(job: Job, units: Iterable[nn.Module]) -> None:
    """Lets modules outside of ``units``, which cast inputs anyway, take fp32 beside reduced weights."""
    kinds = (*_REFUSE, *(_REFUSE_ON_CPU if job.device.type == "cpu" else ()))
    inside = {id(module) for unit in units for module in unit.modules()}
    for root in job.roots:
        for module in root.modules():
            if isinstance(module, kinds) and id(module) not in inside:
                module.register_forward_pre_hook(_cast_to_weight, with_kwargs=True)


def _cast_to_weight(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    dtype, size = weight.dtype, weight.itemsize

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > size else tensor

    return map_tensors(cast, args), map_tensors(cast, kwargs)


def note_separate_head(job: Job, method: str, units: Iterable[nn.Module]) -> None:
    """Says in the report where a loss in chunks, which reads the last layer's weight, is not used."""
    if any(hasattr(unit, "_deferring") for unit in units):
        job.explain(
            method,
            "the last layer is a separate unit, gathered only for its own passes, so the model computes all its "
            "logits and its own loss instead of chunked_linear_cross_entropy",
        )
