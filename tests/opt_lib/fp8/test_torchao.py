"""fp8 by torchao, emulated: bit-equal to torchao's own conversion, and beside every other method."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.cluster import Cluster
from atorch_ns.errors import MissingPackageError
from atorch_ns.job import Inputs, Job, Result
from atorch_ns.method import load_registry
from atorch_ns.numerics.probe import probe
from atorch_ns.numerics.verdict import TOLERANCE
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing import ADAMW, compare, get_case, reference_run, run_ranks
from atorch_ns.testing.conformance import MethodConformance
from atorch_ns.testing.models import SyntheticDataset
from atorch_ns.testing.networks import TiedLlama
from atorch_ns.testing.parity import (
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
)
from opt_lib._fp8 import torchao
from opt_lib._fp8.select import find_linears
from opt_lib.fp8 import Fp8, Fp8Config
from tests.opt_lib.scenarios import Runs, Scenario, named, run_scenarios, selected

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FUSED = {**ADAMW, "fused": True}


@pytest.fixture(autouse=True)
def _needs_torchao() -> None:
    try:
        torchao.load()
    except MissingPackageError as error:
        pytest.skip(str(error))


def fp8(recipe: str = "rowwise_with_gw_hp", **settings: Any) -> Any:
    """One scale a row and gradients of weights in high precision: what ranks do not change."""
    return ("fp8", {"backend": "torchao", "emulate": True, "recipe": recipe, **settings})


def by_hand(recipe: str, model: nn.Module) -> None:
    """torchao's own conversion of the same linears."""
    float8 = torchao.load()
    names = find_linears(model, None, ()).replaced
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def quietly(case: str, strategy: list[Any], **arguments: Any) -> Trajectory:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelerated_run(get_case(case), strategy, **arguments)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ["mlp", "tied_llama"])
def test_it_is_torchao_s_own_conversion_to_the_bit(recipe: str, case: str) -> None:
    hand = reference_run(get_case(case), prepare=lambda model: by_hand(recipe, model), optim_args=FUSED)
    found = quietly(case, [fp8(recipe)], optim_args=FUSED)
    assert found.losses == hand.losses
    assert found.final.keys() == hand.final.keys()
    assert all(torch.equal(found.final[name], value) for name, value in hand.final.items())
    plain = reference_run(get_case(case), optim_args=FUSED)
    assert compare(plain, found).max_param_error > 0.01, "nothing was rounded"


