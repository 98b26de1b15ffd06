"""Table of the methods that may stand together, as a page.

``python -m docs.composition`` writes it; a test says when it is out of date.
"""

from __future__ import annotations

from pathlib import Path

from atorch_ns.method import Composition, composition, load_registry

PAGE = Path(__file__).parent / "composition.md"
_HEAD = """# What may stand together

<!-- Written by `python -m docs.composition`: do not edit. -->

Taken from the methods' own declarations. ✓ stands together, a number says why not, · is the same method. A method
without a note works with its default config; a note in brackets names the config that composes differently.
"""


def composition_page(data: Composition) -> str:
    """The table and the reasons, in Markdown."""
    reasons: list[str] = []
    cells: dict[tuple[str, str], str] = {}
    for first, second, reason in data.pairings:
        if reason is not None and reason not in reasons:
            reasons.append(reason)
        mark = "✓" if reason is None else str(reasons.index(reason) + 1)
        cells[first, second] = cells[second, first] = mark
    lines = [_HEAD, "| | " + " | ".join(data.names) + " |", "|---" * (len(data.names) + 1) + "|"]
    for row in data.names:
        marks = [cells.get((row, column), "·") for column in data.names]
        lines.append(f"| **{row}** | " + " | ".join(marks) + " |")
    lines.append("")
    lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(composition_page(composition(load_registry())))
