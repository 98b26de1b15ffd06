from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from atorch_ns.errors import InputError
from atorch_ns.testing import CASES, Case, SyntheticDataset, get_case, map_tensors, take
from atorch_ns.testing.networks import TiedLlama

every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, batch)  # type: ignore[func-returns-value]
    return found


@every_case
def test_every_build_gives_the_same_weights_and_leaves_the_random_state(case: Case) -> None:
    before = torch.get_rng_state()
    first = case.build().state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    second = case.build().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@every_case
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    model, batch = case.build(), case.make_batch(4, 0)
    loss = case.loss_func(batch, case.call(model, batch))
    loss.backward()
    assert loss.shape == ()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert model.training


@every_case
def test_the_repeated_block_is_there_by_its_class_name(case: Case) -> None:
    blocks = [module for module in case.build().modules() if type(module).__name__ == case.block]
    assert len(blocks) >= 2


@every_case
def test_the_mean_of_the_parts_losses_is_the_loss_of_the_whole(case: Case) -> None:
    model, batch = case.build(), case.make_batch(8, 0)
    whole = case.loss_func(batch, case.call(model, batch))
    parts = [take(batch, slice(rank, None, 2)) for rank in range(2)]
    mean = sum(case.loss_func(part, case.call(model, part)) for part in parts) / 2
    torch.testing.assert_close(mean, whole)


@every_case
def test_a_plain_loader_over_the_dataset_gives_its_batches(case: Case) -> None:
    data = SyntheticDataset(case, 12, seed=3)
    for step, loaded in enumerate(DataLoader(data, batch_size=4)):
        expected = _tensors(data.batch(step, 4))
        assert all(map(torch.equal, _tensors(loaded), expected))
        losses = [
            case.loss_func(batch, case.call(case.build(), batch)) for batch in (loaded, data.batch(step, 4))
        ]
        torch.testing.assert_close(*losses)


@every_case
def test_batches_depend_on_the_seed_alone(case: Case) -> None:
    assert all(map(torch.equal, _tensors(case.make_batch(4, 1)), _tensors(case.make_batch(4, 1))))
    assert not torch.equal(_tensors(case.make_batch(4, 1))[0], _tensors(case.make_batch(4, 2))[0])


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_the_dataset_ends_it(index: int) -> None:
    data = SyntheticDataset(CASES["mlp"], 3)
    assert len(data) == len(list(data)) == 3  # type: ignore[call-overload]
    with pytest.raises(IndexError):
        data[index]


def test_the_decoder_is_causal_and_knows_positions() -> None:
    model = CASES["tied_llama"].build()
    tokens = torch.zeros(1, 8, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 5] = 1
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 6:], after[:, 6:])
    swapped = torch.tensor([[1, 2, 3, 4]])
    assert not torch.allclose(model(swapped)[:, -1], model(swapped[:, [1, 0, 2, 3]])[:, -1])


def test_the_decoder_is_tied_and_builds_without_memory() -> None:
    with torch.device("meta"):
        model = TiedLlama()
    assert model.lm_head.weight is model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    assert isinstance(model.lm_head, nn.Linear)


def test_an_unknown_case_names_those_there_are() -> None:
    assert get_case("mlp").name == "mlp"
    with pytest.raises(InputError, match=r"'mpl'.*mlp, tied_llama, hf_llama, hf_gpt2"):
        get_case("mpl")
