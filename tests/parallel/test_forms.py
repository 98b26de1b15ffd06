"""Forms of parallelize: classes and objects, a module that the user's loop calls, parts of a plain module."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns import ComputeConfig, ParallelModule, broadcast_weights, build_optimizer, parallelize
from atorch_ns.errors import InputError, StepError
from atorch_ns.testing.workers import run_ranks

UNITS = 2


class Heavy(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.width = 16

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * scale


class Mixed(nn.Module):
    """Two heavy modules, which may be parallel, between layers that are not."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.first, self.second = make(), make()
        torch.manual_seed(2)
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.second(self.first(self.embed(x)))))
        return found


def batch(step: int, unit: int, width: int) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + unit))


def steps(
    model: nn.Module, optimizer: Any, units: list[int], width: int, *, twice: bool = False
) -> list[torch.Tensor]:
    """Weights after some steps on the sum of the units' losses, accumulated in two passes if ``twice``."""
    for step in range(4):
        for part in range(2 if twice else 1):
            for unit in units:
                model(batch(10 * step + part, unit, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def config_of(plan: int, zero: bool) -> ComputeConfig:
    return ComputeConfig(plan, dist.get_world_size(), use_zero=zero)


def unit_of(plan: int) -> int:
    return dist.get_rank() // plan


def by_class(folder: str, plan: int, zero: bool, twice: bool) -> dict[str, Any]:
    made: Any = parallelize(
        Heavy, {"x": batch(0, 0, 8)}, "tp" if plan > 1 else "dp", config_of(plan, zero), gen_savedir=folder
    )
    assert issubclass(made, ParallelModule)
    model = made()
    assert model.width == 16
    optimizer = build_optimizer(model, torch.optim.Adam, lr=1e-2)
    steps(model, optimizer, [unit_of(plan)], 8, twice=twice)
    return whole(model)


def whole(model: nn.Module) -> dict[str, Any]:
    from atorch_ns import merge_state_dicts

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, model.state_dict())
    return merge_state_dicts(every)[0]


@pytest.mark.parametrize("twice", [False, True], ids=["once", "accumulated"])
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
@pytest.mark.parametrize("plan", [1, 2])
def test_a_class_in_a_loop_of_ones_own(tmp_path: Path, plan: int, zero: bool, twice: bool) -> None:
    plain = Heavy()
    steps(plain, torch.optim.Adam(plain.parameters(), lr=1e-2), list(range(4 // plan)), 8, twice=twice)
    for found in run_ranks(by_class, 4, args=(str(tmp_path), plan, zero, twice)):
        for name, value in plain.state_dict().items():
            assert torch.allclose(found[name], value, atol=1e-6), name


def parts(folder: str, zero: bool) -> dict[str, Any]:
    def make() -> Any:
        return parallelize(
            Heavy(), {"x": batch(0, 0, 8)}, "data", config_of(2, zero), gen_savedir=folder, reuse="moo"
        )

    model = Mixed(make)
    if dist.get_rank():  # all take the first rank's
        model.head.weight.data.zero_()
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
    steps(model, optimizer, [unit_of(2)], 4)
    return whole(model)


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
def test_parts_of_a_plain_module(tmp_path: Path, zero: bool) -> None:
    plain = Mixed(Heavy)
    steps(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), [0, 1], 4
    )  # Adam would take noise for a gradient
    wanted = plain.state_dict()
    for found in run_ranks(parts, 4, args=(str(tmp_path), zero)):
        assert set(found) == set(wanted)
        for name, value in plain.named_parameters():
            assert float((found[name] - value).abs().max()) < 1e-6, name


def skipped(folder: str, zero: bool) -> dict[str, Any]:
    """As :func:`parts`, but that the first step is looked at and left out."""

    def make() -> Any:
        return parallelize(
            Heavy(), {"x": batch(0, 0, 8)}, "dp", config_of(1, zero), gen_savedir=folder, reuse="moo"
        )

    model = Mixed(make)
    optimizer: Any = build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(99, unit_of(1), 4)).square().mean().backward()
    optimizer.clip_gnorm()
    model.zero_grad()
    steps(model, optimizer, [unit_of(1)], 4)
    return whole(model)


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
def test_a_step_that_is_left_out(tmp_path: Path, zero: bool) -> None:
    plain = Mixed(Heavy)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [0, 1], 4)
    for found in run_ranks(skipped, 2, args=(str(tmp_path), zero)):
        for name, value in plain.named_parameters():
            assert float((found[name] - value).abs().max()) < 1e-6, name


def accumulated_after_a_look(folder: str, zero: bool) -> dict[str, Any]:
    """Gradients are synchronised, and more of them come."""
    model: Any = parallelize(
        Heavy(), {"x": batch(0, 0, 8)}, "dp", config_of(1, zero), gen_savedir=folder, reuse="moo"
    )
    optimizer: Any = build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0, unit_of(1), 8)).square().mean().backward()
    optimizer.clip_gnorm()
    model(batch(1, unit_of(1), 8)).square().mean().backward()
    optimizer.step()
    return whole(model)


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
def test_gradients_that_come_after_a_look(tmp_path: Path, zero: bool) -> None:
    plain = Heavy()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for unit in range(2):
            plain(batch(step, unit, 8)).square().mean().backward()
    optimizer.step()
    for found in run_ranks(accumulated_after_a_look, 2, args=(str(tmp_path), zero)):
        for name, value in plain.state_dict().items():
            assert float((found[name] - value).abs().max()) < 1e-6, name


