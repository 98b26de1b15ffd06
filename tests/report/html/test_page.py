"""Line breaks of the page, and a colour for every part of a bar."""

from __future__ import annotations

import pytest

from atorch_ns.estimate import MemoryParts, TimeParts
from atorch_ns.report.html.page import LONGEST_PIECE, STYLE, breakable, kept_together, pieces


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("ddp", ["ddp"]),
        ("gradient_accumulation(num_micro_batches=4)", ["gradient_accumulation(", "num_micro_batches=4)"]),
        ("half(bfloat16, master_weights) + ddp", ["half(", "bfloat16, master_weights) + ddp"]),
        ("fsdp(a,b)", ["fsdp(", "a,", "b)"]),
        ("2.64 ms ± 0.13 ms (measured)", ["2.64 ms ± 0.13 ms (measured)"]),
        ("/tmp/s.logs/trial-2.log", ["/tmp/", "s.", "logs/", "trial-2.", "log"]),
        ("MixtralSparseMoeBlockWithSharedExperts", ["MixtralSparseMoeBlock", "WithSharedExperts"]),
        ("a_name_of_very_many_parts_in_all", ["a_name_of_very_many_", "parts_in_all"]),
    ],
)
def test_lines_end_between_parts(label: str, expected: list[str]) -> None:
    assert pieces(label) == expected


@pytest.mark.parametrize(
    "text", ["x" * 100, "Ab" * 50 + "(" + "y_" * 40, "a.b" * 30, "é" * 60 + " " + "z" * 25]
)
def test_nothing_is_lost_and_no_piece_is_long(text: str) -> None:
    found = pieces(text)
    assert "".join(found) == text
    assert max(len(word) for piece in found for word in piece.split()) <= LONGEST_PIECE + 1


def test_what_users_wrote_is_escaped_and_a_plus_ends_its_line() -> None:
    assert breakable("f(<b>) + g") == "f(<wbr/>&lt;b&gt;)\u00a0+ g"


def test_numbers_stay_with_their_units() -> None:
    assert kept_together("6.33 ms ±0.90 ms, n=40") == "6.33\u00a0ms ±0.90\u00a0ms, n=40"


def test_every_part_has_a_colour() -> None:
    for parts in (MemoryParts._fields, TimeParts._fields):
        for at in range(len(parts)):
            assert f".p{at} {{ fill: #" in STYLE
