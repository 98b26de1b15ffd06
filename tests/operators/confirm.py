"""Confirmation of a rule: one call on the pieces of simulated ranks against the whole call, forward and gradients.

A confirmed rule may still be wrong for other values: rules are declared, and this finds the mistakes of a declaration. Values
should be typical of the call: random parameters, indices from the whole of their range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from atorch_ns.capture.graph.call import Call, TensorSpec
from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.errors import InputError
from atorch_ns.operators.divided import kernels
from atorch_ns.operators.rules.rule import WHOLE, Placement, Rule
from atorch_ns.operators.rules.table import RUN_AS
from atorch_ns.operators.rules.views import size_argument
from atorch_ns.sharding.collectives import Group, simulate

TOLERANCE = 1e-5
"""Of the largest value of a result, or of the largest gradient of the call."""

_NO_CHANCE = {"p": 0.0, "dropout_p": 0.0}
"""Arguments with which operators that drop elements drop none."""


def call_of(operator: Callable[..., Any], *arguments: Any, **keywords: Any) -> Call:
    """The call of an operator on real tensors."""
    args, kwargs = map_tensors(_spec, arguments), map_tensors(_spec, keywords)
    return Call(operator, args, kwargs, tuple(map(_spec, tensors_of(operator(*arguments, **keywords)))))


def confirm(
    call: Call,
    rule: Rule,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    degree: int,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Runs a call whole, and by a rule on ``degree`` simulated ranks, and compares.

    Operators that drop elements run without dropping any. Of other random ones, and of those that leave their results
    uninitialised, the shapes are compared alone.

    Args:
        arguments, keywords: what the whole call takes: tensors of the shapes in ``call``, and numbers. Gradients
            of those that require one are compared.
        tolerance: the largest difference, relative to the largest value of a result or to the largest gradient.

    Raises:
        InputError: naming the operator, the rule, the shapes and the difference, if they differ.
    """
    arguments, keywords = _without_chance(call, arguments, dict(keywords))
    tensors = tensors_of((arguments, tuple(keywords.values())))
    devices = [tensor.device for tensor in tensors]
    if any(isinstance(where, Partial) for where in rule.inputs):  # summands are larger than their sum
        tensors = [_in_full_precision(tensor) for tensor in tensors]
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        torch.manual_seed(0)
        whole = _Run.of(call.operator, (arguments, keywords), tensors, None, None)
        pieces = [_pieces(one, where, degree) for one, where in zip(tensors, rule.inputs, strict=True)]
        given = [
            _pieces(one, _adjoint(where), degree)
            for one, where in zip(whole.given, rule.outputs, strict=True)
        ]
        local = _local_sizes(call, rule, arguments, keywords, degree)

        def run(group: Group) -> _Run:
            own, above = ([each[group.rank()] for each in side] for side in (pieces, given))
            return _Run.of(_target(call, rule, group), local, own, above, whole)

        try:
            ranks = simulate(degree, run, devices[0] if devices else torch.device("cpu"))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise _refused(call, rule, degree, f"the operator fails on pieces: {error}") from error
    for what, expected, copies, scale in _compared(call, rule, whole, ranks):
        for found in copies:
            problem = _difference(expected, found, scale, tolerance)
            if problem:
                raise _refused(call, rule, degree, f"{what} {problem}")


@dataclass(frozen=True)
class _Run:
    """A call that has run forward and backward.

    Attributes:
        results: its results.
        given: the gradients of the results from which the backward pass began; random ones for the whole call.
        gradients: the gradients of its tensor arguments, ``None`` for those without.
    """

    results: list[torch.Tensor]
    given: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    @classmethod
    def of(
        cls,
        target: Callable[..., Any],
        arguments: Any,
        tensors: Sequence[torch.Tensor],
        given: list[torch.Tensor] | None,
        whole: _Run | None,
    ) -> _Run:
        leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in tensors]
        queue = iter(leaves)
        args, kwargs = map_tensors(lambda _: next(queue), arguments)
        results = tensors_of(target(*args, **kwargs))
        if given is None:
            given = [torch.randn_like(one) if one.is_floating_point() else one for one in results]
        pairs = [(one, above) for one, above in zip(results, given, strict=True) if one.requires_grad]
        if pairs and all(one.shape == above.shape for one, above in pairs):
            torch.autograd.backward([one for one, _ in pairs], [above for _, above in pairs])
        gradients = [
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) if leaf.requires_grad else None
            for leaf in leaves
        ]
        return cls([one.detach() for one in results], given, gradients)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _in_full_precision(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.detach().double().requires_grad_(tensor.requires_grad)
        if tensor.is_floating_point()
        else tensor
    )


def _names(call: Call) -> list[str]:
    return [one.name for one in call.operator._schema.arguments]  # type: ignore[attr-defined]


