"""``atorch-ns doctor``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from atorch_ns.doctor import Finding, Place, Who
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


def test_under_a_launcher_rank_0_prints_and_all_end_alike(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def examine_nodes(place: Place, who: Who, names: Sequence[str]) -> Iterator[Finding]:
        assert who.num_nodes == 2
        assert names == ["reach"]
        yield Finding(check="reach", verdict="fail", text="node 1 (b)" if who.rank == 0 else "", fix="")

    monkeypatch.setattr("atorch_ns.doctor.examine_nodes", examine_nodes)
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for rank, printed in (("0", "✗ fail  reach: node 1 (b)"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        done = run("doctor", "--only", "reach")
        assert done.returncode == 4
        assert printed in done.stdout
        assert bool(done.stdout) == bool(printed)
    done = run("doctor", "--nproc", "2")
    assert done.returncode == 2
    assert "the launcher has started the ranks" in done.stderr


def test_checks_of_several_nodes_need_a_launcher(run: Run) -> None:
    done = run("doctor", "--only", "reach")
    assert done.returncode == 2
    assert "--only='reach' is about several nodes" in done.stderr
