"""``atorch-ns calibrate``: on ranks of its own, under torchrun and srun, and what can go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from atorch_ns.cli.calibrate import slurm_variables
from atorch_ns.cluster import cluster_from_spec
from atorch_ns.errors import BackendError
from atorch_ns.planning import estimate
from atorch_ns.processes.ranks import reserve_port
from tests.cli.conftest import Run

_CODE = "from atorch_ns.cli import main; main()"
_MEASURED = "devices: 2xcpu\nmeasured: {machine: another}\n"
pytestmark = pytest.mark.timeout(150)


@contextlib.contextmanager
def _started(
    *arguments: str, launcher: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    program = [*launcher, "-m", "atorch_ns.cli"] if launcher else ["-c", _CODE]
    process = subprocess.Popen(
        [sys.executable, *program, "calibrate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, **(variables or {})},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_two_ranks_measure_a_cluster_that_is_planned_for(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(_MEASURED)  # an earlier one is replaced
    with _started("--nproc", "2", "--seconds", "2", "-o", str(path)) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "measuring 2 ranks, each " in err
    assert "round 3: " in err
    assert f"figures written to {path}" in err
    assert "products, float32" in out
    assert "all_reduce within a node, 4 MiB" in out
    assert "send within a node, 4 KiB" in out
    assert "overlap with computation within a node" in out
    cluster = cluster_from_spec(path)
    assert (cluster.world_size, cluster.num_nodes, cluster.device_type) == (2, 1, "cpu")
    assert cluster.hardware is not None
    assert cluster.hardware.measured
    assert cluster.hardware.device.source == cluster.hardware.within_node.source == "measured on 2 × cpu"
    assert {"all_reduce", "all_gather", "send"} <= set(cluster.hardware.within_node.collectives)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    sample = torch.zeros(8, 64)
    by_file = estimate(model, ["ddp"], path, sample=sample, batch=16)
    assert by_file.step_seconds == estimate(model, ["ddp"], cluster, sample=sample, batch=16).step_seconds
    assert by_file.step_seconds != estimate(model, ["ddp"], "2xcpu", sample=sample, batch=16).step_seconds


def test_json_holds_the_cluster_and_the_comparison(run: Run, tmp_path: Path, inline_ranks: None) -> None:
    done = run("calibrate", "--nproc", "1", "--seconds", "0.1", "-o", "c.json", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["cluster"] == json.loads((tmp_path / "c.json").read_text())
    assert {"figure", "unit", "measured", "table", "share"} == set(document["comparisons"][0])


def test_under_torchrun_the_given_ranks_measure(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with _started("--seconds", "1", "-o", str(path), launcher=torchrun) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("start of an operator") == err.count("figures written to") == 1
    assert cluster_from_spec(path).world_size == 2


def _srun(rank: int, port: int, **others: str) -> dict[str, str]:
    """The variables that srun gives to one of two tasks on two nodes."""
    return {
        "SLURM_JOB_ID": "4123456",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
        **others,
    }


def test_tasks_of_srun_measure_between_their_nodes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    options = ("--seconds", "1", "-o", str(path))
    with (
        reserve_port() as port,
        _started(*options, variables=_srun(0, port)) as first,
        _started(*options, variables=_srun(1, port)) as other,
    ):
        out, err = first.communicate(timeout=120)
        assert other.wait(timeout=60) == 0
    assert first.returncode == 0, err
    assert "measuring 2 ranks on 2 nodes" in err
    assert "all_gather between nodes, 1 MiB" in out
    cluster = cluster_from_spec(path)
    assert (cluster.world_size, cluster.num_nodes) == (2, 2)
    assert cluster.hardware is not None
    assert cluster.hardware.between_nodes.source == "measured on 2 × cpu on 2 nodes"
    assert "measured" not in cluster.hardware.within_node.source


def test_what_srun_gives_as_torchrun_does() -> None:
    given = {**_srun(11, 1), "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "3"}
    del given["MASTER_PORT"]
    for nodes, first in (("a1,b[02-05]", "a1"), ("n[07-08,11]", "n07"), ("gpu-[3],x", "gpu-3")):
        assert slurm_variables(given | {"SLURM_STEP_NODELIST": nodes}) == {
            "RANK": "11",
            "WORLD_SIZE": "16",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": first,
            "MASTER_PORT": str(20000 + 4123456 % 20000),
        }
    assert slurm_variables({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) == {}, (
        "sbatch alone"
    )
    assert slurm_variables(given | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
    with pytest.raises(BackendError, match="15 tasks on 2 nodes"):
        slurm_variables(given | {"SLURM_STEP_NUM_TASKS": "15"})
    del given["SLURM_LOCALID"]
    with pytest.raises(BackendError, match="'SLURM_LOCALID' is not as expected"):
        slurm_variables(given)


@pytest.mark.usefixtures("cold_python")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_killed_rank_ends_all_within_seconds_and_leaves_the_file(tmp_path: Path, rank: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(_MEASURED)
    with _started("--nproc", "2", "--seconds", "100", "-o", str(path)) as process:
        assert process.stderr is not None
        assert any("round 1:" in line for line in process.stderr)
        ranks = psutil.Process(process.pid).children(recursive=True)
        (victim,) = [one for one in ranks if one.environ().get("RANK") == rank]
        victim.kill()
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode not in (0, None)
    assert "calibrating lost the connection to another rank" in err
    assert f"rank {rank} was ended by SIGKILL" in err
    assert out == ""
    assert path.read_text() == _MEASURED
    assert [each.name for each in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seconds", "0"), "--seconds=0: the time must be positive"),
        (("--seconds", "nan"), "the time must be positive"),
        (("--nproc", "0"), "at least one process"),
        (("--device", "tpu"), "'tpu' is not a type of device"),
        (("-o", "c.txt"), "the suffix selects the format"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    run: Run, options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("atorch_ns.processes.run_local_ranks", refuse)
    done = run("calibrate", *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_gpu_that_is_not_there(
    run: Run, tmp_path: Path, inline_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("calibrate", "--nproc", "1", "--device", "cuda")
    assert done.returncode == 4
    assert "torch has cpu here. atorch-ns doctor says why" in done.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "torch sees 2 GPU(s) here" in run("calibrate", "--nproc", "3").stderr
    monkeypatch.setenv("LOCAL_RANK", "2")
    done = run("calibrate", "--nproc", "1")
    assert done.returncode == 4
    assert "local rank 2 has no GPU: torch sees 2 here" in done.stderr
    assert not list(tmp_path.iterdir())


def test_under_a_launcher_all_end_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    options = ("--seconds", "60", "-o", str(tmp_path / "none" / "c.yaml"))
    with (
        reserve_port() as port,
        _started(*options, variables=_srun(0, port)) as first,
        _started(*options, variables=_srun(1, port)) as other,
    ):
        said = [process.communicate(timeout=60)[1] for process in (first, other)]
    assert [first.returncode, other.returncode] == [2, 1]
    assert "none does not exist" in said[0]
    assert "checking the options failed on 1 other rank(s)" in said[1]


def test_a_launcher_has_its_own_ranks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    done = run("calibrate")
    assert done.returncode == 4
    assert "lacks WORLD_SIZE" in done.stderr
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("calibrate", "--nproc", "2")
    assert done.returncode == 2
    assert "the launcher has started the ranks to measure on" in done.stderr
