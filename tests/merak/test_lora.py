"""LoRA by peft on divided models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from atorch_ns.checkpoint import export_state_dict
from atorch_ns.errors import InputError
from atorch_ns.merak import MerakArguments, MerakTrainer, init
from atorch_ns.testing.workers import catch_ranks, run_ranks
from atorch_ns.torch_compat import plain_name
from tests.merak.parts import QUICK, Data, Run, arguments, assert_equal_runs, logs_of, model

peft: Any = pytest.importorskip("peft")

MICRO_BATCHES = 2
ADAPTER = "mine"
TARGETS = {"llama": ["q_proj", "v_proj", "o_proj"], "gpt2": ["c_attn"]}
LAYER = {
    "llama": "base_model.model.model.layers.3.self_attn.q_proj.base_layer.weight",
    "gpt2": "base_model.model.transformer.h.3.attn.c_attn.base_layer.weight",
}
HALF = {"llama": (16, 32), "gpt2": (32, 48)}


def config_of(name: str) -> dict[str, Any]:
    """Arguments of ``LoraConfig``. Dropout is off: ranks draw other masks than one process."""
    return {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": TARGETS[name],
        "fan_in_fan_out": name == "gpt2",
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
    }


def adapted(name: str) -> Any:
    """A model whose adapters change something from the first."""
    torch.manual_seed(1)
    found = peft.get_peft_model(model(name), peft.LoraConfig(**config_of(name)), adapter_name=ADAPTER)
    torch.manual_seed(2)
    for key, parameter in found.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.05)
    return found


def _plain(name: str, folder: str, smoothing: float) -> Run:
    args = TrainingArguments(
        **arguments(
            folder, gradient_accumulation_steps=MICRO_BATCHES, label_smoothing_factor=smoothing, **QUICK
        )
    )
    trainer = Trainer(adapted(name), args, train_dataset=Data(name))
    trainer.train()
    weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    return Run(logs_of(trainer), weights, {})


def _merak(name: str, degrees: dict[str, Any], folder: str, smoothing: float) -> Run:
    init(**degrees)
    args = MerakArguments(
        **arguments(
            folder,
            gradient_accumulation_steps=MICRO_BATCHES // degrees.get("dp", 1),
            label_smoothing_factor=smoothing,
            lora_config=f"{folder}/lora.json",
            adapter_name=ADAPTER,
            **QUICK,
        )
    )
    trainer = MerakTrainer(adapted(name), args, train_dataset=Data(name))
    trainer.train()
    trainer.save_model(f"{folder}/final")
    seen = {
        plain_name(key): tuple(getattr(one, "_local_tensor", one).shape)
        for key, one in trainer.result.job.module.named_parameters()
    }
    return Run(logs_of(trainer), export_state_dict(trainer.result), {}, seen)


def _read(name: str, folder: str) -> dict[str, torch.Tensor]:
    found = peft.PeftModel.from_pretrained(model(name), folder, adapter_name=ADAPTER)
    return {key: value.clone() for key, value in found.state_dict().items()}


def adapter_folder(folder: Path) -> str:
    """Where peft writes the files of an adapter that is not called default."""
    return str(folder / ADAPTER)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "degrees", "smoothing"),
    [
        ("llama", {"tp": 2}, 0.0),
        ("gpt2", {"pp": 2}, 0.1),
        pytest.param("gpt2", {"tp": 2}, 0.0, marks=pytest.mark.slow),
        pytest.param("llama", {"dp": 2}, 0.0, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2, "tp": 2}, 0.0, marks=pytest.mark.slow),
    ],
)
def test_adapters_train_as_in_one_process(
    name: str, degrees: dict[str, Any], smoothing: float, tmp_path: Path
) -> None:
    (tmp_path / "lora.json").write_text(json.dumps(config_of(name)))
    ranks = 4 if len(degrees) == 2 else 2
    (plain,) = run_ranks(_plain, 1, args=(name, str(tmp_path), smoothing), timeout_s=100)
    every = run_ranks(_merak, ranks, args=(name, degrees, str(tmp_path), smoothing), timeout_s=150)
    assert_equal_runs(every[0], plain)
    (begun,) = run_ranks(_begun, 1, args=(name,), timeout_s=60)
    for key, weight in every[0].weights.items():
        assert torch.equal(weight, begun[key]) == ("lora_" not in key), key
    if "tp" in degrees:
        holders = [found.seen for found in every if LAYER[name] in found.seen]
        assert holders  # the base layer is divided under its adapter
        assert all(seen[LAYER[name]] == HALF[name] for seen in holders)
    (read,) = run_ranks(_read, 1, args=(name, adapter_folder(tmp_path / "final")), timeout_s=60)
    for key, weight in every[0].weights.items():
        torch.testing.assert_close(read[key], weight, rtol=0, atol=0, msg=key)


def _begun(name: str) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in adapted(name).state_dict().items()}


def _made(folder: str) -> dict[str, Any]:
    init(pp=2)
    args = MerakArguments(
        **arguments(folder, lora_config=f"{folder}/lora.json", adapter_name=ADAPTER, **QUICK)
    )
    trainer = MerakTrainer(model("gpt2"), args, train_dataset=Data("gpt2"))
    trainer.train()
    config = trainer.model.peft_config[ADAPTER]
    return {
        "r": config.r,
        "trained": {key.split(".")[-3] for key, one in trainer.model.named_parameters() if one.requires_grad},
    }


@pytest.mark.timeout(100)
def test_the_file_s_config_makes_the_adapters(tmp_path: Path) -> None:
    (tmp_path / "lora.json").write_text(json.dumps({**config_of("gpt2"), "peft_type": "LORA"}))
    for found in run_ranks(_made, 2, args=(str(tmp_path),), timeout_s=80):
        assert found == {"r": 4, "trained": {"lora_A", "lora_B"}}


@pytest.mark.parametrize(
    ("given", "said"),
    [({"rank": 4}, "LoraConfig has no 'rank'"), ({"target_modules": ["nothing"], "r": 4}, "lora_config")],
)
def test_wrong_configs_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "lora.json").write_text(json.dumps(given))
    for outcome in catch_ranks(_made, 2, args=(str(tmp_path),), timeout_s=60):
        assert isinstance(outcome.error, InputError), outcome.describe()
        assert said in str(outcome.error)
