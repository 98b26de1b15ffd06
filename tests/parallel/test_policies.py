"""Policies: functions with nnScaler's verbs, operators of one's own, constraints and plan files, and every documented setting."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import ComputeConfig, parallelize, register_op
from atorch_ns.errors import InputError, StepError
from atorch_ns.parallel.policies import _REFUSED, _SETTINGS
from atorch_ns.testing.workers import run_ranks
from tests.parallel.training import check, made, module_of, sample_of, trained


def by_columns_and_rows(graph: Any, config: ComputeConfig) -> Any:
    """Linear layers divided along columns and rows in turns, as in nnScaler's examples."""
    column = True
    for node in graph.nodes():
        if node.name == "linear":
            # linear: [m, k], [n, k] -> [m, n]; rows divide k of the input, columns n of the weight
            idx, dim = (1, 0) if column else (0, 1)
            parts = graph.partition(node, node.algorithm("dim"), idx=idx, dim=dim, num=config.plan_ngpus)
            column = not column
        else:
            parts = graph.replicate(node, times=config.plan_ngpus)
        for number, part in enumerate(parts):
            graph.assign(part, number)
    return graph


def in_two_stages(graph: Any, config: ComputeConfig) -> Any:
    """The samples divided over the ranks of each of two stages."""
    linears = graph.select(name="linear")
    graph.staging([graph.nodes()[0], linears[4]])
    stage = 0
    for node in graph.nodes():
        stage = 1 if node is linears[4] else stage
        degree = config.plan_ngpus // 2
        whole = not node.algorithm("dim").satisfy(idx=0, dim=0, num=degree) or node.name != "linear"
        parts = (
            graph.replicate(node, degree)
            if whole
            else graph.partition(node, node.algorithm("dim"), idx=0, dim=0, num=degree)
        )
        for number, part in enumerate(parts):
            graph.assign(part, stage * degree + number)
    return graph


def run_function(policy: Any, plan: int, settings: dict[str, Any]) -> Any:
    return trained("mlp", policy, plan, settings)


def test_a_function_that_divides(tmp_path: Path) -> None:
    assert "layers of one kind must be divided alike" in made_by(by_columns_and_rows, tmp_path)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.down(torch.relu(self.up(x)))
            return found

    parallelize(
        Two(),
        {"x": torch.zeros(4, 8)},
        by_columns_and_rows,
        ComputeConfig(2, 2),
        load_module=False,
        gen_savedir=tmp_path,
    )
    (file,) = tmp_path.rglob("*Two/_/plan.json")
    plan = dict(json.loads(file.read_text())["strategy"])["operator_parallel"]["plan"]
    assert plan["operators"]["up/linear#0"] == "1 <- R,0"
    assert plan["operators"]["down/linear#0"] == "P <- 1,1"
    assert plan["parameters"] == {"up.weight": "0", "down.weight": "1"}


def made_by(policy: Any, folder: Path, **fields_: Any) -> str:
    """Why a policy is refused on the example."""
    config = ComputeConfig(**{"plan_ngpus": 2, "runtime_ngpus": 2, "use_end2end": True, **fields_})
    try:
        made("mlp", policy, config, folder=str(folder), load_module=False, reuse="override")
    except InputError as error:
        return str(error)
    return ""


