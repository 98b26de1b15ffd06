"""Model states: parameters, gradients and optimizer states that a rank keeps between steps, exactly.

Legend: N plans, K numbers of ranks, P distinct parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from atorch_ns.estimate.memory.shards import (
    Parameters,
    Share,
    flat_share,
    num_trainable,
    row_share,
    whole_share,
)
from atorch_ns.estimate.model_shard import DTYPE_BYTES, Memo, stored_dtype, units_of
from atorch_ns.profile import OptimizerSpec, ParameterSpec, Trace
from atorch_ns.strategy import Plan


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that the fullest rank holds after a training step, for K numbers of ranks.

    Attributes:
        parameters: [K] weights; buffers are not among them.
        gradients: [K] bytes in ``grad`` of parameters and masters.
        optimizer: [K] states and fp32 copies of weights.
    """

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray


def parameters_of(trace: Trace, plan: Plan, *, tied: bool = False) -> Parameters:
    """The distinct parameters, with their units under the plan: 0 for the rest of the model, then one for
    each run of equal blocks. Those flattened into one vector with the rest are listed once for each block.

    Args:
        plan: the plan; only fields that differ in kind are read.
        tied: list further uses of tied parameters too, at the end and without copies.
    """
    own_units = [unit.segment for unit in units_of(plan, trace) if not unit.is_root]
    units = {segment: number for number, segment in enumerate(own_units, 1)}
    entries: list[dict[str, Any]] = []  # fields of Parameters
    for index, segment in enumerate(trace.segments):
        is_separate = index in units or plan.sharding.layout != "flat"
        # In the root's flat vector each block has its own place, so its parameters are listed block by block.
        copies, times_listed = (segment.count, 1) if is_separate else (1, segment.count)
        use = {"copies": copies, "unit": units.get(index, 0), "segment": index, "owner": -1}
        specs = [spec for spec in segment.parameters if spec.tied_to is None]
        entries += [_describe_spec(spec, plan) | use for spec in specs] * times_listed
    homes = _home_segments(trace) if tied else {}
    for index, segment in enumerate(trace.segments):
        for spec in segment.parameters:
            if spec.tied_to in homes:
                home, first = homes[spec.tied_to]
                use = {"copies": 0, "unit": units.get(index, 0), "segment": index, "owner": home}
                entries.append(_describe_spec(first, plan) | use)
    names = [field.name for field in fields(Parameters)]
    shapes = tuple(entry["shapes"] for entry in entries)
    columns = {name: np.asarray([entry[name] for entry in entries], dtype=np.int64) for name in names[1:]}
    return Parameters(shapes, **columns | {name: columns[name] > 0 for name in _TRUTHS})


_TRUTHS = ("is_float", "trainable", "by_rows", "is_expert")  # fields that are 0 or 1


def _describe_spec(spec: ParameterSpec, plan: Plan) -> dict[str, Any]:
    dtype = stored_dtype(plan, spec, None)
    dim = spec.tensor_dim
    return {
        "shapes": spec.shape,
        "elements": math.prod(spec.shape),
        "rows": spec.shape[0] if spec.shape else 0,
        "itemsize": DTYPE_BYTES.get(dtype, 4),
        "is_float": "float" in dtype,
        "trainable": spec.trainable,
        "divisible": 0 if dim is None else spec.shape[dim],
        "by_rows": dim == 0,
        "is_expert": spec.is_expert,
    }


def _home_segments(trace: Trace) -> dict[str | None, tuple[int, ParameterSpec]]:
    homes: dict[str | None, tuple[int, ParameterSpec]] = {}
    for index, segment in enumerate(trace.segments):
        for name, spec in segment.parameter_names.items():
            if spec.tied_to is None:
                homes[name] = (index, spec)
    return homes


@dataclass(frozen=True)
class Shares:
    """The division of parameters, gradients and optimizer states in one kind of plan.

    Attributes:
        parameters, gradients, optimizer: the share of each.
    """

    parameters: Share
    gradients: Share
    optimizer: Share


def shares_of(
    plan: Plan,
    parameters: Parameters,
    spec: OptimizerSpec | None,
    degrees: np.ndarray,
    *,
    memo: Memo | None = None,
) -> Shares:
    """The division of states over each number of ranks in ``degrees`` ([K], or [K, P] in rows)."""
    everything = _undivided_share(parameters, len(degrees))
    share = _divided_share(plan, parameters, spec, degrees, memo=memo or Memo())
    return Shares(
        parameters=share if plan.sharding.parameters_over else everything,
        gradients=share if plan.sharding.gradients_over else everything,
        optimizer=share if plan.sharding.optimizer_over else everything,
    )


def _undivided_share(parameters: Parameters, num: int) -> Share:
    whole = np.broadcast_to(parameters.elements.astype(float), (num, parameters.elements.shape[-1]))
    return Share(whole, whole, num_trainable(parameters, num))


def _divided_share(
    plan: Plan, parameters: Parameters, spec: OptimizerSpec | None, degrees: np.ndarray, *, memo: Memo
) -> Share:
    if plan.sharding.layout == "rows":
        return row_share(parameters, degrees)
    if plan.sharding.layout == "flat":
        share = flat_share(parameters, degrees, multiple=plan.sharding.flat_multiple, extra=1)
        # The optimizer sees one vector for each unit, not the parameters in it.
        units = dict(zip(parameters.unit.tolist(), parameters.copies.tolist(), strict=True))
        return replace(share, parameters=np.full(len(degrees), sum(units.values())))
    costs = state_bytes_of(plan, parameters, spec, parameters.elements) + (spec.fixed_bytes if spec else 0)
    # Experts and the parameters beside them are given to the ranks that have the same experts.
    ranks = degrees.reshape(len(degrees), -1).min(axis=1)
    arrays = (parameters.elements, parameters.copies, parameters.trainable, ranks, costs)
    key = ("whole share", *((array.shape, array.tobytes()) for array in arrays))
    return memo.get(key, lambda: whole_share(parameters, ranks, costs))


