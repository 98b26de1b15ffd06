"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atorch_ns import Strategy, __version__
from atorch_ns.cli import app
from tests.warm import COLD_PYTHON


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from atorch_ns.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['atorch-ns', '--help']\n"
        "from atorch_ns.cli import main\n"
        "try: main()\n"
        "except SystemExit: print('torch' in sys.modules)\n"
    )
    done = subprocess.run([COLD_PYTHON, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "strategy" in done.stdout
    assert done.stdout.strip().endswith("False")


def test_version_and_methods() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output.strip() == __version__
    rows = json.loads(runner.invoke(app, ["methods", "--json"]).output)
    assert {"fsdp", "amp_native"} <= {row["name"] for row in rows}
    one = runner.invoke(app, ["methods", "native_dynamo"]).output
    assert "backend" in one
    fsdp = runner.invoke(app, ["methods", "fsdp"]).output
    assert "cannot be combined with:" in fsdp
    assert "combines with: " in fsdp
    row = next(row for row in rows if row["name"] == "fsdp")
    assert "amp_native" in row["composes_with"]
    assert "ddp" in row["conflicts"]


def test_strategy_verbs(tmp_path: Path) -> None:
    runner = CliRunner()
    first, second = tmp_path / "a.json", tmp_path / "b.yaml"
    Strategy(["fsdp", ("amp_native", "bf16")]).save(first)
    Strategy(["fsdp", ("amp_native", "fp16")]).save(second)
    assert "amp_native" in runner.invoke(app, ["strategy", "show", str(first)]).output
    shown = runner.invoke(app, ["strategy", "show", "--json", str(second)]).output
    assert Strategy.load(shown) == Strategy.load(second)
    valid = runner.invoke(app, ["strategy", "validate", str(first), "--world-size", "4"])
    assert valid.exit_code == 0
    assert "data" in valid.output
    differs = runner.invoke(app, ["strategy", "diff", str(first), str(second)])
    assert differs.exit_code == 1
    assert runner.invoke(app, ["strategy", "diff", str(first), str(first)]).exit_code == 0
    old = tmp_path / "old"
    old.write_bytes(pickle.dumps([("fsdp", None, False)]))
    assert runner.invoke(app, ["strategy", "convert", str(old), str(tmp_path / "new.json")]).exit_code == 0
    assert Strategy.load(tmp_path / "new.json").names == ("fsdp",)


def test_an_invalid_strategy_is_an_answer_and_a_missing_one_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    Strategy(["fsdp", "zero1"]).save(path)
    invalid = _run("strategy", "validate", str(path), "--world-size", "2")
    assert invalid.returncode == 1
    assert "not valid for 2 processes" in invalid.stderr
    assert _run("strategy", "validate", str(tmp_path / "missing.json")).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["strategy", "show", "missing.json"], 2, "no such strategy file"),
        (["methods", "fsdpp"], 2, "Did you mean 'fsdp'"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_bad_input_has_a_message_and_a_code(arguments: list[str], code: int, words: str) -> None:
    done = _run(*arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
