"""What can be registered, how, and what a replacement requires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import RegistrationError
from opt_lib._replacements.base import Requirements
from opt_lib._replacements.registry import known_replacements
from opt_lib.module_replace import unregister_replace_pair
from tests.opt_lib.replacements.modules import Child, FastBuilt, FastLinear, Old, apply


def _convert(old: nn.Module) -> nn.Module:
    return FastBuilt(4)


def test_registration_by_decorator(register: Callable[..., Any]) -> None:
    @register("by_class", supported_dtypes=["fp32", "bf16"], replaces=Old)
    class Fast(FastBuilt):
        pass

    @register("by_function", replaces=nn.Linear)
    def fast_linear(old: nn.Module) -> nn.Module:
        return FastLinear(old.in_features, old.out_features, old.bias is not None)

    model = nn.Sequential(Old(4), nn.Linear(4, 2, bias=False))
    weight = model[1].weight
    _, explained, _ = apply(model)
    assert type(model[0]) is Fast
    assert type(model[1]) is FastLinear
    assert model[1].weight is weight
    assert explained[:2] == ["by_class: 1 × Old → Fast", "by_function: 1 × Linear → FastLinear"]
    assert known_replacements()["by_class"].requirements.dtypes == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"name": "", "pair_cls": (Old, FastBuilt)}, "string"),
        ({"name": "x"}, "either pair_cls"),
        ({"name": "x", "pair_cls": (Old, FastBuilt), "replaces": Old}, "either pair_cls"),
        ({"name": "x", "pair_cls": (Old,)}, "not a pair of classes"),
        ({"name": "x", "pair_cls": (Old, "FastBuilt")}, "not a pair of classes"),
        ({"name": "x", "pair_cls": (Old, dict)}, "subclasses of torch.nn.Module"),
        ({"name": "x", "pair_cls": (Old, Old)}, "twice"),
        ({"name": "x", "replaces": "Old"}, "'Old'"),
        ({"name": "x", "pair_cls": (Old, FastBuilt), "convert": 3}, "convert=3"),
        ({"name": "x", "pair_cls": (Old, FastBuilt), "supported_dtypes": {torch.int8}}, "torch.bfloat16"),
        ({"name": "x", "pair_cls": (Old, FastBuilt), "supported_dtypes": 3}, "supported_dtypes=3"),
        ({"name": "x", "pair_cls": (Old, FastBuilt), "supported_dtypes": set()}, "empty"),
        ({"name": "fused_rms_norm", "pair_cls": (Old, FastBuilt)}, "built-in"),
    ],
)
def test_wrong_registrations_are_refused(
    register: Callable[..., Any], arguments: dict[str, Any], part: str
) -> None:
    before = known_replacements()
    with pytest.raises(RegistrationError) as caught:
        register(**arguments)
    assert part in str(caught.value)
    assert known_replacements() == before


def test_a_decorator_takes_modules_and_functions_only(register: Callable[..., Any]) -> None:
    with pytest.raises(RegistrationError, match="not a subclass"):
        register("x", replaces=Old)(dict)
    with pytest.raises(RegistrationError, match="not a subclass"):
        register("x", replaces=Old, convert=_convert)(_convert)


def test_a_name_is_registered_once(register: Callable[..., Any]) -> None:
    register("fast", pair_cls=(Old, FastBuilt))
    with pytest.raises(RegistrationError, match=r"unregister_replace_pair\('fast'\)"):
        register("fast", pair_cls=(Child, FastBuilt))
    unregister_replace_pair("fast")
    register("fast", pair_cls=(Child, FastBuilt))
    with pytest.raises(RegistrationError, match="registered: fast"):
        unregister_replace_pair("slow")


def test_requirements_say_what_is_missing() -> None:
    gpu = Cluster(device_type="cuda", device_name="GPU", capability=(7, 5), packages={"flash_attn": "2.8"})
    flash = Requirements(
        dtypes=frozenset({"bfloat16", "float16"}),
        package="flash_attn",
        device_types=frozenset({"cuda"}),
        capability=(8, 0),
    )
    assert "runs on cuda, and this job runs on cpu" in str(flash.unmet(Cluster(), "bfloat16"))
    assert "(8, 0); GPU has (7, 5)" in str(flash.unmet(gpu, "bfloat16"))
    newer = Cluster(device_type="cuda", capability=(9, 0), packages=gpu.packages)
    assert "computes in float32" in str(flash.unmet(newer, "float32"))
    assert flash.unmet(newer, "bfloat16") is None
    bare = Cluster(device_type="cuda", capability=(9, 0))
    assert "pip install flash-attn" in str(flash.unmet(bare, "bfloat16"))
