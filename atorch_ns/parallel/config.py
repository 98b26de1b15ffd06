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
    """What becomes of a plan that an earlier call has left.

    It fits if the config, the policy, and the model's structure and source are as they were.
    """

    MATCH = "match"
    """Reused if it fits, an error if not, made if there is none."""
    OVERRIDE = "override"
    """Made anew."""
    MOO = "moo"
    """Reused if it fits, else made anew."""
    GRAPH = "graph"
    """Made anew: a graph is captured in seconds and not kept."""


class BroadcastGenFilesStrategy(Enum):
    """What goes to the other ranks when a plan is made.

    The plan always does, since ranks must agree on it. Initial weights are always the first rank's. So
    :attr:`NONE` needs no shared folder; the others only need a process group, as in nnScaler.
    """

    NONE = "none"
    ALL = "all"
    NO_WEIGHTS = "no_weights"
    CODE = "code"


@dataclass(frozen=True)
class ComputeConfig:
    """The devices that a module is planned for, and how.

    Attributes:
        plan_ngpus: ranks of a unit: rank ``r`` holds part ``r % plan_ngpus`` of unit ``r // plan_ngpus``.
        runtime_ngpus: ranks in all, a multiple of :attr:`plan_ngpus`.
        constant_folding: accepted; a capture fixes all sizes but the number of samples anyway.
        trace_strategy: capture is on tensors without values, so all strategies are the same.
        use_zero: optimizer states are sharded over the units, and gradients too.
        zero_ngroups: groups of units, each of which holds all optimizer states once.
        inference_only: parameters take no gradients.
        use_end2end: ``forward(sample)`` returns the loss first; ``train_step`` and ``infer_step`` call it.
        pas_config: settings of the policy; keys that begin with ``_`` are the user's own.
        user_config: anything that, when it changes, changes the graph.

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
        """Scale units: copies of the module that see different data."""
        return self.runtime_ngpus // self.plan_ngpus

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)
