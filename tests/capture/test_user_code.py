"""User code: one file is one module, however it is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atorch_ns.capture.user_code import build_model, constraint, gibibytes, load_object, load_sample
from atorch_ns.errors import InputError

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
    _write(folder / "transformer.py", "import trans\n")
    with pytest.raises(InputError, match=r"importing transformer failed: .*No module named 'trans'"):
        load_object("transformer:build", option="--model")


# ---- what the names stand for


_OBJECTS = """
import torch
from torch import nn

ready = nn.Linear(2, 2)
number = 3


class Needs(nn.Module):
    def __init__(self, width):
        super().__init__()


def build():
    return nn.Linear(2, 2)


def weighs():
    model = nn.Linear(2, 2)
    model.bias.data = torch.from_numpy(model.bias.detach().numpy())
    return model


def batch():
    return {"x": torch.zeros(3, 2)}


def nothing():
    return torch.zeros(0, 2)
"""


def test_a_model_is_built_on_meta_where_its_code_allows_it(folder: Path) -> None:
    _write(folder / "objects.py", _OBJECTS)
    model, how = build_model("objects.py:build")
    assert (model.weight.is_meta, how) == (True, "the model was built on meta, without memory")
    model, how = build_model("objects.py:build", on_meta=False)
    assert (model.weight.is_meta, how) == (False, "the model was built with memory")
    model, how = build_model("objects.py:weighs")
    assert not model.weight.is_meta
    assert how.startswith("the model was built with memory, since on meta: ")
    assert build_model("objects.py:ready")[1] == "the model was there already"
    with pytest.raises(
        InputError, match=r"could not be built: TypeError: .*'width'\. It is called without arguments"
    ):
        build_model("objects.py:Needs")
    with pytest.raises(InputError, match="is an int; it must be a module, or build one"):
        build_model("objects.py:number")
    with pytest.raises(InputError, match=r"returned a dict; it must return a torch\.nn\.Module"):
        build_model("objects.py:batch")


def test_a_sample_is_a_batch_with_samples(folder: Path) -> None:
    _write(folder / "objects.py", _OBJECTS)
    assert load_sample("objects.py:batch")["x"].shape == (3, 2)
    with pytest.raises(InputError, match="is 3, which holds no tensor with a batch dimension"):
        load_sample("objects.py:number")
    with pytest.raises(InputError, match="is an empty batch"):
        load_sample("objects.py:nothing")


def test_a_wrong_name_lists_what_there_is(folder: Path) -> None:
    _write(folder / "objects.py", _OBJECTS)
    with pytest.raises(
        InputError, match=r"Write objects\.py:NAME\. It defines Needs, build, weighs, batch, nothing"
    ):
        load_object("objects.py", option="--model")
    with pytest.raises(InputError, match=r"objects\.py has no 'biuld'\. Did you mean 'build'\?"):
        load_object("objects.py:biuld", option="--model")
    with pytest.raises(InputError, match=r"is not a place in code\. Write pkg\.mod:name"):
        load_object("model", option="--model")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp", "fsdp"),
        ("half=bf16", ("half", "bf16")),
        ('fsdp={"size": 2}', ("fsdp", {"size": 2})),
        ("a=b=c", ("a", "b=c")),
    ],
)
def test_constraints_on_the_command_line(text: str, expected: Any) -> None:
    assert constraint(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("70GiB", 70.0), ("512 MiB", 0.5), ("1tib", 1024.0), ("8", 8.0), (None, None)]
)
def test_memory_as_people_write_it(text: str | None, expected: float | None) -> None:
    assert gibibytes(text) == expected


@pytest.mark.parametrize("text", ["", "0GiB", "-1", "many", "1 kB"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(InputError, match="is not an amount of memory"):
        gibibytes(text)
