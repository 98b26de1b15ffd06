"""ds_3d_parallel: DeepSpeed's pipeline engine trains as one process does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.checkpoint import load, save
from atorch_ns.cluster import Cluster, Mesh
from atorch_ns.errors import StepError, StrategyError
from atorch_ns.job import Result
from atorch_ns.method import Resolved, load_registry, resolve
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import SyntheticDataset, get_case
from atorch_ns.testing.parity import accelerate_case, reference_run, whole_parameters
from atorch_ns.testing.workers import run_ranks
from opt_lib._deepspeed import zero as zero_module
from tests.opt_lib.scenarios import (
    AUTOCAST,
    AUTOCAST_FP16,
    Runs,
    Scenario,
    assert_equals_one_process,
    error_of,
    named,
    run_scenarios,
    selected,
    two_groups,
)

TWO = Cluster(world_size=2, local_world_size=2, distributed=True, torch="2.13.0")
EIGHT = Cluster(world_size=8, local_world_size=8, distributed=True, torch="2.13.0")
PROBLEMS = zero_module.check("ds_3d_parallel", TWO)  # imports it, so that forked ranks need not
pytestmark = [
    pytest.mark.skipif(bool(PROBLEMS), reason="; ".join(map(str, PROBLEMS))),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
REGISTRY = load_registry()
CUBE = [("tensor", 2), ("pipeline", 2), ("data", 2)]


def _mesh(*axes: tuple[str, int]) -> Any:
    return ("parallel_mode", ([*axes], None))


def _resolve(*steps: Any, cluster: Cluster = EIGHT) -> Resolved:
    return resolve(Strategy(steps), cluster, REGISTRY)


def _names(resolved: Resolved) -> list[str]:
    return [item.method.name for item in resolved.chosen]


def test_it_takes_the_place_of_pipeline_and_data() -> None:
    assert _names(_resolve(_mesh(*CUBE), "ds_3d_parallel")) == [
        "parallel_mode",
        "ds_3d_parallel",
        "tensor_parallel",
    ]
    assert _names(_resolve(_mesh(*CUBE), "mixed_parallel", "deepspeed_3d_parallel")) == [
        "parallel_mode",
        "ds_3d_parallel",
        "tensor_parallel",
    ]


def test_a_pipeline_of_one_rank_cuts_nothing() -> None:
    mesh = _mesh(("tensor", 1), ("pipeline", 1), ("data", 8))
    assert _names(_resolve(mesh, "ds_3d_parallel")) == ["parallel_mode", "ddp"]
    config = {"zero_stage": 1, "num_micro_batches": 2, "ds_config": {"wall_clock_breakdown": True}}
    resolved = _resolve(mesh, ("ds_3d_parallel", config))
    assert _names(resolved) == ["parallel_mode", "zero1", "gradient_accumulation"]
    assert "ds_config is not used" in str(resolved.notes)


def test_plan() -> None:
    pipeline = _mesh(("pipeline", 4), ("data", 2))
    plan = _resolve(
        pipeline, ("ds_3d_parallel", {"num_micro_batches": 8, "split_points": ["a", "b", "c"]})
    ).plan
    assert (plan.pipeline.schedule, plan.pipeline.stages_per_rank, plan.num_micro_batches) == ("1F1B", 1, 8)
    assert (plan.pipeline.split_method, plan.pipeline.split_points) == ("custom", ("a", "b", "c"))
    assert (plan.gradient_sync, plan.sharding.optimizer_over) == ("all_reduce", ())
    sharded = _resolve(pipeline, ("ds_3d_parallel", {"zero_stage": 1})).plan
    assert (sharded.sharding.optimizer_over, sharded.sharding.layout) == (("data",), "flat")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([_mesh(("data", 8)), "ds_3d_parallel"], "no pipeline axis larger than 1"),
        (["ds_3d_parallel"], "no pipeline axis larger than 1"),
        ([_mesh(("expert", 2), ("pipeline", 2)), "ds_3d_parallel"], "averages every gradient"),
        ([_mesh(*CUBE), ("ds_3d_parallel", {"zero_stage": 1})], "Use zero_stage 0"),
        ([_mesh(("pipeline", 2)), "ds_3d_parallel", "pipeline_parallel"], "axis:pipeline"),
        ([_mesh(("pipeline", 2)), "ds_3d_parallel", "fsdp"], "gradient_sync"),
        ([_mesh(("pipeline", 2)), "ds_3d_parallel", "ddp"], "gradient_sync"),
        ([_mesh(("pipeline", 2)), ("ds_3d_parallel", {"zero_stage": 1}), "half"], "fp32 copies"),
        (
            [_mesh(("pipeline", 2)), ("ds_3d_parallel", {"zero_stage": 1}), ("amp_native", "fp16")],
            "scales fp16 losses",
        ),
        ([_mesh(("pipeline", 2)), ("ds_3d_parallel", {"zero_stage": 2})], r"zero_stage=2.*0 or 1"),
        ([_mesh(("pipeline", 2)), ("ds_3d_parallel", {"num_micro_batches": 0})], "num_micro_batches=0"),
        (
            [
                _mesh(("pipeline", 2)),
                ("ds_3d_parallel", {"ds_config": {"gradient_clipping": 1.0, "fp16": {}}}),
            ],
            "fp16: use the method.*gradient_clipping: use max_grad_norm",
        ),
        (
            [_mesh(("pipeline", 2)), ("ds_3d_parallel", {"ds_config": {"zero_optimization": {"stage": 1}}})],
            "decided by zero_stage",
        ),
    ],
)
def test_mistakes(steps: list[Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        _resolve(*steps)


def _clipped(steps: list[Any], **arguments: Any) -> Scenario:
    return Scenario("tied_llama", steps, {"max_grad_norm": 0.05, **arguments}, {"max_norm": 0.05})


def _on_two() -> dict[str, Scenario]:
    pipeline, found = _mesh(("pipeline", 2)), {}
    steps = [pipeline, "ds_3d_parallel"]
    for case in ("mlp", "hf_gpt2", "encoder_decoder"):
        found[case] = Scenario(case, steps)
    found["compile"] = Scenario("tied_llama", [*steps, ("compile", "aot_eager")])
    found["fp16"] = Scenario("tied_llama", [*steps, ("amp_native", "fp16")], {}, AUTOCAST_FP16)
    masters = ("half", {"dtype": "fp16", "master_weights": True})
    found["half"] = Scenario("tied_llama", [*steps, masters], {}, AUTOCAST_FP16)
    for zero in (0, 1):
        steps = [pipeline, ("ds_3d_parallel", {"zero_stage": zero})]
        found[f"clipped-{zero}"] = _clipped(steps, gradient_accumulation_steps=4)
        found[f"checkpoint-{zero}"] = Scenario("tied_llama", [*steps, "checkpoint"])
        found[f"bf16-{zero}"] = Scenario("tied_llama", [*steps, ("amp_native", "bf16")], {}, AUTOCAST)
        groups = {"optim_param_func": two_groups}
        found[f"groups-{zero}"] = Scenario("tied_llama", steps, groups, groups)
    return found


def _on_four() -> dict[str, Scenario]:
    found = {}
    for zero in (0, 1):
        method = ("ds_3d_parallel", {"zero_stage": zero, "num_micro_batches": 2})
        outer, inner = (_mesh(("pipeline", 2), ("data", 2)), _mesh(("data", 2), ("pipeline", 2)))
        found[f"clipped-{zero}"] = _clipped([outer, method])
        found[f"data inside-{zero}"] = Scenario("hf_gpt2", [inner, method])
        found[f"four stages-{zero}"] = Scenario(
            "mlp", [_mesh(("pipeline", 4)), ("ds_3d_parallel", {"zero_stage": zero})]
        )
    divided = {"tensor": ("hf_gpt2", "tensor"), "sequence": ("tied_llama", "sequence")}
    for name, (case, axis) in divided.items():
        found[name] = Scenario(case, [_mesh((axis, 2), ("pipeline", 2)), "ds_3d_parallel"])
    return found


TWO_RANKS, FOUR_RANKS = _on_two(), _on_four()
OFTEN = ("mlp", "hf_gpt2", "clipped-1", "checkpoint-0", "bf16-1", "groups-0", "data inside-1", "tensor")
EIGHT_RANKS = {"cube": Scenario("tied_llama", [_mesh(*CUBE), "ds_3d_parallel"])}


@pytest.fixture(scope="module")
def runs_on_two(request: pytest.FixtureRequest) -> Runs:
    return run_scenarios(selected(request, TWO_RANKS), 2)


@pytest.fixture(scope="module")
def runs_on_four(request: pytest.FixtureRequest) -> Runs:
    return run_scenarios(selected(request, FOUR_RANKS), 4)


@pytest.mark.parametrize("name", named(TWO_RANKS, often=OFTEN))
def test_two_stages_equal_one_process(name: str, runs_on_two: Runs) -> None:
    assert_equals_one_process(TWO_RANKS[name], name, runs_on_two)


@pytest.mark.parametrize("name", named(FOUR_RANKS, often=OFTEN))
def test_four_ranks_equal_one_process(name: str, runs_on_four: Runs) -> None:
    assert_equals_one_process(FOUR_RANKS[name], name, runs_on_four)


@pytest.mark.slow
def test_three_axes_on_eight_ranks_equal_one_process() -> None:
    assert_equals_one_process(EIGHT_RANKS["cube"], "cube", run_scenarios(EIGHT_RANKS, 8))


def _made(zero: int = 0, case: str = "tied_llama", **arguments: Any) -> Result:
    steps = [_mesh(("pipeline", 2)), ("ds_3d_parallel", {"zero_stage": zero, "num_micro_batches": 2})]
    return accelerate_case(get_case(case), steps, **arguments)


def _evaluations() -> list[list[float]]:
    """The loss of an evaluation and of the step on the same batch, twice, with batches of two sizes between."""
    result = _made()
    step, batches = result.train_step, list(result.dataloader or ())
    return [
        [float(step.evaluate(batch)), float(step(batch))]
        for batch in (batches[0], batches[1][:4], batches[2])
    ]


def test_evaluation_gives_the_loss_of_the_step_whatever_the_size_of_the_batch() -> None:
    for rank in run_ranks(_evaluations, 2):
        for evaluated, trained in rank:
            assert evaluated == pytest.approx(trained, rel=1e-6)


def _saved_and_resumed(folder: str) -> dict[str, Any]:
    """Two steps by DeepSpeed's ZeRO 1, then the other three without it, then again with it."""
    result = _made(zero=1)
    batches = list(result.dataloader or ())
    for batch in batches[:2]:
        result.train_step(batch)
    save(folder, result)
    found = {}
    plain = accelerate_case(get_case("tied_llama"), [_mesh(("pipeline", 2)), "pipeline_parallel"])
    for name, resumed in (("another engine", plain), ("ZeRO 1", _made(zero=1)), ("ZeRO 0", _made())):
        load(folder, resumed, data_position=False)
        for batch in batches[2:]:
            resumed.train_step(batch)
        found[name] = whole_parameters(resumed)
    return found


