from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from atorch_ns.errors import InputError
from atorch_ns.search import (
    Candidate,
    SearchSetting,
    SearchSettings,
    TrialOutcome,
    TrialTask,
    from_json,
    outcome_from_json,
    outcome_to_json,
    to_json,
)
from tests.search.fakes import World, candidate, setting

PAIR = [
    candidate("a", ("parallel_mode", {"axes": [["data", 2]]}), is_baseline=True),
    candidate("b", "fsdp", seconds=0.02),
]


def test_contracts_come_back_as_they_were() -> None:
    world = World({"a": 0.03, "b": 0.02}, jitter=0.1)
    outcome = world.search(PAIR)
    assert outcome_from_json(outcome_to_json(outcome)) == outcome
    for kind, value in (
        (Candidate, PAIR[0]),
        (SearchSetting, setting()),
        (SearchSettings, SearchSettings(objective="memory")),
        (TrialTask, world.tasks[0]),
        (TrialOutcome, TrialOutcome(status="ok", collectives={"all_reduce": (3, 4096)}, peak_bytes=(1, 2))),
    ):
        assert from_json(kind, to_json(value)) == value


def test_numbers_that_json_has_not_survive() -> None:
    failed = TrialOutcome(status="non-finite", loss=math.nan, step_seconds=(math.inf, -math.inf))
    text = to_json(failed)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = from_json(TrialOutcome, text)
    assert again.loss is not None
    assert math.isnan(again.loss)
    assert again.step_seconds == (math.inf, -math.inf)
    outcome = replace(World({"a": 0.03, "b": 0.02}).search(PAIR), noise=math.nan)
    assert math.isnan(outcome_from_json(outcome_to_json(outcome)).noise)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[1]", "no key 'outcome'"),
        ('{"schema": 2, "outcome": {}}', "schema 2"),
        ('{"schema": 1, "outcome": {"rows": []}}', "at setting"),
    ],
)
def test_something_else_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        outcome_from_json(text)
