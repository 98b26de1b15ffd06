"""Setup of a probe: a small model of the same structure, a few batches, and the reference on them."""

from __future__ import annotations

import copy
import itertools
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from atorch_ns.capture.blocks import fingerprints, repeated_blocks
from atorch_ns.capture.nests import tensors_of
from atorch_ns.capture.structure import Container, copy_structure, truncate
from atorch_ns.cluster import Cluster
from atorch_ns.cluster.memory_limit import room_bytes
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Materialiser
from atorch_ns.job.sampling import read_samples
from atorch_ns.method import Registry, Resolved, resolve
from atorch_ns.numerics.reference import (
    NO_DEVIATION,
    Deviation,
    Reference,
    RoundsTo16Bits,
    bare_groups,
    measure,
    part_of_ranks,
    run_reference,
    run_whole,
)
from atorch_ns.numerics.verdict import judge_parts
from atorch_ns.profile import Profile
from atorch_ns.strategy import Strategy
from atorch_ns.text import bytes_text

_CONSTANT_NOISE = 0.02
"""Standard deviation of the noise added to parameters with constant values (see :func:`fill`)."""

Originals = Mapping[nn.Parameter, nn.Parameter]


def structure_of(model: nn.Module, *, shallow: bool) -> tuple[nn.Module, Originals]:
    """A copy of ``model`` whose parameters take no memory; ties, buffers and settings are as they were.

    Args:
        shallow: keep two blocks of the first kind and one of each other kind.

    Returns:
        The copy with its parameters on meta, and for each of them the one that it stands for.
    """
    blocks = {block.name: block.module for block in repeated_blocks(model)} if shallow else {}
    containers = truncate(model, blocks, fingerprints(blocks))

    def make(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta") if kind == "parameter" else tensor.detach().clone()

    structure = copy_structure(model, make, containers)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    originals = {}
    for path, module in structure.named_modules():
        source = _original_path(path, containers)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                originals[parameter] = parameters[f"{source}.{name}" if source else name]
    return structure, originals


def _original_path(path: str, containers: Mapping[str, Container]) -> str:
    for container in containers.values():
        for position, index in enumerate(container.kept):
            copy_path = container.copy_path(position)
            if path == copy_path or path.startswith(f"{copy_path}."):
                return container.blocks[index] + path.removeprefix(copy_path)
    return path


def fill(model: nn.Module, originals: Originals, device: torch.device, *, seed: int) -> None:
    """Gives every parameter on meta its value, in place.

    A parameter that has a value keeps it. Others are initialised as the model would, or with small random
    values where it offers no way. Constants (zeros, ones) get a little noise: behind a layer of zeros all
    gradients are zero, and a lost one would not be missed.

    Raises:
        InputError: if a buffer on meta cannot be given a value.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            original = None if parameter is None else originals.get(parameter)
            if parameter is None or original is None or original.is_meta:
                continue
            if parameter not in copies:
                data = original.detach().to(device, copy=True)
                copies[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = copies[parameter]
    Materialiser(model, device, seed=seed, init=_make_initialiser(model)).materialise([model])
    model.to(device)
    for name, parameter in model.named_parameters():
        _perturb_constant(name, parameter)


@torch.no_grad()
def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds parameters to ``dtype``, so that a strategy that casts them starts from the same values."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.copy_(parameter.to(dtype))


def _make_initialiser(model: nn.Module) -> Callable[[nn.Module], object]:
    from_model = getattr(model, "_init_weights", None)

    @torch.no_grad()
    def init(module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        try:
            if callable(from_model):
                from_model(module)
            elif callable(reset):
                reset()
        except Exception:
            pass  # any initialisation will do: the probe compares two runs from the same values
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and bool(torch.isnan(parameter).any()):
                parameter.normal_(std=_CONSTANT_NOISE)

    return init


@torch.no_grad()
def _perturb_constant(name: str, parameter: nn.Parameter) -> None:
    if parameter.numel() < 2 or not parameter.is_floating_point() or not parameter.requires_grad:
        return
    if bool(parameter.amin() != parameter.amax()):  # not a constant
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same on all ranks
    noise = torch.randn(parameter.shape, generator=generator) * _CONSTANT_NOISE
    parameter.add_(noise.to(parameter))


T = TypeVar("T")

_NUM_STEPS: Final = 2  # the second step shows momentum
_SEED: Final = 20
_MEMORY_SHARE: Final = 0.5  # share of memory for the reference


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The small job, and the reference that the strategy is compared with.

    Attributes:
        inputs: the user's objects with the small model, and SGD as optimizer.
        resolved, batches: the strategy, and ``[step][part]``.
        reference: the run of one process in full precision; on rank 0 only.
        noise: deviation of one process in bfloat16 from it; on rank 0 only, ``None`` in full precision.
        learning_rate, training: settings of the reference.
        num_micro_batches: parts that the reference splits a rank's batch into.
        shallow: whether the model has few of its blocks.
        closed_over: parameters of the user's own model that code of a copy reads in a forward pass.
    """

    inputs: Inputs
    resolved: Resolved
    batches: list[list[Any]]
    reference: Reference | None
    noise: Deviation | None
    learning_rate: float
    training: bool
    num_micro_batches: int
    shallow: bool
    closed_over: tuple[str, ...]


class _ClosedOver(TorchFunctionMode):
    """Notes which parameters of a model a copy's forward pass reads, by hooks and closures."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters: dict[str, None] = {}

    def watch(self, model: nn.Module) -> None:

        def begin(*_: Any) -> None:
            self.__enter__()  # type: ignore[no-untyped-call]

        def end(*_: Any) -> None:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end, always_call=True)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        read = tensors_of((args, dict(kwargs or {})))
        self.parameters |= {self._names[id(tensor)]: None for tensor in read if id(tensor) in self._names}
        return func(*args, **(kwargs or {}))


def prepare(
    inputs: Inputs, cluster: Cluster, strategy: Strategy, registry: Registry, *, shallow: bool, rows: int
) -> Prepared:
    """Builds the small model, and trains it on rank 0 with ``rows`` samples per micro-batch. Collective.

    Raises:
        Exception: on every rank, for any reason that prevents a comparison.
    """

    def agree(action: Callable[[], T]) -> T:
        return cluster.agree(action, what="preparing the numerics probe")

    small = agree(lambda: _small_inputs(inputs, cluster, shallow=shallow))
    resolved = agree(lambda: resolve(strategy, cluster, registry, profile=Profile.of(small.model)))
    num_micro_batches = max(resolved.plan.num_micro_batches, small.gradient_accumulation_steps)
    closures = _ClosedOver(inputs.model)
    dtype = getattr(torch, resolved.plan.precision.parameter_dtype)
    round_to(small.model, dtype)

    def make_again() -> Inputs:
        again = _small_inputs(inputs, cluster, shallow=shallow)
        round_to(again.model, dtype)
        return again

    train = partial(_train_reference, small, make_again, cluster, resolved, rows=rows, closures=closures)
    small, batches, reference, noise = agree(lambda: train(num_micro_batches=num_micro_batches))
    names = tuple(closures.parameters)
    on_first = None if reference is None else (batches, reference.learning_rate, reference.training, names)
    batches, learning_rate, training, names = cluster.from_first(on_first)
    return Prepared(
        inputs=small,
        resolved=resolved,
        batches=batches,
        reference=reference,
        noise=noise,
        learning_rate=learning_rate,
        training=training,
        num_micro_batches=num_micro_batches,
        shallow=shallow,
        closed_over=names,
    )


def reference_in(num_micro_batches: int, setup: Prepared, inputs: Inputs, cluster: Cluster) -> Reference:
    """The reference again, with the number of micro-batches that a method has decided on while applied.

    A mean over tokens of which some do not count is another one for other micro-batches.
    """
    small, parts, device = _rebuild_inputs(setup, inputs, cluster)
    like = setup.reference
    return run_reference(small.model, small, setup.batches, parts, num_micro_batches, device, like=like)


def parts_reason(setup: Prepared, inputs: Inputs, cluster: Cluster) -> tuple[str | None, tuple[str, ...]]:
    """Why the parts' mean loss is not the batch's, else ``None``; and why that is unknown. On rank 0."""
    small, parts, device = _rebuild_inputs(setup, inputs, cluster)
    number, like = setup.num_micro_batches, setup.reference
    assert like is not None
    batch = setup.batches[0]
    whole, notes = run_whole(
        copy.deepcopy(small.model), small, batch, parts, num_micro_batches=number, device=device, like=like
    )
    if whole is None:
        return None, notes
    parts_run = run_reference(small.model, small, [batch], parts, number, device, like=like)
    return judge_parts(parts_run, whole, setup.noise, small.loss_reduction), ()


def _rebuild_inputs(
    setup: Prepared, inputs: Inputs, cluster: Cluster
) -> tuple[Inputs, tuple[int, ...], torch.device]:
    """The inputs of a small job with its first values, the part of each data rank, and the device."""
    small = _small_inputs(inputs, cluster, shallow=setup.shallow)
    plan = setup.resolved.plan
    round_to(small.model, getattr(torch, plan.precision.parameter_dtype))
    return small, part_of_ranks(plan.num_data_ranks), torch.device(cluster.device)


def _small_inputs(inputs: Inputs, cluster: Cluster, *, shallow: bool) -> Inputs:
    if inputs.loss_func is None or (inputs.dataset is None and inputs.sample_batch is None):
        raise InputError("it needs loss_func, and dataset or sample_batch.")
    model, originals = structure_of(inputs.model, shallow=shallow)
    _require_memory(model, cluster)
    fill(model, originals, torch.device(cluster.device), seed=_SEED)
    return replace(inputs, model=model, optim_func=torch.optim.SGD, optim_param_func=bare_groups(inputs))


def _require_memory(model: nn.Module, cluster: Cluster) -> None:
    # Weights, gradients and momentum; with what operators need, 3.1 to 3.7 times the weights (measured).
    num_bytes = 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    limits = (
        int(_MEMORY_SHARE * cluster.rank_memory_bytes) or None,
        room_bytes(torch.device(cluster.device)),
    )
    limit = min((each for each in limits if each is not None), default=num_bytes)
    if num_bytes > limit:
        raise InputError(
            f"comparing two blocks of each kind and the code around them takes {bytes_text(num_bytes)}, but a rank "
            f"may use only {bytes_text(limit)} for it."
        )


def _train_reference(
    small: Inputs,
    make_again: Callable[[], Inputs],
    cluster: Cluster,
    resolved: Resolved,
    *,
    num_micro_batches: int,
    rows: int,
    closures: _ClosedOver,
) -> tuple[Inputs, list[list[Any]], Reference | None, Deviation | None]:
    """Inputs, batches, reference and noise of :class:`Prepared`; the inputs alone on ranks but the first."""
    if cluster.rank != 0:
        return small, [], None, None
    parts = part_of_ranks(resolved.plan.num_data_ranks)
    stages = resolved.plan.size("pipeline")  # which wait for samples if there are fewer
    # Experts are balanced by a mean over all ranks, which one process finds where their samples are equal.
    alike = resolved.plan.size("expert") > 1
    rows = num_micro_batches * stages * max(rows, 1 + alike)
    batches = draw_batches(small, 1 + max(parts), rows, alike=alike)
    if cluster.distributed:
        pickle.dumps(batches)  # rank 0 must fail here, not where the others wait for it
    device = torch.device(cluster.device)
    # A run uses the model up. The next run builds a new one, so that no second copy is held.
    fresh = small

    def run(**options: Any) -> Reference:
        def initial() -> Mapping[str, torch.Tensor]:
            nonlocal fresh
            fresh = make_again()
            return dict(fresh.model.named_parameters())

        closures.watch(fresh.model)
        args = (fresh.model, fresh, batches, parts, num_micro_batches, device)
        return run_reference(*args, initial=initial, **options)

    with RoundsTo16Bits() as rounds:
        reference = run()
    if not is_reduced(resolved):
        return fresh, batches, reference, NO_DEVIATION if rounds.has_rounded else None
    bf16_run = run(compute_dtype=torch.bfloat16, like=reference)
    return fresh, batches, reference, measure(reference, bf16_run.final, bf16_run.losses)


def is_reduced(resolved: Resolved) -> bool:
    """Whether anything is computed, held or sent in less than float32."""
    precision, sharding = resolved.plan.precision, resolved.plan.sharding
    dtypes = {precision.parameter_dtype, precision.compute_dtype}
    dtypes |= {sharding.gather_dtype, sharding.reduce_dtype}
    return not dtypes <= {None, "float32"}


def draw_batches(
    inputs: Inputs, num_parts: int, num_rows: int, *, num_steps: int = _NUM_STEPS, alike: bool = False
) -> list[list[Any]]:
    """``[step][part]``: batches of the dataset's first samples, cycled if few, or of ``sample_batch`` alone.

    Args:
        inputs: the user's objects, with dataset and collation.
        num_parts: number of batches in a step, each for one rank.
        num_rows, num_steps: samples of each of them, and number of steps.
        alike: whether the parts of a step have the same samples, in another order within pairs.

    Raises:
        InputError: if there are no samples, or training would lose them.
    """
    if inputs.dataset is None:
        return [[inputs.sample_batch] * num_parts] * num_steps
    args = dict(inputs.dataloader_args or {})
    is_batch = "batch_size" in args and args["batch_size"] is None
    rows = 1 if is_batch else num_rows  # each item is a batch
    num_samples = num_steps * rows * (1 if alike else num_parts)
    first_samples = list(itertools.islice(read_samples(inputs.dataset) or (), num_samples))
    if not first_samples:
        raise InputError("the dataset is empty, or can be iterated over only once.")
    samples = itertools.cycle(first_samples)
    collate = (lambda rows: rows[0]) if is_batch else (args.get("collate_fn") or default_collate)

    def parts() -> Iterator[Any]:
        part_samples: list[Any] = []
        for part in range(num_parts):
            if not (alike and part_samples):
                part_samples = list(itertools.islice(samples, rows))
            pairs = (part_samples[start : start + 2] for start in range(0, rows, 2))
            ordered_pairs = (reversed(pair) if alike and part % 2 else pair for pair in pairs)
            yield collate(list(itertools.chain.from_iterable(ordered_pairs)))

    return [list(parts()) for _ in range(num_steps)]