def _without_chance(
    call: Call, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if torch.Tag.nondeterministic_seeded not in getattr(call.operator, "tags", ()):
        return arguments, keywords
    args = tuple(_NO_CHANCE.get(name, value) for name, value in zip(_names(call), arguments, strict=False))
    return args, {name: _NO_CHANCE.get(name, value) for name, value in keywords.items()}


def _is_arbitrary(call: Call) -> bool:
    """Whether results are random, or those of old memory."""
    random = torch.Tag.nondeterministic_seeded in getattr(call.operator, "tags", ())
    return "empty" in call.name or (random and not _NO_CHANCE.keys() & set(_names(call)))


def _target(call: Call, rule: Rule, group: Group) -> Callable[..., Any]:
    if not rule.divides:
        return call.operator
    target = RUN_AS.get(call.operator, call.operator)
    if not rule.kernel:
        return target
    kernel = getattr(kernels, rule.kernel)
    return lambda *args, **kwargs: kernel(group, rule, target, *args, **kwargs)


def _local_sizes(
    call: Call, rule: Rule, arguments: tuple[Any, ...], keywords: Mapping[str, Any], degree: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with the size of a result's divided dimension divided."""
    args, kwargs = list(arguments), dict(keywords)
    where = rule.outputs[0] if rule.outputs else WHOLE
    found = size_argument(call) if isinstance(where, Shard) else None
    if found is not None and isinstance(where, Shard):
        name, position, offset = found
        sizes = list(kwargs[name] if name in kwargs else args[position])
        if sizes[where.dim - offset] != -1:
            sizes[where.dim - offset] //= degree
        if name in kwargs:
            kwargs[name] = sizes
        else:
            args[position] = sizes
    return tuple(args), kwargs


def _adjoint(placement: Placement) -> Placement:
    return WHOLE if isinstance(placement, Partial) else placement


def _pieces(tensor: torch.Tensor, placement: Placement, degree: int) -> list[torch.Tensor]:
    """What each rank holds of a tensor; random summands of a partial sum."""
    if isinstance(placement, Shard):
        return list(tensor.chunk(degree, placement.dim))
    if isinstance(placement, Replicate):
        return [tensor] * degree
    summands = [torch.randn_like(tensor) for _ in range(degree - 1)]
    return [tensor - sum(summands), *summands]


def _compared(
    call: Call, rule: Rule, whole: _Run, ranks: Sequence[_Run]
) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor], float | None]]:
    """What is compared: its name, the whole, what ranks have in its place, and its scale; none if shapes alone count."""
    arbitrary = _is_arbitrary(call)
    for number, (expected, where) in enumerate(zip(whole.results, rule.outputs, strict=True)):
        parts = [rank.results[number] for rank in ranks]
        scale = None if arbitrary else _largest([expected])
        yield f"result {number}", expected, _joined(parts, where, summed=isinstance(where, Partial)), scale
    largest = _largest([one for one in whole.gradients if one is not None])
    for number, (gradient, where) in enumerate(zip(whole.gradients, rule.inputs, strict=True)):
        if gradient is not None:
            parts = [part for rank in ranks if (part := rank.gradients[number]) is not None]
            joined = _joined(parts, where, summed=rule.divides and isinstance(where, Replicate))
            yield f"the gradient of tensor {number}", gradient, joined, None if arbitrary else largest


def _joined(parts: list[torch.Tensor], placement: Placement, *, summed: bool) -> list[torch.Tensor]:
    """The whole that ranks' parts make, or all their copies of it."""
    if isinstance(placement, Shard):
        return [torch.cat(parts, placement.dim)] if parts[0].dim() else parts
    return [torch.stack(parts).sum(0)] if summed else parts


def _largest(tensors: Sequence[torch.Tensor]) -> float:
    finite = (one[one.isfinite()].to(torch.complex128) for one in tensors)
    return max([*(float(one.abs().max()) for one in finite if one.numel()), 1e-30])


def _difference(expected: torch.Tensor, found: torch.Tensor, scale: float | None, tolerance: float) -> str:
    """How far two tensors are apart, in words; empty if they are not, or if shapes alone count and are equal."""
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)} in place of {list(expected.shape)}"
    same = (found == expected) | (found.isnan() & expected.isnan())
    if scale is None or same.all():
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"differs at {int((~same).sum())} places"
    apart = float((found - expected)[~same].abs().max()) / scale
    return "" if apart <= tolerance else f"differs by {apart:.1e} of the largest value"


def _refused(call: Call, rule: Rule, degree: int, why: str) -> InputError:
    shapes = " × ".join(str(list(spec.shape)) for spec in call.tensors) or "nothing"
    return InputError(
        f"The rule '{rule}' of {call.name} on {shapes} is wrong over {degree} ranks: {why}. Correct the rule, or leave it out."
    )
