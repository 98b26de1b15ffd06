"""What a conversion gives: a strategy, and a word on every key of the file it was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from atorch_ns.errors import StrategyFileError
from atorch_ns.strategy._requires import Requires
from atorch_ns.strategy._strategy import Strategy

__all__ = ["Conversion", "Converter", "Remark", "number", "switch"]


class Remark(NamedTuple):
    """A key of the other system's file, and what became of it."""

    key: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A strategy made from the file of another system.

    Attributes:
        strategy: what was made.
        source: the system: ``"atorch"``, ``"accelerate"`` or ``"deepspeed"``.
        carried: the keys that became part of the strategy, and how.
        left_out: the keys that did not, each with the reason.
        warnings: what would train otherwise than the file's author may think, and what to do.
    """

    strategy: Strategy
    source: str
    carried: tuple[Remark, ...] = ()
    left_out: tuple[Remark, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "schema": 1,
            "source": self.source,
            "strategy": [{"name": step.name, "config": step.config} for step in self.strategy],
            "carried": [remark._asdict() for remark in self.carried],
            "left_out": [remark._asdict() for remark in self.left_out],
            "warnings": list(self.warnings),
        }


class Converter:
    """Collects methods and remarks. A key that nobody has remarked on is left out with a reason of its own.

    Args:
        document: the file's content.
        source: the system that it is of.
        name: of the file, for messages, and for the folder of files that it names.
    """

    def __init__(self, document: Mapping[str, Any], *, source: str, name: str) -> None:
        self.name = name
        self.folder = Path(name).parent
        self._source = source
        self._document = document
        self._steps: dict[str, dict[str, Any]] = {}
        self._carried: list[Remark] = []
        self._left_out: list[Remark] = []
        self._warnings: list[str] = []

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, with dots between the keys of nested mappings; the caller says what became of it.

        What another program fills in later, ``"auto"``, counts as not given, and is left out.
        """
        value = self.raw(key)
        if value is None:
            return default
        if value == "auto":
            self.leave(key, "'auto' is filled in by the program that reads the file; give the value itself")
            return default
        return value

    def raw(self, key: str) -> Any:
        """The value of a key as it stands in the file, ``"auto"`` included; nothing is said of it."""
        value: Any = self._document
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def use(self, method: str, **config: Any) -> None:
        """Adds a method, or keys to the config of one that is there."""
        self._steps.setdefault(method, {}).update(config)

    def drop(self, method: str) -> None:
        """Takes a method back."""
        self._steps.pop(method, None)

    def config(self, method: str) -> dict[str, Any] | None:
        """The config of a method that is used; ``None`` if it is not."""
        return self._steps.get(method)

    def carry(self, key: str, text: str) -> None:
        """Says what a key became."""
        self._carried.append(Remark(key, text))

    def leave(self, key: str, reason: str) -> None:
        """Says why a key became nothing."""
        remark = Remark(key, reason)
        if remark not in self._left_out:
            self._left_out.append(remark)

    def told(self, key: str) -> bool:
        """Whether somebody has said what became of a key."""
        return any(remark.key == key for remark in (*self._carried, *self._left_out))

    def warn(self, text: str) -> None:
        """Says what would train otherwise than the file's author may think, and what to do."""
        self._warnings.append(text)

    def absorb(self, other: Converter, *, why: Callable[[str], str], before: str) -> None:
        """Takes over what was made of another file that this one names.

        Args:
            other: its converter.
            why: the reason for a key of it without a remark.
            before: stands before its keys.
        """
        other.leave_the_rest(why)
        for method, config in other._steps.items():
            self.use(method, **config)
        self._carried += [Remark(f"{before}{key}", text) for key, text in other._carried]
        self._left_out += [Remark(f"{before}{key}", text) for key, text in other._left_out]
        self._warnings += other._warnings

    def leave_the_rest(self, why: Callable[[str], str]) -> None:
        """Says of every key without a remark why it became nothing."""
        told = {remark.key for remark in (*self._carried, *self._left_out)}
        for key in _leaves(self._document):
            if not any(key == each or key.startswith(f"{each}.") for each in told):
                self.leave(key, why(key))

    def finish(
        self, *, why: Callable[[str], str], requires: Requires | None = None, order: tuple[str, ...]
    ) -> Conversion:
        """The conversion.

        Args:
            why: the reason for a key without a remark.
            requires: what the file says of the setting.
            order: of the methods.
        """
        self.leave_the_rest(why)
        steps = [(name, self._steps[name] or None) for name in order if name in self._steps]
        return Conversion(
            strategy=Strategy(
                steps, requires=requires, provenance={"converted_from": f"{self._source} config"}
            ),
            source=self._source,
            carried=tuple(self._carried),
            left_out=tuple(self._left_out),
            warnings=tuple(self._warnings),
        )

    def wrong(self, key: str, value: Any, accepted: str) -> StrategyFileError:
        """The error for a value that means nothing."""
        return StrategyFileError(
            f"{key}={value!r} means nothing here. Accepted: {accepted}", source=self.name
        )


def switch(converter: Converter, key: str, value: Any) -> bool:
    """A yes or no, as YAML and shells write it; raises StrategyFileError for anything else."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "none": False}
    text = str(value).lower()
    if text not in known:
        raise converter.wrong(key, value, "true, false")
    return known[text]


def number(converter: Converter, key: str, value: Any) -> int:
    """A positive whole number; raises StrategyFileError for anything else."""
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
        raise converter.wrong(key, value, "a whole number from 1 on")
    return int(text)


def _leaves(document: Mapping[str, Any], before: str = "") -> list[str]:
    """The keys of values, with dots between those of nested mappings."""
    found = []
    for key, value in document.items():
        name = f"{before}{key}"
        found += _leaves(value, f"{name}.") if isinstance(value, Mapping) and value else [name]
    return found
