"""Moments of peak memory for plans whose ranks hold all gradients: one process, DDP, ZeRO 1.

Between the ends of a run of equal blocks memory changes by the same amount from block to block, so only the
first and the last block of each run can be the worst.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atorch_ns.costs.collectives import DEFAULT_BUCKET_BYTES
from atorch_ns.estimate.memory.activations import Activations, Place
from atorch_ns.estimate.memory.shards import Parameters
from atorch_ns.estimate.memory.states import KeptBytes, Shares
from atorch_ns.estimate.model_shard import DTYPE_BYTES, ModelShard, reported_bytes
from atorch_ns.profile import Trace
from atorch_ns.strategy import Plan


class Moment(NamedTuple):
    """Bytes at one moment, beyond those kept between steps.

    Attributes:
        name: index into :func:`moment_names`.
        gradients: [R] gradients of parameters with communication buckets; a number if all plans agree.
        activations: [R] tensors saved for the backward pass or needed by operators.
        temporaries: [R] gathered parameters, casts, buffers of collectives.
    """

    name: int
    gradients: np.ndarray | float
    activations: np.ndarray | float
    temporaries: np.ndarray | float


def moment_names(trace: Trace) -> tuple[str, ...]:
    """The moments in words: both passes of each segment's first and last block, and the optimizer's step."""
    names = []
    for segment in trace.segments:
        first, last = (segment.paths[0], segment.paths[-1]) if segment.paths else (segment.name, segment.name)
        names += [f"{way} of {path}" for way in ("forward", "backward") for path in (first, last)]
    return (*names, "the optimizer's step")


def places(kind: PlanGroup) -> Iterator[tuple[int, Place, int, int]]:
    """``(s, j, forward, backward)``: the ends of each run, with the indices of their moments.

    Where plans have different numbers of blocks, ``j`` is [R]; it means nothing where a rank has none.
    """
    # Names of a segment, from 4 s on: forward of its first and its last block, then backward of both.
    for s, count in enumerate(kind.parts.counts):
        if isinstance(count, np.ndarray):  # stages of a pipeline
            if not count.any():
                continue
            yield s, np.zeros_like(count), 4 * s, 4 * s + 2
            if (count > 1).any():
                yield s, count - 1, 4 * s + 1, 4 * s + 3
            continue
        for which, j in enumerate(sorted({0, count - 1})):
            end = which if count > 1 else 1  # a single block is the last one
            yield s, j, 4 * s + end, 4 * s + 2 + end


@dataclass(frozen=True)
class PlanGroup:
    """R plans that differ in sizes only, with the inputs of their moments.

    Attributes:
        plan: the plan that they have in common.
        activations: the activations of a micro-batch.
        parameters: the parameters of the model.
        shares: [K, P] division of states over K numbers of ranks.
        kept: [K] bytes of states.
        row: [R] index of the plan's number of ranks among the K.
        degree: [R] ranks that states are divided over.
        num_ranks: [R] ranks that see different data.
        micro_batches: [R] micro-batches of a step.
        parts: [R] part of the model that a rank holds.
        expanded: blocks of each segment that ``parameters`` lists one by one.
        is_cpu: whether collectives are gloo's, which copies the tensors that it reduces and gathers.
    """

    plan: Plan
    trace: Trace
    activations: Activations
    parameters: Parameters
    shares: Shares
    kept: KeptBytes
    row: np.ndarray
    degree: np.ndarray
    num_ranks: np.ndarray
    micro_batches: np.ndarray
    parts: ModelShard
    expanded: tuple[int, ...]
    is_cpu: bool

    @property
    def offloads(self) -> bool:
        """True if states stay outside the device's memory."""
        return self.plan.offload and not self.is_cpu

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer's states stay outside the device's memory."""
        return self.offloads or (self.plan.offload_optimizer and not self.is_cpu)

    def whole(
        self, s: int, itemsize: int | None = None, *, trainable: bool = True, times: np.ndarray | int = 1
    ) -> np.ndarray | float:
        """Bytes of one block's parameters, not divided over data, in an item size or their own.

        ``times``: [P] or [K, P], how often each counts.
        """
        mine = self._segment_mask(s, trainable)
        sizes = self.parameters.itemsize if itemsize is None else itemsize
        total = (self.parameters.elements * sizes * mine * times).sum(axis=-1) / self.expanded[s]
        return float(total) if total.ndim == 0 else np.asarray(total[self.row])

    def divided(
        self, s: int, itemsize: int | None = None, *, trainable: bool = True, times: np.ndarray | int = 1
    ) -> np.ndarray:
        """[R] bytes of a rank's part of one block's parameters, padding included; ``times`` as above."""
        mine = self._segment_mask(s, trainable)
        sizes = self.parameters.itemsize if itemsize is None else itemsize
        share = self.shares.gradients if trainable else self.shares.parameters
        total = (share.stored * (sizes * mine * times)).sum(axis=-1)
        return np.asarray(total[self.row] / self.expanded[s])

    def _segment_mask(self, s: int, trainable: bool) -> np.ndarray:
        mine = (self.parameters.segment == s) & (self.parameters.copies > 0)
        return np.asarray(mine & self.parameters.trainable if trainable else mine)  # [P] or [K, P]

    def later(self, s: int, j: Place, of: Sequence[np.ndarray | float]) -> np.ndarray | float:
        """Sums ``of`` (a value for a block of each segment) over all blocks that run forward later."""
        counts = self.parts.counts
        rest = sum(value * count for value, count in zip(of[s + 1 :], counts[s + 1 :], strict=True))
        return rest + of[s] * (counts[s] - 1 - j)

    def last_moment(self) -> int:
        """The optimizer's step."""
        return 4 * len(self.trace.segments)

    def step_temporaries(self) -> np.ndarray:
        """[R] temporary bytes of the optimizer's step."""
        spec = self.trace.optimizer
        if spec is None or self.offloads_optimizer:  # the host updates
            return np.zeros(len(self.row))
        itemsize = self.parameters.itemsize
        if self.plan.precision.master_dtype is not None:
            itemsize = np.maximum(itemsize, DTYPE_BYTES[self.plan.precision.master_dtype])
        num_bytes = self.shares.optimizer.elements * (itemsize * self.parameters.trainable)
        copies = self.parameters.copies
        everything = (num_bytes * copies).sum(axis=-1)
        num_bytes = num_bytes * (copies > 0)  # of one copy, where the rank has any
        if self.plan.sharding.updates_copy:  # the optimizer sees one vector
            largest = everything
        elif self.plan.sharding.layout == "parameters":
            # A share counts whole parameters, as a mean over copies.
            largest = ((num_bytes > 0) * (self.parameters.elements * itemsize)).max(axis=1, initial=0.0)
        else:
            largest = num_bytes.max(axis=1, initial=0.0)
        temporaries = spec.parameter_temporaries * largest + spec.temporary_copies * everything
        return np.asarray(temporaries[self.row])


