"""Every block of the how-tos and of the tutorial runs, commands included, or says why it does not."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, SHELL, as_script, blocks_of

PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs/how-to").glob("*.md") if path.name != "index.md"
)
PAGES.append("docs/tutorial.md")
WITH_COMMANDS = ["README.md", "docs/report.md", "docs/engine.md", *PAGES]


def _install_acme(folder: Path) -> None:
    """The page's distribution, all its files in one folder, as pip installs it."""
    source = folder / "acme"
    source.mkdir()
    page = (ROOT / "docs/how-to/write-a-method.md").read_text()
    for name, text in re.findall(r"^```[{}\w -]+\n# ([\w.]+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        (source / name).write_text(text)
    assert {path.name for path in source.iterdir()} == {"acme_methods.py", "pyproject.toml", "test_acme.py"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    where = ["--no-deps", "--no-build-isolation", "--target", str(folder), str(source)]
    subprocess.run([*pip, *where], check=True, timeout=200)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    if "write-a-method" in page:
        _install_acme(tmp_path)
    (tmp_path / "old_strategy.pickle").write_bytes(pickle.dumps([("fsdp", None, False)]))
    script = tmp_path / "page.py"
    script.write_text(as_script(page))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run_or_say_why_not(page: str) -> None:
    run = page in PAGES
    silent = [
        block.text for block in blocks_of(page) if block.language in SHELL and not run and not block.reason
    ]
    assert not silent, f"say `<!-- not run: why -->` before each of these:\n{''.join(silent)}"


def test_a_block_is_read_as_the_page_means_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(
        "```python\n# a.py\nx = 1\n```\n\n<!-- not run: no network -->\n```console\n$ pip install x\n```\n"
        "```console\n$ false  # exit code 1\nsome output\n$ one \\\n  two\n```\n```yaml\n# c.yaml\na: 1\n```\n"
    )
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    first, second, third, fourth = blocks_of("page.md")
    assert (first.file, first.reason) == ("a.py", "")
    assert second.reason == "no network"
    assert [(command.split(), code) for command, code in third.commands] == [
        (["false"], 1),
        (["one", "two"], 0),
    ]
    assert fourth.file == "c.yaml"
    script = as_script("page.md")
    assert "write_text('a: 1" in script
    assert "pip install" not in script


def test_pictures_are_there_and_small() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    named = {
        name for page in pages for name in re.findall(r"!\[[^]]+\]\((_static/[^)]+)\)", page.read_text())
    }
    assert named
    for name in named:
        assert (ROOT / "docs" / name).stat().st_size < 100_000