def clipped(folder: str) -> tuple[float, float, list[int]]:
    model: Any = parallelize(
        Heavy(), {"x": batch(0, 0, 8)}, "tp", config_of(2, zero=False), gen_savedir=folder
    )
    optimizer: Any = build_optimizer(model, torch.optim.SGD, lr=0.0)
    called: list[int] = []
    optimizer.register_reducer_pre_hook(lambda reducer, gradient: (gradient.div_(2), called.append(0)))
    optimizer.register_reducer_post_hook(lambda reducer, gradient: (gradient.mul_(2), called.append(1)))
    model(batch(0, unit_of(2), 8)).square().mean().backward()
    with pytest.raises(StepError, match="sync_shard_grad"):
        optimizer.scale_grads(2.0)
    optimizer.sync_shard_grad()
    optimizer.sync_shard_grad()
    optimizer.scale_grads(0.5)
    norm = float(optimizer.clip_gnorm(None))
    optimizer.scale_grads(2.0)
    again = float(optimizer.clip_gnorm(1e-3))
    optimizer.step()
    return norm, again, called


def test_gradients_are_synchronised_once_scaled_and_clipped(tmp_path: Path) -> None:
    plain = Heavy()
    sum(plain(batch(0, unit, 8)).square().mean() for unit in range(UNITS)).backward()  # type: ignore[union-attr]
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))  # type: ignore[misc]
    for half, all_of_it, called in run_ranks(clipped, 4, args=(str(tmp_path),)):
        assert half == pytest.approx(norm / 2, rel=1e-5)
        assert all_of_it == pytest.approx(norm, rel=1e-5)
        assert called == [0, 1]


def weights_of_the_first(folder: str) -> tuple[bool, float]:
    rank = dist.get_rank()
    model: Any = parallelize(
        Heavy(),
        {"x": batch(0, 0, 8)},
        "dp",
        config_of(1, zero=False),
        gen_savedir=folder,
        init_module_params=rank == 0,
        broadcast_strategy="no_weights",
    )
    broadcast_weights(model, 1)
    return bool(model.state_dict()["up.weight"].isfinite().all()), float(
        model.state_dict()["up.weight"].sum()
    )


def test_weights_come_from_the_ranks_that_have_them(tmp_path: Path) -> None:
    wanted = float(Heavy().up.weight.sum())
    assert run_ranks(weights_of_the_first, 2, args=(str(tmp_path),)) == [(True, pytest.approx(wanted))] * 2


def make(folder: Path, **arguments: Any) -> Any:
    given = {"compute_config": ComputeConfig(2, 4), "load_module": False, "gen_savedir": folder, **arguments}
    return parallelize(
        given.pop("module", Heavy),
        given.pop("dummies", {"x": batch(0, 0, 8)}),
        given.pop("policy", "tp"),
        **given,
    )