def test_a_function_that_makes_stages() -> None:
    runs = run_ranks(run_function, 4, args=(in_two_stages, 4, {"pipeline_nmicros": 4}))
    check("mlp", runs, 4, 1e-6)


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (lambda graph, config: None, "must return the graph"),
        (
            lambda graph, config: graph.partition(
                graph.select(name="linear")[0], graph.nodes()[0].algorithm(), idx=1, dim=0, num=3
            ),
            "cannot be divided along dimension",
        ),
        (
            lambda graph, config: graph.partition(
                graph.select(name="linear")[0], graph.nodes()[0].algorithm(), idx=9, dim=0, num=2
            ),
            "there is no input 9",
        ),
        (
            lambda graph, config: graph.partition(
                graph.select(name="linear")[0], graph.nodes()[0].algorithm(), idx=0, dim=7, num=2
            ),
            "there is no dimension 7",
        ),
        (lambda graph, config: graph.select(ntype=int), "none is of type int"),
        (
            lambda graph, config: (
                graph.partition(graph.select(name="linear")[0], None, idx=1, dim=0, num=4),
                graph.partition(graph.select(name="sigmoid")[0], None, idx=0, dim=1, num=2),
                graph,
            )[-1],
            "operators in 2 and 4 parts",
        ),
        (
            lambda graph, config: graph.partition("linear", None, idx=0, dim=0, num=2),
            "expected a node of graph.nodes(), got",
        ),
        (lambda graph, config: graph.assign(graph.nodes()[0], 1), "is on only one device"),
        (lambda graph, config: graph.nodes()[0].algorithm("order"), "got 'order'"),
        (
            lambda graph, config: (graph.staging([graph.nodes()[0], graph.select(name="linear")[4]]), graph)[
                1
            ],
            "needs pipeline_nmicros",
        ),
    ],
)
def test_what_functions_may_not_do(tmp_path: Path, policy: Any, named: str) -> None:
    assert named in made_by(policy, tmp_path)


def test_parts_belong_on_the_ranks_of_their_stage(tmp_path: Path) -> None:
    def swapped(graph: Any, config: ComputeConfig) -> Any:
        for number, part in enumerate(graph.replicate(graph.nodes()[0], 2)):
            graph.assign(part, 1 - number)
        return graph

    assert "the parts of stage 0 must be on ranks 0 to 1, in order" in made_by(swapped, tmp_path)


def test_a_function_recomputes_blocks(tmp_path: Path) -> None:
    def recomputes(graph: Any, config: ComputeConfig) -> Any:
        graph.recompute(graph.select(name="linear")[2:3])
        graph.multiref(None)
        return graph

    assert made_by(recomputes, tmp_path) == ""
    (file,) = tmp_path.rglob("plan.json")
    assert dict(json.loads(file.read_text())["strategy"])["checkpoint"] == {"wrap_class": ["layers.2"]}


@register_op("b^ m, m n+ -> b^ n")
def weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that no table knows."""
    return torch.einsum("bm,mn->bn", x, weight)


class OwnOperator(nn.Module):
    """Computes by an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.out = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.relu(weighed(x, self.weight)))
        return found


