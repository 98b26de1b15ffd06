from __future__ import annotations

import importlib.util

import pytest

from atorch_ns.errors import MissingPackageError
from atorch_ns.search import SearchSettings
from atorch_ns.search.sampler import make_sampler


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_without_optuna_its_samplers_name_the_extra(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'atorch-ns\[optuna\]'"):
        make_sampler(SearchSettings(sampler=sampler))  # type: ignore[arg-type]


def test_the_other_samplers_need_no_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for sampler in ("guided", "exhaustive", "random"):
        make_sampler(SearchSettings(sampler=sampler))  # type: ignore[arg-type]
