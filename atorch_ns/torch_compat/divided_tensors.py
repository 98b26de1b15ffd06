"""Divided tensors (DTensors) as users write with them: beside plain tensors, by index, in any operator.

torch refuses operators on divided tensors for which it has no rule. It silently loses an assignment to
``data`` and a write to a view across ranks (``weight[0].zero_()``). Such an operator is
computed here on gathered tensors, as in one process, and each rank gets its part of the tensors written to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, cast
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._op_schema import OutputSharding
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from atorch_ns.errors import CheckpointError, StepError
from atorch_ns.torch_compat.distributed import parameters_of
from atorch_ns.torch_compat.modules import PackageHook

_aten = torch.ops.aten


def extend_dtensor_operators(models: Iterable[nn.Module]) -> None:
    """Lets every operator take divided tensors, alone and beside plain ones, with the result of one process.

    A plain tensor is equal on all ranks or belongs to this rank's part of the batch. So gradients computed
    with it are averaged over the ranks. Every rank must take part, since all exchange their parts. Random
    numbers differ between parts on CPUs too.

    Args:
        models: models with divided parameters, or the parts of one.
    """
    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_foreach_operators(), _on_local_parts))
    handlers[_aten._foreach_norm.Scalar] = _compute_norms
    handlers[_aten._local_scalar_dense.default] = _read_number
    handlers[_aten.index_put_.default] = _compute_whole  # torch's rule leaves a mask of another part
    handlers.update(dict.fromkeys(_RANDOM, functools.partial(_unless_on_gpu, _draw_whole)))
    handlers.update(dict.fromkeys(_RANDOM_BY_VALUES, functools.partial(_unless_on_gpu, _compute_whole)))
    for operator in _VIEWS:
        _register_handler(operator, _follow_view)
    _let_mixed_through()
    if torch.cuda.is_initialized():  # else no model is there
        # Its backward passes run in threads of their own, and the switch is a thread's.
        number = torch.ones((), device="cuda", requires_grad=True) * 1.0
        number.register_hook(lambda _: _let_mixed_through())
        number.backward()
    if not isinstance(vars(dispatcher).get("unwrap_to_op_info"), functools.partial):  # only once
        for name, function in (
            ("unwrap_to_op_info", _find_mixed),
            ("_propagate_op_sharding_dispatch_slow_path", _divide_or_gather),
        ):
            setattr(dispatcher, name, functools.partial(function, getattr(dispatcher, name)))
        cast(Any, DTensor).data = property(cast(Any, torch.Tensor.data).__get__, _replace_data)
        cast(Any, DTensor).tolist = lambda tensor: _gather_whole(tensor).tolist()
        cast(Any, DTensor).numpy = _read_only_array
        cast(Any, DTensor).__reduce_ex__ = _refuse_parts
    units = (unit for model in models for unit in model.modules() if isinstance(unit, FSDPModule))
    for parameter in parameters_of(units):
        _FSDP_PARAMETERS[id(parameter.sharded_param)] = parameter
        _average_gradients(parameter.sharded_param)  # to which torch adds its own part, whatever is there


def _on_local_parts(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Elements are independent: every list is laid out like the tensors of the first one.
    targets = args[0]

    def local(argument: Any) -> Any:
        if not isinstance(argument, (list, tuple)):  # a number for all of them
            return _gather_whole(argument) if isinstance(argument, DTensor) else argument
        if len(argument) != len(targets):
            return argument
        return [_part_beside(value, target) for value, target in zip(argument, targets, strict=True)]

    outputs = operator(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if outputs is None:  # torch counts such a write to plain tensors alone
        torch.autograd.graph.increment_version([leaf for leaf in targets if isinstance(leaf, DTensor)])
        return None
    wrap = DTensor._op_dispatcher.wrap
    pairs = zip(outputs, targets, strict=True)
    return [wrap(part, target._spec) if isinstance(target, DTensor) else part for part, target in pairs]


def _compute_norms(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    tensors, order = args[0], args[1] if len(args) > 1 else 2
    norms = [torch.linalg.vector_norm(tensor, order, **kwargs) for tensor in tensors]
    # clip_grad_norm_ stacks the norms, so all must be on one mesh, or all plain.
    if len({norm.device_mesh if isinstance(norm, DTensor) else None for norm in norms}) == 1:
        return norms
    return [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]


_RANDOM = (
    _aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default,
    _aten.randn_like.default, _aten.rand_like.default, _aten.randint_like.default,
    _aten.randint_like.low_dtype, _aten.cauchy_.default, _aten.log_normal_.default, _aten.geometric_.default,
    _aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from"),
)  # fmt: skip
_RANDOM_BY_VALUES = (
    _aten.bernoulli.default, _aten.bernoulli.p, _aten.bernoulli_.Tensor, _aten.binomial.default,
    _aten.multinomial.default, _aten.normal.Tensor_float, _aten.normal.float_Tensor,
    _aten.normal.Tensor_Tensor,
)  # fmt: skip


def _unless_on_gpu(
    handler: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    if not any(tensor.device.type == "cuda" for tensor in tensors):
        return handler(operator, args, kwargs)
    # There torch draws other numbers for each part.
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers.pop(operator, None)  # avoids recursion; None: another thread draws
    try:
        return operator(*args, **kwargs)
    finally:
        if ours is not None:
            handlers[operator] = ours


def _draw_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    target = args[0]
    local = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    # Every rank draws the whole tensor, as one process does, and keeps its part.
    numbers = operator(local, *args[1:], **kwargs)
    if not operator._schema.is_mutable:
        return _laid_beside(numbers, target)
    target._local_tensor.copy_(_laid_beside(numbers, target)._local_tensor)
    return cast(torch.Tensor, target)


def _read_number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # For a norm or a sum each rank holds one summand, and torch would return that.
    return operator(_gather_whole(args[0]))


_OBSERVERS: list[WeakMethod[Callable[[DeviceMesh], None]]] = []
"""Methods that are notified of each gathering while their objects live."""


def observe_gathering(method: Callable[[DeviceMesh], None]) -> None:
    """Calls a bound method with the mesh of a divided tensor before an operator gathers its parts."""
    _OBSERVERS[:] = [reference for reference in _OBSERVERS if reference() is not None]
    _OBSERVERS.append(WeakMethod(method))


def _gather_whole(tensor: DTensor) -> torch.Tensor:
    is_whole = all(kind.is_replicate() for kind in tensor.placements)  # and nothing is sent
    for reference in () if is_whole else _OBSERVERS:  # told before, since the gathering waits for all ranks
        if (method := reference()) is not None:
            method(tensor.device_mesh)
    return tensor.full_tensor()


def _part_beside(tensor: Any, target: Any) -> Any:
    if not isinstance(tensor, DTensor):
        is_whole = isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.shape == target.shape
        return _laid_beside(tensor, target).to_local() if is_whole and isinstance(target, DTensor) else tensor
    if isinstance(target, DTensor) and tensor.placements != target.placements:
        tensor = tensor.redistribute(target.device_mesh, target.placements)
    return tensor.to_local()


def _laid_beside(whole: torch.Tensor, target: DTensor) -> DTensor:
    mesh = target.device_mesh
    copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=target.placements)  # local slicing: nothing is sent


def laid_out(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor in the layout of ``like`` with ``local`` as this rank's part. Both share memory."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _let_mixed_through() -> None:
    # torch then passes plain tensors beside DTensors to _find_mixed instead of refusing them.
    torch._C._set_dtensor_allow_implicit_replication(True)


class _Mixed:
    """Replaces torch's view of arguments with plain tensors, which assumes that all ranks have equal ones."""


