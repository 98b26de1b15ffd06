"""A model that is divided wrongly, though every block passed its test, is refused before its first step."""

from __future__ import annotations

import re
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.errors import StrategyError
from atorch_ns.job import Job, limit_memory
from atorch_ns.method import Method, MethodConfig, Phase
from atorch_ns.testing.models import SyntheticDataset, get_case
from atorch_ns.testing.workers import run_ranks

CASE = get_case("tied_llama")


class FaultConfig(MethodConfig):
    """What is wrong."""

    kind: str = "forward"


@final
class WrongDivision(Method[FaultConfig]):
    """Divides samples, and lets the second layer compute something else or lose a gradient."""

    name = "wrong_division"
    phase = Phase.CAST
    Config = FaultConfig
    provides = ("axis:sequence",)

    def apply(self, job: Job, config: FaultConfig) -> None:
        """Does it, in the whole model and in small."""
        mlp = job.module.get_submodule("layers.1.mlp")
        if config.kind == "forward":
            mlp.register_forward_hook(lambda *given: 1.01 * given[2])
        elif config.kind == "fails":
            mlp.register_forward_hook(lambda *given: given[2] @ torch.ones(3))
        else:
            next(mlp.parameters()).register_hook(lambda gradient: 2 * gradient)


def _under_a_limit() -> list[str]:
    dist.barrier()  # training does not need the stacks of gloo's threads
    with limit_memory(400 * 2**20, torch.device("cpu")):
        result = _accelerate([("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"])
    return [note for note in result.report.applied.notes if "as a whole" in note]


def test_a_limit_of_memory_is_trainings() -> None:
    """A comparison could leave too little of it, of which a search knows nothing."""
    (found,), *_ = run_ranks(_under_a_limit, 2)
    assert "was not compared with one process: a limit of memory is enforced" in found


def _accelerate(strategy: Any, **changes: Any) -> Any:
    _, result, _ = auto_accelerate(
        changes.pop("model", None) or CASE.build(),
        torch.optim.SGD,
        **{
            "dataset": SyntheticDataset(CASE, 16),
            "loss_func": CASE.loss_func,
            "load_strategy": strategy,
            "optim_args": {"lr": 0.1},
            "dataloader_args": {"batch_size": 4},
            **changes,
        },
    )
    return result


def _refused(kind: str) -> str:
    from atorch_ns import api
    from atorch_ns.apply import apply

    registry = api.load_registry()
    registry.add(WrongDivision)
    with pytest.MonkeyPatch.context() as patch:
        for module in (api, apply):
            patch.setattr(module, "load_registry", lambda: registry)
        with pytest.raises(StrategyError) as error:
            _accelerate([("parallel_mode", ([("sequence", 2)], None)), ("wrong_division", {"kind": kind})])
    return str(error.value)


def test_the_first_module_whose_result_differs_is_named() -> None:
    for text in run_ranks(_refused, 2, args=("forward",)):
        assert "divided over sequence, the model trains otherwise than in one process" in text
        assert (
            "the first module whose result differs is layers.1.mlp (off by 0.01 of its largest value)" in text
        )


def test_a_model_that_fails_divided_is_refused_with_its_error() -> None:
    for text in run_ranks(_refused, 2, args=("fails",)):
        assert text.startswith(
            "divided over sequence, the model fails, which runs in one process: RuntimeError: "
        )
        assert "size mismatch" in text


def test_a_wrong_gradient_names_its_parameter() -> None:
    for text in run_ranks(_refused, 2, args=("gradient",)):
        assert "layers.1.mlp." in text
        assert "is off by" in text


def _notes(axis: str, **changes: Any) -> list[str]:
    result = _accelerate([("parallel_mode", ([(axis, 2)], None))], **changes)
    return [note for note in result.applied.notes if note.startswith("the model as a whole")]


@pytest.mark.parametrize("axis", ["tensor", "sequence", "pipeline"])
def test_what_was_compared_is_said(axis: str) -> None:
    for (note,) in run_ranks(_notes, 2, args=(axis,)):
        assert re.search(r"trains as in one process: ([1-9]\d*) of \1 parameters compared", note)


def _with_adapters() -> nn.Module:
    """Adapters whose hooks close over the model, as people write them."""
    model = CASE.build()
    model.adapters = nn.ParameterList(nn.Parameter(torch.full((1,), 0.1)) for _ in model.layers)
    for layer, adapter in zip(model.layers, model.adapters, strict=True):
        layer.register_forward_hook(lambda *given, scale=adapter: given[2] * (1 + scale))
    return model


def _closing_over() -> tuple[list[str], list[str]]:
    refusals = []
    for axis in ("pipeline", "sequence"):
        with pytest.raises(StrategyError) as error:
            _notes(axis, model=_with_adapters())
        refusals.append(str(error.value))
    return refusals, _notes("tensor", model=_with_adapters())


def test_hooks_that_close_over_parameters_are_not_taken_for_compared() -> None:
    for refusals, (note,) in run_ranks(_closing_over, 2):
        assert all("closes over adapters.0, adapters.1" in text for text in refusals)
        assert "was not compared with one process" in note


def _without_data(axis: str) -> list[str]:
    return _notes(axis, dataset=None, sample_batch=CASE.make_batch(2, 0), dataloader_args=None)


def _without_loss(axis: str) -> list[str]:
    return _notes(axis, loss_func=None)


def test_a_sample_batch_will_do_and_what_is_missing_is_said() -> None:
    assert all(
        "trains as in one process" in note for (note,) in run_ranks(_without_data, 2, args=("tensor",))
    )
    for (note,) in run_ranks(_without_loss, 2, args=("tensor",)):
        assert "was not compared with one process" in note
        assert "it needs loss_func" in note


def _found_without_probe() -> tuple[list[str], bool]:
    search = {"max_trials": 1, "time_limit_s": 60, "probe": False}
    result = _accelerate(None, included=["tensor_parallel"], search=search)
    found = result.report.search
    assert found is not None
    notes = [note for note in result.applied.notes if note.startswith("the model as a whole")]
    return notes, any(": passed" in check for check in found.checks)


@pytest.mark.timeout(150)
def test_other_checks_of_a_search_do_not_stand_for_it() -> None:
    for (note,), other_checks in run_ranks(_found_without_probe, 2, timeout_s=120):
        assert "divided over tensor, trains as in one process" in note
        assert other_checks
