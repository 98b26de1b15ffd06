"""``atorch-ns doctor``."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from atorch_ns.doctor import Finding, Place
from tests.cli.conftest import Run


def test_quick_checks(run: Run) -> None:
    done = run("doctor", "--only", "ports", "--only", "disk")
    assert done.returncode == 0
    assert "disk: " in done.stdout
    assert "0 failed" in done.stdout
    document = json.loads(run("doctor", "--only", "disk", "--json").stdout)
    assert [each["check"] for each in document["findings"]] == ["disk"]
    assert document["findings"][0]["figures"]["free_bytes"] > 0


def test_a_failure_is_exit_code_4_with_the_line_that_mends_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(place: Place, *, names: tuple[str, ...]) -> Iterator[Finding]:
        assert place.num_ranks == 3
        yield Finding(check="ports", verdict="fail", text="no loopback", fix="ip link set lo up")
        yield Finding(check="disk", verdict="warn", text="slow", fix="buy another")

    monkeypatch.setattr("atorch_ns.doctor.examine", examine)
    done = run("doctor", "--nproc", "3")
    assert done.returncode == 4
    assert "✗ fail  ports: no loopback\n        fix: ip link set lo up" in done.stdout
    assert "0 passed, 1 warnings, 1 failed" in done.stdout
    answer = run("doctor", "--nproc", "3", "--json")
    assert answer.returncode == 4
    assert json.loads(answer.stdout)["counts"] == {"pass": 0, "warn": 1, "fail": 1}
