"""A pipeline's timeline: its figures, its text, its picture, and its place in the report."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from atorch_ns.errors import InputError
from atorch_ns.pipeline import PipelineStep, StageCosts, get_schedule
from atorch_ns.report import TrainingReport, timeline_info, timeline_text
from atorch_ns.report.html.bar_charts import timeline_picture
from atorch_ns.report.html.svg import WIDTH
from atorch_ns.report.text.tables import timeline_table
from tests.report.outcomes import searched

SVG = "{http://www.w3.org/2000/svg}"


def _step(name: str, num_ranks: int, num_micro_batches: int) -> PipelineStep:
    """One millisecond for each of forward, input and weights."""
    info = get_schedule(name)
    return PipelineStep(
        schedule=info.name,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        stages_per_rank=info.usual_stages,
        costs=StageCosts.equal(
            num_ranks * info.usual_stages,
            forward=1e-3,
            backward_input=1e-3,
            backward_weight=1e-3,
            recompute=1e-3 if info.recomputes else 0.0,
        ),
    )


def test_the_info_has_every_pass_and_the_idle_shares() -> None:
    info = timeline_info(_step("1F1B", 4, 8))
    assert (info.schedule, info.num_micro_batches, info.kinds, info.num_laps) == ("1F1B", 8, ("F", "B"), 1)
    assert info.step_seconds == pytest.approx(0.033)
    assert info.bubble_share == pytest.approx(3 / 11)
    assert [row.stages for row in info.rows] == [(0,), (1,), (2,), (3,)]
    assert [row.live_micro_batches for row in info.rows] == [(4,), (3,), (2,), (1,)]
    last = info.rows[3]
    assert [(block.kind, block.micro_batch) for block in last.blocks[:4]] == [
        ("F", 0),
        ("B", 0),
        ("F", 1),
        ("B", 1),
    ]
    assert (last.blocks[0].start, last.blocks[0].end) == pytest.approx((0.003, 0.004))
    assert last.busy_seconds == pytest.approx(0.024)


def test_later_stages_of_a_rank_are_told_apart() -> None:
    info = timeline_info(_step("zbv", 2, 4))
    assert [row.stages for row in info.rows] == [(0, 3), (1, 2)]
    assert {(block.stage, block.lap) for block in info.rows[0].blocks} == {(0, 0), (3, 1)}


def test_recomputations_are_passes_of_their_own() -> None:
    report = TrainingReport().with_pipeline(_step("shifted_critical_path", 4, 8))
    assert TrainingReport.from_json(report.to_json()) == report
    info = report.timeline_info
    assert info is not None
    assert info.kinds == ("F", "R", "B")
    assert "F forward, R recomputation, B backward, · idle" in str(report)
    picture = timeline_picture(info)
    assert "recomputation" in picture
    assert picture.count('class="p2"') == 1 + 3  # the legend, and all ranks but the last


def test_of_many_ranks_some_are_shown_the_ends_among_them() -> None:
    info = timeline_info(_step("gpipe", 40, 1))
    shown = [row.rank for row in info.first(16)]
    assert len(shown) == len(set(shown)) == 16
    assert (shown[0], shown[-1]) == (0, 39)
    assert info.first(40) == info.rows


def test_the_text_is_a_letter_for_each_slice_of_time() -> None:
    assert timeline_text(timeline_info(_step("1F1B", 2, 2))).splitlines() == [
        "1F1B on 2 ranks, 2 micro-batches: the passes take 9.00 ms, and ranks are idle for 33% of that time (predicted).",
        "  rank 0     FF··BB·BB  33% idle",
        "  rank 1     ·FBBFBB··  33% idle",
        "  F forward, B backward, · idle",
    ]


def test_the_text_fits_its_width_whatever_the_pipeline() -> None:
    text = timeline_text(timeline_info(_step("interleaved1f1b", 24, 48)), width=100)
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines[1:-2])
    assert "and 8 ranks in between" in text
    assert "small letters: a rank's later stages" in lines[-1]
    assert any(letter in lines[1] for letter in "fb")


def test_a_pipeline_that_takes_no_time_is_drawn_too() -> None:
    step = replace(
        _step("gpipe", 2, 2), costs=StageCosts.equal(2, forward=0, backward_input=0, backward_weight=0)
    )
    info = timeline_info(step)
    assert "0% idle" in timeline_text(info)
    assert timeline_picture(info).endswith("</svg>")


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_micro_batches"), [("1F1B", 4, 8), ("zbv", 4, 8), ("gpipe", 33, 99)]
)
def test_the_picture_stays_in_its_frame_and_draws_every_row(
    name: str, num_ranks: int, num_micro_batches: int
) -> None:
    info = timeline_info(_step(name, num_ranks, num_micro_batches))
    text = timeline_picture(info)
    picture = ElementTree.fromstring(text)
    height = float(picture.get("height", 0))
    assert len(text) < 60_000
    idle = [box for box in picture.iter(f"{SVG}rect") if box.get("class") == "idle"]
    assert len(idle) == min(num_ranks, 16) + 1  # and the legend's
    for path in picture.iter(f"{SVG}path"):
        for part in path.get("d", "").rstrip("z").split("z"):
            x, y, length = (
                float(number) for number in part[1:].replace("h", " ").replace("v", " ").split()[:3]
            )
            assert x >= 0
            assert length > 0
            assert x + length <= WIDTH
            assert 0 <= y <= height
    for word in picture.iter(f"{SVG}text"):
        assert 0 <= float(word.get("x", 0)) <= WIDTH
        assert 0 <= float(word.get("y", 0)) <= height


def test_wide_blocks_are_numbered_and_thin_ones_joined() -> None:
    wide = ElementTree.fromstring(timeline_picture(timeline_info(_step("1F1B", 4, 8))))
    numbers = [word.text for word in wide.iter(f"{SVG}text") if word.get("class") == "on"]
    assert len(numbers) == 4 * 8 * 2
    assert set(numbers) == {str(index) for index in range(8)}
    thin = ElementTree.fromstring(timeline_picture(timeline_info(_step("1F1B", 4, 400))))
    words = [word.text for word in thin.iter(f"{SVG}text")]
    assert "several passes" in words
    assert not [word for word in thin.iter(f"{SVG}text") if word.get("class") == "on"]


def test_the_sheet_has_a_line_for_each_rank() -> None:
    sheet = timeline_table(timeline_info(_step("zbv", 2, 4)))
    assert [row[:2] for row in sheet.rows] == [("0", "0, 3"), ("1", "1, 2")]
    assert all(row[3].endswith("%") for row in sheet.rows)


def test_the_report_has_the_timeline_in_every_form() -> None:
    report = TrainingReport(search=searched()).with_pipeline(_step("1F1B", 2, 4))
    assert report.timeline_info == timeline_info(_step("1F1B", 2, 4))
    assert "1F1B on 2 ranks, 4 micro-batches" in str(report)
    page = report.to_html()
    assert page.count('id="timeline-title"') == 1
    assert "The pipeline&#39;s step" in page
    assert TrainingReport.from_json(report.to_json()) == report


def test_a_report_without_a_pipeline_is_as_before() -> None:
    report = TrainingReport(search=searched())
    assert report.timeline_info is None
    assert "pipeline" not in json.loads(report.to_json())
    assert 'id="timeline' not in report.to_html()


def test_a_damaged_pipeline_in_a_file_is_refused() -> None:
    document = json.loads(TrainingReport().with_pipeline(_step("1F1B", 2, 4)).to_json())
    document["pipeline"]["schedule"] = "2F2B"
    with pytest.raises(InputError, match=r"damaged report.*no pipeline schedule '2F2B'"):
        TrainingReport.from_json(json.dumps(document))
    document["pipeline"]["schedule"] = "PreRecompute1F1B"
    document["pipeline"]["num_micro_batches"] = 1
    with pytest.raises(InputError, match=r"damaged report.*1 micro-batch and 2 stages"):
        TrainingReport.from_json(json.dumps(document))
