"""Does a layer compute the same when the calls of its experts are noted first and answered together?

Code that looks at what experts return before it calls the next one, or that reads their weights itself, would get wrong
numbers and no error, so a small input is computed both ways first, with gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from atorch_ns.errors import StepError
from atorch_ns.sharding._expert_calls import ExpertCalls, Rows, as_answered, not_answered, once_more
from atorch_ns.sharding._experts_find import ListedExperts
from atorch_ns.sharding._nested import leaves

__all__ = ["why_not_answerable"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 5e-2
_ROWS, _TOKENS = 2, 9


def why_not_answerable(listed: ListedExperts) -> str | None:
    """Why a layer cannot be divided by the calls of its experts; ``None`` if it can. Nothing is communicated."""
    with torch.enable_grad(), _evaluating(listed.layer):
        try:
            tokens, whole = _whole(listed)
        except Exception as error:  # the user's code, on an input of a guessed shape
            return f"calling it with a few tokens fails: {type(error).__name__}: {error}"
        if not all(bool(torch.isfinite(tensor).all()) for tensor in whole):
            return None  # values that were never set: nothing can be compared
        calls = ExpertCalls(str(listed))
        as_answered(listed.experts, calls)
        try:
            found = _twice(listed, calls, tokens)
        except StepError as error:
            return str(error)
        except Exception as error:  # as above: on what experts have not computed
            return f"it fails when its experts are computed together: {type(error).__name__}: {error}"
        finally:
            calls.end()
            not_answered(listed.experts)
    if found is None:
        return "its code does not call them on a few tokens"
    largest = max(float(tensor.abs().max()) for tensor in whole if tensor.numel())
    off = max(_off(mine, theirs, largest) for mine, theirs in zip(found, whole, strict=True))
    if off <= _TOLERANCE.get(tokens.dtype, _LOW_PRECISION_TOLERANCE):
        return None
    return (
        f"with its experts computed together it gives something else (off by {off:.1e} of the largest value): it may "
        "use what experts return to choose the next ones, or their weights beside their calls"
    )


def _whole(listed: ListedExperts) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens that the layer takes, and what it makes of them as it is."""
    like = next(listed.experts[0].parameters())
    sizes = [size for parameter in listed.experts[0].parameters() for size in parameter.shape]
    generator = torch.Generator().manual_seed(0)
    last: Exception | None = None
    for width in sorted(set(sizes), key=lambda size: -sizes.count(size)):
        for shape in ((_ROWS, _TOKENS, width), (_ROWS * _TOKENS, width)):
            tokens = torch.randn(shape, generator=generator).to(like).requires_grad_()
            try:
                return tokens, _results(_targets(listed, tokens), listed.layer(tokens))
            except Exception as refused:  # another shape may do
                last = refused
    assert last is not None
    raise last


def _twice(listed: ListedExperts, calls: ExpertCalls, tokens: torch.Tensor) -> list[torch.Tensor] | None:
    targets = _targets(listed, tokens)
    calls.begin()
    with once_more(listed.layer, tokens.device) as run, _hidden(listed):
        run(tokens)
    rows = calls.rows()
    if rows is None:
        return None
    calls.answer(_computed(listed, rows))
    with _hidden(listed):
        output = listed.layer(tokens)
    return _results(targets, output)


def _computed(listed: ListedExperts, rows: Rows) -> torch.Tensor:
    """All experts on their rows, in the order of the rows."""
    order = rows.experts.argsort(stable=True)
    counts = torch.bincount(rows.experts, minlength=listed.num_experts).tolist()
    pieces = rows.features[order].split(counts)
    results = [
        expert(*piece.split(rows.widths, -1))
        for expert, piece in zip(listed.experts, pieces, strict=True)
        if len(piece)
    ]
    return torch.cat(results)[order.argsort()]


def _targets(listed: ListedExperts, tokens: torch.Tensor) -> list[torch.Tensor]:
    return [tokens, *(parameter for parameter in listed.layer.parameters() if parameter.requires_grad)]


def _results(targets: list[torch.Tensor], output: Any) -> list[torch.Tensor]:
    """The floating results, and the gradients of their weighted sum."""
    generator = torch.Generator().manual_seed(1)
    found = [
        leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    total = sum((leaf * torch.randn(leaf.shape, generator=generator).to(leaf)).sum() for leaf in found)
    if not isinstance(total, torch.Tensor):
        raise TypeError("it returns no tensor of floats")
    gradients = torch.autograd.grad(total, targets, allow_unused=True)
    whole = [
        torch.zeros_like(target) if gradient is None else gradient
        for target, gradient in zip(targets, gradients, strict=True)
    ]
    return [*(leaf.detach() for leaf in found), *whole]


def _off(mine: torch.Tensor, theirs: torch.Tensor, largest: float) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    if not mine.numel():
        return 0.0
    scale = max(float(theirs.abs().max()), 1e-2 * largest, 1e-12)
    off = float((mine.double() - theirs.double()).abs().max()) / scale
    return off if off == off else float("inf")


@contextmanager
def _hidden(listed: ListedExperts) -> Iterator[None]:
    """What reads the parameters of experts gets no numbers, as it would get those of a part."""
    modules = [module for expert in listed.experts for module in expert.modules()]
    kept = [(module, dict(module._parameters)) for module in modules]
    try:
        for module, parameters in kept:
            for key, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(torch.full_like(parameter, float("nan")))
        yield
    finally:
        for module, parameters in kept:
            module._parameters.update(parameters)


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    """Dropout off, so that two calls can be compared; random states and buffers are as before."""
    training = {module: module.training for module in layer.modules()}
    layer.eval()
    device = next(layer.parameters()).device
    try:
        with once_more(layer, device):
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
