"""The sweep over models: its rows, its file, its tiny configurations and its page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.testing import Case, Outcome
from benchmarks import models
from benchmarks._claims import claims_of
from benchmarks._models.entry import Entry, Unfit, case_of, distance_to_waves, first_floating, make_comparable
from benchmarks._models.page import RESULTS, page, template
from benchmarks._models.row import STRATEGIES, Reference, References, judged, run_row
from benchmarks._models.sweep import Rows, sweep

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
DDP = next(strategy for strategy in STRATEGIES if strategy.name == "ddp")
SEQUENCE = next(strategy for strategy in STRATEGIES if strategy.name == "sequence 2")
REFERENCE = Reference(paths={}, double=False, noise=1e-6, loss_noise=1e-8, rate=1e-2, slowness=1.0)


class Doubling(nn.Module):
    """Two layers; with ``spoil`` ranks compute something else than one process, or fail."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
        self.spoil = spoil

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_initialized():
            if self.spoil == "error":
                raise IndexError("of the model's own")
            if self.spoil == "wrong":
                x = x * 1.01
        out: Tensor = self.layers(x)
        return out


def _entry(spoil: str = "") -> Entry:
    def make() -> Case:
        return case_of(
            Doubling(spoil),
            lambda size, seed: torch.randn(size, 4, generator=torch.Generator().manual_seed(seed)),
            lambda batch, output: distance_to_waves(output),
        )

    return Entry(source="by hand", name=f"Doubling {spoil}".strip(), kind="by hand", make=make)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("spoil", "outcome", "reason"),
    [
        ("", "equal", ""),
        ("wrong", "wrong", "of its update"),
        ("error", "raw error", "IndexError: of the model's own"),
    ],
)
def test_a_row_says_what_came_of_it(spoil: str, outcome: str, reason: str, tmp_path: Path) -> None:
    case = _entry(spoil).case()
    row = run_row(case, DDP, References(case, tmp_path, 60), 60)
    assert (row["is"], reason in row.get("reason", "")) == (outcome, True)


@pytest.mark.timeout(120)
def test_what_we_refuse_is_refused_with_our_reason(tmp_path: Path) -> None:
    case = _entry().case()
    row = run_row(case, SEQUENCE, References(case, tmp_path, 60), 60)
    assert (row["is"], "sequence_parallel" in row["reason"]) == ("refused", True)


@pytest.mark.timeout(120)
def test_batch_norms_are_compared_in_the_same_micro_batches(tmp_path: Path) -> None:
    plain = _entry()
    entry = dataclasses.replace(plain, make=lambda: _with_norm(plain.make()))
    found = References(entry.case(), tmp_path, 60).of(DDP)
    whole, ranks, parts = (torch.load(path, weights_only=False).losses for path in found.paths.values())
    assert [*found.paths] == ["", "ranks", "micro-batches"]
    assert parts != pytest.approx(whole, rel=1e-3)
    assert ranks != pytest.approx(whole, rel=1e-3)


def _with_norm(case: Case) -> Case:
    model = nn.Sequential(nn.BatchNorm1d(4), case.build())
    return dataclasses.replace(case, build=lambda: model)


def _outcome(rank: int, status: Any, **more: Any) -> Outcome[Any]:
    return Outcome(rank=rank, status=status, **more)


def test_a_raw_error_beside_ours_is_raw_and_a_rank_at_the_limit_hangs() -> None:
    ours = _outcome(0, "raised", error_type="InputError", message="no: do something else")
    raw = _outcome(1, "raised", error_type="RuntimeError", message="mat1 and mat2")
    late = _outcome(1, "timed_out", traceback="in wait")
    also = _outcome(1, "raised", error_type="RankError", message="rank 0 failed")
    assert judged([ours, raw], REFERENCE, DDP)["is"] == "raw error"
    assert judged([ours, late], REFERENCE, DDP)["is"] == "hung"
    refused = judged([also, ours], REFERENCE, DDP)
    assert (refused["is"], refused["reason"]) == ("refused", "no: do something else")