class TestReuse:
    """A plan fits as long as config, policy, structure and source are the same."""

    def test_a_plan_is_made_without_ranks_and_reused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert make(tmp_path) is None
        (file,) = tmp_path.rglob("plan.json")
        assert file.parent.parts[-3:] == ("test_forms", "Heavy", "_")
        written = file.stat().st_mtime_ns
        monkeypatch.delattr("atorch_ns.parallel.planning.find_plan")  # nothing is searched for again
        make(tmp_path)
        assert file.stat().st_mtime_ns == written

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"policy": "data"}, "policy: 'data', and was 'tp'"),
            ({"compute_config": ComputeConfig(2, 2)}, "compute_config: runtime_ngpus is 2, and was 4"),
            (
                {"compute_config": ComputeConfig(2, 4, user_config={"a": 1})},
                "user_config is {'a': 1}, and was {}",
            ),
            ({"dummies": {"x": batch(0, 0, 8)[:2]}}, "dummy_forward_args: 'x: torch.float32[2, 8]', and was"),
            ({"module_dtype": torch.float64}, "structure of the module"),
        ],
    )
    def test_match_says_what_is_different(self, tmp_path: Path, change: dict[str, Any], named: str) -> None:
        make(tmp_path)
        with pytest.raises(InputError) as error:
            make(tmp_path, **change)
        assert named in str(error.value)
        make(tmp_path, **change, reuse="moo")
        make(tmp_path, **change)

    def test_another_source_of_the_same_structure_is_no_match(self, tmp_path: Path) -> None:
        text = (
            "import torch\nfrom torch import nn\nclass Changing(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.a = nn.Linear(8, 8)\n    def forward(self, x):\n        return torch.relu(self.a(x))\n"
        )
        kinds = []
        for number, source in enumerate((text, text.replace("relu", "tanh"))):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "changing.py").write_text(source)
            space: dict[str, Any] = {"__name__": "changing", "__file__": str(folder / "changing.py")}
            exec(compile(source, str(folder / "changing.py"), "exec"), space)
            space["Changing"].__module__ = "changing"
            kinds.append(space["Changing"])
        make(tmp_path, module=kinds[0]())
        with pytest.raises(InputError, match="source of the module"):
            make(tmp_path, module=kinds[1]())

    def test_a_policy_of_other_parameters_is_no_match(self, tmp_path: Path) -> None:
        def whole_graph(graph: Any, config: ComputeConfig, dims: tuple[int, ...]) -> Any:
            return graph

        def around(dims: tuple[int, ...]) -> Any:
            return lambda graph, config: whole_graph(graph, config, dims)

        class Policy:
            def __init__(self, dims: tuple[int, ...]) -> None:
                self.dims = dims

            def of(self, graph: Any, config: ComputeConfig) -> Any:
                return whole_graph(graph, config, self.dims)

        makers = (lambda d: functools.partial(whole_graph, dims=d), around, lambda d: Policy(d).of)
        for number, make_policy in enumerate(makers):
            make(tmp_path, policy=make_policy((0,)), instance_name=str(number))
            make(tmp_path, policy=make_policy((0,)), instance_name=str(number), reuse="moo")
            with pytest.raises(InputError, match="policy"):
                make(tmp_path, policy=make_policy((1,)), instance_name=str(number))

    @pytest.mark.parametrize(
        "saved",
        ['{"made": [], "notes": [], "strategy": []}', '{"made": {}, "notes": [], "strategy": []}', "[]"],
    )
    def test_a_damaged_plan_is_said_to_be_one(self, tmp_path: Path, saved: str) -> None:
        make(tmp_path)
        (file,) = tmp_path.rglob("plan.json")
        file.write_text(saved)
        with pytest.raises(InputError, match="cannot be read"):
            make(tmp_path)

    @pytest.mark.parametrize("reuse", ["override", "graph"])
    def test_a_plan_is_made_anew(self, tmp_path: Path, reuse: str) -> None:
        make(tmp_path)
        (file,) = tmp_path.rglob("plan.json")
        file.write_text("{}")
        with pytest.raises(InputError, match="cannot be read"):
            make(tmp_path)
        make(tmp_path, reuse=reuse)
        make(tmp_path)

    def test_instances_have_plans_of_their_own(self, tmp_path: Path) -> None:
        make(tmp_path, instance_name="a")
        make(tmp_path, instance_name="b", policy="data")
        assert len(list(tmp_path.rglob("plan.json"))) == 2


class PositionalOnly(nn.Module):
    """Cannot be called by names."""

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        return x


