"""Plain weights out and in: ``state_dict`` and what transformers' ``from_pretrained`` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns import checkpoint
from atorch_ns.errors import CheckpointError, MissingPackageError, RankError
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import catch_ranks, run_ranks

TIED = get_case("tied_llama")
STRATEGIES: list[list[Any]] = [["ddp"], ["fsdp", "checkpoint"], ["zero1", ("half", "fp16")]]


def llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def trained(case: Case, strategy: list[Any], model: nn.Module | None = None) -> Any:
    result = accelerate_case(case, strategy, steps=2, model=model)
    assert result.dataloader is not None
    for batch in result.dataloader:
        result.train_step(batch)
    return result


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_dict_is_that_of_the_plain_model() -> None:
    def export() -> list[dict[str, torch.Tensor]]:
        return [checkpoint.export_state_dict(trained(TIED, strategy)) for strategy in STRATEGIES]

    first, second = run_ranks(export, 2)
    assert second == [{}] * len(STRATEGIES)
    plain = TIED.build()
    for state_dict in first:
        assert state_dict.keys() == plain.state_dict().keys()
        assert {tensor.dtype for tensor in state_dict.values()} == {torch.float32}
        assert state_dict["lm_head.weight"] is state_dict["embed_tokens.weight"]
        plain.load_state_dict(state_dict)
    assert equal(first[0], first[1])
    assert not equal(first[0], TIED.build().state_dict())


def test_what_is_exported_is_a_copy() -> None:
    result = accelerate_case(TIED, [], steps=1)
    exported = checkpoint.export_state_dict(result)
    with torch.no_grad():
        exported["norm.weight"].fill_(3)
    assert not torch.equal(result.model.get_parameter("norm.weight"), exported["norm.weight"])


def test_import_reaches_shards_masters_and_parameters() -> None:
    given = {name: torch.randn(tensor.shape) for name, tensor in TIED.build().state_dict().items()}
    del given["lm_head.weight"]  # one of two tied names is enough

    def bring() -> list[Any]:
        found: list[Any] = []
        for strategy in STRATEGIES:
            result = accelerate_case(TIED, strategy, steps=1)
            own = given if result.job.cluster.rank == 0 else {}
            unmatched = checkpoint.import_state_dict(result, own)
            assert unmatched == ([], [])
            found.append(checkpoint.export_state_dict(result))
            if strategy[0] == "zero1":  # the model computes with what the masters hold
                weight = dict(result.job.module.named_parameters())["norm.weight"]
                assert torch.equal(weight, given["norm.weight"].half())
        return found

    for state_dict in run_ranks(bring, 2)[0]:
        assert equal(state_dict, {**given, "lm_head.weight": given["embed_tokens.weight"]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm.weight": None}, "1 missing: norm.weight"),
        ({"nrom.weight": torch.ones(2)}, "1 unexpected: nrom.weight"),
        ({"norm.weight": torch.ones(2)}, r"norm.weight is \(32,\) here and \(2,\) there"),
        (
            {"lm_head.weight": torch.ones(64, 32)},
            "embed_tokens.weight and lm_head.weight are tied here and differ",
        ),
    ],
)
def test_another_models_weights(change: dict[str, Any], said: str) -> None:
    result = accelerate_case(TIED, [], steps=1)
    before = checkpoint.export_state_dict(result)
    given = {name: torch.zeros_like(tensor) for name, tensor in before.items()} | change
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=said):
        checkpoint.import_state_dict(result, given)
    assert equal(checkpoint.export_state_dict(result), before)


def test_not_strict() -> None:
    result = accelerate_case(TIED, [], steps=1)
    unmatched = checkpoint.import_state_dict(
        result, {"norm.weight": torch.full((32,), 2.0), "other": torch.ones(1)}, strict=False
    )
    assert "embed_tokens.weight" in unmatched.missing_keys
    assert unmatched.unexpected_keys == ["other"]
    assert checkpoint.export_state_dict(result)["norm.weight"].tolist() == [2.0] * 32


@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained_reads_what_is_exported(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    case, model = get_case("hf_llama"), llama(tied=tied)

    def export() -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        found = []
        for number, strategy in enumerate(STRATEGIES):
            result = trained(case, strategy, llama(tied=tied))
            assert checkpoint.export_safetensors(result, tmp_path / str(number)) == tmp_path / str(number)
            with torch.no_grad():
                output = case.call(result.model, case.make_batch(2, 9)).logits
            found.append((checkpoint.export_state_dict(result), output.float()))
        return found

    del model  # transformers is imported before the fork
    for number, (state_dict, output) in enumerate(run_ranks(export, 2)[0]):
        folder = tmp_path / str(number)
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        config = json.loads((folder / "config.json").read_text())
        assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert equal(dict(loaded.state_dict()), state_dict)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        with torch.no_grad():
            again = case.call(loaded, case.make_batch(2, 9)).logits
        assert torch.allclose(again, output, atol=5e-3 if number == 2 else 1e-5)


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_save_pretrained_can_be_imported(tmp_path: Path, shard_size: str) -> None:
    case, model = get_case("hf_llama"), llama(tied=True)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(0.5)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)  # type: ignore[operator]
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")

    def bring() -> dict[str, torch.Tensor]:
        result = accelerate_case(case, ["fsdp"], steps=1, model=llama(tied=True))
        checkpoint.import_safetensors(result, tmp_path)
        return checkpoint.export_state_dict(result)

    assert equal(run_ranks(bring, 2)[0], dict(model.state_dict()))


def test_bad_files(tmp_path: Path) -> None:
    def bring(folder: Path) -> None:
        checkpoint.import_safetensors(accelerate_case(TIED, ["ddp"], steps=1), folder)

    outcomes = catch_ranks(bring, 2, args=(tmp_path,))
    assert isinstance(outcomes[0].error, CheckpointError)
    assert "cannot read weights from" in outcomes[0].message
    assert isinstance(outcomes[1].error, RankError)
    index = "model.safetensors.index.json"
    for name, content in (("model.safetensors", "not weights"), (index, "{}"), (index, "[1]"), (index, "{")):
        (tmp_path / name).write_text(content)
        with pytest.raises(
            CheckpointError, match=f"cannot read weights from .*: {name} is missing or damaged"
        ):
            checkpoint.import_safetensors(accelerate_case(TIED, [], steps=1), tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    result = accelerate_case(TIED, [], steps=1)
    for action in (checkpoint.export_safetensors, checkpoint.import_safetensors):
        with pytest.raises(MissingPackageError, match=r"pip install 'atorch-ns\[hf\]'"):
            action(result, tmp_path)
