"""Communication time: gathers, reductions, and exchanges between ranks that divide the model or a sample.

Legend: R plans of one kind, B samples in a micro-batch, T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from atorch_ns.costs.collectives import Groups, collective_seconds
from atorch_ns.estimate.model_shard import (
    DTYPE_BYTES,
    LOSS_CALLS,
    LOSS_NUMBERS,
    ShardUnit,
    bucket_sizes,
    computed_in,
    cost_of,
    gathered_bytes,
    reduced_bytes,
)
from atorch_ns.estimate.time.context import PricingContext
from atorch_ns.estimate.time.passes import Passes, is_chosen, low_bit_rate, recomputed_shares
from atorch_ns.profile import ParameterSpec, Segment


def gather_and_reduce(context: PricingContext, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    """[R] exposed seconds of a step for gathering parameters and for reducing gradients."""
    if context.plan.gradient_sync == "reduce_scatter":
        return _by_units(context, passes)
    nothing = np.zeros(len(context.micro_batches))
    if context.plan.gradient_sync == "all_reduce":
        return _broadcast_of_updates(context), _of_replicas(context, passes)
    return _broadcast_of_updates(context), nothing


def _of_replicas(context: PricingContext, passes: Passes) -> np.ndarray:
    # By DistributedDataParallel, or at the end of the backward pass where ranks hold parts of the model.
    if not context.parts.divides:
        return _by_buckets(context, passes)
    num_bytes = sum(
        reduced_bytes(context.plan, unit.parameters) * context.share_of(unit) * context.count(unit)
        for unit in context.units
    )
    groups = context.data_groups
    seconds = collective_seconds("all_reduce", num_bytes, groups, context.hardware)
    # Gradients are read and written on their way into one tensor, and on their way out of it.
    copy_bytes = num_bytes * np.where(groups.size > 1, 4, 0) + 3 * num_bytes * (context.micro_batches - 1)
    at_end = seconds + copy_bytes / context.hardware.device.update_bytes_per_s
    return np.where(context.sizes.divides_model, at_end, _by_buckets(context, passes))


def _by_buckets(context: PricingContext, passes: Passes) -> np.ndarray:
    device, num_bytes = context.hardware.device, float(sum(bucket_sizes(context.plan, context.trace)))
    count = len(bucket_sizes(context.plan, context.trace))
    seconds = collective_seconds("all_reduce", num_bytes, context.data_groups, context.hardware, count=count)
    last = seconds / max(1, count)  # the last bucket has no backward pass left to hide behind
    backward = context.parts.total([each.backward for each in passes.segments])
    exposed_s = _exposed_seconds(seconds, backward, context.hardware.within_node.overlap)
    # Each gradient goes into its bucket, which reads one tensor and writes one; further passes add to it.
    copy_bytes = num_bytes * (2 + 3 * (context.micro_batches - 1))
    return np.asarray(np.maximum(last, exposed_s) + copy_bytes / device.update_bytes_per_s)


def _exposed_seconds(seconds: np.ndarray, computing: np.ndarray | float, overlap: float) -> np.ndarray:
    # [R] seconds of collectives not hidden by the computation beside them, which hides a share ``overlap``.
    return np.asarray(seconds - overlap * np.minimum(seconds, computing))


def _by_units(context: PricingContext, passes: Passes) -> tuple[np.ndarray, np.ndarray]:
    plan, micro_batches = context.plan, context.micro_batches
    gather, reduce = np.zeros(len(micro_batches)), np.zeros(len(micro_batches))
    # On a CPU, fully_shard waits for each collective where it starts it.
    overlap = 0.0 if context.hardware.device.type == "cpu" else context.hardware.within_node.overlap
    # A pipeline keeps a backward pass's gathered parameters for the next pass, and its root for the step;
    # or all of it for the step.
    is_cut = context.sizes.pipeline > 1
    in_pipeline = 1 if plan.sharding.keeps_gathered else (micro_batches + 1) / 2
    passes_gathered = np.where(is_cut, in_pipeline, micro_batches)
    each_reduced = bool(plan.sharding.reduces_each) & ~is_cut
    passes_reduced = np.where(each_reduced, micro_batches, 1)
    added_share = np.where(each_reduced, 1.0 / context.shard_groups.size, 1.0)
    is_first = True
    for unit in context.units:
        gather_s, reduce_s, add_s = _unit_seconds(context, unit)
        count = context.count(unit)
        reduce = reduce + (micro_batches - 1) * count * add_s * added_share
        if unit.is_root:
            gather = gather + gather_s * np.where(is_cut, 1, micro_batches)
            reduce = reduce + reduce_s * passes_reduced
            continue
        each = passes.segments[unit.segment]
        # Prefetched behind the neighbour's computation, which is taken to be as long as its own; the first
        # has none, and in the backward pass the last reduction has none.
        ahead = _exposed_seconds(gather_s, each.forward, overlap)
        gather = gather + passes_gathered * (count * ahead + is_first * (gather_s - ahead))
        behind = each.backward + each.recompute
        if not plan.sharding.keeps_gathered:
            gather = gather + passes_gathered * count * _exposed_seconds(gather_s, behind, overlap)
            behind = np.maximum(0.0, behind - gather_s)  # the time left to hide the reduction
        exposed_s = _exposed_seconds(reduce_s, behind, overlap)
        reduce = reduce + passes_reduced * (count * exposed_s + is_first * (reduce_s - exposed_s))
        is_first = False
    return gather, reduce


def _unit_seconds(
    context: PricingContext, unit: ShardUnit
) -> tuple[np.ndarray, np.ndarray, np.ndarray | float]:
    # [R] seconds of one gather, of one reduction, and of adding one more micro-batch's gradients.
    plan, hardware = context.plan, context.hardware
    shard, device = context.shard_groups, hardware.device
    share = context.share_of(unit)
    weights = gathered_bytes(plan, unit.parameters) * share
    gradients = reduced_bytes(plan, unit.parameters) * share
    # A gather writes a new buffer and copies it into new parameters; a reduction copies gradients into a new
    # buffer and makes new shards. Shards are cast before and after, where dtypes differ.
    copies = 3 * weights + 2 * weights / shard.size
    gather = collective_seconds("all_gather", weights, shard, hardware) + copies / device.memory_bytes_per_s
    copies = 2 * gradients + 3 * gradients / shard.size
    reduce = collective_seconds("reduce_scatter", gradients, shard, hardware)
    reduce = reduce + copies / device.memory_bytes_per_s
    replicas = context.replica_groups
    if (replicas.size > 1).any():
        reduce = reduce + collective_seconds("all_reduce", gradients / shard.size, replicas, hardware)
    return gather, reduce, 3 * gradients / device.update_bytes_per_s


def _broadcast_of_updates(context: PricingContext) -> np.ndarray:
    plan = context.plan
    if not plan.sharding.optimizer_over:  # else owners send updated parameters to all
        return np.zeros(len(context.micro_batches))
    num_bytes = number = np.zeros(len(context.micro_batches))
    for unit in context.units:
        parameters, count = [p for p in unit.parameters if p.trainable], context.count(unit)
        num_bytes = num_bytes + count * context.share_of(unit) * gathered_bytes(plan, parameters)
        number = number + count * len(parameters)
    return collective_seconds("broadcast", num_bytes, context.shard_groups, context.hardware, count=number)


_OPERATORS = 4.0  # of one exchange, on the host: an autograd node, a buffer, the collective, its wait


class Exchange(NamedTuple):
    """Exchanges of one instance of a segment in one micro-batch, all passes together.

    Attributes:
        seconds: [R] seconds of communication.
        operators: [R] operators started on the host.
    """

    seconds: np.ndarray | float
    operators: np.ndarray | float


def exchanges_of(context: PricingContext) -> tuple[Exchange, ...]:
    """Every segment's exchanges along ``tensor`` (asynchronous ones hidden), ``sequence`` and ``expert``."""
    segments = context.trace.segments
    if not context.parts.divides:
        return (Exchange(0.0, 0.0),) * len(segments)
    again = recomputed_shares(context.plan, segments)
    exchanges = []
    for s in range(len(segments)):
        seconds, calls = np.zeros(len(context.sizes)), np.zeros(len(context.sizes))
        for axis, of in (
            ("tensor", _tensor_exchanges),
            ("sequence", _sequence_exchanges),
            ("expert", _expert_exchanges),
        ):
            size = getattr(context.sizes, axis)
            if (size > 1).any():
                more, count = of(context, context.groups((axis,)), s, again[s])
                seconds = seconds + np.where(size > 1, more, 0.0)
                calls = calls + np.where(size > 1, count, 0.0)
        exchanges.append(Exchange(seconds, _OPERATORS * calls))
    return tuple(exchanges)


