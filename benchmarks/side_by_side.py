"""Side by side: nnScaler, Merak and AutoParallel, alive, and ours on the same work."""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Shard

from atorch_ns.capture.graph.operator_graph import Operator
from atorch_ns.cluster import Cluster
from atorch_ns.costs.collectives import Groups, collective_seconds
from atorch_ns.operators import (
    OperatorPlan,
    OperatorPrices,
    States,
    assemble,
    capture_shallow,
    legal_rules,
    solved_plan,
)
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.testing import reserve_port
from benchmarks import operator_predictions
from benchmarks._context import date_and_cpu
from benchmarks._llama import SMALL, TINY, Llama, next_token_loss, random_batch
from benchmarks._pairs import Block, Pair, measure, ratios, spread_of
from benchmarks._peers._beside import FOLDER, Beside, ask_all, python_of, rank_variables
from benchmarks._peers._peer import OPTIM_ARGS
from benchmarks._peers._sources import prepare
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings, Spread

__all__ = ["KEPT", "choices_by_key", "run"]

_PAIR: Pair = ("ours", "theirs")
KEPT = Path(__file__).parent.parent / "build" / "benchmarks" / "side_by_side.jsonl"
"""The rows of a run that was stopped: the next one goes on from there."""

_TOKENS, _SAMPLES, _MIB = 128, 8, 2**20
_NUM_LOSSES, _WARM_UP, _APART = 5, 2, 1e-4
_SECONDS = (0.04, 0.08)
"""Of a slowed stage's forward and backward pass for one micro-batch, as in ``schedules``."""

_BAR = 0.05
"""Of AutoParallel's processor time: as much as planning may take."""

_COMMUNICATION = {
    "all gather": "all_gather",
    "all reduce": "all_reduce",
    "reduce scatter": "reduce_scatter",
    "all to all": "all_to_all",
}
"""Collectives, as nnScaler's tables and as ours name them."""

_MATCHED = ("linear", "embedding", "scaled_dot_product_attention")
"""Operators whose division is taken over from nnScaler's plan when it is priced and run here."""

_TEXT = """
nnScaler 0.8 and Merak 2.2.2 run beside our front ends of the same names (`parallelize`, `MerakTrainer`), AutoParallel beside `plan`:
the same program calls both, with the same model, weights, batch, optimizer and number of processes, each side in environments and
processes of its own. nnScaler and Merak are written for CUDA and NCCL; they are adapted to CPUs and gloo, and nnScaler to this torch
(`benchmarks/_peers`), which changes neither what they search nor what they compute. A peer that cannot do a piece of
work has the reason in its row; *measured* says when and on what machine a row was, which need not be this table's. *ratio* is ours over theirs, below 1 where we are better; sides take turns, a b, b a, …

- *planning*: processor seconds of `parallelize(…, "autodist", load_module=False)`, from the module to its code or plan; operator
  profiles of nnScaler are warm, so that nothing is timed but the search and what is made of its plan. Merak searches for nothing:
  its seconds are of tracing a model and cutting it into that many stages, ours of the whole search over all methods.
  AutoParallel (with eager attention: on CPUs it has no prices for fused attention) places every tensor on a mesh of one axis; its seconds
  end before the placements are applied. Ours are of `plan` over all methods for as many H100s; both in processes that have not planned
  before; at most {bar} of its time is asked.
- *plan*: nnScaler's choice on {plan_ranks} ranks for products, attention and embedding, ours for everything, given the same measured
  links: seconds of a step measured with both plans run by `operator_parallel`, and as *priced ratio* those that our cost
  model predicts. The rest is filled in by our solver, to the best of nnScaler's plan.
- *training*: wall seconds of a step (slowest rank), with the processor time of all ranks as *cpu ratio*; the largest
  difference of the first {losses} losses from one process without either (*same*: within {apart:g}); bytes of tensors at the peak of the
  rank that holds most.
- *schedule*: wall seconds of a step on four stages whose passes sleep for {forward:.0f} and {backward:.0f} ms, eight micro-batches, all recomputed.
"""

