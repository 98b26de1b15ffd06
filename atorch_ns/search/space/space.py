"""Search space: all strategies that the methods span, priced, and the best of them as candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, StrategyError
from atorch_ns.estimate import Workload
from atorch_ns.method import Registry, Resolved, resolve
from atorch_ns.pipeline import train_step_only
from atorch_ns.profile import Profile
from atorch_ns.search.objective import SearchSettings
from atorch_ns.search.space.candidate import Candidate
from atorch_ns.search.space.constraints import Constraints, read_constraints
from atorch_ns.search.space.limits import Limits, RowSelection, memory_limit, select_rows
from atorch_ns.search.space.priced import PricedRows, batch_divisors, price_rows
from atorch_ns.search.space.templates import Choices, Templates, axes_of, find_choices, find_templates
from atorch_ns.search.space.write_candidates import CandidateWriter, SearchContext
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.text import bytes_text, first_few, seconds_text


@dataclass(frozen=True, kw_only=True)
class Space:
    """The strategies that a search may choose from.

    Attributes:
        candidates: candidates worth reporting, best first; pruned ones last, each with its reason.
        num_priced: strategies that were priced.
        notes: omissions and their reasons, as sentences.
    """

    candidates: tuple[Candidate, ...]
    num_priced: int
    notes: tuple[str, ...] = ()


def explore(
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
    registry: Registry,
    *,
    settings: SearchSettings,
    excluded: Sequence[Any] | None = None,
    included: Sequence[Any] | None = None,
    base: Any = None,
    tried: Iterable[Any] = (),
) -> Space:
    """All strategies that the methods' ``options`` span, priced; the best as candidates.

    At most one method fills each role. Methods declared impossible together or here are left out.
    Precision is part of the space where the device multiplies 16-bit numbers in hardware, as long as fp32
    weights are kept: autocast, or half precision with master weights. Training with 16-bit weights alone
    converges differently and must be asked for: ``included=[("half", "bf16")]``.

    Args:
        profile: profile of the model with a trace; without one, candidates have no estimate and no order.
        cluster: the cluster with hardware figures.
        workload: samples and tokens of one step.
        excluded: names, aliases, ``(name, config)`` pairs or groups (roles, phases) that are not allowed.
        included: names, pairs or groups, each of which every strategy must contain.
        base: a strategy in any form, whose methods are kept and whose configs are reopened; ``None`` for any.
        tried: strategies of earlier trials, in any form; they are candidates, however slow by prediction.

    Raises:
        InputError: if the constraints contradict each other or leave nothing.
        StrategyError: if ``base`` cannot be used.
    """
    constraints = read_constraints(
        registry, included=included, excluded=excluded, cluster=cluster, profile=profile
    )
    explorer = _Explorer(SearchContext(profile, cluster, workload, registry, settings))
    resolved_base = None if base is None else resolve(Strategy.load(base), cluster, registry, profile=profile)
    return explorer.space(constraints, resolved_base, [Strategy.load(strategy) for strategy in tried])


class _Explorer:
    def __init__(self, context: SearchContext) -> None:
        self._context = context
        self._writer = CandidateWriter(context)

    def space(self, constraints: Constraints, base: Resolved | None, past: Sequence[Strategy] = ()) -> Space:
        """The whole space, around a strategy if one is given."""
        context = self._context
        if base is not None and (against := constraints.violation(base.chosen)) is not None:
            raise InputError(
                f"finetuning a strategy keeps its methods, but {against}. Leave that out, or search without "
                "finetune_strategy."
            )
        start = None if base is None else base.strategy  # its configs are among the options
        choices = find_choices(context.registry, context.profile, context.cluster, constraints, base=start)
        only = None if base is None else {item.method.name for item in base.chosen}
        templates = find_templates(choices, context.cluster, context.registry, constraints, only=only)
        if not templates.distinct:
            raise InputError(_nothing_left(templates, choices, constraints))
        limit = memory_limit(context.cluster, context.settings)
        rows, selection = self._price_and_select(templates, choices, limit)
        baseline = self._base_plan(constraints) if start is None else context.resolve(start, check_model=True)
        if baseline is not None:
            # A plain strategy that cannot divide the batch is not a baseline.
            parts = baseline.plan.num_data_ranks * baseline.plan.num_micro_batches
            baseline = baseline if context.workload.global_batch % parts == 0 else None
        candidates = self._writer.write_out(
            selection, rows, limit, baseline, constraints=constraints, past=past
        )
        fits = any(candidate.pruned is None for candidate in candidates)
        if not fits and constraints.excluded and base is None:
            candidates = self._with_hint(candidates, constraints)
        keys = {candidate.key for candidate in candidates}
        # Duplicates are pruned: they are there for the report.
        candidates += [twin for twin in self._writer.duplicates(templates) if twin.key not in keys]
        notes = (*_search_notes(rows, selection, templates, choices), *self._pipeline_notes(candidates))
        return Space(candidates=tuple(candidates), num_priced=len(rows), notes=notes)

    def _price_and_select(
        self, templates: Templates, choices: Choices, limit: Limits
    ) -> tuple[PricedRows, RowSelection]:
        context, most = self._context, max(choices.micro_batches)
        settings = context.settings

        # With a limit of one byte, every row takes the reductions that need least memory, whatever the time.
        is_smallest = settings.objective in ("memory", "batch")
        largest = 1 if is_smallest else limit.num_bytes

        price_all = partial(
            price_rows, templates, choices, context.profile, context.cluster, workload=context.workload
        )
        rows = price_all(max_micro_batches=settings.max_micro_batches, limit_bytes=largest)
        if not len(rows):
            raise InputError(self._nothing_divides(templates, choices))
        selection = select_rows(rows, limit)
        is_fixed = "max_micro_batches" in settings.model_fields_set
        if selection.fitting or is_fixed or most <= settings.max_micro_batches:
            return rows, selection
        # Nothing fits: with as many micro-batches as there can be.
        rows = price_all(max_micro_batches=most, limit_bytes=largest)
        return rows, select_rows(rows, limit)

    def _pipeline_notes(self, candidates: list[Candidate]) -> list[str]:
        cuts = {method.name for method in self._context.registry if "axis:pipeline" in method.provides}
        usable = [candidate for candidate in candidates if candidate.pruned is None]
        names = {name for candidate in usable for name, _ in candidate.steps if name in cuts}
        return [f"where {name} is in a strategy, {train_step_only(name)}." for name in sorted(names)]

    def _base_plan(self, constraints: Constraints) -> Resolved | None:
        # The plain strategy: required methods alone, and those that are added by default.
        singles = [constraint for constraint in constraints.included if len(constraint.methods) == 1]
        steps = [(w.methods[0], w.config.as_json() if w.config is not None else None) for w in singles]
        try:
            strategy = self._context.resolve(Strategy(steps), check_model=True)
        except StrategyError:
            return None
        axes = [axis for item in strategy.chosen for axis in axes_of(item)]
        if any(strategy.plan.size(axis) == 1 for axis in axes):
            return None  # a required method that divides along an axis which the default mesh does not have
        return strategy if constraints.violation(strategy.chosen) is None else None

    def _nothing_divides(self, templates: Templates, choices: Choices) -> str:
        context = self._context
        batch, most = context.workload.global_batch, context.settings.max_micro_batches
        divisors = batch_divisors(
            templates, choices, context.profile, context.workload, max_micro_batches=most
        )
        below = max(batch // number * number for number in divisors)  # 0 where all are larger than the batch
        above = min((batch // number + 1) * number for number in divisors)
        sizes, values = ("sizes", f"are {below} and {above}") if below else ("size", f"is {above}")
        return (
            f"no strategy can divide a global batch of {batch} samples evenly over {context.cluster.world_size} ranks: "
            f"each divides it into {first_few([str(number) for number in divisors], 8)} equal parts, its data-parallel "
            f"ranks times its micro-batches. The nearest batch {sizes} that can be divided {values}. Change the "
            "batch size, the number of ranks or the number of micro-batches."
        )

    def _with_hint(self, candidates: list[Candidate], constraints: Constraints) -> list[Candidate]:
        # The nearest miss gets a hint: the excluded method with which it would fit.
        others = self.space(constraints.without_exclusions(), None).candidates
        fitting = [candidate for candidate in others if candidate.pruned is None]
        options = [candidate for candidate in candidates if candidate.estimate is not None]
        nearest = min(options, key=lambda candidate: candidate.predicted_bytes or 0.0, default=None)
        if not fitting or nearest is None or nearest.pruned is None or fitting[0].estimate is None:
            return candidates
        has = {name for name, _ in nearest.steps}
        best = min(fitting, key=lambda candidate: len({name for name, _ in candidate.steps} - has))
        new = [name for name, _ in best.steps if name not in has]
        assert best.estimate is not None
        what = f"{' and '.join(new)} (excluded)" if new else f"the excluded {best.label}"
        hint = f"{what} would reduce it to {bytes_text(best.estimate.peak_bytes)}"
        verdict = replace(nearest.pruned, hint=hint)
        return [replace(each, pruned=verdict) if each is nearest else each for each in candidates]


def _nothing_left(templates: Templates, choices: Choices, constraints: Constraints) -> str:
    reasons = sorted(templates.refused, key=lambda reason: -templates.refused[reason])[:3]
    reasons += [f"{name}: {reason}" for name, reason in choices.refused.items()]
    meshes = [mesh for mesh in choices.meshes if mesh is not None]
    mesh_axes = {axis for mesh in meshes for axis, _ in mesh.method.plan(Plan(), mesh.config).axes}
    divides = meshes[0].method.name if meshes else "the method of the mesh"
    groups = (*choices.kinds, *choices.options.values())
    methods = {item.method for items in groups for item in items if item is not None}
    roles = {name: method.default_for for method in methods if constraints.requires(name := method.name)}
    reasons += [
        f"{name} is included and needs an axis {axis}, but no mesh for this model, sample and cluster has one; "
        f"include {divides} with that axis."
        for name, role in roles.items()
        if role is not None and (axis := role.removeprefix("axis:")) not in mesh_axes
    ]
    why = " ".join(reasons) or "the included and excluded methods leave nothing."
    return f"no strategy is left to search: {why} Include or exclude fewer methods."


def _search_notes(
    rows: PricedRows, selection: RowSelection, templates: Templates, choices: Choices
) -> tuple[str, ...]:
    notes = [f"{name} is not searched: {reason}" for name, reason in choices.refused.items()]
    count = len(selection.fitting) + len(selection.too_large)
    if len(rows) > count:
        others, slowest = [], selection.slowest_kept
        if selection.num_slower:
            than = f" than {seconds_text(slowest)}" if slowest is not None else ""
            others.append(f"{selection.num_slower} fit but were predicted slower{than} before any trial")
        if num_too_large := selection.num_too_large - len(selection.too_large):
            others.append(f"{num_too_large} do not fit")
        rest = f" Of the others, {' and '.join(others)}." if others else ""
        notes.append(f"{len(rows)} strategies were priced, and the best {count} are candidates.{rest}")
    if templates.num_left_out:
        notes.append(
            f"{templates.num_left_out} combinations of methods were over the limit and were not priced."
        )
    return tuple(notes)
