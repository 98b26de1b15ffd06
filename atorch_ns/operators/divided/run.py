"""Runs of divided models: forward passes by pieces, blocks in their own modules, captures by kind of call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from atorch_ns.capture.graph.capture import Captured, CaptureError, capture, fill_nest, flat_arguments
from atorch_ns.capture.graph.operator_graph import OperatorGraph
from atorch_ns.capture.graph.python_state import PythonState, UnrepeatableError, carry_state, refuse_hooks
from atorch_ns.capture.structure import copy_structure
from atorch_ns.errors import InputError
from atorch_ns.operators.divided.conversions import ArgumentNeed, convert_placement
from atorch_ns.operators.divided.divide import OperatorDivision, Piece, pieces
from atorch_ns.operators.rules.rule import WHOLE, Placement
from atorch_ns.sharding.rank_context import call_in_thread, local_part
from atorch_ns.text import first_few
from atorch_ns.torch_compat import plain_name, sample_size, unwrap_checkpoint

Divide = Callable[[OperatorGraph], OperatorDivision]
"""Assigns a rule to every operator of a captured graph."""

_OPERATORS = "_divided_operators"  # attribute of a divided model that holds its DividedForward


_MANY = 8  # captures kept for calls that differ only in attributes. One more warns and drops the oldest.


class CallError(RuntimeError):
    """A call that cannot be captured. It is raised on one rank alone if the code differs there."""


class DividedForward:
    """The forward pass of a model whose operators are divided over a group of ranks.

    Args:
        model: the whole model. Its structure is kept, its values are not.
        blocks: paths of the blocks that stay modules, each called for its part of the forward pass.
        divide: assigns rules to the operators of a graph.
        group, device: the ranks, and this rank's device.
        within: the path, as keys have it, of the unit that ``model`` is; empty for a whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        divide: Divide,
        group: Any,
        *,
        device: torch.device,
        within: str = "",
    ) -> None:
        self._structure = copy_structure(model, _without_memory, {})  # parameters are on the meta device
        self._blocks = tuple(blocks)
        self._within = within
        self._divide = divide
        self._group = group
        self._device = device
        self._passes: list[tuple[Any, PythonState, _Pass]] = []  # oldest first

    def attach(self, model: nn.Module) -> None:
        """Makes ``model``, or another of equal structure with divided parameters, run by pieces."""
        _replace_forward(model, _DividedModel)
        vars(model)[_OPERATORS] = self
        for path in self._blocks:
            _replace_forward(model.get_submodule(path), _DividedBlock)

    def __deepcopy__(self, memo: Any) -> DividedForward:
        return self  # a copied model shares its captures

    @property
    def code(self) -> str:
        """The generated code of all passes captured so far. Equal pieces appear once."""
        return "\n".join(known_pass.code for *_, known_pass in self._passes)

    def run(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The model's results, whole on every rank.

        Raises:
            CallError: if this kind of call cannot be captured.
            InputError: if it cannot be divided.
        """
        tensors, _ = flat = flat_arguments(args, kwargs)
        return fill_nest(*self._find_pass(model, args, kwargs, flat).run(model, tensors, self._group))

    def _find_pass(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], flat: tuple[list[Any], Any]
    ) -> _Pass:
        # Graphs do not call submodules, so hooks of those would not run; hooks of the model itself do.
        try:
            refuse_hooks((plain_name(path), part) for path, part in model.named_modules() if path)
        except UnrepeatableError as error:
            raise CallError(
                f"{type(model).__name__} runs by its operators: {error}. Register it earlier, on a model that stays undivided, or "
                "on the whole model."
            ) from None
        states = self._mode_states(model)
        stale: list[tuple[PythonState, _Pass]] = []
        for modes, attributes, candidate in self._passes:
            if modes == states and candidate.captured.fits(*flat) and candidate.divides(flat[0]):
                if attributes.holds():
                    return candidate
                stale.append((attributes, candidate))  # fits but for changed attributes
        carry_state(model, self._structure)  # attributes as they are now
        modules = {plain_name(path): module for path, module in model.named_modules()}
        for path, module in self._structure.named_modules():
            module.training = modules[path].training
        dtypes = {plain_name(name): parameter.dtype for name, parameter in model.named_parameters()}
        _, casts, learns = states
        casting = torch.autocast(self._device.type, casts or None, enabled=bool(casts))

        def captured_here() -> Captured:
            with casting, torch.set_grad_enabled(learns):
                return capture(self._structure, args, kwargs, dtypes=dtypes, device=self._device)

        try:  # by itself: what recomputes a unit counts what is called in it
            new_capture = call_in_thread(captured_here, self._device)
        except CaptureError as error:
            raise CallError(str(error)) from error
        if len(stale) == _MANY:
            names = first_few(list(stale[-1][0].changed()), 3)
            warnings.warn(
                f"{type(model).__name__} has been captured {_MANY + 1} times for calls of the same shapes, since {names} changes; "
                "each time costs a capture. Keep what changes from step to step in a buffer, and write to it in place.",
                stacklevel=2,
            )
        if len(stale) >= _MANY:  # the oldest of them goes
            self._passes = [entry for entry in self._passes if entry[2] is not stale[0][1]]
        division = self._divide(OperatorGraph(new_capture, self._blocks, within=self._within))
        new_pass = _Pass(new_capture, division, pieces(division))
        self._passes.append((states, PythonState(model, new_capture.reads), new_pass))
        return new_pass

    def _mode_states(self, model: nn.Module) -> Any:
        # The code may read these as well as arguments and attributes, so each combination is captured.
        kind = self._device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return tuple(module.training for module in model.modules()), casts, torch.is_grad_enabled()


def _without_memory(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta") if kind == "parameter" else tensor


@dataclass(frozen=True, eq=False)
class _Pass:
    """One captured and divided forward pass."""

    captured: Captured
    division: OperatorDivision
    pieces: tuple[Piece, ...]

    @property
    def code(self) -> str:
        code_by_body: dict[int, str] = {}
        for piece, segment in zip(self.pieces, self.division.graph.segments, strict=True):
            code_by_body.setdefault(id(piece.body), f"# {segment.kind or 'between blocks'}\n{piece.code}")
        return "\n".join(code_by_body.values())

    def divides(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all divided sizes that depend on the number of samples are divisible."""
        sizes = (
            size
            for x, (shape, _) in zip(tensors, self.captured.guards, strict=True)
            for size, guard in zip(x.shape, shape, strict=True)
            if isinstance(guard, str)  # a symbol: the size may vary
        )
        samples = next(sizes, 1)
        return not any(each * samples % self.division.degree for each in self._sizes_per_sample)

    @functools.cached_property
    def _sizes_per_sample(self) -> frozenset[Fraction]:
        inputs = [
            node.meta["val"] for node, origin in self.captured.origins.items() if origin.kind == "input"
        ]
        varying = (size for value in inputs for size in value.shape if not isinstance(size, int))
        samples = next((sample_size(size, 1) for size in varying), 1)
        ratios: set[Fraction] = set()  # of divided sizes to the number of samples
        for op, rule in self.division.rules.items():
            for value, placement in zip(
                (*op.inputs, *op.results), (*rule.inputs, *rule.outputs), strict=True
            ):
                if value is not None and isinstance(placement, Shard):
                    size = value.meta["val"].shape[placement.dim]
                    if not isinstance(size, int):
                        ratios.add(Fraction(sample_size(size, 1), samples))
        return frozenset(ratios)

    @functools.cached_property
    def _output_placements(self) -> tuple[tuple[str, Placement], ...]:
        return tuple((node.name, self.division.placement(node)) for node in self.division.graph.outputs)

    @functools.cached_property
    def _dead_values(self) -> tuple[tuple[str, ...], ...]:
        later_names = {name for name, _ in self._output_placements}  # by later pieces and the results
        ends: list[tuple[str, ...]] = []
        for piece in reversed(self.pieces):
            ends.append(tuple(name for name in (*piece.takes, *piece.gives) if name not in later_names))
            later_names.update(piece.takes)
        return tuple(reversed(ends))

    def run(self, model: nn.Module, tensors: Sequence[torch.Tensor], group: Any) -> tuple[Any, list[Any]]:
        """The nest of results, and the tensors in it, whole."""
        values = self._initial_values(model, tensors)
        for piece, ends in zip(self.pieces, self._dead_values, strict=True):
            inputs = [values[name] for name in piece.takes]
            if piece.path:
                outputs = _find_submodule(model, piece.path)(_Call(piece, group), *inputs)
            else:
                outputs = run_piece(model, piece, group, inputs)
            values.update(zip(piece.gives, outputs, strict=True))
            for name in ends:
                values.pop(name, None)  # frees memory, unless autograd keeps it
        whole = ArgumentNeed(WHOLE, False)
        results = [
            convert_placement(values[name], placement, whole, group)
            for name, placement in self._output_placements
        ]
        return self.captured.outputs, results

    def _initial_values(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        value_names = {name for piece in self.pieces for name in piece.takes} | {
            name for name, _ in self._output_placements
        }
        values: dict[str, Any] = {}
        for node, origin in self.captured.origins.items():
            if node.name not in value_names:
                continue
            if origin.kind == "input":
                values[node.name] = tensors[int(origin.name)]
            elif origin.kind == "constant":
                values[node.name] = self.captured.constants[origin.name]
            else:
                values[node.name] = _read_state(model, origin.name)  # read by pieces outside of its block
        return values


class _Call:
    """The piece that a block is called for. It is callable, so recomputation treats it as a constant."""

    def __init__(self, piece: Piece, group: Any) -> None:
        self._piece, self._group = piece, group

    def __call__(self, block: nn.Module, values: Sequence[Any]) -> tuple[Any, ...]:
        return run_piece(block, self._piece, self._group, values)


def run_piece(module: nn.Module, piece: Piece, group: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Runs a piece on its input values, with the parameters and buffers of ``module``."""
    states = [_read_state(module, name) for name in piece.states]
    results: tuple[Any, ...] = piece.body(group, *states, *values)
    return results


def _read_state(module: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    return local_part(getattr(_find_submodule(module, path), attribute))  # this rank's piece of a DTensor


def _find_submodule(module: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        module = getattr(unwrap_checkpoint(module), name)  # checkpoint wrappers are not part of the path
    return module


class _DividedModel:
    """A model that runs by pieces."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        operators: DividedForward = vars(self)[_OPERATORS]
        return operators.run(self, args, kwargs)


class _DividedBlock:
    """A block that is called for its piece of a divided forward pass."""

    def forward(self: Any, call: Any, *values: Any) -> Any:
        if not isinstance(call, _Call):
            raise InputError(
                f"a {type(self).__name__} was called on its own, but its operators are divided as parts of the whole model. "
                "Call the model."
            )
        return call(self, values)


def _replace_forward(module: nn.Module, style: Any) -> None:
    whole: Any = type(module)
    module.__class__ = _make_subclass(style, whole)  # still an instance of the user's class


@functools.cache
def _make_subclass(style: Any, whole: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return style.forward(self, *args, **kwargs)

    functools.update_wrapper(forward, whole.forward)  # trainers read forward's signature
    body = {"forward": torch.compiler.disable(forward), "__doc__": f"{whole.__name__}: {style.__doc__}"}
    return type(f"{style.__name__.removeprefix('_')}{whole.__name__}", (whole,), body)