def partial_sums(context: PricingContext) -> np.ndarray:
    """[R] seconds of summing gradients along ``sequence`` once a step; 0 if a reduction of shards does so."""
    size = context.sizes.sequence
    sharding = context.plan.sharding
    if not (size > 1).any() or (sharding.gradients_over and sharding.layout == "rows"):
        return np.zeros(len(size))
    num_bytes = context.parts.total(
        [
            float(reduced_bytes(context.plan, part.parameters)) * (np.asarray(context.parts.positions(s)) > 1)
            for s, part in enumerate(context.trace.segments)
        ]
    )
    return collective_seconds("all_reduce", num_bytes, context.groups(("sequence",)), context.hardware)


def _tensor_exchanges(
    context: PricingContext, groups: Groups, s: int, again: float
) -> tuple[np.ndarray, np.ndarray | float]:
    # Megatron's sums. A divided residual stream has a gather and a scattered sum for each: as many bytes.
    segment, positions = context.trace.segments[s], context.parts.positions(s)
    output = _output_bytes(context, s) / positions
    # Of row layers forward, of groups of column layers backward; recomputation stops before its last one.
    count = 2 * segment.num_rows + again * max(0, segment.num_rows - 1)
    seconds = collective_seconds("all_reduce", output * count, groups, context.hardware, count=count)
    if segment.is_block and context.sizes.asynchronous.any():
        is_joined = context.sizes.asynchronous & (groups.within == groups.size)
        seconds = seconds - np.where(is_joined, _hidden_seconds(context, groups, s, again), 0.0)
    words = words_of(segment)
    if not words:
        return seconds, count
    if s < len(context.trace.segments) - 1:  # the embedding's rows are summed
        return seconds + collective_seconds("all_reduce", output, groups, context.hardware), count + 1.0
    # The head: logits are gathered, or a loss on parts of them sums three numbers for each token.
    weights, autocast = computed_in(context.plan)
    tokens = context.num_samples * context.num_tokens / positions
    num_bytes = tokens * DTYPE_BYTES.get(autocast or weights, 4)
    logits = collective_seconds("all_gather", num_bytes * words[0].shape[0], groups, context.hardware)
    hidden = collective_seconds("all_reduce", num_bytes * words[0].shape[1], groups, context.hardware)
    parts = context.sizes.parallel_loss
    numbers = tokens * context.trace.loss_share * LOSS_NUMBERS * DTYPE_BYTES["float32"]
    sums = collective_seconds("all_reduce", numbers, groups, context.hardware, count=LOSS_CALLS)
    return seconds + np.where(parts, sums, logits) + hidden, count + np.where(parts, LOSS_CALLS, 1) + 1.0


