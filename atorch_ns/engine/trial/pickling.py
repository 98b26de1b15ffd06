"""Pickling of the user's objects for a trial worker: the model's structure, not its weights.

A worker reads only what its parent process packed, so pickle runs no code here that the user does not run
anyway. Classes and functions of ``__main__``, and lambdas, are sent by value. Parameters, and buffers above
:data:`LARGE_BYTES`, are replaced by tensors on the meta device with moments of their values
(:class:`~atorch_ns.engine.trial.pickling.Moments`). Other tensors are sent by value.

A trial needs weights with which the model behaves as it does in training: norms near one, logits that are
finite. Drawn from the moments of the originals they are, and no initialisation needs to be known.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import cloudpickle
import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, is_poisoned
from atorch_ns.text import error_text

_SAMPLES: Final = 65536  # values of a tensor that its moments are taken from
_UNKNOWN_STD: Final = 0.02  # initializer_range of most transformers of Hugging Face


@dataclass(frozen=True)
class Moments:
    """Statistics of a tensor's values, from a sample of at most 65,536 of them.

    Attributes:
        mean, std: moments of the finite values; ``std`` 0 for a constant.
        low, high: the least and the greatest value.
    """

    mean: float
    std: float
    low: float
    high: float


@torch.no_grad()
def moments_of(tensor: torch.Tensor) -> Moments:
    """Reads the moments of a strided, real tensor of any dtype; the tensor is not changed."""
    if tensor.numel() == 0:
        return Moments(0.0, 0.0, 0.0, 0.0)
    flat = tensor.detach()
    flat = flat.reshape(-1) if flat.is_contiguous() else flat.flatten(0, -1)
    step = -(-flat.numel() // _SAMPLES)
    sample = flat[::step].to(device="cpu", dtype=torch.float64)
    sample = sample[torch.isfinite(sample)]
    if sample.numel() == 0:
        return Moments(0.0, _UNKNOWN_STD, 0.0, 0.0)
    low, high = float(sample.min()), float(sample.max())
    std = 0.0 if low == high else float(sample.std(correction=0))
    return Moments(float(sample.mean()), std, low, high)


class ValueFiller:
    """Initialises modules of one model from the moments of their original tensors.

    It is called as ``_init_weights`` of Hugging Face models is: with one module whose own tensors have memory
    and no values. A tensor without moments (of a module that a method put in) gets what the module's
    ``reset_parameters`` gives, or small random values.

    Args:
        model: the whole model, as sent.
        moments: moments by the tensor's full name in it.
    """

    def __init__(self, model: nn.Module, moments: Mapping[str, Moments]) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._moments = dict(moments)

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Gives values to the parameters and buffers that ``module`` itself holds and that have none."""
        path = self._paths.get(module)
        unset = {name: tensor for name, tensor in _own_tensors(module).items() if is_poisoned(tensor)}
        for name in list(unset):
            moments = None if path is None else self._moments.get(f"{path}.{name}" if path else name)
            if moments is not None:
                _draw_values(unset.pop(name), moments)
        if unset:
            _initialise_module(module)
        for tensor in unset.values():
            if is_poisoned(tensor):
                _draw_values(tensor, Moments(0.0, _UNKNOWN_STD, 0.0, 1.0))


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in tensors if tensor is not None and not tensor.is_meta}


def _initialise_module(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        try:
            reset()
        except Exception:  # the caller draws the values that this leaves unset
            return


def _draw_values(tensor: torch.Tensor, moments: Moments) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        if moments.std == 0.0:
            tensor.fill_(moments.mean)
        else:
            tensor.normal_(moments.mean, moments.std)
    elif tensor.dtype != torch.bool:
        # Indices stay within their table; random_ excludes its upper bound.
        low, high = math.floor(moments.low), math.floor(moments.high)
        tensor.random_(low, high + 1)


LARGE_BYTES: Final = 64 * 2**20
"""A buffer larger than this is sent as a shape."""

_SENT: Final = (
    "model", "optim_func", "optim_args", "optim_param_func", "dataset", "loss_func", "prepare_input",
    "dataloader_args", "distributed_sampler_cls",
)  # fmt: skip
_REBUILD: Final = "rebuild tensor"
# Settings without use in a trial, which loads in its own process and runs for a few steps only.
_LOADER_ARGS_LEFT_OUT: Final = (
    "num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "worker_init_fn",
    "timeout", "pin_memory",
)  # fmt: skip


@dataclass(frozen=True)
class Unpacked:
    """The user's objects as a worker has them.

    Attributes:
        inputs: the user's objects, with the model on meta.
        on_device: tensors that were on the rank's accelerator and are on the CPU until a trial begins.
        carried: state that methods carry from the user's process, by their names.
    """

    inputs: Inputs
    on_device: list[torch.Tensor] = field(default_factory=list)
    carried: Mapping[str, Any] = field(default_factory=dict)


def pack(
    inputs: Inputs, *, by_value: tuple[str, ...] = (), carried: Mapping[str, Any] | None = None
) -> bytes:
    """The user's objects in one piece.

    Args:
        inputs: the user's objects; learning-rate schedulers are not sent.
        carried: state that methods carry, by their names (:meth:`~atorch_ns.method.Registry.carried`).
        by_value: names of modules that the worker cannot import, whose classes and functions are sent whole.

    Raises:
        InputError: naming the argument that cannot be sent, and why.
    """
    with _sent_whole(by_value):
        try:
            return _pickle_value((_for_trials(inputs), dict(carried or {})), inputs.model)
        except Exception as error:  # names some inner object; which argument holds it is found next
            reason = _unpicklable_argument(inputs, carried)
            reason = reason or f"the arguments cannot be pickled: {error_text(error, 200)}"
            raise InputError(f"{reason}. Its trials cannot run in separate processes.") from error


def unpack(data: bytes) -> Unpacked:
    """Unpacks the result of :func:`pack`. Imports the user's modules; runs no torch operators but copies."""
    reader = _Unpickler(io.BytesIO(data))
    inputs: Inputs
    states: dict[str, Any]
    inputs, states = reader.load()
    model = inputs.model
    if reader.moments:
        # Code that materialises a model first asks the model itself for initial values.
        by_id = {id(tensor): moments for tensor, moments in reader.moments}
        tensors = itertools.chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        )
        by_name = {name: by_id[id(tensor)] for name, tensor in tensors if id(tensor) in by_id}
        object.__setattr__(model, "_init_weights", ValueFiller(model, by_name))
    return Unpacked(inputs, reader.on_device, states)


