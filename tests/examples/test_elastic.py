"""Three machines, of which one is lost: the others go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from atorch_ns.testing import reserve_port, run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "auto_accelerate" / "elastic.py"
NUM_STEPS, STEPS_BEFORE, LIMIT_S = 40, 12, 200.0


def rows(folder: Path) -> list[dict[str, float]]:
    """What the runs have logged so far."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def losses(folder: Path) -> dict[float, float]:
    """The loss of every step; of one that was repeated, the last."""
    return {row["step"]: row["train/loss"] for row in rows(folder) if "train/loss" in row}


def worlds(folder: Path) -> list[float]:
    """The number of processes of every run that began to train."""
    return [row["run/world_size"] for row in rows(folder) if "run/world_size" in row]


def environment() -> dict[str, str]:
    # torchrun tells its restarts at this level.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LOGLEVEL": "INFO"}


@contextmanager
def agents(num: int, folder: Path, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``num`` torchruns, as on as many machines; the first keeps the rendezvous."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(num):
            # torch's defaults, 15 and 30 s, are for machines; below 10 s a busy one is taken for a lost one.
            quick = (
                f"is_host={number == 0},keep_alive_interval=2,keep_alive_max_attempt=6,last_call_timeout=5"
            )
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1",
                "--max-restarts=3", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=elastic",
                f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={quick}", "--local-addr=127.0.0.1",
                str(SCRIPT), f"--save={folder}", f"--steps={NUM_STEPS}", "--pause=0.2",
            ]  # fmt: skip
            with (folder / f"agent-{number}.txt").open("wb") as output:
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)
                )
        yield started
    finally:
        for agent in started:
            lose(agent)


def lose(agent: subprocess.Popen[bytes]) -> None:
    """Ends an agent and its workers at once, as when their machine loses its power."""
    try:
        family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    agent.wait()
    psutil.wait_procs(family, timeout=5)


@pytest.mark.usefixtures("cold_python")
@pytest.mark.slow
@pytest.mark.timeout(260)  # the agents have LIMIT_S of it, on a machine that is busy
def test_two_of_three_go_on(tmp_path: Path) -> None:
    elastic, alone = tmp_path / "elastic", tmp_path / "alone"
    elastic.mkdir()
    begun = time.monotonic()
    with reserve_port() as port, agents(3, elastic, port) as started:

        def told() -> str:
            return "\n".join(path.read_text()[-3000:] for path in sorted(elastic.glob("agent-*.txt")))

        while len(losses(elastic)) < STEPS_BEFORE or worlds(elastic)[-1] != 3:
            assert time.monotonic() - begun < LIMIT_S, told()
            assert all(agent.poll() is None for agent in started), told()
            time.sleep(0.1)
        lose(started[2])
        lost_after = max(losses(elastic))
        while any(agent.poll() is None for agent in started[:2]):
            assert time.monotonic() - begun < LIMIT_S, told()
            time.sleep(0.1)
        assert [agent.returncode for agent in started[:2]] == [0, 0], told()
        assert worlds(elastic)[-2:] == [3, 2], told()
        assert lost_after < NUM_STEPS
        assert "goes on after step" in told()

    run_ranks(uninterrupted, 1, args=(alone,), init_process_group=False)
    assert worlds(alone) == [1]
    assert list(losses(elastic)) == list(range(1, NUM_STEPS + 1))
    assert losses(elastic) == pytest.approx(losses(alone), abs=1e-5)


def uninterrupted(folder: Path) -> None:
    """The example in one process, without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    sys.path.insert(0, str(SCRIPT.parent))
    sys.argv = [SCRIPT.name, f"--save={folder}", f"--steps={NUM_STEPS}"]
    runpy.run_path(str(SCRIPT), run_name="__main__")
