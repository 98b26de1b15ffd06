"""Agreement of ranks: equal samples where they divide one model, equal weights where they hold copies."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, count, product
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, finalize

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from atorch_ns.capture.nests import batch_sizes, leaves
from atorch_ns.capture.random_states import BatchNorm
from atorch_ns.cluster import Mesh, gather_values
from atorch_ns.errors import InputError, StepError
from atorch_ns.job.same_place import STUCK_S
from atorch_ns.sharding.compare import sum_of_bits
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.text import count_noun, first_few
from atorch_ns.torch_compat import default_store, local_box, plain_name, step_hooks, without_transforms

log = logging.getLogger("atorch_ns")

_AXES: Final = ("tensor", "sequence", "pipeline")
"""The axes whose ranks work on the same samples."""

_NUM_VALUES: Final = 1024
"""Values of each tensor that are compared, at places drawn once for all ranks."""

_TOLERANCE: Final = 1e-2
"""Floating values may differ by this share of the largest: ranks may have rounded them in bfloat16 (2^-8)."""

_EVERY: Final = 1000
"""Steps between comparisons. Each waits for the device, so one as long as a step costs 0.1 % of the time."""


class _Leaf(NamedTuple):
    """Description of one value of a batch, as ranks send it to each other."""

    where: str
    kind: str
    values: torch.Tensor


class SameBatch:
    """Compares the samples of the ranks along the axes tensor, sequence and pipeline.

    Compares the first call and every thousandth call after it, separately for training and inference. Ranks
    that create their data without a common seed would otherwise silently train on different samples.

    Args:
        mesh: the arrangement of ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._axes = [name for name in _AXES if mesh.size(name) > 1]
        self._counts = {True: 0, False: 0}

    def attach(self, module: nn.Module) -> None:
        """Checks the inputs of every call of ``module``."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.check({**dict(enumerate(args)), **kwargs})

        module.register_forward_pre_hook(torch.compiler.disable(before), prepend=True, with_kwargs=True)

    def check(self, samples: Any) -> None:
        """Compares ``samples``, a nest of tensors, if a comparison is due. Collective over those ranks then.

        Raises:
            InputError: on each of them, if the samples of two ranks differ; it names the first place.
        """
        trains = torch.is_grad_enabled()
        self._counts[trains] += 1
        if self._counts[trains] % _EVERY != 1 or not self._axes:
            return
        entries = [(dist.get_rank(), list(_sample_leaves(samples)))]
        for name in self._axes:
            every = gather_values(entries, distributed=True, group=self._mesh.axis(name).get_group())
            entries = list(chain.from_iterable(every))  # after the last axis: from all ranks of the block
        entries.sort(key=lambda pair: pair[0])  # so that all ranks report the same difference
        first, reference = entries[0]
        for rank, actual in entries[1:]:
            problem = _describe_difference(reference, actual)
            if problem is not None:
                axes = ", ".join(f"{name}={self._mesh.size(name)}" for name in self._axes)
                raise InputError(
                    f"ranks {first} and {rank} divide one model ({axes}) and must get the same samples, but {problem}. "
                    "Make the data the same in every process: call torch.manual_seed(0) before samples or random "
                    "transforms are drawn, or read the samples from files."
                )


def _sample_leaves(samples: Any) -> Iterator[_Leaf]:
    for path, leaf in leaves(samples):
        where = "batch" + "".join(f"[{key!r}]" for key in path)
        if isinstance(leaf, torch.Tensor):
            kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            yield _Leaf(where, kind, _some_values(without_transforms(leaf)))
        elif leaf is None or isinstance(leaf, (bool, int, float)):  # texts may be names of a machine's files
            yield _Leaf(where, repr(leaf), torch.empty(0))


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    # Subclasses and sparse tensors may be parts of a whole, so they are not compared.
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return torch.empty(0)
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    places = torch.arange(len(flat))
    if len(flat) > _NUM_VALUES:
        places = torch.randint(len(flat), (_NUM_VALUES,), generator=torch.Generator().manual_seed(0))
    return flat[places.to(flat.device)].cpu().double()


def _describe_difference(reference: list[_Leaf], actual: list[_Leaf]) -> str | None:
    if [leaf[:2] for leaf in reference] != [leaf[:2] for leaf in actual]:
        return f"they are {_kinds_text(reference)} and {_kinds_text(actual)}"
    for entry, other in zip(reference, actual, strict=True):
        rounding = _TOLERANCE if entry.kind.startswith(("float", "bfloat", "complex")) else 0.0
        largest = float(entry.values.nan_to_num(0.0, 0.0, 0.0).abs().max()) if len(entry.values) else 0.0
        same = torch.isclose(entry.values, other.values, rtol=0.0, atol=rounding * largest, equal_nan=True)
        if not same.all():
            index = int((~same).nonzero()[0])
            share = f"{float((~same).double().mean()):.0%} of the values compared in {entry.where} differ"
            return f"{share}, such as {entry.values[index]:g} and {other.values[index]:g}"
    return None


def _kinds_text(entries: list[_Leaf]) -> str:
    return first_few([f"{where} {kind}" for where, kind, _ in entries], 8) or "empty"


_FIRST_UPDATES: Final = (1, 2, 3, 10, 30, 100, 300)
"""Updates compared after the start and after a load. The rounding of masters into weights happens after the
observed update, so the third shows two. Later ones serve runs that end before the thousandth."""

_NUM_SAMPLED: Final = 16
"""Number of sampled elements per parameter, which distinguish a separate update from rounding."""

_ROUNDING: Final = 1e-4
"""Largest allowed difference as a share of the largest sampled element. Processors round differently."""

_OF_SAMPLES: Final = "its "
"""Prefix of names that may differ between ranks."""

_DATA_AXES: Final = ("data", "zero", "expert")


class _Record(NamedTuple):
    """State after an update: [2, P] numbered part names and sums of their bits, and [P, n] elements."""

    update: int
    paths: list[str]
    sums: np.ndarray
    samples: np.ndarray


class SameWeights:
    """Compares the weights of ranks that hold replicas. Waits only for a rank that is two records behind.

    After some updates each rank writes a checksum of the bits of each parameter, or of its shard, to the
    rendezvous store. It reads the checksums of its replicas once they are there. This finds gradients that
    were changed, omitted or not reduced on one rank, with any training loop.

    Args:
        mesh: the arrangement of ranks.
        roots: modules with the parameters of this rank.
        name: name of the job, the same on all ranks and unique among jobs.
        gradients: whether each rank updates some weights and sends them. Gradients are then compared too.

    Attributes:
        is_on: whether weights are compared. The same on all ranks.
    """

    def __init__(self, mesh: Mesh, roots: list[nn.Module], name: str, *, gradients: bool = False) -> None:
        self._name, self._roots, self._rank = name, roots, dist.get_rank()
        self._others = _ranks_with_copies(mesh)
        self._num_updates = self._begin = self._number = 0  # updates; update of the last load; records
        self._waiting: dict[int, _Record] = {}  # records that are not compared yet
        self._gradients = self._record_parts({}) if gradients else None
        self.is_on = True
        self._outside: OutsideWeights | None = None
        self._is_warned = self._is_told = self._has_gradient = False
        self._squares = 0.0  # sum of squared batch sizes

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks weights after each update of an optimizer from now on, whichever loop calls it."""
        optimizer.register_step_pre_hook(self._note_gradient)
        optimizer.register_step_pre_hook(self._note_gradients)
        optimizer.register_step_post_hook(self._after_update)
        parts = getattr(optimizer, "optim", optimizer)  # zero1's optimizer of this rank's shard
        self._outside = OutsideWeights(self._name, self._others, optimizers=(optimizer, parts))

    def _note_gradient(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._has_gradient |= any(p.grad is not None for g in optimizer.param_groups for p in g["params"])

    def _note_gradients(self, *_: object) -> None:
        if self._gradients is not None and self._is_due(self._num_updates + 1):
            labels: dict[torch.Tensor, str] = {}
            for path, parameter in self._named_parameters():
                labels[parameter] = f"{path} before the update"
                if parameter.grad is not None:
                    labels[parameter.grad] = f"the gradient of {path}"
            self._gradients = self._record_parts(labels)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (entry for root in self._roots for entry in root.named_parameters())

    @torch.no_grad()
    def _record_parts(self, labels: Mapping[torch.Tensor, str], before: _Record | None = None) -> _Record:
        labels = {tensor: path for tensor, path in labels.items() if _is_plain(tensor)}
        paths = [plain_name(path) for path in labels.values()]
        keys = [_key_of(path, tensor) for path, tensor in zip(paths, labels, strict=True)]
        totals = [int(total) for total in _on_cpu([sum_of_bits(local_part(tensor)) for tensor in labels], 0)]
        samples = _on_cpu([_sample_elements(local_part(tensor)) for tensor in labels], _NUM_SAMPLED).numpy()
        sums = np.array([keys, totals], np.int64)  # [2, P]
        if before is not None:
            paths, sums = before.paths + paths, np.hstack([before.sums, sums])
            samples = np.vstack([before.samples, samples])
        return _Record(self._num_updates, paths, sums, samples)

    def _is_due(self, update: int) -> bool:
        return update - self._begin in _FIRST_UPDATES or update % _EVERY == 0

    def begin_anew(self) -> None:
        """Restarts the schedule of comparisons on all ranks, as after a load."""
        self._begin = self._num_updates

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._note_gradient(optimizer)  # gradient of a closure; an earlier one may have been cleared
        has_gradient, self._has_gradient = self._has_gradient, False
        # Without a gradient nothing was exchanged, and ranks may be at other updates.
        if not (self.is_on and has_gradient):
            return
        for number in tuple(self._waiting):
            self._compare_copies(number)  # does not wait
        self._num_updates += 1
        if self._is_due(self._num_updates):
            self._write_checksums(_options_of(optimizer))

    @torch.no_grad()
    def _write_checksums(self, options: dict[torch.Tensor, str]) -> None:
        self._number += 1
        # Wait only for a rank that is two of these updates behind.
        late = self._waiting.get(number := self._number - 2)
        if late is not None:
            with suppress(RuntimeError):  # where updates exchange nothing, others may be behind
                keys = [self._store_key(rank, "samples", number) for rank in self._others]
                default_store().wait(keys, timedelta(seconds=STUCK_S))
            self._compare_copies(number)
        if late is not None and number in self._waiting:
            raise StepError(
                f"rank {self._rank} made update {self._num_updates}, but one of the ranks {', '.join(map(str, self._others))} "
                f"has not reached update {late.update}. Ranks must step together, or skip a step together."
            )
        labels: dict[torch.Tensor, str] = {p: path for path, p in self._named_parameters()}
        record = self._record_parts(labels | options | self._values_of_samples(), self._gradients)
        self._squares = 0.0  # the next comparison is of the batches from here on
        store = default_store()
        store.set(self._store_key(self._rank, "sums"), record.sums.tobytes())
        store.set(self._store_key(self._rank, "samples"), record.samples.tobytes())
        self._waiting[self._number] = record
        for what in ("sums", "samples"):  # read by all: a rank that is two behind ends the others
            store.delete_key(self._store_key(self._rank, what, self._number - 3))

    def note_batch(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook that runs before a forward pass of the model."""
        sizes = batch_sizes((args, kwargs)) if torch.is_grad_enabled() else ()
        self._squares += float(max(sizes, default=0)) ** 2  # squared, so that 4 and 8 differ from 6 and 6

    def _values_of_samples(self) -> dict[torch.Tensor, str]:
        # These depend on this rank's samples; one process sees all. Batch norms have a separate note.
        modules = (module for root in self._roots for module in root.named_modules())
        buffers = {
            buffer: f"{_OF_SAMPLES}buffer {f'{path}.{name}'.removeprefix('.')}"
            for path, module in modules
            if not isinstance(module, BatchNorm)
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        return {
            **buffers,
            torch.tensor(self._squares, dtype=torch.float64): f"{_OF_SAMPLES}numbers of samples in batches",
        }

    def _store_key(self, rank: int, what: str, number: int | None = None) -> str:
        return f"atorch_ns/weights/{self._name}/{self._number if number is None else number}/{rank}/{what}"

    def _compare_copies(self, number: int) -> None:
        store, record = default_store(), self._waiting[number]
        if not store.check([self._store_key(rank, "samples", number) for rank in self._others]):
            return
        del self._waiting[number]
        for rank in self._others:
            sums = np.frombuffer(store.get(self._store_key(rank, "sums", number)), np.int64).reshape(2, -1)
            samples = np.frombuffer(store.get(self._store_key(rank, "samples", number)), np.float32)
            # Compare only parts that both ranks hold; other stages or shards hold different parts.
            _, here, there = np.intersect1d(record.sums[0], sums[0], return_indices=True)
            differ = record.sums[1][here] != sums[1][there]
            if differ.any():
                here, other = here[differ], samples.reshape(-1, _NUM_SAMPLED)[there[differ]]
                self._raise_difference(record, rank, here, other)

    def _raise_difference(self, record: _Record, rank: int, indices: np.ndarray, other: np.ndarray) -> None:
        samples = record.samples[indices]
        with np.errstate(invalid="ignore"):
            off = np.abs(samples - other).max(1)
            largest = np.maximum(np.abs(samples).max(1), np.abs(other).max(1))
            nan_on_both = np.isnan(samples).any(1) & np.isnan(other).any(1)
            wrong = ~(off <= _ROUNDING * largest) & ~nan_on_both  # not off > ..., which NaN would pass
        of_samples = np.array([record.paths[index].startswith(_OF_SAMPLES) for index in indices])
        names = [record.paths[index] for index in indices[wrong & of_samples]]
        if names and not self._is_told:
            self._is_told = True
            log.warning(
                "after update %d, rank %d differs from rank %d in %s: it depends on this rank's samples, while one process uses all, "
                "and each rank's mean has equal weight. Average what a forward pass writes over the ranks (dist.all_reduce), and give "
                "ranks batches of equal size, or pass weight_func and call train_step.",
                *(record.update, self._rank, rank, first_few(names, 3)),
            )
        indices, wrong = indices[~of_samples], wrong[~of_samples]  # samples explain these: only a warning
        if not len(indices):
            return
        paths = [record.paths[index] for index in (indices[wrong] if wrong.any() else indices)]
        if wrong.any():
            raise StepError(
                f"after update {record.update}, rank {self._rank} holds other weights than rank {rank}, but they must be equal: "
                f"{count_noun(len(indices), 'parameter')} of {len(record.paths)}, such as {first_few(paths, 3)}. Do on all ranks "
                "what only one rank did: it skipped a step, changed or clipped gradients or computed them by hand "
                "from its own samples, wrote or loaded weights, or let its learning rate follow its own loss (result.mean "
                "gives that of all ranks). atorch-ns verify --script names the first update and its line."
            )
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "after update %d, the weights of rank %d and of rank %d differ by rounding (%s), which different kinds of "
                "processors can cause; these copies may drift apart.",
                *(record.update, self._rank, rank, first_few(paths, 3)),
            )


class OutsideWeights:
    """Warns once if an optimizer created outside auto_accelerate makes weights differ between ranks.

    Nothing averages gradients outside the model, such as those of a parametric loss. After some updates a
    rank writes a checksum of all weights of such an optimizer to the store. It later reads the checksums of
    ``others`` that are there. ``optimizers`` are the job's optimizers.
    """

    def __init__(self, name: str, others: Sequence[int], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._name, self._others = name, others
        self._updates = WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]]()
        self._indices = count()  # ranks release optimizers at different times
        self._waiting = WeakKeyDictionary[torch.optim.Optimizer, tuple[str, bytes]]()
        self._optimizers = WeakSet(optimizers)  # weak, as their hooks hold this object
        for optimizer in self._optimizers:
            optimizer.register_step_post_hook(self._mark_as_known)
        look = WeakMethod(self._check_update)
        handle = register_optimizer_step_post_hook(lambda *args: (method := look()) and method(*args))
        finalize(self, handle.remove)

    def _mark_as_known(self, *_: object) -> None:
        """Marks optimizers that need no check by its presence among their hooks."""

    def _check_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # A script may continue after its ranks have separated.
        if not dist.is_initialized() or not self._is_from_outside(optimizer):
            return
        if self._have_sums_parted(optimizer):
            optimizer.register_step_post_hook(self._mark_as_known)  # another job does not repeat it
            log.warning(
                "an optimizer (%s) that auto_accelerate did not create makes weights differ between ranks: nothing averages "
                "the gradients of parameters outside of the model, such as those of a loss. Make them part of the model before "
                "auto_accelerate, or average each gradient: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG).",
                type(optimizer).__name__,
            )
            return
        index, number = self._updates.get(optimizer) or (next(self._indices), 1)
        self._updates[optimizer] = index, number + 1
        if number in _FIRST_UPDATES:
            self._write_sums(optimizer, f"atorch_ns/outside/{self._name}/{index}", number)

    def _is_from_outside(self, optimizer: torch.optim.Optimizer) -> bool:
        owners = (getattr(hook, "__self__", None) for hook in step_hooks(optimizer))
        if any(isinstance(owner, OutsideWeights) for owner in owners):
            return False  # belongs to a job, or already reported
        parameters = _updated_by(optimizer)
        # It may be the inner optimizer of one of the job's, as with SAM.
        is_inside = any(parameters & _updated_by(inside) for inside in self._optimizers)
        return not is_inside and not any(isinstance(p, DTensor) or not _is_plain(p) for p in parameters)

    def _have_sums_parted(self, optimizer: torch.optim.Optimizer) -> bool:
        # Compares the last checksums once all others are there; does not wait for them.
        store, (key, sums_here) = default_store(), self._waiting.get(optimizer, ("", b""))
        if not key or not store.check([f"{key}/{rank}" for rank in self._others]):
            return False
        del self._waiting[optimizer]
        return any(store.get(f"{key}/{rank}") != sums_here for rank in self._others)

    def _write_sums(self, optimizer: torch.optim.Optimizer, start: str, number: int) -> None:
        values = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        key = f"{start}/{[list(value.shape) for value in values]}/{number}"
        sums_here = _on_cpu([sum_of_bits(value) for value in values], 0).numpy().tobytes()
        self._waiting[optimizer] = key, sums_here
        default_store().set(f"{key}/{dist.get_rank()}", sums_here)


def _updated_by(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _ranks_with_copies(mesh: Mesh) -> list[int]:
    names = mesh.device_mesh.mesh_dim_names or ()
    local: Sequence[int] = mesh.device_mesh.get_coordinate() or ()
    axes = [number for number, name in enumerate(names) if name in _DATA_AXES]
    ranks = set()
    # Copies lie along axes that do not divide the parameter: one rank for every subset of the axes.
    for choice in product((False, True), repeat=len(axes)):
        coordinate = list(local)
        subset = [axis for axis, is_chosen in zip(axes, choice, strict=True) if is_chosen]
        target = 0 if any(local[axis] for axis in subset) else -1  # the first rank compares with the last
        for axis in subset:
            coordinate[axis] = target
        ranks.add(int(mesh.device_mesh.mesh[tuple(coordinate)]))
    return sorted(ranks - {dist.get_rank()})


def _is_plain(parameter: torch.Tensor) -> bool:
    part = local_part(parameter).detach()  # a parameter has its own class
    # Packed parts of other libraries are subclasses whose elements cannot be read.
    return (
        type(part) is torch.Tensor and part.layout == torch.strided and not part.is_meta and part.numel() > 0
    )


def _options_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    table: dict[str, list[float]] = {}
    for option, value in (entry for group in optimizer.param_groups for entry in group.items()):
        # Betas are a tuple; a learning rate may be a 0-d tensor.
        values = [value] if not isinstance(value, (list, tuple)) else [] if option == "params" else value
        numbers = [each for each in values if isinstance(each, (int, float)) or getattr(each, "ndim", 1) == 0]
        table.setdefault(f"{option} of the optimizer", []).extend(map(float, numbers))
    return {torch.tensor(numbers, dtype=torch.float64): words for words, numbers in table.items()}


def _key_of(path: str, parameter: torch.Tensor) -> int:
    box = local_box(parameter) if isinstance(parameter, DTensor) else ()  # offset and size of this part
    digest = hashlib.blake2b(f"{path} {box} {tuple(parameter.shape)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _on_cpu(values: list[torch.Tensor], width: int) -> torch.Tensor:
    # Device of the weights, since options of an optimizer are on the CPU.
    device = next((value.device for value in values if value.device.type != "cpu"), "cpu")
    alike = [value.to(device) for value in values]  # one copy to the host for all
    return torch.stack(alike).cpu() if values else torch.zeros((0, width) if width else 0)


def _sample_elements(part: torch.Tensor) -> torch.Tensor:
    """[n] elements at equal distances, as float32. A small array repeats some of them."""
    flat = (torch.view_as_real(part) if part.is_complex() else part).reshape(-1)
    places = torch.linspace(0, flat.numel() - 1, _NUM_SAMPLED, device=flat.device).long()
    return flat[places].float()