def test_weights_are_moved_without_a_copy_and_keep_their_names() -> None:
    model = get_case("mlp").build()
    before = dict(model.named_parameters())
    model.blocks[0].eval()  # type: ignore[index,operator]
    model.blocks[1].up.weight.requires_grad_(False)  # type: ignore[index,union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = accelerate_case(get_case("mlp"), [fp8()], model=model)
    after = dict(result.model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not result.model.blocks[0].up.training  # type: ignore[index,union-attr]
    assert list(result.model.state_dict()) == list(get_case("mlp").build().state_dict())


def test_one_linear_alone_is_replaced() -> None:
    model = nn.Linear(16, 16)
    weight = model.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result, _ = auto_accelerate(
            model,
            torch.optim.AdamW,
            torch.randn(16, 16),
            lambda _, y: y.square().mean(),
            dataloader_args={"batch_size": 16},
            load_strategy=[fp8()],
        )
    assert result is not None
    assert type(result.model).__name__ == "Float8Linear"
    assert result.model.weight is weight


def test_a_linear_in_two_places_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleDict({"x": nn.Linear(16, 16)})
            self.b = nn.ModuleDict({"y": self.a["x"]})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b["y"](self.a["x"](x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result, _ = auto_accelerate(
            Twice(),
            torch.optim.AdamW,
            torch.randn(16, 16),
            lambda _, y: y.square().mean(),
            dataloader_args={"batch_size": 16},
            load_strategy=[fp8()],
        )
    assert result is not None
    kinds = {type(module).__name__ for module in (result.model.a["x"], result.model.b["y"])}  # type: ignore[index,union-attr]
    assert kinds == {"Float8Linear"}
    assert len(list(result.model.parameters())) == 2


class Named(nn.Module):
    """One linear under two names of one parent, and under another parent."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = self.a
        self.block = nn.ModuleDict({"c": self.a})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block["c"](self.b(self.a(x)))


def _quiet_job(model: nn.Module) -> Job:
    job = Job.start(Inputs(model=model), Cluster(packages={"torchao": "0"}), Plan(), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Fp8().apply(job, Fp8Config.model_validate(fp8()[1]))
    return job


def test_a_linear_under_several_names_stays_one() -> None:
    model: Any = _quiet_job(Named()).module
    assert type(model.a).__name__ == "Float8Linear"
    assert model.a is model.b
    assert model.a is model.block["c"]


def test_models_pickle_and_copy() -> None:
    x = torch.randn(16, 16)
    for model in (nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), nn.Linear(16, 16)):
        module = _quiet_job(model).module
        for made in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            kinds = [type(part) for part in made.modules()]
            assert kinds == [type(part) for part in module.modules()]
            assert torch.equal(made(x), module(x))


def _demo_text() -> Any:
    path = Path(__file__).parents[3] / "examples" / "auto_accelerate" / "text.py"
    spec = importlib.util.spec_from_file_location("demo_text", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_loss_on_text_is_that_of_bf16_within_two_percent() -> None:
    text = _demo_text()
    windows = text.ByteWindows(text.english_text(), 48)
    batches = [torch.stack([windows[8 * step + row]["input_ids"] for row in range(8)]) for step in range(50)]
    torch.manual_seed(0)
    original = TiedLlama(vocab_size=text.VOCABULARY_SIZE, width=64, num_layers=2, hidden=128)

    def loss_func(batch: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())

    def losses(*strategy: Any) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, result, _ = auto_accelerate(
                copy.deepcopy(original),
                torch.optim.AdamW,
                batches[0],
                loss_func,
                optim_args={"lr": 1e-2},
                dataloader_args={"batch_size": 8},
                load_strategy=list(strategy),
            )
        assert result is not None
        return [float(result.train_step(batch)) for batch in batches]

    bf16 = losses(("amp_native", "bf16"))
    assert bf16[-1] < 0.7 * bf16[0], "it has learned something"
    for recipe in RECIPES:
        found = losses(fp8(recipe), ("amp_native", "bf16"))
        assert found != bf16
        assert sum(found[-10:]) == pytest.approx(sum(bf16[-10:]), rel=0.02), recipe


def _mesh(*axes: tuple[str, int]) -> Any:
    return ("parallel_mode", ([*axes], None))


# What no rank changes: with one scale a row, every rank rounds its own rows as one process does.
SAME = {
    "ddp": [fp8()],
    "zero1": [fp8(), "zero1"],
    "fsdp, checkpoint": [fp8(), "fsdp", "checkpoint"],
    "fsdp": [fp8(), "fsdp"],
    "compile, checkpoint": [fp8(), ("compile", "aot_eager"), "checkpoint"],
    "pipeline": [fp8(), _mesh(("pipeline", 2))],
    "micro-batches": [fp8(), ("gradient_accumulation", 2)],
}
# Scales of a rank's tensors are not those of the whole, so these are compared without the rounding.
EXACT: dict[str, tuple[str, list[Any]]] = {
    "tensor, its sequence": ("tensorwise", [_mesh(("tensor", 2)), ("tensor_parallel", {"sequence": True})]),
    "tensor, rows": ("rowwise", [_mesh(("tensor", 2)), ("tensor_parallel", {"sequence": True}), "fsdp"]),
    "sequence": ("tensorwise", [_mesh(("sequence", 2))]),
    "fsdp, amp": ("tensorwise", ["fsdp", ("amp_native", "bf16")]),
    "half": ("tensorwise", [("half", {"dtype": "bf16", "master_weights": True})]),
}
GATHERED = {
    "fsdp": (["fsdp"], 2e-4, 1e-5),
    # fp8 of fp32 weights in place of fp8 of their bf16 copies; one scale for all parts of a divided weight.
    "zero2, amp": (["zero2", ("amp_native", "bf16")], 0.8, 0.05),
    "tensor": (["fsdp", _mesh(("tensor", 2))], 0.8, 0.05),
}
GATHER = fp8("tensorwise", fsdp_all_gather=True)


def _exact_step(result: Result, batch: Any) -> torch.Tensor:
    for root in result.job.roots:
        assert result.job.precision.restore is not None
        result.job.precision.restore(root)
    return result.train_step(batch)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    torchao.load()
    names = selected(request, {**SAME, **EXACT, **GATHERED})
    scenarios = {name: Scenario("tied_llama", strategy) for name, strategy in SAME.items() if name in names}
    for name, (recipe, rest) in EXACT.items():
        if name not in names:
            continue
        scenarios[f"{name}, plain"] = Scenario("tied_llama", rest)
        scenarios[f"{name}, rounded"] = Scenario("tied_llama", [fp8(recipe), *rest])
        step = {"step": _exact_step}
        scenarios[f"{name}, exact"] = Scenario("tied_llama", [fp8(recipe), *rest], step)
    for name, (rest, *_) in GATHERED.items():
        if name not in names:
            continue
        scenarios[f"{name}, not gathered"] = Scenario("tied_llama", [fp8("tensorwise"), *rest])
        scenarios[f"{name}, gathered"] = Scenario("tied_llama", [GATHER, *rest])
    return run_scenarios(scenarios, 2)


@pytest.fixture(scope="module")
def alone() -> Trajectory:
    return quietly("tied_llama", [fp8()])


def _on_ranks(runs: Runs, name: str) -> Trajectory:
    found = [run[name] for run in runs]
    for trajectory in found:
        assert not isinstance(trajectory, str), trajectory
    trajectories = [trajectory for trajectory in found if not isinstance(trajectory, str)]
    assert_ranks_agree(trajectories)
    return trajectories[0]


@pytest.mark.parametrize("name", named(SAME, often=("ddp", "fsdp, checkpoint", "pipeline")))
def test_two_ranks_compute_what_one_process_does_in_fp8(name: str, runs: Runs, alone: Trajectory) -> None:
    assert_parity(compare(alone, _on_ranks(runs, name)))


@pytest.mark.parametrize("name", named(EXACT, often=("fsdp, amp", "tensor, rows")))
def test_nothing_but_rounding_is_different(name: str, runs: Runs) -> None:
    plain, exact, rounded = (_on_ranks(runs, f"{name}, {kind}") for kind in ("plain", "exact", "rounded"))
    assert_parity(compare(plain, exact))
    found = compare(plain, rounded)
    assert found.max_param_error > 0.01, "nothing was rounded"
    assert found.max_loss_error < 0.1


@pytest.mark.parametrize("name", named(GATHERED, often=("zero2, amp",)))
def test_weights_gathered_in_fp8_are_those_rounded_afterwards(name: str, runs: Runs) -> None:
    _, param_tol, loss_tol = GATHERED[name]
    apart, gathered = (_on_ranks(runs, f"{name}, {kind}") for kind in ("not gathered", "gathered"))
    assert_parity(compare(apart, gathered), param_tol=param_tol, loss_tol=loss_tol)


def _told(strategy: list[Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(accelerate_case(get_case("tied_llama"), strategy).report)


def test_tensor_parallel_divides_the_layers() -> None:
    text = run_ranks(_told, 2, args=([fp8("tensorwise"), _mesh(("tensor", 2))],))[0]
    assert "colwise: layers.*.mlp.gate_proj, layers.*.mlp.up_proj" in text
    assert "rowwise: layers.*.mlp.down_proj" in text


def _resumed(folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of three steps that go on, that begin from a checkpoint, and that do so without fp8."""
    case, gathered = get_case("tied_llama"), [GATHER, "fsdp"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, again, plain = (accelerate_case(case, strategy) for strategy in (gathered, gathered, ["ddp"]))
    assert first.dataloader is not None
    batches = list(first.dataloader)
    for batch in batches[:2]:
        first.train_step(batch)
    checkpoint.save(folder, first)
    checkpoint.load(folder, again)
    checkpoint.load(folder, plain)
    found = [[float(result.train_step(batch)) for batch in batches[2:]] for result in (first, again, plain)]
    return found[0], found[1], found[2]


def test_checkpoints_of_weights_gathered_in_fp8(tmp_path: Path) -> None:
    went_on, resumed, plain = run_ranks(_resumed, 2, args=(str(tmp_path),))[0]
    assert resumed == went_on
    assert plain == pytest.approx(went_on, rel=0.02)


def _on_meta() -> list[list[float]]:
    case, found = get_case("tied_llama"), []
    for gathered in (False, True):
        with torch.device("meta"):
            model = case.build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = accelerate_case(case, [fp8("tensorwise", fsdp_all_gather=gathered), "fsdp"], model=model)
        assert result.dataloader is not None
        found.append([float(result.train_step(batch)) for batch in result.dataloader])
    return found


def test_models_on_meta_are_materialised() -> None:
    whole, gathered = run_ranks(_on_meta, 2)[0]
    assert whole == gathered
    assert whole[-1] < whole[0]


def test_full_precision_can_be_restored_in_a_copy() -> None:
    case = get_case("tied_llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = accelerate_case(case, [fp8("rowwise")])
    batch = case.make_batch(2, 0)
    exact = result.job.in_full_precision(result.job.module)
    plain = case.build()
    assert torch.allclose(exact(batch), plain(batch), atol=1e-5)
    assert not torch.allclose(result.model(batch), plain(batch), atol=1e-3)
    assert all(
        a is b for a, b in zip(exact.parameters(), result.job.module.parameters(), strict=True)
    ) or all(
        a.data_ptr() == b.data_ptr()
        for a, b in zip(exact.parameters(), result.job.module.parameters(), strict=True)
    )


def _probed() -> list[Any]:
    case, cluster = get_case("tied_llama"), Cluster.detect()
    inputs = Inputs(
        model=case.build(), dataset=SyntheticDataset(case, 64), dataloader_args={"batch_size": 8},
        optim_func=torch.optim.AdamW, loss_func=case.loss_func, model_input_format=case.model_input_format,
        sample_batch=case.make_batch(4, 0),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            probe(inputs, cluster, Strategy([fp8("tensorwise"), *rest]), load_registry())
            for rest in (["fsdp"], [("amp_native", "bf16"), _mesh(("tensor", 2))])
        ]


def test_a_strategy_is_judged_without_its_rounding() -> None:
    exact, reduced = run_ranks(_probed, 2)[0]
    assert exact.passed, exact.text
    assert exact.tolerance == TOLERANCE
    assert reduced.passed, reduced.text


class TestFp8(MethodConformance):
    method = Fp8
    configs = (fp8()[1], {**fp8()[1], "exclude": ("stem",)})
    bad_configs: ClassVar = (
        ("tea", "backend"),
        ({"margins": 1}, "margins"),
        ({"recipe": "columns"}, "recipe"),
    )
    cases = ("mlp",)
    reference: ClassVar = {"prepare": lambda model: by_hand("rowwise_with_gw_hp", model)}
    param_tol = 0.5
    loss_tol = 2e-2
