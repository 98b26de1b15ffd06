"""State dicts of parallel modules: incomplete ones, other plans, and copies without what other ranks hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atorch_ns import (
    ComputeConfig,
    broadcast_weights,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dict,
    merge_state_dicts,
)
from atorch_ns.errors import CheckpointError, InputError, RankError
from atorch_ns.parallel.pieces import PieceLocation, assemble
from atorch_ns.testing.workers import run_ranks
from tests.parallel.training import adam, made, merged, module_of, sample_of

HALVES = {"pipeline_nmicros": 2, "pipeline_nstages": 2}


def trained(policy: str, plan: int, **fields: Any) -> tuple[Any, Any]:
    config = ComputeConfig(plan, dist.get_world_size(), use_end2end=True, **fields)
    module = made("mlp", policy, config)
    optimizer = build_optimizer(module, adam)
    step(module, optimizer)
    return module, optimizer


def step(module: Any, optimizer: Any) -> None:
    module.train_step([sample_of("mlp", seed) for seed in (1, 2)])
    optimizer.step()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def moved() -> list[bool]:
    """Whether what one plan has trained is the same under others, and after a round trip by deduped state dicts."""
    weights, states = merged(*trained("tp", 2))
    found = []
    for policy, plan, fields in (
        ("pp", 2, {"pas_config": {"pipeline_nmicros": 2}}),
        ("dp", 1, {"use_zero": True}),
        ("hybrid", 2, {"pas_config": HALVES}),
    ):
        module, optimizer = trained(policy, plan, **fields)
        load_merged_state_dict(module, weights, optimizer, states)
        found.append(same(merged(module, optimizer), (weights, states)))
        module_state, optimizer_state = copy.deepcopy(deduped_state_dict(module, optimizer))
        step(module, optimizer)
        load_deduped_state_dict(module, module_state or {}, optimizer, optimizer_state)
        found.append(same(merged(module, optimizer), (weights, states)))
    return found


def test_states_move_between_plans_bit_for_bit() -> None:
    assert run_ranks(moved, 2, timeout_s=120) == [[True] * 6] * 2


def deduped_bytes(policy: str, plan: int, fields: dict[str, Any]) -> int:
    module, _ = trained(policy, plan, **fields)
    state, _ = deduped_state_dict(module)
    return sum(t.numel() * t.element_size() for t in (state or {}).values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(("plan", "fields"), [(1, {}), (2, {}), (1, {"use_zero": True})])
def test_all_ranks_together_keep_one_copy(plan: int, fields: dict[str, Any]) -> None:
    policy = "dp" if plan == 1 else "pp"
    if policy == "pp":
        fields = {**fields, "pas_config": {"pipeline_nmicros": 2}}
    plain = sum(t.numel() * t.element_size() for t in module_of("mlp").state_dict().values())
    assert sum(run_ranks(deduped_bytes, 4, args=(policy, plan, fields))) == plain


def states_of(policy: str, plan: int, fields: dict[str, Any]) -> Any:
    module, optimizer = trained(policy, plan, **fields)
    other, _ = trained(
        "tp" if policy == "pp" else "pp", 2, pas_config={} if policy == "pp" else {"pipeline_nmicros": 2}
    )
    with pytest.raises(CheckpointError, match="of another plan"):
        other.load_state_dict(module.state_dict())
    for stride in (3, -1):
        with pytest.raises(InputError, match=f"stride_size={stride} does not divide"):
            broadcast_weights(module, stride)
    with pytest.raises(InputError, match="not a state dict of an optimizer"):
        optimizer.load_state_dict({})
    return module.state_dict(), optimizer.state_dict()


def test_incomplete_ones_are_refused() -> None:
    found = run_ranks(states_of, 2, args=("pp", 2, {"pas_config": {"pipeline_nmicros": 2}}))
    modules, optimizers = [one for one, _ in found], [one for _, one in found]
    for rank in range(2):
        with pytest.raises(ValueError, match="Pieces are missing: no rank has layers"):
            merge_state_dicts([modules[rank]], [optimizers[rank]])
    with pytest.raises(InputError, match="one from each rank"):
        merge_state_dicts([modules[0], modules[0]])
    with pytest.raises(InputError, match="got none"):
        merge_state_dicts([])
    with pytest.raises(InputError, match="got one alone"):
        merge_state_dicts(modules[0])
    with pytest.raises(InputError, match="this one contains none"):
        merge_state_dicts([module_of("mlp").state_dict()])
    changed = {**modules[1], "layers.0.weight": modules[0]["layers.0.weight"] + 1}
    with pytest.raises(ValueError, match="Conflict in merging"):
        merge_state_dicts([modules[0], changed])
    with pytest.raises(InputError, match="from the same ranks"):
        merge_state_dicts(modules, optimizers[:1])


def states_on_four(policy: str, plan: int, fields: dict[str, Any]) -> Any:
    return merged(*trained(policy, plan, **fields))


def gone_on(states: Any, policy: str, plan: int, fields: dict[str, Any]) -> tuple[bool, Any]:
    """Whether loaded states are those given, and the whole ones after one more step on the same samples."""
    module, optimizer = trained(policy, plan, **fields)
    load_merged_state_dict(module, states[0], optimizer, states[1])
    kept = same(merged(module, optimizer), states)
    units = dist.get_world_size() // plan
    unit = dist.get_rank() // plan
    module.train_step([sample_of("mlp", seed) for seed in range(unit * 4 // units, (unit + 1) * 4 // units)])
    optimizer.step()
    return kept, merged(module, optimizer)


def test_states_move_to_other_numbers_of_ranks() -> None:
    zero = {"use_zero": True}
    states = run_ranks(states_on_four, 4, args=("tp", 2, zero), timeout_s=120)[0]
    model = module_of("mlp")
    model.load_state_dict(states[0])
    optimizer = adam(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(states[1]))
    torch.stack([model(sample_of("mlp", seed)) for seed in range(4)]).sum().backward()
    optimizer.step()
    for ranks, policy, plan, fields in (
        (2, "dp", 1, zero),
        (2, "pp", 2, {"pas_config": {"pipeline_nmicros": 4}}),
        (4, "tp", 4, {}),
    ):
        for kept, (weights, _) in run_ranks(
            gone_on, ranks, args=(states, policy, plan, fields), timeout_s=120
        ):
            assert kept
            for name, value in model.state_dict().items():
                assert torch.allclose(weights[name], value, atol=1e-6), name


def lacking() -> list[str]:
    module, optimizer = trained("dp", 1)
    weights, states = deduped_state_dict(module, optimizer)
    found = []
    for given in (({}, states), (weights, None), (weights, {})):
        try:
            load_deduped_state_dict(module, given[0], optimizer, given[1])
        except (InputError, RankError) as error:
            found.append(str(error))
    return found


def test_deduped_ones_that_lack_something_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(lacking, 2)
    assert "the state dict of rank 0 lacks" in first[0]
    assert "the state dict of rank 0 lacks" in second[0]
    assert ["optimizer_state_dict must be what" in text for text in first[1:]] == [True, True]
    assert len(second) == 3


def test_diverged_weights_are_merged() -> None:
    nan = torch.full((2,), float("nan"))
    assert assemble("a", [(0, nan, None), (1, nan.clone(), None)]).isnan().all()
    parts = [(rank, nan, PieceLocation((2,), (0,))) for rank in range(2)]
    assert assemble("a", parts).isnan().all()
