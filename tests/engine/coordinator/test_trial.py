from __future__ import annotations

from dataclasses import replace

import pytest

from atorch_ns.engine.coordinator.trial import merge_reports
from atorch_ns.engine.trial.report import RankReport
from atorch_ns.search import TrialOutcome, TrialStatus, from_json, to_json
from tests.engine.fake_search import report


def test_all_went_well() -> None:
    merged = merge_reports([report(3, 1, seconds=0.02), report(3, 0, seconds=0.02)])
    assert merged.status == "ok"
    assert merged.step_seconds == (0.02,) * 4
    assert merged.peak_bytes == (1000, 1001), "by rank, whoever came first"
    assert merged.rank is None
    assert merged.reason == ""


def test_ranks_that_time_apart_count_as_the_slowest() -> None:
    one, two = report(1, 0), replace(report(1, 1), step_seconds=(0.03, 0.005, 0.03))
    assert merge_reports([one, two]).step_seconds == (0.03, 0.01, 0.03)


def test_a_peak_that_one_rank_did_not_measure_is_no_peak() -> None:
    assert merge_reports([report(1, 0), replace(report(1, 1), peak_bytes=None)]).peak_bytes == ()


def test_a_cancelled_rank_is_not_the_cause() -> None:
    reports = [
        report(1, 0, "cancelled"),
        report(1, 1, "out of memory", reason="4.1 GiB"),
        report(1, 2, "cancelled"),
    ]
    merged = merge_reports(reports)
    assert (merged.status, merged.rank, merged.reason, merged.log) == (
        "out of memory",
        1,
        "4.1 GiB",
        "/tmp/log-1",
    )


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        (("raised", "RuntimeError: Connection closed by peer [127.0.0.1]:4"), ("died", "SIGKILL"), "died"),
        (
            ("raised", "RuntimeError: Connection closed by peer"),
            ("raised", "ValueError: no such word"),
            "raised",
        ),
        (("hung", "120 s"), ("raised", "ValueError: no such word"), "raised"),
        (("raised", "RuntimeError: Connection reset by peer"), ("cancelled", ""), "raised"),
        (("hung", "120 s"), ("hung", "121 s"), "hung"),
        (("ok", ""), ("non-finite", "loss is nan in step 2"), "non-finite"),
        (("stopped early", ""), ("ok", ""), "stopped early"),
    ],
)
def test_the_cause_wins_over_its_consequences(
    first: tuple[TrialStatus, str], second: tuple[TrialStatus, str], cause: TrialStatus
) -> None:
    merged = merge_reports(
        [report(1, 0, first[0], reason=first[1]), report(1, 1, second[0], reason=second[1])]
    )
    assert merged.status == cause
    if "ValueError" in second[1] or cause == "died":
        assert merged.rank == 1
        assert merged.reason == second[1]


def test_among_equals_the_first_report_is_the_cause() -> None:
    merged = merge_reports([report(1, 1, "raised", reason="b"), report(1, 0, "raised", reason="a")])
    assert (merged.rank, merged.reason) == (1, "b")


def test_the_rank_that_refused_says_who_it_was() -> None:
    refused = RankReport(task_id=1, rank=1, status="refused", reason="no", refused_by="picky")
    lost = RankReport(task_id=1, rank=0, status="raised", reason="Connection closed by peer")
    merged = merge_reports([lost, refused])
    assert (merged.status, merged.refused_by) == ("refused", "picky")
    assert from_json(TrialOutcome, to_json(merged)) == merged


def test_outcomes_of_earlier_versions_are_read() -> None:
    assert from_json(TrialOutcome, '{"status": "refused", "reason": "no"}').refused_by is None
