"""Sentences of the pages that people read first: short, with few colons and semicolons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (
    "README.md",
    "CHANGELOG.md",
    *(
        f"docs/{name}.md"
        for name in (
            "tutorial",
            "operators",
            "parallelism",
            "parallelize",
            "trainer",
            "merak",
            "strategies",
            "how-a-strategy-is-chosen",
            "checkpoints",
            "troubleshooting",
        )
    ),
)
MOST_WORDS: Final = 25
"""Words that nine sentences of ten have at most."""
MOST_MARKS: Final = 30
"""Colons and semicolons in a hundred sentences."""


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code, tables, headings, pictures and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(```|~~~|:::).*?^\1[^\n]*$", "\n", text, flags=re.M | re.S)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )", text):
        lines = [line.strip() for line in paragraph.splitlines()]
        if lines and any(line.startswith(("#", "|", "<", "!", "=", "(", "+-")) for line in lines[:1]):
            continue
        prose = re.sub(r"^([-*+:]|\d+\.) ", "", " ".join(line for line in lines if not line.startswith("|")))
        prose = re.sub(r"``?[^`]*``?", "code", prose)
        prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|\{\w+\}", r"\1", prose)
        # A colon at the end leads to a list or to code.
        found += [
            each
            for each in re.split(r"(?<=[.!?])[)*_]*\s+(?=[A-Z*`_(\[])", prose)
            if re.search(r"[a-z]", each)
        ]
    return found


def measure(text: str) -> tuple[float, float]:
    """Words of the longest sentence but a tenth of them, and colons and semicolons per hundred sentences."""
    page = sentences(text)
    sizes = sorted(len(re.findall(r"[\w'’./%-]+", sentence)) for sentence in page)
    marks = sum(len(re.findall(r";|:(?=\s)", sentence)) for sentence in page)
    return sizes[int(0.9 * (len(sizes) - 1))], 100 * marks / len(page)


@pytest.mark.parametrize("name", PAGES)
def test_sentences_are_short(name: str) -> None:
    words, marks = measure((ROOT / name).read_text())
    assert words <= MOST_WORDS
    assert marks <= MOST_MARKS