def words_of(segment: Segment) -> list[ParameterSpec]:
    """Matrices of an embedding or a head outside blocks, which are divided by rows; the largest first."""
    words = [p for p in segment.parameters if p.is_vocabulary and len(p.shape) == 2 and not segment.is_block]
    return sorted(words, key=lambda p: p.shape[0], reverse=True)


def _hidden_seconds(context: PricingContext, groups: Groups, s: int, again: float) -> np.ndarray:
    # [R] seconds of gathers and scattered sums that asynchronous exchange hides in a block.
    plan, device = context.plan, context.hardware.device
    if plan.compiler != "inductor":  # inductor alone joins a product with the exchange beside it
        return np.zeros(len(context.sizes))
    segment, n = context.trace.segments[s], groups.size
    weights, autocast = computed_in(plan)
    dtype = autocast or weights
    tokens = context.num_samples * context.num_tokens / context.sizes.sequence
    output = _output_bytes(context, s) / context.sizes.sequence
    exchange = collective_seconds("all_gather", output, groups, context.hardware)
    narrow, width = plan.precision.narrow, DTYPE_BYTES.get(dtype, 4)
    low_bit_s = collective_seconds("all_gather", output / width, groups, context.hardware)
    largest = collective_seconds("all_reduce", DTYPE_BYTES["float32"], groups, context.hardware)

    def saving(matrices: Sequence[ParameterSpec], *, is_scattered: bool) -> np.ndarray:
        elements = sum(each.num_elements for each in matrices) / n
        rate, num_bytes, hidden, apart = device.products_of(dtype), width, exchange, np.zeros(1)
        in_fewer = {narrow is not None and is_chosen(narrow, segment, each) for each in matrices}
        if narrow is not None and True in in_fewer:
            rate, num_bytes = low_bit_rate(plan, device), 1
            if not is_scattered:
                # With one scale a tensor, gathers move a byte an element, after an exchange of the largest
                # value; with one scale a row they are waited for.
                if not narrow.gathered or len(in_fewer) > 1:
                    return np.zeros(len(context.sizes))
                hidden, apart = low_bit_s, low_bit_s + largest - exchange
        product = 2 * tokens * elements / rate
        traffic = (n - 1) * elements * num_bytes  # each of n pieces of the product reads the weight anew
        if is_scattered:  # a kernel of its own reads and adds the partial sums that ranks have sent
            traffic = traffic + output * (1 + 1 / n)
        # Copy engines move n - 1 pieces while others are multiplied, and take no multiprocessor from the
        # products: at most 1 - 1/n of a product's time hides an exchange.
        gain = np.minimum(hidden, product * (1 - 1 / n)) - traffic / device.memory_bytes_per_s
        return np.asarray(gain - apart)

    total = np.zeros(len(context.sizes))
    for index, (columns, row) in enumerate(regions := _column_row_regions(segment)):
        gathers, sums = saving(columns, is_scattered=False), saving([row], is_scattered=True)
        # Forward, both exchanges are joined. Recomputation stops before its last sum.
        total = total + (1 + again) * gathers + (1 + again * (index < len(regions) - 1)) * sums
        total = total + saving([row], is_scattered=False)  # the gather backward
        if len(columns) == 1:  # gradients of several columns are added before the scattered sum backward
            is_joined = np.full(len(context.sizes), True)
            if narrow is not None and is_chosen(narrow, segment, columns[0]):
                is_joined = narrow.gathered & np.equal(context.num_samples, 1)  # fewer bits: one sample
            total = total + np.where(is_joined, saving(columns, is_scattered=True), 0.0)
    return total


