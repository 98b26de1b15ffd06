"""Does a share of a module's experts compute what the whole module does? Tried before it is trusted.

A module may look as if its experts could be divided and still mix them, or read their number from where nobody
expects it. That gives wrong numbers and no error, so a few tokens are computed both ways first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from atorch_ns.sharding._experts_find import FoundExperts

__all__ = ["why_not_dividable"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 5e-2


@torch.no_grad()
def why_not_dividable(experts: FoundExperts, ranks: int) -> str | None:
    """Why dividing the experts would change what the module computes; ``None`` if it would not.

    The module is called with two choices for each of a few tokens, then with one choice at a time on the share of
    experts that each rank would hold; the results must add up. Nothing is communicated.

    Args:
        experts: the module, whole and with values.
        ranks: into how many shares; it divides the number of experts.
    """
    first = experts.module._parameters[experts.divided[0]]
    assert first is not None
    with _evaluating(experts):
        try:
            tokens, index, weights = _sample(experts, first)
            whole = _call(experts, tokens, index, weights)
        except Exception as error:
            return f"calling it with a few tokens fails: {type(error).__name__}: {error}"
        if not bool(torch.isfinite(whole).all()):  # values that were never set: nothing can be compared
            return None
        try:
            parts = sum(
                _by_shares(experts, ranks, tokens, index[:, k : k + 1], weights[:, k : k + 1])
                for k in range(index.size(1))
            )
        except Exception as error:
            return f"with 1/{ranks} of the experts it fails: {type(error).__name__}: {error}"
    assert isinstance(parts, torch.Tensor)
    off = float((parts.double() - whole.double()).abs().max() / whole.double().abs().max().clamp(min=1e-30))
    if off <= _TOLERANCE.get(whole.dtype, _LOW_PRECISION_TOLERANCE):
        return None
    return (
        f"shares of 1/{ranks} of the experts, one choice at a time, add up to something else than the module "
        f"computes (off by {off:.1e} of the largest value). It must return the sum over choices of weight times "
        "expert, and keep the number of experts in an attribute whose name ends in 'experts'"
    )


def _sample(experts: FoundExperts, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A few tokens with two choices each, such that every share is chosen; of the first width that fits."""
    generator = torch.Generator().manual_seed(0)
    count = experts.num_experts
    last: Exception | None = None
    step = max(1, count // 8)  # no more than some of many experts
    one = torch.arange(0, count, step)
    index = torch.stack([one, (one + 1 + step // 2) % count], dim=1).to(like.device)
    weights = torch.rand(len(one), 2, generator=generator).to(like)
    for width in _widths(experts):
        tokens = torch.randn(len(one), width, generator=generator).to(like)
        try:
            _call(experts, tokens, index, weights)
        except Exception as refused:
            last = refused
        else:
            return tokens, index, weights
    assert last is not None
    raise last


def _widths(experts: FoundExperts) -> list[int]:
    """Sizes that tokens may have: those that the experts' parameters have, the most frequent first."""
    sizes = [size for name in experts.divided for size in _shape(experts, name)[1:]]
    return sorted(set(sizes), key=lambda size: -sizes.count(size))


def _shape(experts: FoundExperts, name: str) -> torch.Size:
    return experts.module.get_parameter(name).shape


def _call(
    experts: FoundExperts, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    result = experts.module(tokens.clone(), index, weights)
    if not isinstance(result, torch.Tensor) or result.numel() != tokens.numel():
        raise TypeError(f"it returns {type(result).__name__}, not a tensor like its tokens")
    return result.reshape(tokens.shape)


def _by_shares(
    experts: FoundExperts, ranks: int, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out, per_rank = torch.zeros_like(tokens), experts.num_experts // ranks
    for rank in range(ranks):
        rows = (index[:, 0] // per_rank == rank).nonzero()[:, 0]
        if len(rows):
            with _share(experts, slice(rank * per_rank, (rank + 1) * per_rank)):
                out[rows] = _call(experts, tokens[rows], index[rows] - rank * per_rank, weights[rows])
    return out


@contextmanager
def _share(experts: FoundExperts, chosen: slice) -> Iterator[None]:
    """The module with some of its experts."""
    module = experts.module
    parameters = {name: module._parameters[name] for name in experts.divided}
    try:
        for name, parameter in parameters.items():
            assert parameter is not None
            module._parameters[name] = parameter[chosen]  # type: ignore[assignment]  # it need not be trained
        for name in experts.counts:
            setattr(module, name, chosen.stop - chosen.start)
        yield
    finally:
        module._parameters.update(parameters)
        for name in experts.counts:
            setattr(module, name, experts.num_experts)


@contextmanager
def _evaluating(experts: FoundExperts) -> Iterator[None]:
    """Dropout off, so that two calls can be compared."""
    training = {module: module.training for module in experts.module.modules()}
    experts.module.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
