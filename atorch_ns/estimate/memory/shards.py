"""Shards: the elements of each parameter that a rank holds, for every way of dividing them.

Legend: P distinct parameters (those of a repeated block once), N numbers of ranks, K parts of a model.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from atorch_ns.sharding import unit_dim


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model as columns; tied ones once.

    Attributes:
        shapes: the shapes of the whole parameters.
        elements: [P] elements of the whole parameter.
        rows: [P] its first dimension; 0 for a parameter without dimensions.
        itemsize: [P] bytes of an element, as it is kept between steps.
        is_float: [P] whether it is a floating parameter.
        trainable: [P] whether it trains.
        copies: [P] how many there are: the number of blocks that have it.
        unit: [P] the unit that gathers it.
        segment: [P] the segment that uses it first.
        divisible: [P] size of the dim along which tensor parallelism divides it; 0 for one that stays whole.
        by_rows: [P] whether that is the first dim.
        is_expert: [P] whether it belongs to experts; of parts, whether the axis of experts divides it.
        owner: [P] the segment of the first use, for a further use of a tied parameter; else -1.

    Of parts of a model, ``elements``, ``rows``, ``copies`` and ``is_expert`` are [K, P].
    """

    shapes: tuple[tuple[int, ...], ...]
    elements: np.ndarray
    rows: np.ndarray
    itemsize: np.ndarray
    is_float: np.ndarray
    trainable: np.ndarray
    copies: np.ndarray
    unit: np.ndarray
    segment: np.ndarray
    divisible: np.ndarray
    by_rows: np.ndarray
    is_expert: np.ndarray
    owner: np.ndarray

    def part(self, tensor: np.ndarray, expert: np.ndarray, counts: np.ndarray) -> Parameters:
        """The part of each on one rank: [K, P] columns for K divisions of the model.

        Args:
            tensor, expert: [K] ranks along these axes.
            counts: [K, S] blocks of each segment on the rank.
        """
        by_tensor = np.where(
            (self.divisible > 0) & (self.divisible % tensor[:, None] == 0), tensor[:, None], 1
        )
        by_expert = np.where(self.is_expert, expert[:, None], 1)
        copies = counts[:, self.segment]
        # A tied parameter is another one where the rank has not the stage of its first use.
        is_tied = self.owner >= 0
        loans = np.where(counts[:, np.maximum(self.owner, 0)] > 0, 0, np.minimum(copies, 1))
        rows = self.rows // np.where(self.by_rows, by_tensor, 1) // by_expert
        return replace(
            self,
            elements=self.elements // by_tensor // by_expert,
            rows=np.maximum(rows, np.minimum(self.rows, 1)),
            copies=np.where(is_tied, loans, copies),
            is_expert=by_expert > 1,
        )


@dataclass(frozen=True)
class Share:
    """The part of all parameters on the rank that holds most, for each number of ranks.

    Attributes:
        stored: [N, P] elements of memory for one copy of each parameter, padding included.
        elements: [N, P] elements that the optimizer updates, padding not included. Where ranks differ these
            are of the rank that has most in all.
        parameters: [N] parameters that the rank has a part of and that train.
        is_turned: [N, P] whether another dimension than the first is divided, so that gathers copy once more.
    """

    stored: np.ndarray
    elements: np.ndarray
    parameters: np.ndarray
    is_turned: np.ndarray | int = 0


