"""Everything that needs no extra works without the packages of extras; what needs one says which."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.release.commands import EXTRA_PACKAGES, FILES, PLANNING, TRAINING
from tests.warm import COLD_PYTHON

ROOT = Path(__file__).parents[2]

# Runs before any other code of every Python that finds it: those that verbs start are without the packages too.
WITHOUT = f"""
from importlib.machinery import PathFinder

find, absent = PathFinder.find_spec, set({EXTRA_PACKAGES})
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in absent else find(name, *rest)
"""

VERBS = """
import sys
from atorch_ns.cli import main

for line in {lines!r}:
    sys.argv = ["atorch-ns", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, f"{{line}}: {{ended.code}}"
assert not set(sys.modules) & {absent!r}
"""


def _run(script: str, folder: Path, *, timeout_s: float = 110) -> None:
    """Runs ``script`` in ``folder`` by a Python that has none of the packages."""
    for name, text in {**FILES, "sitecustomize.py": WITHOUT}.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [COLD_PYTHON, "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _verbs(lines: Sequence[str]) -> str:
    return VERBS.format(lines=tuple(lines), absent=set(EXTRA_PACKAGES))


def test_a_job_is_planned_and_explained(tmp_path: Path) -> None:
    _run(_verbs(PLANNING), tmp_path)
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_job_is_searched_for_and_verified(tmp_path: Path) -> None:
    _run(_verbs(TRAINING), tmp_path, timeout_s=400)


def test_the_script_of_the_readme_trains_and_extras_are_named(tmp_path: Path) -> None:
    """Without its search, which the slow test runs."""
    block, *_ = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    script = block.replace("time_limit=30", "load_strategy=['fsdp', 'amp_native'], time_limit=30")
    assert script != block
    _run(script + NAMED, tmp_path)
    assert (tmp_path / "strategy.json").is_file()


NAMED = """

from atorch_ns.checkpoint import export_safetensors
from atorch_ns.errors import MissingPackageError
from atorch_ns.search.sampler import OptunaSampler
from atorch_ns.testing.models import get_case
from atorch_ns.tracking import TensorBoardTracker, WandbTracker


def fails(extra, function):
    try:
        function()
    except MissingPackageError as error:
        assert f"pip install 'atorch-ns[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"nothing asked for {extra}")


fails("hf", lambda: export_safetensors(result, "."))
fails("hf", lambda: get_case("hf_llama"))
fails("merak", lambda: __import__("atorch_ns.merak"))
fails("optuna", lambda: OptunaSampler("gp", 0))
fails("tensorboard", lambda: TensorBoardTracker("."))
fails("wandb", lambda: WandbTracker(project="p"))
"""
