from __future__ import annotations

from typing import Any

import pytest

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.method import load_registry
from atorch_ns.profile import Profile
from atorch_ns.search.space.constraints import Constraints, read_constraints
from atorch_ns.testing.models import get_case

REGISTRY = load_registry()
TWO_RANKS = Cluster(world_size=2, local_world_size=2, distributed=True)
ONE_PROCESS = Cluster()


def constraints(*, included: Any = None, excluded: Any = None, cluster: Cluster = TWO_RANKS) -> Constraints:
    return read_constraints(REGISTRY, included=included, excluded=excluded, cluster=cluster)


def config(name: str, value: Any = None) -> Any:
    return REGISTRY.get(name).Config.model_validate(value)


def test_names_aliases_and_groups_mean_methods() -> None:
    asked = constraints(included=["fsdp2"], excluded=["precision", "recompute"])
    assert asked.requires("fsdp")
    assert asked.forbids("amp_native", config("amp_native", "bf16"))
    assert asked.forbids("half", config("half"))
    assert asked.forbids("checkpoint", config("checkpoint"))
    assert not asked.forbids("compile", config("compile"))


def test_an_excluded_config_forbids_only_itself() -> None:
    asked = constraints(excluded=[("amp_native", "fp16")])
    assert asked.forbids("amp_native", config("amp_native", "fp16"))
    assert not asked.forbids("amp_native", config("amp_native", "bf16"))


def test_an_included_config_is_fixed() -> None:
    asked = constraints(included=[("checkpoint", {"every_n": 2})])
    assert asked.fixed("checkpoint") == config("checkpoint", {"every_n": 2})
    assert asked.fixed("fsdp") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"excluded": ["fdsp"]}, "Did you mean 'fsdp'"),
        ({"included": ["precison"]}, "Did you mean 'precision'"),
        ({"included": [("checkpoint", {"evry_n": 2})]}, "evry_n"),
        ({"included": [("precision", "bf16")]}, "takes no config"),
        ({"excluded": "fsdp"}, "write ['fsdp']"),
        ({"excluded": [3]}, "excluded"),
        ({"included": ["fsdp"], "excluded": ["gradient_sync"]}, "both included and excluded"),
        ({"included": ["fsdp", "zero2"]}, "cannot be combined"),
        ({"included": ["fsdp", ("fsdp2", {"cpu_offload": True})]}, "the same method"),
        ({"included": ["fsdp"], "cluster": ONE_PROCESS}, "torchrun"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        constraints(**given)
    assert said in str(caught.value)


def test_all_problems_are_told_together() -> None:
    with pytest.raises(InputError) as caught:
        constraints(included=["chekpoint"], excluded=["fdsp"])
    assert "'checkpoint'" in str(caught.value)
    assert "'fsdp'" in str(caught.value)


def test_what_the_model_makes_impossible_is_said() -> None:
    profile = Profile.of(get_case("mlp").build())
    with pytest.raises(InputError, match="NoSuchBlock"):
        read_constraints(
            REGISTRY,
            included=[("checkpoint", ("NoSuchBlock",))],
            excluded=None,
            cluster=TWO_RANKS,
            profile=profile,
        )
