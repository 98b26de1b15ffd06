"""Planning: from a large model to ranked strategies, without the machines it is for.

Legend: B samples in a step, T tokens in a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.estimate import Workload, price
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Profile, profile_model
from atorch_ns.search import SearchSettings, explore
from atorch_ns.search.space.space import Space
from atorch_ns.sharding import find_dims
from atorch_ns.strategy import Plan, Strategy
from benchmarks._bytes import resident
from benchmarks._llama import next_token_loss
from benchmarks._plan_tables import product
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings
from benchmarks._yardstick import WORDS, in_yardsticks

__all__ = ["run"]

T = TypeVar("T")

_TEXT = """
From a model built on the meta device to ranked strategies, in one process on one core, imports left out. *CPU s* is
processor time of all threads, the smallest of the runs: what planning needs, whatever else the machine does. *MiB* is
how far the process's resident memory rose above what it was with everything imported and the model built, in a run of its
own: there the allocator gives back at once what is freed, which takes time that users do not spend.

*profile* traces one training step on fake tensors (B=8, T=4096, all precisions); *candidates* prices everything the
built-in methods span on the cluster and writes out the best; *both* is what a user waits for. *price* prices a table of
plans that differ in kind, mesh and micro-batches; *in one* is how many plans that is in a yardstick. Seconds do not
travel: {yardstick}. The bars: both together
within {bar:.0f} yardsticks and 512 MiB for 8 B, the same at any depth; twice as many for 1,024 devices; {plans} plans in one. *The
first time* counts what torch imports and caches when it first sees fake tensors; no bar is set for it.
"""

_COLUMNS = (
    Column(title="what", key="what"),
    Column(title="cluster", key="cluster"),
    Column(title="CPU s", key="cpu_s"),
    Column(title="yardsticks", key="yardsticks", digits=1),
    Column(title="MiB", key="mib", digits=0),
    Column(title="plans", key="plans"),
    Column(title="in one", key="per_yardstick"),
    Column(title="within the bar", key="within"),
)

_NODE = "8xH100-80GB"
_LARGE = "8xH100-80GB, 128 nodes, ib400"
_NUM_TOKENS = 4096
_BAR, _BAR_MIB, _BAR_PLANS = 63.0, 512.0, 6_000
"""Yardsticks of planning on 8 devices: nine tenths of what it took when the bar was set; MiB; plans priced in a yardstick."""
_KINDS: tuple[list[Any], ...] = (
    [],
    ["ddp", "checkpoint"],
    ["zero1", ("amp_native", "bf16")],
    ["zero2", ("amp_native", "bf16"), ("checkpoint", {"every_n": 2})],
    ["fsdp"],
    ["fsdp", ("amp_native", "bf16"), "checkpoint"],
    ["fsdp", ("half", {"dtype": "bf16", "master_weights": True})],
    ["fsdp", ("amp_native", "bf16"), "checkpoint", "compile"],
)


@dataclass(frozen=True, kw_only=True)
class _Size:
    """A Llama 3: width, feed-forward width, blocks and heads."""

    name: str
    width: int
    hidden: int
    num_layers: int
    num_heads: int

    def build(self) -> nn.Module:
        """The model on the meta device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
        with torch.device("meta"):
            model: nn.Module = LlamaForCausalLM(config).train()
        return model


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """Processor seconds or bytes: a run is metered for one of them."""

    cpu_s: float = 0.0
    num_bytes: int | None = None

    def followed_by(self, other: _Cost) -> _Cost:
        """Of both, one after the other."""
        return _Cost(cpu_s=self.cpu_s + other.cpu_s, num_bytes=max(self.num_bytes or 0, other.num_bytes or 0))


Meter = Callable[[Callable[[], Any]], tuple[Any, _Cost]]

