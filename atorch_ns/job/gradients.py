"""Gradients of a job: their norm and clipping over all ranks, and sums of those that ranks hold summands of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from atorch_ns.cluster.collectives import DEFAULT_BUCKET_BYTES, gradient_buckets
from atorch_ns.job.reducer import GradientReducer
from atorch_ns.torch_compat import plain_name

SkipSync = Callable[[], AbstractContextManager[None]]
"""Gives a context in which backward passes add to local gradients and communicate nothing."""

Clip = Callable[[Iterable[torch.Tensor], float, float], torch.Tensor]
"""Clips gradients: ``(parameters, max_norm, norm_type) -> norm before``."""


def never_synchronised() -> AbstractContextManager[None]:
    """The context for jobs whose gradients stay on one rank: none."""
    return nullcontext()


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    uncounted: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """The norm of all gradients as if they were one vector, the same on every rank.

    Replicated gradients count once; shards are summed over the ranks that hold them (collective).

    Args:
        parameters: tensors whose ``grad`` is read; those without one are skipped.
        norm_type: the p of the p-norm; ``float("inf")`` for the largest absolute value.
        stages: the ranks that hold other parameters of the same model; collective over them.
        uncounted: parameters that another of these ranks counts; their gradients are scaled, not counted.

    Returns:
        A 0-d float32 tensor.
    """
    everything = list(parameters)
    left_out = {id(parameter) for parameter in uncounted}
    groups = _by_mesh(parameter for parameter in everything if id(parameter) not in left_out)
    norms = [_norm([p.grad for p in group if p.grad is not None], norm_type) for group in groups]
    if norms:
        total = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]), norm_type)
    else:
        total = torch.zeros((), device=everything[0].device if everything else None)
    return total if stages is None else norm_over(total, norm_type, stages)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    uncounted: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; collective where they are divided.

    The arguments are those of :func:`gradient_norm`.

    Returns:
        The norm before clipping, 0-d float32, the same on every rank.
    """
    everything = list(parameters)
    total = gradient_norm(everything, norm_type, stages=stages, uncounted=uncounted)
    for group in _by_mesh(everything):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients of one mesh and of the same placements; collective where they are divided."""
    first = grads[0]
    if not isinstance(first, DTensor):
        return torch.nn.utils.get_total_norm([piece for grad in grads for piece in _pieces(grad)], norm_type)
    if not all(
        isinstance(one, (Shard, Replicate)) for one in first.placements
    ):  # summands, or in another order
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    norm = _norm([_local(grad) for grad in grads], norm_type).float()
    for dim, placement in enumerate(first.placements):
        if isinstance(placement, Shard):
            norm = norm_over(norm, norm_type, first.device_mesh.get_group(dim))
    return norm


_PIECE = 2**15
"""Elements of which torch's norm on CPUs is right to 1e-7 (2.13, fp32; of 4 million it is 8e-5 off, of 20 million 1e-3)."""


