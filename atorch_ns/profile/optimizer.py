"""Optimizer memory: states and temporaries of a step, found by stepping on small parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from atorch_ns.profile.compact_states import compact_states
from atorch_ns.profile.record.recorder import Event, OperatorRecorder
from atorch_ns.profile.trace import OptimizerSpec
from atorch_ns.text import error_text

_MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_SHAPE = (96, 80)
"""Rows and columns differ from each other and from every size that a state has of its own."""
_KNOWN_TEMPORARIES = {"torchao": 2.0}
"""Packages with compiled optimizers: their temporary tensors of the size of the largest parameter. By the
allocator, on a CPU with inductor: 2.01 for AdamW8bit; AdamW4bit holds 6.5 and is predicted too low."""
_SMALL = (24, 20)
"""A shape of the same kind, too small for states in fewer bits."""


def optimizer_spec(
    make_optimizer: _MakeOptimizer | None, device: str
) -> tuple[OptimizerSpec | None, tuple[str, ...]]:
    """The optimizer's states, with notes on missing facts.

    Args:
        make_optimizer: makes the optimizer for parameters; ``None`` without one.
        device: type of the device it will run on: on a GPU torch's optimizers use foreach kernels unless
            set otherwise.
    """
    if make_optimizer is None:
        return None, ()
    try:
        try:
            trial = partial(_Trial, make_optimizer, device=device)
            few, many = (trial(count) for count in (4, 8))  # they differ by four matrices
        except ValueError:  # a part that is for vectors does not take an empty list
            trial = partial(trial, with_vector=True)
            few, many = (trial(count) for count in (4, 8))
        compact = None if many.is_torchs else compact_states(make_optimizer)
        plain = many if compact is None else trial(4, shape=_SMALL)  # small parameters have plain states
    except Exception as error:  # the user's optimizer may want other parameters than these
        note = (
            f"The optimizer could not be tried on small parameters ({error_text(error)}), so it is "
            "taken to keep two states as Adam does."
        )
        return OptimizerSpec(name=getattr(make_optimizer, "__qualname__", "unknown")), (note,)
    size = 4 * _SHAPE[0] * _SHAPE[1]  # bytes of a matrix in fp32
    copies = (many.temporary_bytes - few.temporary_bytes) / (4 * size)  # of each gradient
    return (
        OptimizerSpec(
            name=many.name,
            state_dtypes=plain.state_dtypes,
            fixed_bytes=plain.fixed_bytes,
            temporary_copies=max(round(copies, 2), 0.0),
            factored_dtypes=plain.factored_dtypes,
            parameter_temporaries=many.given_temporaries
            or max(round(few.temporary_bytes / size - 4 * copies, 2), 0.0),
            fused=many.fused,
            compact=compact,
        ),
        (),
    )


def nested_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in an optimizer's attributes, recursively."""
    for value in vars(optimizer).values():
        items = (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, (list, tuple))
            else [value]
        )
        for item in items:
            if isinstance(item, torch.optim.Optimizer) and item is not optimizer:
                yield item
                yield from nested_optimizers(item)


class _Trial:
    """Two steps on a number of equal matrices; the second one is recorded."""

    def __init__(
        self,
        make_optimizer: _MakeOptimizer,
        count: int,
        *,
        device: str,
        shape: tuple[int, int] = _SHAPE,
        with_vector: bool = False,
    ) -> None:
        self._shape = shape
        parameters = [nn.Parameter(torch.ones(shape)) for _ in range(count)]
        if with_vector:  # of a size that no figure shows
            parameters.append(nn.Parameter(torch.ones(1)))
        optimizer = make_optimizer(parameters)
        self.name = type(optimizer).__name__
        self._parts = list(nested_optimizers(optimizer))
        self.is_torchs = all(
            type(part).__module__.startswith("torch.optim") for part in self._parts or [optimizer]
        )
        self.given_temporaries = _KNOWN_TEMPORARIES.get(type(optimizer).__module__.partition(".")[0], 0.0)
        groups = [group for part in (optimizer, *self._parts) for group in part.param_groups]
        self.fused = any(group.get("fused") for group in groups)
        if device == "cuda":  # where torch uses foreach kernels by default
            for group in groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
        self._measure_step(optimizer, parameters)  # the first step makes the states
        self.temporary_bytes = self._measure_step(optimizer, parameters)
        self.state_dtypes: tuple[str, ...] = ()
        self.factored_dtypes: tuple[str, ...] = ()
        self.fixed_bytes = 0
        for part in (optimizer, *self._parts):
            for state in part.state.get(parameters[0], {}).values():
                if isinstance(state, torch.Tensor):
                    self._classify_state(state)

    def _classify_state(self, state: torch.Tensor) -> None:
        dtype = "same" if state.dtype == torch.float32 else str(state.dtype).removeprefix("torch.")
        rows, columns = self._shape  # of parameters in fp32
        if state.numel() == rows * columns:
            self.state_dtypes += (dtype,)
        elif state.numel() in (rows, columns):  # a factor, as Adafactor's
            self.factored_dtypes += (dtype,)
        else:
            self.fixed_bytes += state.numel() * state.itemsize

    def _measure_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> int:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if not self.is_torchs:  # what it compiles would take seconds here
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            return 0  # compiled steps cannot be followed
        every = (state for part in (optimizer, *self._parts) for state in part.state.values())
        states = [s for state in every for s in state.values() if isinstance(s, torch.Tensor)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        recorder = OperatorRecorder([*parameters, *gradients, *states], parameters)
        with recorder.running():
            optimizer.step()
        return _peak_bytes(recorder)


def _peak_bytes(recorder: OperatorRecorder) -> int:
    alive = peak = 0
    sizes: dict[int, int] = {}
    recording = recorder.recording
    for kind, key, size in zip(recording.kinds, recording.keys, recording.sizes, strict=True):
        if kind == Event.ALLOCATE:
            sizes[key] = size
            alive += size
            peak = max(peak, alive)
        elif kind == Event.FREE:
            alive -= sizes[key]
    return peak
