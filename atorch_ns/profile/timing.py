"""Measured times of blocks: one instance of each distinct block, alone, on a real device."""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from atorch_ns.capture.nests import map_tensors, samples_and_tokens, unique_tensors_of
from atorch_ns.capture.random_states import random_states_kept
from atorch_ns.capture.structure import copy_structure
from atorch_ns.errors import InputError
from atorch_ns.profile.profile import Profile
from atorch_ns.profile.record.fake_steps import FakeSteps, real_copy
from atorch_ns.profile.record.steps import ForwardLoss, ModuleCall, StepPrecision, TracedModel
from atorch_ns.profile.trace import Segment, Trace
from atorch_ns.system import cpu_model, write_whole
from atorch_ns.text import error_text

_SCHEMA = 1


class BlockKey(NamedTuple):
    """Key of a measured time, with everything that the time depends on.

    Attributes:
        device: name of the device, as :func:`device_name` gives it.
        num_samples, num_tokens: B and T of the batch.
        flops: FLOPs of the forward pass; they distinguish inputs of other sizes (images).
    """

    device: str
    torch_version: str
    fingerprint: str
    precision: str
    num_samples: int
    num_tokens: int
    flops: int

    def text(self) -> str:
        """The key as one line."""
        return "|".join(map(str, self))


class BlockSeconds(NamedTuple):
    """Median seconds of one instance of a block."""

    forward: float
    backward: float


