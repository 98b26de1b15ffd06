"""The modules of a rank in a pipeline: its units, stand-ins for the others', and its stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.random_states import random_stream
from atorch_ns.data import call_model
from atorch_ns.errors import StepError
from atorch_ns.pipeline.cut.graph import CallGraph
from atorch_ns.pipeline.run.forward_pass import CrossingPieces, PassSwitch, StageEnd, StagePass, StageRange
from atorch_ns.pipeline.schedule.schedules import train_step_only
from atorch_ns.torch_compat import SetsInside, in_backward

MICRO_BATCH_STRIDE = 1_000_003  # a prime, larger than any number of calls
"""The difference of the seeds of two micro-batches."""

LossOf = Callable[[int, Any, Any], torch.Tensor]
"""``(number of the micro-batch, micro-batch, output) -> loss``, 0-d."""


class StageUnit(SetsInside, nn.Module):
    """A unit of this rank. It runs if the running stage owns the call, else returns a stand-in's output.

    Attributes of the module inside are visible through it, and its parameters keep their names.

    Args:
        module: the unit.
        path: its path in the user's model.
        method: the name of the method that has cut the model, for messages.
    """

    inside = "_pipeline_unit"

    def __init__(self, module: nn.Module, path: str, switch: PassSwitch, method: str) -> None:
        super().__init__()
        self._pipeline_unit = module
        self._path = path
        self._method = method
        self._switch = switch
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        """An attribute of this module, or of the one inside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_pipeline_unit"), name)

    def __getitem__(self, key: Any) -> Any:
        """An item of the module inside."""
        return self._pipeline_unit[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output that the running pass chooses. In a recomputation no pass runs, and the module does."""
        running = self._switch.running
        if running is None:
            if not in_backward():  # other ranks refuse it, and this one would wait for them
                raise _outside_of_a_step(self._path, self._method)
            return self._pipeline_unit(*args, **kwargs)
        return running.call(self._path, self._pipeline_unit, args, kwargs)


class Stub(nn.Module):
    """A stand-in for a unit of other ranks, with its attributes and the parameters that this rank needs.

    Args:
        module: the unit, whose memory has been released.
        path, method: as in :class:`StageUnit`.
    """

    is_stand_in = True

    def __init__(self, module: nn.Module, path: str, switch: PassSwitch, method: str) -> None:
        super().__init__()
        object.__setattr__(self, "_original", module)  # so that it is not a child
        self._path = path
        self._method = method
        self._switch = switch
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        """An attribute of this module, or of the unit."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        original = self.__dict__["_original"]
        # Methods and properties run on the stand-in, with the parameters of the unit that this rank keeps.
        attribute = inspect.getattr_static(type(original), name, None)
        if inspect.isfunction(attribute):
            return MethodType(attribute, self._as_unit())
        if isinstance(attribute, property) and attribute.fget is not None:
            return attribute.fget(self._as_unit())
        return getattr(original, name)

    def _as_unit(self) -> Stub:
        """This module as an instance of the unit's class, so that its code may use ``super()``."""
        kind = type(self.__dict__["_original"])
        instance: Stub = object.__new__(type(kind.__name__, (Stub, kind), {"__call__": nn.Module.__call__}))
        instance.__dict__ = self.__dict__  # one state under two classes
        return instance

    def __getitem__(self, key: Any) -> Any:
        """An item of the unit."""
        return self.__dict__["_original"][key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output that the running pass chooses."""
        running = self._switch.running
        if running is None:
            raise _outside_of_a_step(self._path, self._method)
        return running.call(self._path, None, args, kwargs)


def _outside_of_a_step(path: str, method: str) -> StepError:
    return StepError(
        f"{path} was called outside of a step, and the model is cut over the ranks of a pipeline, so it cannot be called here: "
        f"{train_step_only(method)}, or leave the axis pipeline out of the strategy."
    )


def own_units(model: nn.Module) -> dict[str, nn.Module]:
    """The units that this rank calls, by path, without their wrappers."""
    return {unit._path: unit._pipeline_unit for unit in model.modules() if isinstance(unit, StageUnit)}


class StageModule(nn.Module):
    """One stage: runs the user's model on a micro-batch from the first to the last of the stage's calls.

    Args:
        model: the whole model, with units and stand-ins; not registered.
        modules: modules that hold the stage's parameters; registered.
        is_last: whether it computes the loss.
        model_input_format: how a micro-batch is passed to the model.

    Attributes:
        pieces: division of crossing tensors over ranks of the same stage; ``None`` if each sends all.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module],
        *,
        number: int,
        is_last: bool,
        switch: PassSwitch,
        device: torch.device,
        model_input_format: str | None,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)  # its other parts are not this stage's
        self.held = nn.ModuleList(modules)
        self.number = number
        self.is_last = is_last
        self._switch = switch
        self._device = device
        self._format = model_input_format
        self._seed = 0
        self._micro_batches: Sequence[Any] = ()
        self._passes: Sequence[tuple[CallGraph, StageRange]] = ()
        self._loss_of: LossOf | None = None
        self.failed = False
        self.pieces: CrossingPieces | None = None

    @property
    def model_training(self) -> bool:
        """Whether the user's model is in training mode."""
        return bool(self.__dict__["_model"].training)

    def call_seeds(self, paths: Sequence[str]) -> tuple[int, ...]:
        """:meth:`StagePass.call_seeds` of the pass that runs now."""
        assert self._switch.running is not None
        return self._switch.running.call_seeds(paths)

    def begin(
        self,
        micro_batches: Sequence[Any],
        passes: Sequence[tuple[CallGraph, StageRange]],
        loss_of: LossOf,
        *,
        seed: int,
    ) -> None:
        """Prepares for the forward passes of a batch.

        Args:
            micro_batches, seed: the batch's micro-batches and seed, the same on all stages.
            passes: the graph traced with the shapes of each micro-batch, and the stage's part of it.
            loss_of: function for the loss that the last stage returns.
        """
        self._micro_batches = micro_batches
        self._passes, self._loss_of = passes, loss_of
        self._seed = seed

    def finish(self) -> None:
        """Releases the batch."""
        self._micro_batches, self._passes = (), ()
        self._loss_of = None

    def forward(self, *received: torch.Tensor, index: int | torch.Tensor) -> Any:
        """Runs a micro-batch. A second run of it draws the same random numbers.

        Args:
            received: the tensors that crossed the cut before the stage.
            index: the number of the micro-batch.

        Returns:
            The tensors that cross the cut after the stage. The last stage returns the loss, of shape [1].

        Raises:
            StepError: if the model does not make the calls that were traced.
        """
        if not self._passes:
            raise StepError("a pipeline stage can only be run by train_step.")
        number = int(index)  # a 0-d tensor where DeepSpeed's engine calls
        batch, (graph, stage) = self._micro_batches[number], self._passes[number]
        seed = self._seed + number * MICRO_BATCH_STRIDE
        stage_pass = StagePass(graph, stage, received, device=self._device, seed=seed, pieces=self.pieces)
        try:
            with random_stream(seed, self._device):
                output = self._run_pass(stage_pass, batch)
                if self.is_last:
                    assert self._loss_of is not None
                    return torch.stack([self._loss_of(number, batch, output)])
        except Exception:
            self.failed = True
            raise
        if stage_pass.sent is None:
            raise StepError(
                f"the model ended after {stage_pass.num_calls} of its units, but stage {self.number} ends "
                f"before unit {stage.end}: it does not call what it called when it was cut."
            )
        return stage_pass.sent

    def _run_pass(self, stage_pass: StagePass, batch: Any) -> Any:
        self._switch.running = stage_pass
        try:
            return call_model(self.__dict__["_model"], batch, self._format)
        except StageEnd:  # the rest of the model runs on later stages
            return None
        finally:
            self._switch.running = None
