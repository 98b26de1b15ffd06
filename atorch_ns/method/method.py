"""Method: one thing that can be done to a training job."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    get_args,
    runtime_checkable,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool, model_validator
from pydantic.fields import FieldInfo

from atorch_ns.errors import Problem, RegistrationError
from atorch_ns.method.phase import Phase
from atorch_ns.strategy import Plan

if TYPE_CHECKING:
    from torch import nn

    from atorch_ns.cluster import Cluster
    from atorch_ns.job import Job
    from atorch_ns.profile import Profile

Flag = StrictBool
"""True or False, without conversion from other values."""


class MethodConfig(BaseModel):
    """A method's settings: frozen, keyword-only, JSON values only, each field with a description.

    A subclass may accept shorthand by overriding :meth:`from_shorthand`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    @classmethod
    def from_shorthand(cls, value: Any) -> Mapping[str, Any]:
        """The keys for a config that is not written as a mapping.

        Raises:
            ValueError: if this method has no such shorthand.
        """
        raise ValueError(f"write its config as a mapping of {', '.join(cls.model_fields) or 'nothing'}")

    @model_validator(mode="before")
    @classmethod
    def _accept_shorthand(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, (Mapping, BaseModel)):
            return value
        return cls.from_shorthand(value)

    def as_json(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as JSON values."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
"""Names, or a single string as one name."""

_SELECTS = "selects modules"  # mark in a field's annotation

ModuleSelectors = Annotated[Names, _SELECTS]
"""Modules by class name, qualified class name, or dotted path with ``*``; a single string is one of them."""


def selector_keys(config: type[BaseModel]) -> list[str]:
    """The keys of a config that select modules: fields of type :data:`ModuleSelectors`, or of it or None."""

    def selects(field: FieldInfo) -> bool:
        parts = [field.metadata, *(getattr(part, "__metadata__", ()) for part in get_args(field.annotation))]
        return any(_SELECTS in part for part in parts)

    return [key for key, field in config.model_fields.items() if selects(field)]


_DTYPES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_KNOWN_DTYPES = ("float16", "bfloat16", "float32")


def dtype_name(value: Any) -> str:
    """The torch name of a floating dtype written as ``"bf16"``, ``"torch.bfloat16"`` or ``"bfloat16"``.

    Raises:
        ValueError: for anything else.
    """
    name = str(value).removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if name not in _KNOWN_DTYPES:
        raise ValueError(f"{value!r} is not a valid dtype; accepted: fp16, bf16, fp32 or their torch names")
    return name


C = TypeVar("C", bound=MethodConfig)


@dataclass(frozen=True)
class Need:
    """A role that another method must fill, and the reason, as a clause after 'because'."""

    role: str
    reason: str


@dataclass(frozen=True)
class Conflict:
    """Two methods that cannot be combined.

    Attributes:
        other: the other method's name.
        reason: why, as a sentence.
        when: whether the conflict exists for this method's config and the other's; ``None`` for always.
    """

    other: str
    reason: str
    when: Callable[[Any, Any], bool] | None = None

    def holds(self, mine: MethodConfig, theirs: MethodConfig) -> bool:
        """Returns whether the conflict exists between these configs."""
        return self.when is None or self.when(mine, theirs)


@dataclass(frozen=True)
class Expansion:
    """The methods that replace one method.

    Attributes:
        steps: their names, and their configs as a user would write them.
        notes: facts for the user, each a sentence.
    """

    steps: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


def _plan_fields() -> set[str]:
    values = {field.name: getattr(Plan(), field.name) for field in fields(Plan)}
    groups = {name: value for name, value in values.items() if is_dataclass(value)}
    return {*values, *(f"{name}.{field.name}" for name, value in groups.items() for field in fields(value))}


class Method(ABC, Generic[C]):
    """One thing that can be done to a job. Subclasses must be final.

    Class attributes:
        name: name in a strategy.
        aliases: other names users know it by.
        phase: phase in which it is applied.
        Config: class of its settings.
        provides: the roles it fills. Two methods that fill one role exclude each other.
        default_for: the role for which it is the default, added when a strategy leaves that role empty.
        conflicts: methods that it cannot be combined with.
        variants: configs that compose differently from the default one, by what sets them apart.
        needs_process_group: whether it is left out with a warning in a process without a group.
        refuses_by: plan fields (``compiled``, ``sharding.layout``) that, with the config, the axes that
            divide the model and the methods applied earlier, determine whether :meth:`apply` refuses. A
            search applies one refusal to all strategies with equal values. ``None``: it applies to no other.

    The first line of the class's docstring is its summary in tables. A method with further needs implements
    the protocol of that need as well: :class:`Expands`, :class:`FitsCluster`, :class:`FollowsPlan`,
    :class:`ReplacesModules` or :class:`CarriesState`.
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
        unknown = sorted({*(cls.refuses_by or ())} - _plan_fields())
        if unknown:
            raise RegistrationError(f"{cls.__name__}.refuses_by: Plan has no field {', '.join(unknown)}")

    @property
    def summary(self) -> str:
        """Summary of the method in one line."""
        return inspect.getdoc(type(self)).splitlines()[0]  # type: ignore[union-attr]

    def roles(self, config: C) -> tuple[str, ...]:
        """The roles filled with this config."""
        return self.provides

    def needs(self, config: C, cluster: Cluster) -> Iterable[Need]:
        """The roles that other methods must fill for this one to work."""
        return ()

    def unavailable(self, config: C, cluster: Cluster) -> str | None:
        """Reason for which the method has no effect here and is omitted with a warning, or ``None``."""
        return None

    def notices(self, config: C, cluster: Cluster) -> Iterable[str]:
        """Settings without effect here, each a sentence, shown as one warning."""
        return ()

    def check(self, config: C, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """Problems that make the method impossible with this config, on this cluster and model."""
        return []

    def check_plan(self, config: C, plan: Plan, cluster: Cluster) -> list[Problem]:
        """Problems that arise from the joint decisions of all methods."""
        return []

    def plan(self, plan: Plan, config: C) -> Plan:
        """The plan with this method's decisions added."""
        return plan

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[C]:
        """The configs that a search may choose from; none if the method is never searched."""
        return ()

    @abstractmethod
    def apply(self, job: Job, config: C) -> None:
        """Applies the method to the job."""

    def explain(self, config: C, cluster: Cluster) -> str:
        """Reason for the method and its settings, as a clause for the report."""
        return self.summary


@runtime_checkable
class Expands(Protocol):
    """A method that can stand for other methods."""

    def expand(self, config: Any, others: Plan, cluster: Cluster) -> Expansion | None:
        """The methods that replace this one before a strategy is completed, or ``None`` if it stays.

        They are resolved as if the user had written them, and a saved strategy shows them. None of the other
        hooks of a replaced method is called.

        Args:
            config: the config as written.
            others: the plan of the strategy's other methods, before sizes are fitted to the cluster.
            cluster: the cluster that the strategy is resolved for.

        Raises:
            StrategyError: if it can stand for no method, or a key of the config contradicts the
                the other methods.
        """


@runtime_checkable
class FitsCluster(Protocol):
    """A method whose config holds sizes that depend on the cluster."""

    def fit(self, config: Any, cluster: Cluster) -> Any:
        """The config with sizes fitted to the cluster.

        Raises:
            AtorchError: if it cannot be fitted.
        """


def fit_config(method: Method[Any], config: MethodConfig, cluster: Cluster) -> MethodConfig:
    """``config`` fitted by a method that :class:`FitsCluster`, or unchanged for other methods."""
    if not isinstance(method, FitsCluster):
        return config
    result: MethodConfig = method.fit(config, cluster)
    return result


@runtime_checkable
class FollowsPlan(Protocol):
    """A method whose config may leave open a choice that a search makes by predicted memory."""

    def following(self, config: Any, plan: Plan) -> Any:
        """The config with open choices filled in from ``plan``."""


@runtime_checkable
class ReplacesModules(Protocol):
    """A method that changes the computation of the model. A search needs a profile of the changed model."""

    def rewritten(self, model: nn.Module, profile: Profile, cluster: Cluster) -> nn.Module | None:
        """``model``, a copy that may be changed, with modules replaced, or ``None`` if none is.

        Only its structure counts. ``profile`` is that of the original model.
        """


@runtime_checkable
class CarriesState(Protocol):
    """A method with process state set by users outside of a config, e.g. by registering a class.

    Trials run in processes of their own, which receive it.
    """

    def carry(self) -> Any:
        """State to send to another process by cloudpickle, or ``None`` for nothing."""

    def restore(self, carried: Any) -> None:
        """Restores the result of :meth:`carry` in a process that runs trials for this one."""
