"""What MerakTrainer overrides of transformers' Trainer is there, with the parameters that it counts on."""

from __future__ import annotations

import inspect

import pytest
from transformers import Trainer

from atorch_ns.merak import MerakTrainer

_OVERRIDDEN = sorted(
    name
    for name, value in vars(MerakTrainer).items()
    if inspect.isfunction(value) and (name in vars(Trainer) or name.startswith("_"))
)
_OWN = {"__init__", "_options_of", "_optimizer_recipe", "_prediction_step"}
_OWN |= {"_ensure_job", "_find_strategy", "_search_degrees", "_global_batch_size", "_lay_out"}


@pytest.mark.parametrize("name", [name for name in _OVERRIDDEN if name not in _OWN])
def test_an_overridden_method_has_the_parameters_of_transformers(name: str) -> None:
    theirs = inspect.signature(getattr(Trainer, name)).parameters
    ours = inspect.signature(getattr(MerakTrainer, name)).parameters
    variadic = {parameter.kind for parameter in ours.values()} & {inspect.Parameter.VAR_POSITIONAL}
    assert variadic or list(ours) == list(theirs)


@pytest.mark.parametrize("name", sorted(_OWN - {"__init__"}))
def test_a_name_of_its_own_is_not_one_of_transformers(name: str) -> None:
    assert not hasattr(Trainer, name)