def _plain_leaves(*arguments: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(arguments)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)]


def _find_mixed(
    torchs: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # A 0-d tensor without a gradient is equal on all ranks. A loss depends on this rank's samples.
    is_read = not operator._schema.is_mutable and torch.is_grad_enabled()
    is_write_to_plain = operator._schema.is_mutable and not _written_tensors(operator, args, kwargs)
    for plain in _plain_leaves(args, kwargs):
        if plain.ndim or is_write_to_plain or (is_read and plain.requires_grad):
            return _Mixed()
    return torchs(operator, args, kwargs)


def _divide_or_gather(
    torchs: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any
) -> Any:
    if isinstance(rest[0], _Mixed):
        return _compute_whole(operator, args, kwargs)  # the dispatcher accepts a result here
    try:
        sharding = torchs(operator, args, kwargs, *rest)
    except (RuntimeError, NotImplementedError):
        # It has no rule, the tensors have several meshes, or a write would be divided in another way.
        if operator in _VIEWS:
            raise  # _follow_view gathers instead
        return _compute_whole(operator, args, kwargs)
    if _looks_mixed(operator, args):
        return _compute_unremembered(operator, args, rest[0], sharding)
    return sharding


def _looks_mixed(operator: Any, args: tuple[Any, ...]) -> bool:
    # torch caches shardings by layout, where a plain tensor looks like a replicated one.
    if operator._schema.is_mutable:
        return False
    dtensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, DTensor)]
    alike = [tensor for tensor in dtensors if all(kind.is_replicate() for kind in tensor.placements)]
    return bool(_plain_leaves(args)) or (len(dtensors) > 1 and bool(alike))


