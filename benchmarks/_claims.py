"""What each benchmark found, in lines that stand beside what was asked for.

A line is read from a benchmark's JSON file alone; the bars are the ones that the benchmarks hold themselves to.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._published.summary import GAIN_LIMIT, MEMORY, NEAR, TIME, Errors, gains, off

__all__ = ["READERS", "Claim", "claims_of"]

Data = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line.

    Attributes:
        what: is measured.
        asked: the bar in words; empty where none is set.
        found: the figure with its spread.
        n: how many figures or pairs stand behind it.
        holds: whether it meets the bar; None where none is set.
        shortfall: where it does not hold or we are slower, a sentence that says so; empty otherwise.
    """

    what: str
    found: str
    asked: str = ""
    n: int | None = None
    holds: bool | None = None
    shortfall: str = ""


def _interval(spread: Data, digits: int = 3) -> str:
    low, high = spread["low"], spread["high"]
    return f"{spread['median']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _slower(what: str, than: str, ratio: float, asked: float) -> str:
    return f"{what} takes {ratio - 1:.1%} longer than {than}; at most {asked - 1:.0%} is asked."


def _ratios(data: Data, *, clock: str, bar: float, label: str, than: str) -> Iterator[Claim]:
    for row in data["rows"]:
        if row["step"].startswith("control"):
            continue
        spread, asked = row[f"{clock}_ratio"], row.get("asked", bar)
        what, holds = f"{row[label]}: {row['step']}", bool(row["holds"])
        yield Claim(
            what=f"{what} over {than}, {clock} time",
            asked=f"≤ {asked}",
            found=_interval(spread),
            n=row["pairs"],
            holds=holds,
            shortfall="" if holds else _slower(what, than, spread["median"], asked),
        )


def _speed(data: Data) -> Iterator[Claim]:
    yield from _ratios(data, clock="cpu", bar=1.02, label="scenario", than="torch by hand")


