"""What users rely on, as text: names, parameters, verbs, and the schema of the strategy file."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

from docs.command_line import verbs_as_text

__all__ = ["FOLDER", "surfaces"]

FOLDER = Path(__file__).parent
_MODULES = (
    "atorch_ns",
    "atorch_ns.checkpoint",
    "atorch_ns.doctor",
    "atorch_ns.errors",
    "atorch_ns.launch",
    "atorch_ns.method",
    "atorch_ns.notebook",
    "atorch_ns.planning",
    "atorch_ns.report",
    "atorch_ns.strategy",
    "atorch_ns.testing",
    "atorch_ns.tracking",
    "atorch_ns.verify",
)


def surfaces() -> dict[str, str]:
    """The text of each file of this folder."""
    from atorch_ns.strategy import json_schema

    schema = json.dumps(json_schema(), indent=1, sort_keys=True)
    return {
        "command-line.txt": verbs_as_text(),
        "names.txt": _names(),
        "auto_accelerate.txt": _parameters(),
        "strategy-file.json": f"{schema}\n",
    }


def _names() -> str:
    lines = []
    for module in _MODULES:
        lines.append(module)
        lines += [f"  {name}" for name in sorted(importlib.import_module(module).__all__)]
    return "\n".join(lines) + "\n"


def _parameters() -> str:
    from atorch_ns import auto_accelerate

    parameters = inspect.signature(auto_accelerate).parameters.values()
    return "\n".join(str(each).partition(":")[0] + f" = {_default(each)}" for each in parameters) + "\n"


def _default(parameter: inspect.Parameter) -> str:
    required = "required" if parameter.default is parameter.empty else repr(parameter.default)
    return required + (", by name only" if parameter.kind is parameter.KEYWORD_ONLY else "")
