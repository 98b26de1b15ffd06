"""The caller's arguments of the fully automatic mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.engine.request import TOKEN_VARIABLE, EngineAddress, SearchRequest
from atorch_ns.errors import InputError, StrategyFileError
from atorch_ns.method import load_registry
from atorch_ns.search import SearchSettings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"search_history": "out/h.journal"}, "out/h.logs"),
        ({"search_history": "h.journal", "save_strategy_to_file": "out/s.json"}, "out/s.logs"),
        ({"save_strategy_to_file": "s.json", "search_logs": "logs"}, "logs"),
    ],
)
def test_where_the_logs_belong(given: dict[str, Any], expected: str | None) -> None:
    assert SearchRequest(**given).log_dir == (None if expected is None else Path.cwd() / expected)


def check(**given: Any) -> None:
    SearchRequest(**given).check(load_registry(), Cluster())


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        check(
            verbose=1,
            included="fsdp",
            excluded={"ddp"},
            search_logs=3,
            search=[],
            time_limit=0,
            batch_size=True,
        )
    assert str(caught.value).splitlines() == [
        "verbose must be True or False; it is an int.",
        "excluded must be a list of names and (name, config) pairs; it is a set.",
        "included is a list; write ['fsdp'].",
        "search_logs must be a path; it is an int.",
        "search must be a dictionary or SearchSettings; it is a list.",
        "time_limit must be a positive number of seconds; it is 0.",
        "batch_size must be a positive integer; it is True.",
    ]
    with pytest.raises(InputError, match="finetune_strategy=True searches around a strategy"):
        check(finetune_strategy=True)
    with pytest.raises(InputError, match="search_engine must be 'host:port' or an EngineAddress"):
        check(search_engine=80)
    with pytest.raises(
        StrategyFileError, match=r"the folder of search_history='/no/such/h\.jsonl' does not exist"
    ):
        check(search_history="/no/such/h.jsonl")
    with pytest.raises(InputError, match="unknown method or group 'nosuch'"):
        check(included=["nosuch"])


def test_the_time_limit_is_one_of_the_settings() -> None:
    given = SearchSettings(max_trials=3, time_limit_s=5.0)
    assert SearchRequest(search=given, time_limit=9).settings == SearchSettings(
        max_trials=3, time_limit_s=9.0
    )
    assert SearchRequest(search={"seed": 2}).settings == SearchSettings(seed=2)
    assert "max_micro_batches" not in SearchRequest(search=given).settings.model_fields_set, (
        "not given stays so"
    )
    with pytest.raises(InputError, match=r"search: sampler: .*; nosuch: Extra inputs"):
        _ = SearchRequest(search={"sampler": "best", "nosuch": 1}).settings


def test_a_strategy_is_applied_or_searched_around() -> None:
    assert SearchRequest().searches
    assert SearchRequest().base is None
    given = SearchRequest(load_strategy=["ddp"])
    assert not given.searches
    assert given.base is not None
    assert [step.name for step in given.base.steps] == ["ddp"]
    assert SearchRequest(load_strategy=["ddp"], finetune_strategy=True).searches


def test_an_engine_needs_an_address_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert SearchRequest().engine is None
    for wrong in ("host", ":80", "host:http"):
        with pytest.raises(InputError, match="is not an address; write host:port"):
            EngineAddress.read(wrong)
    with pytest.raises(InputError, match=f"environment variable {TOKEN_VARIABLE} to it on every rank"):
        EngineAddress.read("host:80")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    engine = SearchRequest(search_engine="host:80").engine
    assert engine == EngineAddress("host:80", "secret")
    assert "secret" not in repr(engine), "logs must not show it"
    own = EngineAddress("host:80", "other")
    assert SearchRequest(search_engine=own).engine is own
