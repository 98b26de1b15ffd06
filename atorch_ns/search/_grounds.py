"""Grounds: what a method's refusal rests on, so that a search need not hear the same refusal twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from atorch_ns.method import ORDER, Chosen, Phase, Resolved
from atorch_ns.search._candidate import Candidate
from atorch_ns.search._ledger import Ledger
from atorch_ns.strategy import MODEL_AXES, Plan, canonical_text

__all__ = ["grounds_of", "refused_alike"]


def grounds_of(resolved: Resolved) -> tuple[tuple[str, str], ...]:
    """By method, a digest of what its refusal to be applied to this job's model would rest on.

    That is its config, the sizes of the axes that divide the model, the methods that change the model before it,
    and the fields of the plan that it names (:attr:`~atorch_ns.method.Method.refuses_by`). A method that names
    none has no entry: what it refuses says nothing of other strategies.
    """
    return tuple(
        (item.method.name, _digest(item, resolved))
        for item in resolved.chosen
        if item.method.refuses_by is not None
    )


def _digest(item: Chosen, resolved: Resolved) -> str:
    place = ORDER.index(item.method.phase)
    before = [
        [other.method.name, other.config.as_json()]
        for other in resolved.chosen
        if other.method.phase is not Phase.MESH and ORDER.index(other.method.phase) <= place
    ]
    plan: Plan = resolved.plan
    named = {name: repr(getattr(plan, name)) for name in item.method.refuses_by or ()}
    sizes = {axis: plan.size(axis) for axis in MODEL_AXES}
    seen: list[Any] = [item.method.name, before, sizes, repr(plan.rank_order), named]
    text = canonical_text(seen)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def refused_alike(candidates: Sequence[Candidate], ledger: Ledger) -> Mapping[str, str]:
    """Untried candidates that a method would refuse as it has refused another, each with the reason.

    A refusal on grounds on which another candidate has run counts for nothing.
    """
    refusals: dict[tuple[str, str], str] = {}
    passed: set[tuple[str, str]] = set()
    for one in candidates:
        entry = ledger.get(one.key) if one.grounds else None
        if entry is None or not entry.judged:
            continue
        end = entry.merged
        if end.succeeded:
            passed.update(one.grounds)
        elif end.status == "refused":
            for ground in one.grounds:
                if ground[0] == end.refused_by:
                    refusals.setdefault(ground, f"{ground[0]} refuses it as {one.label}: {end.reason}")
    if not refusals:
        return {}
    found = {}
    for one in candidates:
        if one.pruned is None and not ledger.judged(one.key):
            known = [
                refusals[ground] for ground in one.grounds if ground in refusals and ground not in passed
            ]
            if known:
                found[one.key] = known[0]
    return found
