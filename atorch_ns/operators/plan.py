"""Operator plan: rules of operators and placements of parameters, in a file that people read and edit.

A parameter's key is its name. An operator's, ``model.layers.*.mlp.down_proj/linear#0``, is its module's path,
its name and its index among such calls there. Keys have ``*`` for numbers. Values without one are whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar

from atorch_ns.errors import InputError
from atorch_ns.operators.rules.rule import Placement, Rule, placement_text, read_placement
from atorch_ns.system import write_whole
from atorch_ns.text import count_noun, did_you_mean, first_few, with_article

SCHEMA: Final = 1
"""Version of the file's schema."""

_FIELDS: Final = ("schema", "degree", "note", "operators", "parameters")

V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class OperatorPlan:
    """Division of a model's operators over the ranks of one axis.

    Attributes:
        operators: rules by operator key. A rule from a file has no kernel; the equal legal rule has it.
        parameters: placements by parameter key, ``Replicate`` or ``Shard``.
        degree: number of ranks that the plan was made for; ``None`` for any.
    """

    operators: Mapping[str, Rule] = field(default_factory=dict)
    parameters: Mapping[str, Placement] = field(default_factory=dict)
    degree: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("operators", "parameters"):  # sorted: equal plans have equal texts
            object.__setattr__(self, name, dict(sorted(getattr(self, name).items())))

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "schema": SCHEMA,
            "degree": self.degree,
            "note": self.note,
            "operators": {key: str(rule) for key, rule in self.operators.items()},
            "parameters": {key: placement_text(placement) for key, placement in self.parameters.items()},
        }

    @property
    def text(self) -> str:
        """The plan as JSON, one entry on a line; equal plans have equal texts."""
        return json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n"

    def write(self, path: str | PathLike[str]) -> None:
        """Writes the plan to ``path``, whole.

        Raises:
            InputError: if the folder is missing or cannot be written.
        """
        try:
            write_whole(Path(path), self.text)
        except OSError as error:
            raise InputError(
                f"the operator plan cannot be written to {path}: {error.strerror or error}."
            ) from error

    @classmethod
    def read(cls, path: str | PathLike[str]) -> OperatorPlan:
        """The plan in the file at ``path``.

        Raises:
            InputError: if the file cannot be read or holds no plan. The message names every problem.
        """
        try:
            content = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"the operator plan {path} cannot be read: {reason}.") from error
        return cls.from_text(content, source=str(path))

    @classmethod
    def from_text(cls, text: str, *, source: str = "text") -> OperatorPlan:
        """Reads a plan from a text that :attr:`text` returned.

        Args:
            source: name of the file, for messages.

        Raises:
            InputError: for any other text. The message names every problem.
        """
        problems: list[str] = []  # json takes the last of equal keys; _read_pairs names them
        try:
            document = json.loads(text, object_pairs_hook=lambda pairs: _read_pairs(pairs, problems))
        except (ValueError, RecursionError) as error:  # the second, of nests that are too deep
            raise InputError(f"the operator plan {source} is not readable as JSON: {error}.") from error
        return cls.from_json(document, source=source, problems=problems)

    @classmethod
    def from_json(
        cls, document: object, *, source: str = "given", problems: Iterable[str] = ()
    ) -> OperatorPlan:
        """Reads a plan from a document that :meth:`as_json` returned.

        Args:
            source: name of the file, for messages.
            problems: problems already found in the document.

        Raises:
            InputError: for any other document. The message names every problem.
        """
        errors = list(problems)
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            content = with_article(document)
            if isinstance(document, Mapping):
                content = f"schema {document.get('schema')!r}"
            raise InputError(
                f'the operator plan {source} holds {content}. This version reads {{"schema": {SCHEMA}, …}}.'
            )
        plan = _read_document(document, errors)
        if errors:
            listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(errors, 1))
            raise InputError(
                f"{count_noun(len(errors), 'problem')} in the operator plan {source}:\n{listing}"
            )
        return plan

    def diff(self, other: OperatorPlan) -> str:
        """The entries that differ: this plan's after ``-``, the other's after ``+``. Empty if none differ."""
        mine, theirs = (
            {line.strip().rstrip(","): None for line in plan.text.splitlines()} for plan in (self, other)
        )
        changes = [(line, "-") for line in mine if line not in theirs] + [
            (line, "+") for line in theirs if line not in mine
        ]
        rows = sorted(changes, key=lambda item: (item[0].partition('": ')[0], item[1] == "+"))
        return "\n".join(f"{sign} {line}" for line, sign in rows)

    def misfit(self, keys: Collection[str], legal: Mapping[str, Collection[Rule]]) -> str:
        """The reasons why the plan does not fit a model, one per line; empty if it fits.

        Args:
            keys: keys of the model's operators and parameters.
            legal: legal rules by operator key, with or without the one that divides nothing.
        """
        plan_keys = (*self.operators, *self.parameters)
        missing = sorted(set(keys) - set(plan_keys))
        unknown = [key for key in plan_keys if key not in keys]
        lines = [f"{key}: the model has no such key.{did_you_mean(key, missing)}" for key in unknown]
        for key, rule in self.operators.items():
            if key in keys and rule.divides and rule not in legal.get(key, ()):
                choices = [str(option) for option in legal.get(key, ()) if option.divides]
                instead = f"Legal are {'; '.join(choices)}." if choices else "It can only be whole."
                lines.append(f"{key}: {rule} is not a legal rule of this call. {instead}")
        # Missing keys are allowed, since their operators stay whole. They help to correct unknown keys.
        if unknown and missing:
            lines.append(f"Not in the plan, so whole: {first_few(missing, 20)}.")
        return "\n".join(lines)

    def describe(self) -> str:
        """A table of all divisions: one row per operator name and rule, then the parameters."""
        rules = {key: rule for key, rule in self.operators.items() if rule.divides}
        shards = {key: value for key, value in self.parameters.items() if placement_text(value) != "R"}
        rows = [
            *_group_rows({key: (_short_name(key), str(rule)) for key, rule in rules.items()}),
            *_group_rows({key: ("parameter", placement_text(value)) for key, value in shards.items()}),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]  # none if nothing is divided
        over = f" over {self.degree} ranks" if self.degree is not None else ""
        head = (
            f"{count_noun(len(rules), 'operator')} and {count_noun(len(shards), 'parameter')} divided{over}"
        )
        table = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([head, *(f"  {line}" for line in table)])


