"""fp8 by Transformer Engine, with a fake of the package at its edge: what it is told, and when."""

from __future__ import annotations

import copy
import importlib.machinery
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, RankError, StrategyError
from atorch_ns.job import Inputs, Job
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing import get_case, run_ranks
from opt_lib.checkpoint import ActivationCheckpointConfig, Checkpoint
from opt_lib.fp8 import Fp8, Fp8Config

HOPPER = Cluster(
    device_type="cuda", capability=(9, 0), device_name="H100", packages={"transformer_engine": "1.11"}
)


class Fake:
    """A stand-in for the package that notes what it is told."""

    def __init__(self, *, interval: bool = True, new_name: bool = False, keywords: bool = True) -> None:
        self.made: list[dict[str, Any]] = []
        self.entered: list[dict[str, Any]] = []
        self.recomputed: list[dict[str, Any]] = []
        self.depth = 0
        self.deepest = 0
        self.modules = self._modules(interval, new_name, keywords)

    def _modules(self, interval: bool, new_name: bool, keywords: bool) -> dict[str, ModuleType]:
        names = ("", ".pytorch", ".common", ".common.recipe")
        found = {name: ModuleType(f"transformer_engine{name}") for name in names}
        for module in found.values():
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        found[".pytorch"].Linear = _linear(self)  # type: ignore[attr-defined]
        found[".pytorch"].checkpoint = self._checkpoint(keywords)  # type: ignore[attr-defined]
        if new_name:
            found[".pytorch"].autocast = self._autocast_new  # type: ignore[attr-defined]
        else:
            found[".pytorch"].fp8_autocast = self._autocast  # type: ignore[attr-defined]
        found[".common.recipe"].Format = type("Format", (), {"HYBRID": "hybrid", "E4M3": "e4m3"})  # type: ignore[attr-defined]
        found[".common.recipe"].DelayedScaling = _Recipe if interval else _RecipeWithoutInterval  # type: ignore[attr-defined]
        return {module.__name__: module for module in found.values()}

    @contextmanager
    def _autocast(self, *, enabled: bool, fp8_recipe: Any, fp8_group: Any) -> Iterator[None]:
        self.entered.append({"enabled": enabled, "recipe": fp8_recipe, "group": fp8_group})
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        try:
            yield
        finally:
            self.depth -= 1

    def _autocast_new(self, *, enabled: bool, recipe: Any, amax_reduction_group: Any) -> Any:
        return self._autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=amax_reduction_group)

    def _checkpoint(self, keywords: bool) -> Callable[..., Any]:
        def checkpoint(function: Any, *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
            self.recomputed.append({"function": function, "use_reentrant": use_reentrant})
            return function(*args, **kwargs)

        def positional(function: Any, distribute: bool, tracker: Any, group: Any, *args: Any) -> Any:
            return function(*args)

        return checkpoint if keywords else positional


class _Recipe:
    def __init__(
        self,
        margin: int = 0,
        interval: int = 1,
        fp8_format: str = "",
        amax_history_len: int = 0,
        amax_compute_algo: str = "",
        reduce_amax: bool = True,
    ) -> None:
        self.settings = {k: v for k, v in locals().items() if k != "self"}


class _RecipeWithoutInterval:
    def __init__(
        self,
        margin: int = 0,
        fp8_format: str = "",
        amax_history_len: int = 0,
        amax_compute_algo: str = "",
        reduce_amax: bool = True,
    ) -> None:
        self.settings = {k: v for k, v in locals().items() if k != "self"}


def _linear(fake: Fake) -> type[nn.Module]:
    class Linear(nn.Module):
        def __init__(
            self,
            in_features: int,
            out_features: int,
            bias: bool = True,
            *,
            params_dtype: Any = None,
            device: Any = "cuda",
        ) -> None:
            super().__init__()
            fake.made.append(
                {"size": (in_features, out_features), "bias": bias, "dtype": params_dtype, "device": device}
            )
            options = {"dtype": params_dtype, "device": device}
            self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
            if bias:
                self.bias = nn.Parameter(torch.empty(out_features, **options))
            else:
                self.bias = torch.Tensor()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert fake.depth == 1, "not inside one autocast of the package"
            return F.linear(x, self.weight, self.bias if self.bias.numel() else None)

        def get_extra_state(self) -> io.BytesIO:
            return io.BytesIO(b"amax")

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("there is none")

    return Linear


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    def make(**options: bool) -> Fake:
        fake = Fake(**options)
        for name, module in fake.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return fake

    return make


def applied(model: nn.Module, config: Any = None, cluster: Cluster = HOPPER, **plan: Any) -> Job:
    job = Job.start(Inputs(model=model), cluster, Plan().changed(**plan), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Fp8().apply(job, Fp8Config.model_validate(config))
    return job


def test_weights_are_moved_without_a_copy_and_the_state_dict_keeps_its_keys(
    install: Callable[..., Fake],
) -> None:
    fake = install()
    model = get_case("mlp").build()
    model.blocks[0].eval()  # type: ignore[index,operator]
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    job = applied(model)
    after = dict(job.module.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert after.keys() == before.keys()
    assert list(job.module.state_dict()) == keys
    assert fake.made[0] == {"size": (16, 32), "bias": True, "dtype": torch.float32, "device": "meta"}
    assert len(fake.made) == 9
    assert type(job.module.head) is nn.Linear
    assert not job.module.blocks[0].up.training  # type: ignore[index,union-attr]
    job.module.load_state_dict(get_case("mlp").build().state_dict())
    assert "by Transformer Engine" in str(job.explanations["fp8"][0])


def test_linears_without_bias_and_in_16_bits(install: Callable[..., Fake]) -> None:
    fake = install()
    applied(get_case("tied_llama").build().to(torch.bfloat16))
    assert {(made["bias"], made["dtype"]) for made in fake.made} == {(False, torch.bfloat16)}


def test_one_linear_alone_and_one_in_two_places(install: Callable[..., Fake]) -> None:
    fake = install()
    assert type(applied(nn.Linear(16, 16)).model).__name__ == "Fp8Linear"
    shared = nn.Linear(16, 16)
    job = applied(nn.Sequential(nn.Sequential(shared), nn.Sequential(shared)))
    assert job.module[0][0] is job.module[1][0]  # type: ignore[index]
    assert len(fake.made) == 2


def test_models_pickle_and_copy(install: Callable[..., Fake]) -> None:
    install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = applied(nn.Sequential(nn.Linear(16, 16))).module
    x = torch.randn(2, 16)
    for made in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert type(made[0]) is type(module[0])  # type: ignore[index]
        assert torch.equal(made(x), module(x))


def test_the_recipe_gets_every_key(install: Callable[..., Fake]) -> None:
    fake = install()
    model = get_case("mlp").build()
    settings = {
        "margin": 1, "interval": 2, "fp8_format": "E4M3", "amax_history_len": 16,
        "amax_compute_algo": "most_recent", "reduce_amax": False,
    }  # fmt: skip
    job = applied(model, {"backend": "te", **settings})
    job.module(*get_case("mlp").make_batch(4, 0))
    (entered,) = fake.entered
    assert entered["enabled"] is True
    assert entered["recipe"].settings == {**settings, "fp8_format": "e4m3"}
    assert entered["group"] is None


@pytest.mark.parametrize("interval", [None, 4])
def test_versions_without_interval(install: Callable[..., Fake], interval: int | None) -> None:
    fake = install(interval=False, new_name=True)
    config = Fp8Config.model_validate({} if interval is None else {"interval": interval})
    notices = list(Fp8().notices(config, HOPPER))
    assert bool(notices) is (interval is not None)
    job = applied(get_case("mlp").build())
    job.module(*get_case("mlp").make_batch(4, 0))
    assert "interval" not in fake.entered[0]["recipe"].settings


def test_one_autocast_around_each_forward_pass(install: Callable[..., Fake]) -> None:
    fake, case = install(), get_case("mlp")
    model, plain = case.build(), case.build()
    job, batch = applied(model), case.make_batch(4, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as amp_native does
        found, expected = job.module(*batch), plain(*batch)
    assert torch.equal(found, expected)
    case.loss_func(batch, job.module(*batch)).backward()
    assert (len(fake.entered), fake.deepest, fake.depth) == (2, 1, 0)
    with pytest.raises(TypeError):
        job.module()
    assert fake.depth == 0, "left after a failure"


def test_full_precision_is_restored_outside_of_autocast(install: Callable[..., Fake]) -> None:
    fake, case = install(), get_case("mlp")
    job = applied(case.build())
    assert job.precision.restore is not None
    job.precision.restore(job.module)
    with pytest.raises(AssertionError, match="not inside one autocast"):
        job.module(*case.make_batch(4, 0))
    assert fake.entered == []


def test_recomputation_is_the_package_s_own(install: Callable[..., Fake]) -> None:
    fake, case = install(), get_case("mlp")
    job = applied(case.build(), recomputation={"kind": "blocks"})
    Checkpoint().apply(job, ActivationCheckpointConfig())
    case.loss_func(case.make_batch(4, 0), job.module(*case.make_batch(4, 0))).backward()
    assert [call["use_reentrant"] for call in fake.recomputed] == [False] * 4
    assert {type(call["function"]).__name__ for call in fake.recomputed} == {"ResidualBlock"}


def test_recomputation_has_no_settings_of_ours(install: Callable[..., Fake]) -> None:
    install()
    job = applied(get_case("mlp").build(), recomputation={"kind": "blocks"})
    with pytest.raises(InputError, match="save_operators"):
        Checkpoint().apply(job, ActivationCheckpointConfig(save_operators=("aten.mm",)))


def test_a_version_whose_recomputation_takes_no_keywords_is_refused(install: Callable[..., Fake]) -> None:
    install(keywords=False)
    applied(get_case("mlp").build())
    with pytest.raises(InputError, match=r"1\.5 or later"):
        applied(get_case("mlp").build(), recomputation={"kind": "blocks"})


def test_models_on_meta_are_refused(install: Callable[..., Fake]) -> None:
    install()
    with torch.device("meta"):
        model = get_case("mlp").build()
    with pytest.raises(InputError, match="meta device"):
        applied(model)


@pytest.mark.parametrize(
    "method", ["tensor_parallel", "sequence_parallel", "pipeline_parallel", "expert_parallel"]
)
def test_divided_models_are_refused(install: Callable[..., Fake], method: str) -> None:
    install()
    cluster = Cluster(
        world_size=2, distributed=True, device_type="cuda", capability=(9, 0), packages=HOPPER.packages
    )
    axis = method.removesuffix("_parallel")
    strategy = Strategy([("parallel_mode", [(axis, 2)]), ("fp8", "te"), method])
    with pytest.raises(StrategyError, match="backend torchao"):
        resolve(strategy, cluster, load_registry())


def test_auto_does_not_take_it_for_divided_models(install: Callable[..., Fake]) -> None:
    install()
    with pytest.raises(InputError, match=r"tensor=2.*pip install 'atorch-ns\[fp8\]'"):
        applied(get_case("mlp").build(), axes=(("tensor", 2),))
    both = Cluster(
        device_type="cuda", capability=(9, 0), packages={"transformer_engine": "1", "torchao": "0"}
    )
    pytest.importorskip("torchao", exc_type=Exception)
    job = applied(get_case("mlp").build(), cluster=both, axes=(("tensor", 2),))
    assert type(job.module.blocks[0].up).__name__ == "Float8Linear"  # type: ignore[index,union-attr]
    job = applied(get_case("mlp").build(), cluster=both)
    assert type(job.module.blocks[0].up).__name__ == "Fp8Linear"  # type: ignore[index,union-attr]
    job = applied(get_case("mlp").build(), {"recipe": "rowwise"}, cluster=both)
    assert type(job.module.blocks[0].up).__name__ == "Float8Linear"  # type: ignore[index,union-attr]


def test_a_wheel_without_its_libraries_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModuleType("transformer_engine")
    broken.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", broken)
    reason = Fp8().unavailable(Fp8Config(backend="te"), HOPPER)
    assert reason is not None
    assert "pip install 'transformer-engine[pytorch]'" in reason


def _on_ranks(broken: bool) -> Any:
    fake = Fake()
    if broken and dist.get_rank() == 1:
        del fake.modules["transformer_engine.pytorch"].Linear
    sys.modules.update(fake.modules)
    cluster = Cluster(
        world_size=2,
        rank=dist.get_rank(),
        distributed=True,
        device_type="cuda",
        capability=(9, 0),
        packages=HOPPER.packages,
    )
    case = get_case("mlp")
    try:
        job = applied(case.build(), cluster=cluster)
    except (RankError, AttributeError) as error:
        return type(error).__name__
    job.module(*case.make_batch(4, 0))
    return fake.entered[0]["group"] is dist.group.WORLD


def test_amaxes_are_reduced_over_all_ranks_and_no_rank_is_left_waiting() -> None:
    assert run_ranks(_on_ranks, 2, args=(False,)) == [True, True]
    assert run_ranks(_on_ranks, 2, args=(True,)) == ["RankError", "AttributeError"]
