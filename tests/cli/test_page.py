"""The main example of the page about the command line runs as it is written there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
_CODE = "from atorch_ns.cli import main; main()"
_SHORTER = {"search": ("--max-trials", "1", "--time-limit", "20"), "verify": ("--steps", "2")}


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_the_lines_from_a_search_to_a_checked_strategy(tmp_path: Path) -> None:
    text = PAGE.read_text()
    first = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    section = re.search(r"^## From a new machine.*?^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert first is not None
    assert section is not None
    subprocess.run([sys.executable, "-c", first[1]], cwd=tmp_path, check=True, timeout=60)
    ran = []
    for line in re.findall(r"^\$ atorch-ns (.*)$", section[1].replace("\\\n", " "), re.MULTILINE):
        verb, *rest = shlex.split(line)
        if verb in ("doctor", "launch"):  # of the machine, and of a script of the reader's
            continue
        command = [sys.executable, "-c", _CODE, verb, *rest, *_SHORTER.get(verb, ())]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        ran.append(verb)
    assert ran == ["search", "explain", "verify", "history"]
    assert json.loads((tmp_path / "strategy.json").read_text())["steps"] is not None
