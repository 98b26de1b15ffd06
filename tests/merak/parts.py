"""Models as their configs make them, data, and runs of a Trainer that tests compare."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from atorch_ns.checkpoint import export_state_dict
from atorch_ns.merak import MerakArguments, MerakTrainer, init

VOCABULARY, TOKENS, IMAGE = 104, 12, 16

_IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32} | _IDS,
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        | _IDS,
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 32,
        }
        | _IDS,
    ),
    "bert": (
        "BertConfig",
        "BertForSequenceClassification",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_labels": 3,
        }
        | _IDS,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
        | _IDS,
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": IMAGE,
            "patch_size": 4,
            "num_labels": 3,
        },
    ),
}
NAMES = tuple(_CONFIGS)


def model(name: str, dropout: bool = False, **fields: Any) -> nn.Module:
    """A small model. Dropout is off where weights are compared: ranks draw other masks than one process."""
    config_name, model_name, sizes = _CONFIGS[name]
    off = {} if dropout else dict.fromkeys(_dropouts(config_name), 0.0)
    torch.manual_seed(0)
    found: nn.Module = getattr(transformers, model_name)(
        getattr(transformers, config_name)(**{**sizes, **off, **fields})
    )
    return found


def _dropouts(config_name: str) -> list[str]:
    config = getattr(transformers, config_name)()
    wanted = ("dropout", "_pdrop", "dropout_rate", "_dropout", "_dropout_prob", "layerdrop")
    return [key for key, value in vars(config).items() if isinstance(value, float) and key.endswith(wanted)]


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples by their number; some labels of texts are left out, some texts are padded."""

    def __init__(self, name: str, size: int = 40) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(place)
        if self.name == "vit":
            pixels = torch.randn(3, IMAGE, IMAGE, generator=draws)
            return {"pixel_values": pixels, "labels": torch.tensor(place % 3)}
        ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=draws)
        mask = torch.ones(TOKENS, dtype=torch.long)
        mask[TOKENS - place % 3 :] = 0
        if self.name == "bert":
            return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(place % 3)}
        labels = ids.masked_fill(mask == 0, -100)
        labels[: place % 4] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def accuracy(found: Any) -> dict[str, float]:
    """A metric of ``compute_metrics``."""
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    counted = found.label_ids != -100
    return {
        "accuracy": float((np.argmax(logits, -1) == found.label_ids)[counted].mean()),
        "logits": float(np.abs(logits).mean()),
    }


def arguments(folder: str, **fields: Any) -> dict[str, Any]:
    """Arguments of a short run; SGD-like errors would show in weights, so steps are large."""
    given: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 1,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return given | fields


def logs_of(trainer: Trainer) -> list[dict[str, float]]:
    """What was logged in each step, without times."""
    kept = (
        "loss",
        "grad_norm",
        "learning_rate",
        "epoch",
        "step",
        "eval_loss",
        "eval_accuracy",
        "eval_logits",
    )
    return [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]


class WholeMean(Trainer):
    """transformers' own for models that pass ``num_items_in_batch`` over: their losses are means over micro-batches."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The micro-batch's part of the mean over all labels of the step."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is None:
            return found
        share = inputs["labels"].ne(-100).sum() / num_items_in_batch
        return (found[0] * share, found[1]) if return_outputs else found * share


PASS_OVER_ITEMS = ("bert", "t5")
"""Models whose losses are not divided by the number of items."""


class Run(NamedTuple):
    """A training.

    Attributes:
        logs: of this rank.
        weights: by name, on the first rank.
        rows: of the report, by method, and its ``notes``; empty for transformers' Trainer.
        seen: what ``look`` found.
    """

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    rows: dict[str, str]
    seen: Any = None


Change = Callable[[], dict[str, Any]]
"""Gives arguments of the trainer; ``trainer`` among them is its class."""
Look = Callable[[Any], Any]
"""Looks at a trainer after its training."""
QUICK: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no"}
"""Arguments of runs that need few steps and no evaluation."""


def made(usual: type[Trainer], args: TrainingArguments, name: str, change: Change | None = None) -> Any:
    """A trainer of a model, of the usual class unless ``change`` names another."""
    given = {
        "model": None,
        "train_dataset": Data(name),
        "eval_dataset": Data(name, 10),
        "compute_metrics": accuracy,
        **({} if change is None else change()),
    }
    given["model"] = model(name) if given["model"] is None else given["model"]
    return given.pop("trainer", usual)(args=args, **given)


def run_plain(
    name: str, accumulation: int = 2, change: Change | None = None, look: Look | None = None, **fields: Any
) -> Run:
    """transformers' own Trainer in one process: its logs and weights."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**arguments(folder, gradient_accumulation_steps=accumulation, **fields))
        trainer = made(WholeMean if name in PASS_OVER_ITEMS else Trainer, args, name, change)
        trainer.train()
        seen = None if look is None else look(trainer)
        weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        return Run(logs_of(trainer), weights, {}, seen)


def run_merak(
    name: str,
    degrees: dict[str, Any],
    accumulation: int = 2,
    change: Change | None = None,
    look: Look | None = None,
    **fields: Any,
) -> Run:
    """The same on ranks of these degrees: logs of each rank, weights on the first, and the report's rows."""
    init(**degrees)
    with tempfile.TemporaryDirectory() as folder:
        args = MerakArguments(**arguments(folder, gradient_accumulation_steps=accumulation, **fields))
        trainer = made(MerakTrainer, args, name, change)
        trainer.train()
        seen = None if look is None else look(trainer)
        applied = trainer.result.applied
        rows = {row.name: row.why for row in applied.rows} | {"notes": " ".join(applied.notes)}
        return Run(logs_of(trainer), export_state_dict(trainer.result), rows, seen)


def run_each(run: Callable[..., Run], runs: dict[str, dict[str, Any]]) -> dict[str, Run]:
    """Several trainings by one launch of ranks."""
    return {key: run(**given) for key, given in runs.items()}


def assert_equal_runs(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Compares logs and weights; losses, norms and metrics to ``tolerance``, relative above 1."""
    logs, weights = found[:2]
    wanted_logs, wanted_weights = wanted[:2]
    assert [entry.keys() for entry in logs] == [entry.keys() for entry in wanted_logs]
    for entry, other in zip(logs, wanted_logs, strict=True):
        for key, value in entry.items():
            assert abs(value - other[key]) <= tolerance * max(1.0, abs(other[key])), (key, value, other)
    assert weights.keys() == wanted_weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, wanted_weights[key], rtol=2e-4, atol=2e-5, msg=f"{key}")
