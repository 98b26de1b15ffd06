"""Tests of experts before they are divided: on a few tokens, divided and whole results must be equal.

A fused module may mix its experts, or take their number from an unexpected place. Code that calls a list of
experts may read one's results before the next call, or their weights. Both give wrong numbers, no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from atorch_ns.capture.nests import tensors_of
from atorch_ns.capture.random_states import buffers_and_generators_kept, modes_kept
from atorch_ns.errors import StepError
from atorch_ns.sharding.compare import gradient_floor, gradients_of, relative_error, weighted_sum
from atorch_ns.sharding.expert.find import FoundExperts, ListedExperts
from atorch_ns.sharding.expert.list import ExpertCalls, intercept, release
from atorch_ns.text import error_text

T = TypeVar("T")
R = TypeVar("R")

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # by dtype, in units of the largest value
_LOW_PRECISION_TOLERANCE = 5e-2
_ROWS, _TOKENS = 2, 9  # shape of a layer's test input


@torch.no_grad()
def why_not_dividable(experts: FoundExperts, ranks: int) -> str | None:
    """The reason why dividing the experts would change the module's results; ``None`` if it would not.

    The module is called with two choices for each of a few tokens, then with one choice at a time on each
    rank's share of experts. The results must add up. Nothing is communicated.

    Args:
        experts: the module, whole and with values.
        ranks: the number of shares; it divides the number of experts.
    """
    first = experts.module._parameters[experts.divided[0]]
    assert first is not None
    with _eval_mode(experts.module):
        try:
            tokens, index, weights = _make_batch(experts, first)
            whole = _call_experts(experts, tokens, index, weights)
        except Exception as error:
            return f"calling it with a few tokens fails: {error_text(error)}"
        if not bool(torch.isfinite(whole).all()):  # values that were never set: nothing can be compared
            return None
        try:
            # One choice of each token at a time: a module that mixes the choices gives another sum.
            parts = sum(
                _by_shares(experts, ranks, tokens, index[:, k : k + 1], weights=weights[:, k : k + 1])
                for k in range(index.size(1))
            )
        except Exception as error:
            return f"with 1/{ranks} of the experts it fails: {error_text(error)}"
    assert isinstance(parts, torch.Tensor)
    off = relative_error(parts, whole)
    if off <= _TOLERANCE.get(whole.dtype, _LOW_PRECISION_TOLERANCE):
        return None
    return (
        f"shares of 1/{ranks} of the experts, one choice at a time, add up to something else than the module "
        f"computes (off by {off:.1e} of the largest value). It must return the sum over choices of weight times "
        "expert, and keep the number of experts in an attribute whose name ends in 'experts'"
    )


def why_not_answerable(moe: ListedExperts) -> str | None:
    """The reason why a layer's experts cannot be computed together, or ``None``. Nothing is communicated."""
    device = next(moe.layer.parameters()).device
    with torch.enable_grad(), _eval_mode(moe.layer), buffers_and_generators_kept(moe.layer, device):
        try:
            tokens, whole = _run_whole_layer(moe)
        except Exception as error:  # the user's code, on an input of a guessed shape
            return f"calling it with a few tokens fails: {error_text(error)}"
        if not all(bool(torch.isfinite(tensor).all()) for tensor in whole):
            return None  # values that were never set: nothing can be compared
        calls = ExpertCalls(str(moe))
        intercept(moe.experts, calls)
        try:
            results = _run_passes(moe, calls, tokens)
        except StepError as error:
            return str(error)
        except Exception as error:  # the user's code again, on placeholders for experts' results
            return f"it fails when its experts are computed together: {error_text(error)}"
        finally:
            calls.end()
            release(moe.experts)
    if results is None:
        return "its code does not call them on a few tokens"
    floor = gradient_floor(whole)
    off = max(relative_error(mine, theirs, floor=floor) for mine, theirs in zip(results, whole, strict=True))
    if off <= _TOLERANCE.get(tokens.dtype, _LOW_PRECISION_TOLERANCE):
        return None
    return (
        f"with its experts computed together it gives something else (off by {off:.1e} of the largest value): it may "
        "use what experts return to choose the next ones, or read their weights outside their calls"
    )


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    with modes_kept(module):
        module.eval()  # without dropout two calls can be compared
        yield


def _first_accepted(inputs: Iterable[T], call: Callable[[T], R]) -> tuple[T, R]:
    last: Exception | None = None
    for sample in inputs:
        try:
            return sample, call(sample)
        except Exception as refused:  # the user's code, on an input of a guessed shape
            last = refused
    assert last is not None
    raise last  # no input was accepted


def _by_frequency(sizes: list[int]) -> list[int]:
    return sorted(set(sizes), key=lambda size: -sizes.count(size))  # the most frequent first