class ProfileDatabase:
    """Times by block, in a JSON file that processes may read and write at the same time.

    A file that cannot be read is replaced with a warning: its times can be measured again.

    Args:
        path: path of the file; folders are made when it is first written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def get(self, key: BlockKey) -> BlockSeconds | None:
        """The times of a block; ``None`` if they were not measured."""
        times = self._read_entries().get(key.text())
        return None if times is None else BlockSeconds(*times)

    def update(self, times: Mapping[BlockKey, BlockSeconds]) -> None:
        """Adds times, replacing those with equal keys. All other times stay, even from other processes."""
        if not times:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock_database():
            entries = self._read_entries()
            entries.update({key.text(): (value.forward, value.backward) for key, value in times.items()})
            document = {"schema": _SCHEMA, "entries": dict(sorted(entries.items()))}
            write_whole(self.path, json.dumps(document, indent=1), durable=False)

    def _read_entries(self) -> dict[str, tuple[float, float]]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["schema"] != _SCHEMA:
                raise ValueError(f"schema {data['schema']!r}, but this version reads {_SCHEMA}")
            entries = data["entries"].items()
            return {str(key): (float(forward), float(backward)) for key, (forward, backward) in entries}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.warn(
                f"the profile database {self.path} cannot be read ({error}); blocks are measured again.",
                stacklevel=3,
            )
            return {}

    @contextmanager
    def _lock_database(self) -> Iterator[None]:
        with self.path.with_name(f"{self.path.name}.lock").open("w") as file:  # writes replace the database
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _CapturedAllError(Exception):
    """Ends a forward pass once every block of interest has been called."""


def captured_calls(
    subject: TracedModel, precision: StepPrecision, paths: Mapping[str, str], how: str
) -> dict[str, ModuleCall]:
    """The first call of each block.

    Args:
        paths: paths of blocks, by fingerprint.
        how: ``"fake"`` or ``"real"``, as in the trace.

    Returns:
        Calls by fingerprint; blocks that are never called are left out.
    """
    calls: dict[str, ModuleCall] = {}
    if how == "fake":
        with FakeSteps(subject, {}, "cpu").prepared(precision, subject.sizes) as (model, batch):
            _run_recording(subject, precision, model, batch, paths=paths, calls=calls)
    else:
        model, batch = real_copy(subject, precision, subject.sizes[0])
        _run_recording(subject, precision, model, batch, paths=paths, calls=calls)
    return calls


def _run_recording(
    subject: TracedModel,
    precision: StepPrecision,
    model: nn.Module,
    batch: Any,
    *,
    paths: Mapping[str, str],
    calls: dict[str, ModuleCall],
) -> None:
    def capture(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(name, ModuleCall(args, dict(kwargs)))
        if len(calls) == len(paths):  # the rest of the pass is not needed
            raise _CapturedAllError

    for name, path in paths.items():
        model.get_submodule(path).register_forward_pre_hook(partial(capture, name), with_kwargs=True)
    precision.install(model, {path: model.get_submodule(path) for path in paths.values()})
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    try:
        with torch.enable_grad(), precision.context(device_type):
            subject.forward_loss(model, batch)
    except _CapturedAllError:
        pass


_LEAST, _MOST = 3, 25
_SECONDS = 0.5
"""Runs of a block after its first, at least and at most; seconds after which it may stop."""


def measure_blocks(
    model: nn.Module,
    batch: Any,
    forward_loss: ForwardLoss,
    profile: Profile,
    *,
    device: str | torch.device,
    database: ProfileDatabase | None = None,
    re_profile: bool = False,
) -> Trace:
    """The profile's trace with measured seconds of each distinct block in each precision.

    One instance of a block at a time is made on the device, with random weights, and called with random
    inputs of the shapes that the model calls it with; the whole model never is. Blocks that cannot be run
    alone keep their predicted cost, with a note.

    Args:
        model: the model as it was profiled.
        batch: the sample batch; the times hold for its B and T.
        forward_loss: the call of the model and its loss, as for :func:`profile_model`.
        profile: the profile of the model, with a trace.
        database: database of times to reuse, which also stores new ones.
        re_profile: whether to measure again times that the database has.

    Raises:
        InputError: if the profile has no trace.
    """
    if profile.trace is None:
        raise InputError("blocks can be measured only with a traced profile; make one with profile_model().")
    sizes = samples_and_tokens(batch)
    target = torch.device(device)
    blocks = {s.fingerprint: s for s in reversed(profile.trace.segments) if s.is_block}  # the first of each
    modules = {segment.paths[0]: model.get_submodule(segment.paths[0]) for segment in blocks.values()}
    prints = {segment.paths[0]: name for name, segment in blocks.items()}
    subject = TracedModel(model, batch, forward_loss, sizes, sizes, modules, prints)
    measurement = _Measurement(subject, blocks, target, profile.trace.how)
    stored_times = {} if re_profile or database is None else measurement.read_times(database)
    with random_states_kept(*{parameter.device for parameter in model.parameters()}):
        new_times = measurement.measure(skip=stored_times)
    if database is not None:
        database.update(new_times)
    seconds: dict[str, float] = {}
    for key, times in {**stored_times, **new_times}.items():
        seconds[f"{key.fingerprint}:{key.precision}:forward"] = times.forward
        seconds[f"{key.fingerprint}:{key.precision}:backward"] = times.backward
    notes = profile.trace.notes + tuple(measurement.notes)
    return replace(
        profile.trace, seconds=MappingProxyType(seconds), timed_on=device_name(target), notes=notes
    )


def device_name(device: torch.device) -> str:
    """The device's name; for a CPU, its model and torch's number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_model()}, {torch.get_num_threads()} threads"