def owned_moments(kind: PlanGroup) -> Iterator[Moment]:
    """fairscale's ShardedDataParallel: each gradient is reduced to its owner as it comes and freed elsewhere.

    A gradient on its way to another rank is alive until it has arrived: half of those not the rank's own, by
    assumption. Gradients of earlier micro-batches are whole on every rank until the last one reduces them.
    """
    sizes = [kind.whole(s) for s in range(len(kind.trace.segments))]
    everything = kind.parts.total(sizes)
    own_gradients = kind.kept.gradients[kind.row]
    share = own_gradients / np.maximum(everything, 1.0)
    many = kind.parts.accumulates
    for s, j, forward, backward in places(kind):
        later = kind.later(s, j, sizes)
        for alive, casts in kind.activations.forward_moments(s, j):
            yield Moment(forward, everything * many, alive, casts)
        gradients = later * (1 + share) / 2 + (everything - later) * many
        alive, casts = kind.activations.backward(s, j, "passing"), kind.activations.casts_saved(s, j)
        yield Moment(backward, gradients, alive, casts)
    yield Moment(kind.last_moment(), own_gradients, 0.0, kind.step_temporaries())


def flattened_moments(kind: PlanGroup) -> Iterator[Moment]:
    """DeepSpeed's ZeRO 1 and 2: gradients are copied into one buffer of the size of the model.

    The buffer is made when the first gradient comes. Stage 1 keeps the gradients as well until the step;
    stage 2 frees each once it is copied, and adds reduced ones to a rank's part over micro-batches. At the
    end of the step the updated pieces are gathered and copied out of one more vector.
    """
    sizes = [kind.whole(s) for s in range(len(kind.trace.segments))]
    everything = kind.parts.total(sizes)
    many = kind.parts.accumulates
    stage2 = bool(kind.plan.sharding.gradients_over)
    part = everything / kind.degree * many  # a rank's part, which stage 2 adds to over micro-batches
    for s, j, forward, backward in places(kind):
        later = kind.later(s, j, sizes)
        waiting = part if stage2 else everything * many
        for alive, casts in kind.activations.forward_moments(s, j):
            yield Moment(forward, waiting, alive, casts)
        casts_saved = kind.activations.casts_saved(s, j)
        is_first = s == len(kind.trace.segments) - 1 and np.all(j == kind.parts.counts[s] - 1)
        if is_first:  # its worst moment is the loss's, before any gradient of a parameter is there
            yield Moment(backward, waiting, kind.activations.backward(s, j, "none"), casts_saved)
            continue
        if stage2:
            gradients, alive = part, kind.activations.backward(s, j, "passing")
        else:
            gradients = np.where(many, everything, later)
            alive = _alive_backward(kind, s, j, many)
        yield Moment(backward, everything + gradients, alive, casts_saved)
    yield Moment(kind.last_moment(), everything, 0.0, everything)
    yield Moment(kind.last_moment(), everything / kind.degree, 0.0, kind.step_temporaries())


