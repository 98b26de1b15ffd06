"""One file of the user's is one module, however it is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atorch_ns.errors import InputError
from atorch_ns.usercode import load_object
from opt_lib.module_replace import unregister_replace_pair
from tests.cli.conftest import Run

_COUNTED = """
import dataclasses
import os

os.environ["NUM_IMPORTS"] = str(int(os.environ["NUM_IMPORTS"]) + 1)


@dataclasses.dataclass
class Block:
    width: int = 1


def build():
    return Block()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, from which nothing stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("NUM_IMPORTS", "0")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__dict__", {}).get("__file__") or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


def _write(path: Path, text: str = _COUNTED) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _num_imports() -> int:
    import os

    return int(os.environ["NUM_IMPORTS"])


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("counted.py", ("counted.py:Block", "counted.py:Block")),
        ("counted.py", ("counted.py:Block", "counted:Block")),
        ("counted.py", ("counted:Block", "counted.py:Block", "./counted.py:Block")),
        ("counted.py", ("counted.Block", "counted.py:Block")),
        ("counted.py", ("link.py:Block", "counted.py:Block", "link:Block")),
        ("sub/counted.py", ("sub/counted.py:Block", "counted:Block", "sub/../sub/counted.py:Block")),
        ("sub/counted.py", ("sub/counted.py:Block", "sub.counted:Block")),
        ("sub/counted.py", ("sub.counted:Block", "sub/counted.py:Block")),
        ("pkg/counted.py", ("pkg/counted.py:Block", "pkg.counted:Block")),
        ("pkg/counted.py", ("pkg.counted:Block", "pkg/counted.py:Block")),
    ],
)
def test_one_file_is_executed_once_under_all_its_names(
    folder: Path, file: str, names: tuple[str, ...]
) -> None:
    _write(folder / file)
    if file.startswith("pkg"):
        _write(folder / "pkg" / "__init__.py", "")
    (folder / "link.py").symlink_to(folder / "counted.py")
    found = [load_object(name, option="--model") for name in names]
    assert _num_imports() == 1
    assert all(each is found[0] for each in found)


def test_a_file_is_the_module_that_others_import(folder: Path) -> None:
    _write(folder / "counted.py")
    _write(folder / "other.py", "import counted\nBlock = counted.Block\n")
    first = load_object("counted.py:Block", option="--model")
    assert load_object("other.py:Block", option="--model") is first
    assert sys.modules["counted"].Block is first
    assert _num_imports() == 1


def test_a_file_that_another_one_has_imported(folder: Path) -> None:
    _write(folder / "sub" / "counted.py")
    _write(folder / "sub" / "other.py", "import counted\nBlock = counted.Block\n")
    imported = load_object("sub/other.py:Block", option="--model")
    assert load_object("sub/counted.py:Block", option="--model") is imported
    assert _num_imports() == 1


def test_files_of_one_stem_are_two_modules(folder: Path) -> None:
    _write(folder / "a" / "counted.py")
    _write(folder / "b" / "counted.py")
    one, two = (load_object(f"{each}/counted.py:Block", option="--model") for each in ("a", "b"))
    assert one is not two
    assert load_object("b/counted.py:Block", option="--model") is two
    assert _num_imports() == 2
    for each in (one, two):  # pickle finds both by their modules' names
        assert sys.modules[each.__module__].Block is each


def test_a_file_takes_no_name_of_the_library(folder: Path) -> None:
    import json

    _write(folder / "sub" / "json.py")
    _write(folder / "sub" / "colorsys.py")  # not imported by anything yet
    sys.modules.pop("colorsys", None)
    assert load_object("sub/json.py:build", option="--model")() is not None
    assert load_object("sub/colorsys.py:build", option="--model")() is not None
    assert sys.modules["json"] is json
    assert hasattr(importlib.import_module("colorsys"), "rgb_to_hsv")


def test_a_package_with_imports_of_its_own(folder: Path) -> None:
    _write(folder / "pkg" / "__init__.py", "from pkg.counted import Block\n")
    _write(folder / "pkg" / "counted.py")
    _write(folder / "pkg" / "parts" / "__init__.py", "")
    _write(folder / "pkg" / "parts" / "deep.py", "from ..counted import Block\n")
    found = load_object("pkg/parts/deep.py:Block", option="--model")
    assert found is load_object("pkg/__init__.py:Block", option="--model")
    assert found.__module__ == "pkg.counted"
    assert _num_imports() == 1


def test_what_fails_to_import_says_so_each_time(folder: Path) -> None:
    _write(folder / "broken.py", "raise RuntimeError('no licence')\n")
    for name in ("broken.py:build", "broken.py:loss", "broken:build"):
        with pytest.raises(InputError, match="RuntimeError: no licence"):
            load_object(name, option="--model")
    assert "broken" not in sys.modules
    with pytest.raises(InputError, match=r"FileNotFoundError: there is no file nowhere\.py"):
        load_object("nowhere.py:build", option="--model")
    with pytest.raises(InputError, match=r"there is no module 'no\.where'"):
        load_object("no.where:build", option="--model")


_REGISTERS = """
import torch
from torch import nn

from opt_lib.module_replace import register_replace_pair


class Slow(nn.Linear):
    pass


@register_replace_pair("slow_linear_of_a_file", replaces=Slow)
class Fast(Slow):
    pass


def build():
    return nn.Sequential(Slow(8, 8))


def sample():
    return torch.zeros(4, 8)


def loss(batch, output):
    return (output - batch).square().mean()
"""


def test_a_file_that_registers_something_is_verified(folder: Path, run: Run, inline_ranks: None) -> None:
    _write(folder / "registers.py", _REGISTERS)
    done = run(
        "verify", "--strategy", "module_replace", "--model", "registers.py:build", "--sample", "registers:sample",
        "--loss", "registers.py:loss", "--nproc", "1", "--steps", "1",
    )  # fmt: skip
    try:
        assert done.returncode == 0, done.stderr
    finally:
        unregister_replace_pair("slow_linear_of_a_file")
