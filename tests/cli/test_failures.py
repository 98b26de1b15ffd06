"""Arguments and failures of the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from atorch_ns.cli._failures import describe, failure_record, split_debug, wants_json
from atorch_ns.cli._on_ranks import _silent_end
from atorch_ns.errors import InputError
from atorch_ns.processes import RankEnd


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("plan --debug --top 3", "plan --top 3"),
        ("--debug launch --nproc 2 train.py --debug", "launch --nproc 2 train.py --debug"),
        ("launch --nproc=2 -m --debug train --debug", "launch --nproc=2 -m train --debug"),
        ("report launch --debug", "report launch"),
    ],
)
def test_debug_after_a_script_is_the_script_s(arguments: str, kept: str) -> None:
    assert split_debug(arguments.split()) == (kept.split(), True)


def test_json_of_a_launched_script_does_not_count() -> None:
    assert wants_json(["plan", "--json"])
    assert not wants_json(["launch", "train.py", "--json"])
    assert not wants_json(["plan"])


def test_an_unforeseen_error_names_its_type_and_the_way_to_its_place() -> None:
    assert describe(InputError("no such thing.")) == "no such thing."
    assert describe(KeyError("x")) == "unexpected KeyError: 'x'. --debug shows where."


def test_a_record_keeps_letters_as_they_are() -> None:
    text = failure_record("größer", 2, rank=1)
    assert "größer" in text
    assert json.loads(text) == {"schema": 1, "error": "größer", "code": 2, "rank": 1}


def test_a_rank_that_a_signal_ended_is_told_by_its_name_and_apart_from_what_it_printed() -> None:
    killed = RankEnd(rank=1, code=-9, output="a warning\nof a library", ended_by_us=False)
    assert _silent_end(killed) == (
        "rank 1 was ended by SIGKILL, as the system ends processes when memory runs out, without a message. The end of "
        "its output:\n    a warning\n    of a library"
    )
    assert _silent_end(replace(killed, code=3, output="")) == (
        "rank 1 ended with code 3, without a message; it printed nothing"
    )
