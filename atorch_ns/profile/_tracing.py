"""Tracing: a profile with the cost of one training step, found without running the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atorch_ns.profile._attempts import Attempts, Traced
from atorch_ns.profile._batches import batch_sizes
from atorch_ns.profile._blocks import NamedModule, repeated_blocks
from atorch_ns.profile._boundaries import tensors_in
from atorch_ns.profile._counts import (
    experts_per_token,
    num_experts,
    num_heads,
    num_key_value_heads,
    vocabulary_size,
)
from atorch_ns.profile._fingerprint import fingerprints
from atorch_ns.profile._optimizer import optimizer_spec
from atorch_ns.profile._precisions import ALL_PRECISIONS, Precision
from atorch_ns.profile._profile import Profile
from atorch_ns.profile._steps import ForwardLoss, Subject
from atorch_ns.profile._trace import Growth, Trace
from atorch_ns.profile._unchanged import random_states_kept

__all__ = ["profile_model"]


def profile_model(
    model: nn.Module,
    batch: Any,
    forward_loss: ForwardLoss,
    *,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    precisions: Sequence[str] = ALL_PRECISIONS,
    blocks: Sequence[str] | None = None,
    num_samples: int | None = None,
    sequence: bool = False,
    keeps_output: bool = False,
    device: str = "cpu",
) -> Profile:
    """The structure of a model and the cost of one training step, as functions of the batch.

    The step runs on fake tensors, on a copy of the model's structure without memory in which a few blocks
    stand for all that are equal: the time does not grow with the depth. Costs are exact in the number of
    samples B; they hold for the batch's own number of tokens T unless ``sequence`` is set. A model that does
    not run on fake tensors is copied and takes one real step; a note says so. The user's weights, buffers,
    gradients and random states are not touched.

    Args:
        model: on any device, meta too.
        batch: one sample batch, any nest of tensors. The first tensor's dim 0 is B; a [B, T] tensor of
            integers tells T.
        forward_loss: ``(model, batch) -> loss``.
        make_optimizer: makes the user's optimizer for parameters; ``None`` where there is none.
        precisions: keys as :func:`precision_key` writes them; "float32" are the weights as they are.
        blocks: paths of the blocks; ``None`` for those that repeat.
        num_samples: the B whose worst moments the peaks are exact at; ``None`` for the batch's.
        sequence: trace three lengths, so that costs are functions of T too. Not the default: it takes three
            times as long, and a plan for the batch at hand needs only B.
        keeps_output: whether the training loop holds the model's output through the backward pass, as one
            written by hand may do; ``train_step`` does not.
        device: type of the device that the step is to run on; it decides which kernels run. Where this process
            does not use that device yet, the CPU's kernels stand for its own, with a note: tracing never
            starts a GPU.

    Raises:
        InputError: if the model or the loss raises on the sample batch, really run.
    """
    found = repeated_blocks(model)
    if blocks is not None:
        found = [NamedModule(path, model.get_submodule(path)) for path in blocks]
    modules = {block.name: block.module for block in found}
    sizes = batch_sizes(batch)
    subject = Subject(
        model=model,
        batch=batch,
        forward_loss=forward_loss,
        blocks=modules,
        prints=fingerprints(modules),
        sizes=sizes,
        at=(num_samples or sizes[0], sizes[1]),
        keeps_output=keeps_output,
    )
    with random_states_kept(model):
        usable = "cpu" if _is_unused(device) else device
        traced = Attempts(subject, [Precision.parse(key) for key in precisions], usable).best(sequence)
        spec, optimizer_notes = optimizer_spec(make_optimizer, torch.device(device).type)
    trace = _trace(subject, traced)
    if usable != device:
        optimizer_notes += (f"The CPU's kernels stand for those of {device}, which is not in use here.",)
    return replace(
        Profile.of(model), trace=replace(trace, optimizer=spec, notes=trace.notes + optimizer_notes)
    )


def _is_unused(device: str) -> bool:
    kind = torch.device(device).type
    return kind != "cpu" and not (kind == "cuda" and torch.cuda.is_initialized())


def _trace(subject: Subject, traced: Traced) -> Trace:
    num_samples, num_tokens = subject.sizes
    rows = [t for t in tensors_in(subject.batch) if t.dim() and t.shape[0] == num_samples]
    others = [t for t in tensors_in(subject.batch) if not t.dim() or t.shape[0] != num_samples]
    per_sample = sum(t.numel() * t.itemsize for t in rows) / max(num_samples, 1)
    return Trace(
        segments=traced.segments,
        num_samples=subject.at[0],
        num_tokens=num_tokens,
        batch_bytes=Growth(float(sum(t.numel() * t.itemsize for t in others)), per_sample),
        num_heads=num_heads(subject.model),
        num_key_value_heads=num_key_value_heads(subject.model),
        vocabulary_size=vocabulary_size(subject.model),
        loss_share=traced.loss_share,
        num_experts=num_experts(subject.model),
        experts_per_token=experts_per_token(subject.model),
        how=traced.how,
        notes=traced.notes,
    )