class Needy(nn.Module):
    """Cannot be made without arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"policy": "autodits"}, "Did you mean 'autodist'?"),
        ({"policy": 3}, "pas_policy must be a name or a function"),
        ({"module": 3}, "takes a torch.nn.Module or a class"),
        ({"module": Needy}, "give module_fn"),
        ({"module_fn": lambda: nn.Linear(1, 1)}, "must make a Heavy"),
        ({"module": Heavy(), "module_fn": Heavy}, "module_fn makes modules of a class"),
        ({"module": PositionalOnly()}, "positional-only"),
        ({"dummies": {"y": 1}}, "has no argument 'y'"),
        ({"dummies": {}}, "lacks 'x'"),
        ({"dummies": [1]}, "must be a dictionary"),
        ({"reuse": "mach"}, "Did you mean 'match'?"),
        ({"broadcast_strategy": "al"}, "Did you mean 'all'?"),
        ({"broadcast_strategy": "all"}, "needs a process group"),
        ({"load_module": True}, "there are 1 ranks"),
        ({"load_module": "no"}, "load_module must be True or False"),
        ({"gen_savedir": "/proc/nothing"}, "gen_savedir: the folder"),
        ({"instance_name": "../x"}, "must be a plain name"),
        ({"instance_name": 3}, "must be a plain name"),
        ({"gen_savedir": None}, "gen_savedir must be a path"),
        ({"module_dtype": "bf16"}, "module_dtype must be a floating dtype"),
        ({"module_dtype": torch.int32}, "module_dtype must be a floating dtype"),
        ({"dummies": {1: 2}}, "has no argument 1"),
        ({"policy": "dp"}, "plan_ngpus must be 1"),
        ({"policy": "pp", "compute_config": ComputeConfig(2, 2)}, "set use_end2end=True"),
        (
            {"policy": "tp", "compute_config": ComputeConfig(2, 2, pas_config={"sede": 1})},
            "Did you mean 'seed'?",
        ),
        (
            {"policy": "autodist", "compute_config": ComputeConfig(2, 2, pas_config={"solver": "ilp"})},
            "solver is not taken: there is one solver",
        ),
        (
            {"policy": "autodist", "compute_config": ComputeConfig(2, 2, pas_config={"mem_constraint": "1"})},
            "mem_constraint is '1', a str",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as error:
        make(tmp_path, **arguments)
    assert named in str(error.value)


def test_a_class_that_needs_arguments_is_made_by_a_function(tmp_path: Path) -> None:
    make(tmp_path, module=Needy, module_fn=lambda: Needy(8))


def in_one_process(folder: Path, **fields: Any) -> Any:
    return parallelize(
        Heavy(), {"x": batch(0, 0, 8)}, "dp", ComputeConfig(1, 1, **fields), gen_savedir=folder, reuse="moo"
    )


def test_one_process(tmp_path: Path) -> None:
    model = in_one_process(tmp_path)
    assert parallelize(model, {}, "dp", ComputeConfig(1, 1)) is model
    assert torch.equal(model(batch(0, 0, 8)), Heavy()(batch(0, 0, 8)))
    with pytest.raises(StepError, match="use_end2end=True"):
        model.train_step([batch(0, 0, 8)])
    once = Heavy()
    parallelize(once, {"x": batch(0, 0, 8)}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path, reuse="moo")
    with pytest.raises(InputError, match="is already parallel"):
        parallelize(once, {"x": batch(0, 0, 8)}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    with pytest.raises(InputError, match="can not be nested"):
        parallelize(nn.Sequential(model), {"input": batch(0, 0, 8)}, "dp", ComputeConfig(1, 1))
    model.load_state_dict(Heavy().state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**Heavy().state_dict(), "other": torch.zeros(1)})
    idle = in_one_process(tmp_path, inference_only=True)
    assert not any(p.requires_grad for p in idle.parameters())
    with pytest.raises(InputError, match="inference_only"):
        build_optimizer(idle, torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match="this module contains none"):
        build_optimizer(Heavy(), torch.optim.SGD, lr=0.1)


def test_parallel_modules_are_not_copied(tmp_path: Path) -> None:
    model = in_one_process(tmp_path)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(StepError, match=r"Save module.state_dict\(\)"):
            copied(model)


@dataclass
class Found:
    """Results by name, as models of packages give them."""

    scores: torch.Tensor
    loss: torch.Tensor


class Named(nn.Module):
    """Gives its loss in one of several forms."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.inner, self.form = Heavy(), form

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.inner(x)
        return self.form(scores, scores.square().mean())


