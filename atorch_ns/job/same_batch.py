"""Same batch: what ranks that divide one model are given, compared, since they train it on the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.capture.nests import leaves
from atorch_ns.cluster import Mesh, gathered
from atorch_ns.errors import InputError
from atorch_ns.text import first_few

_AXES: Final = ("tensor", "sequence", "pipeline")
"""The axes whose ranks work on the same samples."""

_NUM_VALUES: Final = 1024
"""Values of each tensor that are compared, at places drawn once for all ranks."""

_TOLERANCE: Final = 1e-2
"""Floating values may differ by this share of the largest: ranks may have computed them, with rounding errors of 2^-8 in bfloat16."""

_EVERY: Final = 1000
"""A comparison is an exchange that waits for the device: at most a thousandth of the time, even if it took as long as a step."""


class _Leaf(NamedTuple):
    """A value of a batch, as ranks tell each other of it."""

    where: str
    kind: str
    values: torch.Tensor


class SameBatch:
    """Compares the samples of the ranks along the axes tensor, sequence and pipeline.

    Those of the first call and of every thousandth after it are compared, of training and of inference each.

    Ranks that make their data in each process, without a common seed, would otherwise train one model on different samples
    in silence.

    Args:
        mesh: the arrangement of ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._axes = [name for name in _AXES if mesh.size(name) > 1]
        self._counts = {True: 0, False: 0}

    def attach(self, module: nn.Module) -> None:
        """Checks what ``module`` is called with."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.check({**dict(enumerate(args)), **kwargs})

        module.register_forward_pre_hook(torch.compiler.disable(before), prepend=True, with_kwargs=True)

    def check(self, samples: Any) -> None:
        """Compares ``samples``, a nest of tensors, if it is their turn; collective over those ranks then.

        Raises:
            InputError: on each of those ranks, if the samples of two of them differ; it names the first place.
        """
        trains = torch.is_grad_enabled()
        self._counts[trains] += 1
        if self._counts[trains] % _EVERY != 1 or not self._axes:
            return
        told = [(dist.get_rank(), list(_leaves(samples)))]
        for name in self._axes:
            every = gathered(told, distributed=True, group=self._mesh.axis(name).get_group())
            told = list(chain.from_iterable(every))
        told.sort(key=lambda one: one[0])
        first, expected = told[0]
        for rank, found in told[1:]:
            problem = _difference(expected, found)
            if problem is not None:
                axes = ", ".join(f"{name}={self._mesh.size(name)}" for name in self._axes)
                raise InputError(
                    f"ranks {first} and {rank} divide one model ({axes}) and must be given the same samples, but {problem}. "
                    "Make the data the same in every process: call torch.manual_seed(0) before they, or their random "
                    "transforms, are drawn, or read them from files."
                )


def _leaves(samples: Any) -> Iterator[_Leaf]:
    for path, leaf in leaves(samples):
        where = "batch" + "".join(f"[{key!r}]" for key in path)
        if isinstance(leaf, torch.Tensor):
            kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            yield _Leaf(where, kind, _some_values(leaf))
        elif leaf is None or isinstance(leaf, (bool, int, float)):  # texts may be names of a machine's files
            yield _Leaf(where, repr(leaf), torch.empty(0))


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values at fixed places, float64 on the CPU; none of a tensor of which this rank may hold a part."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return torch.empty(0)
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    places = torch.arange(len(flat))
    if len(flat) > _NUM_VALUES:
        places = torch.randint(len(flat), (_NUM_VALUES,), generator=torch.Generator().manual_seed(0))
    return flat[places.to(flat.device)].cpu().double()


def _difference(expected: list[_Leaf], found: list[_Leaf]) -> str | None:
    if [leaf[:2] for leaf in expected] != [leaf[:2] for leaf in found]:
        return f"they are {_kinds(expected)} and {_kinds(found)}"
    for one, other in zip(expected, found, strict=True):
        rounding = _TOLERANCE if one.kind.startswith(("float", "bfloat", "complex")) else 0.0
        largest = float(one.values.nan_to_num(0.0, 0.0, 0.0).abs().max()) if len(one.values) else 0.0
        same = torch.isclose(one.values, other.values, rtol=0.0, atol=rounding * largest, equal_nan=True)
        if not same.all():
            place = int((~same).nonzero()[0])
            share = f"{float((~same).double().mean()):.0%} of the values compared in {one.where} differ"
            return f"{share}, such as {one.values[place]:g} and {other.values[place]:g}"
    return None


def _kinds(told: list[_Leaf]) -> str:
    return first_few([f"{where} {kind}" for where, kind, _ in told], 8) or "empty"