def _compute_unremembered(operator: Any, args: tuple[Any, ...], info: Any, sharding: Any) -> Any:
    if not isinstance(sharding, OutputSharding):
        return sharding  # already a result
    info.output_sharding = sharding
    local = DTensor._op_dispatcher._dispatch_get_local_results_slow_path(operator, args, info)
    return DTensor._op_dispatcher.wrap(local, sharding.output_spec)


def _compute_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on gathered tensors. Returns a plain result or the written tensors. Collective."""
    if operator.namespace in ("c10d", "_c10d_functional"):
        raise StepError(
            f"a collective ({operator.name()}) got a divided tensor. Gradients of divided weights are already averaged, and "
            "weights are parts of one tensor: remove the call, or pass it tensor.full_tensor() or tensor.to_local()."
        )
    wholes: dict[int, torch.Tensor] = {}

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) not in wholes:
            whole = _gather_whole(leaf)
            # The whole of a replicated tensor may share its memory, and only _write_whole may write there.
            shares = whole.untyped_storage()._cdata == leaf._local_tensor.untyped_storage()._cdata
            wholes[id(leaf)] = whole.clone() if shares else whole
        return wholes[id(leaf)]

    whole_args, whole_kwargs = tree_map(gather, (args, kwargs))
    result = operator(*whole_args, **whole_kwargs)
    dtensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)}
    targets = _written_tensors(operator, args, kwargs)
    for tensor in targets:
        _write_whole(operator, wholes[id(tensor)], tensor)
    if torch.is_grad_enabled():
        target_ids = {id(tensor) for tensor in targets}
        for number, tensor in dtensors.items():
            if tensor.requires_grad and number not in target_ids:  # its gradient will be whole
                _average_gradients(tensor)
    # In-place operators return their argument: the DTensor, not the gathered copy.
    originals = {id(whole): dtensors[number] for number, whole in wholes.items()}
    return tree_map(lambda leaf: originals.get(id(leaf), leaf), result)


def _write_whole(operator: Any, whole: torch.Tensor, target: DTensor) -> None:
    if whole.shape != target.shape:
        raise StepError(
            f"{operator.overloadpacket.__name__} changes the shape of a divided tensor from {tuple(target.shape)} to "
            f"{tuple(whole.shape)} in place. Use the out-of-place function, such as t() instead of t_()."
        )
    if any(kind.is_partial() for kind in target.placements):  # summands, which nobody can write
        everywhere = [Replicate()] * target.device_mesh.ndim
        whole = DTensor.from_local(whole, target.device_mesh, everywhere, run_check=False)
        target._spec, target._local_tensor = whole._spec, whole._local_tensor
    else:
        target._local_tensor.copy_(_laid_beside(whole, target)._local_tensor)


def _written_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    if not operator._schema.is_mutable:
        return []
    targets = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(targets) if isinstance(leaf, DTensor)]


NO_SECOND_DERIVATIVE: Final = (
    "a backward pass with create_graph=True is to be differentiated again, and the exchanges of divided parameters have no "
    "second derivative. Train a loss with a penalty on its gradients under ddp or zero1."
)


def reads_divided_memory(error: RuntimeError) -> bool:
    """Returns whether torch has refused a pointer to the memory of a divided tensor, which has parts alone."""
    return "invalid python storage" in str(error)


class _DivideGradient(PackageHook):
    """A hook of :func:`_average_gradients`."""


def _average_gradients(tensor: DTensor) -> None:
    if any(isinstance(hook, _DivideGradient) for hook in (tensor._backward_hooks or {}).values()):
        return  # already hooked
    mesh = tensor.device_mesh
    placements = [Replicate() if kind.is_partial() else kind for kind in tensor.placements]

    def divide(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor):
            return gradient.redistribute(placements=placements)
        if torch.is_grad_enabled():
            raise StepError(NO_SECOND_DERIVATIVE)
        # The gradient comes from this rank's loss. The mean over ranks is the gradient of the mean loss.
        summand = DTensor.from_local(gradient / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
        return summand.redistribute(placements=placements)

    trains = tensor.requires_grad  # a frozen one may be thawed
    with suppress(RuntimeError):  # of integers, which have no gradients
        tensor.requires_grad_().register_hook(_DivideGradient(cast(Any, divide)))
        tensor.requires_grad_(trains)


_VIEWS = (
    _aten.select.int, _aten.slice.Tensor, _aten.diagonal.default, _aten.view.default, _aten.unbind.int,
    _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.as_strided.default,
    _aten.unfold.default, _aten._reshape_alias.default,
)  # fmt: skip
"""Views for which torch may gather. Such views are copies."""
_VIEW_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The source tensor and the view steps of each copy that replaces a view."""
_OF_TORCH: dict[Any, Any] = {}
"""Earlier handlers of operators, before this module registered its own."""


