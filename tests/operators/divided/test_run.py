"""Divided models train as one process does, whatever legal plan divides them, with dropout."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from atorch_ns.capture.blocks import repeated_blocks
from atorch_ns.operators import (
    DividedForward,
    OperatorGraph,
    OperatorPlan,
    Shallow,
    capture_shallow,
    check_division,
    check_plan,
    division_of,
    random_plan,
)
from atorch_ns.operators.divided import calls, run
from atorch_ns.operators.rules.constraints import read_constraints, unused_warnings
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.sharding import TensorGroup, divide_parameters
from atorch_ns.sharding.collectives import simulate
from atorch_ns.testing.workers import run_ranks
from tests.operators.networks import network
from tests.sample import commit_number

CPU = torch.device("cpu")
STEPS = 5


def whole_masks(
    target: Any, rule: Rule, group: Any, x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Dropout of one rank's piece by its part of the mask that one process draws."""
    (placement,) = rule.outputs
    assert isinstance(placement, Shard)
    dim = placement.dim
    shape = [size * group.size() if number == dim else size for number, size in enumerate(x.shape)]
    mask = target(torch.ones(shape, dtype=x.dtype), *args, **kwargs)
    return x * mask.chunk(group.size(), dim)[group.rank()]


def trained(model: nn.Module, batch: dict[str, Any], bf16: bool, after: Callable[[], None]) -> list[float]:
    """The losses of some steps of AdamW on one batch."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=1e-3
    )  # of 1e-8, noise of a zero gradient is a step
    torch.manual_seed(5)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(**batch)
        loss = output[0] if isinstance(output, tuple) else output.loss
        loss.backward()
        after()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def one_capture(captured: Any) -> Iterator[None]:
    """Lets divided models share a capture; each would find the same."""
    before, run.capture = run.capture, lambda *args, **kwargs: captured
    try:
        yield
    finally:
        run.capture = before


def divided(name: str, shallow: Shallow, plan: OperatorPlan) -> tuple[nn.Module, Callable[[], None]]:
    """The model divided over all ranks by a plan, and what completes its gradients."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tensor",))
    group = TensorGroup(mesh)
    model, _ = network(name)
    first = division_of(plan, shallow.graph, group.size)
    summed = first.summed
    divide = functools.partial(division_of, plan, degree=group.size, summed=summed)
    blocks = [block.name for block in repeated_blocks(model)]
    forward = DividedForward(model, blocks, divide, group.process_group, device=CPU)
    divide_parameters(
        model, {name: p.dim for name, p in first.parameters.items() if isinstance(p, Shard)}, group
    )
    forward.attach(model)
    parameters = dict(model.named_parameters())

    def complete() -> None:
        for key in sorted(summed):
            gradient = parameters[key].grad
            if gradient is not None:
                torch.distributed.all_reduce(gradient, group=mesh.get_group())

    return model, complete


def difference(mine: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of a parameter."""
    worst = 0.0
    for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        assert whole.shape == other.shape, name
        worst = max(worst, float((whole.detach() - other.detach()).abs().max()))
    return worst


def apart(mine: list[float], theirs: list[float]) -> float:
    """The largest difference of a loss."""
    return max(abs(one - other) for one, other in zip(mine, theirs, strict=True))


@torch.no_grad()
def rounded_otherwise(model: nn.Module, seed: int) -> nn.Module:
    """The model with weights that are off by up to half of bf16's last place, so that half of them round the other way."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in moved.parameters():
        parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) * 2 - 1) * 2.0**-9)
    return moved


def compared(name: str, seeds: range, bf16: bool) -> list[tuple[int, float, float]]:
    """For each seed how far losses and parameters are from those of one process; in bf16 in units of how far that one is from
    itself with weights that round otherwise, in others of 1e-5."""
    calls.with_own_randomness = whole_masks  # type: ignore[assignment]
    degree = torch.distributed.get_world_size()
    reference, batch = network(name)
    whole = copy.deepcopy(reference)
    whole_losses = trained(whole, batch, bf16, lambda: None)
    units = (1e-5, 1e-5)
    if bf16:
        others = [rounded_otherwise(reference, seed) for seed in range(3)]
        noises = [apart(trained(other, batch, bf16, lambda: None), whole_losses) for other in others]
        units = (max(noises), max(difference(other, whole) for other in others))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        shallow = capture_shallow(reference, (), batch, device=CPU)
    found = []
    with one_capture(shallow.graph.captured):  # two layers are kept whole
        for seed in seeds:
            plan = random_plan(shallow.graph, degree, seed)
            model, complete = divided(name, shallow, plan)
            losses = trained(model, batch, bf16, complete)
            found.append((seed, apart(losses, whole_losses) / units[0], difference(model, whole) / units[1]))
    return found


def tied(dims: Sequence[str]) -> list[tuple[int, float, float]]:
    """T5 with its one embedding, which has four names, stored divided; and its keys of that."""
    calls.with_own_randomness = whole_masks  # type: ignore[assignment]
    reference, batch = network("t5")
    whole = copy.deepcopy(reference)
    whole_losses = trained(whole, batch, False, lambda: None)
    shallow = capture_shallow(reference, (), batch, device=CPU)
    graph = shallow.graph
    names = [graph.parameter_key(value) for value, one in graph.origins.items() if one.kind == "parameter"]
    shared = [name for name in names if "shared" in name or "embed_tokens" in name or "lm_head" in name]
    found = []
    for dim in dims:
        plan = OperatorPlan.from_json({"schema": 1, "parameters": {"shared.weight": dim}})
        check_plan(plan, graph, 2)
        model, complete = divided("t5", shallow, plan)
        losses = trained(model, batch, False, complete)
        found.append((len(shared), apart(losses, whole_losses), difference(model, whole)))
    return found


