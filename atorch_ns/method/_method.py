"""Method: one thing that can be done to a training job."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from atorch_ns.errors import Problem, RegistrationError
from atorch_ns.method._config import MethodConfig
from atorch_ns.method._phase import Phase
from atorch_ns.strategy import Plan

if TYPE_CHECKING:
    from torch import nn

    from atorch_ns.cluster import Cluster
    from atorch_ns.job import Job
    from atorch_ns.profile import Profile

__all__ = ["Conflict", "Expansion", "Method", "Need"]

C = TypeVar("C", bound=MethodConfig)


@dataclass(frozen=True)
class Need:
    """A role that some method of the strategy must fill, and the reason, as a clause after 'because'."""

    role: str
    reason: str


@dataclass(frozen=True)
class Conflict:
    """Two methods that cannot stand together.

    Attributes:
        other: the other method's name.
        reason: why, as a sentence.
        when: given this method's config and the other's, whether the conflict exists; ``None`` for always.
    """

    other: str
    reason: str
    when: Callable[[Any, Any], bool] | None = None

    def holds(self, mine: MethodConfig, theirs: MethodConfig) -> bool:
        """Whether the conflict exists between these configs."""
        return self.when is None or self.when(mine, theirs)


@dataclass(frozen=True)
class Expansion:
    """The methods that one method stands for.

    Attributes:
        steps: their names and what a user would write as their configs.
        notes: what the user should know about it, each a sentence.
    """

    steps: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


class Method(ABC, Generic[C]):
    """One thing that can be done to a job. A subclass is final, small, and knows nothing of search or RPC.

    Class attributes:
        name: as written in a strategy.
        aliases: other names users know it by.
        phase: when it is applied.
        Config: its settings.
        provides: the roles it fills. Two methods that fill one role exclude each other.
        default_for: the role it is added for when a strategy leaves that role empty.
        conflicts: methods it cannot stand with.
        variants: configs that compose differently from the default one, by what sets them apart.
        needs_process_group: whether it means nothing in a process that is not one of a group; there it is
            left out with a warning.
        refuses_by: the fields of the plan that decide, with the config, the axes that divide the model and the
            methods that are applied before, whether :meth:`apply` refuses; empty if these alone do. A search
            then takes one refusal to hold for every strategy that is alike in this. ``None``: it may be about
            anything, and holds for no other.

    The first line of the class's docstring is its summary in tables.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    phase: ClassVar[Phase]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    provides: ClassVar[tuple[str, ...]] = ()
    default_for: ClassVar[str | None] = None
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    needs_process_group: ClassVar[bool] = False
    refuses_by: ClassVar[tuple[str, ...] | None] = None

    def __init_subclass__(cls) -> None:
        """Enforces the conventions when the class is made."""
        super().__init_subclass__()
        if inspect.isabstract(cls):
            return
        for base in cls.__bases__:
            if base is not Method and isinstance(base, type) and issubclass(base, Method):
                raise RegistrationError(f"{cls.__name__} inherits from {base.__name__}: methods are final")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", getattr(cls, "name", "")):
            raise RegistrationError(f"{cls.__name__} needs a name in lower case with underscores")
        if not isinstance(getattr(cls, "phase", None), Phase):
            raise RegistrationError(f"{cls.__name__} needs a phase, one of atorch_ns.method.Phase")
        if not (inspect.isclass(cls.Config) and issubclass(cls.Config, MethodConfig)):
            raise RegistrationError(f"{cls.__name__}.Config must derive from MethodConfig")
        if not (cls.__doc__ or "").strip():
            raise RegistrationError(f"{cls.__name__} needs a docstring: its first line is shown to users")
        unknown = sorted({*(cls.refuses_by or ())} - {field.name for field in fields(Plan)})
        if unknown:
            raise RegistrationError(f"{cls.__name__}.refuses_by: Plan has no field {', '.join(unknown)}")

    @property
    def summary(self) -> str:
        """What the method does, in one line."""
        return inspect.getdoc(type(self)).splitlines()[0]  # type: ignore[union-attr]

    def expand(self, config: C, others: Plan, cluster: Cluster) -> Expansion | None:
        """The methods that this one is replaced by before a strategy is completed; ``None`` if it is one itself.

        What stands in its place is resolved as if the user had written it, and is what a saved strategy shows.
        A method that is replaced does nothing itself: none of its other hooks is asked.

        Args:
            config: as written.
            others: what the other methods of the strategy decide, before sizes are fitted to the cluster.
            cluster: where the strategy is resolved for.

        Raises:
            StrategyError: if there is nothing that it could stand for, or a key of the config is at odds with
                the other methods.
        """
        return None

    def roles(self, config: C) -> tuple[str, ...]:
        """The roles filled with this config."""
        return self.provides

    def needs(self, config: C, cluster: Cluster) -> Iterable[Need]:
        """The roles that other methods must fill for this one to work."""
        return ()

    def fit(self, config: C, cluster: Cluster) -> C:
        """The config with sizes fitted to the cluster.

        Raises:
            AtorchError: if it cannot be fitted.
        """
        return config

    def unavailable(self, config: C, cluster: Cluster) -> str | None:
        """Why the method can do nothing here and is left out with a warning; ``None`` if it can."""
        return None

    def notices(self, config: C, cluster: Cluster) -> Iterable[str]:
        """Settings that mean nothing here, each a sentence; shown as one warning."""
        return ()

    def check(self, config: C, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """Everything that makes the method impossible with this config, here, on this model."""
        return []

    def plan(self, plan: Plan, config: C) -> Plan:
        """The plan with this method's decisions added."""
        return plan

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[C]:
        """The configs that a search may choose from; none if the method is never searched."""
        return ()

    def rewritten(self, model: nn.Module, profile: Profile, cluster: Cluster) -> nn.Module | None:
        """``model`` as it computes under a plan with ``replaced``; ``None`` if this method does not set it.

        Asked for the profile of such plans, when a search may choose the method.

        Args:
            model: a copy that may be changed; only its structure counts.
            profile: of the model as it is.
            cluster: where it is to run.
        """
        return None

    def carry(self) -> Any:
        """What a user told this process about the method outside of a config; ``None`` for nothing.

        Trials run in processes of their own. It is sent there, by cloudpickle, and given to :meth:`restore`.
        """
        return None

    def restore(self, carried: Any) -> None:
        """Takes over what :meth:`carry` gave in the process that this one runs trials for."""
        return None

    @abstractmethod
    def apply(self, job: Job, config: C) -> None:
        """Does it to the job."""

    def explain(self, config: C, cluster: Cluster) -> str:
        """Why it is here and how it is set, as a clause for the report."""
        return self.summary
