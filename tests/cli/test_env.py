"""``atorch-ns env``."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest
import torch

from atorch_ns import __version__
from tests.cli.conftest import Run


def test_what_an_issue_needs(run: Run) -> None:
    found = json.loads(run("env", "--json").stdout)
    assert found["atorch_ns"] == __version__
    assert found["torch"]["version"] == torch.__version__
    assert "gloo" in found["torch"]["backends"]
    assert found["cpu"]["usable_cores"] >= 1
    assert found["memory"]["usable_bytes"] <= found["memory"]["machine_bytes"]
    assert found["packages"]["optuna"]
    assert "fsdp" in found["methods"]["atorch-ns"]
    text = run("env").stdout
    for title in found:
        if title != "schema":
            assert f"\n{title}" in f"\n{text}"


def test_no_secrets_names_or_paths(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATORCH_NS_ENGINE_TOKEN", "hunter2")
    monkeypatch.setenv("WANDB_API_KEY", "hunter3")
    monkeypatch.setenv("MASTER_ADDR", "gpu17.example.org")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for done in (run("env"), run("env", "--json")):
        assert "hunter" not in done.stdout
        assert "example.org" not in done.stdout
        assert "WANDB_API_KEY" not in done.stdout
        assert "NCCL_DEBUG" in done.stdout
        assert "(set)" in done.stdout
        for path in (str(tmp_path), str(Path.home()), str(Path.cwd())):
            assert path == "/" or path not in done.stdout
    host = socket.gethostname()
    assert host == "localhost" or host not in run("env").stdout
    assert getpass.getuser()
