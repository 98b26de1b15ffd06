"""How far predictions are from published runs: errors by group, gains of options, and what is missed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "GAIN_LIMIT",
    "MEMORY",
    "NEAR",
    "TIME",
    "Errors",
    "Gain",
    "Target",
    "gains",
    "line",
    "off",
    "tables",
]

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is aimed at for one kind of prediction.

    Attributes:
        what: is predicted.
        key: of the ratio in a row.
        middle: the error in the middle.
        share: of the rows within a fifth.
        worst: ratio, either way.
    """

    what: str
    key: str
    middle: float = 0.10
    share: float = 0.80
    worst: float


TIME: Final = Target(what="step time", key="time_ratio", worst=1.5)
MEMORY: Final = Target(what="memory", key="memory_ratio", worst=1.4)
NEAR: Final = 0.20
GAIN_LIMIT: Final = 1 / 3

_PAIRS: Final = (
    ("compile", "titan-8b-8-eager", "titan-8b-8-compile"),
    ("compile", "litgpt-tinyllama-1gpu-eager", "litgpt-tinyllama-1gpu-thunder"),
    ("float8", "titan-8b-8-compile", "titan-8b-8-float8"),
    ("float8", "titan2-70b-bf16", "titan2-70b-fp8-tensorwise"),
    ("interleaving", "zb-1.5b-m24-1f1b", "zb-1.5b-m24-interleaved"),
    ("interleaving", "zb-1.5b-m32-1f1b", "zb-1.5b-m32-interleaved"),
    ("interleaving", "zb-1.5b-m64-1f1b", "zb-1.5b-m64-interleaved"),
    ("interleaving", "zb-6.2b-m24-1f1b", "zb-6.2b-m24-interleaved"),
    ("interleaving", "zb-6.2b-m32-1f1b", "zb-6.2b-m32-interleaved"),
    ("interleaving", "zb-6.2b-m64-1f1b", "zb-6.2b-m64-interleaved"),
    ("interleaving, 2 nodes", "zb-14.6b-m48-1f1b", "zb-14.6b-m48-interleaved"),
    ("interleaving, 2 nodes", "zb-14.6b-m64-1f1b", "zb-14.6b-m64-interleaved"),
    ("interleaving, 2 nodes", "zb-14.6b-m128-1f1b", "zb-14.6b-m128-interleaved"),
    ("every second block recomputed", "titan-a100-l2-13b-none", "titan-a100-l2-13b-layer"),
    ("operators recomputed, not blocks", "titan-a100-8b-layer", "titan-a100-8b-op"),
    ("operators recomputed, not blocks", "titan-a100-l2-13b-layer", "titan-a100-l2-13b-op"),
    ("sequence parallel, selective", "korthikanti-22b-full", "korthikanti-22b-seqsel"),
    ("sequence parallel, selective", "korthikanti-530b-full", "korthikanti-530b-seqsel"),
    ("sequence parallel, selective", "korthikanti-1t-full", "korthikanti-1t-seqsel"),
    ("asynchronous tensor parallel", "titan2-70b-bf16", "titan2-70b-bf16-async"),
    ("asynchronous tensor parallel, fp8", "titan-70b-2d", "titan-70b-2d-asynctp"),
    ("asynchronous tensor parallel, fp8", "titan2-70b-fp8-tensorwise", "titan2-70b-fp8-tensorwise-async"),
    ("asynchronous tensor parallel, fp8", "titan2-70b-fp8-rowwise", "titan2-70b-fp8-rowwise-async"),
    ("tensor parallel 2", "atorch-3d-tp1pp2dp4", "atorch-3d-tp2pp2dp2"),
    ("more devices, 8 to 32", "atorch-fsdp-8", "atorch-fsdp-32"),
    ("more devices, 8 to 16", "atorch-3d-tp2pp2dp2", "atorch-3d-tp2pp2dp4"),
    ("more devices, 16 to 64", "atorch-3d-tp2pp2dp4", "atorch-3d-tp2pp2dp16"),
    ("more devices, 32 to 64", "trainy-8b-h200-4n", "trainy-8b-h200-8n"),
    ("more devices, 128 to 512", "mpt-70b-s2048-128xh100", "mpt-70b-s2048-512xh100"),
)
"""An option, and two runs of one source that differ in it: without, and with."""


def off(ratio: float) -> float:
    """The error of a ratio, the same both ways: 0.25 for 1.25 and for 0.8."""
    return max(ratio, 1 / ratio) - 1