def _register_handler(operator: Any, handler: Callable[..., Any]) -> None:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    if handlers.get(operator) is not handler:
        _OF_TORCH[operator] = handlers.get(operator)
        handlers[operator] = handler


def _as_torch(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    ours, torchs = handlers.pop(operator), _OF_TORCH[operator]  # avoids recursion
    if torchs is not None:
        handlers[operator] = torchs
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = ours


def _follow_view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a divided tensor. If it is a copy, writes to it are propagated until it is freed."""
    source = args[0]
    try:
        result = _as_torch(operator, args, kwargs)
    except (RuntimeError, NotImplementedError):  # along a dimension that is divided
        mesh, everywhere = source.device_mesh, [Replicate()] * source.device_mesh.ndim
        whole = source.redistribute(placements=everywhere).to_local()
        result = tree_map(
            lambda view: DTensor.from_local(view, mesh, everywhere, run_check=False),
            operator(whole, *args[1:], **kwargs),
        )
    # Steps lead from the divided tensor to the view, also for a view of a view.
    root, steps = _VIEW_COPIES.get(source, (source, ()))
    several = isinstance(result, (list, tuple))
    for index, view in enumerate(result if several else [result]):
        if isinstance(view, DTensor) and (steps or not _share_memory(view, source)):
            if not _VIEW_COPIES:
                _follow_writes()
            _VIEW_COPIES[view] = (root, (*steps, (operator, args[1:], kwargs, index if several else None)))
    return result


def _share_memory(first: DTensor, second: DTensor) -> bool:
    try:
        memory, other = (tensor._local_tensor.untyped_storage()._cdata for tensor in (first, second))
    except NotImplementedError:  # under torch.func, where nothing is written in place
        return True
    return bool(memory == other)


def _follow_writes() -> None:
    for operator, is_write in _changing_operators():  # slows every call, so only while copies exist
        if is_write or operator not in DTensor._op_dispatcher._custom_op_handlers:
            _register_handler(operator, _write_through if is_write else _follow_view)


@functools.cache
def _changing_operators() -> list[tuple[Any, bool]]:
    return [
        (operator, first.is_write)
        for operator in _operators_named("")
        if operator._schema.arguments and operator._schema.returns
        if (first := operator._schema.arguments[0].alias_info) is not None
        if not first.is_write or operator._schema.name.endswith("_")  # in place, not out=
    ]


@functools.cache
def _foreach_operators() -> list[Any]:
    operators = [op for op in _operators_named("_foreach_") if not op._overloadname.endswith("out")]
    return [operator for operator in operators if not operator._schema.name.endswith(("norm", "max"))]


def _operators_named(prefix: str) -> list[Any]:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"aten::{prefix}")]
    packets = [(getattr(_aten, s.name.removeprefix("aten::"), None), s.overload_name) for s in schemas]
    return [op for packet, overload in packets if (op := getattr(packet, overload or "default", None))]


def _write_through(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Writes in place. A write to a copy that replaces a view also updates the source tensor."""
    if not _VIEW_COPIES:  # all copies are gone: nothing is to be followed
        for op, _ in _changing_operators():
            handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
            if handlers.get(op) is _write_through and handlers.pop(op) and _OF_TORCH[op]:
                handlers[op] = _OF_TORCH[op]
        return operator(*args, **kwargs)
    target = args[0]
    if target not in _VIEW_COPIES:
        return _as_torch(operator, args, kwargs)
    root, steps = _VIEW_COPIES[target]
    # Replay the steps of the view on the whole tensor, then write both parts back.
    whole = _gather_whole(root).clone()
    view = whole
    for step, arguments, options, index in steps:
        view = step(view, *arguments, **options)
        view = view if index is None else view[index]
    wholes = tree_map(
        lambda leaf: _gather_whole(leaf) if isinstance(leaf, DTensor) else leaf, (args[1:], kwargs)
    )
    operator(view, *wholes[0], **wholes[1])
    root._local_tensor.copy_(_laid_beside(whole, root)._local_tensor)
    target._local_tensor.copy_(_laid_beside(view.clone(), target)._local_tensor)
    return target


_FSDP_PARAMETERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The ``FSDPParam`` of divided parameters by id: ``module.to`` refuses tensors with weak references."""


def _replace_data(target: DTensor, value: torch.Tensor) -> None:
    if value.shape != target.shape or value.dtype != target.dtype:
        raise StepError(
            f"data of a divided tensor of shape {tuple(target.shape)} in {target.dtype} cannot be replaced by a tensor of shape "
            f"{tuple(value.shape)} in {value.dtype}. Change the model before the call."
        )
    value = value.detach()
    if not isinstance(value, DTensor):
        value = _laid_beside(value.clone(), target)
    elif value.placements != target.placements or value.device_mesh != target.device_mesh:
        value = _laid_beside(value.full_tensor(), target)
    target._local_tensor = value._local_tensor  # torch would set only the wrapper's data
    parameter = _FSDP_PARAMETERS.get(id(target))
    if parameter is not None and parameter.sharded_param is target:
        parameter.reset_sharded_param()  # FSDP still holds the old memory


def _refuse_parts(tensor: DTensor, protocol: Any) -> Any:
    # One rank's file would look like a whole model but hold only a part.
    if tensor._local_tensor.shape != tensor.shape or any(
        placement.is_partial() for placement in tensor.placements
    ):
        raise CheckpointError(
            f"torch.save or pickle was given a divided tensor of shape {tuple(tensor.shape)}, of which this rank has "
            f"{tuple(tensor._local_tensor.shape)}: the file would lack the other ranks' parts. On all ranks, call "
            "checkpoint.save(folder, result), or checkpoint.export_state_dict(result) and write its result on one rank."
        )
    return cast(Any, torch.Tensor).__reduce_ex__(tensor, protocol)


def _read_only_array(tensor: DTensor, *, force: bool = False) -> Any:
    array = _gather_whole(tensor).numpy(force=force)
    array.flags.writeable = False  # writes could not reach other ranks' parts
    return array
