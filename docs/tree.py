"""Tree of the packages: a line for each room and file, read off the first lines of their docstrings.

``python docs/tree.py`` writes it into ``docs/architecture.md``, between the two markers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("atorch_ns", "opt_lib")
BEGIN, END = "<!-- tree: begin -->\n", "<!-- tree: end -->\n"


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


def page() -> str:
    """The page with the tree as the packages stand."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    tree = "\n".join(line for package in PACKAGES for line in lines(ROOT / package))
    return f"{head}{BEGIN}\n```text\n{tree}\n```\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page())