def _column_row_regions(segment: Segment) -> list[tuple[list[ParameterSpec], ParameterSpec]]:
    matrices = [each for each in segment.parameters if len(each.shape) == 2 and each.tensor_dim is not None]
    regions: list[tuple[list[ParameterSpec], ParameterSpec]] = []
    columns: list[ParameterSpec] = []
    for each in matrices:
        if each.tensor_dim == matrices[0].tensor_dim:  # a block begins with one of columns
            columns.append(each)
        elif columns:
            regions.append((columns, each))  # the row layer behind them
            columns = []
    return regions


def _sequence_exchanges(
    context: PricingContext, groups: Groups, s: int, again: float
) -> tuple[np.ndarray, np.ndarray | float]:
    trace, segment = context.trace, context.trace.segments[s]
    if not segment.is_block:
        return np.zeros(len(context.sizes)), 0.0
    # Keys and values may have fewer heads than queries.
    heads = trace.num_key_value_heads / trace.num_heads if trace.num_heads else 1.0
    width = _output_bytes(context, s) / context.sizes.tensor
    if not segment.num_attentions:  # written out: keys and values are gathered, gradients' sums scattered
        gathers = 2 * (2 + again)
        num_bytes = width * heads * gathers
        return collective_seconds("all_gather", num_bytes, groups, context.hardware, count=gathers), gathers
    passes = segment.num_attentions * (2 + again)
    is_ring = context.sizes.is_ring
    # Ulysses: queries, keys, values and results each change between tokens and heads.
    count = 4 * passes
    num_bytes = width * (2 + 2 * heads) * passes / context.sizes.sequence
    seconds = collective_seconds("all_to_all", num_bytes, groups, context.hardware, count=count)
    if not is_ring.any():
        return seconds, count
    # A ring: keys and values pass every rank forward, and backward with their gradients.
    turns = segment.num_attentions * (1 + again + 2)
    around = collective_seconds(
        "all_gather", width * 2 * heads * turns, groups, context.hardware, count=turns
    )
    return np.where(is_ring, around, seconds), np.where(is_ring, turns, count)


def _expert_exchanges(
    context: PricingContext, groups: Groups, s: int, again: float
) -> tuple[np.ndarray, float]:
    # Tokens go to the ranks that hold their experts, and results come back, in both passes.
    count = 2 * context.trace.segments[s].num_routed * (2 + again)
    num_bytes = _output_bytes(context, s) * max(1, context.trace.experts_per_token)
    return collective_seconds("all_to_all", num_bytes * count, groups, context.hardware, count=count), count


def _output_bytes(context: PricingContext, s: int) -> np.ndarray:
    cost = cost_of(context.plan, context.trace.segments[s])
    return np.asarray(cost.output.at(context.num_samples, context.num_tokens), dtype=float)  # [B, T, D]