_8B = _Size(name="Llama-3 8B", width=4096, hidden=14336, num_layers=32, num_heads=32)
_DEEP = _Size(name="Llama-3 8B, 126 blocks", width=4096, hidden=14336, num_layers=126, num_heads=32)
_70B = _Size(name="Llama-3 70B", width=8192, hidden=28672, num_layers=80, num_heads=64)
_SMALL = _Size(name="Llama-3 width 512", width=512, hidden=1792, num_layers=8, num_heads=8)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every size, and the speed of pricing.

    Args:
        quick: a small model and one run.
        report: told what is being done.
    """
    sizes = (_SMALL,) if quick else (_8B, _DEEP, _70B)
    rounds = 1 if quick else 3
    rows: list[Mapping[str, Any]] = []
    for size in sizes:
        report(f"planning: {size.name}, {rounds} run(s)")
        for measured in (_warm, _cold):
            timed = [on_ranks(measured, 1, size, _timed)[0] for _ in range(rounds)]
            held = on_ranks(measured, 1, size, _held)[0]
            rows += [_merged([one[place] for one in timed], row) for place, row in enumerate(held)]
    report("planning: the speed of pricing")
    rows += on_ranks(_pricing, 1, sizes[0], 10_000 if quick else 400_000)[0]
    return Findings(
        name="planning",
        title="Planning",
        text=_TEXT.format(yardstick=WORDS, bar=_BAR, plans=f"{_BAR_PLANS:,}"),
        columns=_COLUMNS,
        rows=rows,
        settings={"tokens": _NUM_TOKENS, "runs": rounds, "kinds of plans priced": len(_KINDS)},
    )


def _warm(size: _Size, meter: Meter) -> list[Mapping[str, Any]]:
    """In a fresh process: profile and candidates, each with its own cost."""
    model = size.build()
    registry = load_registry()
    _warm_imports()
    profile, traced = meter(lambda: _profile(model))
    rows = [_row(f"{size.name}: profile", "", traced)]
    for text, bar, nodes in ((_NODE, _BAR, 1), (_LARGE, 2 * _BAR, 128)):
        cluster = cluster_from_spec(text)

        def search(cluster: Cluster = cluster, nodes: int = nodes) -> Space:
            workload = Workload(global_batch=64 * nodes, num_tokens=_NUM_TOKENS)
            return explore(profile, cluster, workload, registry, settings=SearchSettings())

        space, searched = meter(search)
        rows.append(_row(f"{size.name}: candidates", text, searched, space.num_priced))
        both = traced.followed_by(searched)
        rows.append(_row(f"{size.name}: both", text, both, space.num_priced, bar=bar))
    return rows


def _cold(size: _Size, meter: Meter) -> list[Mapping[str, Any]]:
    """The same for one node in a process that has never planned: what torch imports and caches is counted."""
    model, registry, cluster = size.build(), load_registry(), cluster_from_spec(_NODE)

    def plan() -> Space:
        workload = Workload(global_batch=64, num_tokens=_NUM_TOKENS)
        return explore(_profile(model), cluster, workload, registry, settings=SearchSettings())

    space, cost = meter(plan)
    return [_row(f"{size.name}: both, the first time", _NODE, cost, space.num_priced)]


def _warm_imports() -> None:
    """What planning imports is imported by planning a toy, so that only its work is measured."""
    toy = _Size(name="toy", width=64, hidden=128, num_layers=2, num_heads=8)
    profile = _profile(toy.build(), batch_size=2, num_tokens=16)
    for text in (_NODE, _LARGE):
        workload = Workload(global_batch=8192, num_tokens=16)
        explore(profile, cluster_from_spec(text), workload, load_registry(), settings=SearchSettings())


def _profile(model: nn.Module, batch_size: int = 8, num_tokens: int = _NUM_TOKENS) -> Profile:
    batch = {"input_ids": torch.zeros(batch_size, num_tokens, dtype=torch.long)}

    def forward_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return next_token_loss(batch, model(**batch))

    return profile_model(model, batch, forward_loss, find_dims, make_optimizer=torch.optim.AdamW)


def _pricing(size: _Size, num_plans: int) -> list[Mapping[str, Any]]:
    """How fast a large table is priced, for one node and for many."""
    profile = _profile(size.build())
    registry = load_registry()
    rows: list[Mapping[str, Any]] = []
    for text in (_NODE, _LARGE):
        cluster = cluster_from_spec(text)
        templates = [_plan(steps, cluster, profile, registry) for steps in _KINDS]
        world = cluster.world_size
        meshes = [(world // zero, zero) for zero in range(1, world + 1) if world % zero == 0]
        repeats = -(-num_plans // (len(templates) * len(meshes)))
        table = product(templates, meshes, [1 + index % 8 for index in range(repeats)])
        workload = Workload(global_batch=8 * 7 * 5 * 3 * world, num_tokens=_NUM_TOKENS)
        price(table, profile, cluster, workload)  # the first call imports and reads
        best = min(
            _clocked(lambda t=table, c=cluster, w=workload: price(t, profile, c, w))[1]  # type: ignore[misc]
            for _ in range(3)
        )
        rows.append(
            {
                **_row(f"{size.name}: price", text, _Cost(cpu_s=best), len(table)),
                "per_yardstick": round(len(table) / in_yardsticks(best)),
                "within": len(table) / in_yardsticks(best) >= _BAR_PLANS,
            }
        )
    return rows


def _plan(steps: Any, cluster: Cluster, profile: Profile, registry: Any) -> Plan:
    return resolve(Strategy.load(steps), cluster, registry, profile=profile).plan


def _clocked(function: Callable[[], T]) -> tuple[T, float]:
    begin = time.process_time()
    value = function()
    return value, time.process_time() - begin


def _timed(function: Callable[[], Any]) -> tuple[Any, _Cost]:
    value, cpu_s = _clocked(function)
    return value, _Cost(cpu_s=cpu_s)


def _held(function: Callable[[], Any]) -> tuple[Any, _Cost]:
    value, num_bytes = resident(function)
    return value, _Cost(num_bytes=num_bytes)


def _row(
    what: str, cluster: str, cost: _Cost, plans: int | None = None, *, bar: float | None = None
) -> Mapping[str, Any]:
    return {
        "what": what,
        "cluster": cluster,
        "cpu_s": cost.cpu_s,
        "yardsticks": in_yardsticks(cost.cpu_s),
        "mib": None if cost.num_bytes is None else cost.num_bytes / 2**20,
        "plans": plans,
        "bar": bar,
        "within": None,
    }


def _merged(timed: list[Mapping[str, Any]], held: Mapping[str, Any]) -> Mapping[str, Any]:
    """The run that took least, with the memory of another."""
    fastest, mib, bar = min(timed, key=lambda row: float(row["cpu_s"])), held["mib"], held["bar"]
    within = None if bar is None else fastest["yardsticks"] <= bar and mib <= _BAR_MIB
    return {**fastest, "mib": mib, "within": within}
