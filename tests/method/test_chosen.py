"""Classes of a script are found in another script, in a module that is imported, and in no other model's stead."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from atorch_ns.capture.blocks import select_modules
from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import Resolved, load_registry, resolve
from atorch_ns.profile import Profile
from atorch_ns.strategy import Strategy

REGISTRY = load_registry()
FOUR = Cluster(world_size=4, local_world_size=4, distributed=True, torch="2.13.0")
ALONE = Cluster(torch="2.13.0")


class Block(nn.Module):
    pass


def _class(module: str, name: str, *bases: type) -> type[nn.Module]:
    """A class as ``module`` would define it."""
    made = type(name.rpartition(".")[2], bases or (nn.Module,), {"__module__": module, "__qualname__": name})
    assert issubclass(made, nn.Module)
    return made


def _model(*kinds: type[nn.Module]) -> nn.Module:
    parts = {f"part{number}": kind() for number, kind in enumerate(kinds)}
    return nn.ModuleDict({**parts, "head": nn.Linear(1, 1)})


def _resolved(model: nn.Module, *steps: Any, cluster: Cluster = FOUR) -> Resolved:
    return resolve(Strategy(steps), cluster, REGISTRY, profile=Profile.of(model))


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("checkpoint", "wrap_class"),
        ("compile", "wrap_class"),
        ("fsdp", "atorch_wrap_cls"),
        ("fsdp", "atorch_ignored_cls"),
        ("zero2", "atorch_wrap_cls"),
    ],
)
@pytest.mark.parametrize("written", ["__main__.Block", "train.models.Block"])
def test_a_class_of_another_script_is_found_by_its_qualified_name(
    method: str, key: str, written: str
) -> None:
    model = _model(_class("job", "Block"))
    compiler = {"backend": "eager"} if method == "compile" else {}
    resolved = _resolved(model, (method, {key: [written], **compiler}))
    config = resolved.strategy[method]
    assert isinstance(config, dict)
    assert config[key] == ["Block"]
    assert [found.name for found in select_modules(model, config[key])] == ["part0"]  # type: ignore[arg-type]
    (said,) = (note for note in resolved.notes if written in note.text)
    assert said.kind == "fitted"  # in the report, and no warning
    assert "job.Block" in said.text
    assert f"{method}.{key}" in said.text


def test_a_class_of_the_script_is_written_by_its_qualified_name_without_a_word() -> None:
    model = _model(_class("__main__", "Block"), _class("__main__", "Outer.Inner"))
    resolved = _resolved(model, ("checkpoint", ["__main__.Block", "__main__.Outer.Inner"]))
    assert resolved.strategy["checkpoint"] == {"wrap_class": ["Block", "Outer.Inner"]}
    assert not any("Block" in note.text for note in resolved.notes)
    assert len(select_modules(model, ["Block", "Outer.Inner"])) == 2


def test_what_is_left_out_here_is_written_for_elsewhere() -> None:
    model = _model(_class("__main__", "Block"))
    resolved = _resolved(model, ("fsdp", {"atorch_wrap_cls": ["__main__.Block"]}), cluster=ALONE)
    assert resolved.strategy["fsdp"] == {"atorch_wrap_cls": ["Block"]}


def test_two_classes_of_one_name_are_told_apart() -> None:
    own = _class("__main__", "Linear", nn.Linear)
    model = nn.ModuleDict({"own": own(2, 2), "torch": nn.Linear(2, 2)})
    resolved = _resolved(model, ("checkpoint", ["__main__.Linear"]))
    assert resolved.strategy["checkpoint"] == {"wrap_class": ["__main__.Linear"]}
    assert [found.name for found in select_modules(model, ["__main__.Linear"])] == ["own"]


def test_which_of_two_is_meant_is_asked() -> None:
    model = _model(_class("one", "Block"), _class("two", "Block"))
    with pytest.raises(StrategyError, match=r"several are called Block, one\.Block and two\.Block") as caught:
        _resolved(model, ("checkpoint", ["__main__.Block"]))
    assert "Block, Linear" in str(caught.value)


@pytest.mark.parametrize("written", ["__main__.Blok", "job.Block.lower", "parts.*.Block", "part7"])
def test_what_is_no_class_of_the_model_stays_an_error_with_the_list(written: str) -> None:
    with pytest.raises(StrategyError, match="no module of") as caught:
        _resolved(_model(_class("job", "Block")), ("checkpoint", [written]))
    assert "Block, Linear" in str(caught.value)


def test_full_names_of_imported_classes_stay() -> None:
    model = _model(Block)
    resolved = _resolved(model, ("checkpoint", (Block,)))
    assert resolved.strategy["checkpoint"] == {"wrap_class": [f"{__name__}.Block"]}
