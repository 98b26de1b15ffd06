"""The page as a browser shows it: nothing is fetched, logged, cut off, too small or too pale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atorch_ns.job import MethodRow, Report
from atorch_ns.pipeline import PipelineStep, StageCosts, get_schedule
from atorch_ns.report import TrainingReport
from atorch_ns.search import SearchOutcome
from atorch_ns.strategy import Strategy
from tests.report.html.browser import Page, browser_page, find_browser
from tests.report.outcomes import MIB, estimated, measured, nothing_fits, row, searched

MEASURE = Path(__file__).with_name("measure.js").read_text()
EXECUTABLE = find_browser()

pytestmark = [
    pytest.mark.skipif(
        EXECUTABLE is None, reason="there is no Chromium; Debian has it in the package chromium"
    ),
    pytest.mark.timeout(180),
]


def _applied() -> Report:
    why = "shards parameters, gradients and the optimizer's state over the ranks of the axis zero"
    return Report(
        strategy=Strategy(["fsdp", ("amp_native", "bf16")]),
        rows=(MethodRow(name="fsdp", settings="atorch_wrap_cls=(Block,)", why=why),),
        notes=("ddp: added, because nothing else averages gradients over the axis data.",),
        world_size=2,
        axes=(("data", 2),),
        device="cpu",
        num_parameters=5_000_000,
        parameter_bytes_per_rank=10 * MIB,
    )


def _pipeline(name: str, num_ranks: int, num_micro_batches: int) -> PipelineStep:
    info = get_schedule(name)
    stages = num_ranks * info.usual_stages
    return PipelineStep(
        schedule=info.name,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        stages_per_rank=info.usual_stages,
        costs=StageCosts.equal(stages, forward=1e-3, backward_input=1e-3, backward_weight=1e-3),
    )


def _one_candidate() -> SearchOutcome:
    only = replace(searched().rows[2], fate="won", reason="the shortest measured step")
    return replace(searched(), rows=(only,), best="base", num_trials=1, pareto=("base",))


def _many_and_long() -> SearchOutcome:
    """Twenty trials close together, one in four failed, of methods with long settings."""
    module = "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlockWithSharedExperts"
    rows = []
    for number in range(1, 21):
        steps = (
            ("fsdp", {"atorch_wrap_cls": module, "n": number}),
            ("amp_native", {"dtype": "bf16"}),
            ("checkpoint", {"wrap_class": module}),
        )
        reason = f"raised on rank 1: ValueError: {module}.forward() got an unexpected keyword argument"
        failed = number % 4 == 0
        figures = estimated(120_000 + 10 * number, 70_000 + 31 * number * number)
        trial = measured(125_000 + 40 * (number % 7), 71_000 + 29 * number * number)
        rows.append(
            row(
                f"k{number}",
                steps,
                "won" if number == 1 else "failed" if failed else "lost",
                reason if failed else "the shortest measured step" if number == 1 else "3.1% slower",
                estimate=figures,
                trial=replace(trial, status="raised", step_seconds=(), reason=reason) if failed else trial,
                trial_number=number,
                is_baseline=number == 2,
            )
        )
    setting = replace(searched().setting, model=module, memory_limit_bytes=80_000 * MIB)
    return replace(searched(), setting=setting, rows=tuple(rows), best="k1", num_trials=20, pareto=("k1",))


REPORTS = {
    "whole": lambda: TrainingReport(applied=_applied(), search=searched()).with_actual([0.030], 420 * MIB),
    "timeline": lambda: TrainingReport(search=searched(), pipeline=_pipeline("interleaved1f1b", 4, 8)),
    "long timeline": lambda: TrainingReport(applied=_applied(), pipeline=_pipeline("1F1B", 32, 128)),
    "one candidate": lambda: TrainingReport(search=_one_candidate()),
    "many and long": lambda: TrainingReport(search=_many_and_long()),
    "nothing fits": lambda: TrainingReport(search=nothing_fits()),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert EXECUTABLE is not None
    with browser_page(EXECUTABLE, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("name", REPORTS)
def test_it_is_legible_wide_and_narrow_light_and_dark(name: str, page: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    REPORTS[name]().save(path)
    page.open(path)
    problems = []
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            page.show(width, scheme)
            found = page.evaluate(MEASURE)
            assert found["pictures"] >= (1 if "timeline" in name else 3)
            problems += [f"{width} {scheme}: {problem}" for problem in found["problems"]]
            page.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert problems == []
    requested = [event["params"]["request"]["url"] for event in page.events if "request" in event["params"]]
    assert requested == [path.as_uri()]
    assert [event for event in page.events if event["method"] != "Network.requestWillBeSent"] == []


def test_the_browser_and_the_measure_find_what_is_wrong(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        '<!DOCTYPE html><html lang="en"><body style="background: #fff"><p style="width: 3000px">wide</p>'
        '<p style="color: #bbb">pale</p><p style="font-size: 7px">small</p>'
        '<svg aria-labelledby="it-title" viewBox="0 0 1000 100" width="300"><text x="0" y="50">tiny</text>'
        '<text x="2" y="50">atop</text></svg><img src="http://127.0.0.1:9/x.png" alt="x"/>'
        "<script>throw Error('no')</script></body></html>"
    )
    page.open(path)
    page.show(390, "light")
    text = " ".join(page.evaluate(MEASURE)["problems"])
    for words in ("leaves the window", "contrast 1.", "7px high", "px high", "lies on"):
        assert words in text
    methods = {event["method"] for event in page.events}
    assert "Runtime.exceptionThrown" in methods
    assert any("127.0.0.1" in event["params"].get("request", {}).get("url", "") for event in page.events)