def state_bytes_of(
    plan: Plan, parameters: Parameters, spec: OptimizerSpec | None, elements: np.ndarray
) -> np.ndarray:
    """[P] or [K, P] bytes of states of ``elements`` of one copy of each parameter; without fixed sizes."""
    plain = elements * _state_itemsizes(plan, parameters, spec)
    if spec is None or spec.compact is None:
        return np.asarray(plain)
    small = spec.compact.num_bytes(elements) * parameters.trainable
    return np.asarray(np.where(spec.compact.has(elements), small, plain))


def _state_itemsizes(plan: Plan, parameters: Parameters, spec: OptimizerSpec | None) -> np.ndarray:
    itemsizes = _updated_itemsizes(plan, parameters)
    total = np.zeros(len(itemsizes))
    for dtype in spec.state_dtypes if spec else ():
        total += itemsizes if dtype == "same" else DTYPE_BYTES.get(dtype, 4)  # as the updated tensor
    return np.asarray(total * parameters.trainable)  # [P] bytes for each element


def _updated_itemsizes(plan: Plan, parameters: Parameters) -> np.ndarray:
    if plan.precision.master_dtype is None:  # [P] bytes of an element
        return parameters.itemsize
    return np.where(
        has_master(plan, parameters), DTYPE_BYTES[plan.precision.master_dtype], parameters.itemsize
    )


def has_master(plan: Plan, parameters: Parameters) -> np.ndarray:
    """[P] whether the optimizer updates an fp32 copy: of 16-bit parameters that train."""
    sixteen = (parameters.itemsize == 2) & parameters.is_float & parameters.trainable
    return np.asarray(np.logical_and(sixteen, plan.precision.master_dtype is not None))


def kept_of(plan: Plan, parameters: Parameters, shares: Shares, spec: OptimizerSpec | None) -> KeptBytes:
    """Bytes that a plan keeps between steps, of its parameters as they are shared."""
    copies, trains = parameters.copies, parameters.trainable
    masters = has_master(plan, parameters)
    itemsizes = _updated_itemsizes(plan, parameters)
    weights = _weighted_sum(shares.parameters.stored, copies * parameters.itemsize)
    # Rows of dim 0 come out of the reduction padded; masters copy the rows without padding.
    of_gradients = np.where(masters, shares.gradients.elements, shares.gradients.stored)
    gradients = _weighted_sum(of_gradients, copies * trains * itemsizes)
    elements = shares.optimizer.elements
    optimizer = _all_states(plan, parameters, elements, spec)
    if spec is not None:
        optimizer = optimizer + shares.optimizer.parameters * spec.fixed_bytes
    # Masters are made of every parameter that the rank holds, whoever updates it.
    optimizer = optimizer + _weighted_sum(shares.parameters.elements, copies * masters * itemsizes)
    if plan.sharding.updates_copy:  # DeepSpeed's flat copy of the rank's share
        optimizer = optimizer + _weighted_sum(elements, copies * trains * itemsizes)
    if plan.sharding.frees_gradients:
        gradients = np.zeros_like(gradients)
    return KeptBytes(weights, gradients, optimizer)


def _all_states(
    plan: Plan, parameters: Parameters, elements: np.ndarray, spec: OptimizerSpec | None
) -> np.ndarray:
    copies = parameters.copies
    if spec is None or spec.compact is None:
        return _weighted_sum(elements, copies * _state_itemsizes(plan, parameters, spec))
    shared = spec.compact.shared_bytes
    # Compact states depend on the size of the tensor that the optimizer sees: a whole parameter, of which
    # ``elements`` is a mean over copies; a unit's vector; or else the rank's part of the parameter.
    if plan.sharding.layout == "parameters" and plan.sharding.optimizer_over:
        share = elements / np.maximum(parameters.elements, 1)
        whole = state_bytes_of(plan, parameters, spec, parameters.elements)
        return np.asarray((share * copies * whole).sum(axis=-1) + shared)
    if plan.sharding.layout == "flat" and plan.sharding.optimizer_over:
        return _states_of_units(plan, parameters, elements, spec) + shared
    return np.asarray((copies * state_bytes_of(plan, parameters, spec, elements)).sum(axis=-1) + shared)


def _states_of_units(
    plan: Plan, parameters: Parameters, elements: np.ndarray, spec: OptimizerSpec
) -> np.ndarray:
    assert spec.compact is not None
    total = np.zeros(len(elements))  # [K] bytes of states of the units' vectors
    plain = elements * _state_itemsizes(plan, parameters, spec)
    for unit in np.unique(parameters.unit):
        members = np.flatnonzero((parameters.unit == unit) & parameters.trainable)
        if members.size:
            n = elements[:, members].sum(axis=1)  # [K] length of the vector
            each = np.where(spec.compact.has(n), spec.compact.num_bytes(n), plain[:, members].sum(axis=1))
            total += each * int(parameters.copies[members[0]])
    return total


def _weighted_sum(elements: np.ndarray, weights: np.ndarray) -> np.ndarray:
    # [K] from [K, P] elements and [P] or [K, P] weights.
    return elements @ weights if weights.ndim == 1 else np.asarray((elements * weights).sum(axis=-1))