FORMS = {
    "dataclass": Found,
    "dictionary": lambda scores, loss: {"scores": scores, "loss": loss},
    "tuple": lambda scores, loss: (loss, scores),
    "nested": lambda scores, loss: {"loss": (loss, scores)},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_of_an_end_to_end_module(tmp_path: Path, form: str) -> None:
    x = batch(0, 0, 8)
    config = ComputeConfig(1, 1, use_end2end=True)
    model: Any = parallelize(Named(FORMS[form]), {"x": x}, "dp", config, gen_savedir=tmp_path)
    build_optimizer(model, torch.optim.SGD, lr=0.1)
    (output,) = model.train_step([x])
    plain = Named(FORMS["tuple"])
    loss, scores = plain(x)
    loss.backward()
    assert torch.equal(model.inner.up.weight.grad, plain.inner.up.weight.grad)
    if form == "dataclass":
        assert torch.equal(output.scores, scores)
        assert not output.scores.requires_grad


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (lambda scores, loss: {"score": scores}, "it is a dict"),
        (lambda scores, loss: scores, r"it is of shape \(4, 8\)"),
    ],
)
def test_results_without_a_loss(tmp_path: Path, form: Any, named: str) -> None:
    x = batch(0, 0, 8)
    config = ComputeConfig(1, 1, use_end2end=True)
    model: Any = parallelize(Named(form), {"x": x}, "dp", config, gen_savedir=tmp_path)
    build_optimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(InputError, match=r"the first result of Named.forward must be the loss.*" + named):
        model.train_step([x])


def in_bf16(folder: str) -> tuple[str, float]:
    config = ComputeConfig(2, 2)
    x = batch(0, 0, 8).bfloat16()
    model: Any = parallelize(Heavy, {"x": x}, "tp", config, gen_savedir=folder, module_dtype=torch.bfloat16)()
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
    plain = Heavy().bfloat16()
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    before = copy.deepcopy(plain.state_dict())
    for trained, updates in ((model, optimizer), (plain, own)):
        (100 * trained(x).float().square().mean()).backward()
        updates.step()
    weights = whole(model)
    assert all(float((value - before[name]).abs().max()) > 0.1 for name, value in plain.state_dict().items())
    apart = max(float((weights[name] - value).abs().max()) for name, value in plain.state_dict().items())
    return str(next(model.parameters()).dtype), apart


def test_a_module_in_another_dtype(tmp_path: Path) -> None:
    for dtype, apart in run_ranks(in_bf16, 2, args=(str(tmp_path),)):
        assert dtype == "torch.bfloat16"
        assert (
            apart <= 2**-7
        )  # a unit in the last place of weights from 1 on, which have moved by more than 0.1


def looked_at(folder: str, zero: bool, between: str) -> dict[str, Any]:
    """Weights of steps with an evaluation, or a forward pass for nothing, between the backward pass and the update."""
    model: Any = parallelize(
        Heavy(), {"x": batch(0, 0, 8)}, "dp", config_of(1, zero), gen_savedir=folder, reuse="moo"
    )
    optimizer: Any = build_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        model(batch(step, unit_of(1), 8)).square().mean().backward()
        if between == "after the sums":
            optimizer.sync_shard_grad()
        with torch.set_grad_enabled(between == "with gradients"):
            model(batch(9, 0, 8))
        optimizer.clip_gnorm(100.0)
        with torch.no_grad():
            model(batch(9, 0, 8))
        optimizer.step()
        if step != 1:  # the gradients of two steps add up
            optimizer.zero_grad()
    optimizer.state_dict()
    return whole(model)


@pytest.mark.parametrize("between", ["without gradients", "with gradients", "after the sums"])
@pytest.mark.parametrize("zero", [False, True])
def test_forward_passes_between_a_backward_pass_and_its_update(
    tmp_path: Path, zero: bool, between: str
) -> None:
    plain = Heavy()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for unit in range(UNITS):
            plain(batch(step, unit, 8)).square().mean().backward()
        optimizer.step()
        if step != 1:
            optimizer.zero_grad()
    for found in run_ranks(looked_at, UNITS, args=(str(tmp_path), zero, between)):
        for name, value in plain.state_dict().items():
            assert torch.allclose(found[name], value, atol=1e-6), name