def _short_name(key: str) -> str:
    return key.rpartition("/")[2].partition("#")[0]


def _group_rows(kinds: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for key, kind in kinds.items():
        groups.setdefault(kind, []).append(key)
    return [(*kind, f"{len(keys)}×", first_few(keys, 3)) for kind, keys in sorted(groups.items())]


def _read_pairs(pairs: Iterable[tuple[str, Any]], problems: list[str]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            problems.append(f"{key} stands there twice.")
        entries[key] = value
    return entries


def _read_document(document: Mapping[str, Any], problems: list[str]) -> OperatorPlan:
    problems += [
        f"unknown field {key!r}.{did_you_mean(key, _FIELDS)}" for key in document if key not in _FIELDS
    ]
    degree, note = document.get("degree"), document.get("note", "")
    if degree is not None and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 1):
        problems.append(
            f"degree={degree!r} is not a number of ranks. Write a whole number from 1 on, or null for any."
        )
    if not isinstance(note, str):
        problems.append(f"note is {with_article(note)}. Write text.")
    operators = _read_entries(document, "operators", _operator_rule, problems)
    parameters = _read_entries(document, "parameters", _parameter_placement, problems)
    return OperatorPlan(operators=operators, parameters=parameters, degree=degree, note=note)


def _read_entries(
    document: Mapping[str, Any], name: str, read: Callable[[str], V], problems: list[str]
) -> dict[str, V]:
    section = document.get(name, {})
    if not isinstance(section, Mapping):
        problems.append(f"{name} is {with_article(section)}. Write a mapping from keys to texts.")
        return {}
    entries = {}
    for key, text in section.items():
        try:
            entries[key] = read(text)
        except InputError as error:
            problems.append(f"{name}, {key}: {error}")
    return entries


def _operator_rule(text: Any) -> Rule:
    if not isinstance(text, str):
        raise InputError(f"{with_article(text)} is not a rule. Write placements, as in '1 <- 2,1,R'.")
    return Rule.read(text)


def _parameter_placement(text: Any) -> Placement:
    if not isinstance(text, str) or not (text.strip() == "R" or text.strip().isdecimal()):
        raise InputError(f"{text!r} is not a placement of a parameter. Write R or the number of a dimension.")
    return read_placement(text)
