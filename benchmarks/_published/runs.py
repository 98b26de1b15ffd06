"""The rows of both tables, and how each is expressed as model, strategy, cluster and batch."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks._published.architectures import build, words

__all__ = ["Run", "read"]

FILES: Final = tuple(Path(__file__).with_name(name) for name in ("runs.csv", "runs_2026.csv"))
"""Runs up to early 2025, mostly dense; and those of 2025 and 2026: mixtures, fine-tuning, Blackwell."""
_PRECISIONS: Final[Mapping[str, Sequence[Any]]] = {
    "bf16_amp": [("amp_native", "bf16")],
    "bf16_autocast": [("amp_native", "bf16")],
    "bf16_true": [("half", {"dtype": "bf16", "master_weights": False})],
    "bf16_master": [("half", {"dtype": "bf16", "master_weights": True})],
    "fp16_master": [("half", "fp16")],
}
"""Methods by precision; those of fsdp alone stand in ``_GATHERED``."""
_GATHERED: Final = {
    "bf16_mp": ("bfloat16", "float32"),
    "bf16_pure": ("bfloat16", "bfloat16"),
    "bf16_autocast": ("float32", "float32"),
}
"""dtypes that fsdp gathers and reduces in, by precisions that say so."""
_KEPT: Final = {"ops": "every_second_product", "core": "all_but_attention"}
"""Operators whose results are kept, by recomputation."""
_POWER: Final = {"H100-96GB-HBM2e": "500W"}
"""Limits of power, by device."""
_LIBRARY: Final = {"flash1": "FlashAttention-1", "flash2": "FlashAttention-2", "cudnn": "cuDNN"}
"""Libraries of fused attention, as clusters name them: what torch took when the runs were made, or what the source used
in its place (Transformer Engine takes cuDNN's on Hopper and later: NVIDIA/NeMo#9188)."""

_AXES: Final = {"tensor": "tp", "sequence": "cp", "expert": "ep", "data": "dp", "pipeline": "pp"}
"""Columns of the degrees, by axis, the innermost axis first."""


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        cells: the row of the file, column by column.
    """

    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def number(self, column: str) -> int:
        """A column that is a whole number; 1 where the file has no such column."""
        return int(self.cells.get(column) or 1)

    @property
    def missing(self) -> str:
        """Why the run cannot be expressed; empty if it can."""
        return self["missing"]

    @property
    def step_seconds(self) -> float | None:
        """Published seconds of a step; ``None`` where they are not published."""
        if self["step_seconds"]:
            return float(self["step_seconds"])
        rate = self["tokens_per_s_per_gpu"]
        return self.tokens_per_device / float(rate) if rate else None

    @property
    def tokens_per_device(self) -> float:
        """Tokens of a step for each device."""
        return self.number("global_batch") * self.number("seq") / self.number("gpus")

    @property
    def peak_gib(self) -> float | None:
        """Published peak of memory, in GiB; ``None`` where it is not published."""
        return float(self["peak_memory_gib"]) if self["peak_memory_gib"] else None

    @property
    def cluster(self) -> str:
        """The cluster's specification."""
        nodes = self.number("nodes")
        parts = [f"{self.number('gpus') // nodes}x{self['gpu']}", f"{nodes} nodes" if nodes > 1 else ""]
        library = _LIBRARY.get(self["attention"])
        return ", ".join(filter(None, [*parts, self["interconnect"], _POWER.get(self["gpu"]), library]))

    @property
    def architecture(self) -> tuple[str, ...]:
        """What the profile depends on: runs of one share it."""
        columns = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied", "dropout", "seq")
        sizes = (self.cells.get(column) or "" for column in columns)
        return (self["arch"].removeprefix("hf-"), self._attention, words(self.cells), *sizes)

    @property
    def _attention(self) -> str:
        return "sdpa" if self.fuses_attention else "eager"

    @property
    def fuses_attention(self) -> bool:
        """Whether attention is one kernel, whichever library's."""
        return self["attention"] in _LIBRARY or self["attention"] == "sdpa"

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return ":" in self["arch"]

    @property
    def model(self) -> str:
        """The model in words."""
        return words(self.cells)

    def build(self) -> nn.Module:
        """The model, of transformers, on meta."""
        return build(self.cells, attention=self._attention)

    def sample(self) -> dict[str, torch.Tensor]:
        """One sample on meta: tokens [1, T], which are the labels too."""
        tokens = torch.zeros(1, self.number("seq"), dtype=torch.long, device="meta")
        return {"input_ids": tokens, "labels": tokens}

    @property
    def strategy(self) -> list[Any]:
        """The methods, in the form of ``load_strategy``."""
        degrees = {name: self.number(column) for name, column in _AXES.items()}
        degrees["data"] //= degrees["expert"]  # ranks of both axes have samples of their own
        axes = [[name, degree] for name, degree in degrees.items() if degree > 1]
        steps: list[Any] = [("parallel_mode", axes)] if axes else []
        if self.number("tp") > 1:
            sequence, asynchronous = self["sp"] != "0", self["sp"] == "async"
            steps.append(("tensor_parallel", {"sequence": sequence, "asynchronous": asynchronous}))
        if self.number("cp") > 1:
            steps.append(("sequence_parallel", {"kind": "ring"}))
        if degrees["expert"] > 1:
            steps.append("expert_parallel")
        steps += [*self._sharding(), *_PRECISIONS.get(self["precision"], ()), *self._recomputation()]
        if self["kernels"] != "eager":
            steps.append("compile")
        if self["fp8"] != "0":
            config = {"backend": "torchao", "fsdp_all_gather": self["fp8_gather"] == "1"}
            steps.append(("fp8", config | ({"recipe": "rowwise"} if self["fp8"] == "rowwise" else {})))
        return steps + self._micro_batches()

    @property
    def strategy_of_memory(self) -> list[Any]:
        """The strategy that memory is predicted of: Megatron-LM's fused kernels keep for the backward pass what eager code keeps
        (Korthikanti et al. 2022, equation 2: 34sbh + 5as²b bytes a block), which a compiler does not."""
        return [step for step in self.strategy if step != "compile" or not self._keeps_all]

    @property
    def _keeps_all(self) -> bool:
        # Transformer Engine's layers in fp8 keep their inputs in 8 bits instead, which nothing here says.
        return self["kernels"] == "fused" and self["fp8"] == "0"

    def _sharding(self) -> list[Any]:
        gathered = _GATHERED.get(self["precision"])
        if self.num_sharding == 1 and gathered is None:
            return []
        if self["zero"] == "0":
            return ["ddp"]
        if self["zero"] == "1":
            return ["zero2"] if self["precision"].endswith("_master") else ["ddp", "zero1"]
        config: dict[str, Any] = {}
        if "offload=1" in self["notes"]:
            config["cpu_offload"] = True
        if gathered is not None:
            config["mixed_precision"] = dict(zip(("param_dtype", "reduce_dtype"), gathered, strict=True))
        if self.number("replicas") > 1:
            config["sharding_strategy"] = "HYBRID_SHARD"
        return [("zero2" if self["zero"] == "2" else "fsdp", config or None)]

    def _recomputation(self) -> list[Any]:
        kind = self["recompute"]
        if kind == "none":
            return []
        if kind in _KEPT:
            return [("checkpoint", {"save_operators": _KEPT[kind]})]
        return ["checkpoint" if kind == "full" else ("checkpoint", {"every_n": int(kind[len("every") :])})]

    def _micro_batches(self) -> list[Any]:
        number = self.number("micro_batches")
        if self.number("pp") == 1:
            return [("gradient_accumulation", number)] if number > 1 else []
        config: dict[str, Any] = {"schedule": self["schedule"], "num_micro_batches": number}
        if self.number("vpp") > 1:
            config["stages_per_rank"] = self.number("vpp")
        if self["cut"] == "ends-one-less":
            config["split_points"] = self._short_ends()
        return [("pipeline_parallel", config)]

    def _short_ends(self) -> list[str]:
        """Beginnings of the stages but the first, where the first and the last one have a block less."""
        stages, blocks = self.number("pp") * self.number("vpp"), self.number("layers")
        each = (blocks + 2) // stages
        begins = range(each - 1, blocks + 1, each)
        return [f"transformer.h.{begin}" if begin < blocks else "transformer.ln_f" for begin in begins][
            : stages - 1
        ]

    @property
    def num_sharding(self) -> int:
        """Ranks that states may be divided over: those of data, and of context."""
        return self.number("dp") * self.number("cp")

    @property
    def substitutes(self) -> list[str]:
        """What stands for something that no method says, as phrases."""
        return [text for holds, text in self._substitutes() if holds]

    def _substitutes(self) -> Iterator[tuple[bool, str]]:
        with_masters = self["precision"].endswith("_master") and self.num_sharding > 1
        yield self["zero"] == "1" and with_masters, "zero2 for ZeRO 1 with sharded masters"
        fused = self["kernels"] == "fused"
        yield self._keeps_all, "compile for hand-fused kernels, which keep what eager code keeps"
        yield fused and not self._keeps_all, "compile for hand-fused kernels"
        yield fused and self["sp"] == "async", "asynchronous tensor parallelism for user buffers"
        yield self["fp8"] != "0" and fused, "torchao for Transformer Engine"

    @property
    def options(self) -> list[str]:
        """The options that the run uses, by which errors are grouped."""
        recomputed = {
            "none": "no recomputation",
            "full": "full recomputation",
            "core": "selective recomputation",
        }
        named = {
            {"eager": "eager", "compiled": "compiled", "fused": "fused kernels"}[self["kernels"]]: True,
            "fp8": self["fp8"] != "0",
            recomputed.get(self["recompute"], "selective recomputation"): True,
            "states sharded": self["zero"] != "0" and self.num_sharding > 1,
            "tensor parallel": self.number("tp") > 1,
            "asynchronous tensor parallel": self["sp"] == "async",
            "context parallel": self.number("cp") > 1,
            "pipeline": self.number("pp") > 1 and self.number("vpp") == 1,
            "interleaved pipeline": self.number("vpp") > 1,
            "accumulation": self.number("pp") == 1 and self.number("micro_batches") > 1,
            "8192 tokens or more": self.number("seq") >= 8192,
            "plain attention": not self.fuses_attention,
            "mixture": self.is_mixture,
            "adapters": "lora=" in self["notes"],
            "more than 64 devices": self.number("gpus") > 64,
        }
        return [name for name, holds in named.items() if holds]


def read(paths: Sequence[Path] = FILES) -> list[Run]:
    """All runs, in the order of the files."""
    runs: list[Run] = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            runs += [Run(cells) for cells in csv.DictReader(file)]
    return runs
