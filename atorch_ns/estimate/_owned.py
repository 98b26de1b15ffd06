"""Moments of plans whose gradients go to one owner each, or into one buffer for all.

Legend: R plans of one kind, s a segment, j one of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from atorch_ns.estimate._moments import Kind, Moment, places

__all__ = ["flattened_moments", "owned_moments"]


def owned_moments(kind: Kind) -> Iterator[Moment]:
    """fairscale's ShardedDataParallel: each gradient is reduced to its owner as it comes and freed elsewhere.

    A gradient that is on its way to another rank is alive until it has arrived; half of those that are not the
    rank's own are taken to be. Gradients of earlier micro-batches are whole on every rank until the last one's
    backward pass reduces them.
    """
    sizes = [kind.whole(s) for s in range(len(kind.trace.segments))]
    everything = kind.total(sizes)
    kept = kind.kept.gradients[kind.row]
    share = kept / np.maximum(everything, 1.0)
    many = kind.accumulates
    for s, j, forward, backward in places(kind):
        later = kind.later(s, j, sizes)
        for alive, casts in kind.activations.forward_moments(s, j):
            yield Moment(
                forward, everything * many, alive, np.broadcast_to(np.asarray(casts, float), many.shape)
            )
        yield Moment(
            backward,
            later * (1 + share) / 2 + (everything - later) * many,
            kind.activations.backward(s, j, "passing"),
            np.broadcast_to(np.asarray(kind.activations.casts_saved(s, j), float), many.shape),
        )
    yield Moment(kind.last_moment(), kept, np.zeros(many.shape), kind.step_temporaries())


def flattened_moments(kind: Kind) -> Iterator[Moment]:
    """DeepSpeed's ZeRO 1 and 2: gradients are copied into one buffer of the size of the model.

    The buffer is made when the first gradient comes. Stage 1 keeps the gradients beside it until the step;
    stage 2 frees each once it is copied, and adds what is reduced to a rank's part over micro-batches. At the
    end of the step the updated pieces are gathered and copied out of one more vector.
    """
    sizes = [kind.whole(s) for s in range(len(kind.trace.segments))]
    everything = kind.total(sizes)
    many = kind.accumulates
    stage2 = bool(kind.plan.gradients_over)
    part = everything / kind.degree * many
    for s, j, forward, backward in places(kind):
        later = kind.later(s, j, sizes)
        waiting = part if stage2 else everything * many
        for alive, casts in kind.activations.forward_moments(s, j):
            yield Moment(forward, waiting, alive, np.broadcast_to(np.asarray(casts, float), many.shape))
        casts_saved = np.broadcast_to(np.asarray(kind.activations.casts_saved(s, j), float), many.shape)
        is_first = s == len(kind.trace.segments) - 1 and np.all(j == kind.parts.counts[s] - 1)
        if is_first:  # its worst moment is the loss's, before any gradient of a parameter is there
            yield Moment(backward, waiting, kind.activations.backward(s, j, "none"), casts_saved)
            continue
        if stage2:
            gradients, alive = part, kind.activations.backward(s, j, "passing")
        else:
            gradients = np.where(many, everything, later)
            alive = np.where(
                many,
                kind.activations.backward(s, j, "passing"),
                kind.activations.backward(s, j, "keeping"),
            )
        yield Moment(backward, everything + gradients, alive, casts_saved)
    zeros = np.zeros(many.shape)
    yield Moment(kind.last_moment(), zeros + everything, zeros, zeros + everything)
    yield Moment(kind.last_moment(), zeros + everything / kind.degree, zeros, kind.step_temporaries())
