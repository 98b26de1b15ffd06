"""Memory while a model that was built on the meta device is given values and sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns import auto_accelerate
from atorch_ns.capture.blocks import repeated_blocks
from benchmarks._bytes import allocated, resident
from benchmarks._llama import LARGE, SMALL, TINY, Llama
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings

__all__ = ["ALLOWANCE", "Sizes", "peak_allocated", "peak_resident", "run", "sizes_of"]

_MIB = 2**20
ALLOWANCE = 1.10
"""Over shard and largest unit. A thread of gloo may hold the tensor it sent last a moment longer; and resident
memory is also Python's and the system's."""

_TEXT = """
The most memory that a rank takes during `auto_accelerate` for a model built on the meta device, which is materialised
and sharded unit by unit. A *unit* is a repeated block, or what no block holds (embeddings, last norm and head,
together *the rest*). *bound*: the rank's shard of the whole model and the largest unit.

- *tensors*: the storages of all tensors made meanwhile, temporaries of operators among them, until each is freed.
- *resident*: how far the process's resident memory rose (Linux `VmHWM`).
- *holds*: at up to {allowance} of the bound. A thread of gloo can hold the tensor it sent last for a moment longer.
"""

_COLUMNS = (
    Column(title="model", key="model"),
    Column(title="strategy", key="name"),
    Column(title="ranks", key="num_ranks"),
    Column(title="whole MiB", key="whole_mib", digits=1),
    Column(title="shard MiB", key="shard_mib", digits=1),
    Column(title="block MiB", key="block_mib", digits=1),
    Column(title="rest MiB", key="rest_mib", digits=1),
    Column(title="bound MiB", key="bound_mib", digits=1),
    Column(title="measured by", key="by"),
    Column(title="peak MiB", key="peak_mib", digits=1),
    Column(title="peak / bound", key="ratio", digits=3),
    Column(title="holds", key="holds"),
)

_STRATEGIES: tuple[tuple[str, Sequence[Any]], ...] = (
    ("fsdp", ["fsdp"]),
    ("zero2", ["zero2"]),
    ("fsdp, checkpoint, bf16", ["fsdp", "checkpoint", ("amp_native", "bf16")]),
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a model's parameters and buffers: all, the largest repeated block, what no block holds."""

    whole: int
    block: int
    rest: int

    def bound(self, num_ranks: int) -> float:
        """A shard of everything and the largest unit."""
        return self.whole / num_ranks + max(self.block, self.rest)


def sizes_of(model: torch.nn.Module) -> Sizes:
    """Of a model on any device, meta too."""
    blocks = [_num_bytes(block.module) for block in repeated_blocks(model)]
    whole = _num_bytes(model)
    return Sizes(whole=whole, block=max(blocks, default=0), rest=whole - sum(blocks))


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every strategy by the tensors, and fsdp on a large model by resident memory too.

    Args:
        quick: with a tiny model.
        report: told what is being done.
    """
    small, large = (TINY, SMALL) if quick else (SMALL, LARGE)
    plan = [
        *((small, name, strategy, n, "tensors") for name, strategy in _STRATEGIES for n in (2, 4)),
        *((large, *_STRATEGIES[0], n, by) for n in (2, 4) for by in ("tensors", "resident")),
    ]
    rows = []
    for model, name, strategy, num_ranks, by in plan:
        report(f"materialise: {name} on {num_ranks} ranks, {by}")
        peak = max(on_ranks(_MEASURES[by], num_ranks, model, strategy))
        rows.append(_row(model, name, num_ranks, by, peak))
    return Findings(
        name="materialise",
        title="Memory while a meta model is materialised",
        text=_TEXT.format(allowance=ALLOWANCE),
        columns=_COLUMNS,
        rows=rows,
        settings={"small model": small.describe(), "large model": large.describe()},
    )


def peak_allocated(model: Llama, strategy: Sequence[Any]) -> int:
    """On one rank, in bytes, by the tensors."""
    plain = model.build("meta")
    return allocated(lambda: _accelerate(plain, strategy))[1].peak


def peak_resident(model: Llama, strategy: Sequence[Any]) -> int:
    """On one rank, in bytes, by the operating system."""
    _accelerate(TINY.build("meta"), strategy)  # imports and connections are not the model's
    plain = model.build("meta")
    dist.barrier()
    return resident(lambda: _accelerate(plain, strategy))[1]


_MEASURES = {"tensors": peak_allocated, "resident": peak_resident}


def _accelerate(model: torch.nn.Module, strategy: Sequence[Any]) -> object:
    return auto_accelerate(model, torch.optim.AdamW, load_strategy=list(strategy))


def _row(model: Llama, name: str, num_ranks: int, by: str, peak: int) -> dict[str, Any]:
    sizes = sizes_of(model.build("meta"))
    bound = sizes.bound(num_ranks)
    return {
        "model": f"{model.num_parameters / 1e6:.1f} M",
        "name": name,
        "num_ranks": num_ranks,
        "whole_mib": sizes.whole / _MIB,
        "shard_mib": sizes.whole / num_ranks / _MIB,
        "block_mib": sizes.block / _MIB,
        "rest_mib": sizes.rest / _MIB,
        "bound_mib": bound / _MIB,
        "by": by,
        "peak_mib": peak / _MIB,
        "peak_bytes": peak,
        "ratio": peak / bound,
        "holds": peak <= bound * ALLOWANCE,
    }


def _num_bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
