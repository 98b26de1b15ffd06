"""The space of a search: which strategies there are, priced, the best of them written out as candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, StrategyError
from atorch_ns.estimate import Workload
from atorch_ns.method import Registry, Resolved, resolve
from atorch_ns.pipeline import train_step_only
from atorch_ns.profile import Profile
from atorch_ns.search._candidate import Candidate
from atorch_ns.search._choices import Choices, axes_of, find_choices
from atorch_ns.search._priced import PricedRows, price_rows
from atorch_ns.search._scope import Scope
from atorch_ns.search._select import Limits, Picked, memory_limit, pick
from atorch_ns.search._settings import SearchSettings
from atorch_ns.search._shares import indivisible, refusal
from atorch_ns.search._templates import Templates, find_templates
from atorch_ns.search._wishes import Wishes, read_wishes
from atorch_ns.search._words import bytes_text, seconds_text
from atorch_ns.search._write_out import CandidateWriter
from atorch_ns.strategy import MODEL_AXES, Strategy

__all__ = ["Space", "explore", "find_candidates"]


@dataclass(frozen=True, kw_only=True)
class Space:
    """The strategies that a search may choose from.

    Attributes:
        candidates: those that are worth knowing, best first; pruned ones last, each with its reason.
        num_priced: strategies that were priced.
        notes: what was left out and why, as sentences.
    """

    candidates: tuple[Candidate, ...]
    num_priced: int
    notes: tuple[str, ...] = ()


def find_candidates(
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
    registry: Registry,
    settings: SearchSettings,
    *,
    excluded: Sequence[Any] | None = None,
    included: Sequence[Any] | None = None,
    base: Any = None,
    finetune: bool = False,
    on_meta: bool = False,
) -> list[Candidate]:
    """The candidates of :func:`explore`, best first."""
    space = explore(
        profile,
        cluster,
        workload,
        registry,
        settings,
        excluded=excluded,
        included=included,
        base=base,
        finetune=finetune,
        on_meta=on_meta,
    )
    return list(space.candidates)


def explore(
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
    registry: Registry,
    settings: SearchSettings,
    *,
    excluded: Sequence[Any] | None = None,
    included: Sequence[Any] | None = None,
    base: Any = None,
    finetune: bool = False,
    on_meta: bool = False,
) -> Space:
    """All strategies that the methods' ``options`` span, priced; the best written out.

    At most one method fills each role; what methods declare to be impossible together or here is left out.
    Precision is part of the space where the device multiplies 16-bit numbers in hardware, as long as fp32
    weights are kept: autocast, or half precision with master weights. 16-bit weights alone converge
    otherwise and must be asked for: ``included=[("half", "bf16")]``.

    Args:
        profile: of the model, with a trace; without one, candidates have no estimate and no order.
        cluster: with hardware figures.
        workload: of one step.
        registry: the methods there are.
        settings: limits and objective.
        excluded: names, aliases, ``(name, config)`` pairs or groups (roles, phases) that may not be there.
        included: the same, of which each must be there.
        base: a strategy in any form. With ``finetune``, its methods are kept and their configs reopened;
            without, it is the only candidate.
        finetune: see ``base``.
        on_meta: whether the model is on the meta device, wherever the profile was made.

    Raises:
        InputError: if the wishes contradict each other or leave nothing.
        StrategyError: if ``base`` cannot be used.
    """
    profile = replace(profile, on_meta=profile.on_meta or on_meta)
    wishes = read_wishes(registry, included=included, excluded=excluded, cluster=cluster, profile=profile)
    explorer = _Explorer(Scope(profile, cluster, workload, registry, settings))
    if base is not None:
        base = Strategy.load(base)
        resolved = resolve(base, cluster, registry, profile=profile)
        if not finetune:
            return explorer.only(resolved)
        return explorer.space(wishes, resolved)
    return explorer.space(wishes, None)


class _Explorer:
    """From what may be chosen to what is worth trying.

    Args:
        scope: what the search is about.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._writer = CandidateWriter(scope)

    def only(self, resolved: Resolved) -> Space:
        """The space of one strategy.

        Raises:
            InputError: if its ranks and micro-batches cannot divide the batch.
        """
        if (problem := indivisible(resolved.plan, self._scope.workload)) is not None:
            raise InputError(problem)
        (estimated,) = self._scope.estimates([resolved])
        return Space(
            candidates=(self._writer.candidate(resolved, estimated, is_baseline=True),), num_priced=1
        )

    def space(self, wishes: Wishes, base: Resolved | None) -> Space:
        """The candidates of a whole space."""
        kept = None if base is None else base.strategy
        if base is not None and (against := wishes.unmet(base.chosen)) is not None:
            raise InputError(
                f"to finetune a strategy is to keep its methods, and {against}. Leave that wish out, or search "
                "without finetune_strategy."
            )
        choices = find_choices(self._scope.registry, self._scope.profile, self._scope.cluster, wishes, kept)
        only = None if base is None else {item.method.name for item in base.chosen}
        templates = find_templates(choices, self._scope.cluster, self._scope.registry, wishes, only=only)
        if not templates.distinct:
            raise InputError(_nothing_left(templates, choices))
        limit = memory_limit(self._scope.cluster, self._scope.settings)
        rows, picked = self._priced(templates, choices, limit)
        baseline = self._scope.canonical(base) if base is not None else self._plain(wishes)
        if baseline is not None and indivisible(baseline.plan, self._scope.workload) is not None:
            baseline = None
        candidates = self._writer.write_out(picked, rows, limit, baseline, wishes)
        if all(candidate.pruned is not None for candidate in candidates) and wishes.excluded and base is None:
            candidates = self._with_hint(candidates, wishes, limit)
        known = {candidate.key for candidate in candidates}
        candidates += [one for one in self._writer.duplicates(templates) if one.key not in known]
        notes = (*_notes(rows, picked, templates, choices), *self._advice(candidates))
        return Space(candidates=tuple(candidates), num_priced=len(rows), notes=notes)

    def _priced(self, templates: Templates, choices: Choices, limit: Limits) -> tuple[PricedRows, Picked]:
        """The rows and the best of them; where nothing fits in few micro-batches, with as many as there can be.

        Raises:
            InputError: if no row can divide the batch.
        """
        rows = price_rows(
            templates,
            choices,
            self._scope.profile,
            self._scope.cluster,
            self._scope.workload,
            self._scope.settings,
        )
        if not len(rows):
            raise InputError(self._nothing_divides(templates, choices))
        picked = pick(rows, limit)
        most = max(choices.passes)
        if picked.fitting or "max_micro_batches" in self._scope.settings.model_fields_set:
            return rows, picked
        if most <= self._scope.settings.max_micro_batches:
            return rows, picked
        more = self._scope.settings.model_copy(update={"max_micro_batches": most})
        rows = price_rows(
            templates, choices, self._scope.profile, self._scope.cluster, self._scope.workload, more
        )
        return rows, pick(rows, limit)

    def _advice(self, candidates: list[Candidate]) -> list[str]:
        """What the user has to know of candidates that may win."""
        cuts = {method.name for method in self._scope.registry if "axis:pipeline" in method.provides}
        used = {name for one in candidates if one.pruned is None for name, _ in one.steps if name in cuts}
        return [f"where {name} is in a strategy, {train_step_only(name)}." for name in sorted(used)]

    def _plain(self, wishes: Wishes) -> Resolved | None:
        """The strategy of nothing but what every strategy has; ``None`` if the wishes forbid it."""
        fixed = [wish for wish in wishes.included if len(wish.methods) == 1]
        steps = [(w.methods[0], w.config.as_json() if w.config is not None else None) for w in fixed]
        try:
            resolved = resolve(
                self._scope.in_order(Strategy(steps)),
                self._scope.cluster,
                self._scope.registry,
                profile=self._scope.profile,
            )
        except StrategyError:
            return None
        axes = [axis for item in resolved.chosen for axis in axes_of(item)]
        if any(resolved.plan.size(axis) == 1 for axis in axes):
            return None
        return resolved if wishes.unmet(resolved.chosen) is None else None

    def _nothing_divides(self, templates: Templates, choices: Choices) -> str:
        """Why no strategy can share out the batch: what the one that divides it least lacks."""
        expert = 2 + MODEL_AXES.index("expert")
        ranks = min(
            shape[0] * shape[1] * shape[expert] for one in templates.distinct for shape in one.group.meshes
        )
        return refusal(self._scope.workload.global_batch, ranks, min(choices.passes))

    def _with_hint(self, candidates: list[Candidate], wishes: Wishes, limit: Limits) -> list[Candidate]:
        """Tells of the one that nearly fits which excluded method would make it fit."""
        fitting = [c for c in self.space(wishes.without_exclusions(), None).candidates if c.pruned is None]
        nearest = min(
            (one for one in candidates if one.estimate is not None),
            key=lambda one: one.estimate.peak_bytes if one.estimate is not None else 0.0,
            default=None,
        )
        if not fitting or nearest is None or nearest.pruned is None or fitting[0].estimate is None:
            return candidates
        has = {name for name, _ in nearest.steps}
        best = min(fitting, key=lambda one: len({name for name, _ in one.steps} - has))
        new = [name for name, _ in best.steps if name not in has]
        assert best.estimate is not None
        what = f"{' and '.join(new)}, excluded here," if new else f"the excluded {best.label}"
        hint = f"{what} would bring it to {bytes_text(best.estimate.peak_bytes)}"
        pruned = replace(nearest.pruned, hint=hint)
        return [replace(one, pruned=pruned) if one is nearest else one for one in candidates]


