"""Text of a config: JSON as DeepSpeed reads it, with comments, or YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

from atorch_ns.errors import StrategyFileError

__all__ = ["parsed", "read_bytes"]

_STRING_OR_COMMENT: Final = re.compile(r'(?P<kept>"(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_LAST_COMMA: Final = re.compile(r'(?P<kept>"(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        StrategyFileError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise StrategyFileError(f"cannot be read: {error.strerror or error}", source=str(path)) from None


def parsed(content: bytes, name: str) -> Any:
    """The document: JSON if it begins with a bracket, comments and a comma before a closing bracket allowed.

    Args:
        content: of the file.
        name: of the file, for messages.

    Raises:
        StrategyFileError: if it is neither JSON nor YAML.
    """
    try:
        text = content.decode("utf-8-sig")
        plain = _without_comments(text)
        return json.loads(plain) if plain.lstrip()[:1] in ("{", "[") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        shown = " ".join(str(error).split())
        raise StrategyFileError(
            "not readable as JSON or YAML: truncated or damaged, or with more than JSON and its comments by //, # and "
            f"/* */ have: {shown}",
            source=name,
        ) from None


def _without_comments(text: str) -> str:
    """JSON without comments and last commas; what stands in strings is kept."""
    spaced = _STRING_OR_COMMENT.sub(lambda found: found["kept"] or " ", text)
    return _STRING_OR_LAST_COMMA.sub(lambda found: found["kept"] or "", spaced)