def _watch(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        what, holds = (
            f"{row['strategy']}: a step whose ranks compare what they do, over one without",
            bool(row["holds"]),
        )
        yield Claim(
            what=what,
            asked="≤ 1.002",
            found=f"{row['ratio']:.4f}",
            holds=holds,
            shortfall="" if holds else f"{what}: {row['ratio']:.4f}; at most 1.002 is asked.",
        )


def _model_axes(data: Data) -> Iterator[Claim]:
    yield from _ratios(data, clock="wall", bar=1.03, label="plan", than="the plan by hand")


def _schedules(data: Data) -> Iterator[Claim]:
    speed = [row for row in data["rows"] if row["part"] == "speed"]
    yield from _ratios({"rows": speed}, clock="wall", bar=1.03, label="plan", than="torch's schedule by hand")
    for row in data["rows"]:
        if row["part"] != "recomputing early":
            continue
        what, holds = f"{row['plan']} over 1F1B, {row['step']}", bool(row["holds"])
        ratio, gain = row["wall_ratio"], f"{row['simulated_ms']:.0f} ms ({row['simulated_percent']:.1f}%)"
        yield Claim(
            what=f"{what}: measured gain over the simulated {gain}",
            asked="1 ± 0.1",
            found=_interval(ratio),
            n=row["pairs"],
            holds=holds,
            shortfall="" if holds else f"{what}: {ratio['median']:.2f} of the simulated gain of {gain}.",
        )


def _overhead(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        what, holds = f"auto_accelerate adds, {row['name']}, {row['start']}, yardsticks", bool(row["holds"])
        yield Claim(
            what=what,
            asked="< 8",
            found=f"{row['yardsticks']:.1f}",
            n=row["pairs"],
            holds=holds,
            shortfall=""
            if holds
            else f"auto_accelerate adds {row['yardsticks']:.1f} yardsticks to {row['name']}.",
        )


def _shares(data: Data, *, ratio: str, bar: float, than: str) -> Iterator[Claim]:
    """The row that is farthest from the bar stands for all of them."""
    held = [row for row in data["rows"] if row["holds"] is not None]
    worst = max(held, key=lambda row: float(row[ratio]))
    failed = [row for row in held if not row["holds"]]
    yield Claim(
        what=f"{than}, the worst of all: {worst['name']}, {worst['num_ranks']} ranks",
        asked=f"≤ {bar}",
        found=f"{worst[ratio]:.4f}",
        n=len(held),
        holds=not failed,
        shortfall=" ".join(
            f"{row['name']} on {row['num_ranks']} ranks: {row[ratio]:.3f} times {than}; {bar} is asked."
            for row in failed
        ),
    )


def _memory(data: Data) -> Iterator[Claim]:
    yield from _shares(data, ratio="share", bar=1.05, than="a rank's states over its part of the whole")


def _materialise(data: Data) -> Iterator[Claim]:
    yield from _shares(data, ratio="ratio", bar=1.1, than="peak while sharding over a shard and one unit")


def _planning(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        if row["within"] is None:
            continue
        what = f"{row['what']}, {row['cluster']}"
        speed = row.get("per_yardstick")
        nodes = "nodes" in row["cluster"]
        asked = "≥ 6000 plans a yardstick" if speed else f"≤ {126 if nodes else 63} yardsticks, ≤ 512 MiB"
        found = (
            f"{speed} plans a yardstick"
            if speed
            else f"{row['yardsticks']:.1f} yardsticks, {row['mib']:.0f} MiB"
        )
        holds = bool(row["within"])
        shortfall = "" if holds else f"{what}: {found}; {asked} is asked."
        yield Claim(what=what, asked=asked, found=found, n=row["plans"], holds=holds, shortfall=shortfall)


def _cutting(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        what, holds = f"cut a 70B Llama, {row['mesh']}, rank {row['rank']}, yardsticks", bool(row["holds"])
        shortfall = "" if holds else f"To {what} takes {row['yardsticks']:.0f}; 1000 are asked."
        yield Claim(
            what=what, asked="≤ 1000", found=f"{row['yardsticks']:.0f}", holds=holds, shortfall=shortfall
        )


def _operator_predictions(data: Data) -> Iterator[Claim]:
    correlation = float(data["settings"]["rank correlation"])
    yield Claim(
        what="rank correlation of predicted and measured steps of operator plans, 4 ranks",
        asked="≥ 0.8",
        found=f"{correlation:.2f}",
        n=len(data["rows"]),
        holds=correlation >= 0.8,
        shortfall=""
        if correlation >= 0.8
        else f"Operator plans are ranked with {correlation:.2f}; 0.8 is asked.",
    )
    shares = {row["plan"]: row["predicted_mib"] / row["measured_mib"] - 1 for row in data["rows"]}
    worst = max(shares, key=lambda plan: abs(shares[plan]))
    num = sum(bool(row["holds"]) for row in data["rows"])
    yield Claim(
        what="predicted memory of operator plans within 10 % of measured, 4 ranks",
        asked=f"{len(shares)} of {len(shares)} plans",
        found=f"{num}, worst {worst} {shares[worst]:+.0%}",
        n=len(shares),
        holds=num == len(shares),
        shortfall=""
        if num == len(shares)
        else f"The memory of the plan {worst} is predicted {shares[worst]:+.0%}.",
    )


def _operator_planning(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        what = f"an operator plan of a Llama, {row['layers']} layers, {row['devices']} devices"
        found, holds = f"{row['yardsticks']:.0f} yardsticks, {row['mib']} MiB", bool(row["holds"])
        shortfall = "" if holds else f"{what}: {found}; 80 yardsticks and 1024 MiB are asked."
        yield Claim(
            what=what, asked="≤ 80 yardsticks, ≤ 1024 MiB", found=found, n=3, holds=holds, shortfall=shortfall
        )


def _estimate_memory(data: Data) -> Iterator[Claim]:
    errors = sorted(abs(detail["error"]) for row in data["rows"] for detail in row.get("details", ()))
    if not errors:
        return
    for name, found, bar in (("median", errors[len(errors) // 2], 0.03), ("worst", errors[-1], 0.08)):
        what = f"predicted against measured peak memory, {name} error"
        shortfall = "" if found <= bar else f"The {what} is {found:.1%}; {bar:.0%} is asked."
        holds = found <= bar
        yield Claim(
            what=what,
            asked=f"≤ {bar:.0%}",
            found=f"{found:.2%}",
            n=len(errors),
            holds=holds,
            shortfall=shortfall,
        )


def _estimate_peers(data: Data) -> Iterator[Claim]:
    """Every tool's answers; ours against the bars of our own estimate, and against who is nearer or quicker."""
    rows = [row for row in data["rows"] if "answers" in row]
    names = list(rows[0]["answers"])
    errors = {name: _errors_of(name, rows) for name in names}
    for name in names:
        found, ours = errors[name], name == names[0]
        if not found:
            yield Claim(what=f"predicted against measured peak memory, {name}", found="no answer here")
            continue
        median, worst = statistics.median(found.values()), max(found.values())
        yield Claim(
            what=f"predicted against measured peak memory, {name}: error",
            asked="median ≤ 3%, worst ≤ 8%" if ours else "",
            found=f"median {median:.1%}, worst {worst:.1%}; answers {len(found)} of {len(rows)}",
            n=len(found),
            holds=(median <= 0.03 and worst <= 0.08) if ours else None,
            shortfall=" ".join(_estimate_losses(rows, errors, names[0]) if ours else ()),
        )


def _errors_of(name: str, rows: Sequence[Data]) -> dict[int, float]:
    """By the number of the row, for those that it answers."""
    ratios = {number: row[f"{name}: peak"] for number, row in enumerate(rows)}
    return {number: abs(ratio - 1) for number, ratio in ratios.items() if isinstance(ratio, float)}


def _estimate_losses(
    rows: Sequence[Data], errors: Mapping[str, Mapping[int, float]], ours: str
) -> Iterator[str]:
    mine = errors[ours]
    number = max(mine, key=lambda one: mine[one])
    if mine[number] > 0.08:
        row = rows[number]
        yield (f"Our worst estimate ({row['model']}, {row['setup']}) is {mine[number]:.1%} off; 8% is asked.")
    if (median := statistics.median(mine.values())) > 0.03:
        yield f"The median error of our estimates is {median:.1%}; 3% is asked."
    for name, theirs in errors.items():
        if name == ours or not theirs:
            continue
        nearer = [number for number, error in theirs.items() if error < mine[number] - 0.005]
        if nearer:
            worst = max(nearer, key=lambda number: mine[number] - theirs[number])
            yield (
                f"{name} {'are' if name.endswith('trackers') else 'is'} nearer to the measured peak than we are in "
                f"{len(nearer)} of {len(theirs)} rows, by most for {rows[worst]['model']}, {rows[worst]['setup']}: "
                f"{theirs[worst]:.1%} off, we {mine[worst]:.1%}."
            )
        seconds = [
            statistics.median(row["answers"][one]["cpu_s"] for row in rows if "cpu_s" in row["answers"][one])
            for one in (ours, name)
        ]
        if seconds[0] > seconds[1]:
            yield f"We need {seconds[0]:.2g} s of processor time to answer, {name} {seconds[1]:.2g}."


def _estimate_time(data: Data) -> Iterator[Claim]:
    for model, rho in data["settings"]["rank correlation"].items():
        n = sum(row["model"] == model for row in data["rows"])
        yield Claim(
            what=f"predicted and measured step times, {model}: rank correlation",
            asked="≥ 0.8",
            found=f"{rho:.3f}",
            n=n,
            holds=rho >= 0.8,
            shortfall="" if rho >= 0.8 else f"Predicted times of {model} are ordered with {rho:.2f} only.",
        )


def _search_quality(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        space, made_up = row["space"], row["space"].startswith("made up")
        yield Claim(
            what=f"regret of a search, {space}",
            asked="" if made_up else "right ≥ 95 %, worst ≤ 10 %, after ≤ 20 % of the trials",
            found=f"median {row['regret']:.1%}, worst {row['worst']:.1%}, after {row['share']:.0%};"
            f" right {row['right']:.0%} (random trials {row['right_random']:.0%})",
            n=row["num_candidates"],
            holds=row.get("holds"),
            shortfall=_wrong_choices(space, row),
        )


def _search_time(data: Data) -> Iterator[Claim]:
    what = {
        "call": "from call to strategy on a small Llama, elapsed s",
        "trial": "a warm trial beyond its steps, elapsed s",
    }
    for row in data["rows"]:
        seconds, holds = row["seconds"], bool(row["holds"])
        said = what[row["name"]]
        yield Claim(
            what=said,
            asked=f"≤ {row['limit']:.0f}",
            found=_interval(seconds, 2),
            n=row["n"],
            holds=holds,
            shortfall="" if holds else f"{seconds['median']:.1f}: {said}; {row['limit']:.0f} is asked.",
        )


def _wrong_choices(space: str, row: Data) -> str:
    parts = []
    if row["right"] < 1:
        parts.append(
            f"In the space {space}, {1 - row['right']:.0%} of the searches choose a strategy that is slower than "
            f"the best by more than the noise and 3 %, the worst by {row['worst']:.0%}."
        )
    if row["share"] > 0.2:
        parts.append(
            f"In the space {space}, a search tries {row['share']:.1%} of the candidates; 20 % are asked."
        )
    return " ".join(parts)


def _imports(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        holds = row["yardsticks"] <= 5 if row["program"] == "`import atorch_ns`" else None
        yield Claim(
            what=f"{row['program']}, yardsticks",
            asked="" if holds is None else "≤ 5",
            found=f"{row['yardsticks']:.1f}",
            n=row["runs"],
            holds=holds,
            shortfall="Importing the package takes more than 5 yardsticks." if holds is False else "",
        )


def _gpu(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        ratio, error = row.get("ratio"), row.get("error")
        if isinstance(ratio, Mapping):
            found = _interval(ratio)
        elif ratio is None:
            found = f"{error:.3f}"
        else:
            found = f"{ratio:.3f}" + ("" if error is None else f", memory {error:+.1%}")
        holds = row.get("holds")
        yield Claim(
            what=f"one GPU: {row['name']}",
            asked=str(row.get("bar") or row.get("asked") or ""),
            found=found,
            n=row.get("n"),
            holds=holds,
            shortfall=f"On one GPU, {row['name']} is {found}." if holds is False else "",
        )


def _peers(data: Data) -> Iterator[Claim]:
    for row in data["rows"]:
        what = f"{row['task']}: our step over {row['peer']}'s, cpu time"
        if row.get("error"):
            yield Claim(what=what, found=f"{row['peer']} does not run: {row['error']}")
            continue
        by_hand = row["peer"] == "torch by hand"
        yield Claim(
            what=what,
            asked="≤ 1.02" if by_hand else "",
            found=f"{_interval(row['cpu_ratio'])}: {row['verdict']}",
            n=row["pairs"],
            holds=bool(row["holds"]) if by_hand else None,
            shortfall=" ".join(_losses(row)),
        )
        ratio = row["setup_ratio"]
        slower = ratio["median"] > 1.1
        yield Claim(
            what=f"{row['task']}: our set-up over {row['peer']}'s, elapsed time",
            asked="≤ 1.1" if by_hand else "",
            found=_interval(ratio, 2),
            n=ratio["n"],
            holds=not slower if by_hand else None,
            shortfall=f"{row['task']} beside {row['peer']}: our set-up takes {ratio['median']:.2f} times as long."
            if slower
            else "",
        )


def _side_by_side(data: Data) -> Iterator[Claim]:
    clocks = {
        "planning": "processor seconds",
        "plan": "a step, both run here",
        "training": "wall seconds of a step",
    }
    for row in data["rows"]:
        work = f"{row['part']}, {row['work']}"
        what = f"{work}: ours over {row['peer']}'s, {clocks.get(row['part'], 'wall seconds of a step')}"
        if row.get("error"):
            yield Claim(what=what, found=f"does not run: {row['error']}")
            continue
        ratio = row["ratio"]
        low, median = (ratio["low"], ratio["median"]) if isinstance(ratio, Mapping) else (ratio, ratio)
        found = _interval(ratio) if isinstance(ratio, Mapping) else f"{ratio:.3f}"
        bar = row.get("bar")
        holds = None if bar is None else low <= bar
        short = [f"{work}: ours takes {median:.2f} times as long as {row['peer']}."] if low > 1 else []
        if holds is False:
            short.append(f"{work}: ours takes {median:.3f} of {row['peer']}'s time; at most {bar} is asked.")
        ours, theirs = row.get("peak_mib"), row.get("peak_mib_theirs")
        if ours is not None and theirs is not None and ours > 1.02 * theirs:
            short.append(f"{work}: our peak is {ours:.0f} MiB, {row['peer']}'s {theirs:.0f}.")
        if not row.get("same", True):
            short.append(
                f"{work}: losses are up to {max(row['apart'], row['apart_theirs']):.2g} off one process."
            )
        yield Claim(
            what=what,
            asked="" if bar is None else f"≤ {bar}",
            found=found,
            n=row.get("pairs"),
            holds=holds,
            shortfall=" ".join(short),
        )


def _losses(row: Data) -> Iterator[str]:
    where = f"{row['task']} beside {row['peer']}"
    if row["verdict"] == "slower":
        yield f"{where}: our step takes {row['cpu_ratio']['median'] - 1:.1%} more processor time."
    ours, theirs = row.get("peak_mib"), row.get("peak_mib_peer")
    if ours is not None and theirs is not None and ours > 1.02 * theirs:
        yield f"{where}: our peak is {ours:.0f} MiB, theirs {theirs:.0f}."
    if not row["same"]:
        yield f"{where}: the losses are {row['loss_apart']:.2g} apart, so the two train different things."


def _models(data: Data) -> Iterator[Claim]:
    outcomes = [
        (row["model"], name, row[name])
        for row in data["rows"]
        for name in data["settings"]["strategies"]
        if row.get(name) in ("equal", "refused", "wrong", "hung", "raw error")
    ]
    yield _equal("models under strategies: rows that are equal to one process", outcomes)
    whole = {
        row["model"]
        for row in data["rows"]
        if "divides no layer" in row.get("reasons", {}).get("tensor 2", "")
        and row.get("sequence 2", "refused") == "refused"
    }
    yield _equal(
        f"the same without rows of tensor and sequence on the {len(whole)} models in which neither finds anything to divide",
        [row for row in outcomes if row[0] not in whole or not ("tensor" in row[1] or "sequence" in row[1])],
    )
    faults = [
        f"{model} under {name}" for model, name, outcome in outcomes if outcome not in ("equal", "refused")
    ]
    yield Claim(
        what="models under strategies: rows that are wrong, hang or end in a raw error",
        asked="0",
        found=str(len(faults)),
        n=len(outcomes),
        holds=not faults,
        shortfall=f"{len(faults)} rows are wrong, hang or end in a raw error: {', '.join(faults[:5])} …"
        if faults
        else "",
    )
    plans = {
        row["model"]: row.get("tensor_plan_s") or row["plan_s"]["tensor 2"]
        for row in data["rows"]
        if "tensor 2" in row.get("plan_s", {})
    }
    slowest = max(plans, key=plans.__getitem__, default="")
    worst = plans.get(slowest, 0.0)
    yield Claim(
        what="tensor 2, from the call to the divided model (where that is more than 3, of finding the plan alone), cpu s of a "
        f"rank, the slowest: {slowest}",
        asked="≤ 3",
        found=f"{worst:.1f}",
        n=len(plans),
        holds=worst <= 3,
        shortfall=""
        if worst <= 3
        else f"Planning tensor 2 for {slowest} takes {worst:.1f} cpu s; 3 is asked.",
    )


def _equal(what: str, outcomes: Sequence[tuple[str, str, str]]) -> Claim:
    share = sum(outcome == "equal" for *_, outcome in outcomes) / max(1, len(outcomes))
    return Claim(
        what=what,
        asked="≥ 97%",
        found=f"{share:.1%}",
        n=len(outcomes),
        holds=share >= 0.97,
        shortfall="" if share >= 0.97 else f"{what}: {share:.1%}; 97% is asked.",
    )


def _published(data: Data) -> Iterator[Claim]:
    rows = data["rows"]
    for target in (TIME, MEMORY):
        errors = Errors.of(rows, target)
        n, what = len(errors.ratios), f"{target.what} over published {target.what}"
        share, (name, worst) = errors.num_near / n, errors.worst
        yield _aim(
            f"{what}: off in the middle",
            f"≤ {target.middle:.0%}",
            f"{errors.middle:.0%}",
            n,
            errors.middle <= target.middle,
        )
        yield _aim(
            f"{what}: within {NEAR:.0%}", f"≥ {target.share:.0%}", f"{share:.0%}", n, share >= target.share
        )
        yield _aim(
            f"{what}: the worst of all, {name}",
            f"≤ {target.worst}× either way",
            f"{worst:.2f}×",
            n,
            off(worst) + 1 <= target.worst,
        )
    predicted = [row for row in rows if row.get("predicted_s")]
    over = sum(not row["within_memory"] for row in predicted)
    yield _aim(
        "runs that ran, predicted above the device's memory for sure",
        "0",
        str(over),
        len(predicted),
        not over,
    )
    found = gains(rows)
    right = sum(gain.error <= GAIN_LIMIT for gain in found)
    wrong = sum(gain.wrong_sign for gain in found)
    yield _aim(
        "gains of options within a third", f"{len(found)}", str(right), len(found), right == len(found)
    )
    yield _aim("gains of options of the wrong sign", "0", str(wrong), len(found), not wrong)


def _aim(what: str, asked: str, found: str, n: int, holds: bool) -> Claim:
    shortfall = "" if holds else f"{what}: {found}; {asked} is aimed at."
    return Claim(what=what, asked=asked, found=found, n=n, holds=holds, shortfall=shortfall)


def _expert_plans(data: Data) -> Iterator[Claim]:
    rows = [row for row in data["rows"] if row.get("gain")]
    faster = sum(row["believed"].startswith("theirs") for row in rows)
    what = (
        "setups of experts whose own plan is predicted faster than the chosen one, as far as that is believed"
    )
    yield Claim(what=what, found=str(faster), n=len(rows))


READERS: Mapping[str, Callable[[Data], Iterator[Claim]]] = {
    "speed": _speed,
    "watch": _watch,
    "peers": _peers,
    "side_by_side": _side_by_side,
    "model_axes": _model_axes,
    "schedules": _schedules,
    "models": _models,
    "overhead": _overhead,
    "memory": _memory,
    "materialise": _materialise,
    "estimate_memory": _estimate_memory,
    "estimate_peers": _estimate_peers,
    "estimate_time": _estimate_time,
    "planning": _planning,
    "published": _published,
    "expert_plans": _expert_plans,
    "search_quality": _search_quality,
    "search_time": _search_time,
    "cutting": _cutting,
    "operator_planning": _operator_planning,
    "operator_predictions": _operator_predictions,
    "imports": _imports,
    "gpu": _gpu,
}
"""From a benchmark's JSON to its lines, in the order of the page."""


def claims_of(data: Data) -> Sequence[Claim]:
    """The lines of one benchmark; none of one that no reader knows."""
    reader = READERS.get(data["benchmark"])
    return () if reader is None else list(reader(data))
