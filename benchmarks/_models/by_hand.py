"""Hand-written models: those of the tests, which nobody prepared for being divided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from atorch_ns.testing import CASES, Case
from benchmarks._models.entry import Entry, case_of, distance_to_waves

__all__ = ["entries"]


def entries() -> Iterator[Entry]:
    """The reference models of the package, and the tests' models for blocks, pipelines and tensor plans."""
    from tests.parity import test_odd_models as odd
    from tests.pipeline import odd_models as staged
    from tests.sharding import tensor_models as attention

    for name in CASES:
        yield _entry(name, partial(_built, name))
    for kind in (
        odd.Containers,
        odd.Unused,
        odd.Sometimes,
        odd.OneParameter,
        odd.Frozen,
        odd.Convolutions,
        odd.Twice,
    ):
        yield _entry(kind.__name__, partial(_of_features, kind))
    for base in _subclasses(staged.Base):
        if base is not staged.Dropouts:  # functional dropout draws masks
            yield _entry(f"{base.__name__} in stages", partial(_of_tokens, base, staged.VOCAB, 6))
    yield _entry("NestedOutputs in stages", partial(_of_tokens, staged.NestedOutputs, staged.VOCAB, 6))
    heads = (attention.ByCount, attention.FusedParts, attention.FusedByHead, attention.FusedGrouped)
    for kind in (*heads, attention.BySettings, attention.WithNorms, attention.NormOverHeads):
        yield _entry(
            f"{kind.__name__} attention",
            partial(_of_tokens, partial(attention.Decoder, kind), attention.VOCAB, 8),
        )


def _subclasses(base: type[nn.Module]) -> list[type[nn.Module]]:
    return [cls for cls in base.__subclasses__() if cls.__module__ == base.__module__]


def _entry(name: str, make: Callable[[], Case]) -> Entry:
    return Entry(source="by hand", name=name, kind="by hand", make=make)


def _built(name: str) -> Case:
    model = CASES[name].build()
    return dataclasses.replace(CASES[name], build=lambda: model)


def _of_features(kind: Callable[[], nn.Module]) -> Case:
    """``model(x)`` for x [B, 4], mean squared error to y [B, 1]."""

    def make_batch(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch_size, 4, generator=generator), torch.randn(
            batch_size, 1, generator=generator
        )

    return case_of(
        kind(), make_batch, lambda batch, output: nn.functional.mse_loss(output, batch[1]), "first"
    )


def _of_tokens(kind: Callable[[], nn.Module], vocab_size: int, num_tokens: int) -> Case:
    """``model(tokens)``, of whose output the loss is made."""

    def make_batch(batch_size: int, seed: int) -> Tensor:
        return torch.randint(
            vocab_size, (batch_size, num_tokens), generator=torch.Generator().manual_seed(seed)
        )

    return case_of(kind(), make_batch, lambda batch, output: distance_to_waves(output))
