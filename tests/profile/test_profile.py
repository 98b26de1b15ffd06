"""Profiles to JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from atorch_ns.errors import InputError
from atorch_ns.profile import Profile, profile_model
from atorch_ns.sharding import find_dims
from tests.profile.subjects import Stack, square


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_model(Stack(), torch.randn(4, 8), square, find_dims, make_optimizer=torch.optim.AdamW)


def test_round_trip(profile: Profile) -> None:
    assert profile.trace is not None
    measured = replace(profile, trace=replace(profile.trace, seconds={"a:float32:forward": 0.25}))
    for own in (profile, measured, Profile.of(Stack())):
        text = own.to_json()
        again = Profile.from_json(text)
        assert again == own
        assert again.to_json() == text
        assert json.loads(text)["schema"] == 3


def test_a_profile_without_a_later_field(profile: Profile) -> None:
    text = profile.to_json()
    earlier = text.replace('"is_vocabulary":false,', "")
    assert earlier != text
    assert Profile.from_json(earlier) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "an object with a 'schema'"),
        ('{"schema": 1}', "schema 1"),
        ('{"schema": 3}', "model_class"),
    ],
)
def test_bad_input(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Profile.from_json(text)


def test_wrong_value_is_named(profile: Profile) -> None:
    data = json.loads(profile.to_json())
    data["trace"]["segments"][0]["costs"]["float32"]["saved"]["per_sample"] = "much"
    with pytest.raises(InputError, match=r"trace.segments.0.costs.float32.saved.per_sample"):
        Profile.from_json(json.dumps(data))
