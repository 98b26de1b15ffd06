"""What auto_accelerate's arguments say about where the strategy comes from, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atorch_ns.cluster import Cluster
from atorch_ns.engine._request import EngineAddress
from atorch_ns.errors import InputError, StrategyFileError
from atorch_ns.method import Registry
from atorch_ns.search import SearchSettings, read_wishes

__all__ = ["Asked"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of ``auto_accelerate`` that choose or search a strategy, as they were given."""

    load_strategy: Any
    finetune_strategy: bool
    save_strategy_to_file: str | PathLike[str] | None
    excluded: Sequence[Any] | None
    included: Sequence[Any] | None
    search: SearchSettings | Mapping[str, Any] | None
    time_limit: float | None
    search_history: str | PathLike[str] | None
    search_calibration: str | PathLike[str] | None
    search_logs: str | PathLike[str] | None
    search_engine: EngineAddress | str | None
    sample_batch: Any
    batch_size: int | None
    ignore_dryrun_on_load_strategy: bool
    verbose: bool

    @property
    def searches(self) -> bool:
        """Whether there is anything to search for."""
        return self.load_strategy is None or self.finetune_strategy

    def check(self, registry: Registry, cluster: Cluster) -> None:
        """Checks every argument and reports all that is wrong at once.

        Raises:
            InputError: naming the arguments.
            StrategyFileError: for a folder that does not exist.
        """
        problems = [*self._type_problems()]
        if self.finetune_strategy is True and self.load_strategy is None:
            problems.append(
                "finetune_strategy=True searches around a strategy; give it as load_strategy, or leave "
                "finetune_strategy out to search over all strategies."
            )
        if problems:
            raise InputError("\n".join(problems))
        for name in ("save_strategy_to_file", "search_history", "search_logs"):
            path = getattr(self, name)
            if path is not None and not Path(path).parent.is_dir():
                raise StrategyFileError(f"the folder of {name}={str(path)!r} does not exist")
        read_wishes(registry, included=self.included, excluded=self.excluded, cluster=cluster)

    def settings(self) -> SearchSettings:
        """The settings of the search, the time limit among them.

        Raises:
            InputError: naming the keys that are wrong.
        """
        given = self.search or {}
        fields = given.model_dump(exclude_unset=True) if isinstance(given, SearchSettings) else dict(given)
        if self.time_limit is not None:
            fields["time_limit_s"] = self.time_limit
        try:
            return SearchSettings(**fields)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise InputError(f"search: {'; '.join(lines)}") from None

    @property
    def log_dir(self) -> Path | None:
        """Folder for the logs of trials that fail: as given, or beside a file that the search leaves."""
        if self.search_logs is not None:
            return Path(self.search_logs).absolute()
        left = self.save_strategy_to_file or self.search_history
        return None if left is None else Path(left).absolute().with_suffix(".logs")

    def _type_problems(self) -> list[str]:
        problems = [
            f"{name} must be True or False; it is {_kind(getattr(self, name))}."
            for name in ("finetune_strategy", "ignore_dryrun_on_load_strategy", "verbose")
            if not isinstance(getattr(self, name), bool)
        ]
        for name in ("excluded", "included"):
            value = getattr(self, name)
            if isinstance(value, str):
                problems.append(f"{name} is a list; write [{value!r}].")
            elif value is not None and not isinstance(value, (list, tuple)):
                problems.append(
                    f"{name} must be a list of names and (name, config) pairs; it is {_kind(value)}."
                )
        for name in ("save_strategy_to_file", "search_history", "search_calibration", "search_logs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, PathLike)):
                problems.append(f"{name} must be a path; it is {_kind(value)}.")
        if self.search is not None and not isinstance(self.search, (SearchSettings, Mapping)):
            problems.append(f"search must be a dictionary or SearchSettings; it is {_kind(self.search)}.")
        if not _is_positive(self.time_limit, int, float):
            problems.append(f"time_limit must be a positive number of seconds; it is {self.time_limit!r}.")
        if not _is_positive(self.batch_size, int):
            problems.append(f"batch_size must be a positive integer; it is {self.batch_size!r}.")
        engine = self.search_engine
        if engine is not None and not isinstance(engine, (str, EngineAddress)):
            problems.append(f"search_engine must be 'host:port' or an EngineAddress; it is {_kind(engine)}.")
        return problems


def _is_positive(value: Any, *kinds: type) -> bool:
    """Whether it is left out, or a number above 0."""
    number = isinstance(value, kinds) and not isinstance(value, bool)
    return value is None or (number and float(value) > 0)


def _kind(value: Any) -> str:
    name = type(value).__name__
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}"