_COLUMNS = (
    Column(title="part", key="part"),
    Column(title="work", key="work"),
    Column(title="peer", key="peer"),
    Column(title="ratio", key="ratio", confidence=True),
    Column(title="priced ratio", key="priced_ratio"),
    Column(title="pairs", key="pairs"),
    Column(title="cpu ratio", key="cpu_ratio", confidence=True),
    Column(title="s, ours", key="ours_s"),
    Column(title="s, theirs", key="theirs_s"),
    Column(title="same", key="same"),
    Column(title="loss apart, ours", key="apart", digits=6),
    Column(title="loss apart, theirs", key="apart_theirs", digits=6),
    Column(title="peak MiB, ours", key="peak_mib", digits=1),
    Column(title="peak MiB, theirs", key="peak_mib_theirs", digits=1),
    Column(title="does not run, since", key="error"),
    Column(title="measured", key="measured"),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row to measure.

    Attributes:
        part: which part of the page it belongs to.
        work: in words.
        peer: of :data:`~benchmarks._peers._sources.SOURCES`.
        ranks: processes.
        options: what its rank's program is told besides.
        bar: what the ratio may be at most; ``None`` where nothing is asked.
    """

    part: str
    work: str
    peer: str
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    bar: float | None = None


_DEEP = Llama(vocab_size=32000, width=256, hidden=704, num_layers=24)
_8B = Llama(vocab_size=128256, width=4096, hidden=14336, num_layers=32, num_heads=32)


def _works(quick: bool) -> Iterator[Work]:
    model = asdict(TINY if quick else SMALL)
    for devices in (2,) if quick else (2, 4, 8):
        size = asdict(TINY if quick else _DEEP)
        autodist = {"size": size, "policy": "autodist", "degree": devices}
        what = f"Llama of {size['num_layers']} layers, {devices} devices"
        yield Work(part="planning", work=what, peer="nnScaler", ranks=devices, options=autodist)
        yield Work(
            part="planning", work=what, peer="Merak", ranks=devices, options={"size": size, "stages": devices}
        )
    if not quick:
        ranks, small = operator_predictions.RANKS, operator_predictions.MODEL
        options = {"size": asdict(small), "policy": "autodist", "degree": ranks}
        what = f"Llama of {small.num_layers} layers, {ranks} ranks"
        yield Work(part="plan", work=what, peer="nnScaler", ranks=ranks, options=options)
        whole = {"size": asdict(_8B), "policy": "autodist", "degree": 8, "meta": True}
        yield Work(part="planning", work="Llama of 8B, 8 devices", peer="nnScaler", ranks=8, options=whole)
    size = TINY if quick else _8B
    what = f"Llama of {size.num_layers} layers, 8 devices" if quick else "Llama of 8B, 8 devices"
    yield Work(
        part="planning", work=what, peer="AutoParallel", ranks=8, options={"size": asdict(size)}, bar=_BAR
    )
    for policy, degree, ranks in (("dp", 1, 2), ("autodist", 2, 2), ("autodist", 4, 4))[: 1 if quick else 3]:
        options = {"size": model, "policy": policy, "degree": degree}
        yield Work(
            part="training", work=f"{policy}, {ranks} ranks", peer="nnScaler", ranks=ranks, options=options
        )
    for stages, ranks in ((1, 2), (2, 2), (4, 4))[1 if quick else 0 : 2 if quick else 3]:
        options = {"size": model, "stages": stages}
        what = f"1f1b, {stages} stages" if stages > 1 else f"data parallel, {ranks} ranks"
        yield Work(part="training", work=what, peer="Merak", ranks=ranks, options=options)
    for name in ("1f1b", "pre_recompute_1f1b", "last_no_recompute_1f1b", "shifted_critical_path"):
        if not quick:
            slow = {"stages": 4, "schedule": name, "slow": _SECONDS, "recompute": True, "micro_batches": 8}
            yield Work(part="schedule", work=name, peer="Merak", ranks=4, options={"size": model, **slow})


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every piece of work with the peers that can do it.

    Args:
        quick: tiny models, two pairs each, nothing slowed.
        report: told what is being done.
    """
    missing: dict[str, str] = {}
    kept = None if quick else KEPT
    rows: list[dict[str, Any]] = []
    num_kept = 0
    for work in _works(quick):
        row = _kept(kept, work)
        num_kept += row is not None
        if row is None:
            report(f"side_by_side: {work.part}: {work.work}: {work.peer}")
            if work.peer not in missing:
                missing[work.peer] = prepare(work.peer)
            found = {"error": missing[work.peer]} if missing[work.peer] else _row(work, 2 if quick else 8)
            named = {"part": work.part, "work": work.work, "peer": work.peer}
            row = {**named, "bar": work.bar, **found, "measured": date_and_cpu()}
            _keep(kept, row)
        rows.append(row)
    if kept is not None:
        kept.unlink(missing_ok=True)
    return Findings(
        name="side_by_side",
        title="Side by side",
        text=_TEXT.format(
            plan_ranks=operator_predictions.RANKS,
            bar=_BAR,
            losses=_NUM_LOSSES,
            apart=_APART,
            forward=_SECONDS[0] * 1000,
            backward=_SECONDS[1] * 1000,
        ),
        columns=_COLUMNS,
        rows=rows,
        settings={
            "model that is trained": (TINY if quick else SMALL).describe(),
            "batch of all ranks": f"{_SAMPLES} samples of {_TOKENS} tokens",
            "rows of earlier runs, which were stopped": num_kept,
        },
    )


def _kept(file: Path | None, work: Work) -> dict[str, Any] | None:
    """The row as a run that was stopped has left it."""
    if file is None or not file.exists():
        return None
    named = (work.part, work.work, work.peer)
    for line in file.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if (row["part"], row["work"], row["peer"]) == named:
            return {key: Spread(**one) if isinstance(one, dict) else one for key, one in row.items()}
    return None


def _keep(file: Path | None, row: Mapping[str, Any]) -> None:
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    plain = {key: asdict(one) if isinstance(one, Spread) else one for key, one in row.items()}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(plain) + "\n")