class _Measurement:
    def __init__(
        self, subject: TracedModel, blocks: Mapping[str, Segment], device: torch.device, how: str
    ) -> None:
        self.notes: list[str] = []
        self._subject = subject
        self._blocks = blocks
        self._device = device
        self._how = how
        self._name = device_name(device)

    def read_times(self, database: ProfileDatabase) -> dict[BlockKey, BlockSeconds]:
        """The times that the database holds."""
        keys = [
            self._block_key(name, precision)
            for name, block in self._blocks.items()
            for precision in block.costs
        ]
        return {key: times for key in keys if (times := database.get(key)) is not None}

    def measure(self, skip: Mapping[BlockKey, BlockSeconds]) -> dict[BlockKey, BlockSeconds]:
        """Times of all blocks except those in ``skip``."""
        results: dict[BlockKey, BlockSeconds] = {}
        precisions = dict.fromkeys(key for block in self._blocks.values() for key in block.costs)
        for precision in map(StepPrecision.parse, precisions):
            missing = {
                name: block.paths[0]
                for name, block in self._blocks.items()
                if precision.key in block.costs and self._block_key(name, precision.key) not in skip
            }
            if not missing:
                continue
            calls = captured_calls(self._subject, precision, missing, self._how)
            for name, call in calls.items():
                times = self._try_block(missing[name], call, precision)
                if times is not None:
                    results[self._block_key(name, precision.key)] = times
        return results

    def _block_key(self, name: str, precision: str) -> BlockKey:
        num_samples, num_tokens = self._subject.sizes
        flops = self._blocks[name].costs[precision].forward.flops.at(num_samples, num_tokens)
        return BlockKey(
            self._name, torch.__version__, name, precision, num_samples, num_tokens, round(float(flops))
        )

    def _try_block(self, path: str, call: ModuleCall, precision: StepPrecision) -> BlockSeconds | None:
        try:
            return _time_block(self._subject.blocks[path], call, precision, self._device)
        except Exception as error:  # the user's block, perhaps without what it needs of the model around it
            self.notes.append(f"{path} could not be measured alone in {precision.key}: {error_text(error)}")
            return None


def _time_block(
    block: nn.Module, call: ModuleCall, precision: StepPrecision, device: torch.device
) -> BlockSeconds:
    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() and tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)  # 0 is a legal index
        if not tensor.is_floating_point():
            return tensor.detach().to(device, copy=True)
        result = torch.empty(tensor.shape, dtype=precision.dtype_of(kind, tensor), device=device)
        return result.normal_(std=0.02)  # a usual deviation of initial weights

    module = copy_structure(block, make, {})
    precision.install(module, {})
    args, kwargs = _real_inputs(call, device)
    inputs = [tensor for tensor in unique_tensors_of((args, kwargs)) if tensor.requires_grad]
    runs: list[BlockSeconds] = []
    deadline = time.perf_counter() + _SECONDS
    while len(runs) < _LEAST + 1 or (len(runs) < _MOST + 1 and time.perf_counter() < deadline):
        runs.append(_time_passes(module, args, kwargs, precision, device=device))
        for tensor in (*module.parameters(), *inputs):
            tensor.grad = None  # the next backward pass would add to it
    forward, backward = zip(*runs[1:], strict=True)  # the first run warms caches up
    return BlockSeconds(statistics.median(forward), statistics.median(backward))


def _time_passes(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    precision: StepPrecision,
    *,
    device: torch.device,
) -> BlockSeconds:
    with torch.enable_grad(), precision.context(device.type):
        forward, output = _time_call(lambda: module(*args, **kwargs), device)
    roots = [tensor for tensor in unique_tensors_of(output) if tensor.requires_grad]
    if not roots:  # a frozen block has no backward pass
        return BlockSeconds(forward, 0.0)
    gradients = [torch.ones_like(tensor) for tensor in roots]
    backward, _ = _time_call(lambda: torch.autograd.backward(roots, gradients), device)
    return BlockSeconds(forward, backward)


def _time_call(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels run after the call that starts them returns
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def _real_inputs(call: ModuleCall, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def real(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor and not tensor.is_floating_point():  # masks and positions with values
            return tensor.detach().to(device)
        if not tensor.is_floating_point():
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)  # a mask that hides nothing
        result = torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        return result.requires_grad_(tensor.requires_grad)

    def plain(value: Any) -> Any:
        is_plain = isinstance(value, (torch.Tensor, int, float, str, bool, torch.dtype, tuple, list, dict))
        return map_tensors(real, value) if is_plain else None  # a cache of keys would grow from run to run

    return tuple(plain(value) for value in call.args), {k: plain(v) for k, v in call.kwargs.items()}
