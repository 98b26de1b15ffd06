"""Optimizers of which every rank has a part: what they show, and the norm of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.errors import CheckpointError, StepError
from atorch_ns.job.gradients import norm_over
from atorch_ns.job.optimizer.step_optimizer import StateView
from atorch_ns.torch_compat import send_parts


class _CheckpointHint:
    """Mixin of optimizer classes. Its error names the function that saves states divided over ranks."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The optimizer's own, by its arguments, if it has been put together on this rank.

        Raises:
            CheckpointError: if it has not.
        """
        try:
            state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if "consolidated" not in str(error):
                raise
            raise CheckpointError(
                "optim.state_dict() is not available: each rank has only the states of parameters that it updates. Save with "
                "atorch_ns.checkpoint.save(folder, result) and load with atorch_ns.checkpoint.load, under any strategy. "
                "To get all states on one rank, call optim.consolidate_state_dict on all ranks first."
            ) from error
        return state

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the user's optimizer, such as ``train`` and ``eval`` of schedule-free ones."""
        # ``self.optim`` would call this method again before it is set.
        inner = self.__dict__.get("optim")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(inner, name)
        call = partial(_call_and_send, self, inner, name)
        return wraps(value)(call) if isinstance(value, MethodType) else value


def _call_and_send(optimizer: Any, inner: torch.optim.Optimizer, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the user's optimizer and sends the weights it writes. Collective if it writes any."""
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    # torch counts writes in place: no collective is needed where there were none.
    before = [parameter._version for parameter in parameters]
    result = getattr(inner, name)(*args, **kwargs)
    if [parameter._version for parameter in parameters] != before:
        if name not in ("train", "eval"):  # schedule-free ones write element by element
            raise StepError(
                f"optim.{name}() has changed weights, but each rank's optimizer has only a part of them: it saw only that part's "
                "gradients, and other ranks would not see the change. Use ddp, fsdp or zero2."
            )
        send_parts(optimizer)
    return result


@cache
def with_checkpoint_hint(kind: type[Any]) -> type[Any]:
    """A subclass of ZeroRedundancyOptimizer or OSS whose ``state_dict`` error names checkpoint.save."""
    return type(kind.__name__, (_CheckpointHint, kind), {"__doc__": kind.__doc__})


def local_state_view(optimizer: Any) -> None:
    """Gives such an optimizer the defaults and the state of its ``optim``, which has this rank's parameters.

    Schedulers such as OneCycleLR read the defaults, and users look up step counts in the state.
    """
    optimizer.defaults.update(optimizer.optim.defaults)
    _share_state(optimizer)
    optimizer._known_groups = _identify_groups(optimizer)
    optimizer.register_step_pre_hook(_refuse_changed_groups)
    optimizer.register_load_state_dict_post_hook(_share_state)  # loading gives it a dict of its own


def _share_state(optimizer: Any) -> None:
    def find(key: Any) -> Any:
        # By identity: == of tensors compares elements.
        if not isinstance(key, torch.Tensor) or any(key is p for p in _parameters_of(optimizer.optim)):
            return key
        raise StepError(
            "the state of this parameter is on another rank: optim.optim has this rank's parameters. Use ddp, fsdp or zero2."
        )

    optimizer.state = StateView(optimizer.optim.state, find)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _identify_groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _refuse_changed_groups(optimizer: Any, *_: Any) -> None:
    # Groups behind the known ones were divided when they were added.
    if _identify_groups(optimizer)[: len(optimizer._known_groups)] != optimizer._known_groups:
        raise StepError(
            "parameters were added to, removed from or moved between optimizer groups after ranks had divided them. "
            "Freeze with requires_grad, make the groups with optim_param_func, or use ddp, fsdp or zero2."
        )


@torch.no_grad()
def norm_of_parts(
    parts: Iterable[torch.Tensor], norm_type: float, *, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """The norm of all parts on all ranks of ``group`` as if they were one vector. Collective.

    Args:
        parts: this rank's parts; may be none.
        norm_type: the p of the p-norm, positive; ``float("inf")`` for the largest absolute value.
        group: the ranks that hold the other parts.
        device: the result's device.

    Returns:
        A 0-d float32 tensor, the same on every rank.
    """
    norms = [
        torch.linalg.vector_norm(part, norm_type, dtype=torch.float32).to(device)
        for part in parts
        if part.numel()  # an empty one has no largest value
    ]
    local = (
        torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    )
    return norm_over(local, norm_type, group)


@torch.no_grad()
def clip_parts(
    parts: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    remote_parts: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scales all parts so that their norm is at most ``max_norm``. Collective.

    Args:
        parts, norm_type, group, device: the arguments of :func:`norm_of_parts`.
        max_norm: the largest norm to leave.
        remote_parts: parts that another rank has too and counts; they are only scaled.

    Returns:
        The norm before, as :func:`norm_of_parts`.
    """
    own_parts = list(parts)
    norm = norm_of_parts(own_parts, norm_type, group=group, device=device)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as clip_grad_norm_ of torch
    for part in (*own_parts, *remote_parts):
        part.mul_(scale.to(part.device, part.dtype))
    return norm
