"""Policy of a Trainer: what ``pas_policy`` means, of parallelize or of auto_accelerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.errors import InputError
from atorch_ns.parallel.policies import POLICIES
from atorch_ns.text import did_you_mean
from atorch_ns.trainer.components import named

AUTO = "auto"
"""The policy that searches for a strategy."""

_FILES = (".json", ".yaml", ".yml")


@dataclass(frozen=True)
class Policy:
    """What decides how the model is trained.

    Attributes:
        rule: a policy of ``parallelize``, by name or as a function; ``None`` where a strategy does.
        strategy: a strategy file; ``None`` to search for one, where there is no rule.
    """

    rule: str | Callable[..., Any] | None = None
    strategy: Path | None = None

    @classmethod
    def of(cls, given: Any) -> Policy:
        """What ``pas_policy`` means.

        Raises:
            InputError: if it means nothing.
        """
        if isinstance(given, PathLike) or (isinstance(given, str) and given.endswith(_FILES)):
            path = Path(given)
            if not path.is_file():
                raise InputError(f"pas_policy: there is no strategy file {path}.")
            return cls(strategy=path)
        if given == AUTO:
            return cls()
        if isinstance(given, str) and given not in POLICIES and "." not in given:
            known = [*POLICIES, AUTO]
            raise InputError(
                f"pas_policy: there is no policy {given!r}.{did_you_mean(given, known)} Policies are {', '.join(known)}, a "
                "function, or a strategy file."
            )
        return cls(rule=given if given in POLICIES else named(given, what="pas_policy"))