def _pieces(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """Parts of a gradient whose norms, taken one by one and together, are exact to rounding."""
    if grad.device.type != "cpu" or grad.numel() <= _PIECE or not grad.is_contiguous():
        return (grad,)
    pieces: tuple[torch.Tensor, ...] = grad.reshape(-1).split(_PIECE)
    return pieces


def _by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients on different meshes cannot stand in one fused operation, so they are handled mesh by mesh."""
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.device
            groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def norm_over(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The p-norm of the p-norms ``norm``, 0-d, that the ranks of ``group`` hold; collective."""
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm**norm_type
    dist.all_reduce(power, group=group)
    return power ** (1.0 / norm_type)


@dataclass(frozen=True)
class _Sum:
    names: frozenset[str]
    group: dist.ProcessGroup
    mean: bool = False


@dataclass(frozen=True)
class GradientHooks:
    """Functions of the user for the gradient of one parameter.

    Attributes:
        name: the parameter's, for messages.
        parameter: the parameter as it is now, or this rank's part of it.
        hooks: those of ``register_hook``, called with the gradient; what they return takes its place.
        late: those of ``register_post_accumulate_grad_hook``, called with the parameter.
    """

    name: str
    parameter: torch.Tensor
    hooks: Sequence[Callable[[torch.Tensor], torch.Tensor | None]]
    late: Sequence[Callable[[torch.Tensor], object]]

    def call(self) -> None:
        """Calls them, if there is a gradient."""
        parameter = self.parameter
        for hook in self.hooks:
            if parameter.grad is not None and (changed := hook(parameter.grad)) is not None:
                parameter.grad = changed
        for call in self.late:
            if parameter.grad is not None:
                call(parameter)


class GradientSums:
    """Sums gradients over groups of ranks after the last backward pass of a step.

    Used for parameters that are whole on every rank of a group while each rank sees a part of what they do:
    norms on a part of the sequence, weights shared by two pipeline stages. It is run by ``train_step``, by
    clipping and by the optimizer's step, whichever comes first, and once only. Further backward passes may add to
    gradients that have been summed.
    """

    def __init__(self) -> None:
        self._sums: list[_Sum] = []
        self._hooks: Sequence[GradientHooks] = ()
        self._pending = False
        self._summed = False

    def __bool__(self) -> bool:
        return bool(self._sums or self._hooks)

    def call_after(self, hooks: Sequence[GradientHooks]) -> None:
        """Calls the user's functions once gradients are complete, in place of in every backward pass."""
        self._hooks = hooks

    def add(self, names: Iterable[str], group: dist.ProcessGroup, *, mean: bool = False) -> None:
        """Lets gradients be summed over a group of ranks.

        Args:
            names: the parameters' names in the user's model, the same on all ranks of the group.
            group: the ranks.
            mean: whether the sum is divided by their number, for parameters that nothing else averages over the data.
        """
        wanted = frozenset(names)
        if wanted and group.size() > 1:
            self._sums.append(_Sum(wanted, group, mean))

    def leave(self, names: Iterable[str], group: dist.ProcessGroup) -> None:
        """Takes parameters out of the sums over a group, where something else averages their gradients over it."""
        left = frozenset(names)
        self._sums = [
            replace(entry, names=entry.names - left) if entry.group is group else entry
            for entry in self._sums
        ]

    def watch(self, module: nn.Module) -> None:
        """Notices forward passes of ``module``, after which there is something to sum."""
        module.register_forward_pre_hook(self._note)

    @torch.no_grad()
    def expect(self, module: nn.Module) -> None:
        """A backward pass is going to add to the gradients of ``module``.

        Of a sum that is there already each rank keeps its share, so that the next sum is the whole again.
        """
        self._pending = True
        if not self._summed:
            return
        self._summed = False
        for entry in self._sums:
            for parameter in _parameters(module, entry.names):
                if parameter.grad is not None and not entry.mean:
                    parameter.grad /= entry.group.size()

    @torch.no_grad()
    def run(self, module: nn.Module) -> None:
        """Sums what has not been summed since the last backward pass; collective."""
        if not self._pending:
            return
        self._pending, self._summed = False, True
        for entry in self._sums:
            for parameters in _together(_parameters(module, entry.names)):
                _sum(parameters, entry)
        for hooks in self._hooks:
            hooks.call()

    def _note(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.expect(module)


def _sum(parameters: list[torch.Tensor], entry: _Sum) -> None:
    """Sums the gradients of ``parameters``, whose parts travel as one tensor.

    A mean takes along which of them any rank has: an optimizer decays a parameter whose gradient is zero, and leaves
    alone one that took no part in the loss.
    """
    used = [parameter.grad is not None for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:  # no token of this rank used it, but one of another rank's may have
            parameter.grad = torch.zeros_like(parameter)
    grads = [_local(parameter.grad) for parameter in parameters]
    pieces = [grad.reshape(-1) for grad in grads]
    if entry.mean:
        pieces.append(grads[0].new_tensor(used))
    flat = torch.cat(pieces)
    dist.all_reduce(flat, group=entry.group)
    summed = flat.split([piece.numel() for piece in pieces])
    for grad, piece in zip(grads, summed[: len(grads)], strict=True):
        grad.copy_((piece / entry.group.size() if entry.mean else piece).view_as(grad))
    if entry.mean:
        for parameter, count in zip(parameters, summed[-1].tolist(), strict=True):
            if not count:
                parameter.grad = None


def _local(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _parameters(module: nn.Module, names: frozenset[str]) -> Iterator[torch.Tensor]:
    """The trainable parameters of ``names``, each once, in the order of the names, so that all ranks agree."""
    parameters = {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    seen: set[int] = set()
    for name in sorted(names):
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        yield parameter


def _together(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters whose gradients travel as one tensor: of one dtype, and about a bucket of DDP's."""
    found = list(parameters)
    sizes = [(str(parameter.dtype), _local(parameter).nbytes) for parameter in found]
    for bucket in gradient_buckets(sizes, DEFAULT_BUCKET_BYTES):
        yield [found[place] for place in bucket]


@dataclass(kw_only=True)
class Gradients:
    """How a job's gradients are synchronised and clipped.

    Attributes:
        skip_sync: keeps gradients local while micro-batches accumulate.
        clip: clips gradients.
        sums: gradients to be summed over other ranks than those of the data.
        reducer: averages gradients in buckets that can be watched; ``None`` where a wrapper of the model does it.
        remote_norm_names: names of parameters that another rank counts in norms of gradients.
        kept_whole: names of parameters that methods of data parallelism leave as they are, since several stages of
            a rank use them; :attr:`sums` averages their gradients.
    """

    skip_sync: SkipSync = never_synchronised
    clip: Clip = clip_gradients
    sums: GradientSums = field(default_factory=GradientSums)
    reducer: GradientReducer | None = None
    remote_norm_names: set[str] = field(default_factory=set)
    kept_whole: set[str] = field(default_factory=set)

    @property
    def are_left(self) -> bool:
        """Whether there is something to complete after a backward pass."""
        return bool(self.sums) or self.reducer is not None

    def complete(self, module: nn.Module) -> None:
        """Reduces what the last backward pass has left on its rank; nothing if that is done already. Collective."""
        if self.reducer is not None:
            self.reducer.sync_grad()
        self.sums.run(module)
