"""Optimizer states in 8 or 4 bits: the parameters that have them, and their bytes.

Legend: n elements of a parameter, as the optimizer sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

_LARGE: Final = 2**16
_SIZES: Final = (*(2**power for power in range(2, 18)), *(_LARGE + 2**power for power in range(13)))
"""Elements of the parameters that are tried: powers of two show where compact states begin, those a little
larger than a power of two the required divisor."""


@dataclass(frozen=True, kw_only=True)
class CompactStates:
    """States of large enough parameters in fewer bits, in blocks with a scale each.

    Attributes:
        min_elements: elements of the smallest parameter with compact states.
        multiple: required divisor of the number of elements.
        bytes_per_element: bytes of all states together.
        block_elements, block_bytes: size of a block, and bytes added for each, the last partial one included;
            0 bytes where blocks are always whole and ``bytes_per_element`` contains them.
        fixed_bytes: bytes of lookup tables per parameter.
        shared_bytes: bytes of tables that all parameters share.
    """

    min_elements: int
    multiple: int
    bytes_per_element: float
    block_elements: int = 1
    block_bytes: int = 0
    fixed_bytes: int = 0
    shared_bytes: int = 0

    def has(self, n: np.ndarray) -> np.ndarray:
        """Whether parameters of ``n`` elements have compact states."""
        return np.asarray((n >= self.min_elements) & (n % self.multiple == 0))

    def num_bytes(self, n: np.ndarray) -> np.ndarray:
        """Bytes of compact states of parameters of ``n`` elements."""
        blocks = np.ceil(n / self.block_elements)
        return np.asarray(n * self.bytes_per_element + blocks * self.block_bytes + self.fixed_bytes)


def compact_states(
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> CompactStates | None:
    """Compact states of an optimizer, found by steps on parameters of many sizes; ``None`` if all are plain.

    States that parameters share are not counted. Functions that the optimizer compiles stay eager.
    """
    state_bytes, shared = _measure_states(make_optimizer, _SIZES)
    # The two smallest sizes have plain states: a line through them gives plain states of any size.
    per_element = (state_bytes[_SIZES[1]] - state_bytes[_SIZES[0]]) / (_SIZES[1] - _SIZES[0])
    constant = state_bytes[_SIZES[0]] - per_element * _SIZES[0]
    compact = [n for n in _SIZES if state_bytes[n] < per_element * n + constant]  # below that line
    if not compact or _LARGE not in compact:
        return None
    smallest = _smallest_compact(make_optimizer, min(compact), per_element, constant)
    # Sizes above _LARGE exceed it by powers of two: the least that is compact shows the divisor.
    multiple = min(n - _LARGE for n in compact if n > _LARGE and n != 2 * _LARGE)
    slope = (state_bytes[2 * _LARGE] - state_bytes[_LARGE]) / _LARGE  # with the scales of blocks
    fixed_bytes = round(state_bytes[_LARGE] - slope * _LARGE - constant)
    block_elements, block_bytes = 1, 0
    if multiple == 1:
        next_size, two = _LARGE + 1, _LARGE + 2
        inner = float(state_bytes[two] - state_bytes[next_size])  # an element more in a block that has begun
        block_bytes = round(state_bytes[next_size] - state_bytes[_LARGE] - inner)  # of a new block
        if block_bytes:  # slope = inner + block_bytes / block_elements
            block_elements, slope = round(block_bytes / (slope - inner)), inner
    return CompactStates(
        min_elements=smallest,
        multiple=multiple,
        bytes_per_element=slope,
        block_elements=block_elements,
        block_bytes=block_bytes,
        fixed_bytes=fixed_bytes,
        shared_bytes=shared,
    )


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors that hold a tensor's memory: itself, or a wrapper's parts (DTensor, a quantized state)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh as well
            yield from plain_tensors(part)


def _smallest_compact(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    compact: int,
    per_element: float,
    constant: float,
) -> int:
    half = compact // 2  # which is not compact: powers of two were tried
    sizes = sorted({half + half * part // 16 for part in range(1, 16)} - {half})  # sixteenths of the half
    state_bytes, _ = _measure_states(make, sizes) if sizes else ({}, 0)
    return min((n for n in sizes if state_bytes[n] < per_element * n + constant), default=compact)


def _measure_states(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], sizes: Sequence[int]
) -> tuple[dict[int, int], int]:
    """Bytes of states of a single parameter by its number of elements, and bytes of all other states."""
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds
        optimizer.step()
    storages = [_storage_bytes(optimizer.state[parameter].values()) for parameter in parameters]
    owners = Counter(key for state in storages for key in state)  # parameters that have each storage
    of_one = {
        size: sum(num_bytes for key, num_bytes in state.items() if owners[key] == 1)
        for size, state in zip(sizes, storages, strict=True)
    }
    shared = {key: num_bytes for state in storages for key, num_bytes in state.items() if owners[key] > 1}
    return of_one, sum(shared.values())


def _storage_bytes(values: Iterable[object]) -> dict[int, int]:
    """Bytes of the memory behind all tensors of ``values``, by address."""
    tensors = (part for value in values if isinstance(value, torch.Tensor) for part in plain_tensors(value))
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
