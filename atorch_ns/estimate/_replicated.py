"""Moments of plans in which every rank holds all gradients: one process, DDP, with or without zero1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atorch_ns.estimate._moments import Kind, Moment, places

__all__ = ["replicated_moments"]


def replicated_moments(kind: Kind) -> Iterator[Moment]:
    """Gradients come one by one, and are gone when the next step begins.

    DDP's buckets stay, step after step. Gradients are views of them, so what backward makes is copied at once.
    Where micro-batches accumulate, the first ones add to gradients outside the buckets, and the last one
    replaces them one by one: at its start both are there.

    Where ranks hold parts of the model, torch's ``replicate`` takes DDP's place: it computes with a copy of the
    parameters that lives from the forward pass to the end of the backward pass, and then copies all gradients
    into one buffer; gloo copies that.
    """
    sizes = [kind.whole(s) for s in range(len(kind.trace.segments))]
    everything = kind.total(sizes)
    syncs = (kind.num_ranks > 1) & (kind.plan.gradient_sync == "all_reduce")
    parted = kind.parts.sizes.divides_model
    reduces = syncs & ~parted
    buckets = everything * reduces
    copies = reduces & kind.plan.bucket_views
    many = kind.accumulates
    gathered = kind.total([kind.whole(s, trainable=False) for s in range(len(sizes))]) * (syncs & parted)
    for s, j, forward, backward in places(kind):
        later = kind.later(s, j, sizes)
        waiting = buckets + everything * many
        for alive, casts in kind.activations.forward_moments(s, j):
            yield Moment(forward, waiting, alive, gathered + casts)
        passing = copies | many
        alive = np.where(
            passing,
            kind.activations.backward(s, j, "passing"),
            kind.activations.backward(s, j, "keeping"),
        )
        own = np.where(many, everything - later * copies, later * ~copies)
        yield Moment(backward, buckets + own, alive, gathered + kind.activations.casts_saved(s, j))
    if parted.any():
        reducing = everything * (syncs & parted) * (1 + kind.is_cpu)
        gradients = np.where(parted, everything + reducing, 0.0)
        yield Moment(kind.last_moment(), gradients, np.zeros(many.shape), np.zeros(many.shape))
    kept = kind.kept.gradients[kind.row]
    hidden = np.where(copies & (kind.plan.master_dtype is None), 0.0, buckets)
    yield Moment(
        kind.last_moment(),
        kept + hidden,
        np.zeros(many.shape),
        kind.step_temporaries(),
    )