def row_share(parameters: Parameters, degrees: np.ndarray) -> Share:
    """Rows of dim 0, as ``fully_shard`` divides: ``torch.chunk``, each chunk padded to the first one's size.

    Another dimension is divided evenly, where ``unit_dim`` takes one. Parameters without dimensions are kept
    by every rank. The first rank holds most.

    Args:
        parameters: parameters of the model, or [N, P] of parts of it.
        degrees: [N], or [N, P] where some are divided over fewer ranks.
    """
    columns = (np.maximum(parameters.rows, 1), parameters.elements, parameters.is_expert)
    rows, elements, is_expert, ranks = np.broadcast_arrays(*columns, degrees.reshape(len(degrees), -1))
    local_rows = -(-rows // ranks)  # the first rank's rows, rounded up
    storage = np.where(parameters.rows > 0, local_rows * (elements // rows), elements)
    # Of a parameter that the tensor axis has divided torch takes the rows.
    is_whole = elements == [math.prod(shape) for shape in parameters.shapes]
    is_turned = is_expert | (is_whole & (rows < ranks))
    for p in np.flatnonzero(is_turned.any(axis=0)):
        is_turned[:, p] &= unit_dim(parameters.shapes[p], ranks[:, p], is_divided=is_expert[:, p]) > 0
    storage = np.where(is_turned, elements // ranks, storage)
    return Share(storage, storage, num_trainable(parameters, len(degrees)), is_turned)


def num_trainable(parameters: Parameters, num: int) -> np.ndarray:
    """[N] parameters that train, on the rank."""
    count = (parameters.copies * parameters.trainable).sum(axis=-1)
    return np.array(np.broadcast_to(count, num))


def flat_share(parameters: Parameters, degrees: np.ndarray, *, multiple: int = 1, extra: int = 0) -> Share:
    """Equal pieces of each unit as one vector.

    Args:
        parameters: parameters in the order in which they are flattened.
        degrees: [N] numbers of ranks.
        multiple: divisor of the length of each rank's piece.
        extra: extra elements per parameter on a rank that has a part of it; the most expensive rank counts.

    Padding is counted with the last parameter of each unit.
    """
    num = len(parameters.elements)
    storage, elements = np.zeros((len(degrees), num)), np.zeros((len(degrees), num))
    counts = np.zeros(len(degrees), dtype=np.int64)
    for index, degree in enumerate(degrees):
        # Pieces differ: the rank with the most trainable elements is priced.
        lengths, padding = _flat_pieces(parameters, int(degree), multiple)
        parts = (lengths > 0) @ (parameters.copies * parameters.trainable)
        rank = int(np.argmax(lengths @ (parameters.copies * parameters.trainable) + extra * parts))
        elements[index] = lengths[rank]
        storage[index] = lengths[rank] + padding[rank]
        counts[index] = parts[rank]
    return Share(storage, elements, counts)


def _flat_pieces(parameters: Parameters, degree: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """[degree, P] elements of each parameter on each rank, and padding, with the last one of each unit."""
    lengths = np.zeros((degree, len(parameters.elements)))
    padding = np.zeros_like(lengths)
    for unit in np.unique(parameters.unit):
        members = np.flatnonzero(parameters.unit == unit)
        ends = np.cumsum(parameters.elements[members])
        starts = ends - parameters.elements[members]
        piece = -(-int(ends[-1]) // (degree * multiple)) * multiple  # elements of a rank, padding included
        first = np.arange(degree)[:, None] * piece  # [degree, 1] where the pieces begin in the unit's vector
        lengths[:, members] = np.clip(np.minimum(ends, first + piece) - np.maximum(starts, first), 0, None)
        padding[:, members[-1]] = piece - lengths[:, members].sum(axis=1)
    return lengths, padding


def whole_share(parameters: Parameters, degrees: np.ndarray, costs: np.ndarray) -> Share:
    """Whole parameters given to ranks, the largest first to the rank that has least so far, as
    ``ZeroRedundancyOptimizer`` does and, with parameters sorted beforehand, OSS.

    Args:
        parameters: parameters of the model, or [N, P] of parts of it; only those that train are given.
        degrees: [N] numbers of ranks.
        costs: [P] or [N, P] costs of a parameter to its rank; the most expensive rank counts.
    """
    indices = np.flatnonzero(parameters.trainable)
    shape = (len(degrees), len(parameters.trainable))
    elements, copies, costs = (
        np.broadcast_to(each, shape) for each in (parameters.elements, parameters.copies, costs)
    )
    shares = np.zeros(shape)
    counts = np.zeros(len(degrees), dtype=np.int64)
    for index, degree in enumerate(degrees):
        instances = np.repeat(indices, copies[index, indices])  # copies may go to different ranks
        order = instances[np.argsort(-elements[index, instances], kind="stable")]
        owner = _assign_owners(elements[index, order].tolist(), int(degree))
        total = np.bincount(owner, weights=costs[index, order], minlength=int(degree))
        mine = order[owner == int(np.argmax(total))]
        number = np.bincount(mine, minlength=shape[1])
        shares[index] = number * elements[index] / np.maximum(copies[index], 1)  # the mean over copies
        counts[index] = len(mine)
    return Share(shares, shares, counts)


def _assign_owners(sizes: list[int], num_ranks: int) -> np.ndarray:
    # A heap of (elements, rank): of ranks with equally many the first, as ZeroRedundancyOptimizer takes it.
    waiting = [(0, rank) for rank in range(num_ranks)]
    owners = []
    for size in sizes:
        total, rank = heapq.heappop(waiting)
        owners.append(rank)
        heapq.heappush(waiting, (total + size, rank))
    return np.asarray(owners, dtype=np.int64)
