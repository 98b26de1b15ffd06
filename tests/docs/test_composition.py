"""The page of what may stand together is what the declarations say."""

from __future__ import annotations

import re
from pathlib import Path

from atorch_ns.method import composition, load_registry
from docs.composition import composition_page


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "composition.md"
    assert page.read_text() == composition_page(composition(load_registry()))


def test_what_concerns_its_maker_alone_is_a_comment() -> None:
    page = composition_page(composition(load_registry()))
    visible = re.sub("<!--.*?-->", "", page, flags=re.DOTALL)
    assert "do not edit" in page
    assert "edit" not in visible
    assert "python -m" not in visible


def test_pairs_are_complete_and_reasons_are_given() -> None:
    data = composition(load_registry())
    found = {(pairing.first, pairing.second): pairing.reason for pairing in data.pairings}
    assert found["fsdp", "zero1"] is not None
    assert found["checkpoint", "fsdp"] is None
    assert all(reason is None or reason.endswith(".") for reason in found.values())