@dataclass(frozen=True)
class Errors:
    """Errors of some rows.

    Attributes:
        ratios: predicted over published, by run.
    """

    ratios: Mapping[str, float]

    @classmethod
    def of(cls, rows: Iterable[Row], target: Target) -> Errors:
        """Those of the rows that have this ratio."""
        return cls({row["run"]: row[target.key] for row in rows if row.get(target.key)})

    @property
    def median(self) -> float:
        """The ratio in the middle."""
        return statistics.median(self.ratios.values())

    @property
    def middle(self) -> float:
        """The error in the middle."""
        return statistics.median(map(off, self.ratios.values()))

    @property
    def num_near(self) -> int:
        """How many are within a fifth."""
        return sum(off(ratio) <= NEAR for ratio in self.ratios.values())

    @property
    def worst(self) -> tuple[str, float]:
        """The run with the largest error, and its ratio."""
        return max(self.ratios.items(), key=lambda item: off(item[1]))


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What an option gains in tokens a second and device, as a ratio: 1 for nothing.

    Attributes:
        option: its name.
        without, with_it: the runs.
        published, predicted: the ratio.
    """

    option: str
    without: str
    with_it: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the gain as a share of the published gain."""
        return abs(self.predicted - self.published) / abs(self.published - 1)

    @property
    def wrong_sign(self) -> bool:
        """Whether a loss is predicted for a gain, or a gain for a loss."""
        return (self.predicted - 1) * (self.published - 1) < 0


def gains(rows: Iterable[Row]) -> list[Gain]:
    """The gains of all pairs of which both runs are predicted."""
    there = {row["run"]: row for row in rows if row.get("time_ratio")}
    return [
        Gain(
            option=option,
            without=without,
            with_it=with_it,
            published=_gain(there[without], there[with_it], "published_s"),
            predicted=_gain(there[without], there[with_it], "predicted_s"),
        )
        for option, without, with_it in _PAIRS
        if without in there and with_it in there
    ]


def _gain(without: Row, with_it: Row, key: str) -> float:
    before, after = (float(row["tokens_per_device"] / row[key]) for row in (without, with_it))
    return after / before


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown: errors by source, device and option, gains, runs over memory, runs without a prediction."""
    predicted = [row for row in rows if row.get("predicted_s")]
    for title, groups in (
        ("source", _groups(predicted, lambda row: [row["source"]])),
        ("device", _groups(predicted, lambda row: [row["device"]])),
        ("option", _groups(predicted, lambda row: row["options"])),
    ):
        yield from line(
            title,
            "runs",
            "time: median ratio",
            "off in the middle",
            "within 20 %",
            "worst",
            "memory: median ratio",
            "off in the middle",
            "within 20 %",
            "worst",
            "over the device's memory for sure",
        )
        yield from line(*["---"] * 11)
        for name, group in {**groups, "**all**": predicted}.items():
            over = sum(not row["within_memory"] for row in group)
            yield from line(name, len(group), *_cells(group, TIME), *_cells(group, MEMORY), over or "")
        yield ""
    yield from _gain_table(rows)
    over = [row for row in predicted if not row["within_memory"]]
    yield (
        f"Predicted above the device's memory for sure, by the lower end of the interval, though they ran ({len(over)}), in GiB: "
        + (", ".join(f"{row['run']} {row['needed_gib']:.0f}" for row in over) or "none")
        + "."
    )
    yield ""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["missing"]:
            reasons.setdefault(row["missing"], []).append(row["run"])
    yield f"Without a prediction ({sum(map(len, reasons.values()))}):"
    yield ""
    for reason, names in reasons.items():
        yield f"- {reason}: {', '.join(names)}."


def _groups(rows: Iterable[Row], names_of: Any) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        for name in names_of(row):
            found.setdefault(name, []).append(row)
    return found


def _cells(rows: Iterable[Row], target: Target) -> list[str]:
    errors = Errors.of(rows, target)
    if not errors.ratios:
        return [""] * 4
    name, ratio = errors.worst
    near = f"{errors.num_near} of {len(errors.ratios)}"
    return [f"{errors.median:.2f}", f"{errors.middle:.0%}", near, f"{ratio:.2f} {name}"]


def _gain_table(rows: Sequence[Row]) -> Iterator[str]:
    yield from line("option", "without", "with", "gain published", "predicted", "error of the gain")
    yield from line(*["---"] * 6)
    for gain in gains(rows):
        words = "wrong sign" if gain.wrong_sign else f"{gain.error:.0%}"
        yield from line(
            gain.option,
            gain.without,
            gain.with_it,
            f"{gain.published:.3f}",
            f"{gain.predicted:.3f}",
            words if gain.error <= GAIN_LIMIT and not gain.wrong_sign else f"**{words}**",
        )
    yield ""


def line(*cells: object) -> Iterator[str]:
    """A row of a table."""
    yield f"| {' | '.join(map(str, cells))} |"
