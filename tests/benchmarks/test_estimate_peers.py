"""Estimators of memory beside each other: reasons, claims, and a tiny run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import estimate_peers
from benchmarks._claims import claims_of
from benchmarks._estimators import OURS
from benchmarks._estimators._estimator import SETUPS, Estimator, Question
from benchmarks._estimators.by_accelerate import ACCELERATE
from benchmarks._estimators.by_deepspeed import DEEPSPEED
from benchmarks._estimators.by_torch import TORCH
from benchmarks._peer_cases import peer_cases
from benchmarks._ranks import on_ranks

pytestmark = pytest.mark.processes


def _setup(name: str) -> Any:
    return next(setup for setup in SETUPS if setup.name == name)


def _question(name: str) -> Question:
    return Question(sized=peer_cases(quick=True)[0], setup=_setup(name))


def _num_parameters(question: Question) -> int:
    return sum(parameter.numel() for parameter in question.sized.case.build().parameters())


def _fails(question: Question) -> Any:
    raise RuntimeError(f"no {question.setup.name} here\nand more")


def test_accelerate_says_sixteen_bytes_a_parameter() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    question = _question("1 process")
    count = _num_parameters(question)
    assert ACCELERATE.start(question)() == pytest.approx(16 * count, rel=0.01)
    assert ACCELERATE.start(_question("1 process, bf16 autocast"))() == pytest.approx(8 * count, rel=0.01)
    assert ACCELERATE.lacks(_setup("FSDP2"))
    assert not ACCELERATE.lacks(_setup("DDP"))


def _asked_deepspeed() -> tuple[str, list[int]]:
    """In a process of its own, whose environment it changes."""
    if reason := DEEPSPEED.prepare():
        return reason, []
    return "", [DEEPSPEED.start(_question(name))() for name in ("ZeRO-2", "FSDP2")]


def test_deepspeed_says_states_of_mixed_precision() -> None:
    pytest.importorskip("transformers")
    ((reason, answers),) = on_ranks(_asked_deepspeed, 1)
    if reason:
        pytest.skip(reason)
    count = _num_parameters(_question("ZeRO-2"))
    largest = 300 * 48  # the embedding
    assert answers == [2 * count + 18 * count // 2, 4 * largest + 18 * count // 2]
    assert DEEPSPEED.lacks(_setup("DDP"))


@pytest.mark.slow
def test_quick_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    broken = Estimator(name="broken", claims="nothing", start=_fails, lacks=lambda setup: "")
    absent = Estimator(name="absent", claims="nothing", start=_fails, prepare=lambda: "it is not installed")
    picky = Estimator(name="picky", claims="nothing", start=_fails, lacks=lambda setup: "it cannot")
    monkeypatch.setattr(estimate_peers, "ESTIMATORS", (OURS, TORCH, broken, absent, picky))
    monkeypatch.setattr(estimate_peers, "_QUICK_SETUPS", [_setup("DDP"), _setup("FSDP2")])
    monkeypatch.setattr(estimate_peers, "_prepared", lambda estimator: estimator.prepare())
    said: list[str] = []
    findings = estimate_peers.run(quick=True, report=said.append)
    rows = [row for row in findings.rows if "answers" in row]
    assert [row["setup"] for row in rows] == ["DDP", "FSDP2"]
    ddp, fsdp = rows
    for row in rows:
        assert row["ours: peak"] == pytest.approx(1, abs=0.08)
        assert row["peak_mib"] > row["states_mib"] > 0
        assert row["answers"]["broken"] == {"reason": f"RuntimeError: no {row['setup']} here"}
        assert row["answers"]["absent"] == {"reason": "it is not installed"}
        assert row["answers"]["picky"] == {"reason": "it cannot"}
    assert fsdp["torch's trackers: peak"] == pytest.approx(1, abs=0.08)
    assert "not allocated" in ddp["answers"]["torch's trackers"]["reason"]
    assert "(DDP; FSDP2): it is not installed" in findings.text
    answered = findings.rows[2]
    assert (answered["ours: peak"], answered["torch's trackers: peak"], answered["picky: peak"]) == (2, 1, 0)


def _data(ours: float, theirs: float | str) -> dict[str, Any]:
    answers = {"ours": {"cpu_s": 0.5}, "theirs": {"cpu_s": 0.1} if theirs != "-" else {"reason": "no"}}
    row = {"model": "M", "setup": "S", "answers": answers, "ours: peak": ours, "theirs: peak": theirs}
    return {"benchmark": "estimate_peers", "rows": [{"model": "median", "ours: peak": 9.0}, row]}


def test_claims_say_who_is_nearer_and_quicker() -> None:
    ours, theirs = claims_of(_data(1.02, 0.5))
    assert ours.holds
    assert "nearer" not in ours.shortfall
    assert "0.5 s of processor time to answer, theirs 0.1" in ours.shortfall
    assert theirs.found == "median 50.0%, worst 50.0%; answers 1 of 1"
    ours, _ = claims_of(_data(1.2, 1.01))
    assert ours.holds is False
    assert "is nearer to the measured peak than we are in 1 of 1 rows" in ours.shortfall
    assert "20.0% off; 8% is asked" in ours.shortfall
    ours, theirs = claims_of(_data(1.0, "-"))
    assert (ours.shortfall, theirs.found) == ("", "no answer here")
