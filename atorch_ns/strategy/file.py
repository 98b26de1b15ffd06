"""The strategy file: reading it safely, writing it whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from atorch_ns.errors import Problem, StrategyFileError
from atorch_ns.strategy.values import JSON
from atorch_ns.system import write_whole
from atorch_ns.text import with_article


class StepDocument(BaseModel):
    """A method and its config."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, description="The method's registered name.")
    config: JsonValue = Field(default=None, description="Its config; null for the method's defaults.")


class RequiresDocument(BaseModel):
    """The setting the strategy was resolved for."""

    model_config = ConfigDict(extra="forbid")

    world_size: int | None = Field(default=None, ge=1, description="Number of processes.")
    device: str | None = Field(default=None, description="cpu or cuda.")
    torch: str | None = Field(default=None, description="Version of torch, as 2.13.")


class StrategyDocument(BaseModel):
    """A strategy file."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal[1] = Field(alias="schema", description="Version of this schema.")
    requires: RequiresDocument = Field(default_factory=RequiresDocument)
    steps: list[StepDocument] = Field(description="The methods, in the order they are applied.")
    provenance: dict[str, Any] = Field(
        default_factory=dict, description="Where it came from: versions, fingerprint, measured figures."
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a strategy file."""
    schema = StrategyDocument.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Strategy", **schema}


@dataclass(frozen=True, kw_only=True)
class Requires:
    """The setting a strategy was resolved for. ``None`` means that it was not recorded.

    Attributes:
        world_size: number of processes.
        device: ``"cpu"`` or ``"cuda"``.
        torch: version of torch, as ``"2.13"``.
    """

    world_size: int | None = None
    device: str | None = None
    torch: str | None = None

    def as_json(self) -> dict[str, JSON]:
        """The known fields."""
        return {name: value for name, value in vars(self).items() if value is not None}


YAML_SUFFIXES = (".yaml", ".yml")
_YAML_LINE_BREAKS = "\x85\u2028\u2029\ufeff"  # PyYAML writes them as they are, and reads line breaks


def read_strategy_path(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads and checks the file at ``path``.

    Raises:
        StrategyFileError: naming the file and what is wrong with it.
    """
    file_path = Path(path)
    try:
        content = file_path.read_bytes()
    except FileNotFoundError:
        raise StrategyFileError("no such strategy file", source=str(path)) from None
    except OSError as error:
        reason = f"cannot read the strategy file: {error.strerror or error}"
        raise StrategyFileError(reason, source=str(path)) from error
    return read_strategy_bytes(content, name=str(file_path))


def read_strategy_bytes(content: bytes, *, name: str) -> dict[str, Any]:
    """Reads and checks a strategy document in JSON or YAML.

    Raises:
        StrategyFileError: for a pickle, for text that is neither, and for another schema.
    """
    if content[:1] == b"\x80":  # pickles begin so
        raise StrategyFileError(
            "this is a pickle, which could run code when read, so it was not read. Convert it once with "
            "atorch_ns.strategy.convert_pickle(path), which accepts only known names",
            source=name,
        )
    document = _parse_content(content, name)
    if isinstance(document, list):
        document = {"schema": 1, "steps": _expand_entries(document)}
    return _check_document(document, name)


def strategy_bytes(document: dict[str, JSON], suffix: str) -> bytes:
    """The one form of a document: JSON, or YAML where the suffix asks for it."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    if suffix.lower() in YAML_SUFFIXES:
        readable = not set(_YAML_LINE_BREAKS) & set(text)  # else all other than ASCII is escaped
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=readable, width=100).encode()
    return (text + "\n").encode()


def write_atomically(path: str | PathLike[str], document: dict[str, JSON]) -> None:
    """Writes ``document`` whole, as JSON or YAML by the suffix.

    Raises:
        StrategyFileError: if the folder is missing or cannot be written.
    """
    file = Path(path)
    try:
        write_whole(file, strategy_bytes(document, file.suffix))
    except OSError as error:
        raise StrategyFileError(f"cannot write the strategy to {file}: {error}", source=str(path)) from error


def _parse_content(content: bytes, name: str) -> Any:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StrategyFileError(f"not a text file ({error})", source=name) from error
    if not text.strip():
        raise StrategyFileError("the file is empty", source=name)
    # YAML in bytes has no suffix to tell it by; its documents, unlike JSON's, begin with a word or a dash.
    as_yaml = Path(name).suffix.lower() in YAML_SUFFIXES or text.lstrip()[:1] not in ("[", "{")
    try:
        return yaml.safe_load(text) if as_yaml else json.loads(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "YAML" if as_yaml else "JSON"
        reason = f"not readable as {kind}, truncated or damaged: {' '.join(str(error).split())}"
        raise StrategyFileError(reason, source=name) from error


def _expand_entries(items: list[Any]) -> list[Any]:
    # A bare list, as in code, holds names and pairs: they become the file's own form.
    entries = []
    for item in items:
        if isinstance(item, str):
            entries.append({"name": item})
        elif isinstance(item, list) and len(item) in (1, 2):
            entries.append(dict(zip(("name", "config"), item, strict=False)))  # [name] has no config
        else:
            entries.append(item)  # _check_document refuses what is none
    return entries


def _check_document(document: Any, name: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise StrategyFileError(
            f"holds {with_article(document)}; a strategy is a list of methods or a mapping with 'schema' "
            "and 'steps'",
            source=name,
        )
    if document.get("schema") != 1:
        raise StrategyFileError(
            f"the strategy file has schema {document.get('schema')!r}; this version reads schema 1. Read it with the "
            "version of atorch_ns that wrote it, or write it again with save()",
            source=name,
        )
    try:
        valid = StrategyDocument.model_validate(document, strict=True)  # no text becomes a number
    except ValidationError as error:
        problems = [
            Problem(message=_in_words(issue), key=".".join(str(part) for part in issue["loc"]))
            for issue in error.errors()
        ]
        raise StrategyFileError(problems, source=name) from error
    return valid.model_dump(by_alias=True, exclude_none=True) | {
        "steps": [{"name": step.name, "config": step.config} for step in valid.steps]
    }


def _in_words(issue: Any) -> str:
    if issue["type"] != "model_type":  # whose text names our classes
        return str(issue["msg"])
    return f'{issue["input"]!r} is not a method: write its name, [name, config] or {{"name": …, "config": …}}'