def _make_batch(experts: FoundExperts, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = experts.num_experts
    step = max(1, count // 8)  # tests only some of many experts
    choice = torch.arange(0, count, step)  # [N], the first choice of each token
    # [N, 2]: first and second choices alternate over the experts, so that every share is chosen.
    index = torch.stack([choice, (choice + 1 + step // 2) % count], dim=1).to(like.device)
    weights = torch.rand(len(choice), 2, generator=generator).to(like)
    # The width of the model is likely the size that its weights have most often.
    widths = _by_frequency(
        [size for name in experts.divided for size in experts.module.get_parameter(name).shape[1:]]
    )
    inputs = (torch.randn(len(choice), width, generator=generator).to(like) for width in widths)
    tokens, _ = _first_accepted(inputs, lambda sample: _call_experts(experts, sample, index, weights))
    return tokens, index, weights


def _call_experts(
    experts: FoundExperts, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    result = experts.module(tokens.clone(), index, weights)  # it may write into its tokens
    if not isinstance(result, torch.Tensor) or result.numel() != tokens.numel():
        raise TypeError(f"it returns {type(result).__name__}, not a tensor like its tokens")
    return result.reshape(tokens.shape)


def _by_shares(
    experts: FoundExperts, ranks: int, tokens: torch.Tensor, index: torch.Tensor, *, weights: torch.Tensor
) -> torch.Tensor:
    out, per_rank = torch.zeros_like(tokens), experts.num_experts // ranks
    for rank in range(ranks):
        rows = (index[:, 0] // per_rank == rank).nonzero()[:, 0]  # the tokens of this share
        if len(rows):
            with _select_experts(experts, slice(rank * per_rank, (rank + 1) * per_rank)):
                out[rows] = _call_experts(experts, tokens[rows], index[rows] - rank * per_rank, weights[rows])
    return out


@contextmanager
def _select_experts(experts: FoundExperts, share: slice) -> Iterator[None]:
    module = experts.module
    parameters = {name: module._parameters[name] for name in experts.divided}
    try:
        for name, parameter in parameters.items():
            assert parameter is not None
            module._parameters[name] = parameter[share]  # type: ignore[assignment]  # it need not be trained
        # Code that goes through its experts by number must see those of a share.
        for name in experts.counts:
            setattr(module, name, share.stop - share.start)
        yield
    finally:
        module._parameters.update(parameters)
        for name in experts.counts:
            setattr(module, name, experts.num_experts)


def _run_whole_layer(moe: ListedExperts) -> tuple[torch.Tensor, list[torch.Tensor]]:
    like = next(moe.experts[0].parameters())
    widths = _by_frequency([size for parameter in moe.experts[0].parameters() for size in parameter.shape])
    generator = torch.Generator().manual_seed(0)
    shapes = (shape for width in widths for shape in ((_ROWS, _TOKENS, width), (_ROWS * _TOKENS, width)))
    # Layers take [B, T, D] or [N, D].
    inputs = (torch.randn(shape, generator=generator).to(like).requires_grad_() for shape in shapes)
    return _first_accepted(
        inputs, lambda sample: _results_and_gradients(_gradient_targets(moe, sample), moe.layer(sample))
    )


def _run_passes(moe: ListedExperts, calls: ExpertCalls, tokens: torch.Tensor) -> list[torch.Tensor] | None:
    targets = _gradient_targets(moe, tokens)
    # First pass, without the layer's hooks: calls of experts are recorded and return zeros.
    calls.begin()
    with buffers_and_generators_kept(moe.layer, tokens.device), _hide_parameters(moe):
        moe.layer.forward(tokens)
    rows = calls.rows()
    if rows is None:  # no expert was called
        return None
    calls.answer(rows.results(moe.num_experts, lambda number, inputs: moe.experts[number](*inputs)))
    with _hide_parameters(moe):
        # Second pass: the recorded calls return the results.
        output = moe.layer(tokens)
    return _results_and_gradients(targets, output)


def _gradient_targets(moe: ListedExperts, tokens: torch.Tensor) -> list[torch.Tensor]:
    return [tokens, *(parameter for parameter in moe.layer.parameters() if parameter.requires_grad)]


def _results_and_gradients(targets: list[torch.Tensor], output: Any) -> list[torch.Tensor]:
    results = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    total = weighted_sum(results, seed=1)  # one loss of all results
    if total is None or not total.requires_grad:
        raise TypeError("it returns no floating-point tensor with a gradient")
    return [*(tensor.detach() for tensor in results), *gradients_of(total, targets)]


@contextmanager
def _hide_parameters(moe: ListedExperts) -> Iterator[None]:
    # NaN stands in for the experts' parameters: code that reads them outside a call would get a part of them.
    modules = [module for expert in moe.experts for module in expert.modules()]
    originals = [(module, dict(module._parameters)) for module in modules]
    try:
        for module, parameters in originals:
            for key, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[key] = nn.Parameter(torch.full_like(parameter, float("nan")))
        yield
    finally:
        for module, parameters in originals:
            module._parameters.update(parameters)
