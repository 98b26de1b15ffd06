"""Strategy: the ordered methods that a model is trained with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.errors import StrategyError, StrategyFileError
from atorch_ns.strategy._file import read_strategy_bytes, read_strategy_path, strategy_bytes, write_atomically
from atorch_ns.strategy._forms import steps_from
from atorch_ns.strategy._requires import Requires
from atorch_ns.strategy._step import Step
from atorch_ns.strategy._values import JSON, canonical, canonical_text

__all__ = ["Strategy"]

_NAMES = re.compile(r"[a-z][a-z0-9_]*(\s*,\s*[a-z][a-z0-9_]*)*")


@dataclass(frozen=True, init=False)
class Strategy:
    """A short list of named methods, each with a config.

    A strategy cannot be changed, can be a key of a dictionary, and has exactly one form as a file.

    Attributes:
        steps: the methods.
        requires: what it was resolved for (number of processes, device, torch); empty where unknown.
        provenance: where it came from: versions, model fingerprint, measured figures. JSON values.

    Example:
        >>> Strategy(["fsdp", ("amp_native", "bf16")]).names
        ('fsdp', 'amp_native')
    """

    steps: tuple[Step, ...]
    requires: Requires
    _provenance: str = field(repr=False)

    def __init__(
        self,
        steps: Iterable[Any] = (),
        *,
        requires: Requires | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        object.__setattr__(self, "steps", steps_from(steps))
        object.__setattr__(self, "requires", requires or Requires())
        object.__setattr__(self, "_provenance", canonical_text(canonical(dict(provenance or {}))))

    @property
    def provenance(self) -> dict[str, JSON]:
        """Where the strategy came from; a new copy at every access."""
        value: dict[str, JSON] = json.loads(self._provenance)
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """The methods' names, in order."""
        return tuple(step.name for step in self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> JSON:
        """The config of the method called ``name``; KeyError if the strategy has none."""
        for step in self.steps:
            if step.name == name:
                return step.config
        raise KeyError(name)

    def __str__(self) -> str:
        return " → ".join(str(step) for step in self.steps) or "(no method)"

    @classmethod
    def load(cls, source: Any) -> Strategy:
        """Reads a strategy from any form it takes.

        Args:
            source: a :class:`Strategy`; a list or tuple of names, ``(name, config)`` pairs and
                :class:`Step`; names with commas between them; a path; JSON text; or the bytes of a file.

        Raises:
            StrategyFileError: a file that is missing, truncated, garbage, of an unknown schema, or a pickle.
            StrategyError: entries that are not methods; every such entry is reported.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, (bytes, bytearray, memoryview)):
            return cls._from_document(read_strategy_bytes(bytes(source), name="the given bytes"))
        if isinstance(source, str) and source.lstrip()[:1] in ("[", "{"):
            return cls._from_document(read_strategy_bytes(source.encode(), name="the given text"))
        if isinstance(source, str) and _NAMES.fullmatch(source) and not Path(source).exists():
            return cls(name.strip() for name in source.split(","))
        if isinstance(source, str) and not Path(source).exists():
            raise StrategyFileError(
                "no such strategy file. Methods by name are 'fsdp,checkpoint', or a list, "
                "['fsdp', ('amp_native', 'bf16')]",
                source=source,
            )
        if isinstance(source, (str, PathLike)):
            return cls._from_document(read_strategy_path(source))
        if isinstance(source, Mapping):
            return cls._from_document(read_strategy_bytes(_json_bytes(source), name="the given mapping"))
        if isinstance(source, Iterable):
            return cls(source)
        raise StrategyError(
            f"a {type(source).__name__} is no strategy. Give a list of method names or (name, config) pairs, "
            "a Strategy, a path, or the bytes of a strategy file."
        )

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Strategy:
        requires = Requires(**document.get("requires", {}))
        return cls(document["steps"], requires=requires, provenance=document.get("provenance", {}))

    def to_bytes(self, *, suffix: str = ".json") -> bytes:
        """The file's bytes; the same strategy always gives the same.

        Args:
            suffix: ``.json``, or ``.yaml``/``.yml`` for YAML.
        """
        return strategy_bytes(self._document(), suffix)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the strategy to ``path``, JSON or YAML by its suffix, all of it or nothing.

        Raises:
            StrategyFileError: if the place cannot be written.
        """
        write_atomically(path, self._document())

    def _document(self) -> dict[str, JSON]:
        return {
            "schema": 1,
            "requires": self.requires.as_json(),
            "steps": [{"name": step.name, "config": step.config} for step in self.steps],
            "provenance": self.provenance,
        }


def _json_bytes(source: Mapping[Any, Any]) -> bytes:
    return json.dumps(canonical(source)).encode()