def test_a_checkpoint_goes_on_under_any_engine(tmp_path: Path) -> None:
    get_case("tied_llama").build()
    expected = reference_run(get_case("tied_llama")).final
    for rank in run_ranks(_saved_and_resumed, 2, args=(str(tmp_path / "saved"),), timeout_s=60):
        for name, weights in rank.items():
            for key, value in expected.items():
                assert torch.allclose(weights[key], value, atol=2e-6), (name, key)


class _Unused(nn.Module):
    """A part of the second stage takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.last = nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.first(features)
        for block in self.blocks:
            x = torch.tanh(block(x))
        result: torch.Tensor = self.last(x)
        return result


def _unused(zero: int) -> Any:
    result = _made(zero, "mlp", model=_Unused())
    before = whole_parameters(result)["scale"]
    try:
        for batch in result.dataloader or ():
            result.train_step(batch)
    except StepError as error:
        return str(error)
    return bool(torch.equal(before, whole_parameters(result)["scale"]))


def test_what_is_not_used_is_left_alone_or_refused() -> None:
    assert all(run_ranks(_unused, 2, args=(0,), timeout_s=30))
    for text in run_ranks(_unused, 2, args=(1,), timeout_s=30):
        assert "took no part in the loss: scale" in text


def _coordinates(axes: list[tuple[str, int]]) -> dict[str, int]:
    """This rank's place in DeepSpeed's grid, and in the mesh."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    from opt_lib._deepspeed.pipeline import _build_topology

    mesh = Mesh(axes, device_type="cpu")
    zero_module.start("cpu")
    grid = PipelineParallelGrid(topology=_build_topology(mesh))
    return {
        "stage": grid.get_stage_id() - mesh.axis("pipeline").get_local_rank(),
        "data": grid.get_data_parallel_rank() - mesh.data.get_local_rank(),
        "data ranks": sorted(grid.dp_group) == sorted(dist.get_process_group_ranks(mesh.data_group)),
        "model": grid.get_slice_parallel_rank() - mesh.axis("tensor").get_local_rank(),
    }


