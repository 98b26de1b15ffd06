"""The data behind the tables and pictures, to the number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atorch_ns.report import (
    accuracy_info,
    candidates_info,
    history_info,
    memory_info,
    pareto_info,
    time_info,
    waterfall_info,
)
from atorch_ns.report.info.accuracy import rank_correlation
from atorch_ns.search import SearchOutcome, SearchSettings
from tests.report.outcomes import (
    AMP,
    CHECKPOINT,
    DDP,
    FSDP,
    MIB,
    estimated,
    measured,
    nothing_fits,
    row,
    searched,
)


def test_candidates() -> None:
    info = candidates_info(searched())
    assert [line.key for line in info.lines] == ["win", "amp", "base", "slow", "boom", "huge"]
    assert [line.fate for line in info.lines] == ["won", "lost", "lost", "untried", "failed", "pruned"]
    win, _, base, slow, boom, huge = info.lines
    assert win.time.source == "measured"
    assert win.time.value == pytest.approx(0.025)
    assert win.time.num == 5
    assert win.time.spread == pytest.approx(1.2533 * 1.4826 * 0.00025 / 5**0.5)
    assert win.memory.value == 410 * MIB
    assert win.limit_share == pytest.approx(0.41)
    assert win.speedup == pytest.approx(1.6)
    assert win.on_front
    assert not base.on_front
    assert base.is_baseline
    assert slow.time.source == "corrected"
    assert slow.speedup == pytest.approx(40 / 35)
    assert boom.speedup is None
    assert huge.pruned_kind == "memory"
    # Never tried nor corrected: prediction is held against prediction, not against what was measured.
    assert huge.speedup == pytest.approx(30 / 31)


def test_the_first_lines_keep_the_baseline() -> None:
    info = candidates_info(searched()).first(1)
    assert [line.key for line in info.lines] == ["win", "base"]
    assert len(candidates_info(searched()).first(None).lines) == 6


def test_memory_and_time_in_parts() -> None:
    memory, time = memory_info(searched()), time_info(searched())
    assert memory.names[0] == "parameters"
    assert time.names[0] == "compute"
    assert memory.bars[0].parts == pytest.approx([40 * MIB, 40 * MIB, 80 * MIB, 200 * MIB, 40 * MIB, 0, 0])
    assert memory.bars[0].predicted == pytest.approx(400 * MIB)
    assert memory.over(memory.bars[0]) == pytest.approx(-590 * MIB)  # measured goes before predicted
    assert memory.over(memory.bars[-1]) == pytest.approx(200 * MIB)
    assert time.bars[3].parts[1] == pytest.approx(0.004)
    assert [bar.measured is not None for bar in time.bars] == [True, True, True, False, False, False]
    assert time.bars[0].is_best
    assert time.bars[2].is_baseline


def test_winner_and_baseline_are_shown_however_few() -> None:
    assert {bar.key for bar in memory_info(searched(), limit=2).bars} == {"win", "base"}


def test_history() -> None:
    info = history_info(searched())
    assert [point.key for point in info.points] == ["base", "amp", "win", "boom"]
    assert [point.best_seconds for point in info.points] == pytest.approx([0.040, 0.030, 0.025, 0.025])
    assert info.points[3].seconds is None
    assert info.points[3].status == "raised"
    assert info.best_trial == 3


def test_the_best_so_far_is_by_the_objective_and_ends_with_the_winner() -> None:
    small = replace(searched(), settings=SearchSettings(objective="memory"))
    slow_but_small = replace(small.rows[0], trial=measured(50, 410))
    info = history_info(replace(small, rows=(slow_but_small, *small.rows[1:])))
    assert [point.best_trial for point in info.points] == [1, 2, 3, 3]
    # The plain strategy is chosen among those that noise cannot tell apart.
    tied = replace(searched(), best="base")
    assert [point.best_trial for point in history_info(tied).points] == [1, 1, 1, 1]


def test_what_was_disqualified_or_is_too_large_is_never_the_best_so_far() -> None:
    win, amp, *rest = searched().rows
    large = replace(win, trial=measured(10, 2000), fate="lost")
    wrong = replace(amp, fate="failed")
    info = history_info(replace(searched(), rows=(large, wrong, *rest), best="base"))
    assert [point.best_trial for point in info.points] == [1, 1, 1, 1]


def test_accuracy() -> None:
    time = accuracy_info(searched(), "time")
    assert [(point.predicted, point.measured) for point in time.points] == [
        pytest.approx(pair) for pair in ((0.020, 0.025), (0.025, 0.030), (0.030, 0.040))
    ]
    assert time.correlation == pytest.approx(1.0)
    assert time.median_error == pytest.approx(0.2)
    assert time.worst_error == pytest.approx(0.25)
    assert time.median_ratio == pytest.approx(1.25)
    memory = accuracy_info(searched(), "memory")
    assert memory.median_error == pytest.approx(10 / 410)


def test_nothing_measured_has_no_accuracy() -> None:
    info = accuracy_info(nothing_fits(), "time")
    assert (info.points, info.correlation, info.median_error) == ((), None, None)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 4.0, 9.0], 1.0),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0),
        ([1.0, 1.0, 2.0], [1.0, 2.0, 3.0], 0.866),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], None),
        ([1.0, 2.0], [1.0, 2.0], None),
    ],
)
def test_rank_correlation(first: list[float], second: list[float], expected: float | None) -> None:
    assert rank_correlation(first, second) == (
        expected if expected is None else pytest.approx(expected, abs=1e-3)
    )


def test_waterfall_goes_by_the_candidate_between() -> None:
    info = waterfall_info(searched())
    assert info is not None
    assert [bar.label for bar in info.bars] == ["+ amp_native", "- ddp, + fsdp"]
    assert [bar.change for bar in info.bars] == pytest.approx([-0.010, -0.005])
    assert [bar.source for bar in info.bars] == ["measured", "measured"]
    assert info.baseline_seconds + sum(bar.change for bar in info.bars) == pytest.approx(info.winner_seconds)
    changed = {part.name: part.after - part.before for part in info.parts}
    assert changed == pytest.approx({"compute": -0.008, "reduce": -0.001, "overhead": -0.001})


def _with_rows(*rows: object) -> SearchOutcome:
    return replace(searched(), rows=rows)  # type: ignore[arg-type]


def test_waterfall_without_a_candidate_between_is_one_bar() -> None:
    rows = searched().rows
    info = waterfall_info(_with_rows(rows[0], rows[2]))
    assert info is not None
    assert [bar.label for bar in info.bars] == ["- ddp, + fsdp, + amp_native"]


def test_waterfall_prefers_the_longest_chain_and_says_what_is_predicted() -> None:
    base = row(
        "base", (DDP,), "lost", "", estimate=estimated(30, 800), trial=measured(40, 800), is_baseline=True
    )
    one = row("one", (DDP, AMP), "lost", "", estimate=estimated(25, 700))
    two = row("two", (DDP, AMP, CHECKPOINT), "lost", "", estimate=estimated(27, 400), trial=measured(33, 400))
    win = row("win", (FSDP, AMP, CHECKPOINT), "won", "", estimate=estimated(20, 300), trial=measured(22, 300))
    info = waterfall_info(_with_rows(win, two, one, base))
    assert info is not None
    assert [(bar.label, bar.source) for bar in info.bars] == [
        ("+ amp_native", "predicted"),
        ("+ checkpoint", "predicted"),
        ("- ddp, + fsdp", "measured"),
    ]


def test_waterfall_of_a_changed_config() -> None:
    base = row("base", (("checkpoint", None),), "lost", "", estimate=estimated(30, 1), is_baseline=True)
    win = row("win", (("checkpoint", {"every_n": 2}),), "won", "", estimate=estimated(20, 1))
    info = waterfall_info(_with_rows(win, base))
    assert info is not None
    assert info.bars[0].label == "checkpoint: defaults → every_n: 2"


def test_a_winning_baseline_has_no_bars_and_nothing_chosen_no_waterfall() -> None:
    base = searched().rows[2]
    alone = waterfall_info(replace(_with_rows(base), best="base"))
    assert alone is not None
    assert alone.bars == ()
    assert waterfall_info(nothing_fits()) is None


def test_pareto() -> None:
    info = pareto_info(searched())
    assert [point.key for point in info.front] == ["win", "slow"]
    assert "boom" not in {point.key for point in info.points}
    assert next(point for point in info.points if point.is_best).key == "win"