def describe_unpicklable(inputs: Inputs, states: Mapping[str, Any] | None = None) -> str | None:
    """A clause naming the argument that cannot be sent to a trial worker, and why; ``None`` if all can."""
    try:
        _pickle_value((_for_trials(inputs), dict(states or {})), inputs.model)
    except Exception as error:
        reason = f"the arguments cannot be pickled: {error_text(error, 200)}"
        return _unpicklable_argument(inputs, states) or reason
    return None


def _for_trials(inputs: Inputs) -> Inputs:
    args = inputs.dataloader_args
    if args is not None:
        args = {key: value for key, value in args.items() if key not in _LOADER_ARGS_LEFT_OUT}
    return replace(inputs, dataloader_args=args, lr_scheduler_cls=None, lr_scheduler_args=None)


def _unpicklable_argument(inputs: Inputs, states: Mapping[str, Any] | None) -> str | None:
    trial_inputs = _for_trials(inputs)
    values = {name: getattr(trial_inputs, name) for name in _SENT}
    values |= {f"what was registered for {name}": state for name, state in (states or {}).items()}
    for name, value in values.items():
        try:
            _pickle_value(value, inputs.model)
        except Exception as error:
            return f"{name} cannot be pickled: {error_text(error, 200)}"
    return None


def _pickle_value(value: Any, model: nn.Module) -> bytes:
    data = io.BytesIO()
    _Pickler(data, model).dump(value)
    return data.getvalue()


@contextmanager
def _sent_whole(names: tuple[str, ...]) -> Iterator[None]:
    import sys

    modules = [sys.modules[name] for name in names if name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@dataclass(frozen=True)
class _Record:
    """One tensor: its shape and dtype, and its bytes or the statistics of its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool
    on_device: bool
    data: bytes | None = None
    moments: Moments | None = None


class _Rebuild:
    """Stands in the pickle for the reader's own way to rebuild a tensor."""

    def __call__(self, record: _Record, attributes: dict[str, Any]) -> torch.Tensor:
        raise AssertionError("only a reader can rebuild tensors")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    """Sends the tensors of ``model`` as shapes and all other plain tensors by value."""

    def __init__(self, file: io.BytesIO, model: nn.Module) -> None:
        super().__init__(file, protocol=5)
        large = (b for b in model.buffers() if b.numel() * b.element_size() > LARGE_BYTES)
        self._structure = {id(tensor) for tensor in (*model.parameters(), *large)}
        self._rebuild = _Rebuild()

    def persistent_id(self, value: Any) -> str | None:
        return _REBUILD if value is self._rebuild else None

    def reducer_override(self, value: Any) -> Any:
        # Subclasses (DTensor, quantized weights) and sparse tensors have ways of their own.
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
            return super().reducer_override(value)
        if value.is_quantized:
            return super().reducer_override(value)
        record = self._record_tensor(value)
        return self._rebuild, (record, dict(value.__dict__))

    def _record_tensor(self, tensor: torch.Tensor) -> _Record:
        without_values = id(tensor) in self._structure
        record = _Record(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            is_parameter=isinstance(tensor, nn.Parameter),
            requires_grad=tensor.requires_grad and tensor.is_leaf,
            on_device=tensor.device.type not in ("cpu", "meta"),
        )
        if tensor.is_meta:
            return record
        # Moments of complex values are not known, so they are sent.
        if without_values and not tensor.is_complex():
            return replace(record, moments=moments_of(tensor))
        return replace(record, data=_bytes_of(tensor))


class _Unpickler(pickle.Unpickler):
    """Rebuilds tensors, and takes note of those that need more: values, or the accelerator."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.moments: list[tuple[torch.Tensor, Moments]] = []
        self.on_device: list[torch.Tensor] = []

    def persistent_load(self, key: Any) -> Any:
        if key != _REBUILD:
            raise pickle.UnpicklingError(f"unknown reference {key!r}")
        return self._rebuild_tensor

    def _rebuild_tensor(self, record: _Record, attributes: dict[str, Any]) -> torch.Tensor:
        if record.data is None:
            tensor = torch.empty_strided(record.shape, record.stride, dtype=record.dtype, device="meta")
        else:
            tensor = _from_bytes(record.data, record.dtype, record.shape)
        if record.is_parameter:
            tensor = nn.Parameter(tensor, requires_grad=record.requires_grad)
        elif record.requires_grad:
            tensor.requires_grad_()
        if record.moments is not None:
            self.moments.append((tensor, record.moments))
        elif record.on_device:
            self.on_device.append(tensor)
        # Not as the pickle's state: a tensor's own way to take one expects another form.
        tensor.__dict__.update(attributes)
        return tensor


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # Lazy views (conj, neg) hold other bits than their values; numpy has no bfloat16, so bytes are viewed.
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if plain.numel() == 0:
        return b""
    result: bytes = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return result


def _from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    # A copy: the bytes of a pickle are read-only, and torch would write to them.
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
