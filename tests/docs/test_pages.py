"""Every Python block of the README and of the guides runs."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a page takes for granted: a result to save, a file to convert.
PREPARED = """
import torch
from torch import nn
from atorch_ns import auto_accelerate

_, result, _ = auto_accelerate(
    nn.Linear(4, 4), torch.optim.AdamW, torch.randn(64, 4), lambda batch, output: (output - batch).square().mean(),
    load_strategy=[], dataloader_args={"batch_size": 8},
)
"""
PAGES = [
    "README.md",
    "docs/tutorial.md",
    "docs/strategies.md",
    "docs/checkpoints.md",
    "docs/how-a-strategy-is-chosen.md",
    "docs/parallelism.md",
    "docs/accelerator.md",
    "docs/command-line.md",
    "docs/module-replace.md",
    "docs/fp8.md",
    "docs/launching.md",
    "docs/notebooks.md",
    "docs/tracking.md",
]


def _script(page: str, folder: Path) -> Path:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} has no Python block"
    if "tutorial" in page:  # its script imports its job
        (folder / "job.py").write_text(blocks.pop(0))
    path = folder / "script.py"
    path.write_text((PREPARED if "checkpoints" in page else "") + "\n".join(blocks))
    (folder / "old_strategy.pickle").write_bytes(pickle.dumps([("fsdp", None, False)]))
    return path


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    done = _run([sys.executable, str(_script(page, tmp_path))], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_same_script_runs_on_two_processes(page: str, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = _run([*launcher, str(_script(page, tmp_path))], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_feature_table_names_tests_that_exist_and_sources_at_a_commit() -> None:
    """Each row says what ours runs in, or that we have it not, and what is said of others leads somewhere."""
    text = (ROOT / "docs/features.md").read_text()
    rows = [
        line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "atorch_ns" not in line
    ]
    assert len(rows) >= 25
    for name, ours, *others in rows:
        paths = re.findall(r"`(tests/[\w/.]+)`", ours)
        assert paths or ours.strip("*").startswith("no"), name
        assert [path for path in paths if not (ROOT / path).exists()] == [], name
        assert len(others) == 8, name
        for cell in others:
            for link in re.findall(r"\]\(([^)]*)\)", cell):
                assert re.match(r"https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{7,}/\S", link), (
                    name,
                    link,
                )
