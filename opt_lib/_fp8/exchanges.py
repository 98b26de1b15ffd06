"""Products and exchanges of torchao's float8 that torch.compile can trace; the import needs torchao.

With one scale a tensor, values are rounded before they are gathered, by the largest value of all ranks. Half
the bytes of bf16 travel, and inductor fuses gather and product (``fused_all_gather_scaled_matmul``). With one
scale a row they are gathered unrounded: gradients of weights need them again, with one scale a column.

Legend: B batch, T tokens, I input features, O output features, n ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from atorch_ns.sharding import traced_gather, traced_scatter
from atorch_ns.torch_compat import (
    functional_all_gather,
    functional_maximum,
    functional_reduce_scatter,
    group_named,
)


def multiply(module: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., I] times [O, I], with both rounded as the ``Float8Linear`` says."""
    out: torch.Tensor = matmul_with_hp_or_float8_args.apply(
        x, weight.t(), module.linear_mm_config, module.config
    )
    return out


def rounds_first(module: Any) -> bool:
    """Returns whether a ``Float8Linear`` accepts inputs that are already rounded."""
    casts = (module.config.cast_config_input, module.config.cast_config_grad_output)
    return all(cast.scaling_granularity is ScalingGranularity.TENSORWISE for cast in casts)


def gather_input(module: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers an input [B, T, I] along ``dim``, rounded first if possible; its gradients are summed."""
    if not rounds_first(module):
        return traced_gather(x, dim, group)
    dtype = module.config.cast_config_input.target_dtype
    whole: torch.Tensor = _GatherRounded.apply(x, module.linear_mm_config, dtype, dim, group.group_name)  # type: ignore[no-untyped-call]
    return whole


def scatter_sum(module: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums results [T B, O] and keeps this rank's rows; gradients are gathered rounded if possible."""
    if not rounds_first(module):
        return traced_scatter(x, 0, group)
    dtype = module.config.cast_config_grad_output.target_dtype
    piece: torch.Tensor = _ScatterThenRound.apply(x, module.linear_mm_config, dtype, group.group_name)  # type: ignore[no-untyped-call]
    return piece


def _gather_rounded(
    x: torch.Tensor,
    settings: LinearMMConfig,
    dtype: torch.dtype,
    role: GemmInputRole,
    *,
    dim: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    scale = amax_to_scale(functional_maximum(x.abs().max(), group), dtype)  # one scale for all ranks
    piece = hp_tensor_and_scale_to_float8(x, scale, dtype, settings, role)
    bits = functional_all_gather(piece._data, dim, group)  # one byte an element
    whole: torch.Tensor = Float8TrainingTensor(bits, piece._scale, x.dtype, settings, role)
    return whole


@torch.compiler.allow_in_graph
class _GatherRounded(torch.autograd.Function):
    """A gather of rounded tensors. Gradients are summed in high precision."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, settings: LinearMMConfig, dtype: torch.dtype, dim: int, group_name: str
    ) -> torch.Tensor:
        ctx.dim, ctx.group_name = dim, group_name
        return _gather_rounded(
            x, settings, dtype, GemmInputRole.INPUT, dim=dim, group=group_named(group_name)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Tokens first, as in a row layer. One sample has them so: inductor fuses its sum with the product.
        gradient, dim = gradients[0], ctx.dim
        is_one = gradient.shape[:dim].numel() == 1
        first = gradient.flatten(0, dim) if is_one else gradient.movedim(dim, 0)
        piece = functional_reduce_scatter(first.flatten(0, -2), 0, group_named(ctx.group_name))
        piece = piece.unflatten(0, (-1, *first.shape[1:-1]))
        piece = piece.unflatten(0, (*gradient.shape[:dim], -1)) if is_one else piece.movedim(0, dim)
        return piece, None, None, None, None


@torch.compiler.allow_in_graph
class _ScatterThenRound(torch.autograd.Function):
    """A scattered sum along the first dimension, whose gradients are rounded before they are gathered."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, settings: LinearMMConfig, dtype: torch.dtype, group_name: str
    ) -> torch.Tensor:
        ctx.settings, ctx.dtype, ctx.group_name = settings, dtype, group_name
        return functional_reduce_scatter(x, 0, group_named(group_name))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group = group_named(ctx.group_name)
        role = GemmInputRole.GRAD_OUTPUT
        return (
            _gather_rounded(gradients[0], ctx.settings, ctx.dtype, role, dim=0, group=group),
            None,
            None,
            None,
        )
