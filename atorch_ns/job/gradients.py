"""Gradients of a job: norm and clipping over all ranks, and sums of those that ranks hold summands of."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from atorch_ns.capture.nests import unique_tensors_of
from atorch_ns.costs.collectives import DEFAULT_BUCKET_BYTES, gradient_buckets
from atorch_ns.errors import StepError
from atorch_ns.job.reducer import GradientReducer, add_rows, sparse_tables
from atorch_ns.torch_compat import (
    TakenHook,
    after_accumulation,
    after_backward,
    before_accumulation,
    in_backward,
    plain_name,
)

log = logging.getLogger("atorch_ns")

SkipSync = Callable[[], AbstractContextManager[None]]
"""Creates a context in which backward passes add to local gradients without communication."""

Clip = Callable[[Iterable[torch.Tensor], float, float], torch.Tensor]
"""Clips gradients: ``(parameters, max_norm, norm_type) -> norm before``."""


def never_synchronised() -> AbstractContextManager[None]:
    """An empty context for jobs whose gradients stay on one rank."""
    return nullcontext()


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    remote: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """The norm of all gradients as one vector, the same on every rank.

    Replicated gradients count once. Shards are summed over the ranks that hold them (collective).

    Args:
        parameters: tensors whose ``grad`` is read; those without one are skipped.
        norm_type: the p of the p-norm; ``float("inf")`` for the largest absolute value.
        stages: ranks that hold other parameters of the model, of any dtypes. Collective over them.
        remote: parameters that another of these ranks counts. Their gradients are scaled but not counted.

    Returns:
        A 0-d tensor in float32, or float64 if a gradient is float64.
    """
    everything = list(parameters)
    left_out = {id(parameter) for parameter in remote}
    # The p-norm of the groups' p-norms is the p-norm of all gradients as one vector.
    groups = _by_mesh(parameter for parameter in everything if id(parameter) not in left_out)
    norms = [_group_norm([p.grad for p in group if p.grad is not None], norm_type) for group in groups]
    if norms:
        total = torch.linalg.vector_norm(torch.stack([_at_least_float32(norm) for norm in norms]), norm_type)
    else:  # the rank still takes part in the exchange over stages
        total = torch.zeros((), device=everything[0].device if everything else None)
    # In fp64 on every stage: their parameters may differ in dtype, and an all-reduce needs one dtype.
    return total if stages is None else norm_over(total.double(), norm_type, stages).to(total.dtype)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    remote: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``. Collective for sharded gradients.

    The arguments are those of :func:`gradient_norm`.

    Returns:
        The norm before clipping, 0-d, the same on every rank.
    """
    everything = list(parameters)
    total = gradient_norm(everything, norm_type, stages=stages, remote=remote)
    for group in _by_mesh(everything):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _at_least_float32(norm: torch.Tensor) -> torch.Tensor:
    return norm if norm.dtype is torch.float64 else norm.float()