def test_states_of_a_plain_optimizer_with_frozen_parameters(tmp_path: Path) -> None:
    def frozen() -> Heavy:
        made = Heavy()
        made.up.bias.requires_grad_(False)
        return made

    plain = frozen()
    own = list(plain.parameters())
    optimizer = torch.optim.AdamW(own)
    x = batch(0, 0, 8)
    plain(x).square().mean().backward()
    optimizer.step()
    model: Any = parallelize(frozen(), {"x": x}, "dp", ComputeConfig(1, 1), gen_savedir=tmp_path)
    updates: Any = build_optimizer(model, torch.optim.AdamW)
    updates.load_state_dict(optimizer.state_dict())
    for index, values in optimizer.state_dict()["state"].items():
        assert torch.equal(updates.state_dict()["state"][index]["exp_avg"], values["exp_avg"])
    with pytest.raises(InputError, match="has 1 parameters without names in 1 groups"):
        updates.load_state_dict(torch.optim.AdamW(own[:1]).state_dict())


def by_closure(folder: str, zero: bool) -> dict[str, Any]:
    model: Any = parallelize(Heavy(), {"x": batch(0, 0, 8)}, "dp", config_of(1, zero), gen_savedir=folder)
    optimizer: Any = build_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch(step, unit_of(1), 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return whole(model)


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_of_a_closure_are_synchronised(tmp_path: Path, zero: bool) -> None:
    plain = Heavy()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for unit in range(UNITS):
            plain(batch(step, unit, 8)).square().mean().backward()
        optimizer.step()
    for found in run_ranks(by_closure, UNITS, args=(str(tmp_path), zero)):
        for name, value in plain.state_dict().items():
            assert torch.allclose(found[name], value, atol=1e-6), name


def thawed(folder: str, zero: bool) -> dict[str, Any]:
    """Weights of steps with parameters that join the optimizer late."""
    module = Heavy()
    model: Any = parallelize(module, {"x": batch(0, 0, 8)}, "dp", config_of(1, zero), gen_savedir=folder)
    parameters: list[Any] = []

    def of_up(given: Any, **options: Any) -> torch.optim.Optimizer:
        for one in given:  # groups, where tensors of several kinds are not updated together
            parameters.extend(one["params"] if isinstance(one, dict) else [one])
        return torch.optim.SGD(parameters[:2], **options)

    optimizer = build_optimizer(model, of_up, lr=0.1)
    optimizer.add_param_group({"params": parameters[2:]})
    steps(model, optimizer, [unit_of(1)], 8)
    return whole(model)


@pytest.mark.parametrize("zero", [False, True])
def test_parameters_that_join_late(tmp_path: Path, zero: bool) -> None:
    plain = Heavy()
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), list(range(UNITS)), 8)
    for found in run_ranks(thawed, UNITS, args=(str(tmp_path), zero)):
        for name, value in plain.state_dict().items():
            assert torch.allclose(found[name], value, atol=1e-6), name


class Scaled(Heavy):
    """Reads an attribute that users change."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * self.factor


def rescaled(folder: str, policy: str, plan: int, fields: dict[str, Any]) -> bool:
    x = batch(0, 0, 8)
    config = ComputeConfig(plan, 2, **fields)
    model: Any = parallelize(Scaled(), {"x": x}, policy, config, gen_savedir=folder)
    plain = Scaled()
    before = torch.allclose(model(x), plain(x), atol=1e-6)
    model.factor = plain.factor = 2.5
    return before and model.factor == 2.5 and torch.allclose(model(x), plain(x), atol=1e-6)


@pytest.mark.parametrize(("policy", "plan"), [("dp", 1), ("tp", 2)])
@pytest.mark.parametrize("fields", [{}, {"inference_only": True}])
def test_attributes_are_those_of_the_module_inside(
    tmp_path: Path, policy: str, plan: int, fields: dict[str, Any]
) -> None:
    assert run_ranks(rescaled, 2, args=(str(tmp_path), policy, plan, fields)) == [True, True]
