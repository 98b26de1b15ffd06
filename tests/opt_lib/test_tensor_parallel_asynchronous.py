"""Asynchronous tensor parallelism: parity with one process, the operators that inductor makes, and what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh

from atorch_ns.cluster import cluster_from_spec
from atorch_ns.errors import StrategyError
from atorch_ns.estimate import Workload
from atorch_ns.job import Job
from atorch_ns.method import load_registry, resolve
from atorch_ns.planning import profile
from atorch_ns.search import SearchSettings, explore
from atorch_ns.sharding import Layout, TensorGroup, divide
from atorch_ns.sharding.tensor.plan import LayerStyle, RegionSpec
from atorch_ns.sharding.tensor.sequence import StreamSpec
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing.models import CASES
from atorch_ns.testing.parity import accelerate_case, assert_parity, assert_ranks_agree, compare
from atorch_ns.testing.workers import run_ranks
from atorch_ns.torch_compat import join_fake_group, micro_pipelined
from opt_lib._fp8 import torchao
from opt_lib.fp8 import Fp8Config
from opt_lib.tensor_parallel import TensorParallel, TensorParallelConfig
from tests.opt_lib.tensor_cases import SEQUENCE, TENSOR, check, trajectories

ASYNCHRONOUS = ("tensor_parallel", {"sequence": True, "asynchronous": True})
NODES = cluster_from_spec("8xH100-80GB, 2 nodes, ib400")


@pytest.fixture
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs, and by backends that compile in a moment: exchanges are waited for, and their numbers are the same."""
    monkeypatch.setattr(TensorParallel, "check_plan", lambda *_: [])


@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize(
    "name",
    ["hf_llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hf_gpt2", "encoder_decoder"))],
)
def test_training_is_that_of_one_process(name: str) -> None:
    compiled = ("compile", "aot_eager")
    strategies = {
        "compiled": [TENSOR, ASYNCHRONOUS, compiled],
        "sharded, recomputed": [TENSOR, ASYNCHRONOUS, compiled, "fsdp", "checkpoint"],
    }
    check(CASES[name], 2, strategies)


def _fp8(recipe: str, **settings: Any) -> Any:
    return ("fp8", {"backend": "torchao", "emulate": True, "recipe": recipe, **settings})


@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize(
    ("rest", "param_tol", "loss_tol"),
    [
        ([_fp8("tensorwise")], 2e-4, 1e-5),
        pytest.param([_fp8("rowwise")], 2e-4, 1e-5, marks=pytest.mark.slow),
        # Weights so near to the middle of two numbers in fp8 that they are rounded to the other one after a step.
        pytest.param([_fp8("tensorwise", fsdp_all_gather=True), "fsdp"], 0.8, 0.05, marks=pytest.mark.slow),
    ],
    ids=["tensorwise", "rowwise", "weights gathered in fp8"],
)
def test_layers_in_fp8_compute_what_they_do_where_exchanges_are_waited_for(
    rest: list[Any], param_tol: float, loss_tol: float
) -> None:
    """One scale for what all ranks gather, as for the whole; samples and tokens change places in row layers."""
    pytest.importorskip("torchao")
    strategies = {
        "waited for": [TENSOR, SEQUENCE, *rest],
        "asynchronous": [TENSOR, ASYNCHRONOUS, *rest, ("compile", "aot_eager")],
        "in full": [TENSOR, SEQUENCE],
    }
    runs = run_ranks(trajectories, 2, args=(CASES["tied_llama"], strategies, {}), timeout_s=200)
    waited, asynchronous, plain = (runs[0][name] for name in strategies)
    assert_parity(compare(waited, asynchronous), param_tol=param_tol, loss_tol=loss_tol)
    assert compare(plain, asynchronous).max_param_error > 0.01, "nothing was rounded"
    assert_ranks_agree([run["asynchronous"] for run in runs])


def _report(name: str, *methods: Any) -> str:
    return str(accelerate_case(CASES[name], [TENSOR, ASYNCHRONOUS, *methods]).report)


@pytest.mark.usefixtures("_anywhere")
def test_the_report_says_where_exchanges_are_asynchronous() -> None:
    text = " ".join(run_ranks(_report, 2, args=("encoder_decoder",))[0].split())
    # Keys and values of attention to an encoder come from another tensor than queries.
    assert "groups of layers; the others read more than the input of the module around them" in text


@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize(
    ("recipe", "told"),
    [("tensorwise", "travels in float8 in 8 of them"), ("rowwise", "with one scale a row are waited for")],
)
def test_the_report_says_what_travels_in_float8(recipe: str, told: str) -> None:
    pytest.importorskip("torchao")
    assert told in " ".join(run_ranks(_report, 2, args=("tied_llama", _fp8(recipe)))[0].split())


class _Inner(nn.Module):
    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate = nn.Linear(32, 64) if num_columns > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = F.silu(self.up(x))
        out: torch.Tensor = self.down(up if isinstance(self.gate, nn.Identity) else up * self.gate(x))
        return out


