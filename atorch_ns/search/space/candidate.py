"""Candidate: one strategy of the search space, with its key, its label and what it is predicted to cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from atorch_ns.estimate import Estimate
from atorch_ns.method import ORDER, Chosen, Phase, Resolved
from atorch_ns.strategy import MODEL_AXES, AxisSize, Step, Strategy, canonical_text
from atorch_ns.text import bytes_text

Fate = Literal["won", "lost", "failed", "pruned", "untried"]  # of a candidate


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Reason why a candidate is not worth a trial.

    Attributes:
        kind: ``"memory"`` (does not fit), ``"slower"`` (the estimate rules it out), ``"same"`` (amounts to
            another candidate), ``"impossible"`` (refused when it was resolved).
        reason: one sentence with its numbers.
        hint: remedy, as a clause; empty if none is known.
    """

    kind: Literal["memory", "slower", "same", "impossible"]
    reason: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One strategy of the space. Plain values only, so it travels as JSON (pydantic's ``TypeAdapter``).

    Attributes:
        key: short, unique, the same on every rank and in every run: a digest of the steps.
        steps: ``(name, config)`` of each method, as in a strategy file; configs are JSON values.
        label: the steps in a few words, for tables.
        estimate: the predicted cost; ``None`` where it could not be priced.
        is_baseline: whether this is the plain strategy that others are compared with.
        pruned: why it will not be tried; ``None`` if it may.
        setup_seconds: predicted time that a trial needs beyond the usual before its first step (compilation).
        largest_batch: samples of the largest step that is predicted to fit, where that is the objective.
        largest_batch_bytes: the peak that is predicted for that step.
        given_batch: samples of the step of the estimate and the trials, set with ``largest_batch``.
        refusal_keys: digest of the conditions of a refusal, by the method that declares them.
        axes: sizes of the mesh's axes, the innermost first.
        precision: the steps that set dtypes, in a few words; empty for the model's own.
        is_plain: whether only its precision, and how data ranks share states, differ from the baseline.
        fits_alone: whether it is plain and, of several processes, one is predicted to hold the whole batch.
    """

    key: str
    steps: tuple[tuple[str, Any], ...]
    label: str
    estimate: Estimate | None = None
    is_baseline: bool = False
    pruned: Pruned | None = None
    setup_seconds: float = 0.0
    largest_batch: int | None = None
    largest_batch_bytes: float | None = None
    given_batch: int | None = None
    refusal_keys: tuple[tuple[str, str], ...] = ()
    axes: tuple[AxisSize, ...] = ()
    precision: str = ""
    is_plain: bool = False
    fits_alone: bool = False

    @property
    def strategy(self) -> Strategy:
        """The candidate as a strategy."""
        return Strategy(self.steps)

    @property
    def predicted_bytes(self) -> float | None:
        """The predicted peak; ``None`` without an estimate."""
        return None if self.estimate is None else self.estimate.peak_bytes

    @property
    def predicted_seconds(self) -> float | None:
        """The predicted step; ``None`` without an estimate."""
        return None if self.estimate is None else self.estimate.step_seconds


def named_features(candidate: Candidate) -> dict[str, str]:
    """The settings of a candidate's methods by ``method`` and ``method.key=value``, each ``"on"``."""
    features: dict[str, str] = {}
    for name, config in candidate.steps:
        features[name] = "on"
        for key, value in (config if isinstance(config, Mapping) else {}).items():
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            features[f"{name}.{key}={text}"] = "on"
    return features


def refusal_keys(resolution: Resolved) -> tuple[tuple[str, str], ...]:
    """Returns a digest, per method, of everything that decides whether it refuses this model.

    These are its config, sizes of axes that divide the model, methods that change the model before it, and
    fields of the plan in :attr:`~atorch_ns.method.Method.refuses_by`. If that is ``None``, a refusal implies
    nothing for other strategies, and the method has no entry.
    """
    return tuple(
        (item.method.name, _refusal_key(item, resolution))
        for item in resolution.chosen
        if item.method.refuses_by is not None
    )


def _refusal_key(item: Chosen, resolution: Resolved) -> str:
    position, plan = ORDER.index(item.method.phase), resolution.plan
    # Methods up to its own phase, which have changed the model before it; a mesh changes no model.
    before = [
        [other.method.name, other.config.as_json()]
        for other in resolution.chosen
        if other.method.phase is not Phase.MESH and ORDER.index(other.method.phase) <= position
    ]
    plan_fields = {name: repr(attrgetter(name)(plan)) for name in item.method.refuses_by or ()}
    sizes = {axis: plan.size(axis) for axis in MODEL_AXES}
    parts: list[Any] = [item.method.name, before, sizes, repr(plan.rank_order), plan_fields]
    return hashlib.sha256(canonical_text(parts).encode()).hexdigest()[:12]


def largest_part(estimate: Estimate) -> str:
    """The largest part of the predicted memory, as ``"activations 6.1 GiB"``."""
    parts = estimate.memory._asdict()
    name = max(parts, key=lambda part: parts[part])
    return f"{name} {bytes_text(parts[name])}"


def key_of(steps: Iterable[Step]) -> str:
    """A digest of the steps, the same in every process."""
    text = canonical_text([[step.name, step.config] for step in steps])
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def label_of(steps: Iterable[Step], *, leave_out: Iterable[str] = ()) -> str:
    """The steps in a few words, without the methods ``leave_out``: ``"fsdp + amp_native(bfloat16)"``."""
    hidden = set(leave_out)
    return " + ".join(_step_label(step) for step in steps if step.name not in hidden) or "plain"


def _step_label(step: Step) -> str:
    config = step.config
    if not isinstance(config, dict):
        return str(step)
    return f"{step.name}({', '.join(_config_item_text(key, value) for key, value in config.items())})"


def _config_item_text(key: str, value: object) -> str:
    if value is True:
        return key
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        pairs = all(isinstance(item, list) and len(item) == 2 for item in value)  # the axes of a mesh
        if pairs and value:
            return "×".join(f"{name}={size}" for name, size in value)
        return f"{key}=none" if not value else f"{key}={'/'.join(map(str, value))}"
    return f"{key}={value}"
