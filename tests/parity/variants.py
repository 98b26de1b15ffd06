"""The variants of every method that the parity tests combine, and the references they are held to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from atorch_ns.method import Chosen, Registry, clash
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import BF16_GLOBAL_BATCH, Trajectory, reference_run

CASES = ("mlp", "tied_llama", "hf_llama", "hf_gpt2")


class Variant(NamedTuple):
    """One way to use a method, and the precision it computes in."""

    name: str
    config: Any = None
    precision: str = "float32"

    @property
    def label(self) -> str:
        return self.name if self.config is None else f"{self.name}:{self.config}"


VARIANTS = (
    Variant("parallel_mode"),
    Variant("ddp"),
    Variant("module_replace"),
    Variant("checkpoint"),
    Variant("zero1"),
    Variant("zero2"),
    Variant("fsdp"),
    Variant("amp_native", "bf16", "amp bfloat16"),
    Variant("amp_native", "fp16", "amp float16"),
    Variant("half", "bf16", "half bfloat16"),
    Variant("half", "fp16", "half float16"),
    Variant("compile", "aot_eager"),
    Variant("gradient_accumulation", 2),
)

# The other backends, each alone and with everything above that it may stand with.
BACKENDS = (
    Variant("zero1", {"backend": "fairscale"}),
    Variant("zero2", {"not_use_fsdp": True}),
    Variant("zero1", {"use_ds_zero": True}),
    Variant("zero2", {"use_ds_zero": True}),
)

TRIPLES = (
    (Variant("fsdp"), Variant("checkpoint"), Variant("amp_native", "bf16", "amp bfloat16")),
    (Variant("zero1"), Variant("checkpoint"), Variant("amp_native", "fp16", "amp float16")),
    (Variant("zero2"), Variant("module_replace"), Variant("half", "fp16", "half float16")),
    (Variant("fsdp"), Variant("checkpoint"), Variant("compile", "aot_eager")),
    (Variant("zero1"), Variant("checkpoint"), Variant("module_replace")),
)

# (largest error of a parameter in units of its update, largest error of a loss). In reduced precision two
# runs that differ in the last bit round apart: the parameters can only show that no gradient was lost, which
# would be an error of 1, and the losses that the runs stay together.
TOLERANCES = {
    "float32": (2e-4, 1e-5),
    "amp bfloat16": (0.15, 1e-3),
    "amp float16": (0.15, 1e-3),
    "half bfloat16": (0.5, 1e-3),
    "half float16": (0.15, 1e-3),
}


def global_batch(precision: str) -> int:
    """Samples a step; many in reduced precision, for a mean that does not hang on one rounding."""
    return 8 if precision == "float32" else BF16_GLOBAL_BATCH


# Of the pairs, every n-th is checked on a model whenever the tests run.
_EVERY = {"mlp": 1, "tied_llama": 4, "hf_llama": 8, "hf_gpt2": 8}


def in_sample(case_name: str, position: int, variants: tuple[Variant, ...]) -> bool:
    """Whether a combination, at its position among those of its first variant, is in a model's sample of the matrix.

    Every variant alone is in every sample, every pair in that of ``mlp``.
    """
    return len(variants) == 1 or position % _EVERY[case_name] == 0


def comparable(variants: tuple[Variant, ...]) -> bool:
    """Whether one pass over the batch is a measure for them.

    With bf16 weights and no masters, gradients are summed in bf16: two passes round otherwise than one, and a
    weight near 1 moves by whole steps of 1/128 in five steps. Accumulation with fp16 and its masters, with
    autocast and in fp32 is compared.
    """
    labels = {variant.label for variant in variants}
    return not {"half:bf16", "gradient_accumulation:2"} <= labels


def legal(registry: Registry, variants: tuple[Variant, ...]) -> bool:
    """Whether the methods' own declarations allow them together."""
    chosen = []
    for variant in variants:
        method = registry.get(variant.name)
        chosen.append(Chosen(method, method.Config.model_validate(variant.config)))
    return all(
        one.method is not other.method and clash(one, other) is None
        for position, one in enumerate(chosen)
        for other in chosen[position + 1 :]
    )


def pairs_from(registry: Registry, first: Variant) -> Iterator[tuple[Variant, ...]]:
    """``first`` alone, and with every later variant that it may stand with."""
    yield (first,)
    for second in VARIANTS[VARIANTS.index(first) + 1 :]:
        if legal(registry, (first, second)) and comparable((first, second)):
            yield (first, second)


def package_of(variant: Variant) -> str | None:
    """The package that a backend needs, if it is not torch."""
    text = str(variant.config)
    if "use_ds_zero" in text:
        return "deepspeed"
    return "fairscale" if "fairscale" in text or "not_use_fsdp" in text else None


def partners(registry: Registry, backend: Variant) -> Iterator[tuple[Variant, ...]]:
    """``backend`` alone, and with every variant that it may stand with."""
    yield (backend,)
    for other in VARIANTS:
        if legal(registry, (backend, other)):
            yield (backend, other)


def precision_of(variants: tuple[Variant, ...]) -> str:
    """The precision that a combination computes in: at most one of its methods changes it."""
    return next((v.precision for v in variants if v.precision != "float32"), "float32")


@functools.cache
def reference(case_name: str, precision: str) -> Trajectory:
    """Plain torch in one process, in the same precision."""
    case = get_case(case_name)
    batch = global_batch(precision)
    kind, _, dtype_name = precision.partition(" ")
    if kind == "float32":
        return reference_run(case, global_batch=batch)
    dtype: torch.dtype = getattr(torch, dtype_name)
    if kind == "amp":
        return reference_run(case, global_batch=batch, autocast_dtype=dtype)
    if dtype == torch.bfloat16:
        return reference_run(case, global_batch=batch, prepare=lambda model: _cast(model, dtype))
    with_masters = dataclasses.replace(case, build=lambda: _WithMasters(case.build(), dtype))
    run = reference_run(with_masters, global_batch=batch)
    return dataclasses.replace(run, initial=_inner(run.initial), final=_inner(run.final))


def _inner(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("inner."): tensor for name, tensor in tensors.items()}


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    kept = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model.to(dtype)
    for name, buffer in kept.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer)
    model.register_forward_pre_hook(lambda _, args, kwargs: _to((args, kwargs), dtype), with_kwargs=True)
    model.register_forward_hook(lambda _, __, output: _to(output, torch.float32))


def _to(value: Any, dtype: torch.dtype) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


class _WithMasters(nn.Module):
    """fp32 parameters that are cast at every call: half precision with master weights, by autograd alone."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights = {name: parameter.to(self.dtype) for name, parameter in self.inner.named_parameters()}
        args, kwargs = _to((args, kwargs), self.dtype)
        return _to(torch.func.functional_call(self.inner, weights, args, kwargs), torch.float32)
