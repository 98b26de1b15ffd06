"""Strategy: the ordered methods that a model is trained with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from atorch_ns.errors import Problem, StrategyError, StrategyFileError
from atorch_ns.strategy.file import (
    Requires,
    read_strategy_bytes,
    read_strategy_path,
    strategy_bytes,
    write_atomically,
)
from atorch_ns.strategy.values import JSON, UnwritableValueError, canonical, canonical_text
from atorch_ns.text import clip_text, with_article


@dataclass(frozen=True, init=False)
class Step:
    """One method of a strategy.

    Attributes:
        name: the method's name, as registered, or one of its aliases.
        config: the config as JSON values, a new copy at every access; ``None`` means the method's defaults.

    Raises:
        UnwritableValueError: if the config holds something that has no readable form.
    """

    name: str
    _config: str = field(repr=False)

    def __init__(self, name: str, config: Any = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_config", canonical_text(canonical(config)))  # hashable, and immutable

    @property
    def config(self) -> JSON:
        """The config, as plain JSON values."""
        value: JSON = json.loads(self._config)
        return value

    def __repr__(self) -> str:
        return f"Step({self.name!r})" if self.config is None else f"Step({self.name!r}, {self.config!r})"

    def __str__(self) -> str:
        return self.name if self.config is None else f"{self.name}({_config_text(self.config)})"


def _config_text(config: JSON) -> str:
    if isinstance(config, dict):
        return ", ".join(f"{key}={_shown_value(item)}" for key, item in config.items())
    return _shown_value(config)


def _shown_value(value: JSON) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_shown_value(item) for item in value) + "]"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ACCEPTED = "'name', ('name', config), {'name': ..., 'config': ...} or a Step"


def steps_from(entries: Iterable[Any]) -> tuple[Step, ...]:
    """Turns entries into steps.

    Raises:
        StrategyError: with one problem for every entry that cannot be read and every method named twice.
    """
    steps: list[Step] = []
    problems: list[Problem] = []
    for position, entry in enumerate(entries):
        try:
            step = _step_from(entry)
        except _EntryError as error:
            problems.append(Problem(message=f"entry {position} of the strategy {error}", method=error.method))
            continue
        if any(step.name == earlier.name for earlier in steps):
            problems.append(Problem(message="named twice; keep one of the two", method=step.name))
        steps.append(step)
    if problems:
        raise StrategyError(problems)
    return tuple(steps)


class _EntryError(ValueError):
    def __init__(self, message: str, method: str | None = None) -> None:
        self.method = method
        super().__init__(message)


def _step_from(entry: Any) -> Step:
    if isinstance(entry, Step):
        return entry
    if isinstance(entry, str):
        return _make_step(entry, None)
    if isinstance(entry, Mapping):
        unknown = set(entry) - {"name", "config"}
        if "name" not in entry or unknown:
            raise _EntryError(
                f"has the keys {sorted(map(str, entry))}; it needs 'name' and may have 'config'"
            )
        return _make_step(entry["name"], entry.get("config"))
    if isinstance(entry, Sequence):
        # ATorch writes (name, config, tunable). The search decides what may be tuned: the third is dropped.
        if len(entry) in (1, 2) or (len(entry) == 3 and isinstance(entry[2], bool)):
            return _make_step(entry[0], entry[1] if len(entry) > 1 else None)
        raise _EntryError(f"is {clip_text(repr(entry), 60)}, which has {len(entry)} items; write {ACCEPTED}")
    raise _EntryError(f"is {clip_text(repr(entry), 60)}, {with_article(entry)}; write {ACCEPTED}")


def _make_step(name: Any, config: Any) -> Step:
    if not isinstance(name, str) or not name:
        raise _EntryError(
            f"has {clip_text(repr(name), 60)} where the name of a method is expected; write {ACCEPTED}"
        )
    try:
        return Step(name, config)
    except UnwritableValueError as error:
        raise _EntryError(f"cannot be kept: {error}", method=name) from error


_NAMES = re.compile(r"[a-z][a-z0-9_]*(\s*,\s*[a-z][a-z0-9_]*)*")  # names with commas between them


@dataclass(frozen=True, init=False)
class Strategy:
    """A short list of named methods, each with a config.

    A strategy cannot be changed, can be a key of a dictionary, and has exactly one form as a file. Two
    strategies are equal when their steps are equal, wherever they came from.

    Attributes:
        steps: the methods.
        requires: setting that it was resolved for (number of processes, device, torch); empty if unknown.
        provenance: origin as JSON values: versions, model fingerprint, measured figures.

    Example:
        >>> Strategy(["fsdp", ("amp_native", "bf16")]).names
        ('fsdp', 'amp_native')
    """

    steps: tuple[Step, ...]
    requires: Requires = field(compare=False)
    _provenance: str = field(repr=False, compare=False)

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
        """The strategy's origin, a new copy at every access."""
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
        # JSON text, then names, then a path; a file is read as one even if its name could be a method's.
        if isinstance(source, str) and source.lstrip()[:1] in ("[", "{"):
            return cls._from_document(read_strategy_bytes(source.encode(), name="the given text"))
        if isinstance(source, str) and _NAMES.fullmatch(source) and not Path(source).exists():
            return cls(name.strip() for name in source.split(","))
        if isinstance(source, str) and not Path(source).exists():
            raise StrategyFileError(
                "no such strategy file. Methods by name: 'fsdp,checkpoint', or a list, "
                "['fsdp', ('amp_native', 'bf16')]",
                source=source,
            )
        if isinstance(source, (str, PathLike)):
            return cls._from_document(read_strategy_path(source))
        if isinstance(source, Mapping):
            content = json.dumps(canonical(source)).encode()
            return cls._from_document(read_strategy_bytes(content, name="the given mapping"))
        if isinstance(source, Iterable):
            return cls(source)
        raise StrategyError(
            f"{with_article(source)} is not a strategy. Give a list of method names or (name, config) pairs, "
            "a Strategy, a path, or the bytes of a strategy file."
        )

    @classmethod
    def _from_document(cls, document: Mapping[str, Any]) -> Strategy:
        requires = Requires(**document.get("requires", {}))
        return cls(document["steps"], requires=requires, provenance=document.get("provenance", {}))

    def to_bytes(self, *, suffix: str = ".json") -> bytes:
        """The file's bytes, always the same for one strategy; YAML by the suffix ``.yaml`` or ``.yml``."""
        return strategy_bytes(self._make_document(), suffix)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the strategy to ``path``, JSON or YAML by its suffix, all of it or nothing.

        Raises:
            StrategyFileError: if the place cannot be written.
        """
        write_atomically(path, self._make_document())

    def _make_document(self) -> dict[str, JSON]:
        return {
            "schema": 1,
            "requires": self.requires.as_json(),
            "steps": [{"name": step.name, "config": step.config} for step in self.steps],
            "provenance": self.provenance,
        }
