"""Giving memory and values to a model that was built on the meta device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.capture.nests import tensors_of
from atorch_ns.errors import InputError
from atorch_ns.sharding import Packing
from atorch_ns.torch_compat import is_strided_shard, laid_out, plain_name


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of ``whole`` in the layout of ``like``, as a view without communication.

    A dimension may be divided twice: over tensor ranks, then over the ranks that share a tensor rank's part.
    Placements indicate that order by a strided shard.

    ``whole`` has the shape of ``like`` and is equal on all ranks. ``like`` has only shards and replicas.
    """
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinate is not None
    assert whole.shape == like.shape
    entries = list(enumerate(like.placements))
    # Plain shards divide first, outer mesh dimensions before inner; strided shards divide the rest.
    plain = [entry for entry in entries if not is_strided_shard(entry[1])]
    strided_shards = [entry for entry in reversed(entries) if is_strided_shard(entry[1])]
    part = whole
    for axis, placement in (*plain, *strided_shards):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            part = _take_chunk(part, mesh.size(axis), dim, coordinate[axis])
    return part


def divided_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    """``whole`` as a DTensor in the layout of ``like``, with a copy of its part on each rank."""
    return laid_out(local_part(whole, like).contiguous().clone(), like)


def _take_chunk(tensor: torch.Tensor, count: int, dim: int, index: int) -> torch.Tensor:
    pieces = tensor.chunk(count, dim)  # may give fewer than count
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, tensor.size(dim), 0)


def is_on_meta(module: nn.Module) -> bool:
    """Returns whether any parameter or buffer of ``module`` has a shape but no memory."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class Materialiser:
    """Materialises parts of one model, each module once, with values independent of the order.

    Each module's values are drawn from ``seed`` and its path. A model materialised block by block, on any
    number of ranks, therefore has the same values as one materialised at once. Tied parameters stay tied. A
    divided parameter is made whole, one module at a time, and each rank keeps its part.

    Args:
        model: the whole model.
        device: the device on which memory is allocated.
        seed: a number that is the same on every rank.
        init: initialises one module's own parameters and buffers in place; ``None`` to use what the model
            offers: ``_init_weights`` of Hugging Face models, else each module's ``reset_parameters``.
        packings: parameters stored in another order than the user's when divided, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        seed: int,
        init: Callable[[nn.Module], object] | None = None,
        packings: Mapping[str, Packing] | None = None,
    ) -> None:
        self._packings = dict(packings or {})
        self._device = device
        self._is_on_meta = is_on_meta(model)  # otherwise such a tensor is the user's, kept for its shape
        self._seed = seed
        self._init = init or _find_initialiser(model)
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        # Only tied parameters are looked up again. A strong reference would keep every full parameter alive
        # after its shard has taken its place.
        self._materials: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()

    def materialise(self, modules: Iterable[nn.Module], *, recurse: bool = True) -> None:
        """Materialises all meta tensors inside ``modules``, or only their own tensors without ``recurse``.

        Raises:
            InputError: naming the modules that offer no way to initialise themselves, whose
                initialisation leaves values unset, or that have tensors in plain attributes.
        """
        for root in modules:
            for module in root.modules() if recurse else (root,):
                self._materialise_one(module)
                for name, value in vars(module).items() if self._is_on_meta else ():
                    if name not in ("_parameters", "_buffers") and any(t.is_meta for t in tensors_of(value)):
                        raise InputError(
                            f"the model is on the meta device, and {self._describe_module(module)} has a meta tensor in its plain attribute "
                            f"{name}, which nothing initialises. Register it with register_buffer({name!r}, ..., persistent=False) "
                            "and set it in reset_parameters, or build the model on a device."
                        )

    def _materialise_one(self, module: nn.Module) -> None:
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            return
        shards = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        buffers = {id(buffer): name for name, buffer in module.named_buffers(recurse=False)}
        aliases = {name: buffers[id(value)] for name, value in vars(module).items() if id(value) in buffers}
        fresh = self._allocate_tensors(module)
        vars(module).update({name: module._buffers[buffer] for name, buffer in aliases.items()})
        if not fresh:
            return
        tied_names = shards.keys() - fresh.keys()  # already made with another module
        self._make_whole(module, tied_names)
        with torch.random.fork_rng(devices=[]):  # values do not depend on other modules
            torch.manual_seed(self._seed ^ zlib.crc32(self._names.get(module, "").encode()))
            self._init(module)
        unset = [name for name, tensor in fresh.items() if is_poisoned(tensor)]
        if unset:
            raise InputError(
                f"the model is on the meta device, and initialising {self._describe_module(module)} leaves "
                f"{', '.join(unset)} unset. Set them in its reset_parameters, or build the model on a device."
            )
        for name, parameter in shards.items():
            self._keep_part(module, name, parameter, is_tied=name in tied_names)

    def _make_whole(self, module: nn.Module, names: Iterable[str]) -> None:
        for name in names:
            parameter = module._parameters[name]
            assert parameter is not None
            # Poisoned: if this initialisation leaves it unset, the values of the other module stay.
            data = _poison_tensor(torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device))
            module._parameters[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)

    @torch.no_grad()
    def _keep_part(self, module: nn.Module, name: str, like: nn.Parameter, *, is_tied: bool) -> None:
        path = self._names.get(module, "")
        packing = self._packings.get(f"{path}.{name}" if path else name)
        whole = module._parameters[name]
        assert whole is not None
        assert isinstance(like, DTensor)
        values = whole.detach() if packing is None else packing.pack(whole.detach())
        part = divided_like(values, like)
        if is_tied:
            twin = self._materials.get(like, like)
            module._parameters[name] = twin
            if not is_poisoned(whole):  # this module's values replace them
                twin.copy_(part)
        else:
            module._parameters[name] = self._materials[like] = nn.Parameter(
                part, requires_grad=like.requires_grad
            )

    @torch.no_grad()
    def _allocate_tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        fresh: dict[str, torch.Tensor] = {}
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            tensor = self._materials.get(parameter)
            if tensor is None:
                size, stride, dtype = parameter.size(), parameter.stride(), parameter.dtype
                data = _poison_tensor(torch.empty_strided(size, stride, dtype=dtype, device=self._device))
                tensor = self._materials[parameter] = nn.Parameter(
                    data, requires_grad=parameter.requires_grad
                )
                fresh[name] = data
            module._parameters[name] = tensor
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                fresh[name] = module._buffers[name] = _poison_tensor(
                    torch.empty_like(buffer, device=self._device)
                )
        return fresh

    def _describe_module(self, module: nn.Module) -> str:
        return f"{self._names.get(module) or 'the model'} ({type(module).__qualname__})"


def _find_initialiser(model: nn.Module) -> Callable[[nn.Module], object]:
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
            "initialise it. Add one, or build the model on a device; a strategy with fsdp may give param_init_fn."
        )

    return reset


def _poison_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.zero_()  # any value is plausible, so unset ones are missed
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Returns whether some value (integers: every value) is still the poison. Allocates no such tensor."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor.detach().amin()))  # a minimum over a NaN is NaN
    return bool(tensor.amax() == torch.iinfo(tensor.dtype).min)
