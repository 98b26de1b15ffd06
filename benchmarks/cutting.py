"""Cutting and dividing a very large model that has no memory yet, for many ranks, on one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.job import Inputs, Job
from atorch_ns.method import ORDER, Phase, load_registry, resolve
from atorch_ns.strategy import Strategy
from benchmarks._llama import Llama
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings
from benchmarks._yardstick import WORDS, in_yardsticks

__all__ = ["TARGET", "run"]

TARGET = 1000
_WORLD = 64
_MESHES = ((("tensor", 8), ("pipeline", 8)), (("tensor", 8), ("pipeline", 2), ("data", 4)))
_RANKS = (0, 63)
_NUM_TOKENS = 2048
_QUICK = Llama(vocab_size=512, width=64, hidden=176, num_layers=8, num_heads=8)
"""As few blocks and heads as the meshes can divide."""
_TEXT = """
A Llama of 70 billion parameters is built on the meta device, cut into stages and divided over the tensor axis, as one
rank of {world} sees it: a fake process group stands for the others, so that nothing is communicated. *seconds*:
processor time, after imports, of one thread. *share*: this rank's parameters over those of the model. The self-test of
the tensor plan needs real ranks and is left out.

- *within*: {target} yardsticks are asked; {yardstick}.
"""
_COLUMNS = (
    Column(title="mesh", key="mesh"),
    Column(title="rank", key="rank"),
    Column(title="build model, s", key="build_s", digits=1),
    Column(title="cut and divide, s", key="seconds", digits=1),
    Column(title="yardsticks", key="yardsticks", digits=0),
    Column(title="parameters, M", key="millions", digits=1),
    Column(title="share", key="share", digits=4),
    Column(title="within", key="holds"),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every mesh on a first and a last rank.

    Args:
        quick: a tiny model, the first rank only.
        report: told what is being done.
    """
    rows = []
    for mesh in _MESHES:
        for rank in _RANKS[: 1 if quick else None]:
            report(f"cutting: {_text(mesh)}, rank {rank}")
            rows += on_ranks(_measure, 1, mesh, rank, quick)
    return Findings(
        name="cutting",
        title="Cutting and dividing a 70B Llama without its weights",
        text=_TEXT.format(world=_WORLD, target=TARGET, yardstick=WORDS),
        columns=_COLUMNS,
        rows=rows,
        settings={"sample": f"1 × {_NUM_TOKENS} tokens"},
    )


def _measure(mesh: tuple[tuple[str, int], ...], rank: int, quick: bool) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=_WORLD)
    begin = time.process_time()
    model = _QUICK.build("meta") if quick else _llama_70b()
    whole = sum(parameter.numel() for parameter in model.parameters())
    built = time.process_time()
    cluster = Cluster(world_size=_WORLD, local_world_size=8, distributed=True)
    resolved = resolve(Strategy(_strategy(mesh)), cluster, load_registry())
    job = Job.start(_inputs(model), cluster, resolved.plan, seed=0)
    last = ORDER.index(Phase.SHARD_LAYERS)
    # Nobody sends what the first rank decides: every rank keeps its own decision, which is the same.
    with mock.patch.object(Cluster, "from_first", lambda _, value: value):
        for chosen in resolved.chosen:
            if ORDER.index(chosen.method.phase) <= last:
                chosen.method.apply(job, chosen.config)
    seconds = time.process_time() - built
    mine = sum(_local(parameter).numel() for parameter in job.module.parameters())
    return {
        "mesh": _text(mesh),
        "rank": rank,
        "build_s": built - begin,
        "seconds": seconds,
        "yardsticks": in_yardsticks(seconds),
        "millions": mine / 1e6,
        "share": mine / whole,
        "holds": in_yardsticks(seconds) <= TARGET,
    }


def _strategy(mesh: tuple[tuple[str, int], ...]) -> list[Any]:
    return [
        ("parallel_mode", (list(mesh), None)),
        ("tensor_parallel", {"self_test": False}),
        ("pipeline_parallel", {"num_micro_batches": 16}),
    ]


def _inputs(model: nn.Module) -> Inputs:
    tokens = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64)
    return Inputs(
        model=model,
        optim_func=torch.optim.AdamW,
        dataset=[{"input_ids": row} for row in tokens.expand(64, -1)],
        dataloader_args={"batch_size": 64},
        loss_func=lambda batch, output: output.logits.float().mean(),
        model_input_format="unpack_dict",
    )


def _llama_70b() -> nn.Module:
    """Sizes of Llama 3 70B (Grattafiori et al., The Llama 3 Herd of Models, table 3)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config).train()
    return model


def _local(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _text(mesh: tuple[tuple[str, int], ...]) -> str:
    return " × ".join(f"{name}={size}" for name, size in mesh)
