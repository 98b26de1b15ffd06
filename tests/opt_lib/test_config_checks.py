"""Checks that several methods make of their configs, the model and the machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.errors import MissingPackageError
from atorch_ns.profile import Profile
from opt_lib._config_checks import (
    missing_problem,
    no_blocks_problem,
    one_axis_only,
    require,
    searched_dtype,
    unmatched_problem,
)
from opt_lib.amp_native import AmpNativeConfig


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)


PROFILE: Profile = Profile.of(Small())


def test_selectors_that_match_nothing_are_one_problem_with_the_choices() -> None:
    (problem,) = unmatched_problem("fsdp", "atorch_wrap_cls", ("Linear", "Block", "head.*"), PROFILE)
    assert problem.value == "Block, head.*"
    assert "Linear" in str(problem.accepted)
    assert unmatched_problem("fsdp", "atorch_wrap_cls", ("Linear", "body"), PROFILE) == []
    assert unmatched_problem("fsdp", "atorch_wrap_cls", None, PROFILE) == []
    assert unmatched_problem("fsdp", "atorch_wrap_cls", ("Block",), None) == []


def test_a_model_without_blocks_is_asked_for_modules() -> None:
    (problem,) = no_blocks_problem("checkpoint", "wrap_class", "to recompute", PROFILE)
    assert problem.message.endswith("say which modules to recompute, or leave checkpoint out")
    assert no_blocks_problem("checkpoint", "wrap_class", "to recompute", None) == []


@pytest.mark.parametrize(
    ("axes", "conflicts"),
    [
        ((("data", 4),), False),
        ((("zero", 4), ("data", 1)), False),
        ((("zero", 2), ("data", 2)), True),
        ((("tensor", 2), ("data", 1)), True),
    ],
    ids=str,
)
def test_a_backend_over_all_processes_has_one_axis(axes: Any, conflicts: bool) -> None:
    conflict = one_axis_only(lambda config: config.dtype == "bfloat16", "OSS")

    class Mesh:
        pass

    mesh: Any = Mesh()
    mesh.axes = axes
    assert conflict.holds(AmpNativeConfig(dtype="bf16"), mesh) == conflicts
    assert not conflict.holds(AmpNativeConfig(dtype="fp16"), mesh)


@pytest.mark.parametrize(
    ("device", "dtype"), [("V100", "float16"), ("A100-80GB", "bfloat16"), ("H100", "bfloat16")]
)
def test_the_dtype_that_a_device_multiplies_is_searched(device: str, dtype: str) -> None:
    cluster = cluster_from_spec(f"1x{device}")
    assert searched_dtype(PROFILE, cluster) == dtype
    half = Profile.of(Small().to(torch.bfloat16))
    assert searched_dtype(half, cluster) is None, "its precision has been chosen"


def test_an_unknown_cpu_is_searched_in_fp32() -> None:
    assert searched_dtype(PROFILE, Cluster()) is None


def test_a_package_that_is_absent_is_named_with_its_command() -> None:
    with pytest.raises(MissingPackageError, match="pip install no-such-thing"):
        require("no_such_thing", needed_by="This", install="pip install no-such-thing")
    (problem,) = missing_problem("zero1", "no_such_thing", install="pip install no-such-thing")
    assert "pip install no-such-thing" in problem.message
    assert missing_problem("zero1", "json", install="") == []
