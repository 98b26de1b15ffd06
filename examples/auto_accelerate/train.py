"""Trains a toy model, GPT-2 or Llama on synthetic data, with the strategy that the flags describe.

::

    python examples/auto_accelerate/train.py --model_type toy
    torchrun --standalone --nproc-per-node=2 examples/auto_accelerate/train.py \\
        --model_type llama --use_fsdp --use_amp --amp_dtype bf16 --use_checkpointing
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import parse_strategy, say, use_same_seed
from tasks import MODEL_TYPES, Task, make_task
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from atorch_ns import Result, auto_accelerate


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a model on synthetic data under a strategy.")
    model = parser.add_argument_group("model and data")
    model.add_argument("--model_type", choices=sorted(MODEL_TYPES), default="toy")
    model.add_argument("--hidden_size", type=int, default=64)
    model.add_argument("--head_num", type=int, default=4, help="attention heads; not for toy")
    model.add_argument("--layer_num", type=int, default=4)
    model.add_argument("--seq_length", type=int, default=32, help="tokens in a sample; not for toy")
    model.add_argument("--datasize", type=int, default=320, help="samples in the data set")
    model.add_argument("--user_created_dataloader", action="store_true", help="a DataLoader of our own")

    run = parser.add_argument_group("training")
    run.add_argument("--batchsize", type=int, default=16, help="samples in a step of all processes")
    run.add_argument("--epoch", type=int, default=2)
    run.add_argument("--max_steps", type=int, help="stop after so many steps")
    run.add_argument("--lr", type=float, default=3e-3)
    run.add_argument("--seed", type=int, default=0, help="of initial weights and of the data")
    run.add_argument("--gradient_accumulation", type=int, default=1, help="micro-batches in a step")
    run.add_argument("--max_grad_norm", type=float, help="clip gradients to this norm")
    run.add_argument("--optim_grouped_params", action="store_true", help="no decay for biases and norms")
    run.add_argument("--use_train_step", action="store_true", help="result.train_step, not the plain loop")

    strategy = parser.add_argument_group("strategy")
    strategy.add_argument(
        "--load_strategy", help="a strategy file, or names with commas: fsdp,amp_native:bf16"
    )
    strategy.add_argument("--save_strategy", help="file to write the strategy as applied to")
    strategy.add_argument("--distributed", action="store_true", help="parallel_mode")
    strategy.add_argument("--use_fsdp", action="store_true")
    strategy.add_argument("--use_zero1", action="store_true")
    strategy.add_argument("--use_zero2", action="store_true")
    strategy.add_argument("--use_amp", action="store_true", help="amp_native")
    strategy.add_argument("--amp_dtype", choices=("fp16", "bf16"), default="bf16", help="for amp and half")
    strategy.add_argument("--use_half", action="store_true", help="half")
    strategy.add_argument("--use_checkpointing", action="store_true", help="checkpoint, block by block")
    strategy.add_argument("--use_module_replace", action="store_true")
    strategy.add_argument("--use_compile", action="store_true", help="compile, block by block")
    options = parser.parse_args()
    if options.batchsize % options.gradient_accumulation:
        parser.error("--batchsize must be a multiple of --gradient_accumulation")
    return options


def chosen_strategy(options: argparse.Namespace, block: str) -> Any:
    """What ``--load_strategy`` names, or a list of the methods that the other flags ask for."""
    if options.load_strategy is not None:
        return parse_strategy(options.load_strategy)
    methods = {
        "parallel_mode": (options.distributed, None),
        "module_replace": (options.use_module_replace, None),
        "checkpoint": (options.use_checkpointing, (block,)),
        "half": (options.use_half, options.amp_dtype),
        "compile": (options.use_compile, None),
        "zero1": (options.use_zero1, None),
        "zero2": (options.use_zero2, {"atorch_wrap_cls": (block,)}),
        "fsdp": (options.use_fsdp, {"atorch_wrap_cls": (block,)}),
        "amp_native": (options.use_amp, options.amp_dtype),
    }
    return [(name, config) for name, (wanted, config) in methods.items() if wanted]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: biases and norms, which are not decayed, and all else.

    The choice goes by name: a sharding method may flatten parameters, but it keeps their names.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        plain = name.endswith("bias") or "norm" in name or "ln_" in name
        groups[not plain].append(parameter)
    return [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]


def accelerate(task: Task, options: argparse.Namespace) -> Result:
    """The task under the strategy."""
    data: dict[str, Any] = {}
    if not options.user_created_dataloader:
        data = {
            "dataset": task.dataset,
            "dataloader_args": {"batch_size": loader_batch_size(options), "shuffle": True, "drop_last": True},
        }
    _, result, _ = auto_accelerate(
        task.model,
        optim_func=torch.optim.AdamW,
        optim_args={"lr": options.lr},
        optim_param_func=decay_groups if options.optim_grouped_params else None,
        loss_func=task.loss_func,
        model_input_format=task.model_input_format,
        load_strategy=chosen_strategy(options, task.block),
        save_strategy_to_file=options.save_strategy,
        gradient_accumulation_steps=options.gradient_accumulation,
        max_grad_norm=options.max_grad_norm,
        **data,
    )
    assert result is not None
    return result


def loader_batch_size(options: argparse.Namespace) -> int:
    """``train_step`` splits a batch into micro-batches; the plain loop takes them from the loader."""
    batch_size: int = options.batchsize
    return batch_size if options.use_train_step else batch_size // options.gradient_accumulation


def own_loader(task: Task, options: argparse.Namespace) -> DataLoader[Any]:
    """A DataLoader made by hand: what ``auto_accelerate`` would make from the same data set."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler: DistributedSampler[Any] = DistributedSampler(
        task.dataset, num_replicas=ranks, rank=rank, shuffle=True, drop_last=True
    )
    return DataLoader(
        task.dataset, batch_size=loader_batch_size(options) // ranks, sampler=sampler, drop_last=True
    )


