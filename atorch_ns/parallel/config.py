"""ComputeConfig, ReuseType and BroadcastGenFilesStrategy: the configuration of nnScaler's ``parallelize``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from atorch_ns.errors import InputError
from atorch_ns.text import did_you_mean, with_article

TraceStrategy = Literal["cpu", "cuda", "meta", "cuda_run_cpu_offload", "reuse_cache"]


class ReuseType(Enum):
    """Use of a plan left by an earlier call.

    The plan fits if the config, the policy, and the model's structure and source are unchanged.
    """

    MATCH = "match"
    """Reused if it fits, an error otherwise, and created if there is none."""
    OVERRIDE = "override"
    """Made anew."""
    MOO = "moo"
    """Reused if it fits, otherwise created anew."""
    GRAPH = "graph"
    """Created anew, since a graph is captured in seconds and not kept."""


class BroadcastGenFilesStrategy(Enum):
    """Data sent to the other ranks when a plan is created.

    The plan is always sent, since ranks must agree on it. Initial weights are always the first rank's.
    :attr:`NONE` therefore needs no shared folder. The others need only a process group, as in nnScaler.
    """

    NONE = "none"
    ALL = "all"
    NO_WEIGHTS = "no_weights"
    CODE = "code"


@dataclass(frozen=True)
class ComputeConfig:
    """The devices that a module is planned for, and the settings of the plan.

    Attributes:
        plan_ngpus: ranks of a unit. Rank ``r`` holds part ``r % plan_ngpus`` of unit ``r // plan_ngpus``.
        runtime_ngpus: total number of ranks, a multiple of :attr:`plan_ngpus`.
        constant_folding: accepted. A capture fixes all sizes except the number of samples anyway.
        trace_strategy: accepted. All strategies are the same, since capture uses tensors without values.
        use_zero: whether optimizer states and gradients are sharded over the units.
        zero_ngroups: groups of units. Each group holds all optimizer states once.
        inference_only: whether parameters take no gradients.
        use_end2end: ``forward(sample)`` returns the loss first. ``train_step`` and ``infer_step`` call it.
        pas_config: settings of the policy. Keys that begin with ``_`` are the user's own.
        user_config: any values whose change changes the graph.

    Raises:
        InputError: naming every field that is wrong.
    """

    plan_ngpus: int
    runtime_ngpus: int

    constant_folding: bool = False
    trace_strategy: TraceStrategy = "cuda_run_cpu_offload"

    use_zero: bool = False
    zero_ngroups: int = 1

    inference_only: bool = False
    use_end2end: bool = False

    pas_config: dict[str, Any] = field(default_factory=dict)
    user_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [*self._number_problems()]
        for name in ("constant_folding", "use_zero", "inference_only", "use_end2end"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                problems.append(f"{name} must be True or False; it is {value!r}.")
        if self.trace_strategy not in get_args(TraceStrategy):
            problems.append(
                f"trace_strategy is {self.trace_strategy!r}.{did_you_mean(str(self.trace_strategy), get_args(TraceStrategy))} "
                f"It is one of {', '.join(get_args(TraceStrategy))}."
            )
        problems += [
            f"{name} must be a dictionary; it is {with_article(getattr(self, name))}."
            for name in ("pas_config", "user_config")
            if not isinstance(getattr(self, name), Mapping)
        ]
        problems += [
            f"keys of {name} must be strings; {key!r} is {with_article(key)}."
            for name in ("pas_config", "user_config")
            if isinstance(getattr(self, name), Mapping)
            for key in getattr(self, name)
            if not isinstance(key, str)
        ]
        if problems:
            raise InputError("\n".join(f"ComputeConfig: {problem}" for problem in problems))

    def _number_problems(self) -> list[str]:
        numbers = {name: getattr(self, name) for name in ("plan_ngpus", "runtime_ngpus", "zero_ngroups")}
        wrong = [
            f"{name} must be a positive integer; it is {value!r}."
            for name, value in numbers.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1  # True is an int
        ]
        if wrong:
            return wrong
        if self.runtime_ngpus % self.plan_ngpus:
            return [
                f"runtime_ngpus={self.runtime_ngpus} is not a multiple of plan_ngpus={self.plan_ngpus}: every scale unit has "
                "plan_ngpus ranks."
            ]
        if self.zero_ngroups > 1 and not self.use_zero:
            return [f"zero_ngroups={self.zero_ngroups} counts with use_zero=True alone."]
        if self.num_units % self.zero_ngroups:
            return [f"zero_ngroups={self.zero_ngroups} does not divide the {self.num_units} scale units."]
        return []

    @property
    def num_units(self) -> int:
        """Number of scale units, which are replicas of the module that see different data."""
        return self.runtime_ngpus // self.plan_ngpus

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)