def _summed_at_once(kind: PlanGroup, sizes: Sequence[np.ndarray | float]) -> np.ndarray:
    # [R] the largest buffer of gradients summed along ``sequence``: a bucket, or one larger gradient.
    masks = [np.asarray(kind.parts.positions(s)) > 1 for s in range(len(sizes))]
    total = kind.parts.total([size * mask for size, mask in zip(sizes, masks, strict=True)])
    num_bytes = kind.parameters.elements * kind.parameters.itemsize * kind.parameters.trainable
    largest = np.asarray(num_bytes.max(axis=-1, initial=0))  # a number, or [K] where the model is divided
    largest = largest[kind.row] if largest.ndim else largest
    return np.asarray(np.minimum(total, np.maximum(DEFAULT_BUCKET_BYTES, largest)))


def _alive_backward(kind: PlanGroup, s: int, j: Place, passing: np.ndarray) -> np.ndarray:
    # Gradients are handed on at once, as into a bucket or onto earlier ones, or are kept as they come.
    alive = [kind.activations.backward(s, j, life) for life in ("passing", "keeping")]
    return np.where(passing, *alive)


def replicated_moments(kind: PlanGroup) -> Iterator[Moment]:
    """Gradients come one by one, and are gone when the next step begins.

    DDP's buckets stay between steps, the last with the numbers that ranks report. Gradients are views of
    them, so each is copied at once. The first of several micro-batches add to gradients outside the buckets,
    and the last one replaces these one by one: at its start both are there. Where ranks hold parts of the
    model, torch's ``replicate`` takes DDP's place: it computes with a copy of the parameters that lives to
    the end of the backward pass, and then copies all gradients into one buffer; gloo copies that. It does so
    with each block's experts by themselves, where several ranks have the same ones, and leaves others alone.
    """
    sizes = [kind.whole(s) for s in range(len(kind.trace.segments))]
    everything = kind.parts.total(sizes)
    # [R] masks. ``syncs``: gradients are reduced; ``is_split``: by ``replicate``; ``reduces``: in buckets;
    # ``copies``: gradients are views of buckets.
    syncs = (kind.num_ranks > 1) & (kind.plan.gradient_sync == "all_reduce")
    is_split = kind.parts.sizes.divides_model
    reduces = syncs & ~is_split
    views = kind.plan.sharding.bucket_views
    copies = reduces & (views != "never")
    report_bytes = reported_bytes(kind.plan, kind.trace) * (reduces & (views == "always"))
    buckets = everything * reduces + report_bytes
    many = kind.parts.accumulates & ~(reduces & (views == "always"))  # earlier gradients outside of buckets
    is_expert, split = kind.parameters.is_expert, syncs & is_split
    experts, others, gradients = (
        [kind.whole(s, times=which, trainable=trains) for s in range(len(sizes))]
        for which, trains in ((is_expert, False), (~is_expert, False), (~is_expert, True))
    )
    experts = [each * (split & (kind.parts.sizes.num_copies > 1)) for each in experts]
    copies_made = kind.parts.total(experts) + kind.parts.total(others) * split
    for s, j, forward, backward in places(kind):
        later = kind.later(s, j, sizes)
        waiting = buckets + everything * many
        weights = copies_made - kind.later(s, j, experts)
        for alive, casts in kind.activations.forward_moments(s, j):
            yield Moment(forward, waiting, alive, weights + casts)
        alive = _alive_backward(kind, s, j, copies | many)
        # Beside the buckets: all gradients but those that views replaced, or those made so far without views.
        grads = np.where(many, everything - later * copies, later * ~copies)
        yield Moment(backward, buckets + grads, alive, weights + kind.activations.casts_saved(s, j))
        if is_expert.any():
            reducing = grads + sizes[s] * ~many + experts[s] * (1 + kind.is_cpu)
            yield Moment(backward, reducing, kind.activations.leaving_backward(s, j), weights)
    if is_split.any():
        buffers = kind.parts.total(gradients) * split * (1 + kind.is_cpu)  # the one buffer, and gloo's copy
        yield Moment(kind.last_moment(), np.where(is_split, everything + buffers, 0.0), 0.0, 0.0)
    if (kind.parts.sizes.sequence > 1).any():
        yield Moment(kind.last_moment(), everything, 0.0, _summed_at_once(kind, sizes))
    final_gradients = kind.kept.gradients[kind.row]
    # ``final_gradients`` has gradients that are views of buckets: only the reported numbers are left to add.
    hidden = np.where(copies & (kind.plan.precision.master_dtype is None), report_bytes, buckets)
    yield Moment(kind.last_moment(), final_gradients + hidden, 0.0, kind.step_temporaries())
