"""Settings of the documentation; built by ``make docs`` with warnings as errors."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "atorch_ns"
copyright = "the atorch_ns authors"
version = release = installed_version("atorch-ns")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"atorch_ns {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Docstrings name arguments in Google's style.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# An "Attributes:" section and the attribute itself would otherwise describe one name twice.
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "Attributes")]


def describe_fields(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Adds the fields of a config, each with its own description and default, to the class's text."""
    if what != "class" or not issubclass(thing, BaseModel):
        return
    lines.append("")
    for key, field in thing.model_fields.items():
        required = field.is_required()
        default = (
            "Required." if required else f"Default: ``{field.get_default(call_default_factory=True)!r}``."
        )
        text = (field.description or "").replace("*", "\\*")  # a pattern, no emphasis
        lines.append(f":ivar {key}: {text} {default}")
    lines.append("")


def join_names(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Joins names that share a description: Sphinx reads ``:ivar key, label:`` as ``label`` of the type ``key``."""
    lines[:] = [
        re.sub(r"^:ivar (\w+(?:, \w+)+):", lambda match: f":ivar {match[1].replace(', ', ',')}:", line)
        for line in lines
    ]


def hide_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Leaves out the constructor of a config: its fields are listed, and users write mappings."""
    return ("", None) if what == "class" and issubclass(thing, BaseModel) else None


def setup(app: Sphinx) -> None:
    """Registers the hooks above."""
    app.connect("autodoc-process-docstring", describe_fields)
    app.connect("autodoc-process-docstring", join_names, priority=600)  # napoleon writes the fields before
    app.connect("autodoc-process-signature", hide_signature)
