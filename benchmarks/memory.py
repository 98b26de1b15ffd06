"""Memory: what each rank keeps of a model in training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from atorch_ns import auto_accelerate
from atorch_ns.cluster import Cluster
from benchmarks._bytes import StateBytes, state_bytes
from benchmarks._llama import SMALL, TINY, Llama, next_token_loss, random_batch
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings

__all__ = ["ALLOWANCE", "CASES", "Case", "kept_after_a_step", "run"]

ALLOWANCE = 1.05
"""How much more than its part of the whole a rank may keep."""

_MIB = 2**20
_TEXT = """
Bytes of parameters, gradients and AdamW's states that a rank keeps after a training step, measured from the storages
of the live tensors; the rank that keeps most. *share*: what the method shards of them, over the same tensors of one
process divided by the number of ranks. It holds at up to {allowance}.
"""

_COLUMNS = (
    Column(title="strategy", key="name"),
    Column(title="ranks", key="num_ranks"),
    Column(title="parameters MiB", key="parameters_mib", digits=2),
    Column(title="gradients MiB", key="gradients_mib", digits=2),
    Column(title="optimizer MiB", key="optimizer_mib", digits=2),
    Column(title="shards", key="shards"),
    Column(title="share", key="share", digits=4),
    Column(title="holds", key="holds"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy and what it shards.

    Attributes:
        name: in tables.
        strategy: as ``load_strategy``.
        shards: fields of :class:`StateBytes`.
        needs: a package, if one is needed.
    """

    name: str
    strategy: Sequence[Any]
    shards: tuple[str, ...]
    needs: str | None = None


_ALL = ("parameters", "gradients", "optimizer")
CASES: tuple[Case, ...] = (
    Case(name="ddp", strategy=["ddp"], shards=()),
    Case(name="zero1", strategy=["zero1"], shards=("optimizer",)),
    Case(name="zero2", strategy=["zero2"], shards=("gradients", "optimizer")),
    Case(name="fsdp", strategy=["fsdp"], shards=_ALL),
    Case(
        name="zero1, fairscale",
        strategy=[("zero1", {"backend": "fairscale"})],
        shards=("optimizer",),
        needs="fairscale",
    ),
    Case(
        name="zero2, fairscale",
        strategy=[("zero2", {"not_use_fsdp": True})],
        shards=("gradients", "optimizer"),
        needs="fairscale",
    ),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every case on 2 and 4 ranks.

    Args:
        quick: with a tiny model.
        report: told what is being done.
    """
    model = TINY if quick else SMALL
    torch.optim.AdamW(model.build("meta").parameters())  # imports here, once, what every rank would
    packages = Cluster.detect().packages
    whole = on_ranks(kept_after_a_step, 1, model, [])[0]
    rows = [_row("one process", 1, (), whole, whole)]
    for case in CASES:
        if case.needs is not None and case.needs not in packages:
            report(f"memory: {case.name} left out, {case.needs} is not installed")
            continue
        for num_ranks in (2, 4):
            report(f"memory: {case.name} on {num_ranks} ranks")
            ranks = on_ranks(kept_after_a_step, num_ranks, model, case.strategy)
            fullest = max(ranks, key=functools.partial(_sharded, names=case.shards or _ALL))
            rows.append(_row(case.name, num_ranks, case.shards, fullest, whole))
    return Findings(
        name="memory",
        title="Memory of a model in training",
        text=_TEXT.format(allowance=ALLOWANCE),
        columns=_COLUMNS,
        rows=rows,
        settings={"model": model.describe()},
    )


def kept_after_a_step(model: Llama, strategy: Sequence[Any]) -> StateBytes:
    """On one rank: trains one step and reads what is kept."""
    _, result, _ = auto_accelerate(
        model.build(),
        torch.optim.AdamW,
        loss_func=next_token_loss,
        model_input_format="unpack_dict",
        load_strategy=list(strategy),
    )
    assert result is not None
    assert result.optim is not None
    result.train_step(random_batch(model, 2, 16, seed=0))
    return state_bytes(result.model, result.optim)


def _sharded(kept: StateBytes, names: Sequence[str]) -> int:
    return sum(getattr(kept, name) for name in names)


def _row(
    name: str, num_ranks: int, shards: tuple[str, ...], kept: StateBytes, whole: StateBytes
) -> dict[str, Any]:
    share = _sharded(kept, shards) * num_ranks / _sharded(whole, shards) if shards else None
    return {
        "name": name,
        "num_ranks": num_ranks,
        **{f"{part}_mib": size / _MIB for part, size in asdict(kept).items()},
        **{f"{part}_bytes": size for part, size in asdict(kept).items()},
        "shards": ", ".join(shards) or "nothing",
        "share": share,
        "holds": None if share is None else share <= ALLOWANCE,
    }
