"""Tree of the packages, read off the first lines of their docstrings, and their layers, of ``pyproject.toml``.

``python docs/tree.py`` writes both into ``docs/architecture.md``, each between its two markers.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("atorch_ns", "opt_lib")
ALONE = ("_version",)
"""Files that stand in a layer and are not rooms."""


def first_line(file: Path) -> str:
    """The first line of a module's docstring; empty if there is none."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def lines(folder: Path, depth: int = 0) -> Iterator[str]:
    """The lines of a folder: itself, its files, then the rooms inside."""
    indent = "    " * depth
    yield _line(f"{indent}{folder.name}/", first_line(folder / "__init__.py"))
    for file in sorted(folder.glob("*.py")):
        text = first_line(file)
        if text and file.name != "__init__.py":
            yield _line(f"{indent}    {file.name}", text)
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from lines(inner, depth + 1)


def _line(name: str, text: str) -> str:
    return f"{name:<36} {text}"


def layers() -> Iterator[str]:
    """The layers of the linter's first contract, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (one for one in settings["tool"]["importlinter"]["contracts"] if one["id"] == "layers")
    for layer in contract["layers"]:
        yield " | ".join(name for name in layer.split(" | ") if name not in ALONE)


def page() -> str:
    """The page with the layers and the tree as the packages stand."""
    tree = [line for package in PACKAGES for line in lines(ROOT / package)]
    return _with_block(_with_block(PAGE.read_text(), "layers", layers()), "tree", tree)


def _with_block(text: str, name: str, block: Iterable[str]) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, _, rest = text.partition(begin)
    joined = "\n".join(block)
    return f"{head}{begin}\n```text\n{joined}\n```\n\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
