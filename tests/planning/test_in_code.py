"""Planning in code: the same figures as the command line's, from every form of model, strategy and cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from atorch_ns.cli import app
from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.errors import InputError, StrategyError
from atorch_ns.planning import estimate, plan, profile
from atorch_ns.planning.offline import plan_offline
from atorch_ns.profile import Profile
from atorch_ns.report import TrainingReport
from atorch_ns.search import SearchSettings
from atorch_ns.strategy import Strategy

CLUSTER = "2xH100-80GB, 2 nodes, ib400"
SAMPLE = torch.zeros(4, 32)


def _model(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))


@pytest.fixture(scope="module")
def known() -> Profile:
    return profile(_model(), SAMPLE)


@pytest.fixture(scope="module")
def file(known: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planning") / "profile.json"
    path.write_text(known.to_json())
    return path


def test_a_model_with_or_without_memory_a_profile_and_its_file_cost_the_same(
    known: Profile, file: Path
) -> None:
    found = estimate(known, "fsdp", CLUSTER, batch=64)
    assert found.peak_bytes > 0
    assert found.step_seconds > 0
    for saved in (file, str(file)):
        assert estimate(saved, "fsdp", CLUSTER, batch=64) == found
    for device in ("meta", "cpu"):
        assert estimate(_model(device), "fsdp", CLUSTER, batch=64, sample=SAMPLE) == found


def test_forms_of_a_strategy_and_of_a_cluster(known: Profile, tmp_path: Path) -> None:
    strategy = Strategy([("fsdp", None), ("amp_native", "bf16")])
    strategy.save(tmp_path / "strategy.json")
    (tmp_path / "cluster.yaml").write_text(
        "devices: 2xH100-80GB\nnodes: 2\nbetween_nodes: ib400\n", encoding="utf-8"
    )
    found = estimate(known, strategy, CLUSTER, batch=64)
    forms: list[Any] = [list(strategy.steps), tmp_path / "strategy.json", strategy.to_bytes()]
    assert all(estimate(known, each, CLUSTER, batch=64) == found for each in forms)
    places = (cluster_from_spec(CLUSTER), tmp_path / "cluster.yaml", str(tmp_path / "cluster.yaml"))
    assert all(estimate(known, strategy, each, batch=64) == found for each in places)


def test_the_command_line_says_the_same(known: Profile, file: Path) -> None:
    options = ("--profile", str(file), "--cluster", CLUSTER, "--batch", "64", "--json")
    figures = json.loads(CliRunner().invoke(app, ["estimate", "--strategy", "fsdp", *options]).stdout)
    found = estimate(known, "fsdp", CLUSTER, batch=64)
    assert figures["memory_bytes"]["peak"] == found.peak_bytes
    assert figures["time_seconds"]["step"] == found.step_seconds
    ranked = json.loads(CliRunner().invoke(app, ["plan", *options]).stdout)["search"]["outcome"]["rows"]
    report = plan(known, CLUSTER, batch=64)
    assert report.search is not None
    assert [row["candidate"]["label"] for row in ranked] == [
        row.candidate.label for row in report.search.rows
    ]


def test_a_plan_is_a_report_that_can_be_saved(known: Profile, tmp_path: Path) -> None:
    report = plan(_model(), CLUSTER, batch=64, sample=SAMPLE, included=["fsdp"], excluded=["compile"])
    assert report.search is not None
    assert report.search.best is not None
    assert "fsdp" in report.strategy
    assert "compile" not in report.strategy
    report.save(tmp_path / "report.json")
    assert TrainingReport.load(tmp_path / "report.json").strategy == report.strategy
    priced = estimate(known, report.strategy, CLUSTER, batch=64)
    winner = report.search.winner
    assert winner is not None
    assert winner.candidate.estimate is not None
    assert winner.candidate.estimate.step_seconds == pytest.approx(priced.step_seconds)


def test_settings_of_the_search(known: Profile) -> None:
    tight = plan(known, CLUSTER, batch=64, search={"memory_limit_gib": 1e-6})
    assert tight.search is not None
    assert tight.search.best is None
    small = plan(known, CLUSTER, batch=64, search=SearchSettings(objective="memory"))
    assert small.search is not None
    assert small.search.settings.objective == "memory"


def test_without_a_cluster_it_is_this_machine(known: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "detect", lambda: cluster_from_spec("2xcpu"))
    assert estimate(known, "ddp", batch=8) == estimate(known, "ddp", "2xcpu", batch=8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": 3}, "the model is an int"),
        ({"model": nn.Linear(2, 2)}, "needs a sample"),
        ({"model": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"sample": SAMPLE}, "a profile already contains its own"),
        ({"cluster": 8}, "the cluster is an int"),
        ({"cluster": "8xH1000"}, "is not a device"),
        ({"batch": 0}, "at least 1, a whole number; it is 0"),
        ({"batch": "64"}, "a whole number; it is '64'"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(known: Profile, arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"model": known, "cluster": CLUSTER, "batch": 64, **arguments}
    model, cluster, rest = given.pop("model"), given.pop("cluster"), given
    for ask in (lambda: estimate(model, "fsdp", cluster, **rest), lambda: plan(model, cluster, **rest)):
        with pytest.raises(InputError, match=said):
            ask()


def test_what_is_left_out_or_changed_is_noted(known: Profile) -> None:
    found = estimate(known, [("parallel_mode", [("data", 16)]), "fsdp", ("fp8", "te")], CLUSTER, batch=64)
    assert any("fp8" in note for note in found.notes)
    assert any("data" in note and "4" in note for note in found.notes)


def test_that_replaced_modules_are_priced_as_without_is_noted(known: Profile) -> None:
    assert not estimate(known, [], "1xH100-80GB").notes
    found = estimate(known, ["module_replace"], "1xH100-80GB")
    assert any("priced as without" in note for note in found.notes)


def test_a_plan_has_no_twins_that_differ_in_what_is_not_priced(known: Profile) -> None:
    def with_it(**arguments: Any) -> list[str]:
        search = plan(known, "1xH100-80GB", **arguments).search
        assert search is not None
        assert any("module_replace: no candidate" in note for note in search.setting.notes) is not arguments
        return [row.candidate.label for row in search.rows if "module_replace" in row.candidate.label]

    assert not with_it()
    assert with_it(included=["module_replace"])
    with pytest.raises(InputError, match=r"excluded is a list of method names; write \['fsdp'\]"):
        plan_offline(known, cluster_from_spec("1xH100-80GB"), excluded="fsdp")


def test_a_limit_is_the_memory_of_the_device_at_most(known: Profile) -> None:
    report = plan(known, CLUSTER, batch=64, search={"memory_limit_gib": 200})
    assert report.search is not None
    assert report.search.setting.memory_limit_bytes == cluster_from_spec(CLUSTER).rank_memory_bytes


def test_a_batch_that_does_not_divide_is_refused(known: Profile) -> None:
    with pytest.raises(
        InputError,
        match="6 samples does not divide evenly over 4 data-parallel ranks and 1 micro-batch: give 4 or 8",
    ):
        estimate(known, "fsdp", CLUSTER, batch=6)
    with pytest.raises(InputError, match="4 data-parallel ranks and 2 micro-batches: give 8,"):
        estimate(known, ["fsdp", ("gradient_accumulation", 2)], CLUSTER, batch=4)


def test_bad_strategies_settings_and_formats(known: Profile) -> None:
    with pytest.raises(StrategyError, match="fsdq"):
        estimate(known, ["fsdq"], CLUSTER)
    with pytest.raises(InputError, match="search: objective"):
        plan(known, CLUSTER, search={"objective": "beauty"})
    with pytest.raises(InputError, match=r"excluded is a list; write \['fsdp'\]"):
        plan(known, CLUSTER, excluded="fsdp")
    with pytest.raises(InputError, match="the input format 'dict' is not one of"):
        profile(_model(), SAMPLE, input_format="dict")  # type: ignore[arg-type]


def test_a_model_that_ends_the_process_is_an_error() -> None:
    class Ends(nn.Module):
        def forward(self, x: Any) -> Any:
            raise SystemExit(3)

    with pytest.raises(InputError, match="ended the process"):
        profile(Ends(), SAMPLE)


def test_the_choice_of_an_input_format_is_a_note() -> None:
    found = profile(_model(), (SAMPLE, SAMPLE))
    assert found.trace is not None
    assert any("only the first item is passed" in note for note in found.trace.notes)


def test_a_small_encoder_on_one_node_gets_no_pipeline() -> None:
    """25 million parameters: experts take compile, ddp and bf16."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1536
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    tokens = torch.zeros(1, 128, dtype=torch.long, device="meta")
    known = profile(model, {"input_ids": tokens, "labels": tokens})
    for batch in (64, 128, 256):
        winner = plan(known, "8xH100-80GB", batch=batch).search.winner
        assert winner is not None
        assert [name for name, size in winner.candidate.axes if size > 1] == ["data"]
        assert {"ddp", "compile"} <= set(dict(winner.candidate.steps))
        assert "bfloat16" in winner.candidate.label
