"""The report as an object, a file, a text and a page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from atorch_ns.errors import InputError
from atorch_ns.job import MethodRow, Report
from atorch_ns.report import TrainingReport, search_text
from atorch_ns.report.pictures import save_pictures
from atorch_ns.search import SearchOutcome
from atorch_ns.strategy import Strategy
from tests.report.outcomes import MIB, estimated, measured, nothing_fits, row, searched


def _applied() -> Report:
    return Report(
        strategy=Strategy(["fsdp", ("amp_native", "bf16")]),
        rows=(MethodRow(name="fsdp", settings="", why="shards <everything>"),),
        notes=("a note",),
        world_size=2,
        axes=(("data", 2),),
        device="cpu",
        num_parameters=5_000_000,
        parameter_bytes_per_rank=10 * MIB,
    )


def _report() -> TrainingReport:
    return TrainingReport(applied=_applied(), search=searched())


def test_it_stands_for_what_was_applied() -> None:
    report = _report()
    assert report.strategy == _applied().strategy
    assert (report.world_size, report.axes, report.device) == (2, (("data", 2),), "cpu")
    assert (report.num_parameters, report.parameter_bytes_per_rank) == (5_000_000, 10 * MIB)
    assert (report.rows, report.notes) == (_applied().rows, ("a note",))


def test_without_a_search_it_reads_as_before() -> None:
    assert str(TrainingReport(applied=_applied())) == str(_applied())


def test_an_offline_plan_has_a_strategy_but_nothing_applied() -> None:
    report = TrainingReport(search=searched())
    assert report.strategy.names == ("fsdp", "amp_native")
    assert report.strategy.requires.world_size == 2
    assert report.strategy.provenance["step_seconds_measured"] == pytest.approx(0.025)
    with pytest.raises(InputError, match="nothing was applied"):
        _ = report.world_size


def test_the_text_says_what_was_chosen_why_and_where_figures_come_from() -> None:
    text = search_text(searched())
    for words in (
        "One step takes 25.0 ms ±0.2 ms (measured, n=5). It is 1.60× as fast as the baseline ddp",
        "Peak memory: 410 MiB (measured, the highest of 2 ranks) of 1000 MiB per rank.",
        "No candidate is likely to take less than 24.0 ms, so at most 4.0% of the step is left to gain (predicted).",
        "✗ failed",
        "○ pruned (memory)",
        "needs 1.17 GiB",
        "re-priced plan equals the objective: passed",
        "the loss is the output's own",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 140


def test_a_long_list_is_cut_and_counted() -> None:
    rows = searched().rows
    many = [
        row(
            f"k{number}", (("fsdp", {"n": number}),), "untried", "slower", estimate=estimated(50 + number, 10)
        )
        for number in range(30)
    ]
    report = TrainingReport(search=replace(searched(), rows=(*rows, *many)))
    assert "and 24 more: 24 untried" in str(report)
    assert "k29" not in str(report)


def test_when_nothing_fits_it_says_what_would() -> None:
    text = str(TrainingReport(search=nothing_fits()))
    assert "The only candidate cannot be used." in text
    assert "needs 3.1 GiB more on rank 1; try checkpoint" in text


def _planned() -> SearchOutcome:
    rows = [replace(each, trial=None, trial_number=0, corrected_seconds=None) for each in searched().rows]
    best = replace(rows[2], fate="won", reason="the shortest predicted step")
    others = [replace(rows[0], fate="untried"), replace(rows[1], fate="untried"), rows[5]]
    return replace(
        searched(),
        rows=(best, *others),
        best="base",
        num_trials=0,
        noise=0.0,
        lower_bound_seconds=None,
        stop_reason="planned offline: 4 strategies were priced",
    )


def test_a_plan_speaks_of_predictions_alone() -> None:
    report = TrainingReport(search=_planned())
    for text in (search_text(_planned()), report.to_html()):
        assert "✓ chosen" in text
        assert "· not chosen" in text
        assert "no other candidate is reliably predicted to be better" in text
        for word in ("and measured", "untried", "won<", "not tried", "Only the baseline", "diamonds are"):
            assert word not in text
    assert "4 candidates listed: 3 considered, 1 pruned" in search_text(_planned())


def test_one_trial_is_no_plural() -> None:
    outcome = replace(searched(), num_trials=1)
    assert "1 trial, 12.5 s in total" in search_text(outcome)


def test_a_slower_choice_is_so_many_times_the_time() -> None:
    rows = searched().rows
    slower = replace(rows[0], trial=measured(100, 100))
    text = search_text(replace(searched(), rows=(slower, *rows[1:])))
    assert "2.50× as long as the baseline ddp" in text
    assert "0.40×" not in text


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("H100-80GB", "cuda"), ("my own", None)])
def test_a_plan_requires_the_device_it_was_made_for(name: str, device: str | None) -> None:
    outcome = replace(_planned(), setting=replace(_planned().setting, device=name))
    assert TrainingReport(search=outcome).strategy.requires.device == device


def test_predicted_against_actual() -> None:
    report = _report().with_actual([0.030, 0.031, 0.029], 420 * MIB)
    info = report.actual_info
    assert info is not None
    assert info.actual_seconds.value == pytest.approx(0.030)
    assert info.time_error == pytest.approx(20 / 30 - 1)
    assert info.trial_error == pytest.approx(25 / 30 - 1)
    assert info.memory_error == pytest.approx(400 / 420 - 1)
    assert "the estimate alone was off by -33%" in str(report)


@pytest.mark.parametrize("steps", [[], [0.0], [float("nan")], [float("inf")]])
def test_actual_steps_must_be_times(steps: list[float]) -> None:
    with pytest.raises(InputError, match="positive times"):
        _report().with_actual(steps)


def test_refit_gives_what_was_learned(tmp_path: Path) -> None:
    learned = _report().with_actual([0.030, 0.031, 0.029]).refit(tmp_path / "calibration.json")
    assert (tmp_path / "calibration.json").exists()
    assert learned.factors("cpu", 2).num_steps == 3
    with pytest.raises(InputError, match="there was no search"):
        TrainingReport(applied=_applied()).refit()


def test_json_comes_back_equal(tmp_path: Path) -> None:
    report = _report().with_actual([0.030], 420 * MIB)
    report.save(tmp_path / "report.json")
    assert TrainingReport.load(tmp_path / "report.json") == report
    assert json.loads(report.to_json())["schema"] == 1


def test_json_holds_no_infinities() -> None:
    outcome = replace(searched(), rows=(replace(searched().rows[0], trial=measured(25, 410, num_steps=1)),))
    text = TrainingReport(search=replace(outcome, noise=float("inf"))).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert TrainingReport.from_json(text).search == replace(outcome, noise=float("inf"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "not a report"),
        ('{"schema": 1, "steps": []}', "not a report"),
        ('{"kind": "atorch_ns report", "schema": 9}', "schema 9"),
        ('{"kind": "atorch_ns report", "schema": 1}', "damaged report"),
        (
            '{"kind": "atorch_ns report", "schema": 1, "applied": null, "search": {}, "actual": null}',
            "damaged",
        ),
    ],
)
def test_what_is_no_report_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TrainingReport.from_json(text, source="report.json")


def test_saving_needs_a_known_suffix_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.json, \.html, \.txt"):
        _report().save(tmp_path / "report.pdf")
    with pytest.raises(InputError, match="cannot be written"):
        _report().save(tmp_path / "missing" / "report.json")
    with pytest.raises(InputError, match="cannot be read"):
        TrainingReport.load(tmp_path / "missing.json")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.html"
    with pytest.raises(InputError) as error:
        _report().save(path)
    assert str(error.value) == f"{path} cannot be written: No such file or directory."


def _page(report: TrainingReport) -> tuple[str, ElementTree.Element]:
    text = report.to_html()
    doctype, _, body = text.partition("\n")
    assert doctype == "<!DOCTYPE html>"
    return text, ElementTree.fromstring(body)


@pytest.mark.parametrize(
    "report",
    [
        _report().with_actual([0.030]),
        TrainingReport(search=nothing_fits()),
        TrainingReport(applied=_applied()),
        TrainingReport(),
    ],
    ids=["whole", "nothing fits", "no search", "nothing"],
)
def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(report: TrainingReport) -> None:
    text, _ = _page(report)
    bare = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|//|url\(|@import|<script|<link|<img|<iframe|src=|href=", bare)


def test_the_page_has_every_picture_once_and_each_is_described() -> None:
    _, page = _page(_report())
    pictures = page.findall(".//{http://www.w3.org/2000/svg}svg")
    names = {picture.get("aria-labelledby", "").split("-title")[0] for picture in pictures}
    assert names == {"memory", "time", "waterfall", "pareto", "history", "accuracy-time", "accuracy-memory"}
    assert len(names) == len(pictures)
    ids = [element.get("id") for element in page.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for picture in pictures:
        title, description = picture[0], picture[1]
        assert title.tag.endswith("title")
        assert title.text
        assert description.tag.endswith("desc")
        assert description.text


def test_pictures_stay_inside_their_frames() -> None:
    _, page = _page(_report())
    for picture in page.iter("{http://www.w3.org/2000/svg}svg"):
        width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
        for box in picture.iter("{http://www.w3.org/2000/svg}rect"):
            x, y = float(box.get("x", 0)), float(box.get("y", 0))
            assert x >= 0
            assert x + float(box.get("width", 0)) <= width
            assert y + float(box.get("height", 0)) <= height
        for word in picture.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 <= float(word.get("x", 0)) <= width
            assert 0 <= float(word.get("y", 0)) <= height


def test_the_page_escapes_what_users_wrote() -> None:
    evil = "<script>alert('x')</script>\"&"
    rows = searched().rows
    bad = replace(rows[0], reason=evil, candidate=replace(rows[0].candidate, label=evil))
    outcome = replace(searched(), rows=(bad, *rows[1:]), checks=(evil,))
    outcome = replace(outcome, setting=replace(outcome.setting, model=evil, notes=(evil,)))
    text, page = _page(TrainingReport(applied=_applied(), search=outcome))
    assert "<script" not in text
    assert evil in "".join(page.itertext())


def test_the_page_names_fates_in_words() -> None:
    text, _ = _page(_report())
    for words in (
        "✓ won",
        "– lost",
        "✗ failed",
        "1 pruned, each with its reason",
        "shards &lt;everything&gt;",
    ):
        assert words in text


def test_the_pictures_stand_alone(tmp_path: Path) -> None:
    paths = save_pictures(_report(), tmp_path / "pictures")
    assert [path.stem for path in paths][:2] == ["memory", "time"]
    for path in paths:
        picture = ElementTree.fromstring(path.read_text())
        _, _, width, height = map(float, picture.get("viewBox", "").split())
        shown = [float(picture.get(name, 0)) for name in ("width", "height")]
        assert shown == pytest.approx([1.5 * width, 1.5 * height], abs=0.5)
        assert "--bg:" in (picture.findtext("{http://www.w3.org/2000/svg}style") or "")
    assert save_pictures(TrainingReport(applied=_applied()), tmp_path / "none") == []


def test_a_winner_that_was_not_checked_is_said() -> None:
    check = "numerics against one process, with SGD: could not be run: too little memory"
    assert "Not checked: " not in search_text(searched())
    text = " ".join(search_text(replace(searched(), checks=(check,))).split())
    assert f"Not checked: {check}. `atorch-ns verify`" in text