def _row(work: Work, rounds: int) -> dict[str, Any]:
    """A row; where a side fails, with the reason."""
    try:
        return _MEASURES[work.part](work, rounds)
    except RuntimeError as error:
        return {"error": str(error)[:200].replace("|", "/")}


@contextmanager
def _sides(
    work: Work, folder: str, which: Sequence[str] = _PAIR, **more: Any
) -> Iterator[dict[str, list[Beside]]]:
    """The processes of both sides, which have imported what they need."""
    python = {"ours": sys.executable, "theirs": python_of(work.peer.lower())}
    module = f"benchmarks._peers._{work.peer.lower()}_rank"
    job = {
        "do": "train",
        "samples": _SAMPLES,
        "num_tokens": _TOKENS,
        "ranks": work.ranks,
        "folder": folder,
        "weights": f"{folder}/weights.pt",
        "memory": False,
        "meta": False,
        "slow": None,
        "schedule": "1f1b",
        "recompute": False,
        "micro_batches": 4,
        **work.options,
        **more,
    }
    started: dict[str, list[Beside]] = {}
    try:
        for side in which:
            arguments = ["-m", module, json.dumps({**job, "side": side})]
            with reserve_port() as port:
                environments = [rank_variables(rank, work.ranks, port) for rank in range(work.ranks)]
            if job["do"] == "plan":
                alone = {name: value for name, value in environments[0].items() if name not in _LAUNCHER}
                environments = [{**alone, "LOCAL_RANK": "0"}]
            started[side] = []  # filled one by one, so that each is ended whatever happens
            for environment in environments:
                started[side].append(Beside(work.peer, python[side], arguments, environment))
        for ranks in started.values():
            for rank in ranks:
                rank.answer()
        yield started
    finally:
        for ranks in started.values():
            for rank in ranks:
                rank.end()


_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")


