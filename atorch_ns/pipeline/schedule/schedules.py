"""Pipeline schedules by name: their orders and requirements, and the placement of stages on ranks."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from atorch_ns.errors import InputError
from atorch_ns.pipeline.schedule import orders
from atorch_ns.pipeline.schedule.actions import MOST_PASSES, Action, Orders, check_orders
from atorch_ns.pipeline.schedule.orders import Order, PipelineSize
from atorch_ns.system import table_rows
from atorch_ns.text import count_noun, error_text, near_matches, with_article


def train_step_only(method: str) -> str:
    """A sentence: a pipeline cut by ``method`` runs as a whole, not by calls from the user's own loop."""
    return (
        "a pipeline is run by result.train_step(batch) and result.train_step.evaluate(batch) alone, and "
        f"result.model cannot be called; for a training loop of your own, search with excluded=[{method!r}]"
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo:
    """A schedule and its requirements, with ``p`` ranks, ``v`` stages on each and ``m`` micro-batches.

    Attributes:
        name: name that users write, in any case.
        order: function for the actions of a rank.
        placement: ``"loop"`` puts stage ``s`` on rank ``s % p``; ``"v"`` goes down the ranks and back up, so
            that the first and the last stage share rank 0.
        fewest_stages, most_stages: stages on one rank; ``None`` for no bound.
        usual_stages: stages on one rank by default.
        recomputes: whether separate passes recompute activations, useful only if a model recomputes any.
        keeps_last: whether the last stage keeps its activations while others recompute theirs.
        splits_backward: whether input and weight gradients are computed separately, so that the latter fill
            idle time. Such schedules run neither compiled stages nor selective recomputation.
        micro_batches: the rule for ``m``: ``"any"``, ``"stages"`` (at least one for every stage) or
            ``"rounds"`` (a multiple of ``max(1, m // p)``).
        fewest_micro_batches: the least ``m``.
        summary: its order and its source.
        note: difference from the schedule of the given name elsewhere; empty for its own name.
    """

    name: str
    order: Order
    placement: Literal["loop", "v"] = "loop"
    fewest_stages: int = 1
    most_stages: int | None = None
    usual_stages: int = 2
    recomputes: bool = False
    keeps_last: bool = False
    splits_backward: bool = False
    micro_batches: Literal["any", "stages", "rounds"] = "any"
    fewest_micro_batches: int = 1
    summary: str
    note: str = ""

    @property
    def is_single(self) -> bool:
        """Whether a rank has one stage."""
        return self.most_stages == 1

    def orders(self, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None) -> Orders:
        """The actions of every rank.

        Args:
            stages_per_rank: the number of stages on a rank; ``None`` for the usual number.

        Raises:
            InputError: if the schedule cannot run these numbers, or a user's order fails or is incomplete.
        """
        on_rank = self.usual_stages if stages_per_rank is None else stages_per_rank
        self.check(num_ranks, num_micro_batches, on_rank)
        size = PipelineSize(num_ranks, on_rank, num_micro_batches)
        if replace(self, note="") in SCHEDULES:  # a schedule of this package, whose orders tests check
            return tuple(tuple(self.order(rank, size)) for rank in range(num_ranks))
        actions = tuple(self._users_order(rank, size) for rank in range(num_ranks))
        places = [self.rank_of(stage, num_ranks) for stage in range(size.num_stages)]
        problem = check_orders(actions, num_micro_batches, places)
        if problem:
            raise self.refusal(size, problem)
        return actions

    def refusal(self, size: PipelineSize, problem: str) -> InputError:
        """The error for an order that cannot be run, with the reason."""
        return InputError(
            f"the order of the schedule {self.name} cannot be run on {count_noun(size.num_ranks, 'rank')} with "
            f"{count_noun(size.num_micro_batches, 'micro-batch', 'micro-batches')}: {problem}."
        )

    def _users_order(self, rank: int, size: PipelineSize) -> tuple[Action, ...]:
        most = MOST_PASSES * size.stages_per_rank * size.num_micro_batches  # a user's generator may never end
        try:
            actions = tuple(Action(*fields) for fields in islice(self.order(rank, size), most + 1))
        except Exception as error:  # the user's code may raise anything
            raise self.refusal(size, f"on rank {rank} it fails with {error_text(error)}") from error
        if len(actions) > most:
            raise self.refusal(size, f"on rank {rank} it has more than the {most} possible passes")
        return actions

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """The rank of a pipeline that holds ``stage``."""
        lap, offset = divmod(stage, num_ranks)  # a lap is one stage on every rank
        return num_ranks - 1 - offset if self.placement == "v" and lap % 2 else offset

    def stages_of(self, rank: int, num_ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in the order of the model."""
        back = num_ranks - 1 - rank  # its place in every other lap of a placement that turns
        laps = range(stages_per_rank or self.usual_stages)
        return tuple(num_ranks * lap + (back if self.placement == "v" and lap % 2 else rank) for lap in laps)

    def problem(self, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None) -> str:
        """The reason why this pipeline cannot be run, with the possible choices; empty if it can be run."""
        on_rank = self.usual_stages if stages_per_rank is None else stages_per_rank
        if num_ranks < 1 or num_micro_batches < 1 or on_rank < 1:
            return (
                f"a pipeline of {count_noun(num_ranks, 'rank')} with {count_noun(on_rank, 'stage')} each and "
                f"{count_noun(num_micro_batches, 'micro-batch', 'micro-batches')} is none. Use 1 or more of each."
            )
        if on_rank < self.fewest_stages or (self.most_stages is not None and on_rank > self.most_stages):
            return (
                f"{self.name} needs {_stages_text(self)} on a rank, but stages_per_rank is {on_rank}. "
                f"Use stages_per_rank={self.usual_stages} or one of {_names_for(on_rank)}."
            )
        if self._can_run(num_ranks, num_micro_batches, on_rank):
            return ""
        near = self.near_micro_batches(num_ranks, num_micro_batches, on_rank)
        return f"{self.reason(num_ranks, num_micro_batches, on_rank)} Use {_choice_text(near)} micro-batches."

    def check(self, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None) -> None:
        """Raises the :meth:`problem` of this pipeline, if any.

        Raises:
            InputError: with the numbers and the choices.
        """
        problem = self.problem(num_ranks, num_micro_batches, stages_per_rank)
        if problem:
            raise InputError(problem)

    def near_micro_batches(
        self, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None
    ) -> tuple[int, ...]:
        """The nearest possible numbers of micro-batches below and above the given one."""
        on_rank = self.usual_stages if stages_per_rank is None else stages_per_rank
        below = _first_accepted(self, num_ranks, on_rank, range(num_micro_batches - 1, 0, -1), count=2)
        # A multiple of the ranks that is at least the number of stages can always be run.
        above = range(num_micro_batches + 1, num_micro_batches + num_ranks * (on_rank + 2))
        return (*reversed(below), *_first_accepted(self, num_ranks, on_rank, above, count=2))

    def dividing(self, num_ranks: int, stages_per_rank: int | None, rows: int) -> list[int]:
        """The possible numbers of micro-batches that divide a batch of ``rows`` rows."""
        parts = (part for part in range(1, rows + 1) if rows % part == 0)
        return [part for part in parts if not self.problem(num_ranks, part, stages_per_rank)]

    def usual_micro_batches(self, num_ranks: int, stages_per_rank: int | None, rows: int) -> int | None:
        """The default number of micro-batches for a batch of ``rows`` rows; ``None`` if none is possible.

        It divides the batch and is nearest to twice the stages, at most four times the stages if possible.
        """
        legal = self.dividing(num_ranks, stages_per_rank, rows)
        stages = num_ranks * (self.usual_stages if stages_per_rank is None else stages_per_rank)
        # The distance is a ratio. Of two equally near numbers the larger one has the smaller bubble.
        few = [number for number in legal if number <= 4 * stages] or legal[:1]
        return min(
            few, key=lambda number: (max(number, 2 * stages) / min(number, 2 * stages), -number), default=None
        )

    def _can_run(self, num_ranks: int, num_micro_batches: int, on_rank: int) -> bool:
        if num_micro_batches < self.fewest_micro_batches:
            return False
        if self.micro_batches == "stages":
            return num_micro_batches >= num_ranks * on_rank
        rounds = max(1, num_micro_batches // num_ranks)  # torch's rule for interleaved schedules
        return self.micro_batches == "any" or num_micro_batches % rounds == 0

    def reason(self, num_ranks: int, num_micro_batches: int, on_rank: int) -> str:
        """The reason why the schedule cannot run this number of micro-batches."""
        if num_micro_batches < self.fewest_micro_batches:
            return f"{self.name} needs at least {count_noun(self.fewest_micro_batches, 'micro-batch', 'micro-batches')}."
        if self.micro_batches == "stages":
            return (
                f"{self.name} needs at least as many micro-batches as stages, but there are only "
                f"{count_noun(num_micro_batches, 'micro-batch', 'micro-batches')} and {num_ranks * on_rank} stages "
                f"({count_noun(num_ranks, 'rank')} × {on_rank})."
            )
        rounds = num_micro_batches // num_ranks
        return (
            f"{self.name} runs {num_micro_batches} micro-batches on {num_ranks} ranks in {rounds} equal rounds, "
            f"but {num_micro_batches} is not a multiple of {rounds}."
        )


def _read_schedule(row: Mapping[str, str]) -> ScheduleInfo:
    numbers = ("fewest_stages", "most_stages", "usual_stages", "fewest_micro_batches")
    fields: dict[str, Any] = {key: row[key] for key in ("name", "placement", "micro_batches", "summary")}
    fields |= {key: int(row[key]) for key in numbers if row[key]}  # an empty cell is the default
    fields |= dict.fromkeys(row["does"].split(), True)  # names of boolean fields
    by_torch = row["order"] == "torch"  # others are functions of the module orders
    order = orders.torchs(f"Schedule{row['name']}") if by_torch else getattr(orders, row["order"])
    return ScheduleInfo(order=order, **fields)


SCHEDULES = tuple(map(_read_schedule, table_rows(Path(__file__).with_name("schedules.csv"))))
"""Every schedule, the simplest first."""

_ALIASES = {
    row["alias"]: (row["name"], row["note"]) for row in table_rows(Path(__file__).with_name("aliases.csv"))
}
"""Names of torch, nnScaler's ``pipeline_scheduler`` and Merak's ``train_schedule``."""


def get_schedule(name: str) -> ScheduleInfo:
    """Looks a schedule up by a name: torch's, a short form, or one of Merak's ``train_schedule``.

    Case, ``_``, ``-`` and a leading ``Schedule`` do not matter. A user's own schedule, a
    :class:`ScheduleInfo`, is named with its module: ``"my_package.schedules:MINE"``.

    Raises:
        InputError: if no schedule has the name. The message lists all names.

    Example:
        >>> get_schedule("1f1b").name, get_schedule("interleaved_1f1b").name, get_schedule("zbv").name
        ('1F1B', 'Interleaved1F1B', 'ZBVZeroBubble')
        >>> get_schedule("ds_default").note
        "'ds_default' is run as 1F1B: DeepSpeed's default order is 1F1B."
    """
    if ":" in name:  # a schedule of the user's own
        return _import_schedule(name)
    by_key = {_schedule_key(info.name): info for info in SCHEDULES}
    key = _schedule_key(name)
    if key in by_key:
        return by_key[key]
    if key in _ALIASES:
        target, note = _ALIASES[key]
        info = by_key[_schedule_key(target)]
        return replace(info, note=f"{name!r} is run as {target}: {note}.") if note else info
    names = [info.name for info in SCHEDULES]
    near = near_matches(key, [*by_key, *_ALIASES])
    matches = dict.fromkeys(by_key[each].name if each in by_key else _ALIASES[each][0] for each in near)
    hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
    raise InputError(f"there is no pipeline schedule {name!r}.{hint} Known: {', '.join(names)}, or 'auto'.")


def _import_schedule(name: str) -> ScheduleInfo:
    try:
        info = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"the pipeline schedule {name!r} cannot be imported: {error}.") from error
    if not isinstance(info, ScheduleInfo):
        raise InputError(f"the pipeline schedule {name!r} is {with_article(info)}, not a ScheduleInfo.")
    return replace(info, name=name)


def _schedule_key(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "").removeprefix("schedule")


def _first_accepted(
    info: ScheduleInfo, num_ranks: int, on_rank: int, numbers: range, *, count: int
) -> tuple[int, ...]:
    return tuple(islice((number for number in numbers if info._can_run(num_ranks, number, on_rank)), count))


def _stages_text(info: ScheduleInfo) -> str:
    if info.fewest_stages == info.most_stages:
        return f"exactly {count_noun(info.fewest_stages, 'stage')}"
    return f"at least {count_noun(info.fewest_stages, 'stage')}"


def _names_for(on_rank: int) -> str:
    return ", ".join(
        info.name
        for info in SCHEDULES
        if info.fewest_stages <= on_rank and (info.most_stages is None or on_rank <= info.most_stages)
    )


def _choice_text(numbers: tuple[int, ...]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