def own_operator(folder: str) -> tuple[float, str]:
    def policy(graph: Any, config: ComputeConfig) -> Any:
        (node,) = graph.select(name="weighed")
        graph.partition(node, node.algorithm("dim"), idx=1, dim=1, num=2)
        return graph

    model: Any = parallelize(
        OwnOperator(), {"x": torch.zeros(4, 8)}, policy, ComputeConfig(2, 2), gen_savedir=folder
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    apart = (model(x) - OwnOperator()(x)).abs().max()
    return float(apart), str(model.state_dict()["weight"].shape)


def test_an_operator_of_ones_own(tmp_path: Path) -> None:
    assert (
        run_ranks(own_operator, 2, args=(str(tmp_path),))
        == [(pytest.approx(0, abs=1e-6), "torch.Size([8, 8])")] * 2
    )


AUTODIST: dict[str, Any] = {
    "pipeline_nmicros": 4,
    "pipeline_scheduler": "gpipe",
    "pipeline_nstages": 2,
    "pipeline_pivots": "layers.4",
    "pp_size": 1,
    "update_freq": 4,
    "mem_constraint": 1e-9,
    "task_name": "mine",
    "use_fp16": True,
    "use_memory_efficient_fp16": True,
    "use_bf16": True,
    "use_memory_efficient_bf16": True,
    "use_apex_fused_adam_v2": True,
    "re_profile": True,
    "verbose": True,
    "load_plan_path": "plan.json",
    "save_plan_path": "saved.json",
    "partition_constraints_path": "constraints.yaml",
    "recompute_modules": "Linear",
    "parallel_profile": True,
    "max_partition_degree": 1,
    "transient_mem_coef": 1.5,
}
"""A value of every setting of autodist."""

NEEDS = {
    "pipeline_pivots": {"pipeline_nmicros": 4, "pipeline_nstages": 2},
    "pipeline_nstages": {"pipeline_nmicros": 4},
    "pp_size": {"pipeline_nmicros": 4, "pipeline_nstages": 2},
    "pipeline_scheduler": {"pipeline_nmicros": 4, "pipeline_nstages": 2},
    "pipeline_nmicros": {"pipeline_nstages": 2},
    "update_freq": {"pipeline_nstages": 2},
}


@pytest.mark.parametrize("key", AUTODIST)
def test_every_setting_of_autodist_does_something_or_says_why_not(tmp_path: Path, key: str) -> None:
    """It changes the plan or a file, is refused, or leaves a note in the plan."""
    assert set(AUTODIST) == set(_SETTINGS["autodist"])
    (tmp_path / "constraints.yaml").write_text("- nam: linear\n")
    value = str(tmp_path / AUTODIST[key]) if key.endswith("_path") else AUTODIST[key]
    base = NEEDS.get(key, {})
    without, plain = plan_of(tmp_path / "without", base)
    with_it, changed = plan_of(tmp_path / "with", {**base, key: value})
    assert with_it != without or changed != plain or (tmp_path / "saved.json").exists()


def plan_of(folder: Path, settings: dict[str, Any]) -> tuple[str, Any]:
    """Why there is no plan by autodist; or its methods and notes."""
    problem = made_by("autodist", folder, pas_config=settings)
    files = list(folder.rglob("plan.json"))
    if not files:
        return problem, None
    saved = json.loads(files[0].read_text())
    return problem, (saved["strategy"], saved["notes"])


def test_settings_of_stages_where_there_is_one_leave_a_note(tmp_path: Path) -> None:
    _, (_, notes) = plan_of(tmp_path, {"pipeline_nmicros": 4, "update_freq": 4})
    for key in ("pipeline_nmicros", "update_freq"):
        assert any(note.startswith(f"{key}: there is one stage") for note in notes)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mem_constraint": 1e-9}, "no division fits in"),
        ({"load_plan_path": "no/plan.json"}, "cannot be read"),
        ({"save_plan_path": "/proc/no/plan.json"}, "cannot be written"),
    ],
)
def test_settings_of_operators_count_on_one_rank_too(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    refused = made_by("autodist", tmp_path, plan_ngpus=1, runtime_ngpus=1, pas_config=settings)
    assert named in refused


def test_a_plan_of_stages_is_saved_and_loaded(tmp_path: Path) -> None:
    saved = str(tmp_path / "stages.json")
    staged = {"pipeline_nmicros": 4, "pipeline_nstages": 2}
    _, made = plan_of(tmp_path / "saved", {**staged, "save_plan_path": saved})
    plan = json.loads(Path(saved).read_text())
    plan["stages_begin_with"], plan["recompute"] = ["layers.3"], [1.0, 0.0]
    Path(saved).write_text(json.dumps(plan))
    problem, (loaded, _) = plan_of(tmp_path / "loaded", {**staged, "load_plan_path": saved})
    assert problem == ""
    assert dict(loaded)["pipeline_parallel"]["split_points"] == ["layers.3"]
    assert dict(loaded)["checkpoint"] == {"share": [1.0, 0.0]}
    assert dict(made[0])["pipeline_parallel"]["split_points"] != ["layers.3"]
    Path(saved).write_text("{}")
    assert "holds no plan of stages" in made_by(
        "autodist", tmp_path, pas_config={**staged, "load_plan_path": saved}
    )


def test_a_plan_of_stages_is_one_where_one_stage_is_best_too(tmp_path: Path) -> None:
    saved = str(tmp_path / "stages.json")
    # A pivot before which there is next to nothing.
    staged = {"pipeline_nmicros": 1, "pipeline_pivots": "layers.1"}
    problem, made = plan_of(tmp_path / "saved", {**staged, "save_plan_path": saved})
    assert problem == ""
    assert json.loads(Path(saved).read_text())["stages_begin_with"] == []
    problem, loaded = plan_of(tmp_path / "loaded", {**staged, "load_plan_path": saved})
    assert problem == ""
    assert loaded[0] == made[0]


def test_a_pipeline_for_inference_alone(tmp_path: Path) -> None:
    settings = {"pipeline_nmicros": 2, "pipeline_scheduler": "infer_pipe"}
    assert "set inference_only=True" in made_by("pp", tmp_path, pas_config=settings)
    losses = [float(plain_loss(seed)) for seed in (1, 2)]
    for found in run_ranks(inferred, 2, args=(str(tmp_path), settings)):
        assert found == pytest.approx(losses, abs=1e-6)


def plain_loss(seed: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module_of("mlp")(sample_of("mlp", seed))
    return found


def inferred(folder: str, settings: dict[str, Any]) -> list[float]:
    config = ComputeConfig(2, 2, use_end2end=True, inference_only=True, pas_config=settings)
    module = made("mlp", "pp", config, folder=folder, reuse="override")
    with pytest.raises(StepError, match="inference_only"):
        module.train_step([sample_of("mlp", 1)] * 2)
    return [float(output) for output in module.infer_step([sample_of("mlp", seed) for seed in (1, 2)])]


def test_hybrid_begins_a_stage_at_each_pivot(tmp_path: Path) -> None:
    settings = {"pipeline_nmicros": 4, "pipeline_nstages": 2, "pipeline_pivots": "layers.2,layers.4"}
    assert "2 stages need 1, but there are 2" in made_by("hybrid", tmp_path, pas_config=settings)


@pytest.mark.parametrize("key", _REFUSED)
def test_settings_that_are_refused_say_why(tmp_path: Path, key: str) -> None:
    assert f"{key} is not taken: {_REFUSED[key]}" in made_by("autodist", tmp_path, pas_config={key: 1})


CHANGED = {
    "plan_ngpus": 4,
    "runtime_ngpus": 8,
    "constant_folding": True,
    "trace_strategy": "meta",
    "use_zero": True,
    "zero_ngroups": 2,
    "inference_only": True,
    "use_end2end": False,
    "pas_config": {"seed": 2},
    "user_config": {"a": 1},
}


def test_every_field_of_the_config_counts(tmp_path: Path) -> None:
    """A plan made with another value of it does not fit."""
    assert set(CHANGED) == {one.name for one in fields(ComputeConfig)}
    base = {"plan_ngpus": 2, "runtime_ngpus": 4, "use_end2end": True, "use_zero": False}
    for name, value in CHANGED.items():
        own = {**base, "use_zero": True} if name == "zero_ngroups" else base
        assert made_by("tp", tmp_path, **own) == ""
        config = ComputeConfig(**{**own, name: value})
        with pytest.raises(InputError) as error:
            made("mlp", "tp", config, folder=str(tmp_path), load_module=False)
        assert f"compute_config: {name} is {value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"plan_ngpus": 0}, "plan_ngpus must be a positive integer"),
        ({"plan_ngpus": 3}, "not a multiple of plan_ngpus=3"),
        ({"zero_ngroups": 2}, "counts with use_zero=True alone"),
        ({"use_zero": True, "zero_ngroups": 3}, "does not divide the 2 scale units"),
        ({"trace_strategy": "cudaa"}, "Did you mean 'cuda'"),
        ({"use_zero": 1}, "use_zero must be True or False"),
        ({"pas_config": [1]}, "pas_config must be a dictionary"),
        ({"pas_config": {1: 2}}, "keys of pas_config must be strings"),
    ],
)
def test_configs_that_are_wrong(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as error:
        ComputeConfig(**{"plan_ngpus": 2, "runtime_ngpus": 4, **given})
    assert named in str(error.value)