def _planned(work: Work, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {side: [] for side in _PAIR}
    with tempfile.TemporaryDirectory() as folder:
        if work.peer == "nnScaler" and not work.options.get("meta"):
            shallow = {**work.options["size"], "num_layers": 2}  # profiles the operators of any depth
            with _sides(work, folder, ("theirs",), do="plan", size=shallow) as sides:
                ask_all(sides["theirs"], "plan")
        reasons = {}
        for _ in range(max(1, rounds // 4)):
            for side in _PAIR:
                try:
                    with _sides(work, folder, (side,), do="plan") as sides:
                        found[side].append(ask_all(sides[side], "plan")[0]["all_s"])
                except RuntimeError as error:
                    reasons[side] = str(error)[:200].replace("|", "/")
            if reasons:
                break
    seconds = {f"{side}_s": Spread.of(all_s) for side, all_s in found.items() if all_s}
    if reasons:
        return {**seconds, "error": "; ".join(f"{side}: {reason}" for side, reason in reasons.items())}
    pairs = [ours / theirs for ours, theirs in zip(*found.values(), strict=True)]
    return {"ratio": Spread.of(pairs), "pairs": len(pairs), **seconds}


def _trained(work: Work, rounds: int) -> dict[str, Any]:
    size, slowed = Llama(**work.options["size"]), bool(work.options.get("slow"))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(size.build().state_dict(), f"{folder}/weights.pt")
        with _sides(work, folder) as sides:
            losses = {}
            for side, ranks in sides.items():
                ask_all(ranks, "build")
                steps = [ask_all(ranks, "step") for _ in range(max(_NUM_LOSSES, _WARM_UP))]
                losses[side] = [statistics.fmean(rank["loss"] for rank in step) for step in steps]
            blocks = _in_turns(sides, rounds)
        peaks = {} if slowed else {side: _peak(work, folder, side) for side in _PAIR}
    cpu = Spread.of(ratios(blocks, _PAIR, lambda block: block.cpu_s))
    row = {
        "ratio": Spread.of(ratios(blocks, _PAIR, lambda block: block.wall_s)),
        "pairs": cpu.n,
        **{f"{side}_s": spread_of(blocks, side, lambda block: block.wall_s, scale=1) for side in _PAIR},
    }
    if slowed:
        return row
    decay = 0.01 if work.peer == "nnScaler" else 0.0  # AdamW's default, and that of Trainer's
    alone = on_ranks(_alone, 1, size, decay)[0]
    apart = {
        side: max(abs(a - b) for a, b in zip(found, alone, strict=True)) for side, found in losses.items()
    }
    return {
        **row,
        "cpu_ratio": cpu,
        "losses": alone,
        "apart": apart["ours"],
        "apart_theirs": apart["theirs"],
        "same": max(apart.values()) <= _APART,
        "peak_mib": peaks["ours"],
        "peak_mib_theirs": peaks["theirs"],
    }


def _in_turns(sides: Mapping[str, list[Beside]], rounds: int) -> list[Block]:
    def step(ranks: list[Beside]) -> Callable[[], object]:
        return lambda: ask_all(ranks, "step")

    return measure(
        {side: step(ranks) for side, ranks in sides.items()},
        [_PAIR],
        rounds=rounds,
        calls=1,
        barrier=lambda: None,
        cpu_clock=lambda: sum(rank.cpu_s for ranks in sides.values() for rank in ranks),
    )


def _peak(work: Work, folder: str, side: str) -> float:
    """MiB at the peak of a step, of the rank that holds most."""
    with _sides(work, folder, (side,), memory=True) as sides:
        for command in ("build", *["step"] * _WARM_UP):
            ask_all(sides[side], command)
        return max(rank["peak_bytes"] for rank in ask_all(sides[side], "step")) / _MIB


def _alone(size: Llama, weight_decay: float) -> list[float]:
    """The losses of one process that trains on the whole batch."""
    model, batch = size.build(), random_batch(size, _SAMPLES, _TOKENS, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIM_ARGS, weight_decay=weight_decay)
    losses = []
    for _ in range(max(_NUM_LOSSES, _WARM_UP)):
        optimizer.zero_grad()
        loss = next_token_loss(batch, model(**batch))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _chosen(work: Work, cluster: Cluster) -> list[Any]:
    """What nnScaler chooses, given the links that our prices have."""
    tables = FOLDER / "nnscaler-profiles/.cache/nnscaler/autodist/1.0/cpu/comm"
    try:
        _write_links(cluster, tables, work.ranks)
        with tempfile.TemporaryDirectory() as folder, _sides(work, folder, ("theirs",), do="plan") as sides:
            choices: list[Any] = ask_all(sides["theirs"], "plan")[0]["choices"]
            return choices
    finally:
        for path in tables.glob("intra_*.json"):
            path.unlink()


def _compared(work: Work, rounds: int) -> dict[str, Any]:
    """nnScaler's plan and ours, priced by one cost model and run by one engine."""
    cluster = on_ranks(operator_predictions.calibrated, work.ranks)[0]
    plans, priced = _priced(cluster, _chosen(work, cluster))
    ran = on_ranks(operator_predictions.run_plans, work.ranks, [plan.as_json() for plan in plans], rounds + 1)
    seconds, peaks = zip(
        *(map(max, zip(*(rank[place] for rank in ran), strict=True)) for place in range(2)), strict=True
    )
    return {
        "ratio": seconds[0] / seconds[1],
        "priced_ratio": priced[0] / priced[1],
        "priced_s": priced[0],
        "priced_s_theirs": priced[1],
        "ours_s": seconds[0],
        "theirs_s": seconds[1],
        "peak_mib": peaks[0] / _MIB,
        "peak_mib_theirs": peaks[1] / _MIB,
    }


_MEASURES: Mapping[str, Callable[[Work, int], dict[str, Any]]] = {
    "planning": _planned,
    "plan": _compared,
    "training": _trained,
    "schedule": _trained,
}


def _write_links(cluster: Cluster, folder: Path, ranks: int) -> None:
    """Gives nnScaler, in its own tables, the seconds of collectives that our prices have."""
    assert cluster.hardware is not None
    folder.mkdir(parents=True, exist_ok=True)
    mib = np.array([2.0**power for power in range(-2, 10)])
    for degree in (2**power for power in range(1, ranks.bit_length())):
        groups = Groups(np.array([degree]), np.array([degree]))
        found = {
            theirs: [mib.tolist(), collective_seconds(ours, mib * _MIB, groups, cluster.hardware).tolist()]
            for theirs, ours in _COMMUNICATION.items()
        }
        (folder / f"intra_{degree}.json").write_text(json.dumps(found), encoding="utf-8")


def choices_by_key(choices: Sequence[Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """What nnScaler chose for most of the operators of a key of ours: which argument it divides, and along which dimension.

    Args:
        choices: module path, operator, argument and dimension of each operator, -1 for one that it does not divide.
    """
    places: Counter[tuple[str, str]] = Counter()
    votes: dict[str, Counter[tuple[int, int]]] = {}
    for path, name, argument, dim in choices:
        if name not in _MATCHED:
            continue
        inner = re.sub(r"\.\d+(?=\.|$)", ".*", path.removeprefix("model."))
        key = f"{inner}/{name}#{places[path, name]}"
        places[path, name] += 1
        # Their embedding takes the tokens first, torch's operator the table.
        where = (1 - argument if name == "embedding" and argument >= 0 else argument, dim)
        votes.setdefault(key, Counter())[where] += 1
    return {key: most.most_common(1)[0][0] for key, most in votes.items()}


def _priced(
    cluster: Cluster, choices: Sequence[Sequence[Any]]
) -> tuple[tuple[OperatorPlan, OperatorPlan], list[float]]:
    """Our plan and theirs, with the seconds of a step that our cost model predicts."""
    ranks, cpu, chosen = operator_predictions.RANKS, torch.device("cpu"), choices_by_key(choices)
    graph = capture_shallow(
        operator_predictions.MODEL.build(), (), operator_predictions.sample_batch(), device=cpu
    )
    prices, states = OperatorPrices.on(cluster, ranks, "float32"), States()

    def as_chosen(one: Operator, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if one.key not in chosen:
            return rules
        argument, dim = chosen[one.key]
        if argument < 0:
            return tuple(rule for rule in rules if not rule.divides)
        return tuple(rule for rule in rules if rule.inputs[argument] == Shard(dim)) or rules

    ours = solved_plan(graph.graph, ranks, prices, states, device=cpu).plan
    theirs = solved_plan(graph.graph, ranks, prices, states, device=cpu, allow=as_chosen).plan
    assembled = assemble(graph.graph, legal_rules(graph.graph, ranks), prices, states, device=cpu)
    return (ours, theirs), [assembled.price(plan).seconds for plan in (ours, theirs)]