def plain_steps(
    result: Result, loader: DataLoader[Any], task: Task, options: argparse.Namespace
) -> Iterator[Tensor]:
    """The plain loop: trains one epoch and gives the loss of every step on this process's samples."""
    optimizer, loss_func = result.optim, result.loss_func
    assert optimizer is not None
    assert loss_func is not None
    device = next(result.model.parameters()).device
    num_micro_batches = options.gradient_accumulation
    total = torch.zeros((), device=device)
    for position, batch in enumerate(loader, start=1):
        last = position % num_micro_batches == 0
        data = result.prepare_input(batch, device)
        output = result.model(**data) if task.model_input_format == "unpack_dict" else result.model(*data)
        loss = loss_func(data, output) / num_micro_batches
        if result.args["requires_set_gradient_accumulation_boundary"]:
            optimizer.set_gradient_accumulation_boundary(last)  # type: ignore[attr-defined]
        if result.args["use_optim_backward"]:
            optimizer.backward(loss)  # type: ignore[attr-defined]
        else:
            loss.backward()
        total += loss.detach()
        if last:
            if options.max_grad_norm is not None:
                result.clip_grad_norm_(options.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            yield total
            total = torch.zeros((), device=device)


def steps_of_epoch(
    result: Result, loader: DataLoader[Any], task: Task, options: argparse.Namespace
) -> Iterator[float]:
    """Trains one epoch and gives the loss of every step, averaged over all processes."""
    if options.use_train_step:
        for batch in loader:
            yield float(result.train_step(batch))
        return
    for loss in plain_steps(result, loader, task, options):
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        yield float(loss)


def main() -> None:
    """Trains, printing the loss of every step and samples per second."""
    options = read_options()
    use_same_seed(options.seed)
    task = make_task(options)
    result = accelerate(task, options)
    say(str(result.report))
    loader = own_loader(task, options) if options.user_created_dataloader else result.dataloader
    assert loader is not None

    step, begin = 0, time.perf_counter()
    for epoch in range(options.epoch):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for loss in steps_of_epoch(result, loader, task, options):
            step += 1
            say(f"epoch {epoch} step {step} loss {loss:.6f}")
            if step == options.max_steps:
                break
        if step == options.max_steps:
            break
    say(f"{step * options.batchsize / (time.perf_counter() - begin):.1f} samples/s")


if __name__ == "__main__":
    main()
