"""``atorch-ns plan``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atorch_ns import Strategy
from atorch_ns.capture.user_code import load_object
from atorch_ns.cli import app, exit_code, main
from atorch_ns.errors import (
    BackendError,
    InputError,
    LayoutError,
    MissingPackageError,
    SearchError,
    StrategyError,
)
from atorch_ns.operators import OperatorPlan
from atorch_ns.report import TrainingReport
from tests.cli.conftest import Run
from tests.warm import COLD_PYTHON

_JOB = ("--model", "job.py:build", "--sample", "job.py:sample", "--cluster", "2xcpu", "--batch", "8")


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *_JOB, *arguments], catch_exceptions=False)


def test_a_ranked_table_with_parts_and_reasons(job: Path) -> None:
    done = _plan("--loss", "job.py:loss", "--top", "3", "--verbose")
    assert done.exit_code == 0
    for words in (
        "Model, 4.22 k parameters; 2 × cpu",
        "global batch 8 samples",
        "Every figure is a prediction. No trials, ",
        "the shortest predicted step",
        "ddp (baseline)",
        "Step time in parts (predicted)",
        "Operators of one rank's step",
        "aten.addmm",
    ):
        assert words in done.stdout
    assert "profiling one step" in done.stderr
    assert "on meta, without memory" in done.stderr


def test_a_plan_of_operators(job: Path) -> None:
    """Shown with the operators by time, and saved in the form that operator_parallel reads."""
    save = job / "operators.json"
    done = _plan("--operators", "2", "--save", str(save), "--top", "3")
    assert done.exit_code == 0
    for words in (
        "Model in float32 on 2 ranks:",
        "a rank (predicted). No plan is more than",
        "The longest operators (predicted)",
        "operator",
        "exchanges",
        "more",
    ):
        assert words in done.stdout
    plan = OperatorPlan.read(save)
    assert plan.degree == 2
    assert plan.operators
    shown = _plan("--operators", "2", "--json")
    assert OperatorPlan.from_text(shown.stdout) == plan
    with pytest.raises(InputError, match="--operators 4 is more than the cluster's 2 devices"):
        _plan("--operators", "4")
    with pytest.raises(InputError, match="no division fits in"):
        _plan("--operators", "2", "--memory-limit", "0.001MiB")


def test_json_alone_is_on_standard_output(job: Path) -> None:
    done = _plan("--json")
    document = json.loads(done.stdout)
    assert document["kind"] == "atorch_ns report"
    report = TrainingReport.from_json(done.stdout)
    assert report.search is not None
    assert report.search.num_trials == 0
    assert report.search.setting.global_batch == 8
    assert any("the loss used is the mean of the output" in note for note in report.search.setting.notes)


def test_what_it_saves_can_be_used(job: Path) -> None:
    done = _plan("--save", "strategy.json", "--report", "report.html", "--exclude", "compile")
    assert done.exit_code == 0
    strategy = Strategy.load(job / "strategy.json")
    assert (strategy.requires.world_size, strategy.requires.device) == (2, "cpu")
    assert "compile" not in strategy
    assert strategy.provenance["model"] == "Model"
    assert (job / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_included_with_a_config(job: Path) -> None:
    done = _plan("--include", 'checkpoint={"every_n": 2}', "--include", "fsdp", "--json")
    outcome = TrainingReport.from_json(done.stdout).search
    assert outcome is not None
    for row in outcome.rows:
        if row.fate != "pruned":
            assert dict(row.candidate.steps)["checkpoint"] == {"every_n": 2}


def test_a_profile_plans_again_without_the_model(job: Path) -> None:
    first = _plan("--json", "--save-profile", "profile.json")
    again = CliRunner().invoke(
        app, ["plan", "--profile", "profile.json", "--cluster", "2xcpu", "--batch", "8", "--json"]
    )
    assert again.exit_code == 0
    keys = [
        [row["candidate"]["key"] for row in json.loads(done.stdout)["search"]["outcome"]["rows"]]
        for done in (first, again)
    ]
    assert keys[0] == keys[1]


def test_nothing_fits_is_exit_code_3(job: Path, run: Run) -> None:
    done = run("plan", *_JOB, "--memory-limit", "0.01MiB", "--report", "report.json")
    assert done.returncode == 3
    assert "nothing fits" in done.stderr
    assert "needs" in done.stderr
    assert TrainingReport.load(job / "report.json").search is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "--model and --sample missing"),
        (["plan", "--model", "job.py:buidl", "--sample", "job.py:sample"], "Did you mean 'build'"),
        (["plan", "--model", "jbo:build", "--sample", "job.py:sample"], "there is no module 'jbo'"),
        (["plan", "--model", "nowhere.py:build", "--sample", "job.py:sample"], "there is no file nowhere.py"),
        (["plan", "--model", "build", "--sample", "job.py:sample"], "is not a place in code"),
        (["plan", "--model", "job.py:number", "--sample", "job.py:sample"], "is an int; it must be a module"),
        (["plan", "--model", "job.py:sample", "--sample", "job.py:sample"], "must return a torch.nn.Module"),
        (["plan", "--model", "job.py:fails", "--sample", "job.py:sample"], "ValueError: no such corpus"),
        (["plan", "--model", "job.py:build", "--sample", "job.py:fails"], "ValueError: no such corpus"),
        (["plan", *_JOB, "--memory-limit", "a lot"], "Write it as 70GiB"),
        (["plan", *_JOB, "--objective", "speed"], "--objective"),
        (["plan", *_JOB, "--exclude", "fsdpp"], "fsdp"),
        (["plan", *_JOB, "--input-format", "dict"], "unpack_dict"),
        (["plan", *_JOB, "--batch", "0"], "must be at least 1"),
        (
            ["plan", "--model", "job.py:build", "--sample", "job.py:sample", "--cluster", "8xH100-80G"],
            "H100-80GB",
        ),
        (["plan", "--profile", "missing.json"], "cannot be read"),
        (
            ["plan", *_JOB, "--save-profile", "missing/p.json"],
            "--save-profile=missing/p.json: the folder missing does not exist",
        ),
        (["plan", "--nonsense"], "No such option"),
    ],
)
def test_bad_usage_is_exit_code_2_and_a_sentence(
    job: Path, run: Run, arguments: list[str], words: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert ".." not in done.stderr
    if "--save-profile" not in arguments:
        assert done.stdout == ""


def test_where_is_not_said_before_an_error_of_another_option(job: Path, run: Run) -> None:
    done = run("plan", "--model", "job.py:buidl", "--sample", "job.py:sample")
    assert "planning for this machine" not in done.stderr


def test_debug_lets_the_failure_through(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["plan", "--model", "job.py:fails", "--sample", "job.py:sample", "--debug"]
    monkeypatch.setattr(sys, "argv", ["atorch-ns", *arguments])
    with pytest.raises(InputError, match="no such corpus"):
        main()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), 2),
        (SearchError("x"), 3),
        (BackendError("x"), 4),
        (MissingPackageError("x", needed_by="y", install="z"), 4),
        (StrategyError("x"), 2),
        (LayoutError("x"), 2),
        (RuntimeError("x"), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_an_unforeseen_failure_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: str | None) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("atorch_ns.cli._planning.make_cluster", broken)
    done = run("plan", *_JOB)
    assert done.returncode == 1
    assert done.stderr == "atorch-ns: unexpected ZeroDivisionError: oh. --debug shows where.\n"


@pytest.mark.parametrize("verb", ["plan", "estimate", "explain", "report", "diff"])
def test_help_imports_no_torch_and_has_an_example(verb: str) -> None:
    code = (
        f"import sys; sys.argv = ['atorch-ns', {verb!r}, '--help']\n"
        "from atorch_ns.cli import main\n"
        "try: main()\n"
        "except SystemExit: print('heavy:', sorted({'torch', 'optuna', 'grpc'} & set(sys.modules)))\n"
    )
    done = subprocess.run([COLD_PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "heavy: []" in done.stdout
    assert f"Example: atorch-ns {verb}" in done.stdout
    assert "--json" in done.stdout


def test_objects_by_dotted_name() -> None:
    import torch

    assert load_object("torch.optim.AdamW", option="--optimizer") is torch.optim.AdamW
    with pytest.raises(InputError, match="Did you mean 'AdamW'"):
        load_object("torch.optim:AdmW", option="--optimizer")
