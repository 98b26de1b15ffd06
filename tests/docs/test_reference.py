"""The reference has every public name and every method."""

from __future__ import annotations

import importlib
import tomllib

import pytest

import atorch_ns
from tests.docs.pages import ROOT
from tests.surface._write import _MODULES

PAGE = (ROOT / "docs/reference.md").read_text()
METHODS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["atorch_ns.methods"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_there_with_the_keys_of_its_config(name: str) -> None:
    module, _, kind = METHODS[name].partition(":")
    config = getattr(importlib.import_module(module), kind).Config
    section = PAGE.split(f"### {name}\n")[1].split("\n#")[0]
    assert f".. automodule:: {module}\n" in section
    listed = f".. autoclass:: {config.__module__}.{config.__name__}\n" in section
    assert listed or f".. automodule:: {config.__module__}\n   :members:\n" in section


def test_public_names_are_there() -> None:
    assert [name for name in atorch_ns.__all__ if f"`{name}`" not in PAGE] == []
    pages = [module for module in _MODULES if module != "atorch_ns"]
    assert [module for module in pages if f".. automodule:: {module}\n   :members:\n" not in PAGE] == []