def _all_coordinates() -> list[dict[str, int]]:
    return [_coordinates(list(axes)) for axes in itertools.permutations(CUBE)]


def test_deepspeed_knows_the_ranks_by_their_places_in_the_mesh() -> None:
    for rank in run_ranks(_all_coordinates, 8, timeout_s=60):
        assert rank == [{"stage": 0, "data": 0, "data ranks": True, "model": 0}] * len(rank)


def _without_an_optimizer() -> str:
    case = get_case("mlp")
    steps = [_mesh(("pipeline", 2)), "ds_3d_parallel"]
    return error_of(
        lambda: auto_accelerate(
            case.build(),
            loss_func=case.loss_func,
            sample_batch=case.make_batch(4, 0),
            model_input_format=case.model_input_format,
            load_strategy=steps,
        )
    )


def test_without_an_optimizer_there_is_no_engine() -> None:
    for text in run_ranks(_without_an_optimizer, 2):
        assert "needs optim_func" in text


def _losses_of_uneven_batches(strategy: list[Any]) -> list[float]:
    case = get_case("mlp")
    _, result, _ = auto_accelerate(
        case.build(),
        torch.optim.SGD,
        SyntheticDataset(case, 10),
        case.loss_func,
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8, "shuffle": False},
        model_input_format=case.model_input_format,
        load_strategy=strategy,
    )
    assert result is not None
    return [float(result.train_step(batch)) for _ in range(3) for batch in result.dataloader or ()]


def test_a_smaller_last_batch_counts_as_in_one_process() -> None:
    """It has fewer micro-batches; SGD shows the scale of a gradient, which Adam would hide."""
    expected = run_ranks(_losses_of_uneven_batches, 1, args=([],))[0]
    for losses in run_ranks(_losses_of_uneven_batches, 2, args=([_mesh(("pipeline", 2)), "ds_3d_parallel"],)):
        assert losses == pytest.approx(expected, rel=1e-5)
