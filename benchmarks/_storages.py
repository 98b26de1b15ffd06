"""The truth about memory: what a rank really holds while it trains.

The figures are bytes of tensors, as they were asked of torch's allocator, on the rank that measures. Take the
largest over ranks where one figure is wanted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from atorch_ns.errors import InputError
from atorch_ns.job import PeakMemory, Result, state_bytes, track_memory

_NUM_FIRST_STEPS = 2


def measure_peak(make: Callable[[], Result], batches: Iterable[Any]) -> PeakMemory:
    """Builds a job and trains on every batch; collective where the job is.

    Args:
        make: builds the model and what trains it: all that it makes is counted, so it must build the model.
        batches: this rank's parts, three or more; made one by one, they are counted too. The first steps make
            the optimizer's states and let DDP arrange its buckets anew; the figures are of the step with the
            lowest peak from the third on, since a thread of the process group may release a buffer a little
            late.
    """
    peaks = []
    states = None
    gc.collect()  # what an earlier job left in cycles would count as given back here
    with track_memory(torch.device("cpu")) as memory:
        result = make()
        for number, batch in enumerate(batches):
            if number >= _NUM_FIRST_STEPS:
                states = states or state_bytes(result)
                memory.reset_peak()
            result.train_step(batch)
            if number >= _NUM_FIRST_STEPS:
                peaks.append(memory.peak_bytes)
    if states is None:
        raise InputError(f"measure_peak needs more than {_NUM_FIRST_STEPS} batches.")
    return PeakMemory(peak_bytes=min(peaks), states=states)
