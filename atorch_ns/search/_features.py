"""Features: in what respects candidates resemble each other, so that one trial teaches about others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atorch_ns.estimate import TimeParts
from atorch_ns.search._candidate import Candidate

__all__ = ["Features", "named_features", "read_features"]


@dataclass(frozen=True)
class Features:
    """All candidates of a search.

    Attributes:
        names: of the marks.
        marks: [N, K] 1 where a candidate has a method or one of its settings. What all have is left out.
        shares: [N, P] shares of the parts in the predicted step, less their means; zeros without estimates.
        methods: the names of the methods of each candidate.
    """

    names: tuple[str, ...]
    marks: np.ndarray
    shares: np.ndarray
    methods: tuple[frozenset[str], ...]


def read_features(candidates: Sequence[Candidate]) -> Features:
    """The features of these candidates."""
    sets = [set(named_features(one)) for one in candidates]
    common = set.intersection(*sets) if sets else set()
    names = sorted(set().union(*sets) - common)
    marks = np.asarray([[float(name in one) for name in names] for one in sets]).reshape(
        len(sets), len(names)
    )
    shares = np.asarray([_shares(one) for one in candidates]).reshape(len(sets), len(TimeParts._fields))
    known = np.asarray([one.estimate is not None for one in candidates], dtype=bool)
    if known.any():
        shares = np.where(known[:, None], shares - shares[known].mean(axis=0), 0.0)
    methods = tuple(frozenset(name for name, _ in one.steps) for one in candidates)
    return Features(tuple(names), marks, shares, methods)


def named_features(candidate: Candidate) -> dict[str, str]:
    """The settings of a candidate's methods as text, by ``method`` and ``method.key``."""
    found: dict[str, str] = {}
    for name, config in candidate.steps:
        found[name] = "on"
        for key, value in (config if isinstance(config, Mapping) else {}).items():
            found[f"{name}.{key}={_text(value)}"] = "on"
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _shares(candidate: Candidate) -> list[float]:
    if candidate.estimate is None:
        return [0.0] * len(TimeParts._fields)
    parts = candidate.estimate.time
    return [part / parts.total if parts.total > 0 else 0.0 for part in parts]