class _Block(nn.Module):
    """A block of a residual stream [B, T, D], whose columns take one input."""

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(32), _Inner(num_columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(self.norm(x))
        return out


class _Net(nn.Module):
    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.block = _Block(num_columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out


def _joined(num_columns: int, recipe: str | None, num_samples: int) -> tuple[list[list[str]], bool]:
    """The operators on symmetric memory that torch's pass makes of each graph, and whether its setting is left behind."""
    from torch._inductor.fx_passes import post_grad

    join_fake_group(0, 2)
    make, found = post_grad.micro_pipeline_tp_pass, []

    def on_a_copy(graph: torch.fx.Graph) -> None:
        """Only GPUs can run what it makes."""
        made = torch.fx.Graph()
        made.output(made.graph_copy(graph, {}))
        make(made)
        names = [str(node.target) for node in made.nodes]
        found.append([name.split(".")[1] for name in names if name.startswith("symm_mem.")])

    columns = ("block.inner.up", "block.inner.gate")[:num_columns]
    rows = ("block.inner.down",)
    layout = Layout(
        {**dict.fromkeys(columns, LayerStyle("colwise")), **dict.fromkeys(rows, LayerStyle("rowwise"))}
    )
    model = _Net(num_columns).to(torch.bfloat16)
    if recipe is not None:
        _in_fp8(model, recipe)
    with pytest.MonkeyPatch.context() as patch, _symmetric_memory._test_mode():
        patch.setattr(post_grad, "micro_pipeline_tp_pass", on_a_copy)
        patch.setattr(dist, "is_nccl_available", lambda: True)
        group = TensorGroup(init_device_mesh("cpu", (2,)), traced=True)
        spec = RegionSpec(columns, rows, one_input=True, one_use=True)
        divide(model, layout, group, [spec], stream=StreamSpec((("block",),)))
        model.block.compile(options=micro_pipelined(None))
        model(torch.randn(num_samples, 16, 32, dtype=torch.bfloat16)).sum().backward()
    dist.destroy_process_group()
    return found, torch._inductor.config._micro_pipeline_tp


def _in_fp8(model: nn.Module, recipe: str) -> None:
    job = SimpleNamespace(module=model, plan=Plan(), precision=SimpleNamespace())
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    torchao.replace_linears(cast(Job, job), names, Fp8Config(backend="torchao", recipe=cast(Any, recipe)))


GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_columns", "recipe", "num_samples", "joined"),
    [
        (1, None, 2, ([GATHER, SCATTER], [GATHER, SCATTER])),
        # Gradients of several columns are added before they are summed over ranks.
        (2, None, 2, ([GATHER, SCATTER], [GATHER])),
        (2, "tensorwise", 2, ([SCALED_GATHER, SCALED_SCATTER], [SCALED_GATHER])),
        # Tokens of one sample are rows in their order.
        (1, "tensorwise", 1, ([SCALED_GATHER, SCALED_SCATTER], [SCALED_GATHER, SCALED_SCATTER])),
        # Gathered as it is, and rounded twice: along rows and, for gradients of weights, along columns.
        (2, "rowwise", 2, ([SCALED_SCATTER], [])),
        (2, "rowwise_with_gw_hp", 2, ([SCALED_SCATTER], [])),
    ],
)
def test_inductor_joins_exchanges_with_products(
    num_columns: int, recipe: str | None, num_samples: int, joined: tuple[list[str], list[str]]
) -> None:
    if recipe is not None:
        pytest.importorskip("torchao")
    ((forward, backward), is_left) = run_ranks(
        _joined, 1, args=(num_columns, recipe, num_samples), timeout_s=200, init_process_group=False
    )[0]
    assert (forward, sorted(backward)) == joined
    assert not is_left


def _refusal(strategy: list[Any], cluster: Any = NODES) -> str:
    with pytest.raises(StrategyError) as caught:
        resolve(Strategy.load(strategy), cluster, load_registry())
    (problem,) = caught.value.problems
    assert (problem.method, problem.key) == ("tensor_parallel", "asynchronous")
    return str(problem)


def test_what_it_needs_is_said_before_anything_is_built() -> None:
    mesh = ("parallel_mode", [("tensor", 8), ("data", 2)])
    resolved = resolve(Strategy.load([mesh, ASYNCHRONOUS, "compile"]), NODES, load_registry())
    assert resolved.plan.tensor.asynchronous
    assert "nothing is compiled by it. Add compile" in _refusal([mesh, ASYNCHRONOUS])
    assert "nothing is compiled by it" in _refusal([mesh, ASYNCHRONOUS, ("compile", "aot_eager")])
    wide = ("parallel_mode", [("tensor", 16)])
    assert "in different nodes of 8 ranks" in _refusal([wide, ASYNCHRONOUS, "compile"])
    outside = ("parallel_mode", [("data", 8), ("tensor", 2)])
    assert "0, 8 are in different nodes" in _refusal([outside, ASYNCHRONOUS, "compile"])
    cpus = cluster_from_spec("2xcpu")
    assert "the device is a CPU" in _refusal([TENSOR, ASYNCHRONOUS, "compile"], cpus)
    with pytest.raises(ValueError, match="set sequence=True too"):
        TensorParallelConfig(asynchronous=True)


def test_a_search_takes_it_only_where_it_was_asked_for() -> None:
    case = CASES["tied_llama"]
    traced = profile(case.build(), case.make_batch(2, 0))
    workload = Workload(global_batch=16, num_tokens=8)

    def plans(**asked: Any) -> list[Any]:
        space = explore(traced, NODES, workload, load_registry(), settings=SearchSettings(), **asked)
        kept = [one for one in space.candidates if one.pruned is None]
        found = [resolve(Strategy(one.steps), NODES, load_registry()).plan for one in kept]
        return [plan for plan in found if plan.size("tensor") > 1]

    assert not any(plan.tensor.asynchronous for plan in plans())
    wanted = plans(included=[ASYNCHRONOUS])
    assert wanted
    assert all(plan.tensor.asynchronous and plan.compiler == "inductor" for plan in wanted)
    assert {plan.size("tensor") for plan in wanted} <= {2, 4, 8}
