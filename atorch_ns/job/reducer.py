"""Gradient reducer: means of gradients over ranks, bucket by bucket, while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.cluster.collectives import DEFAULT_BUCKET_BYTES, gradient_buckets
from atorch_ns.errors import InputError, StepError
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.torch_compat import after_backward, laid_out

BucketHook = Callable[["GradientReducer", torch.Tensor], object]
"""Called with the reducer and a bucket, 1-d: the gradients of its parameters one after the other. It may change them."""


class _Bucket:
    """Gradients that travel as one tensor, of which the gradients of the parameters are views."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_flags: int) -> None:
        self.parameters = parameters
        pieces = [local_part(parameter) for parameter in parameters]
        sizes = [one.numel() for one in pieces]
        self.whole = torch.zeros(sum(sizes) + num_flags, dtype=pieces[0].dtype, device=pieces[0].device)
        self.gradients, self.flags = self.whole.split([sum(sizes), num_flags])
        parts = self.gradients.split(sizes)
        self.views = [part.view_as(one) for part, one in zip(parts, pieces, strict=True)]
        self.placed = [
            laid_out(view, one) if isinstance(one, DTensor) else view
            for view, one in zip(self.views, parameters, strict=True)
        ]
        self.ready: set[int] = set()
        self.work: Any = None


