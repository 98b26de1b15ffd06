"""Weight gradients of linear layers apart from the backward pass, for schedules that compute them later.

A backward pass computes for each linear layer the gradient of its input, for which the layer before waits,
and of its weight, for which nothing waits: two equally large products. Qi et al. 2023 ("Zero Bubble Pipeline
Parallelism") fill the bubble with the second. The rest is little and belongs to the inputs' part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from atorch_ns.torch_compat import has_gradient_hooks, laid_out


def linear_layers(module: nn.Module) -> list[nn.Module]:
    """The layers inside that compute like ``nn.Linear`` or transformers' ``Conv1D``, even if divided."""
    return [
        layer for layer in module.modules() if _computes_as_written(layer) and "forward" not in vars(layer)
    ]


def _computes_as_written(layer: nn.Module) -> bool:
    whole = getattr(type(layer), "whole_forward", type(layer).forward)  # that of a divided layer
    return whole is nn.Linear.forward or _is_conv1d(type(layer))


def _is_conv1d(kind: type) -> bool:
    return any(  # the linear layer of GPT-2, whose weight is [inputs, outputs]
        base.__name__ == "Conv1D" and base.__module__.startswith("transformers.") for base in kind.__mro__
    )


def awaits_gradient(parameter: nn.Parameter) -> bool:
    """Whether its gradient from some micro-batch is deferred, so it does not count as unused."""
    return bool(getattr(parameter, _AWAITS, False))


_AWAITS: Final = "_awaits_gradient"


class WeightGradients:
    """Deferred weight gradients of a micro-batch in a stage, computed by :meth:`add`.

    Forward passes and their recomputations run inside it as a context.

    Args:
        layers: the stage's :func:`linear_layers`.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = layers
        self._defers = False
        self._products: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.forward = partial(self._forward_layer, layer)

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.forward

    def _forward_layer(self, layer: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        run, parameters = type(layer).forward, layer._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        # What is not a parameter, as under torch's parametrizations, is computed anew whenever it is read.
        is_own = weight is not None and weight.is_leaf and "bias" in parameters
        if not is_own or not weight.requires_grad or has_gradient_hooks(weight):
            return run(layer, *args, **kwargs)  # type: ignore[no-any-return]
        if isinstance(weight, DTensor):
            with _ProductOfPart(self, layer):  # the layer's own code communicates around the product
                return run(layer, *args, **kwargs)  # type: ignore[no-any-return]
        (value,) = args or kwargs.values()  # the input, as ``layer(x)`` or ``layer(input=x)``
        output = self.product(layer, value, weight, bias)
        return run(layer, value) if output is None else output

    def product(
        self, layer: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """A layer's output with its weight, or this rank's part of it; ``None`` if they do not match."""
        if not _is_wanted(value, weight, bias):
            return None
        dtype = _computed_in(value, weight)
        if value.dtype != dtype:
            if weight.dtype == dtype:  # torch's own layer raises, or casts under autocast
                return None
            value = value.to(dtype)
        later = _Later(self, layer.weight, _is_conv1d(type(layer)))
        return _Linear.apply(later, value, weight, bias)  # type: ignore[no-any-return, no-untyped-call]

    def backward(self, edges: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
        """Runs a backward pass without these weight gradients."""
        self._defers = True
        try:
            with self:  # for forward passes that are recomputed in it
                torch.autograd.backward(edges, gradients)
        finally:
            self._defers = False

    def takes(self, weight: nn.Parameter, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether it defers ``left @ right``, the gradient of a weight."""
        if self._defers:
            self._products.append((weight, left, right))
            setattr(weight, _AWAITS, True)
        return self._defers

    @torch.no_grad()
    def add(self) -> None:
        """Computes the gradients and adds them to those of the weights."""
        for weight, left, right in self._products:
            grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            if grad is None:
                product = (left @ right).to(weight.dtype)
                weight.grad = laid_out(product, weight) if isinstance(weight, DTensor) else product
            elif grad.dtype == left.dtype:
                grad.addmm_(left, right)  # without memory for the product
            else:
                grad += left @ right
            vars(weight).pop(_AWAITS, None)
        self._products.clear()


class _Later(NamedTuple):
    """The collector of a deferred weight gradient, and whether the weight is [inputs, outputs]."""

    gradients: WeightGradients
    parameter: nn.Parameter
    inputs_first: bool


class _ProductOfPart(TorchFunctionMode):
    """Computes the single product of a divided layer. The layer's own code exchanges inputs or outputs."""

    def __init__(self, gradients: WeightGradients, layer: Any) -> None:
        super().__init__()
        self._product = partial(gradients.product, layer)

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        operands: tuple[Any, ...] = ()
        if func is F.linear:
            operands = (*args, None)[:3]  # (value, weight, bias)
        elif func is torch.addmm:
            operands = (*args[1:], args[0])  # addmm takes the bias first
        elif func is torch.mm:
            operands = (*args, None)
        product = self._product(*operands) if len(operands) == 3 and not kwargs else None
        return func(*args, **(kwargs or {})) if product is None else product


class _Linear(torch.autograd.Function):
    """A linear layer, whose weight is [outputs, inputs], or the other way round."""

    @staticmethod
    def forward(
        ctx: Any, later: _Later, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(value, weight)
        ctx.later = later
        weight = weight if weight.dtype == value.dtype else weight.to(value.dtype)
        bias = bias if bias is None or bias.dtype == value.dtype else bias.to(value.dtype)
        # Detached: a view that is made in here could not be changed in place.
        return F.linear(value, weight.t() if later.inputs_first else weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (value, weight) = gradients, ctx.saved_tensors
        _, needs_value, _, needs_bias = ctx.needs_input_grad
        gradients_of, parameter, inputs_first = ctx.later
        matrix = weight.to(gradient.dtype)
        of_value = gradient @ (matrix.t() if inputs_first else matrix) if needs_value else None
        rows, columns = gradient.flatten(0, -2), value.flatten(0, -2)  # [N, outputs], [N, inputs]
        of_bias = rows.sum(0) if needs_bias else None
        # Factors of the weight's gradient, in the layout of the weight.
        left, right = (columns.t(), rows) if inputs_first else (rows.t(), columns)
        of_weight = None if gradients_of.takes(parameter, left, right) else left @ right
        return None, of_value, of_weight, of_bias


def _is_wanted(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        torch.is_grad_enabled()
        and type(value) is torch.Tensor
        and value.dim() > 1  # a vector has no rows
        and type(weight) in _PLAIN
        and (bias is None or type(bias) in _PLAIN)
    )


_PLAIN = (torch.Tensor, nn.Parameter)


def _computed_in(value: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    if value.dtype != torch.float64 and torch.is_autocast_enabled(value.device.type):  # it leaves fp64 alone
        return torch.get_autocast_dtype(value.device.type)
    return weight.dtype
