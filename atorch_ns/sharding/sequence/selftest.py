"""Self-test of sequence parallelism: finds the plan with which a block's parts give its whole result.

A plan is a guess: which arguments are the sequence's, which numbers are positions. Each candidate runs a
small input on simulated ranks in this process. Its results and gradients are compared with those of the whole
block. The first that gives the same is used; a block without one cannot be divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, TypeVar

import torch
from torch import nn

from atorch_ns.capture.nests import Path, copied_state, leaves, map_leaves, path_text
from atorch_ns.capture.random_states import BatchNorm
from atorch_ns.cluster import agree, gather_values, or_refusal
from atorch_ns.errors import InputError
from atorch_ns.sharding.collectives import SimulatedGroup, simulate, total
from atorch_ns.sharding.compare import (
    InFloat32,
    copy_to_run,
    gradient_floor,
    gradients_of,
    relative_error,
    weighted_sum,
)
from atorch_ns.sharding.rank_context import call_in_thread, local_part
from atorch_ns.sharding.sequence.attention import heads_divide
from atorch_ns.sharding.sequence.block_calls import USE_SDPA, DividedCalls, SeenCalls
from atorch_ns.sharding.sequence.plan import (
    AttentionKind,
    BlockPlan,
    Numbers,
    SequenceLayout,
    SequenceSettings,
    divide_arguments,
    find_hidden,
    gather_results,
    sequence_dims,
)
from atorch_ns.text import error_text

T = TypeVar("T")

_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# In units of the largest value: rounding gives 1e-6, a wrong position or a lost gradient 1e-1.
_TOLERANCE: Final = 1e-3

# Positions per rank in the test, preferred first. All are even and unlike common model sizes.
_LOCAL_LENGTHS: Final = (22, 26, 14, 10, 6, 34, 38, 4, 2, 8)
_ROWS: Final = 2  # samples in the test
_MOST_SITES: Final = 5  # the most position numbers in a block that are guessed one by one


@dataclass(frozen=True, kw_only=True)
class TestedBlock:
    """A block to be tested.

    Attributes:
        name: its path in the model.
        block: a copy used for nothing else, with weights equal on all ranks of the group.
        arguments: ``(args, kwargs)`` of a real call, whole; the hidden states may have any length.
        length: the number of positions in the other arguments.
        zigzag: whether the sequence is in zigzag; ``None`` while undecided.
        may_stay_whole: whether a block that cannot be divided is not an error.
    """

    name: str
    block: nn.Module
    arguments: Any
    length: int
    zigzag: bool | None
    may_stay_whole: bool
    settings: SequenceSettings


@dataclass(frozen=True)
class _Outcome:
    """The results of a run on a whole sequence, and gradients by the name of their input or parameter."""

    output: Any
    gradients: Mapping[str, torch.Tensor]


Found = tuple[BlockPlan, bool]
"""A plan, and whether the sequence is in zigzag."""


def find_block_plan(subject: TestedBlock) -> Found | InputError:
    """Finds the plan with which a block computes the same on parts as on the whole. Collective.

    Returns:
        The plan. If the block may stay whole, the reason why there is no plan on any rank.

    Raises:
        InputError: if there is no plan. The message says what was tried and what to change.
        RankError: if another rank found none.
    """
    group = subject.settings.group

    def settle(action: Callable[[], T]) -> T:
        what = f"testing {subject.name} on parts of a sequence"
        return agree(action, what=what, distributed=True, group=group)

    if not subject.may_stay_whole:
        return call_in_thread(lambda: settle(lambda: _try_all(subject)), subject.settings.device)
    outcome = call_in_thread(
        lambda: settle(lambda: or_refusal(lambda: _try_all(subject))), subject.settings.device
    )
    # A block is whole on every rank or divided on every rank. If ranks differ, all fail together.
    refusing = gather_values(isinstance(outcome, InputError), distributed=True, group=group)
    return settle(lambda: _plan_of(outcome)) if any(refusing) and not all(refusing) else outcome


def _plan_of(outcome: Found | InputError) -> Found:
    if isinstance(outcome, InputError):
        raise outcome
    return outcome


def _try_all(subject: TestedBlock) -> Found:
    norms = [name for name, module in subject.block.named_modules() if isinstance(module, BatchNorm)]
    if norms:
        raise InputError(
            f"sequence_parallel cannot divide {subject.name} ({type(subject.block).__name__}): {norms[0]} is a batch "
            "norm, which would take the statistics of a part of the sequence. Use the axes data, zero or pipeline, or "
            "name in blocks modules without batch norms."
        )
    with InFloat32():
        whole, calls, arguments, length = _run_whole(subject)
    best: tuple[float, str] = (float("inf"), "")  # the least error so far, and where it is
    for plan, zigzag in candidates(subject, calls, arguments, length):
        error, full_plan, why = _error_of(subject, plan, (length, zigzag), arguments, whole=whole)
        if error <= _TOLERANCE:
            return full_plan, zigzag
        if error < best[0] or not best[1]:
            best = (error, why)
    raise InputError(_refusal_message(subject, calls, *best))


def _run_whole(subject: TestedBlock) -> tuple[_Outcome, SeenCalls, Any, int]:
    failure: Exception | None = None
    for length, few_rows, squares in itertools.product(
        lengths_to_test(subject), (True, False), (True, False)
    ):
        arguments = small_arguments(subject, length, squares=squares, few_rows=few_rows)
        calls = SeenCalls(length)
        try:
            call_args = copied_state(arguments)  # a run may write into a cache
            with calls:
                output = subject.block(*call_args[0], **call_args[1])
            return _compute_outcome(subject.block, output, arguments), calls, arguments, length
        except Exception as error:  # the user's block may raise anything: a table may end, a view not fit
            failure = error if failure is None or (squares and few_rows) else failure
    # The error kept is that of few samples with squares as masks, at the last length.
    assert failure is not None  # there is a length to test
    raise InputError(
        f"sequence_parallel tests {subject.name} on a small input before it divides it, and the block "
        f"fails on it undivided: {error_text(failure)}"
    ) from failure


def _compute_outcome(block: nn.Module, output: Any, arguments: Any) -> _Outcome:
    floats = (leaf for _, leaf in leaves(output) if _is_trained(leaf) and leaf.is_floating_point())
    loss = weighted_sum(floats, seed=1)
    if loss is None:
        raise ValueError("the block returns no tensor that depends on its input")
    targets = {path_text(path): leaf for path, leaf in leaves(arguments) if _is_trained(leaf)}
    weights_of = {name: p for name, p in block.named_parameters() if p.requires_grad}
    variables = {**{f"input {name}": leaf for name, leaf in targets.items()}, **weights_of}
    local_grads = map(local_part, gradients_of(loss, list(variables.values())))  # weights may be DTensors
    values = map_leaves(lambda _, leaf: leaf.detach() if _is_tensor(leaf) else leaf, output)
    return _Outcome(values, dict(zip(variables, local_grads, strict=True)))


def _error_of(
    subject: TestedBlock, plan: BlockPlan, sizes: tuple[int, bool], arguments: Any, *, whole: _Outcome
) -> tuple[float, BlockPlan, str]:
    length, zigzag = sizes
    settings = subject.settings

    def run(group: SimulatedGroup) -> tuple[BlockPlan, _Outcome]:
        layout = SequenceLayout(length, group.size(), group.rank(), zigzag)
        block = copy_to_run(subject.block)
        with InFloat32():
            return _run_divided(block, plan, layout, copied_state(arguments), whole=whole, group=group)

    try:
        ranks = simulate(settings.group.size(), run, settings.device)
    except Exception as failure:  # a wrong guess fails in whatever way the block's code does
        return float("inf"), plan, f"it raises {error_text(failure)}"
    # The worst rank decides. The plan is completed by what this rank's run has shown.
    error, why = max((_compare_outcomes(whole, outcome) for _, outcome in ranks), key=itemgetter(0))
    return error, ranks[settings.group.rank()][0], why


def _run_divided(
    block: nn.Module,
    plan: BlockPlan,
    layout: SequenceLayout,
    arguments: Any,
    *,
    whole: _Outcome,
    group: SimulatedGroup,
) -> tuple[BlockPlan, _Outcome]:
    args, kwargs = divide_arguments(arguments, plan, layout, group)
    with DividedCalls(plan, layout, group) as calls:
        output = block(*args, **kwargs)
    calls.check()
    plan = replace(
        plan,
        crossed=frozenset(calls.crossed),
        products=calls.products,
        outputs=_divided_outputs(output, whole.output, layout),
    )
    outcome = _compute_outcome(block, gather_results(output, plan, layout, group), arguments)
    # Weights: the mean over ranks. Inputs: every rank has the whole gradient.
    gradients = {
        name: gradient if name.startswith("input ") else total(gradient, group) / group.size()
        for name, gradient in outcome.gradients.items()
    }
    return plan, replace(outcome, gradients=gradients)


def _divided_outputs(output: Any, whole: Any, layout: SequenceLayout) -> dict[Path, int]:
    shapes = {path: leaf.shape for path, leaf in leaves(whole) if _is_tensor(leaf)}
    dims: dict[Path, int] = {}
    for path, leaf in leaves(output):
        if not _is_tensor(leaf) or path not in shapes:
            continue
        shape = shapes[path]
        # A part is L long in exactly one dimension, where the whole result is T long.
        differing = [dim for dim, size in enumerate(leaf.shape) if dim < len(shape) and size != shape[dim]]
        if len(differing) == 1 and leaf.size(differing[0]) == layout.local:
            dims[path] = differing[0]
    return dims


def _compare_outcomes(whole: _Outcome, actual: _Outcome) -> tuple[float, str]:
    outputs = dict(leaves(actual.output))
    errors = {
        f"result {path or ''}": relative_error(outputs.get(path), leaf)
        for path, leaf in leaves(whole.output)
        if _is_tensor(leaf) and leaf.is_floating_point()
    }
    floor = gradient_floor(whole.gradients.values())
    for name, gradient in whole.gradients.items():
        errors[f"the gradient of {name}"] = relative_error(actual.gradients.get(name), gradient, floor=floor)
    where = max(errors, key=errors.__getitem__)
    return errors[where], f"{where} is off by {errors[where]:.1e}"


def _refusal_message(subject: TestedBlock, calls: SeenCalls, error: float, why: str) -> str:
    kind = type(subject.block).__name__
    head = (
        f"sequence_parallel cannot divide {subject.name} ({kind}) over {subject.settings.group.size()} ranks: on a small "
        f"input it does not give on parts what it gives on the whole; {why}."
    )
    convolves = any(isinstance(module, _CONVOLUTIONS) for module in subject.block.modules())
    if calls.attentions and convolves:
        return (
            f"{head} Beside its attention it has convolutions, which mix neighbouring positions, as recurrences do. Use the "
            "axes data, zero or pipeline, or name in blocks those that only attend."
        )
    if calls.attentions:
        return (
            f"{head} Its code may count positions from 0 in each part: pass position ids or rotary tables into the "
            "block, put another module in with module_replace, or name other modules in blocks."
        )
    if convolves:
        return (
            f"{head} It is made of convolutions, which mix neighbouring positions: there are no tokens that ranks could "
            "share. Use the axes data, zero or pipeline. If only some modules attend, name those in blocks."
        )
    if calls.products:
        return (
            f"{head} It writes its attention out as matrix products, and keys and values of all ranks are not all that "
            f"it needs: its code may count positions from 0 in each part. {USE_SDPA}"
        )
    return (
        f"{head} No attention that can be divided was seen in it: no call of "
        "torch.nn.functional.scaled_dot_product_attention and no matrix product of all positions with all. If it mixes "
        "positions in another way, such as a recurrence, use the axes data, zero or pipeline. If it is not an attention "
        "block, name those that are in blocks."
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def candidates(
    subject: TestedBlock, calls: SeenCalls, arguments: Any, length: int
) -> Iterator[tuple[BlockPlan, bool]]:
    """Plans to try for a block, likeliest first, each with whether the sequence is in zigzag."""
    hidden = find_hidden(arguments, subject.settings.dim)
    assert hidden is not None
    divisions = [
        division
        for squares in (True, False)
        for division in _candidate_divisions(
            arguments, hidden, length, subject.settings.dim, squares=squares, rows=bool(calls.products)
        )
    ]
    for kind in _candidate_kinds(subject, calls):
        # Zigzag balances ring attention under a causal mask. Blocks tested before have decided for all.
        default = (
            kind == "ring" and subject.settings.balanced and any(call.causal for call in calls.attentions)
        )
        zigzag = default if subject.zigzag is None else subject.zigzag
        for sites, dims in itertools.product(_candidate_numberings(calls), _unique_values(divisions)):
            plan = BlockPlan(kind=kind, divided=dims, sites=sites)
            yield replace(plan, products=calls.products, num_products=calls.num_products), zigzag


def _unique_values(values: Sequence[T]) -> list[T]:
    return [value for index, value in enumerate(values) if value not in values[:index]]  # unhashable


def _candidate_numberings(calls: SeenCalls) -> list[Mapping[int, Numbers]]:
    sites = sorted(calls.sites)
    if not sites:
        return [{}]
    # A site may be unrelated to positions, or number this rank's positions or all positions.
    same: list[Mapping[int, Numbers]] = [{}, dict.fromkeys(sites, "own"), dict.fromkeys(sites, "whole")]
    if 1 < len(sites) <= _MOST_SITES:
        choices: tuple[Numbers, ...] = ("own", "whole")
        same += [
            dict(zip(sites, choice, strict=True)) for choice in itertools.product(choices, repeat=len(sites))
        ]
    return _unique_values(same)


def _candidate_kinds(subject: TestedBlock, calls: SeenCalls) -> tuple[AttentionKind, ...]:
    self_calls = [call for call in calls.attentions if call.query.size(-2) == call.key.size(-2)]
    kind = subject.settings.kind
    if calls.products and kind != "auto":
        raise InputError(
            f"sequence_parallel: {subject.name} ({type(subject.block).__name__}) writes its attention out as matrix "
            f"products, which kind={kind!r} cannot divide. Use kind='auto', which gathers keys and values. {USE_SDPA}"
        )
    if kind != "auto":
        return (kind,)
    if calls.products and not self_calls:
        return ("gather",)  # no attention call of the sequence
    # Heads that the tensor axis is still to divide must divide by both degrees.
    ranks = subject.settings.group.size()
    return (
        ("ulysses",)
        if all(heads_divide(call, ranks * subject.settings.head_share) for call in self_calls)
        else ("ring",)
    )


def _candidate_divisions(
    arguments: Any, hidden: tuple[Path, torch.Tensor], length: int, dim: int, *, squares: bool, rows: bool
) -> list[dict[Path, int]]:
    path, states = hidden
    others: dict[Path, int] = {}  # numbers of positions, tables, masks [B, T]
    streams: dict[Path, int] = {}  # like hidden states of another sequence: whole at first
    biases: dict[Path, int] = {}  # trained, so that each rank trains the rows of its queries
    masks: dict[Path, int] = {}  # whole at first, unless attention is written out
    for leaf_path, leaf in leaves(arguments):
        if leaf_path == path or not isinstance(leaf, torch.Tensor):
            continue
        dims = sequence_dims(leaf, length, dim, squares=squares)
        # A mask [..., 1, T] is of keys, which attention sees whole: it is not divided.
        if len(dims) == 1 and not (leaf.dim() >= 3 and dims[0] == leaf.dim() - 1):
            is_stream = leaf.is_floating_point() and leaf.dim() == states.dim() and leaf.shape == states.shape
            (streams if is_stream else others)[leaf_path] = dims[0]
        elif leaf.dim() >= 3 and leaf.size(-2) == length:
            (biases if leaf.requires_grad else masks)[leaf_path] = leaf.dim() - 2
    divisions: list[dict[Path, int]] = []
    choices = [biases, {}, {**biases, **masks}]
    for those in reversed(choices) if rows else choices:
        divisions += [
            {path: dim, **others, **those},
            {path: dim, **others, **streams, **those},
            {path: dim, **those},
        ]
    return _unique_values(divisions)


def lengths_to_test(subject: TestedBlock) -> list[int]:
    """Lengths to test with: some whose parts differ from all sizes in the block, and the real one."""
    ranks = subject.settings.group.size()
    sizes = {size for tensor in subject.block.parameters() for size in tensor.shape}
    others = [
        leaf
        for path, leaf in leaves(subject.arguments)
        if isinstance(leaf, torch.Tensor) and sequence_dims(leaf, subject.length, subject.settings.dim)
    ]
    rigid = len(others) > 1  # besides the hidden states something has the length, and can only be shortened
    # A part must be unlike all sizes of weights, or a reshape by the wrong one might pass.
    lengths = [
        local * ranks
        for local in _LOCAL_LENGTHS
        if not any(size % local == 0 for size in sizes) and not (rigid and local * ranks > subject.length)
    ]
    short = [length for length in lengths if length <= subject.length]  # a table may have no more rows
    return list(dict.fromkeys([*lengths[:2], *short[:2], subject.length]))


def small_arguments(subject: TestedBlock, length: int, *, squares: bool, few_rows: bool = True) -> Any:
    """The arguments with ``length`` positions; hidden states are random, equal on all ranks.

    Args:
        squares: whether a tensor with two dimensions of the sequence length is a mask.
        few_rows: whether to drop samples from tensors that have one row per sample.
    """
    entry = find_hidden(subject.arguments, subject.settings.dim)
    assert entry is not None
    hidden_path, hidden = entry
    rows = hidden.size(0) if subject.settings.dim > 0 else 0
    generator = torch.Generator().manual_seed(0)

    def make(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copied_state(leaf)
        if path == hidden_path:
            shape = list(hidden.shape)
            shape[subject.settings.dim] = length
            if rows and few_rows:
                shape[0] = min(rows, _ROWS)
            random = torch.randn(shape, generator=generator, dtype=torch.float32)
            return random.to(subject.settings.device).requires_grad_()
        small = leaf.detach()
        for dim in sequence_dims(leaf, subject.length, subject.settings.dim, squares=squares):
            small = small.narrow(dim, 0, length)
        if few_rows and rows > _ROWS and small.dim() > 0 and small.size(0) == rows:
            small = small.narrow(0, 0, _ROWS)
        small = small.to(subject.settings.device, copy=True)
        if not small.is_floating_point():
            return small
        return small.float().requires_grad_(leaf.requires_grad)

    return map_leaves(make, subject.arguments)
