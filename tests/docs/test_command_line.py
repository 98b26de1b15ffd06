"""The page about the command line says what the command does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from atorch_ns.errors import InputError
from docs.command_line import verbs, with_verbs
from tests.cli.verbs import commands

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def test_the_generated_part_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert with_verbs(text) == text, "python -m docs.command_line"


def test_a_page_without_a_place_for_it() -> None:
    with pytest.raises(InputError, match="verbs: generated"):
        with_verbs("# A page\n")


def test_every_line_of_the_page_names_verbs_and_options_that_exist() -> None:
    text = PAGE.read_text().replace("\\\n", " ")
    lines = re.findall(r"^\$ atorch-ns (.*)$", text, re.MULTILINE)
    assert len(lines) > len(verbs())
    names = {verb.name for verb in verbs()}
    for line in lines:
        words = shlex.split(line)
        verb = words[0] if words[0] in names else " ".join(words[:2])
        options = {option for each in commands()[verb].params for option in each.opts}
        for word in words:
            assert not word.startswith("--") or word.partition("=")[0] in options, line