def _group_norm(grads: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients with one mesh and equal placements. Collective for sharded gradients."""
    first = grads[0]
    if not isinstance(first, DTensor):
        pieces = [piece for grad in grads for piece in _split_gradient(grad)]
        if all(piece.dtype.itemsize > 2 for piece in pieces):
            return torch.nn.utils.get_total_norm(pieces, norm_type)
        # torch's norms of 16 bits have 16 bits too.
        norms = [torch.linalg.vector_norm(_at_least_float32(piece), norm_type) for piece in pieces]
        return cast(torch.Tensor, torch.linalg.vector_norm(torch.stack(norms), norm_type))
    # Partial sums, or shards in another order: torch's norm of DTensors reduces these.
    if not all(isinstance(layout, (Shard, Replicate)) for layout in first.placements):
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # This rank's part first; each sharded mesh dimension then adds its ranks' parts. Replicas count once.
    norm = _at_least_float32(_group_norm([_local_part(grad) for grad in grads], norm_type))
    for dim, placement in enumerate(first.placements):
        if isinstance(placement, Shard):
            norm = norm_over(norm, norm_type, first.device_mesh.get_group(dim))
    return norm


_PIECE = 2**15
"""Elements for which torch's CPU norm is accurate to 1e-7 (2.13, fp32); for 20 million it is 1e-3 off."""


def _split_gradient(grad: torch.Tensor) -> Sequence[torch.Tensor]:
    # The norm of the norms of short pieces is exact to rounding.
    if grad.device.type != "cpu" or grad.numel() <= _PIECE or not grad.is_contiguous():
        return (grad,)
    return cast(tuple[torch.Tensor, ...], grad.reshape(-1).split(_PIECE))


def _by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            # Gradients of different meshes or placements cannot stand in one fused operation.
            key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.device
            groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def norm_over(norm: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The p-norm of ``norm``, 0-d p-norms on the ranks of ``group``. Collective."""
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    # The p-th powers of the norms add up over the ranks.
    power = norm**norm_type
    dist.all_reduce(power, group=group)
    return power ** (1.0 / norm_type)


@dataclass(frozen=True)
class _Sum:
    names: frozenset[str]
    group: dist.ProcessGroup
    mean: bool = False


@dataclass
class GradientHooks:
    """User hooks for the gradient of one parameter.

    Attributes:
        name: name of the parameter in the user's model.
        parameter: the current parameter, or this rank's part of it.
        hooks: ``register_hook`` functions, called with the gradient. Their results replace it.
        late: ``register_post_accumulate_grad_hook`` functions, called with the parameter.
    """

    name: str
    parameter: torch.Tensor
    hooks: list[TakenHook]
    late: list[TakenHook]

    def __post_init__(self) -> None:
        self._before: torch.Tensor | None = None  # the gradient before this pass
        self._last_gradient: ref[torch.Tensor] | None = None  # detects a replaced gradient
        self._is_open = False  # between begin() and call()

    def watch(self) -> None:
        """Detects gradients that a loss reading the weight adds before or without the model's pass."""
        if self.parameter.requires_grad:
            before_accumulation(self.parameter, lambda _: None if self._is_open else self.begin(1))

    def begin(self, num_sums: int) -> None:
        """Starts a backward pass, the first since the last call or a further part of the same step.

        Args:
            num_sums: the number of ranks that each hold a share of the current gradient.
        """
        gradient = self.parameter.grad
        if gradient is None or not self._is_open:
            # A copy, since the pass adds in place. A share times the number of shares is the whole.
            self._before = None if gradient is None else gradient.detach() * num_sums
            self._last_gradient = None if gradient is None else ref(gradient)
        self._is_open = True

    def forget_replaced(self) -> None:
        """Forgets the previous gradient if the loop has replaced it. A reducer moves its gradients."""
        if self._last_gradient is not None and self._last_gradient() is not self.parameter.grad:
            self._before = None

    def call(self, *, late: bool) -> None:
        """Calls the hooks if there is a gradient. ``hooks`` get the added part, as in each backward pass.

        Args:
            late: whether a backward pass has added to it. ``autograd.grad`` calls only ``hooks``.
        """
        if not (late or self._is_open):
            return  # no backward pass has followed the last forward pass
        parameter, before = self.parameter, self._before
        self._before, self._is_open = None, False
        self.hooks = [hook for hook in self.hooks if hook.is_registered]  # drops removed hooks
        self.late = [hook for hook in self.late if hook.is_registered]
        if parameter.grad is None:
            return
        if self.hooks:
            # Autograd passes what one backward pass adds, not the accumulated gradient.
            increment = parameter.grad if before is None else parameter.grad - before
            for hook in self.hooks:
                result = hook(increment)
                increment = increment if result is None else result
            parameter.grad = increment if before is None else before + increment
        for call in self.late if late else ():
            call(parameter)


def gradient_versions(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[int, int, int]]:
    """The identity of each parameter's gradient, and the write counts of it and of this rank's part."""
    pairs = ((parameter, parameter.grad) for parameter in parameters)
    return {p: (id(grad), grad._version, _local_part(grad)._version) for p, grad in pairs if grad is not None}


class GradientSums:
    """Sums gradients over groups of ranks after the last backward pass of a step.

    Used for parameters that are whole on every rank of a group while each rank sees only part of their work:
    norms on a part of the sequence, weights shared by two pipeline stages. ``train_step``, clipping or the
    optimizer's step runs it, whichever comes first, only once. Later passes may add to summed gradients.
    """

    def __init__(self) -> None:
        self._sums: list[_Sum] = []
        self._hooks: list[GradientHooks] = []
        self._tables: Mapping[torch.Tensor, str] = {}  # sparse embeddings and their names
        self._is_watching = False  # whether watch() was called
        self._pending = False  # a pass may have added since the last sum
        self._is_summed = False  # gradients are summed over ranks
        self._is_divided = False  # each rank holds its share of the last sum
        self._is_told = False
        self._is_followed = self._has_added = False
        self._versions: dict[torch.Tensor, tuple[int, int, int]] = {}  # when the pass began
        self._shards: Mapping[str, torch.Tensor] = {}  # the shards, before weights are gathered

    def __bool__(self) -> bool:
        return bool(self._sums or self._hooks)

    def call_after(self, hooks: Sequence[GradientHooks]) -> None:
        """Calls the user's functions once gradients are complete, instead of in every backward pass."""
        entries = {entry.parameter: entry for entry in self._hooks}
        for entry in hooks:
            if entry.parameter in entries:
                entries[entry.parameter].hooks += entry.hooks
                entries[entry.parameter].late += entry.late
                continue
            self._hooks.append(entry)
            if self._is_watching:
                self._watch_gradients([entry.parameter])
                entry.watch()

    def add(self, names: Iterable[str], group: dist.ProcessGroup, *, mean: bool = False) -> None:
        """Adds parameters whose gradients are summed over a group of ranks.

        Args:
            names: the parameters' names in the user's model, the same on all ranks of the group.
            group: the ranks.
            mean: whether to divide the sum by the number of ranks, if nothing else averages over the data.
        """
        unique_names = frozenset(names)
        if unique_names and group.size() > 1:
            self._sums.append(_Sum(unique_names, group, mean))

    def leave(self, names: Iterable[str], group: dist.ProcessGroup) -> None:
        """Removes parameters from the sums over a group if something else averages them over it."""
        averaged_names = frozenset(names)
        self._sums = [
            replace(entry, names=entry.names - averaged_names) if entry.group is group else entry
            for entry in self._sums
        ]

    def watch(self, module: nn.Module) -> None:
        """Detects forward passes of ``module``, which require a sum, and gradients without a forward pass."""
        # First: fully_shard replaces its shards by gathered weights, which have no gradients.
        module.register_forward_pre_hook(self._note_forward, prepend=True)
        names = frozenset().union(*(entry.names for entry in self._sums))
        self._shards = WeakValueDictionary(_by_name(module))  # replaced tensors free their memory
        self._tables = sparse_tables(module)
        self._is_watching = True
        self._watch_gradients([*_pick_parameters(module, names), *(hooks.parameter for hooks in self._hooks)])
        for hooks in self._hooks:
            hooks.watch()

    def _watch_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in set(parameters):
            if parameter.is_leaf:  # torch accepts such hooks only on leaves
                after_accumulation(cast(nn.Parameter, parameter), self._note_gradient)

    def _note_gradient(self, _: torch.Tensor) -> None:
        self._pending = self._has_added = True

    @torch.no_grad()
    def expect(self, module: nn.Module) -> None:
        """Prepares for a backward pass that adds to the gradients of ``module``.

        Each rank keeps its share of an existing sum, so that the next sum is complete again.
        """
        self._pending = True
        if not self._is_summed:
            return
        # The next sum restores the total from all ranks' shares. A mean of equal values does not change.
        self._is_summed, self._is_divided = False, True
        for entry in (entry for entry in self._sums if not entry.mean):
            for parameter in {
                *_pick_parameters(module, entry.names),
                *(self._shards.get(name) for name in entry.names),
            }:
                if parameter is not None and parameter.requires_grad and parameter.grad is not None:
                    # Through .data, since versions detect writes by the loop.
                    _local_part(parameter.grad).data.div_(entry.group.size())

    @torch.no_grad()
    def run(self, module: nn.Module) -> None:
        """Sums gradients that have not been summed since the last backward pass. Collective."""
        if not self._pending:
            return
        self._pending, self._is_summed, self._is_divided = False, True, False
        for entry in self._sums:
            members = list(_pick_parameters(module, entry.names))
            # Sparse gradients have different rows on each rank, so they are exchanged by rows.
            for table in (parameter for parameter in members if parameter in self._tables):
                add_rows(table, entry.group, 1 / entry.group.size() if entry.mean else 1.0)
            for parameters in _bucket_parameters(tensor for tensor in members if tensor not in self._tables):
                _sum_bucket(parameters, entry)
        # Without observed passes, autograd.grad looks like backward(): assume backward().
        late, self._has_added = self._has_added or not self._is_followed, False
        for hooks in self._hooks:
            hooks.call(late=late)

    def forget_replaced(self) -> None:
        """Called before the reduction of gradients to which no backward pass has added."""
        for hooks in () if self._has_added else self._hooks:
            hooks.forget_replaced()

    def _note_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self.expect(module)

    @torch.no_grad()
    def begin_pass(self, module: nn.Module) -> None:
        """Starts a backward pass of the user's loop."""
        self._is_followed = True
        self._versions = gradient_versions(module.parameters())
        for hooks in self._hooks:
            # expect() left each rank 1 / (product of group sizes) of the sum.
            shares = [e.group.size() for e in self._sums if hooks.name in e.names and not e.mean]
            hooks.begin(math.prod(shares) if self._is_divided else 1)
        self.expect(module)  # after begin(), since it may divide gradients

    def tell_of_parts(self) -> None:
        """Warns once how the user's functions see backward passes that are parts of one."""
        if self._hooks and not self._is_told:
            self._is_told = True
            log.warning(
                "gradient hooks are called once for all backward passes under no_sync and the next one, with the sum of "
                "these over all ranks; without no_sync they are called after each pass."
            )

    def have_changed(self, module: nn.Module) -> bool:
        """Returns whether the backward pass gave gradients. ``autograd.grad`` for inputs gives none."""
        has_changed = gradient_versions(module.parameters()) != self._versions
        self._has_added = self._has_added or has_changed
        return has_changed


def _sum_bucket(parameters: list[torch.Tensor], entry: _Sum) -> None:
    # Flags mark existing gradients: optimizers apply decay to a zero gradient, and skip None.
    flags = [parameter.grad is not None for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:  # no token of this rank used it, but a token of another rank may have
            parameter.grad = torch.zeros_like(parameter)
    grads = [_local_part(parameter.grad) for parameter in parameters]
    pieces = [grad.to(parameters[0].dtype).reshape(-1) for grad in grads]  # some may be prepared in fp32
    # new_tensor copies from the host and synchronises; new_ones does not.
    pieces.append(pieces[0].new_ones(len(flags)) if all(flags) else pieces[0].new_tensor(flags))
    flat = torch.cat(pieces)  # all gradients, then one flag each
    dist.all_reduce(flat, group=entry.group)
    sums = flat.split([piece.numel() for piece in pieces])
    for grad, piece in zip(grads, sums[: len(grads)], strict=True):
        grad.copy_((piece / entry.group.size() if entry.mean else piece).view_as(grad))
    # Flags are read from the device only if this rank lacks a gradient; otherwise no sum is 0.
    if not all(flags):
        for parameter, count in zip(parameters, sums[-1].tolist(), strict=True):
            if not count:
                parameter.grad = None


def _local_part(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _pick_parameters(module: nn.Module, names: frozenset[str]) -> Iterator[torch.Tensor]:
    parameters = _by_name(module)
    # Sorted, so that all ranks pack in the same order; tied parameters appear once.
    selection = dict.fromkeys(parameters[name] for name in sorted(names) if name in parameters)
    return (parameter for parameter in selection if parameter.requires_grad)


def _by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}


def _bucket_parameters(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    tensors = list(parameters)
    # One dtype per bucket, of about the size of DDP's buckets.
    sizes = [(str(parameter.dtype), _local_part(parameter).nbytes) for parameter in tensors]
    for bucket in gradient_buckets(sizes, DEFAULT_BUCKET_BYTES):
        yield [tensors[index] for index in bucket]


def warn_where_none_come(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warns once, on every rank, that a step updates nothing although the model was called for it.

    For parameters that are gathered for each pass: ``torch.autograd.grad`` asks for gradients of tensors
    that the pass has not used, and torch gives none. A step with zeros instead raises a :class:`StepError`.
    """
    # Calls since the last step, and the number of them before the last backward pass.
    calls, notices = [0, 0], list[bool]()
    is_by_hand = [False]

    def note(*_: Any) -> None:
        calls[0] += torch.is_grad_enabled()

    def look(*_: Any) -> None:
        (num_calls, num_followed), calls[:] = calls, (0, 0)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        targets = [p for p in parameters if isinstance(p, DTensor)] or parameters
        gradients = [p.grad for p in targets if p.grad is not None]
        # Collective, until a gradient created by a loop has been seen.
        if num_calls > num_followed and gradients and not is_by_hand[0]:
            # Non-zero gradients without a backward pass were set by the loop, which is fine.
            is_by_hand[0] = any(bool(gradient.any()) for gradient in gradients)
            if not is_by_hand[0]:
                raise StepError(f"an optimizer would step with gradients that are all zero, {_NONE_COME}")
        if num_calls and not notices and not gradients:
            notices.append(True)
            log.warning(
                "an optimizer step updates no gathered parameter: there are no gradients, %s", _NONE_COME
            )

    module.register_forward_pre_hook(torch.compiler.disable(note))
    follow_backward_passes(module, lambda: operator.setitem(calls, 1, calls[0]))
    optimizer.register_step_pre_hook(look)


_NONE_COME: Final = (
    "though the model was called and no backward pass followed, or all of them under no_sync. Under this strategy parameters are gathered for each pass, so that "
    "torch.autograd.grad(loss, parameters) and loss.backward(inputs=parameters) find no gradient of them: call loss.backward() "
    "and read parameter.grad, the last pass of a step without no_sync, or choose ddp or zero1."
)


def follow_backward_passes(
    module: nn.Module, begin: Callable[[], None], end: Callable[[], None] | None = None
) -> Callable[[Any], None]:
    """Observes backward passes through outputs of ``module`` in training, but not of its copies.

    Args:
        begin: called once per pass, when it reaches an output.
        end: called after the pass and all callbacks that others have queued after it.

    Returns:
        A function that observes passes through another output, as of a method.
    """
    number = id(module)  # the module lives as long as its hooks
    under_way: list[None] = []

    def watch(callee: nn.Module, inputs: Any, output: Any) -> None:
        # Skip calls of a copy, and recomputation inside a backward pass.
        if id(callee) == number and torch.is_grad_enabled() and not in_backward():
            follow(output)

    def follow(output: Any) -> None:
        under_way.clear()  # a pass that ended with an error never completes
        for tensor in unique_tensors_of(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(torch.compiler.disable(start_pass))

    def start_pass(_: torch.Tensor) -> None:
        if not under_way:
            under_way.append(None)
            begin()
            # Deferred twice: fully_shard's callback comes first, then the reducer's, which is deferred once.
            after_backward(lambda: after_backward(finish))

    def finish() -> None:
        under_way.clear()
        if end is not None:
            end()

    # First: fully_shard communicates in hooks of its own.
    module.register_forward_hook(torch.compiler.disable(watch), prepend=True)
    return follow


@dataclass(kw_only=True)
class Gradients:
    """Synchronisation and clipping of a job's gradients.

    Attributes:
        skip_sync: keeps gradients local while micro-batches accumulate.
        clip: clips gradients.
        sums: gradients to be summed over ranks other than the data ranks.
        reducer: averages gradients in observable buckets, or ``None`` if a wrapper averages them.
        remote_norm_names: names of parameters that another rank counts in norms of gradients.
        num_parts: number of open contexts in which backward passes are parts of one.
        follow: observes backward passes through an output of the model, or of a method that replaces it.
        kept_whole: names of parameters that data parallelism leaves unchanged, since several stages of a
            rank use them; :attr:`sums` averages their gradients.
    """

    skip_sync: SkipSync = never_synchronised
    clip: Clip = clip_gradients
    sums: GradientSums = field(default_factory=GradientSums)
    reducer: GradientReducer | None = None
    remote_norm_names: set[str] = field(default_factory=set)
    kept_whole: set[str] = field(default_factory=set)
    num_parts: int = 0
    follow: Callable[[Any], None] | None = field(default=None, init=False, repr=False)

    @contextmanager
    def as_parts(self) -> Iterator[None]:
        """A context in which backward passes are parts of one that ends later."""
        self.num_parts += 1
        try:
            yield
        finally:
            self.num_parts -= 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes add to local gradients."""
        self.sums.tell_of_parts()
        with self.as_parts(), self.skip_sync():
            yield

    def follow_passes(self, module: nn.Module) -> None:
        """Completes gradients after each backward pass of the user's loop, for reads, clipping and hooks."""
        self.follow = follow_backward_passes(
            module, lambda: self.sums.begin_pass(module), lambda: self._end_pass(module)
        )

    def join_pass(self, module: nn.Module) -> None:
        """Like :meth:`follow_passes`, but only after the current backward pass."""
        self.sums.begin_pass(module)
        after_backward(lambda: after_backward(lambda: self._end_pass(module)))

    def _end_pass(self, module: nn.Module) -> None:
        is_paused = self.reducer is not None and self.reducer.is_paused
        # Parts of a pass, and passes under no_sync, stay local until the last one.
        if self.sums.have_changed(module) and not self.num_parts and not is_paused:
            self.complete(module)
        elif is_paused and not self.num_parts:
            self.sums.tell_of_parts()

    def follow_call(self, module: nn.Module, output: Any) -> None:
        """Counts an output of another method of ``module`` as a forward pass, if it can be trained on."""
        trains = any(tensor.requires_grad and not tensor.is_leaf for tensor in unique_tensors_of(output))
        if self.follow is not None and trains:
            self.sums.expect(module)
            self.follow(output)

    def complete(self, module: nn.Module) -> None:
        """Reduces local gradients of the last backward pass, if any. Collective."""
        # First, since the reducer moves gradients to buckets, which looks like a replacement.
        self.sums.forget_replaced()
        if self.reducer is not None:
            self.reducer.sync_grad()
        self.sums.run(module)
