"""Gradient reducer: means of gradients over ranks, bucket by bucket, while the backward pass runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.capture.nests import unique_tensors_of
from atorch_ns.costs.collectives import DEFAULT_BUCKET_BYTES, NUM_REPORTED, gradient_buckets
from atorch_ns.errors import InputError, StepError
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.text import first_few
from atorch_ns.torch_compat import after_accumulation, after_backward, is_transformed, laid_out, plain_name

BucketHook = Callable[["GradientReducer", torch.Tensor], object]
"""Called with the reducer and a bucket, 1-d, of its parameters' gradients in order, which it may change."""


class _Bucket:
    """Gradients that are communicated as one tensor. The parameters' gradients are views of it."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_flags: int, like: torch.Tensor) -> None:
        self.parameters = parameters
        pieces = [local_part(parameter) for parameter in parameters]
        sizes = [piece.numel() for piece in pieces]
        first = pieces[0] if pieces else like  # a bucket may be empty
        # [gradients, flags]: one all-reduce sends both.
        self.whole = torch.zeros(sum(sizes) + num_flags, dtype=first.dtype, device=first.device)
        self.gradients, self.flags = self.whole.split([sum(sizes), num_flags])
        parts = self.gradients.split(sizes)
        self.views = [part.view_as(piece) for part, piece in zip(parts, pieces, strict=True)]
        # Other tensors in the same memory: ``module.to`` moves the gradient of a parameter elsewhere.
        aliases = [view.view_as(view) for view in self.views]
        self.grads = [
            laid_out(view, parameter) if isinstance(parameter, DTensor) else view
            for view, parameter in zip(aliases, parameters, strict=True)
        ]
        self.ready: set[int] = set()  # parameters whose gradients have arrived, by index
        self.work: Any = None  # the pending all-reduce

    @property
    def is_full(self) -> bool:
        """True if the gradients of all its parameters are ready."""
        return len(self.ready) == len(self.parameters)


_NUM_TURNS: Final = NUM_REPORTED - 1
"""Maximum number of forward passes without a backward pass by which ranks are distinguished."""

_Flags = tuple[bool, ...]
"""For each parameter, whether it is trained."""


class GradientReducer:
    """Averages gradients of parameters that are equal on all ranks of a group, whole or as the same part.

    Gradients belong to parameters. At the end of a backward pass all gradients that it added are averaged,
    through the module or another method, for the first time or again. All ranks reduce buckets in one order,
    each once its gradients and all earlier buckets are ready, so communication overlaps with backward passes.
    A parameter that no rank used has no gradient afterwards, as in one process. Parameters may be frozen and
    thawed at any time, equally on all ranks. Gradients of ``sparse`` embeddings contain only used rows.

    Args:
        module: a module whose forward pass announces a backward pass.
        group: the ranks, which hold equal parameters. Divided parameters are divided over other ranks.
        parameters: parameters to reduce, trained or not, in one order on all ranks; ``None`` for all.
        bucket_bytes: the minimum size of a bucket.
        predivide: divisor of gradients before the sum, against 16-bit overflow. The rest of the division
            by the number of ranks follows the sum. ``None`` to divide completely before it.

    Attributes:
        synchronised: whether gradients are averaged over all ranks since the last forward pass.

    Raises:
        InputError: if a number is not positive.
        StepError: on all ranks, from a backward pass, if ranks train different parameters or one is behind.
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
        candidates = module.parameters() if parameters is None else parameters
        floating = [p for p in candidates if p.is_floating_point() or p.is_complex()]
        tables = sparse_tables(module)
        self._parameters = [p for p in floating if p not in tables]
        self._tables = [p for p in floating if p in tables]
        self._names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
        self._like = self._parameters[0] if self._parameters else torch.zeros(())
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._before, self._after = 1.0 / first, first / group.size()  # factors before and after the sum
        self._hooks: dict[str, list[BucketHook]] = {"before": [], "after": []}
        self._lay_out(self._trained_flags())
        self._unused_parameters: list[nn.Parameter] = []  # parameters without a gradient on this rank
        self._next = 0  # the next bucket to reduce
        self._sync = True  # false under no_sync
        self._sums = False  # sum instead of mean
        self._is_expected = False  # a reduction is due
        self._local = False  # a forward pass came since the last reduction
        self._is_queued = False  # the end of the running pass is queued
        self._has_reached = False  # the running pass has added to a gradient
        self._has_changed = False  # trained parameters differ from the layout
        self._reached_parameters: set[nn.Parameter] = set()  # got a gradient in the first pass
        self._repeated_parameters: set[nn.Parameter] = set()  # got several in one pass
        self._is_first_pass = True
        self._num_open = 0  # forward passes without a backward pass
        self._late_report: _LateNumbers | None = None  # copied from the GPU, not yet read
        self.synchronised = False
        self._handles = [after_accumulation(parameter, self._take_gradient) for parameter in floating]
        self._handles.append(module.register_forward_pre_hook(self._begin_forward))
        self._handles.append(module.register_forward_hook(self._watch_outputs))

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """A twin for a copy of the module, such as an average of its weights. Nothing reduces it."""
        twin = GradientReducer.__new__(GradientReducer)
        twin._parameters, twin._handles, twin._buckets = [], [], []
        twin._hooks = {"before": [], "after": []}
        twin._sync = twin._sums = twin._is_expected = twin._local = twin.synchronised = False
        return twin

    @property
    def num_buckets(self) -> int:
        """The number of buckets, and so of reductions in a step."""
        return len(self._buckets)

    def before(self, hook: BucketHook) -> Callable[[], None]:
        """Calls ``hook`` with each bucket before its reduction, once a step. Returns a removal function."""
        self._hooks["before"].append(hook)
        return partial(self._hooks["before"].remove, hook)

    def after(self, hook: BucketHook) -> Callable[[], None]:
        """Calls ``hook`` with each bucket once it holds the means. Returns a removal function."""
        self._hooks["after"].append(hook)
        return partial(self._hooks["after"].remove, hook)

    @property
    def is_paused(self) -> bool:
        """True while gradients stay on their ranks."""
        return not self._sync

    def wait_until_told(self, *, sums: bool = False) -> None:
        """Keeps gradients on their ranks until :meth:`sync_grad`.

        Args:
            sums: whether they are then summed instead of averaged.
        """
        self._sync, self._sums = False, sums
        if sums:
            self._before, self._after = 1.0, 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which forward and backward passes accumulate gradients without reduction."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def sync_grad(self) -> None:
        """Reduces gradients of the last backward pass, if not done, and waits for all ranks. Collective."""
        if not self._is_expected and self._local:  # all passes since the last reduction were under no_sync
            self._expect_gradients()
        if not self._is_expected:
            return
        # This rank's losses have not reached the module, so nothing follows its forward passes.
        if not self._is_queued:
            self._num_open = 0
        self._reduce_buckets()
        for table in self._tables:
            if table.requires_grad:
                add_rows(table, self._group, self._before * self._after)
        self._is_expected, self._is_queued, self._local, self._is_first_pass = False, False, False, False
        self._compare_ranks()
        self.synchronised = True

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiplies all gradients by a number.

        Raises:
            StepError: before the reduction, while each rank has gradients of its own data.
        """
        if not self.synchronised:
            raise StepError(
                "scale_grads needs gradients of all ranks: call it after sync_grad(), which ends a backward pass outside of "
                "no_sync()."
            )
        for bucket in self._buckets:
            bucket.gradients.mul_(factor)

    def detach(self) -> None:
        """Removes all hooks from the module. Gradients stay local from then on."""
        for handle in self._handles:
            handle.remove()

    def _trained_flags(self) -> _Flags:
        return tuple([parameter.requires_grad for parameter in self._parameters])

    def _lay_out(self, flags: _Flags) -> None:
        self._layout = flags
        trained_parameters = [p for p, is_trained in zip(self._parameters, flags, strict=True) if is_trained]
        self._buckets = _make_buckets(trained_parameters, self._bucket_bytes, self._like)
        self._places = {
            parameter: (bucket, index)
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self._number = {parameter: number for number, parameter in enumerate(self._places)}  # flag index

    def _begin_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not is_transformed():
            # Each rank keeps its share of a summed gradient for the next sum.
            if self._sums and self.synchronised:
                for parameter in self._places:  # whose gradient is outside of its bucket once it is in fp32
                    if parameter.grad is not None:
                        local_part(parameter.grad).data.div_(self._group.size())
            self.synchronised = False
            self._local = True
            # Here, so that a rank whose loss reaches no parameter takes part in the reduction.
            if self._sync:
                self._expect_gradients()

    def _watch_outputs(self, _: nn.Module, inputs: Any, output: Any) -> None:
        if not (self._sync and torch.is_grad_enabled()) or is_transformed():
            return
        is_followed = [False]

        def follow(_: torch.Tensor) -> None:
            if not is_followed[0]:
                is_followed[0] = True
                self._num_open -= 1
            self._end_with_pass()

        # The end is queued when the pass reaches an output: a recomputed block (use_reentrant=True) runs
        # an inner pass, which may reach a parameter first and ends earlier.
        for tensor in unique_tensors_of(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(follow)
                is_followed[0] = True
        # Until here True means that hooks exist; from now on, that a pass has reached an output.
        if is_followed[0]:
            is_followed[0] = False
            self._num_open += 1

    def _end_with_pass(self) -> None:
        if self._sync and not self._is_queued:
            if not self._is_expected:  # a further backward pass after one forward pass
                self._expect_gradients()
            self._is_queued, self._has_reached = True, False
            after_backward(self._end_pass)

    def _end_pass(self) -> None:
        self._is_queued = False
        # autograd.grad for inputs alone reaches no parameter: there is nothing to reduce.
        if self._has_reached:
            self._has_reached = False
            self.sync_grad()

    def _expect_gradients(self) -> None:
        if self._late_report is not None:  # the copy from the GPU has arrived by now
            report, self._late_report = self._late_report, None
            self._require_alike(report.read())
        self._is_expected, self._is_queued = True, False
        self._has_changed = self._trained_flags() != self._layout
        self._reset_buckets()

    def _reset_buckets(self) -> None:
        self._next = 0
        self._unused_parameters.clear()
        for bucket in self._buckets:
            bucket.ready.clear()
        # Through .data, since versions must change only when the user writes.
        self._buckets[-1].flags.data[: len(self._number)].fill_(1.0)

    @torch.no_grad()
    def _take_gradient(self, parameter: nn.Parameter) -> None:
        slot = self._places.get(parameter)
        # Just thawed: this pass ends with buckets that include it. Otherwise its gradient is sparse.
        if slot is None:
            if self._sync:
                self._end_with_pass()
                self._has_reached = True
            return
        bucket, index = slot
        # Under no_sync the gradient moves to its bucket and stays local.
        if not self._sync:
            self._move_to_bucket(bucket, index, 1.0)
            return
        self._end_with_pass()
        self._has_reached = True
        # A recomputed block may add twice. The first pass finds such parameters; they are taken at the end.
        if self._is_first_pass or parameter in self._repeated_parameters:  # taken at the end
            if parameter in self._reached_parameters:
                self._repeated_parameters.add(parameter)
            self._reached_parameters.add(parameter)
            return
        if index in bucket.ready:
            raise StepError(
                f"{self._names[parameter]} got a second gradient in one backward pass while the first was being "
                "sent to the other ranks, unlike in all passes before. A block that is recomputed with use_reentrant=True "
                "shares the parameter with another: pass use_reentrant=False, or choose ('ddp', {'reducer': 'torch'})."
            )
        self._prepare_gradient(bucket, index)
        # All ranks reduce in one order, so a full bucket waits for earlier ones.
        while self._next < len(self._buckets) and self._buckets[self._next].is_full:
            self._launch_bucket()

    def _prepare_gradient(self, bucket: _Bucket, index: int) -> None:
        parameter = bucket.parameters[index]
        # Not reached: zeros are sent, and a flag of 0 for this rank.
        if parameter.grad is None:
            self._unused_parameters.append(parameter)
            self._buckets[-1].flags[self._number[parameter]] = 0.0
        self._move_to_bucket(bucket, index, self._before)
        bucket.ready.add(index)

    def _move_to_bucket(self, bucket: _Bucket, index: int, factor: float) -> None:
        parameter, view = bucket.parameters[index], bucket.views[index]
        gradient = None if parameter.grad is None else local_part(parameter.grad)
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise StepError(
                "a gradient reducer takes no sparse gradients: make the embedding with sparse=False, or choose "
                "('ddp', {'reducer': 'torch'})."
            )
        elif parameter.dtype != view.dtype:  # a gradient that was prepared for a master is in fp32
            raise StepError(
                f"gradients are in {gradient.dtype}, but were in {view.dtype} when the strategy was applied: the model was "
                "converted afterwards. Convert it before the call, or use the method half."
            )
        elif gradient.data_ptr() != view.data_ptr():
            # Outside of the bucket: write the product there, without a temporary.
            torch.mul(gradient, factor, out=view)
            if local_part(bucket.grads[index]).data_ptr() != view.data_ptr():  # as module.to leaves it
                alias = view.view_as(view)
                like = parameter if isinstance(parameter, DTensor) else None
                bucket.grads[index] = alias if like is None else laid_out(alias, like)
        elif factor != 1.0:
            # Already the bucket's view, since autograd adds in place.
            view.mul_(factor)
        parameter.grad = bucket.grads[index]

    def _launch_bucket(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        # Add parameters that the pass did not reach, and those with repeated gradients.
        for index in set(range(len(bucket.parameters))) - bucket.ready:
            self._prepare_gradient(bucket, index)
        for hook in tuple(self._hooks["before"]):
            hook(self, bucket.gradients)
        # The last bucket carries this rank's report.
        if bucket is self._buckets[-1]:
            report = [0.0] * NUM_REPORTED
            report[self._num_open % _NUM_TURNS] = 1.0  # equal ranks set one column
            report[-1] = float(self._has_changed)
            bucket.flags[len(self._number) :].copy_(torch.tensor(report), non_blocking=True)
        bucket.work = dist.all_reduce(bucket.whole, group=self._group, async_op=True)

    def _reduce_buckets(self) -> None:
        while self._next < len(self._buckets):
            self._launch_bucket()
        for bucket in self._buckets:
            bucket.work.wait()
            if self._after != 1.0:
                bucket.gradients.mul_(self._after)
            for hook in tuple(self._hooks["after"]):
                hook(self, bucket.gradients)
        if self._unused_parameters:  # unused by this rank, and by all if the sum says so
            counts = self._buckets[-1].flags.tolist()  # synchronises with the GPU
            for parameter in self._unused_parameters:
                if not counts[self._number[parameter]]:
                    parameter.grad = None

    def _compare_ranks(self) -> None:
        # Do not wait for the GPU: read the report at the next pass, unless this rank must act now.
        report = self._buckets[-1].flags[len(self._number) :]
        if self._has_changed or report.device.type == "cpu":
            self._require_alike(report.tolist())
        else:
            self._late_report = _LateNumbers(report)

    def _require_alike(self, report: list[float]) -> None:
        # Each rank sets the column of its open passes: several columns mean different steps.
        if sum(number > 0.0 for number in report[:_NUM_TURNS]) > 1:
            raise StepError(
                "ranks have reduced gradients of different steps: one rank has run a forward pass without a backward pass, "
                "and others have not. If one rank skips a backward pass, for example for a non-finite loss, all must skip it: "
                "skip where result.mean(float(not loss.isfinite())) is not 0. A forward pass that needs no gradients "
                "belongs under torch.no_grad()."
            )
        if report[-1]:
            self._follow_change()

    def _follow_change(self) -> None:
        all_flags: list[_Flags] = [()] * self._group.size()
        dist.all_gather_object(all_flags, self._trained_flags(), group=self._group)
        for parameter, states in zip(self._parameters, zip(*all_flags, strict=True), strict=True):
            if len(set(states)) > 1:
                raise StepError(
                    f"{self._names[parameter]} is trained on some ranks and frozen on others, so it would not stay the same on "
                    "all. Call requires_grad_ on all ranks, before the same step."
                )
        # Newly trained parameters were in no bucket: reduce them now in buckets of their own.
        now, before = self._trained_flags(), self._layout
        self._lay_out(tuple([new and not old for new, old in zip(now, before, strict=True)]))
        self._has_changed = False
        self._reset_buckets()
        self._reduce_buckets()
        # Then lay out buckets for all trained parameters.
        self._lay_out(now)
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None:
                    self._move_to_bucket(bucket, index, 1.0)


def sparse_tables(module: nn.Module) -> dict[torch.Tensor, str]:
    """The weights of embeddings whose gradients contain only used rows, with the modules' names.

    The gradient of a weight shared with another module is dense.
    """
    uses: Counter[torch.Tensor] = Counter(
        weight for part in module.modules() for weight in part.parameters(recurse=False)
    )
    return {
        table.weight: plain_name(name)
        for name, table in module.named_modules()
        if isinstance(table, (nn.Embedding, nn.EmbeddingBag)) and table.sparse and uses[table.weight] == 1
    }


def require_dense_gradients(module: nn.Module, method: str) -> None:
    """Checks for sparse gradients, which methods on torch's ``fully_shard`` engine do not reduce.

    Raises:
        InputError: if an embedding has ``sparse`` set.
    """
    if tables := sparse_tables(module):
        raise InputError(
            f"{first_few(list(tables.values()))} has sparse=True, and {method} reduces no sparse gradients here: make it with "
            "sparse=False, or choose ddp or zero1 without axes that divide the model."
        )


def add_rows(table: torch.Tensor, group: dist.ProcessGroup, factor: float) -> None:
    """Sums a gradient of rows over all ranks, times a factor. ``None`` if no rank has one. Collective.

    If one rank's gradient is dense, as with a penalty on the whole table, so is the sum, as in one process.
    """
    gradient = table.grad
    is_dense = gradient is not None and not gradient.is_sparse
    sparse = gradient.coalesce() if gradient is not None and not is_dense else None
    num_used = 0 if sparse is None else sparse.values().shape[0]
    # [2] per rank: number of rows, -1 without a gradient; 1 if dense.
    counts = [torch.zeros(2, dtype=torch.int64, device=table.device) for _ in range(group.size())]
    counts_here = torch.tensor([-1 if gradient is None else num_used, int(is_dense)], device=table.device)
    dist.all_gather(counts, counts_here, group=group)
    numbers = [int(number) for number, _ in counts]
    if max(numbers) < 0:
        return
    if any(int(dense) for _, dense in counts):
        whole = torch.zeros_like(table) if gradient is None else gradient.to_dense() * factor
        dist.all_reduce(whole, group=group)
        table.grad = whole
        return
    # all_gather needs equal sizes, so ranks pad to the most rows.
    rows = torch.zeros(max(numbers), dtype=torch.int64, device=table.device)
    values = torch.zeros(max(numbers), *table.shape[1:], dtype=table.dtype, device=table.device)
    if sparse is not None:
        rows[:num_used], values[:num_used] = sparse.indices()[0], sparse.values() * factor
    all_rows = _gather_unpadded(rows, numbers, group)
    all_values = _gather_unpadded(values, numbers, group)
    # coalesce adds rows that several ranks have.
    table.grad = torch.sparse_coo_tensor(all_rows.unsqueeze(0), all_values, table.shape).coalesce()


def _gather_unpadded(part: torch.Tensor, numbers: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in numbers]  # by rank, each with padding behind its number of rows
    dist.all_gather(parts, part, group=group)
    return torch.cat([part[: max(number, 0)] for part, number in zip(parts, numbers, strict=True)])


class _LateNumbers:
    """Numbers in an asynchronous copy from a GPU, for which the host waits only when it reads them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host = torch.empty_like(numbers, device="cpu", pin_memory=True)  # for an asynchronous copy
        self._host.copy_(numbers, non_blocking=True)
        self._arrival = torch.get_device_module(numbers.device).Event()
        self._arrival.record()

    def read(self) -> list[float]:
        """The numbers."""
        self._arrival.synchronize()
        return list(self._host.tolist())


def _make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int, like: torch.Tensor) -> list[_Bucket]:
    # In reverse, as the backward pass reaches them.
    arriving = parameters[::-1]
    sizes = [((p.dtype, p.device), local_part(p).numel() * p.element_size()) for p in arriving]
    places = gradient_buckets(sizes, bucket_bytes) or [[]]  # at least one, for the reports
    # Only the last bucket has flags: one per parameter (ranks with a gradient), then the reports.
    num_flags = [0] * (len(places) - 1) + [len(parameters) + NUM_REPORTED]
    return [
        _Bucket([arriving[index] for index in each], num, like)
        for each, num in zip(places, num_flags, strict=True)
    ]
