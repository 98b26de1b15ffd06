"""Published training runs: every row is expressed or says why not, and errors are counted both ways."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.estimate.intervals import FILE
from atorch_ns.strategy import Strategy
from benchmarks import published
from benchmarks._claims import claims_of
from benchmarks._published import residuals
from benchmarks._published.runs import Run, read
from benchmarks._published.summary import TIME, Errors, gains, off, tables
from benchmarks.table import RESULTS

RUNS = {each["id"]: each for each in read()}


def _row(run: str, ratio: float, **changes: Any) -> dict[str, Any]:
    row = {
        "run": run,
        "source": "s",
        "device": "d",
        "class": "other",
        "options": ["eager"],
        "published_s": 1.0,
        "predicted_s": ratio,
        "tokens_per_device": 100.0,
        "time_ratio": ratio,
        "memory_ratio": None,
        "predicted_gib": 10.0,
        "within_memory": True,
        "needed_gib": 10.0,
        "missing": "",
    }
    return {**row, **changes}


def test_all_rows_are_there_with_their_sources() -> None:
    assert len(RUNS) == 159
    assert all(each["url"] and each["source"] for each in RUNS.values())
    assert all(each.step_seconds or each.peak_gib or each.missing for each in RUNS.values())


@pytest.mark.parametrize("each", RUNS.values(), ids=RUNS)
def test_a_row_s_degrees_and_batches_agree_with_its_cluster_and_strategy(each: Run) -> None:
    cluster = cluster_from_spec(each.cluster)
    assert (cluster.world_size, cluster.num_nodes) == (each.number("gpus"), each.number("nodes"))
    degrees = math.prod(each.number(column) for column in ("tp", "cp", "dp", "pp"))
    assert degrees == cluster.world_size
    samples = each.number("dp") * each.number("micro_batch") * each.number("micro_batches")
    assert samples == each.number("global_batch")
    if not each.missing:
        assert len(Strategy.load(each.strategy)) == len(each.strategy)


def test_strategies() -> None:
    assert RUNS["litgpt-tinyllama-ddp-thunder"].strategy == [
        ("parallel_mode", [["data", 8]]),
        "ddp",
        ("half", {"dtype": "bf16", "master_weights": False}),
        "compile",
    ]
    hybrid = Strategy.load(RUNS["fms-llama2-7b-A100"].strategy)["fsdp"]
    assert isinstance(hybrid, dict)
    assert hybrid["sharding_strategy"] == "HYBRID_SHARD"
    assert "zero2" in Strategy.load(RUNS["nemo2407-llama2-13b"].strategy), "masters are sharded"
    kept = Strategy.load(RUNS["titan-a100-8b-op"].strategy)["checkpoint"]
    assert kept == {"save_operators": "every_second_product"}


@pytest.mark.parametrize(
    ("run", "first", "last"),
    [
        ("zb-1.5b-m24-1f1b", "transformer.h.2", "transformer.h.20"),
        ("zb-1.5b-m24-interleaved", "transformer.h.0", "transformer.ln_f"),
        ("zb-14.6b-m48-1f1b", "transformer.h.2", "transformer.h.44"),
    ],
)
def test_stages_at_the_ends_have_a_block_less(run: str, first: str, last: str) -> None:
    config = Strategy.load(RUNS[run].strategy)["pipeline_parallel"]
    assert isinstance(config, dict)
    points = config["split_points"]
    assert isinstance(points, list)
    stages = RUNS[run].number("pp") * RUNS[run].number("vpp")
    assert (len(points), points[0], points[-1]) == (stages - 1, first, last)


def test_the_smallest_model_is_predicted_from_one_profile() -> None:
    said: list[str] = []
    found = published.run(quick=True, report=said.append)
    assert len(found.rows) == len(said) == 4
    assert found.settings["profiles"] == 1
    for row in found.rows:
        assert 0.5 < row["time_ratio"] < 2
        assert row["within_memory"]


def test_the_results_are_of_these_rows() -> None:
    rows = json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))["rows"]
    assert [row["run"] for row in rows] == list(RUNS)
    assert all(bool(row["missing"]) is not ("predicted_s" in row) for row in rows)
    for gain in gains(rows):
        assert RUNS[gain.without]["source"] == RUNS[gain.with_it]["source"]
    assert len(gains(rows)) == 29


def test_fused_kernels_keep_what_eager_code_keeps() -> None:
    differ = {
        run["source"] for run in RUNS.values() if not run.missing and run.strategy_of_memory != run.strategy
    }
    assert differ == {
        "korthikanti-2022",
        "megatron-sc21",
        "zero-bubble",
        "megatron-bridge-2026",
        "nemo-automodel-2025",
        "hf-nvidia-blog-2026",
        "megatron-lm-recipes-2026",
    }  # fused kernels by hand, in 16 bits


def test_errors_count_both_ways() -> None:
    assert off(0.8) == pytest.approx(off(1.25)) == pytest.approx(0.25)
    errors = Errors.of([_row("a", 0.8), _row("b", 1.1), _row("c", 1.2), _row("d", 3, time_ratio=None)], TIME)
    assert errors.median == 1.1
    assert errors.middle == pytest.approx(0.2)
    assert errors.num_near == 2
    assert errors.worst == ("a", 0.8)


def test_gains_and_their_signs() -> None:
    names = ("titan-8b-8-eager", "titan-8b-8-compile", "titan-8b-8-float8")
    rows = [
        _row(names[0], 1.0),
        _row(names[1], 1.0, published_s=0.8, predicted_s=0.9),
        _row(names[2], 1.0, published_s=0.5, predicted_s=1.8),
    ]
    compiled, narrow = gains(rows)
    assert (compiled.published, compiled.predicted) == (pytest.approx(1.25), pytest.approx(1 / 0.9))
    assert not compiled.wrong_sign
    assert compiled.error == pytest.approx((1.25 - 1 / 0.9) / 0.25)
    assert narrow.wrong_sign
    text = "\n".join(tables(rows))
    assert f"| compile | {names[0]} | {names[1]} | 1.250 | 1.111 | **56%** |" in text
    assert "**wrong sign**" in text


def test_misses_are_named() -> None:
    rows = [
        _row("titan-8b-8-eager", 1.0, memory_ratio=1.0),
        _row("titan-8b-8-compile", 0.5, memory_ratio=2.0, published_s=0.8, within_memory=False),
        {**_row("c", 1.0), "missing": "no such method", "predicted_s": None, "time_ratio": None},
    ]
    text = "\n".join(tables(rows))
    assert "though they ran (1), in GiB: titan-8b-8-compile 10." in text
    assert "- no such method: c." in text
    claims = {claim.what: claim for claim in claims_of({"benchmark": "published", "rows": rows})}
    over = claims["runs that ran, predicted above the device's memory for sure"]
    assert (over.found, over.n, over.holds) == ("1", 2, False)
    assert "0.50×" in claims["step time over published step time: the worst of all, titan-8b-8-compile"].found


def test_intervals_follow_from_the_rows_and_sources_are_left_out_in_turn() -> None:
    ratios = {"a": (0.5, 1.0), "b": (0.8, 0.8, 0.8, 0.8)}
    rows = [
        _row(f"{source}{place}", ratio, **{"source": source, "class": "Hopper"})
        for source, given in ratios.items()
        for place, ratio in enumerate(given)
    ]
    known = residuals.published_residuals(rows)
    hopper = known["step time", "Hopper"]
    assert hopper.num_runs == 6
    assert (hopper.low, hopper.high) == (pytest.approx(1.02, abs=0.03), pytest.approx(2.0, abs=0.2))
    assert known["step time", "other"] == hopper
    found = {each.source: each.num_within for each in residuals.left_out(rows, TIME)}
    assert found == {"a": 1, "b": 4}  # 0.5 is out of b's, all of b's lie within a's
    assert "| a | 2 | 50% | 25% | 1 of 2 |" in "\n".join(residuals.tables(rows))


def test_the_file_of_intervals_is_what_the_results_give(tmp_path: Path) -> None:
    rows = json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))["rows"]
    path = tmp_path / "residuals.csv"
    residuals.write({**residuals.published_residuals(rows), **residuals.measured_residuals()}, path)
    assert path.read_text() == FILE.read_text(), "run `python -m benchmarks --only published`"
