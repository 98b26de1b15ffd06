"""Settings of pairs, and ranks that do not have the same packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import RankError, RegistrationError, StrategyError
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Strategy
from atorch_ns.testing import run_ranks
from opt_lib._replacements.base import Requirements
from tests.opt_lib.replacements.modules import FastBuilt, FastSubclass, Model, Old, apply, apply_to, job_of


class Tuned(FastBuilt):
    """Keeps what it was made with."""

    def __init__(self, size: int, bias: bool = True, unrelated: int = 3) -> None:
        super().__init__(size, bias)
        self.unrelated = unrelated


class TunedSubclass(FastSubclass):
    unrelated = 3


class TunedFromModule(Tuned):
    @classmethod
    def from_module(cls, module: Old, unrelated: int = 1) -> TunedFromModule:
        return cls(module.size, module.bias is not None, unrelated)


def _function(old: Old, unrelated: int = 2) -> nn.Module:
    return Tuned(old.size, old.bias is not None, unrelated)


@pytest.mark.parametrize("target", [Tuned, TunedSubclass, TunedFromModule, _function])
def test_settings_reach_the_new_module(register: Callable[..., Any], target: Any) -> None:
    register("tuned", replaces=Old, config={"unrelated": 5})(target)
    for config, unrelated in (({}, 5), ({"configs": {"tuned": {"unrelated": 7}}}, 7)):
        model = Model()
        apply(model, config)
        assert model.first.unrelated == unrelated
    model = Model()
    apply(model)  # the pair itself has not changed
    assert model.first.unrelated == 5


@pytest.mark.parametrize("target", [Tuned, TunedSubclass, TunedFromModule, _function])
def test_a_setting_that_is_unknown_names_itself(register: Callable[..., Any], target: Any) -> None:
    register("tuned", replaces=Old)(target)
    with pytest.raises(RegistrationError, match=r"'tuned', replacing Old.*epsilon"):
        apply(Model(), {"configs": {"tuned": {"epsilon": 7}}})


def test_settings_of_what_has_none_are_problems() -> None:
    config = {"configs": {"fused_rms_norm": {"eps": 1}, "fussed_rms_norm": {"eps": 1}}}
    with pytest.raises(StrategyError) as caught:
        resolve(Strategy([("module_replace", config)]), Cluster(), load_registry())
    text = str(caught.value)
    assert "the replacement 'fused_rms_norm' has no settings" in text
    assert "Did you mean 'fused_rms_norm'?" in text


def _problem(config: Any) -> str:
    with pytest.raises(StrategyError) as caught:
        resolve(Strategy([("module_replace", config)]), Cluster(), load_registry())
    return str(caught.value)


def _from_module_alone(old: Old) -> nn.Module:
    return _function(old)


@pytest.mark.parametrize(
    ("target", "accepted"),
    [
        (Tuned, "size, bias, unrelated"),
        (TunedFromModule, "unrelated"),
        (_function, "unrelated"),
        (_from_module_alone, "none"),
    ],
)
def test_a_wrong_key_of_a_pair_is_a_problem_with_the_keys_there_are(
    register: Callable[..., Any], target: Any, accepted: str
) -> None:
    register("tuned", replaces=Old)(target)
    text = _problem({"include": ["tuned"], "configs": {"tuned": {"epsi": 1}}})
    assert f"module_replace.configs.tuned.epsi: 'tuned' has no such setting. Accepted: {accepted}." in text


def test_a_wrong_key_of_a_subclass_names_its_place(register: Callable[..., Any]) -> None:
    register("tuned", replaces=Old)(TunedSubclass)
    with pytest.raises(RegistrationError) as caught:
        apply(Model(), {"configs": {"tuned": {"epsi": 7}}})
    assert "module_replace.configs.tuned.epsi" in str(caught.value)
    assert "Accepted: size, unrelated." in str(caught.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"include": ["fused_rms_norm"]}, "include does not name it"),
        ({"exclude": ["tuned"]}, "exclude names it"),
    ],
)
def test_settings_of_what_is_not_used_are_a_problem(
    register: Callable[..., Any], config: Any, why: str
) -> None:
    register("tuned", pair_cls=(Old, Tuned))
    text = _problem({**config, "configs": {"tuned": {"unrelated": 1}}})
    assert "module_replace.configs.tuned: it has settings and is not used: " + why in text
    text = _problem({**config, "configs": {"tunedd": {"unrelated": 1}}})
    assert "module_replace.configs.tunedd=tunedd: no such replacement. Did you mean 'tuned'?" in text


def test_settings_survive_the_file(register: Callable[..., Any], tmp_path: Path) -> None:
    strategy = Strategy([("module_replace", {"configs": {"tuned": {"unrelated": 1e-6}}})])
    register("tuned", pair_cls=(Old, Tuned))
    resolved = resolve(strategy, Cluster(), load_registry()).strategy
    resolved.save(tmp_path / "strategy.json")
    loaded = Strategy.load(str(tmp_path / "strategy.json"))
    assert loaded.steps == resolved.steps
    assert "1e-06" in (tmp_path / "strategy.json").read_text()


def test_a_package_that_is_broken_on_one_rank_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Requirements.unmet

    def unmet(self: Requirements, *args: Any) -> str | None:
        if self.package is None:
            return whole(self, *args)
        return "liger_kernel cannot be imported" if dist.get_rank() == 1 else None

    def train() -> str:
        monkeypatch.setattr(Requirements, "unmet", unmet)
        cluster = Cluster(world_size=2, rank=dist.get_rank(), distributed=True)
        with pytest.raises(RankError) as caught:
            apply_to(job_of(nn.Sequential(nn.Linear(2, 2)), cluster))
        return str(caught.value)

    one, other = run_ranks(train, 2)
    assert one == other
    assert "what module_replace can use" in one
