"""Tensor-parallel analysis: tensors and operators that tensor parallelism would divide.

Within a block, the first product with a matrix of weights is divided along its outputs (a *column* layer of
Megatron-LM). What is computed from its result is divided too, until a product whose weight is divided along
its inputs (a *row* layer) gives whole results. So attention is divided by heads and an MLP by inner features.
A column layer whose results would meet whole ones (a residual stream, another block) stays whole. Outside
blocks only matrices with a row for each word of the vocabulary are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atorch_ns.profile.record.recorder import Event, MatrixProduct, Recording

_MEETING = frozenset(
    {
        "aten.add", "aten.add_", "aten.sub", "aten.index_add", "aten.index_add_", "aten.index_put",
        "aten.index_put_",
    }
    | {"aten.scatter_add", "aten.scatter_add_", "aten.cat", "aten.copy_"}
)  # fmt: skip
"""Operators that put tensors of one kind together."""


@dataclass
class TensorDivision:
    """The tensors and operators that are divided.

    Attributes:
        storages: numbers of storages of which a rank holds a part.
        operators: events of operators of which a rank computes a part.
        dims: dim of each divided parameter, by its number among the given tensors.
        words: numbers of storages of values for words of the vocabulary, between the head and the loss.
        word_operators: events of operators that compute those values.
        loss_share: share of the head's tokens whose loss is computed: below 1 where the loss is shifted.
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


class _Refusal(Exception):
    """A weight that cannot be divided along its outputs."""

    def __init__(self, weights: frozenset[int]) -> None:
        super().__init__()
        self.weights = weights


def find_division(
    recording: Recording,
    shapes: Sequence[tuple[int, ...]],
    block_of: Callable[[int], str],
    vocabulary: Mapping[int, int],
) -> TensorDivision:
    """The tensors and operators of a recorded step that tensor parallelism would divide.

    Args:
        recording: the recording of a forward and a backward pass.
        shapes: shapes of the parameters, by their numbers among the given tensors.
        block_of: the block that a phase belongs to; empty outside blocks.
        vocabulary: parameters outside blocks that have a row for each word, with that dim.
    """
    whole: set[int] = set()
    while True:  # ends, as each refusal adds weights that stay whole
        try:
            return _Walk(recording, shapes, block_of, vocabulary, whole=whole).division()
        except _Refusal as refusal:
            whole |= refusal.weights


class _Walk:
    """One pass over the events, with a set of weights that stay whole."""

    def __init__(
        self,
        recording: Recording,
        shapes: Sequence[tuple[int, ...]],
        block_of: Callable[[int], str],
        vocabulary: Mapping[int, int],
        *,
        whole: set[int],
    ) -> None:
        self._recording = recording
        self._shapes = shapes
        self._block_of = block_of
        self._vocabulary = vocabulary
        self._whole = whole
        self._sources: dict[int, frozenset[int]] = {}  # of each divided storage the weights that divided it
        self._origin = {-1 - number: number for number in range(len(shapes))}  # by mark, also of copies
        self._sizes: dict[int, int] = {}
        self._result_bytes = {
            key: size
            for kind, key, size in zip(recording.kinds, recording.keys, recording.sizes, strict=True)
            if kind == Event.ALLOCATE
        }
        self._blocks: dict[int, str] = {}  # of each divided parameter
        self._division = TensorDivision(dims=dict(vocabulary))
        self._head_bytes = 0  # of the logits
        self._phase = 0
        self._block = ""

    def division(self) -> TensorDivision:
        """Follows all events."""
        recording = self._recording
        for event, (kind, key) in enumerate(zip(recording.kinds, recording.keys, strict=True)):
            if kind == Event.PHASE:
                self._phase, self._block = key, self._block_of(key)
            elif kind == Event.ALLOCATE:
                self._sizes[key] = recording.sizes[event]
            elif kind == Event.OPERATOR:
                self._follow_operator(event)
        gradients = {
            gradient for gradient, number in recording.gradient_of.items() if number in self._division.dims
        }
        self._division.storages = set(self._sources) - recording.gradients | gradients
        return self._division

    def _follow_operator(self, event: int) -> None:
        reads = self._recording.reads[event]
        product = self._recording.products.get(event)
        if product is not None and product.right in self._origin:
            self._follow_product(event, product, self._origin[product.right])
            return
        label = self._recording.labels[event]
        if label == "aten._to_copy" and reads[0] in self._origin:  # autocast's copy of a weight
            for result in self._recording.writes[event]:
                self._origin[result] = self._origin[reads[0]]
            return
        self._follow_words(event, reads)
        parts = [mark for mark in reads if mark in self._sources]
        if not parts:
            return
        if label in _MEETING:
            self._refuse_whole_operands(reads, parts)
        self._mark_divided(event, frozenset().union(*(self._sources[mark] for mark in parts)))

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

    def _follow_product(self, event: int, product: MatrixProduct, number: int) -> None:
        output_dim = 0 if product.transposed else 1  # of a weight [N, K] or [K, N]
        if number in self._vocabulary:
            self._division.operators.add(event)
            # Hidden states times the transposed table are the logits; the other product is a gradient.
            if output_dim == 0 and product.left not in self._division.words:
                logits = [logits for logits in self._recording.writes[event] if logits >= 0]
                self._division.words.update(logits)
                self._head_bytes = max((self._result_bytes.get(mark, 0) for mark in logits), default=0)
            return
        dim = self._division.dims.get(number)
        sources = self._sources.get(product.left, frozenset())
        if dim is None:
            if not self._can_begin(number, sources):
                if sources:
                    raise _Refusal(sources)  # nothing sums the parts of this input
                return
            dim = 1 - output_dim if sources else output_dim  # a row layer if its input is divided
            self._division.dims[number] = dim
            self._blocks[number] = self._block
            if not sources and product.bias in self._origin:
                self._division.dims[self._origin[product.bias]] = 0  # a row layer's bias stays whole
        if self._phase % 2 == 0:
            counts = self._division.columns if dim == output_dim else self._division.rows
            counts[self._phase] = counts.get(self._phase, 0) + 1
        self._division.operators.add(event)
        if dim == output_dim:
            self._mark_divided(event, sources | {number})

    def _can_begin(self, number: int, sources: frozenset[int]) -> bool:
        forward = bool(self._block) and self._phase % 2 == 0  # outside blocks the vocabulary alone is divided
        same_block = all(self._blocks[source] == self._block for source in sources)
        return forward and same_block and len(self._shapes[number]) == 2 and number not in self._whole

    def _refuse_whole_operands(self, reads: Sequence[int], parts: Sequence[int]) -> None:
        size = max(self._sizes.get(mark, 0) for mark in parts)  # smaller ones are broadcast, such as a bias
        others = [mark for mark in reads if mark not in self._sources and mark >= 0]
        # Backward, gradients of what both kinds of layers read meet in whatever order autograd has.
        if self._phase % 2 == 0 and any(self._sizes.get(mark, 0) >= size for mark in others):
            raise _Refusal(frozenset().union(*(self._sources[mark] for mark in parts)))

    def _mark_divided(self, event: int, sources: frozenset[int]) -> None:
        self._division.operators.add(event)
        for result in self._recording.writes[event]:
            if result >= 0:  # not into a given tensor
                self._sources[result] = sources