@pytest.mark.timeout(120)
def test_a_sweep_goes_on_where_it_was_and_runs_again_what_is_asked_for(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add({"model": "by hand/Doubling", "strategy": "ddp", "is": "hung"})
    rows.path.write_bytes(
        rows.path.read_bytes() + b'{"model": "by hand/Doub'
    )  # killed in the middle of a row
    said: list[str] = []

    def run(again: bool) -> dict[tuple[str, str], dict[str, Any]]:
        sweep(
            [_entry()],
            rows,
            again=again,
            chosen=lambda model, strategy: strategy in ("ddp", "zero1", "expert 2"),
            report=said.append,
            workers=1,
            timeout_s=60,
        )
        return rows.read()

    found = run(False)
    assert {key[1]: row["is"] for key, row in found.items()} == {
        "ddp": "hung",
        "zero1": "equal",
        "expert 2": "no mixture",
    }
    assert run(False) == found
    assert len(said) == 1
    assert run(True)["by hand/Doubling", "ddp"]["is"] == "equal"


def test_rows_are_selected_by_outcome_and_by_name() -> None:
    there = {("a/b", "ddp"): {"is": "wrong"}, ("a/b", "zero1"): {"is": "equal"}, ("a/c", ""): {"is": "unfit"}}
    everything = models.selection("", there)
    assert everything("x/y", "ddp")
    wrong = models.selection("wrong", there)
    assert [wrong("a/b", "ddp"), wrong("a/b", "zero1"), wrong("a/c", "ddp")] == [True, False, False]
    named = models.selection("a/*:zero*, unfit", there)
    assert [named("a/b", "zero1"), named("a/b", "ddp"), named("a/c", "ddp")] == [True, False, True]


def test_chance_and_zeros_are_taken_out_of_a_model() -> None:
    model = make_comparable(Doubling().eval())
    assert model.training
    assert model.layers[2].p == 0.0
    assert model.layers[3].bias.abs().min() > 0


def test_similarities_of_samples_are_no_loss() -> None:
    values = torch.randn(4, 3)
    assert (
        first_floating(
            {"similarities": torch.randn(4, 4), "ids": torch.ones(4, 3).long(), "values": values}, 4
        )
        is values
    )
    with pytest.raises(Unfit, match="a row for each sample"):
        first_floating([torch.ones(3, 3)], 4)


def test_a_mixed_configuration_keeps_every_kind_of_layer() -> None:
    pytest.importorskip("transformers")
    from transformers import Gemma3Config, LlamaConfig

    from benchmarks._models.tiny_configs import SCALES, VOCAB_SIZE, tiny_config

    config = tiny_config(LlamaConfig, SCALES[0], {})
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim, config.vocab_size) == (
        2,
        32,
        8,
        VOCAB_SIZE,
    )
    assert config.use_cache  # as users have it
    mixed = tiny_config(Gemma3Config, SCALES[0], {})
    assert mixed.text_config.num_hidden_layers == len(mixed.text_config.layer_types) == 2
    assert mixed.image_token_id < VOCAB_SIZE
    given = tiny_config(LlamaConfig, SCALES[0], {"llama": {"hidden_size": 64}})
    assert given.hidden_size == 64


def _data() -> dict[str, Any]:
    reason = (
        "tensor=2 divides no layer of {} (fc: no pair of layers to divide). Use another axis than tensor."
    )
    rows = [
        {
            "model": "timm/a",
            "kind": "image",
            "ddp": "equal",
            "tensor 2": "refused",
            "reasons": {"tensor 2": reason.format("Net")},
        },
        {
            "model": "timm/b",
            "kind": "image",
            "ddp": "wrong",
            "tensor 2": "refused",
            "reasons": {"tensor 2": reason.format("Other"), "ddp": "off"},
        },
        {"model": "timm/c", "kind": "image", "unfit": "it needs natten"},
        {
            "model": "by hand/d",
            "kind": "by hand",
            "ddp": "equal",
            "tensor 2": "equal",
            "plan_s": {"tensor 2": 3.5},
        },
    ]
    settings = {"strategies": ["ddp", "tensor 2"], "steps": 3}
    return {
        "benchmark": "models",
        "settings": settings,
        "rows": rows,
        "measured": "today",
        "versions": {"torch": "2"},
    }


def test_the_page_numbers_reasons_and_names_what_is_not_compared() -> None:
    text = page(_data())
    assert "| a | ✓ | 1 |" in text
    assert "| b | **wrong** | 1 |" in text
    assert "1. (2 rows) tensor=2 divides no layer of Net" in text
    assert "- timm/c: it needs natten" in text
    assert "| all | 3 | 2 | 1 | 0 | 0 | 50.0% |" in text


def test_reasons_of_one_kind_have_one_number() -> None:
    first = "tensor=2 divides no layer of ResNet (fc: no pair). Use another axis than tensor."
    second = "tensor=4 divides no layer of Inception3. Use another axis than tensor."
    assert template(first) == template(second) != template("sequence_parallel cannot divide conv1.0 (Conv2d)")


def test_claims_say_what_falls_short() -> None:
    share, rest, faults, plans = claims_of(_data())
    assert (share.found, share.n, share.holds) == ("50.0%", 6, False)
    assert (rest.found, rest.n) == ("75.0%", 4)
    assert "timm/b under ddp" in faults.shortfall
    assert (plans.found, plans.holds) == ("3.5", False)


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8"))), (
        "docs/models.md is not what benchmarks/results say: run `python -m benchmarks._models.page docs/models.md`"
    )
