"""Trace: the cost of one training step, segment by segment, as functions of the batch.

Legend: B samples in a rank's micro-batch, T tokens in a sample (1 for models without a sequence), N sizes.
Coefficients are columns (constant, per B, per B·T, per B·T²), the fields of :class:`Growth`. Bytes are of
tensors, as their storages count them, not of an allocator's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atorch_ns.profile.compact_states import CompactStates


def by_divisor(sizes: Sequence[int], num_samples: int, at: int) -> np.ndarray:
    """[N, 4] coefficients of sizes seen at one B, which divides only sizes that grow with the batch.

    What is a multiple of B grows with B. A multiple of B² (every sample against every other) has no
    coefficient; it is taken to grow with B so that it is right at ``at``.

    Args:
        sizes: N sizes.
        num_samples: the B of these sizes.
        at: the user's B.
    """
    exact = np.asarray(sizes, dtype=np.int64)
    whole = exact % num_samples == 0  # [N] grows with B
    square = (exact % num_samples**2 == 0) & (num_samples > 1)
    coefficients = np.zeros((len(exact), 4))
    coefficients[:, 0] = np.where(whole, 0, exact)
    coefficients[:, 1] = np.where(whole, exact / num_samples, 0)
    coefficients[:, 1] *= np.where(square & (num_samples != at), at / num_samples, 1)
    return coefficients


def by_samples(sizes: Sequence[Sequence[int]], num_samples: Sequence[int]) -> np.ndarray:
    """[N, 4] coefficients of sizes seen with two B, N sizes for each."""
    (first, second), (low, high) = np.asarray(sizes, dtype=np.float64), num_samples  # two points, a line
    coefficients = np.zeros((len(first), 4))
    coefficients[:, 1] = (second - first) / (high - low)
    coefficients[:, 0] = first - low * coefficients[:, 1]
    return coefficients


def by_lengths(parts: Sequence[np.ndarray], num_tokens: Sequence[int]) -> np.ndarray:
    """[N, 4] coefficients from those that :func:`by_divisor` found at three T; the first T is the user's.

    What grows with T but not with B (a causal mask) is taken as it is at the user's T.
    """
    slopes = np.stack([part[:, 1] for part in parts])  # [3, N] what is multiplied by B, at each T
    coefficients = np.zeros_like(parts[0])
    coefficients[:, 0] = parts[0][:, 0]
    powers = np.vander(np.asarray(num_tokens, dtype=np.float64), 3, increasing=True)  # rows (1, T, T²)
    coefficients[:, 1:] = np.linalg.solve(powers, slopes).T
    return coefficients


def values_at(coefficients: np.ndarray, num_samples: float, num_tokens: float) -> np.ndarray:
    """[N] values of [N, 4] coefficients at B and T."""
    powers = num_samples * num_tokens ** np.arange(3)  # (B, B·T, B·T²)
    values: np.ndarray = coefficients[:, 0] + coefficients[:, 1:] @ powers
    return values


def growth(
    coefficients: np.ndarray,
    inside: np.ndarray | None = None,
    at: tuple[float, float] = (1, 1),
    words: np.ndarray | None = None,
) -> Growth:
    """One row of coefficients as a :class:`Growth`; what rounding left behind is 0.

    Args:
        coefficients: the row, [4].
        inside: [4] of the part that tensor parallelism divides.
        at: the B and T at which its share is taken.
        words: [4] of the part between the head and the loss.
    """
    largest = float(np.abs(coefficients).max())
    result = Growth(*(0.0 if abs(value) < 1e-9 * largest else float(value) for value in coefficients))
    whole = float(values_at(coefficients[None], *at)[0])

    def share(of: np.ndarray | None) -> float:
        if of is None or not of.any() or whole <= 0:
            return 0.0
        return min(1.0, max(0.0, float(values_at(of[None], *at)[0]) / whole))

    return replace(result, divided=share(inside), words=share(words))


def precision_key(weights: str, autocast: str | None) -> str:
    """The key of :attr:`Segment.costs`: the weights' dtype as operators see it, and autocast's.

    Both 16-bit types cost the same, so ``float16`` is read as ``bfloat16``.

    Example:
        >>> precision_key("float32", None), precision_key("float32", "float16")
        ('float32', 'float32/bfloat16')
    """
    names = [weights.replace("float16", "bfloat16") if weights == "float16" else weights]
    if autocast is not None:
        names.append("bfloat16" if autocast == "float16" else autocast)
    return "/".join(names)


@dataclass(frozen=True)
class Growth:
    """A quantity by micro-batch: ``constant + B (per_sample + T (per_token + T per_pair))``.

    Attributes:
        constant, per_sample, per_token, per_pair: coefficients.
        divided: share of the quantity, at the sizes that were traced, that lies between layers which tensor
            parallelism divides: t ranks along its axis each have a t-th of this share.
        words: the share between the head and the loss, divided where the loss is computed on parts.
    """

    constant: float = 0.0
    per_sample: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    divided: float = 0.0
    words: float = 0.0

    def at(self, num_samples: float | np.ndarray, num_tokens: float | np.ndarray = 1) -> Any:
        """The value at B and T on one rank that divides nothing; arrays give arrays."""
        inner = self.per_sample + num_tokens * (self.per_token + num_tokens * self.per_pair)
        return self.constant + num_samples * inner

    def __add__(self, other: Growth) -> Growth:
        amount, more = abs(self.at(1)), abs(other.at(1))  # shares are averaged by the values at B = T = 1
        total = amount + more or 1.0
        return Growth(
            self.constant + other.constant,
            self.per_sample + other.per_sample,
            self.per_token + other.per_token,
            self.per_pair + other.per_pair,
            (amount * self.divided + more * other.divided) / total,
            (amount * self.words + more * other.words) / total,
        )

    def __mul__(self, factor: float) -> Growth:
        return Growth(
            self.constant * factor,
            self.per_sample * factor,
            self.per_token * factor,
            self.per_pair * factor,
            self.divided,
            self.words,
        )


@dataclass(frozen=True, kw_only=True)
class OperatorCost:
    """One kind of operator in a segment, for the plan analysis.

    Attributes:
        name: the operator's name, such as ``aten.mm``.
        count: calls, forward and backward together.
        moved: bytes read and written.
    """

    name: str
    count: int
    flops: Growth
    moved: Growth


@dataclass(frozen=True, kw_only=True)
class ForwardResult:
    """Results that selective recomputation may keep: one product with weights, or all of another operator.

    Attributes:
        name: the operator's name, such as ``aten.mm``.
        number: products with weights that ran before it in the segment.
        moved: bytes read and written by operators without floating point operations.
        size: bytes of its results.
        read_again: the part of them from which something saved for the backward pass, beside the segment's
            output, is computed: a compiled graph keeps no more.
    """

    name: str
    number: int
    flops: Growth
    moved: Growth
    size: Growth
    read_again: Growth = Growth()


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """The forward or the backward pass of one segment.

    Attributes:
        flops: floating point operations of matrix products, convolutions and attention.
        attention: the part of them in fused attention.
        operands: bytes that matrix products and convolutions read and write.
        moved: bytes that all other operators read and write.
        fused: the same where those between two products are one kernel, which reads what it does not make and
            writes what others read.
        num_operators: operators started; each costs the device its launch time.
        peak: bytes of tensors at the worst moment, beyond those that were alive when the phase began.
            Gradients of parameters are not counted.
        peaks: the peak for any micro-batch: the largest of these. :attr:`peak` is near it at the traced size.
        peaks_keeping: the same where the gradients of parameters that the phase makes are kept to its end.
        peaks_passing: the same where each of them is handed on at once, as to a bucket: it is there until the
            next operator runs.
    """

    flops: Growth
    moved: Growth
    num_operators: int
    peak: Growth
    peaks: tuple[Growth, ...] = ()
    peaks_keeping: tuple[Growth, ...] = ()
    peaks_passing: tuple[Growth, ...] = ()
    attention: Growth = Growth()
    operands: Growth = Growth()
    fused: Growth = Growth()


@dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """The cost of one instance of a segment in one precision.

    Attributes:
        saved: bytes that the forward pass leaves behind for the backward pass, its output included, copies of
            parameters in the compute dtype not.
        held: the part of ``saved`` that the backward pass does not need and local variables of the model hold
            until it returns, less what others free. A pipeline's stage has returned before others run.
        output: bytes passed to the next segment, which recomputation keeps.
        kept: bytes that are alive after its backward pass of what was made for it, less what it frees of
            others: 0 for most blocks; a block's keys and values where the model's output holds a cache of
            them.
        incoming: bytes alive when its backward pass begins, beyond what it and all segments before it have
            saved: the gradient of its output, and the model's output while a training loop holds it. What
            segments after it have freed already is taken off, so it can be negative. It is the sum of
            ``kept`` of all that runs later; of a segment with a count it is that of the last instance, and
            each instance before has one ``kept`` more.
        cast_parameters: bytes of the copies of parameters in the compute dtype, which autocast makes and
            keeps until its context ends.
        operators: kinds of operators, most expensive first.
        results: results of its forward pass, by operator.
    """

    forward: PhaseCost
    backward: PhaseCost
    saved: Growth
    output: Growth
    held: Growth = Growth()
    kept: Growth = Growth()
    incoming: Growth = Growth()
    cast_parameters: int = 0
    operators: tuple[OperatorCost, ...] = ()
    results: tuple[ForwardResult, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter of a segment.

    Attributes:
        name: relative to the segment; the full path where the segment is not a module.
        shape: the shape of the whole tensor.
        dtype: name of the torch dtype in the user's model.
        trainable: whether it requires a gradient.
        tied_to: full path of the parameter that this is another name of; such a one takes no memory.
        tensor_dim: the dim along which tensor parallelism divides it; ``None`` for one that stays whole.
        is_vocabulary: whether it is divided as part of a token embedding or a head, whose results are whole.
        is_expert: whether it belongs to experts, which expert parallelism divides along dim 0 or one by one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    tied_to: str | None = None
    tensor_dim: int | None = None
    is_vocabulary: bool = False
    is_expert: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of the forward pass: a repeated block, or the code before, between or after blocks.

    Equal blocks that follow each other are one segment with a count.

    Attributes:
        name: path of the first block, or what it is: ``"before model.layers"``, ``"after model.layers"``.
        paths: module paths of the blocks; empty for a stretch between blocks.
        block_class: class of the blocks, empty for a stretch between blocks.
        fingerprint: digest that is equal for blocks of equal structure, shapes and settings.
        parameters: parameters of one instance; for stretches between blocks, of the modules first used there.
        buffer_bytes: bytes of the buffers of one instance.
        costs: the costs of one instance, by :func:`precision_key`.
        replaced_costs: the same where modules are replaced; empty where that was not traced.
        num_columns: products in one forward pass whose weight tensor parallelism divides along its outputs.
        num_rows: the same along its inputs; the partial results of each are summed over ranks.
        num_attentions: attentions in one forward pass.
        heads: numbers of query and key heads; of several the greatest common divisor, 0 where unknown.
        head_width: features of a head of fused attention; 0 without one.
        num_queries: tokens of it that look at others, at the traced sizes; 0 where unknown.
        is_causal: whether no token of fused attention sees a later one.
        num_routed: layers of experts in one forward pass.
    """

    name: str
    paths: tuple[str, ...] = ()
    block_class: str = ""
    fingerprint: str = ""
    parameters: tuple[ParameterSpec, ...] = ()
    buffer_bytes: int = 0
    costs: Mapping[str, SegmentCost] = field(default_factory=dict)
    replaced_costs: Mapping[str, SegmentCost] = field(default_factory=dict)
    num_columns: int = 0
    num_rows: int = 0
    num_attentions: int = 0
    heads: tuple[int, int] = (0, 0)
    head_width: int = 0
    num_queries: int = 0
    is_causal: bool = False
    num_routed: int = 0

    @property
    def count(self) -> int:
        """The number of times that it runs."""
        return len(self.paths) or 1

    @property
    def is_block(self) -> bool:
        """Whether it is a run of repeated blocks."""
        return bool(self.paths)

    @property
    def parameter_names(self) -> dict[str, ParameterSpec]:
        """The parameters of all its blocks, by full name."""
        heads = [f"{path}." for path in self.paths] or [""]
        return {f"{head}{spec.name}": spec for spec in self.parameters for head in heads}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """The states of the user's optimizer, found by stepping on small parameters.

    Attributes:
        name: the name of its class.
        state_dtypes: dtype of each state of the parameter's shape, ``"same"`` for the parameter's own.
        fixed_bytes: bytes of states of a fixed size for each parameter (step counters).
        temporary_copies: tensors of the size of all gradients that a step holds at its worst moment (1 for
            foreach implementations, 0 for fused ones and loops).
        factored_dtypes: dtypes of states that keep only the rows or the columns of each matrix (Adafactor has
            one of each); rows first.
        parameter_temporaries: tensors of the size of the largest parameter that a step holds temporarily.
        fused: whether one kernel updates all parameters.
        compact: states in fewer bits, of large enough parameters; ``state_dtypes`` are of the others.
    """

    name: str
    state_dtypes: tuple[str, ...] = ("same", "same")
    fixed_bytes: int = 0
    temporary_copies: float = 0.0
    factored_dtypes: tuple[str, ...] = ()
    parameter_temporaries: float = 0.0
    fused: bool = False
    compact: CompactStates | None = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The cost of one training step.

    Attributes:
        segments: segments in the order of the forward pass; the loss is in the last one.
        num_samples: samples in the batch that was traced.
        num_tokens: tokens in each; 1 where there is no sequence.
        num_heads, num_key_value_heads, vocabulary_size: 0 where unknown.
        loss_share: share of the head's tokens whose loss is computed: below 1 where the loss is shifted.
        num_experts: experts in a mixture-of-experts layer; 0 without one.
        experts_per_token: how many of them compute each token.
        optimizer: the optimizer's states; ``None`` without an optimizer.
        how: ``"fake"`` tensors, or one ``"real"`` step for models that do not run on them.
        seconds: measured seconds by ``"<fingerprint>:<precision key>:<forward|backward>"`` on the device
            named by :attr:`timed_on`; empty where nothing was measured.
        timed_on: the device of these times.
        notes: assumptions about missing facts, as sentences.
    """

    segments: tuple[Segment, ...]
    num_samples: int
    num_tokens: int = 1
    batch_bytes: Growth = Growth()
    num_heads: int = 0
    num_key_value_heads: int = 0
    vocabulary_size: int = 0
    loss_share: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    optimizer: OptimizerSpec | None = None
    how: str = "fake"
    seconds: Mapping[str, float] = field(default_factory=dict)
    timed_on: str = ""
    notes: tuple[str, ...] = ()

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precision keys that every segment has costs for."""
        common = set.intersection(*(set(segment.costs) for segment in self.segments))
        return tuple(sorted(common))