def test_a_tied_parameter_is_one_and_divided_under_all_its_names() -> None:
    for rank in run_ranks(tied, 2, args=(("0", "1"),), timeout_s=110):
        for num_keys, loss, parameter in rank:
            assert num_keys == 1
            assert max(loss, parameter) < 1e-5


LONG = (pytest.mark.slow, pytest.mark.timeout(1800))
NUM_DRAWN = 20
"""Plans of each kind in ``make test-all``, drawn by the commit: what a case shares is trained and captured once for them."""
FIRST = commit_number() % 10**6


@pytest.mark.parametrize(
    ("name", "num_ranks", "bf16", "seeds"),
    [
        ("llama", 2, False, range(2)),
        ("by_hand", 2, False, range(2)),
        ("by_hand", 4, True, range(2)),
        ("mixtral", 2, False, range(2)),
        *(
            pytest.param(name, num_ranks, bf16, range(FIRST, FIRST + NUM_DRAWN), marks=LONG)
            for name in ("llama", "t5", "mixtral")
            for num_ranks in (2, 4)
            for bf16 in (False, True)
        ),
    ],
)
def test_random_plans_train_as_one_process_does(name: str, num_ranks: int, bf16: bool, seeds: range) -> None:
    """In bf16, whose roundings differ with the order of sums, as one process does whose weights round otherwise."""
    limit = (
        110 if len(seeds) < NUM_DRAWN else 1500
    )  # four ranks on two cores wait for each other at every collective
    found = run_ranks(compared, num_ranks, args=(name, seeds, bf16), timeout_s=limit)
    most = 2.0 if bf16 else 1.0
    wrong = [row for rank in found for row in rank if max(row[1:]) > most]
    assert not wrong


def masks(divides: bool) -> list[list[float]]:
    """What dropout leaves of ones on this rank, and a number that all ranks draw after it."""
    dim = Shard(0)
    rule = Rule((dim,), (dim,)) if divides else Rule((Replicate(),), (Replicate(),))
    model = nn.Sequential(nn.Dropout(0.5))
    captured = run.capture(model.train(), (torch.ones(64, 8),), {}, device=CPU)
    (one,) = OperatorGraph(captured).operators
    target, needs_group = calls.runnable(one, rule)
    torch.manual_seed(3)
    given = torch.ones(32 if divides else 64, 8)
    group = torch.distributed.group.WORLD
    left = target(group, given, 0.5, True) if needs_group else target(given, 0.5, True)
    return [left.flatten().tolist(), torch.rand(4).tolist()]


def test_divided_masks_differ_by_rank_and_whole_ones_are_equal() -> None:
    (one, after), (other, after_other) = run_ranks(masks, 2, args=(True,))
    alike = sum(mine == theirs for mine, theirs in zip(one, other, strict=True)) / len(one)
    assert 0.35 < alike < 0.65  # of fair coins, half; 256 of them are off by less than a tenth
    assert after == after_other
    first, second = run_ranks(masks, 2, args=(False,))
    assert first == second


def test_the_plan_of_the_guide_is_one() -> None:
    """The JSON and the YAML of docs/operators.md, on a Llama."""
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text()
    plan = OperatorPlan.from_text(page.split("```json\n")[1].split("```")[0])
    model, batch = network("llama")
    shallow = capture_shallow(copy.deepcopy(model), (), batch, device=CPU)
    check_plan(plan, shallow.graph, 2)
    check_division(division_of(plan, shallow.graph, 2), model, list(batch.values()), CPU)


def test_the_constraints_of_the_guide_are_some(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text()
    file = tmp_path / "constraints.yaml"
    file.write_text(page.split("```yaml\n")[1].split("```")[0])
    constraints = read_constraints(file)
    model, batch = network("llama", rows=4)
    graph = capture_shallow(model, (), batch, device=CPU).graph
    calls_of = [(one.call.name, (one.path, one.classes)) for one in graph.operators]
    assert len(constraints) == 1
    assert "LlamaAttention" in {one.classes.rpartition(".")[2] for one in graph.operators}
    assert all(
        "scaled_dot_product_attention" in text for text in unused_warnings(calls_of, constraints)
    )  # eager here


def test_the_operator_of_the_guide_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operators.md").read_text()
    script = page.split("```python\n")[2].split("```")[0]
    file = (
        f"{script}\nx, w = torch.randn(2, 3, 4), torch.rand(4)\nassert scaled_norm(x, w).shape == x.shape\n"
    )
    subprocess.run([sys.executable, "-c", file], check=True, timeout=100)


def test_blocks_whose_parameters_have_numbers_for_names_run() -> None:
    """As sequences of sequences have."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))

    x = torch.randn(4, 4)

    def work(group: Any) -> torch.Tensor:
        own = make()

        blocks = [block.name for block in repeated_blocks(own)]
        assert blocks
        forward = DividedForward(
            own, blocks, lambda graph: division_of(OperatorPlan(), graph, 2), group, device=CPU
        )
        forward.attach(own)
        return own(x).detach()

    (found,) = simulate(1, work, CPU)
    assert torch.equal(found, make()(x).detach())
