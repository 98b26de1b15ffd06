"""Giving memory and values to a model that was built on the meta device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import torch
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.torch_compat import plain_name

__all__ = ["Materialiser", "is_on_meta"]


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of ``module`` has a shape but no memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class Materialiser:
    """Materialises parts of one model, each module once, with values that do not depend on the order.

    Every module's initial values are drawn from a generator state of its own, made from ``seed`` and the
    module's path. A model materialised block by block, on any number of ranks, therefore has the values of
    one materialised at once. Tied parameters stay tied.

    Args:
        model: the whole model.
        device: where the memory is taken.
        seed: the same on every rank.
        init: initialises one module's own parameters and buffers in place; ``None`` to use what the model
            offers: ``_init_weights`` of Hugging Face models, else each module's ``reset_parameters``.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        seed: int,
        init: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self._device = device
        self._seed = seed
        self._init = init or _initialiser(model)
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        # Only tied parameters are looked up again. A strong reference would keep every full parameter alive
        # after its shard has taken its place.
        self._made: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()

    def materialise(self, modules: Iterable[nn.Module], *, recurse: bool = True) -> None:
        """Materialises everything on meta inside ``modules``; without ``recurse`` only what they hold themselves.

        Raises:
            InputError: naming the modules that offer no way to initialise themselves, or whose
                initialisation leaves values unset.
        """
        for root in modules:
            for module in root.modules() if recurse else (root,):
                self._materialise_one(module)

    def _materialise_one(self, module: nn.Module) -> None:
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            return
        fresh = self._allocate(module)
        if not fresh:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed ^ zlib.crc32(self._names.get(module, "").encode()))
            self._init(module)
        unset = [name for name, tensor in fresh.items() if _is_poisoned(tensor)]
        if unset:
            raise InputError(
                f"the model is on the meta device, and initialising {self._path(module)} leaves "
                f"{', '.join(unset)} unset. Set them in its reset_parameters, or build the model on a device."
            )

    @torch.no_grad()
    def _allocate(self, module: nn.Module) -> dict[str, torch.Tensor]:
        fresh: dict[str, torch.Tensor] = {}
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            made = self._made.get(parameter)
            if made is None:
                data = _poison(torch.empty_like(parameter, device=self._device))
                made = self._made[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                fresh[name] = data
            module._parameters[name] = made
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                fresh[name] = module._buffers[name] = _poison(torch.empty_like(buffer, device=self._device))
        return fresh

    def _path(self, module: nn.Module) -> str:
        return f"{self._names.get(module) or 'the model'} ({type(module).__qualname__})"


def _initialiser(model: nn.Module) -> Callable[[nn.Module], object]:
    from_model = getattr(model, "_init_weights", None)
    if callable(from_model):
        without_grad: Callable[[nn.Module], object] = torch.no_grad()(from_model)
        return without_grad

    def reset(module: nn.Module) -> object:
        for name in ("reset_parameters", "_reset_parameters"):
            function = getattr(module, name, None)
            if callable(function):
                return torch.no_grad()(function)()
        raise InputError(
            f"the model is on the meta device, and {type(module).__qualname__} has no reset_parameters() to "
            "give it values. Add one, pass param_init_fn in the config of fsdp, or build it on a device."
        )

    return reset


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with a value that no initialisation leaves behind everywhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.zero_()
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether some value (integers: every value) is still the poison; takes no memory of the tensor's size."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor.detach().amin()))  # a minimum over a NaN is NaN
    return bool(tensor.amax() == torch.iinfo(tensor.dtype).min)
