"""Weights and optimizer states by name, of ZeRO's flat pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor.placement_types import Placement

from atorch_ns.cluster import gather_values
from atorch_ns.errors import CheckpointError
from atorch_ns.job import OptimizerStates, StateSpec, StateValue
from atorch_ns.text import with_article

_WHAT_PIECES_HAVE = "only states with one value, or one value per element,"
_OTHERWISE = (
    "Use a strategy that keeps parameters whole, such as ddp or zero1, or only the weights: "
    "checkpoint.export_state_dict and import_state_dict."
)


class ParameterPiece(NamedTuple):
    """The part of one parameter that this rank updates.

    Attributes:
        weight: the piece's live values, one-dimensional.
        start: where it begins in the flattened parameter.
        holder: the optimizer's tensor that contains the piece.
        offset: where it begins in the holder.
        size: elements of the holder.
    """

    weight: torch.Tensor
    start: int
    holder: torch.Tensor
    offset: int
    size: int

    def of_state(self, state: torch.Tensor) -> torch.Tensor:
        """The part of the holder's state that belongs to this piece."""
        return state.detach().flatten()[self.offset : self.offset + self.weight.numel()]


@dataclass(kw_only=True)
class FlatStates:
    """Training states of a job whose ranks each update flat pieces of parameters.

    Whole tensors are put together one at a time and given as DTensors over the data mesh, so that no rank
    holds more than its share of the model and one parameter. All methods but ``group_names`` and
    ``optimizer_class`` are collective.

    Attributes:
        specs: shape and dtype of every parameter that is in pieces, by name; in one order on all ranks.
        pieces: this rank's pieces, by name.
        whole: parameters that every rank holds whole.
        optimizer: the optimizer of the holders; ``None`` if there is none.
        groups: the names in each parameter group.
        mesh: a one-dimensional mesh: the ranks over which each parameter is spread.
        device: the device on which tensors are put together.
        publish: called after a change of weights to copy them from the pieces to the model.
    """

    specs: Mapping[str, StateSpec]
    pieces: Mapping[str, ParameterPiece]
    whole: Mapping[str, torch.Tensor]
    optimizer: torch.optim.Optimizer | None
    groups: Sequence[Sequence[str]]
    mesh: DeviceMesh
    device: torch.device
    publish: Callable[[], object] = lambda: None

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of weights in pieces, and the live tensors of whole weights."""
        parameters = {name: parameter.detach() for name, parameter in self.whole.items()}
        # Collective for every name, in one order; ranks without a piece take part.
        for name, spec in self.specs.items():
            piece = self.pieces.get(name)
            parameters[name] = self._gather_tensor(name, None if piece is None else piece.weight, spec.dtype)
        return parameters

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Cuts ``weights`` into pieces."""
        for name, parameter in self.whole.items():
            parameter.copy_(weights[name])
        for name in self.specs:
            flat = _full_tensor(weights[name]).flatten()  # collective, also without a piece
            if (piece := self.pieces.get(name)) is not None:
                piece.weight.copy_(flat[piece.start : piece.start + piece.weight.numel()])
        self.publish()

    def optimizer_class(self) -> str:
        """The class of the user's optimizer."""
        kind = type(self.optimizer)
        return "" if self.optimizer is None else f"{kind.__module__}.{kind.__qualname__}"

    def group_names(self) -> list[list[str]]:
        """Names by group."""
        return [list(group) for group in self.groups]

    def optimizer_states(self) -> OptimizerStates:
        """Copies of states in pieces. Step counters and other single values are returned as they are.

        Raises:
            CheckpointError: for a state that belongs to no element and is not a single value.
        """
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        values: dict[str, dict[str, StateValue]] = {}
        dtypes: dict[tuple[str, str], torch.dtype] = {}
        for name, entry, value, piece in self._state_entries():
            if not isinstance(value, torch.Tensor):
                values.setdefault(name, {})[entry] = value
            elif piece is None or value.dim() == 0:  # of a whole parameter, or a step counter
                tensors.setdefault(name, {})[entry] = value.detach()
            elif value.numel() == piece.size:  # one value an element: gathered below
                dtypes[name, entry] = value.dtype
            else:
                raise CheckpointError(
                    f"{type(self.optimizer).__name__} keeps {entry!r} of shape {tuple(value.shape)} for a piece of "
                    f"{piece.size} elements; {_WHAT_PIECES_HAVE} can be saved. {_OTHERWISE}"
                )
        for (name, entry), dtype in self._known_anywhere(dtypes):
            piece = self.pieces.get(name)
            part = None if piece is None else piece.of_state(self._holder_state(piece.holder)[entry])
            tensors.setdefault(name, {})[entry] = self._gather_tensor(name, part, dtype)
        return OptimizerStates(tensors, values)

    def blank_states(
        self, specs: Mapping[str, Mapping[str, StateSpec]]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Shards of states with the parameter's shape, and whole tensors of all other states.

        Raises:
            CheckpointError: for a state of a parameter in pieces that could not be saved from here either.
        """
        self._refuse_what_cannot_be_cut(specs)
        own_names = {*self.specs, *self.whole}
        return {
            name: {entry: self._empty_state(name, entry, spec) for entry, spec in entries.items()}
            for name, entries in specs.items()
            if name in own_names
        }

    def set_optimizer_states(self, states: OptimizerStates) -> None:
        """Replaces the state of every piece.

        Raises:
            CheckpointError: on every rank, if parameters that share a flat piece come with different single
                values, such as step counts.
        """
        if self.optimizer is None:
            return
        # The order is the same on all ranks, as the collectives below need.
        names = [name for name in (*self.whole, *self.specs) if name in {*states.tensors, *states.values}]
        self._drop_other_entries(states, names)
        self._agree_on_single_values(states, names)
        for name in names:
            for entry, value in states.tensors.get(name, {}).items():
                if isinstance(value, DTensor):
                    self._put_elements(name, entry, value)

    def _refuse_what_cannot_be_cut(self, specs: Mapping[str, Mapping[str, StateSpec]]) -> None:
        for name, entries in specs.items():
            for entry, (shape, _) in entries.items():
                if name in self.specs and shape not in ((), tuple(self.specs[name].shape)):
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps {entry!r} of shape {tuple(shape)} for {name}, which "
                        f"this strategy updates in flat pieces; {_WHAT_PIECES_HAVE} can be loaded. {_OTHERWISE}"
                    )

    def _state_entries(self) -> Iterator[tuple[str, str, Any, ParameterPiece | None]]:
        """``(name, entry, value, piece)`` of all states on this rank; no piece for whole parameters."""
        holders: list[tuple[str, torch.Tensor, ParameterPiece | None]] = [
            *((name, parameter, None) for name, parameter in self.whole.items()),
            *((name, piece.holder, piece) for name, piece in self.pieces.items()),
        ]
        for name, holder, piece in holders:
            for entry, value in self._holder_state(holder).items():
                if not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps {with_article(value)} as {entry!r} of {name}; "
                        "checkpoints hold only tensors, numbers and strings."
                    )
                yield name, entry, value, piece

    def _holder_state(self, holder: torch.Tensor) -> Mapping[str, Any]:
        if self.optimizer is None or holder not in self.optimizer.state:
            return {}
        state: Mapping[str, Any] = self.optimizer.state[holder]
        return state

    def _known_anywhere(
        self, dtypes: Mapping[tuple[str, str], torch.dtype]
    ) -> list[tuple[tuple[str, str], torch.dtype]]:
        of_ranks = gather_values(dict(dtypes), distributed=True, group=self.mesh.get_group())
        all_dtypes = {key: dtype for mapping in of_ranks for key, dtype in mapping.items()}
        return sorted(all_dtypes.items(), key=lambda item: item[0])  # in one order, since each is collective

    @torch.no_grad()
    def _gather_tensor(self, name: str, part: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        shape = self.specs[name].shape
        # Pieces do not overlap and are zero elsewhere: their sum is the whole parameter.
        flat = torch.zeros(math.prod(shape), dtype=dtype, device=self.device)
        if part is not None:
            start = self.pieces[name].start
            flat[start : start + part.numel()] = part.to(self.device, dtype)
        dist.all_reduce(flat, group=self.mesh.get_group())
        # Every rank has the whole tensor and cuts out its own part without communication.
        return distribute_tensor(flat.view(shape), self.mesh, _choose_placements(shape), src_data_rank=None)

    def _empty_state(self, name: str, entry: str, spec: StateSpec) -> torch.Tensor:
        shape = self.whole[name].shape if name in self.whole else self.specs[name].shape
        # A 0-d state of a 0-d parameter may be a step counter, which goes by its name.
        if tuple(spec.shape) != tuple(shape) or (not shape and entry == "step"):
            return torch.empty(spec.shape, dtype=spec.dtype)  # such as a step counter
        if name in self.whole:
            return torch.empty_like(self.whole[name].detach(), dtype=spec.dtype)
        return empty_dtensor(
            *spec.shape, dtype=spec.dtype, device_mesh=self.mesh, placements=_choose_placements(spec.shape)
        )

    def _find_holder(self, name: str) -> torch.Tensor | None:
        if name in self.whole:
            return self.whole[name]
        piece = self.pieces.get(name)
        return None if piece is None else piece.holder

    def _drop_other_entries(self, states: OptimizerStates, names: Iterable[str]) -> None:
        assert self.optimizer is not None
        new_entries: dict[torch.Tensor, set[str]] = {}
        for name in names:
            if (holder := self._find_holder(name)) is not None:
                entries = (*states.tensors.get(name, {}), *states.values.get(name, {}))
                # Several parameters may share a holder, a flat partition: it keeps entries of all of them.
                new_entries.setdefault(holder, set()).update(entries)
        # Entries of the new states are overwritten in place: other tensors may be linked to them.
        for holder in list(self.optimizer.state):
            holder_entries = new_entries.get(holder, set())
            for entry in [entry for entry in self.optimizer.state[holder] if entry not in holder_entries]:
                del self.optimizer.state[holder][entry]
            if not holder_entries:
                del self.optimizer.state[holder]

    def _agree_on_single_values(self, states: OptimizerStates, names: Iterable[str]) -> None:
        assert self.optimizer is not None
        first_values: dict[tuple[torch.Tensor, str], tuple[str, Any]] = {}
        problem = ""
        for name in names:
            holder = self._find_holder(name)
            if holder is None:
                continue
            # A state that is not a DTensor, such as a step count, is one value for all parameters of a holder.
            single = {k: v for k, v in states.tensors.get(name, {}).items() if not isinstance(v, DTensor)}
            for entry, value in {**single, **states.values.get(name, {})}.items():
                first, other = first_values.setdefault((holder, entry), (name, value))
                if not _is_equal(value, other):
                    problem = problem or f"{first} and {name} have different {entry!r}: {other} and {value}"
                self.optimizer.state[holder][entry] = value
        # All ranks raise, or some would wait in the collectives that follow.
        problems = gather_values(problem, distributed=True, group=self.mesh.get_group())
        if conflict := next(filter(None, problems), ""):
            raise CheckpointError(
                f"this strategy updates several parameters as one flat piece, but in the checkpoint {conflict}. Load "
                "it under another strategy, such as ddp or fsdp."
            )

    @torch.no_grad()
    def _put_elements(self, name: str, entry: str, value: DTensor) -> None:
        flat = _full_tensor(value).flatten()  # collective: ranks without a piece take part
        piece = self.pieces.get(name)
        if piece is None:
            return
        assert self.optimizer is not None
        state = self.optimizer.state[piece.holder]
        if entry not in state:
            state[entry] = torch.zeros(piece.size, dtype=value.dtype, device=piece.weight.device)
        piece.of_state(state[entry]).copy_(flat[piece.start : piece.start + piece.weight.numel()])


def _choose_placements(shape: Sequence[int]) -> list[Placement]:
    return [Shard(0)] if len(shape) else [Replicate()]  # a 0-d tensor cannot be sharded


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return bool(value == other)
