"""A strategy that a search under a limit of memory returns trains under that limit, for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is enforced on Linux")

SHARES = {"below what the plain strategy takes": 0.85, "just above": 1.03}


def run(num_ranks: int, *words: str, timeout_s: float) -> str:
    """What ``tests/memory_limit_job.py`` prints, by torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launch, "--module", "tests.memory_limit_job", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-20000:]}"
    return done.stdout


def limits_of(model: str, num_ranks: int, folder: Path) -> dict[str, int]:
    """MiB by what they are: from what the plain strategy was measured to take."""
    run(num_ranks, "find", model, "0", str(folder), timeout_s=200)
    plain = json.loads((folder / "plain.json").read_text())
    return {name: round(share * plain) for name, share in SHARES.items()}


@pytest.mark.timeout(400)
def test_a_winner_under_a_limit_trains_under_it(tmp_path: Path) -> None:
    """The sample of the test below: one model, one limit, its winner, 300 steps."""
    limit = limits_of("mlp", 2, tmp_path)["below what the plain strategy takes"]
    run(2, "find", "mlp", str(limit), str(tmp_path), timeout_s=200)
    assert "rank 1: 300 steps" in run(2, "train", "mlp", str(limit), str(tmp_path), "0", "300", timeout_s=200)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("model", ["mlp", "gpt2", "llama"])
def test_the_three_best_train_for_a_thousand_steps(model: str, num_ranks: int, tmp_path: Path) -> None:
    """Twelve limits in all: two of each model on two and on four ranks."""
    ran = []
    for name, limit in limits_of(model, num_ranks, tmp_path).items():
        folder = tmp_path / name
        folder.mkdir()
        run(num_ranks, "find", model, str(limit), str(folder), timeout_s=600)
        found = sorted(path.stem for path in folder.glob("[0-9].json"))
        assert found, f"nothing ran within {limit} MiB"
        for number in found:
            said = run(num_ranks, "train", model, str(limit), str(folder), number, "1000", timeout_s=3600)
            assert said.count("100") >= num_ranks, said
            ran.append((limit, number))
    assert len(ran) >= 4, ran
