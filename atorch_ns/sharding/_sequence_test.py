"""Finding out how a block runs on a part of the sequence, and proving it against the whole block.

A plan is a guess: which arguments are the sequence's, which numbers are positions. Each candidate runs a small
input on the real group, and its results and gradients are held against those of the block as it is. The first
that gives the same is used; a block for which none does cannot be divided.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.sharding._divided_calls import DividedCalls, SeenCalls
from atorch_ns.sharding._isolated import isolated
from atorch_ns.sharding._nested import Path, leaves, map_leaves, path_text
from atorch_ns.sharding._sequence_arguments import divide_arguments, gather_results
from atorch_ns.sharding._sequence_candidates import (
    Subject,
    candidates,
    lengths_to_test,
    small_arguments,
    unshared,
)
from atorch_ns.sharding._sequence_layout import SequenceLayout
from atorch_ns.sharding._sequence_plan import BlockPlan

__all__ = ["find_block_plan"]

_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TOLERANCE: Final = 1e-3
"""Of the largest value; rounding gives 1e-6, a wrong position or a lost gradient 1e-1."""


@dataclass(frozen=True)
class _Outcome:
    """Results and gradients of a run on a whole sequence; gradients by what they are of."""

    output: Any
    gradients: Mapping[str, torch.Tensor]


def find_block_plan(subject: Subject) -> tuple[BlockPlan, bool]:
    """The plan by which a block gives on parts what it gives on the whole, and whether in zigzag; collective.

    Raises:
        InputError: if there is none; the message says what was tried and what to change.
    """
    return isolated(lambda: _try_all(subject), subject.device)


def _try_all(subject: Subject) -> tuple[BlockPlan, bool]:
    whole, seen, arguments, length = _run_whole(subject)
    best: tuple[float, str] = (float("inf"), "")
    for plan, zigzag in candidates(subject, seen, arguments, length):
        layout = SequenceLayout(length, subject.group.size(), subject.group.rank(), zigzag)
        error, found, why = _error_of(subject, plan, layout, arguments, whole)
        if error <= _TOLERANCE:
            return found, zigzag
        if error < best[0] or not best[1]:
            best = (error, why)
    raise InputError(_refusal(subject, seen, *best))


def _run_whole(subject: Subject) -> tuple[_Outcome, SeenCalls, Any, int]:
    """The block as it is, on the first of several small inputs that it takes."""
    failure: Exception | None = None
    for length, squares in itertools.product(lengths_to_test(subject), (True, False)):
        arguments = small_arguments(subject, length, squares=squares)
        seen = SeenCalls(length)
        try:
            given = _for_one_run(arguments)
            with seen:
                output = subject.block(*given[0], **given[1])
            return _outcome(subject, output, arguments), seen, arguments, length
        except Exception as error:  # what a user's block raises is its own; a table may end, a view not fit
            failure = error if failure is None or squares else failure
    raise InputError(
        f"sequence_parallel tests {subject.name} on a small input before it divides it, and the block "
        f"fails on it undivided: {type(failure).__name__}: {failure}"
    ) from failure


def _for_one_run(arguments: Any) -> Any:
    """The same tensors, and copies of all else: what a run writes into a cache, the next one may not read."""
    return map_leaves(arguments, lambda _, leaf: leaf if _is_tensor(leaf) else unshared(leaf))


def _outcome(subject: Subject, output: Any, arguments: Any) -> _Outcome:
    """The gradients of a weighted sum of the floating results."""
    generator = torch.Generator().manual_seed(1)
    total: torch.Tensor | None = None
    for _, leaf in leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            weights = torch.randn(leaf.shape, generator=generator).to(leaf)
            summand = (leaf * weights).sum()
            total = summand if total is None else total + summand
    if total is None:
        raise ValueError("the block returns no tensor that depends on its input")
    targets = {path_text(path): leaf for path, leaf in leaves(arguments) if _is_trained(leaf)}
    weights_of = {name: p for name, p in subject.block.named_parameters() if p.requires_grad}
    named = {**{f"input {name}": leaf for name, leaf in targets.items()}, **weights_of}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(_local(tensor)) if grad is None else _local(grad)
        for (name, tensor), grad in zip(named.items(), found, strict=True)
    }
    return _Outcome(
        map_leaves(output, lambda _, leaf: leaf.detach() if _is_tensor(leaf) else leaf), gradients
    )


def _error_of(
    subject: Subject, plan: BlockPlan, layout: SequenceLayout, arguments: Any, whole: _Outcome
) -> tuple[float, BlockPlan, str]:
    """How far the block on parts is from the whole, at most over the ranks; collective."""
    error, why = float("inf"), ""
    try:
        plan, outcome = _run_divided(subject, plan, layout, _for_one_run(arguments), whole)
        error, why = _compare(whole, outcome)
    except Exception as failure:  # a wrong guess fails in whatever way the block's code does
        why = f"it raises {type(failure).__name__}: {failure}"
    worst = torch.tensor(error, device=subject.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=subject.group)
    return float(worst), plan, why


def _run_divided(
    subject: Subject, plan: BlockPlan, layout: SequenceLayout, arguments: Any, whole: _Outcome
) -> tuple[BlockPlan, _Outcome]:
    group = subject.group
    args, kwargs = divide_arguments(arguments, plan, layout, group)
    with DividedCalls(plan, layout, group) as calls:
        output = subject.block(*args, **kwargs)
    plan = replace(
        plan, crossed=frozenset(calls.crossed), outputs=_divided_outputs(output, whole.output, layout)
    )
    outcome = _outcome(subject, gather_results(output, plan, layout, group), arguments)
    for name, gradient in outcome.gradients.items():
        if not name.startswith("input "):
            dist.all_reduce(gradient, group=group)
            gradient /= group.size()
    return plan, outcome


def _divided_outputs(output: Any, whole: Any, layout: SequenceLayout) -> dict[Path, int]:
    """Which results are parts: those that are L long where the whole one is T."""
    shapes = {path: leaf.shape for path, leaf in leaves(whole) if _is_tensor(leaf)}
    found: dict[Path, int] = {}
    for path, leaf in leaves(output):
        if not _is_tensor(leaf) or path not in shapes:
            continue
        expected = shapes[path]
        differing = [
            dim for dim, size in enumerate(leaf.shape) if dim < len(expected) and size != expected[dim]
        ]
        if len(differing) == 1 and leaf.size(differing[0]) == layout.local:
            found[path] = differing[0]
    return found


def _compare(whole: _Outcome, found: _Outcome) -> tuple[float, str]:
    """The largest deviation relative to the largest value, and of what."""
    worst, where = 0.0, ""
    outputs = dict(leaves(found.output))
    for path, leaf in leaves(whole.output):
        if _is_tensor(leaf) and leaf.is_floating_point():
            error = _deviation(outputs.get(path), leaf, 0.0)
            if error > worst:
                worst, where = error, f"result {path or ''} is off by {error:.1e}"
    largest = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
    for name, gradient in whole.gradients.items():
        error = _deviation(found.gradients.get(name), gradient, largest)
        if error > worst:
            worst, where = error, f"the gradient of {name} is off by {error:.1e}"
    return worst, where


def _deviation(found: Any, expected: torch.Tensor, largest: float) -> float:
    if not _is_tensor(found) or found.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), 1e-2 * largest, 1e-12)
    error = float((found - expected).abs().max()) / scale
    return error if error == error else float("inf")


def _refusal(subject: Subject, seen: SeenCalls, error: float, why: str) -> str:
    kind = type(subject.block).__name__
    head = (
        f"sequence_parallel cannot divide {subject.name} ({kind}) over {subject.group.size()} ranks: on a small "
        f"input it does not give on parts what it gives on the whole; {why}."
    )
    if not seen.attentions and any(isinstance(module, _CONVOLUTIONS) for module in subject.block.modules()):
        return (
            f"{head} It is made of convolutions, which mix neighbouring positions: there are no tokens that ranks could "
            "share. Use the axes data, zero or pipeline. If only some modules attend, name those in blocks."
        )
    if not seen.attentions:
        return (
            f"{head} It makes no call of torch.nn.functional.scaled_dot_product_attention, the one attention that "
            "can be divided: build transformers' models with attn_implementation='sdpa', or put another attention "
            "in with module_replace. If it is no attention block, name those that are in blocks."
        )
    return (
        f"{head} Its code may count positions from 0 in each part: pass position ids or rotary tables into the "
        "block, put another module in with module_replace, or name other modules in blocks."
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
