"""Finds a strategy for a small Llama, trains it on English text with it, and lets it write a line.

::

    torchrun --standalone --nproc-per-node=2 examples/auto_accelerate/demo.py
    python examples/auto_accelerate/demo.py --steps 100 --strategy amp_native:bf16,checkpoint

The strategy that is found is saved and, if the script runs again, used without a search.

Legend: T bytes of a window, V vocabulary (256 byte values).
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import is_first_process, parse_strategy, use_same_seed
from progress import TrainingProgress, smoothed, sparkline
from rich.console import Console
from rich.table import Table
from text import VOCABULARY_SIZE, ByteWindows, decode, encode, english_text
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from atorch_ns import Result, auto_accelerate, checkpoint

PROMPT = "The statement "
LEARNING_RATE = 3e-3
MIB = 2**20


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Find a strategy for a small Llama and train with it.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--batchsize", type=int, default=8, help="windows in a batch of all processes")
    parser.add_argument("--seq-length", type=int, default=128, help="bytes in a window")
    parser.add_argument(
        "--strategy",
        help="a strategy file, or names with commas between them, each with its config behind a colon; "
        "without it the strategy of an earlier run is used, or one is searched for",
    )
    parser.add_argument("--time-limit", type=float, default=90.0, help="seconds that the search may take")
    parser.add_argument("--save", type=Path, default=Path("runs/demo"), help="folder for what is kept")
    return parser.parse_args()


def small_llama() -> nn.Module:
    """A Llama with 5 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=4,
        num_attention_heads=5,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def next_byte_loss(batch: dict[str, Tensor], output: object) -> Tensor:
    """Mean cross entropy of each byte given those before it, in nats."""
    logits = output.logits[:, :-1]  # type: ignore[attr-defined]  # [B, T - 1, V]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())


def strategy_to_load(options: argparse.Namespace) -> object:
    """What the command line names, else what an earlier run has found, else nothing: then it is searched for."""
    if options.strategy is not None:
        return parse_strategy(options.strategy)
    found = options.save / "strategy.json"
    return found if found.exists() else None


def accelerate(options: argparse.Namespace) -> Result:
    """Model, optimizer, data and loss under the strategy; its file and the search's report go into the folder."""
    options.save.mkdir(parents=True, exist_ok=True)
    use_same_seed(0)
    _, result, _ = auto_accelerate(
        small_llama(),
        optim_func=torch.optim.AdamW,
        optim_args={"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1},
        dataset=ByteWindows(english_text(), options.seq_length),
        dataloader_args={"batch_size": options.batchsize, "shuffle": True, "drop_last": True},
        loss_func=next_byte_loss,
        model_input_format="unpack_dict",
        lr_scheduler_cls=torch.optim.lr_scheduler.OneCycleLR,
        lr_scheduler_args={
            "max_lr": LEARNING_RATE,
            "total_steps": options.steps + 1,
            "pct_start": 0.1,
            "cycle_momentum": False,
        },
        load_strategy=strategy_to_load(options),
        save_strategy_to_file=options.save / "strategy.json",
        time_limit=options.time_limit,
        # The model is called on its own afterwards, to write a sentence; in a pipeline only train_step drives it.
        excluded=None if strategy_to_load(options) else ["pipeline_parallel"],
        max_grad_norm=1.0,
        verbose=True,
    )
    assert result is not None
    if result.report.search is not None and is_first_process():
        result.report.save(options.save / "report.html")
        result.report.save(options.save / "report.json")
    return result


def show_strategy(console: Console, result: Result) -> None:
    """What was applied, and why."""
    report = result.report
    mesh = " × ".join(f"{name}={size}" for name, size in report.axes) or "one process"
    table = Table(title="The strategy as applied", title_justify="left", title_style="bold")
    for heading in ("method", "settings", "why"):
        table.add_column(heading, overflow="fold")
    for row in report.rows:
        table.add_row(row.name, row.settings, row.why)
    console.print(
        f"{report.num_parameters / 1e6:.2f} M parameters, {report.world_size} process(es) ({mesh}) "
        f"on {report.device}; {report.parameter_bytes_per_rank / MIB:.2f} MiB of parameters on each"
    )
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}")


def train(result: Result, progress: TrainingProgress, num_steps: int, num_tokens: int) -> None:
    """Trains for ``num_steps`` steps of ``num_tokens`` tokens, epoch after epoch."""
    assert result.dataloader is not None
    with progress:
        while True:
            for batch in result.dataloader:
                loss = result.train_step(batch)
                result.lr_scheduler.step()
                progress.advance(float(loss), num_tokens)
                if len(progress.losses) == num_steps:
                    return


@torch.no_grad()
def continue_text(model: nn.Module, prompt: str, *, num_bytes: int, context: int, seed: int = 1) -> str:
    """Lets ``model`` write ``num_bytes`` bytes after ``prompt``.

    Every process must call it: each forward pass gathers the shards of all of them. The seed makes all
    processes draw the same bytes.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt)
    for _ in range(num_bytes):
        logits = model(input_ids=tokens[None, -context:].to(device)).logits[0, -1].float().cpu()  # [V]
        likely = torch.softmax(logits / 0.5, dim=0)
        tokens = torch.cat([tokens, torch.multinomial(likely, 1, generator=generator)])
    return decode(tokens)


def peak_memory_mib() -> list[float]:
    """The largest memory each process held: of its GPU where it has one, of the whole process elsewhere."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / MIB
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
    if not dist.is_initialized():
        return [peak]
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return peaks


def main() -> None:
    """Accelerates, trains, and lets the model write."""
    options = read_options()
    console = Console(quiet=not is_first_process(), highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 110
    result = accelerate(options)
    show_strategy(console, result)

    progress = TrainingProgress(console, options.steps, line_every=max(1, options.steps // 15))
    train(result, progress, options.steps, options.batchsize * options.seq_length)
    checkpoint.save(options.save / "checkpoint", result, extra={"loss": smoothed(progress.losses)})
    line = continue_text(result.model, PROMPT, num_bytes=100, context=options.seq_length)

    losses = progress.losses
    memory = ", ".join(f"{mib:,.0f} MiB on rank {rank}" for rank, mib in enumerate(peak_memory_mib()))
    console.print(f"loss        {losses[0]:.3f} {sparkline(losses)} {smoothed(losses):.3f}")
    console.print(f"speed       {progress.tokens_per_second:,.0f} tokens/s over {progress.seconds:.0f} s")
    console.print(f"peak memory {memory}")
    console.print(f"strategy    {options.save / 'strategy.json'}")
    if result.report.search is not None:
        console.print(f"report      {options.save / 'report.html'}")
    console.print(f"checkpoint  {checkpoint.latest(options.save / 'checkpoint')}")
    console.print(f"it writes   {' '.join(line.split())}", soft_wrap=True)


if __name__ == "__main__":
    main()
