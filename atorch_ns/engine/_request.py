"""What the caller asks of the fully automatic mode."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atorch_ns.engine._auth import Tls
from atorch_ns.errors import InputError
from atorch_ns.search import Observer, SearchSettings
from atorch_ns.strategy import Strategy

__all__ = ["EngineAddress", "SearchRequest"]

TOKEN_VARIABLE = "ATORCH_NS_ENGINE_TOKEN"
"""The environment variable that holds the token of a standalone engine."""


def _silent(event: object) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class EngineAddress:
    """A standalone engine that runs this job's search.

    Attributes:
        address: ``host:port``.
        token: that it asks for.
        tls: the certificates to trust; without it nothing is encrypted.
    """

    address: str
    token: str = field(repr=False)
    tls: Tls | None = None

    @classmethod
    def read(cls, given: EngineAddress | str) -> EngineAddress:
        """An address as it is, or ``"host:port"`` with the token of the environment.

        Raises:
            InputError: if the text is no address, or there is no token.
        """
        if isinstance(given, EngineAddress):
            return given
        host, _, port = str(given).rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"search_engine={given!r} is no address; write host:port.")
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise InputError(
                f"the engine at {given} asks for a token: put it into the environment variable "
                f"{TOKEN_VARIABLE} on every rank, or give EngineAddress(address, token)."
            )
        return cls(address=given, token=token)


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What the caller asks of the fully automatic mode.

    Attributes:
        settings: what the search looks for, and when it ends.
        excluded, included: methods, configs or groups that may not, or must, be in the strategy.
        base: a strategy whose configs are reopened; ``None`` to search over everything.
        sample_batch: a collated batch in place of the dataset's samples.
        batch_size: samples in a step, where ``dataloader_args`` does not say.
        history: file that every trial is appended to, and that an interrupted search resumes from.
        calibration: file of factors from earlier trials and training that correct the hardware's figures.
        log_dir: folder for the logs of trials that fail, made by the search with a number behind its name where
            it is there already; ``None`` for a temporary one. It is removed if it stays empty.
        engine: a standalone engine; ``None`` for a coordinator in rank 0's process.
        observer: is told what happens, on rank 0.
    """

    settings: SearchSettings = field(default_factory=SearchSettings)
    excluded: Sequence[Any] | None = None
    included: Sequence[Any] | None = None
    base: Strategy | None = None
    sample_batch: Any = None
    batch_size: int | None = None
    history: Path | None = None
    calibration: Path | None = None
    log_dir: Path | None = None
    engine: EngineAddress | None = None
    observer: Observer = _silent
