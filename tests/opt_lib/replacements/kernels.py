"""Packages with kernels, pretended at the edge where they are imported: the same numbers by torch on the CPU."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opt_lib._replacements import base, kernels


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Makes ``import name`` give a module with these contents; so for the packages that it lies in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        module = types.ModuleType(path)
        module.__path__ = []  # a package
        module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
        if end == len(parts):
            vars(module).update(contents)
        if path not in sys.modules or end == len(parts):
            monkeypatch.setitem(sys.modules, path, module)
            if end > 1:  # torch.compile asks the package for it, also in a later test
                setattr(sys.modules[path.rpartition(".")[0]], parts[end - 1], module)
    base._import_error.cache_clear()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """liger-kernel and apex are there and run on the CPU; counts what is called of them."""
    calls: Counter[str] = Counter()

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[function.__name__] += 1
            return function(*args, **kwargs)

        return call

    liger = (liger_rms_norm, liger_swiglu, liger_rope, liger_fused_linear_cross_entropy)
    pretend(
        monkeypatch,
        "liger_kernel.transformers.functional",
        **{each.__name__: counted(each) for each in liger},
    )
    apex = (fused_layer_norm_affine, fused_rms_norm_affine)
    pretend(
        monkeypatch, "apex.normalization.fused_layer_norm", **{each.__name__: counted(each) for each in apex}
    )
    pretend(monkeypatch, "fused_layer_norm_cuda")
    monkeypatch.setattr(kernels, "_is_on_gpu", lambda tensor: not tensor.is_meta)
    yield calls
    monkeypatch.undo()
    base._import_error.cache_clear()


def liger_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    assert X.dtype == W.dtype
    assert not in_place
    assert casting_mode == ("gemma" if offset else "llama")
    x = X.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * (W.float() + offset)).to(X.dtype) if offset else x.to(X.dtype) * W


def liger_swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(a) * b


def liger_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    return turned(q), turned(k)


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    logits = F.linear(input, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: tuple[int, ...],
    eps: float = 1e-6,
) -> torch.Tensor:
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def fused_rms_norm_affine(
    input: torch.Tensor, weight: torch.Tensor, normalized_shape: tuple[int, ...], eps: float = 1e-6
) -> torch.Tensor:
    return F.rms_norm(input, normalized_shape, weight, eps)
