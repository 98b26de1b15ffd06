"""Every exception this package raises on purpose.

::

    AtorchError
    ├── InputError(ValueError)              an argument of auto_accelerate cannot be used
    │   └── BatchSizeError                  the global batch cannot be divided over the ranks
    ├── StrategyError(ValueError)           a strategy is wrong: carries every problem found
    │   ├── StrategyFileError               its file is missing, truncated, garbage or unsafe
    │   └── MethodNotFoundError             it names a method nobody registered
    ├── LayoutError(ValueError)             sizes that do not multiply to the world, bad rank order
    ├── MissingPackageError(ImportError)    an optional package is absent or broken: names the pip line
    ├── RegistrationError(TypeError)        a method or a replacement breaks the rules it signed up to
    ├── BackendError(RuntimeError)          a backend would train wrongly, or failed to start
    ├── StepError(RuntimeError)             the training step was driven in an order that loses gradients
    ├── CheckpointError(RuntimeError)       a checkpoint is missing, incomplete or of another model
    ├── CoordinatorError(RuntimeError)      the coordinator of a search refuses or cannot be reached
    ├── SearchError(RuntimeError)           no strategy could be found: carries everything that was tried
    └── RankError(RuntimeError)             another rank failed or disagrees: names the ranks and reasons

Messages say what happened, why, what to do, and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "AtorchError", "BackendError", "BatchSizeError", "CheckpointError", "CoordinatorError", "InputError",
    "LayoutError", "MethodNotFoundError", "MissingPackageError", "Problem", "RankError",
    "RegistrationError", "SearchError", "StepError", "StrategyError", "StrategyFileError",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a strategy.

    Attributes:
        message: what is wrong and why, as a sentence without its subject's name.
        method: the method concerned, if any.
        key: the config key concerned, if any.
        value: the offending value as the user wrote it, already shortened to text.
        accepted: what would be accepted instead.
    """

    message: str
    method: str | None = None
    key: str | None = None
    value: str | None = None
    accepted: str | None = None

    def __str__(self) -> str:
        name = ".".join(part for part in (self.method, self.key) if part)
        setting = f"={self.value}" if self.value is not None else ""
        head = f"{name}{setting}: " if name else ""
        tail = f" Accepted: {self.accepted}." if self.accepted else ""
        stop = "." if tail and self.message[-1:] not in ".?!" else ""
        return f"{head}{self.message}{stop}{tail}"


class AtorchError(Exception):
    """Base of every exception raised on purpose by this package.

    Attributes:
        refused_by: name of the method that raised it while it was applied, if one did.
    """

    refused_by: str | None = None


class InputError(AtorchError, ValueError):
    """An argument cannot be used; the message names it."""


class BatchSizeError(InputError):
    """A global batch size that the data-parallel ranks cannot share evenly."""


class StrategyError(AtorchError, ValueError):
    """A strategy that cannot be used; ``problems`` holds everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem] | str, *, source: str | None = None) -> None:
        if isinstance(problems, str):
            problems = [Problem(message=problems)]
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.source = source
        super().__init__(self._problems_text())

    def _problems_text(self) -> str:
        where = f" ({self.source})" if self.source else ""
        if len(self.problems) == 1:
            return f"{self.problems[0]}{where}"
        lines = [f"{len(self.problems)} problems in the strategy{where}:"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_strategy_error, (type(self), self.problems, self.source)


def _rebuild_strategy_error(
    kind: type[StrategyError], problems: tuple[Problem, ...], source: str | None
) -> StrategyError:
    return kind(problems, source=source)


class StrategyFileError(StrategyError):
    """A strategy file that is missing, truncated, of another schema, or unsafe to read."""


class MethodNotFoundError(StrategyError):
    """A method name that no installed package registers."""


class LayoutError(AtorchError, ValueError):
    """Axes, sizes or a rank order that do not describe the world."""


class MissingPackageError(AtorchError, ImportError):
    """An optional package that is absent or fails to import."""

    def __init__(self, package: str, *, needed_by: str, install: str, reason: str = "") -> None:
        self.package = package
        self.install = install
        why = f" ({reason})" if reason else ""
        super().__init__(
            f"{needed_by} needs the package '{package}', which cannot be imported{why}. "
            f"Install it with: {install}"
        )


class RegistrationError(AtorchError, TypeError):
    """A method, config or replacement that breaks the conventions of its registry."""


class BackendError(AtorchError, RuntimeError):
    """A backend that failed to start or is known to train wrongly in this setting."""


class StepError(AtorchError, RuntimeError):
    """The step was driven in an order that would lose or mis-scale gradients."""


class CheckpointError(AtorchError, RuntimeError):
    """A checkpoint that is missing, incomplete, or does not fit the model."""


class SearchError(AtorchError, RuntimeError):
    """A search that found no strategy which runs.

    Attributes:
        outcome: a ``SearchOutcome`` with every candidate and the reason of its fate.
    """

    def __init__(self, message: str, *, outcome: object = None) -> None:
        self.outcome = outcome
        super().__init__(message)


class CoordinatorError(AtorchError, RuntimeError):
    """The coordinator of a search cannot be started or reached, or refuses what it was asked."""


class RankError(AtorchError, RuntimeError):
    """Other ranks failed, or the ranks were given different inputs.

    Attributes:
        failures: reason by rank.
    """

    def __init__(self, message: str, *, failures: dict[int, str] | None = None) -> None:
        self.failures = dict(failures or {})
        super().__init__(message)
