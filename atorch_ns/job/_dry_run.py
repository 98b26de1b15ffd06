"""One forward and backward pass before training starts, leaving everything as it was."""

from __future__ import annotations

import torch

from atorch_ns.errors import InputError
from atorch_ns.job._result import Result

__all__ = ["dry_run"]


def dry_run(result: Result) -> torch.Tensor:
    """Runs the first batch forward and backward without stepping; collective.

    Weights, buffers, data position, optimizer and the caller's random states are as before.

    Returns:
        The loss, 0-d.

    Raises:
        InputError: if there is nothing to run, or the loss is not finite.
    """
    if result.dataloader is None or result.loss_func is None or result.optim is None:
        raise InputError("a dry run needs dataset, loss_func and optim_func.")
    position = result.dataloader.state_dict()
    buffers = {name: buffer.clone() for name, buffer in result.model.named_buffers()}
    devices = [result.job.cluster.local_rank] if result.job.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        batch = next(iter(result.dataloader))
        loss = result.train_step.forward_backward(batch)
    result.optim.zero_grad()
    result.dataloader.load_state_dict(position)
    with torch.no_grad():
        for name, buffer in result.model.named_buffers():
            buffer.copy_(buffers[name])
    if not torch.isfinite(loss):
        raise InputError(f"the dry run's loss is {float(loss)}; check the model, the data and the precision.")
    return loss
