"""Tensor-parallel analysis: the parts among the tensors and operators of a recorded step.

The profile decides nothing here: it is told which parameters are divided, by the finder that training uses too.
A product with a weight that is divided along its outputs (a *column* layer of Megatron-LM) gives a part, and so
does what is computed from parts, until a weight divided along its inputs (a *row* layer) gives whole results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from atorch_ns.profile.record.recorder import Event, MatrixProduct, Recording


@dataclass(frozen=True)
class ParameterDims:
    """The parameters that tensor parallelism divides.

    Attributes:
        dims: dim of each divided parameter, by its first name.
        ends: names of the parameters of token embedding and head, whose results are whole.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()


Divide = Callable[[nn.Module, Any, Callable[[nn.Module, Any], Any]], ParameterDims]
"""``(model, batch, run) -> dims``: asks the finder of the room ``sharding``, which stands above this one."""


@dataclass
class TensorDivision:
    """The tensors and operators that are divided.

    Attributes:
        storages: numbers of storages of which a rank holds a part.
        operators: events of operators of which a rank computes a part.
        dims: dim of each divided parameter, by its number among the given tensors.
        words: numbers of storages over the vocabulary, between the head and the loss.
        word_operators: events of operators that compute those values.
        loss_share: share of the head's tokens with a loss: below 1 if the loss is shifted.
        columns, rows: for each phase of a forward pass, products divided along outputs and along inputs.
    """

    storages: set[int] = field(default_factory=set)
    operators: set[int] = field(default_factory=set)
    dims: dict[int, int] = field(default_factory=dict)
    words: set[int] = field(default_factory=set)
    word_operators: set[int] = field(default_factory=set)
    loss_share: float = 1.0
    columns: dict[int, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)


def follow_division(recording: Recording, dims: Mapping[int, int], ends: AbstractSet[int]) -> TensorDivision:
    """The tensors and operators of a recorded step of which a rank has a part.

    Args:
        recording: the recording of a forward and a backward pass.
        dims: dim of each divided parameter, by its number among the given tensors.
        ends: numbers of the parameters of token embedding and head.
    """
    return _Follower(recording, dims, ends).division()


class _Follower:
    """One pass over the events."""

    def __init__(self, recording: Recording, dims: Mapping[int, int], ends: AbstractSet[int]) -> None:
        self._recording = recording
        self._ends = ends
        self._origin = {-1 - number: number for number in dims}  # by mark, also of copies
        self._result_bytes = {
            key: size
            for kind, key, size in zip(recording.kinds, recording.keys, recording.sizes, strict=True)
            if kind == Event.ALLOCATE
        }
        self._division = TensorDivision(dims=dict(dims))
        self._head_bytes = 0  # of the logits

    def division(self) -> TensorDivision:
        """Follows all events."""
        recording, division = self._recording, self._division
        for event, phase in recording.operators():
            self._follow_operator(event, phase)
        gradients = {
            gradient for gradient, number in recording.gradient_of.items() if number in division.dims
        }
        division.storages = division.storages - recording.gradients | gradients
        return division

    def _follow_operator(self, event: int, phase: int) -> None:
        reads = self._recording.reads[event]
        product = self._recording.products.get(event)
        if product is not None and product.right in self._origin:
            self._follow_product(event, phase, product, self._origin[product.right])
            return
        if self._recording.labels[event] == "aten._to_copy" and reads[0] in self._origin:
            for result in self._recording.writes[event]:  # autocast's copy of a weight
                self._origin[result] = self._origin[reads[0]]
            return
        self._follow_words(event, reads)
        if any(mark in self._division.storages for mark in reads):
            self._mark_divided(event)

    def _follow_words(self, event: int, reads: Sequence[int]) -> None:
        words = self._division.words
        # A result of at least half the bytes has a value for each word: a cast to 16 bits halves them.
        least = 0.5 * min((self._result_bytes.get(mark, 0) for mark in reads if mark in words), default=0)
        results = [
            mark for mark in self._recording.writes[event] if self._result_bytes.get(mark, 0) >= least > 0
        ]
        if results:
            words.update(results)
            self._division.word_operators.add(event)
            if self._recording.labels[event] == "aten._log_softmax" and self._head_bytes:
                share = self._result_bytes[results[0]] / self._head_bytes
                # 16-bit logits, of which fp32 is made.
                self._division.loss_share = share / 2 if share > 1 else share

    def _follow_product(self, event: int, phase: int, product: MatrixProduct, number: int) -> None:
        division = self._division
        division.operators.add(event)
        is_column = division.dims[number] == (0 if product.transposed else 1)  # of a weight [N, K] or [K, N]
        if number in self._ends:
            # Hidden states times the transposed table are the logits; the other product is a gradient.
            if is_column and product.left not in division.words:
                logits = [logits for logits in self._recording.writes[event] if logits >= 0]
                division.words.update(logits)
                self._head_bytes = max((self._result_bytes.get(mark, 0) for mark in logits), default=0)
            return
        if phase % 2 == 0:
            counts = division.columns if is_column else division.rows
            counts[phase] = counts.get(phase, 0) + 1
        if is_column:
            self._mark_divided(event)

    def _mark_divided(self, event: int) -> None:
        self._division.operators.add(event)
        # A result that is written into a given tensor has no storage of its own.
        self._division.storages.update(mark for mark in self._recording.writes[event] if mark >= 0)