class GradientReducer:
    """Averages gradients of parameters of which every rank of a group holds the same: all, or the same part.

    Buckets are reduced in one order on all ranks, each once its gradients and all buckets before it are ready, so that
    communication overlaps with the backward pass. A parameter that no rank has used has no gradient afterwards, as in one
    process.

    Args:
        module: a forward pass of it announces a backward pass.
        group: the ranks, which hold equal parameters; those that are divided, are over other ranks.
        parameters: those to reduce, in the same order on all ranks; ``None`` for all of ``module`` that are trained.
        bucket_bytes: the least size of a bucket.
        predivide: what gradients are divided by before they are summed, against overflows in 16 bits; the rest of the
            division by the number of ranks comes afterwards. ``None`` for all of it before.

    Attributes:
        synchronised: whether gradients are those of all ranks since the last forward pass.

    Raises:
        InputError: if a number is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        parameters: Iterable[nn.Parameter] | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        predivide: float | None = None,
    ) -> None:
        first = float(group.size()) if predivide is None else predivide
        if bucket_bytes <= 0 or not 0.0 < first < float("inf"):
            raise InputError(
                f"bucket_bytes and predivide must be positive; they are {bucket_bytes} and {first}."
            )
        chosen = [p for p in (module.parameters() if parameters is None else parameters) if p.requires_grad]
        self._group = group
        self._before, self._after = 1.0 / first, first / group.size()
        self._hooks: dict[str, list[BucketHook]] = {"before": [], "after": []}
        self._buckets = _buckets(chosen, bucket_bytes)
        ordered = (parameter for bucket in self._buckets for parameter in bucket.parameters)
        self._number = {parameter: number for number, parameter in enumerate(ordered)}
        self._unused: list[nn.Parameter] = []
        self._next = 0
        self._sync = True
        self._sums = False
        self._expected = False
        self._local = False
        self._queued = False
        self.synchronised = False
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, bucket, place))
            for bucket in self._buckets
            for place, p in enumerate(bucket.parameters)
        ]
        self._handles.append(module.register_forward_pre_hook(self._announced))

    @property
    def num_buckets(self) -> int:
        """The number of buckets, and so of reductions in a step."""
        return len(self._buckets)

    def before(self, hook: BucketHook) -> Callable[[], None]:
        """Calls ``hook`` with each bucket before it is reduced, once in a step; returns what takes it out again."""
        self._hooks["before"].append(hook)
        return partial(self._hooks["before"].remove, hook)

    def after(self, hook: BucketHook) -> Callable[[], None]:
        """Calls ``hook`` with each bucket once it holds the means; returns what takes it out again."""
        self._hooks["after"].append(hook)
        return partial(self._hooks["after"].remove, hook)

    def wait_until_told(self, *, sums: bool = False) -> None:
        """Leaves gradients on their ranks until :meth:`sync_grad`.

        Args:
            sums: whether they are then summed, not averaged.
        """
        self._sync, self._sums = False, sums
        if sums:
            self._before, self._after = 1.0, 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward passes inside add to gradients and reduce nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def sync_grad(self) -> None:
        """Reduces what the last backward pass has left and waits for all; nothing if that is done. Collective."""
        if not self._expected and self._local:  # all passes since the last reduction were under no_sync
            self._expect()
        if not self._expected:
            return
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            bucket.work.wait()
            if self._after != 1.0:
                bucket.gradients.mul_(self._after)
            for hook in tuple(self._hooks["after"]):
                hook(self, bucket.gradients)
        if self._unused:  # by this rank; by all, if the sum says so
            used = self._buckets[-1].flags.tolist()
            for parameter in self._unused:
                if not used[self._number[parameter]]:
                    parameter.grad = None
        self._expected, self._local, self.synchronised = False, False, True

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiplies all gradients by a number.

        Raises:
            StepError: before they are reduced, while each rank has those of its own data.
        """
        if not self.synchronised:
            raise StepError(
                "scale_grads needs gradients of all ranks: call it after sync_grad(), which a backward pass outside of "
                "no_sync() ends with."
            )
        for bucket in self._buckets:
            bucket.gradients.mul_(factor)

    def detach(self) -> None:
        """Takes all hooks from the module; gradients stay local from then on."""
        for handle in self._handles:
            handle.remove()

    def _announced(self, *_: Any) -> None:
        """A rank whose loss reaches no parameter takes part too."""
        if torch.is_grad_enabled():
            if (
                self._sums and self.synchronised
            ):  # of what is summed each rank keeps its share, for the next sum
                for bucket in self._buckets:
                    bucket.gradients.div_(self._group.size())
            self.synchronised = False
            self._local = True
            if self._sync:
                self._expect()

    def _expect(self) -> None:
        self._expected, self._queued, self._next = True, False, 0
        self._unused.clear()
        if self._buckets:
            self._buckets[-1].flags.fill_(1.0)
        for bucket in self._buckets:
            bucket.ready.clear()

    @torch.no_grad()
    def _arrived(self, bucket: _Bucket, place: int, _: torch.Tensor) -> None:
        if not self._sync:
            self._move(bucket, place, 1.0)
            return
        if not self._expected:  # a further backward pass after one forward pass
            self._expect()
        self._take(bucket, place)
        if not self._queued:
            self._queued = True
            after_backward(self.sync_grad)
        while self._next < len(self._buckets) and self._is_full(self._buckets[self._next]):
            self._launch()

    def _is_full(self, bucket: _Bucket) -> bool:
        return len(bucket.ready) == len(bucket.parameters)

    def _take(self, bucket: _Bucket, place: int) -> None:
        """Makes a gradient ready to be summed, whether this backward pass has reached its parameter or not."""
        parameter = bucket.parameters[place]
        if parameter.grad is None:
            self._unused.append(parameter)
            self._buckets[-1].flags[self._number[parameter]] = 0.0
        self._move(bucket, place, self._before)
        bucket.ready.add(place)

    def _move(self, bucket: _Bucket, place: int, factor: float) -> None:
        """Makes a gradient, times a factor, a view of its bucket."""
        parameter, view = bucket.parameters[place], bucket.views[place]
        gradient = None if parameter.grad is None else local_part(parameter.grad)
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise StepError(
                "a gradient reducer takes no sparse gradients: make the embedding with sparse=False."
            )
        elif gradient.data_ptr() != view.data_ptr():
            torch.mul(gradient, factor, out=view)
        elif factor != 1.0:
            view.mul_(factor)
        parameter.grad = bucket.placed[place]

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if not self._is_full(bucket):
            for place in range(len(bucket.parameters)):
                if place not in bucket.ready:
                    self._take(bucket, place)
        for hook in tuple(self._hooks["before"]):
            hook(self, bucket.gradients)
        bucket.work = dist.all_reduce(bucket.whole, group=self._group, async_op=True)


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """The parameters from the last one to the first, as backward passes reach them.

    The last bucket ends with a number for every parameter of all buckets: on how many ranks it has a gradient.
    """
    arriving = parameters[::-1]
    sizes = [((p.dtype, p.device), local_part(p).numel() * p.element_size()) for p in arriving]
    places = gradient_buckets(sizes, bucket_bytes)
    num_flags = [0] * (len(places) - 1) + [len(parameters)]
    return [
        _Bucket([arriving[place] for place in each], num)
        for each, num in zip(places, num_flags, strict=False)
    ]