def _nothing_left(templates: Templates, choices: Choices) -> str:
    reasons = sorted(templates.refused, key=lambda reason: -templates.refused[reason])[:3]
    reasons += [f"{name}: {reason}" for name, reason in choices.refused.items()]
    why = " ".join(reasons) or "what must be there and what is excluded leave nothing over."
    return f"no strategy is left to search: {why} Ask for less in included and excluded."


def _notes(rows: PricedRows, picked: Picked, templates: Templates, choices: Choices) -> tuple[str, ...]:
    notes = [f"{name} is not searched: {reason}" for name, reason in choices.refused.items()]
    written = len(picked.fitting) + len(picked.too_large)
    if len(rows) > written:
        slower = (
            f"; the {picked.num_slower} others that fit were predicted slower before any trial"
            if picked.num_slower
            else ""
        )
        if picked.slowest_kept is not None and picked.num_slower:
            slower += f" than {seconds_text(picked.slowest_kept)}"
        large = f", {picked.num_too_large} do not fit" if picked.num_too_large else ""
        notes.append(f"{len(rows)} strategies were priced and the best {written} written out{slower}{large}.")
    if templates.num_left_out:
        notes.append(
            f"{templates.num_left_out} combinations of methods were beyond the limit and not priced."
        )
    return tuple(notes)
