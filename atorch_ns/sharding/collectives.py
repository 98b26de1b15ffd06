"""Collectives that gradients flow through, on plain tensors, between processes or simulated ranks.

Each function below is a forward communication with its backward one. ``x`` is this rank's tensor. A group of
one rank communicates nothing. Simulated ranks are threads of one process, for self-tests: an error in one
ends all of them, so that no test waits for a rank that has stopped.

=================  ============================  ============================  ==========================
function           forward                       backward                      used where
=================  ============================  ============================  ==========================
copy_to            as it is                      all-reduce (sum)              a replicated tensor enters
                                                                               a divided layer
reduce_from        all-reduce (sum)              as it is                      partial results leave it
gather_from        all-gather along ``dim``      this rank's piece             whole results leave it, and
                                                                               every rank does the same
                                                                               with them afterwards
scatter_to         this rank's piece             all-gather along ``dim``      its inverse
summand_of         as it is on the first rank,   as it is                      a replicated tensor joins
                   zeros on the others                                         partial results
all_gather         all-gather along ``dim``      reduce-scatter (sum)          a divided tensor enters a
                                                                               layer divided otherwise
reduce_scatter     reduce-scatter (sum)          all-gather along ``dim``      its inverse
all_to_all         split ``split_dim``, join     the reverse                   from one division to another
                   ``join_dim``
exchange           rows to ranks by counts       the reverse                   tokens to experts
traced_gather      as all_gather, where a compiler can take it into a graph
traced_scatter     as reduce_scatter, where a compiler can take it into a graph
scale_gradient     as it is                      times a factor                sums that become means
=================  ============================  ============================  ==========================
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atorch_ns.torch_compat import functional_all_gather, functional_reduce_scatter

T = TypeVar("T")


class _Turns:
    """Lets one simulated rank run at a time, in rank order. A real group also acts in one order."""

    def __init__(self, num_ranks: int) -> None:
        self.error: BaseException | None = None
        self.swaps: list[dict[int, Any]] = []  # [swaps] values by rank
        self._active = set(range(num_ranks))  # ranks whose work has not ended
        self._turn = 0  # the rank that may run; -1 once all have ended
        self._condition = threading.Condition()

    def wait(self, rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.error is not None or self._turn == rank)
            if self.error is not None:
                raise self.error

    def pass_on(self, rank: int, *, has_ended: bool = False, error: BaseException | None = None) -> None:
        with self._condition:
            self.error = self.error or error  # the first error is kept
            if has_ended:
                self._active.discard(rank)
            # The next higher rank that has not ended, or after the highest one the lowest.
            self._turn = min([other for other in self._active if other > rank] or self._active, default=-1)
            self._condition.notify_all()


class SimulatedGroup:
    """One rank's view of a simulated group. It can replace a process group."""

    def __init__(self, rank: int, num_ranks: int, turns: _Turns) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._turns = turns
        self._num_swaps = 0

    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._num_ranks

    def swap(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank. Do not modify them: the ranks share these objects."""
        if len(self._turns.swaps) == self._num_swaps:  # this rank is the first to reach this swap
            self._turns.swaps.append({})
        values = self._turns.swaps[self._num_swaps]
        self._num_swaps += 1
        values[self._rank] = value
        self._turns.pass_on(self._rank)
        self._turns.wait(self._rank)
        # The turn comes back when all others have run up to this swap: every value is there.
        return [values[rank] for rank in range(self._num_ranks)]


def simulate(num_ranks: int, work: Callable[[SimulatedGroup], T], device: torch.device) -> list[T]:
    """Returns the result of ``work`` on each simulated rank, by rank. Ranks take turns between swaps.

    Raises:
        Exception: the exception of the first rank that failed.
    """
    turns = _Turns(num_ranks)

    def run(rank: int) -> T:
        error = None
        try:
            turns.wait(rank)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread begins with device 0
            # Otherwise all backward passes share the device's single thread and block each other.
            with torch.autograd.set_multithreading_enabled(False):
                return work(SimulatedGroup(rank, num_ranks, turns))
        except BaseException as raised:
            error = raised
            raise
        finally:
            turns.pass_on(rank, has_ended=True, error=error)  # after an error too: it ends the other ranks

    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = []
        for rank in range(num_ranks):
            try:
                ranks.append(pool.submit(run, rank))
            except RuntimeError as error:
                # Another thread cannot start. The threads that wait for it would wait forever.
                turns.pass_on(rank, has_ended=True, error=error)
                raise
    turns.swaps.clear()  # the group, its backward nodes and these values refer to each other in a cycle
    return [rank.result() for rank in ranks]


Group = dist.ProcessGroup | SimulatedGroup
Step = Callable[[torch.Tensor], torch.Tensor]


def copy_to(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns ``x``. Its gradient is summed over the group."""
    return _apply_with_gradient(x, group, _identity_view, total)


def reduce_from(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of ``x`` over the group."""
    return _apply_with_gradient(x, group, total, _identity_view)


def gather_from(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Joins the pieces of all ranks along ``dim``. Each rank keeps the gradient of its own piece.

    Use it for results that all ranks use in the same way. Their gradients are equal and need no sum.
    """
    return _apply_with_gradient(x, group, _gather_pieces, _take_piece, dim % x.dim())


def scatter_to(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Returns this rank's piece of ``x`` along ``dim``. The group size must divide that dimension."""
    return _apply_with_gradient(x, group, _take_piece, _gather_pieces, dim % x.dim())


def summand_of(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Splits an ``x`` that all ranks share into summands: ``x`` on the first rank, zeros on the others."""
    return _apply_with_gradient(x, group, _keep_on_first_rank, _identity_view)


def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Joins the pieces of all ranks along ``dim``. The gradients of all ranks are summed."""
    return _apply_with_gradient(x, group, _gather_pieces, _sum_piece, dim % x.dim())


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's piece along ``dim`` of the sum of ``x`` over the group."""
    return _apply_with_gradient(x, group, _sum_piece, _gather_pieces, dim % x.dim())


def traced_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """:func:`all_gather` by functional collectives, which torch's compiler takes into a graph, together
    with the products that read their results."""
    whole: torch.Tensor = _TracedExchange.apply(x, dim, group, True)  # type: ignore[no-untyped-call]
    return whole


def traced_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """:func:`reduce_scatter` by functional collectives, as :func:`traced_gather`."""
    piece: torch.Tensor = _TracedExchange.apply(x, dim, group, False)  # type: ignore[no-untyped-call]
    return piece


def all_to_all(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    """Splits ``x`` along ``split_dim``, sends piece ``i`` to rank ``i``, joins arrivals along ``join_dim``.

    The group's size must divide ``x.size(split_dim)``.
    """
    return _apply_with_gradient(
        x, group, _transpose_pieces, _transposed_back, split_dim % x.dim(), join_dim % x.dim()
    )


def exchange(
    x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group
) -> torch.Tensor:
    """Sends the first ``send_counts[0]`` rows of ``x`` to rank 0, the next ``send_counts[1]`` to rank 1, ….

    Returns ``[sum(receive_counts), …]``: the rows from rank 0, then those from rank 1, ….
    """
    return _apply_with_gradient(x, group, _exchange_rows, _sent_back, list(send_counts), list(receive_counts))


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns ``x``. Its gradient is multiplied by ``factor``."""
    has_grad = x.requires_grad and torch.is_grad_enabled()  # else no autograd node is added
    return _apply_autograd_pair(x, _identity_view, lambda gradient: gradient * factor) if has_grad else x


def total(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of ``x`` over the group, as a new tensor; no gradient flows through it."""
    if isinstance(group, SimulatedGroup):
        return torch.stack(group.swap(x)).sum(0)
    out = x.clone(memory_format=torch.contiguous_format)  # all_reduce writes in place
    dist.all_reduce(out, group=group)
    return out


def maximum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The element-wise maximum over the group, as a new tensor. No gradient flows through it."""
    if isinstance(group, SimulatedGroup):
        return torch.stack(group.swap(x)).amax(0)
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)
    return out


def sent_on(x: torch.Tensor, group: Group) -> tuple[list[Any], torch.Tensor]:
    """Sends ``x`` to the next rank; returns the works to wait for and the tensor from the previous rank."""
    size, rank = group.size(), group.rank()
    if isinstance(group, SimulatedGroup):
        return [], group.swap(x)[rank - 1].clone()  # the sender may still write to its tensor
    arriving = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size),
        ]
    )
    return works, arriving


class _Paired(torch.autograd.Function):
    """Applies one function forward and another to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Step, backward: Step) -> torch.Tensor:
        ctx.of_gradient = backward  # a function, so there is no tensor to save
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.of_gradient(gradients[0]), None, None


class _TracedExchange(torch.autograd.Function):
    """An all-gather whose gradients are summed, or a reduce-scatter; the compiler traces both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: dist.ProcessGroup, gathers: bool) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.gathers = dim, group, gathers
        return (functional_all_gather if gathers else functional_reduce_scatter)(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = functional_reduce_scatter if ctx.gathers else functional_all_gather
        return back(gradient, ctx.dim, ctx.group), None, None, None


def _apply_with_gradient(
    x: torch.Tensor,
    group: Group,
    forward: Callable[..., torch.Tensor],
    backward: Callable[..., torch.Tensor],
    *where: Any,
) -> torch.Tensor:
    if group.size() == 1:  # nothing to communicate, and no autograd node
        return x
    # Forward: ``forward(x, *where, group)``. Backward: ``backward(gradient, *where, group)``.
    return _apply_autograd_pair(
        x, lambda x: forward(x, *where, group), lambda gradient: backward(gradient, *where, group)
    )


def _apply_autograd_pair(x: torch.Tensor, forward: Step, backward: Step) -> torch.Tensor:
    result: torch.Tensor = _Paired.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def _identity_view(x: torch.Tensor, _: Group | None = None) -> torch.Tensor:
    return x.view_as(x)


def _keep_on_first_rank(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.view_as(x) if group.rank() == 0 else torch.zeros_like(x)


def _gather_pieces(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    if isinstance(group, SimulatedGroup):
        return torch.cat(group.swap(x), dim)
    # A list of pieces: all_gather_into_tensor joins along the first dimension only.
    pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim)


def _take_piece(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    size, rest = divmod(x.size(dim), group.size())
    if rest:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide into {group.size()} pieces")
    # Not a view, which would keep all of `x`.
    return x.narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)


def _sum_piece(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    pieces = [piece.contiguous() for piece in x.chunk(group.size(), dim)]  # [n], piece i for rank i
    if isinstance(group, SimulatedGroup):
        return torch.stack([theirs[group.rank()] for theirs in group.swap(pieces)]).sum(0)
    out = torch.empty_like(pieces[group.rank()])
    dist.reduce_scatter(out, pieces, group=group)
    return out


def _transpose_pieces(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    outgoing = torch.stack([piece.contiguous() for piece in x.chunk(group.size(), split_dim)])  # [n, …]
    if isinstance(group, SimulatedGroup):
        return torch.cat([theirs[group.rank()] for theirs in group.swap(outgoing)], join_dim)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(list(incoming.unbind(0)), join_dim)


def _transposed_back(x: torch.Tensor, split_dim: int, join_dim: int, group: Group) -> torch.Tensor:
    return _transpose_pieces(x, join_dim, split_dim, group)


def _exchange_rows(x: torch.Tensor, send: list[int], receive: list[int], group: Group) -> torch.Tensor:
    if isinstance(group, SimulatedGroup):
        return torch.cat([theirs[group.rank()] for theirs in group.swap(x.split(send))])
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)  # sizes of the output come first
    return out


def _sent_back(x: torch.Tensor, send: list[int], receive: list[int], group: Group) -> torch.Tensor:
    return _exchange_rows(x, receive, send, group)
