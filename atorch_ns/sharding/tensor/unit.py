"""Units of a self-test: modules, each with the call that it is tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.nests import map_tensors, unique_tensors_of
from atorch_ns.capture.real_values import RealValues
from atorch_ns.capture.structure import copy_structure
from atorch_ns.profile.record.steps import ModuleCall
from atorch_ns.sharding.tensor.trace import LayerGraph
from atorch_ns.torch_compat import fake_tensor_mode, fake_tensor_type, quiet_fake_kernels


@dataclass(frozen=True)
class TestedUnit:
    """A module with the call that it is tested with.

    Args:
        path: the module's path; empty for the model.
        module: the module, on any device; it is not changed.
        call: the first traced call of it.
        read: places of the tensors among its results that the model reads: others may be a rank's own. Where
            it reads none, all are compared.
    """

    path: str
    module: nn.Module
    call: ModuleCall
    read: frozenset[int]

    def results(self, output: Any) -> list[torch.Tensor]:
        """The tensors of an output that the model reads."""
        tensors = unique_tensors_of(output)
        return [tensor for index, tensor in enumerate(tensors) if index in self.read or not self.read]

    @contextmanager
    def without_memory(self) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
        """Gives a copy and its inputs on fake tensors, inside the modes that they run in."""
        # Without gradients torch takes fused paths.
        with fake_tensor_mode(), torch.enable_grad(), quiet_fake_kernels():
            copy = copy_structure(self.module, lambda _, tensor: _make_empty(tensor), {})
            args, kwargs = self._map_inputs(_make_empty)
            with RealValues():  # the code may read values of a mask
                yield copy.eval(), args, kwargs

    def with_values(self, device: torch.device | str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """A copy with random weights, and random inputs, in fp32, equal on every call and every rank."""
        generator = torch.Generator().manual_seed(7)

        def parameter(kind: str, tensor: torch.Tensor) -> torch.Tensor:
            if kind != "parameter" and not tensor.is_meta:  # buffers keep their values: masks, rotary tables
                return _as_float32(tensor.detach().clone()).to(device)
            return _make_random(tensor, generator, kind).to(device)

        def make_input(tensor: torch.Tensor) -> torch.Tensor:
            value = (
                _make_random(tensor, generator, "input")
                if _without_values(tensor)
                else tensor.detach().clone()
            )
            leaf = _as_float32(value.detach()).to(device)
            return leaf.requires_grad_(tensor.requires_grad)

        copy = copy_structure(self.module, parameter, {})
        args, kwargs = self._map_inputs(make_input)
        return copy.eval(), args, kwargs

    def _map_inputs(
        self, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        memo: dict[int, torch.Tensor] = {}  # by id, so that a tensor used twice stays one

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in memo:
                memo[id(tensor)] = make(tensor)
            return memo[id(tensor)]

        args = tuple(map_tensors(once, _drop_cache(value)) for value in self.call.args)
        kwargs = {name: map_tensors(once, _drop_cache(value)) for name, value in self.call.kwargs.items()}
        return args, kwargs


def unit_for(model: nn.Module, graph: LayerGraph, path: str) -> TestedUnit:
    """The unit at ``path``, or at the innermost module around it that is called."""
    while path not in graph.calls and path:
        path = path.rpartition(".")[0]
    return TestedUnit(path, model.get_submodule(path), graph.calls[path], frozenset(graph.read[path]))


def _drop_cache(value: Any) -> Any:
    # A cache of keys and values: the traced call has filled it.
    return None if "Cache" in type(value).__name__ else value


def _without_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, fake_tensor_type())


def _make_empty(tensor: torch.Tensor) -> torch.Tensor:
    # Integers and truth values that are known are kept: code looks at ids and masks.
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return _make_zeros(tensor) if _without_values(tensor) else tensor.to("cpu")


def _make_zeros(tensor: torch.Tensor) -> torch.Tensor:
    # 0 is an id that every table has. Masks hide half of every row, whether it is True or False that hides.
    result = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dtype != torch.bool:
        return result
    if tensor.dim() < 2:
        return ~result  # all True
    result[..., ::2, ::2] = result[..., 1::2, 1::2] = True  # a checkerboard
    return result


def _make_random(tensor: torch.Tensor, generator: torch.Generator, kind: str) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return _make_zeros(tensor)
    shape = tuple(tensor.shape)
    if kind in ("parameter", "input") and len(shape) > 1:
        scale = shape[-1] ** -0.5 if kind == "parameter" else 1.0  # activations keep their size
        return torch.randn(shape, generator=generator, dtype=torch.float32) * scale
    return torch.rand(shape, generator=generator, dtype=torch.float32) + 0.5  # norms and biases: none near 0


def _as_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
