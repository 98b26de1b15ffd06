"""Search request: the caller's arguments of the fully automatic mode, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atorch_ns.cluster import Cluster
from atorch_ns.engine.rpc.auth import Tls
from atorch_ns.errors import InputError, StrategyFileError
from atorch_ns.method import Registry
from atorch_ns.search import Observer, SearchSettings, read_constraints
from atorch_ns.strategy import Strategy
from atorch_ns.text import with_article

TOKEN_VARIABLE = "ATORCH_NS_ENGINE_TOKEN"
"""The environment variable that holds the token of a standalone engine."""


def _ignore_event(event: object) -> None:
    """Ignores the event."""


@dataclass(frozen=True)
class EngineAddress:
    """A standalone engine that runs this job's search.

    Attributes:
        address: ``host:port``.
        token: the engine's token.
        tls: the certificates to trust; without it nothing is encrypted.
    """

    address: str
    token: str = field(repr=False)
    tls: Tls | None = None

    @classmethod
    def read(cls, address: EngineAddress | str) -> EngineAddress:
        """An address as it is, or ``"host:port"`` with the token of the environment.

        Raises:
            InputError: if the text is not an address, or there is no token.
        """
        if isinstance(address, EngineAddress):
            return address
        host, _, port = str(address).rpartition(":")  # from the right: an IPv6 address has colons
        if not host or not port.isdigit():
            raise InputError(f"search_engine={address!r} is not an address; write host:port.")
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise InputError(
                f"the engine at {address} requires a token: set the environment variable "
                f"{TOKEN_VARIABLE} to it on every rank, or give EngineAddress(address, token)."
            )
        return cls(address=address, token=token)


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The arguments of ``auto_accelerate`` that choose or search a strategy, as they were given.

    Attributes:
        observer: observer of the search's events, on rank 0.
    """

    load_strategy: Any = None
    finetune_strategy: bool = False
    save_strategy_to_file: str | PathLike[str] | None = None
    excluded: Sequence[Any] | None = None
    included: Sequence[Any] | None = None
    search: SearchSettings | Mapping[str, Any] | None = None
    time_limit: float | None = None
    search_history: str | PathLike[str] | None = None
    search_calibration: str | PathLike[str] | None = None
    search_logs: str | PathLike[str] | None = None
    search_engine: EngineAddress | str | None = None
    sample_batch: Any = None
    batch_size: int | None = None
    ignore_dryrun_on_load_strategy: bool = True
    verbose: bool = False
    observer: Observer = _ignore_event

    @property
    def searches(self) -> bool:
        """True if there is anything to search for."""
        return self.load_strategy is None or self.finetune_strategy

    @cached_property
    def base(self) -> Strategy | None:
        """The given strategy, to be used or searched around; ``None`` to search over everything.

        Raises:
            StrategyError: if it cannot be read.
        """
        return None if self.load_strategy is None else Strategy.load(self.load_strategy)

    @cached_property
    def engine(self) -> EngineAddress | None:
        """The standalone engine that runs the search; ``None`` for a coordinator in rank 0's process.

        Raises:
            InputError: if its address or token is missing.
        """
        return None if self.search_engine is None else EngineAddress.read(self.search_engine)

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
        if problems:  # before paths are looked at, which need the right types
            raise InputError("\n".join(problems))
        for name in ("save_strategy_to_file", "search_history", "search_logs"):
            path = getattr(self, name)
            if path is not None and not Path(path).parent.is_dir():
                raise StrategyFileError(f"the folder of {name}={str(path)!r} does not exist")
        read_constraints(registry, included=self.included, excluded=self.excluded, cluster=cluster)

    @cached_property
    def settings(self) -> SearchSettings:
        """The settings of the search, the time limit among them.

        Raises:
            InputError: naming the keys that are wrong.
        """
        options = self.search or {}
        fields = (
            # Only fields that were set: the search may exceed max_micro_batches unless it was given.
            options.model_dump(exclude_unset=True) if isinstance(options, SearchSettings) else dict(options)
        )
        if self.time_limit is not None:
            fields["time_limit_s"] = self.time_limit
        try:
            return SearchSettings(**fields)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise InputError(f"search: {'; '.join(lines)}") from None

    @property
    def log_dir(self) -> Path | None:
        """Folder for the logs of trials that fail: as given, or next to a file that the search writes.

        The search numbers it where the name is taken, and removes it if empty. ``None``: a temporary one.
        """
        if self.search_logs is not None:
            return Path(self.search_logs).absolute()
        output = self.save_strategy_to_file or self.search_history
        return None if output is None else Path(output).absolute().with_suffix(".logs")

    def _type_problems(self) -> list[str]:
        problems = [
            f"{name} must be True or False; it is {with_article(getattr(self, name))}."
            for name in ("finetune_strategy", "ignore_dryrun_on_load_strategy", "verbose")
            if not isinstance(getattr(self, name), bool)
        ]
        for name in ("excluded", "included"):
            value = getattr(self, name)
            if isinstance(value, str):
                problems.append(f"{name} is a list; write [{value!r}].")
            elif value is not None and not isinstance(value, (list, tuple)):
                problems.append(
                    f"{name} must be a list of names and (name, config) pairs; it is {with_article(value)}."
                )
        for name in ("save_strategy_to_file", "search_history", "search_calibration", "search_logs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, PathLike)):
                problems.append(f"{name} must be a path; it is {with_article(value)}.")
        if self.search is not None and not isinstance(self.search, (SearchSettings, Mapping)):
            problems.append(
                f"search must be a dictionary or SearchSettings; it is {with_article(self.search)}."
            )
        if not _is_positive(self.time_limit, int, float):
            problems.append(f"time_limit must be a positive number of seconds; it is {self.time_limit!r}.")
        if not _is_positive(self.batch_size, int):
            problems.append(f"batch_size must be a positive integer; it is {self.batch_size!r}.")
        engine = self.search_engine
        if engine is not None and not isinstance(engine, (str, EngineAddress)):
            problems.append(
                f"search_engine must be 'host:port' or an EngineAddress; it is {with_article(engine)}."
            )
        return problems


def _is_positive(value: Any, *kinds: type) -> bool:
    # None is allowed: the argument was left out. True and False are integers to Python.
    number = isinstance(value, kinds) and not isinstance(value, bool)
    return value is None or (number and float(value) > 0)
