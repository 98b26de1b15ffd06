"""The strategy that MerakArguments and the grid describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from atorch_ns.merak.args import MerakArguments
from atorch_ns.merak.mapping import lists_for
from atorch_ns.merak.mpu import Grid
from atorch_ns.pipeline import get_schedule
from atorch_ns.strategy import Strategy

Step = tuple[str, dict[str, Any]]

_SHARDED_BY: Final = {2: "zero2", 3: "fsdp"}
_BYTES_OF_FP32: Final = 4


def strategy_of(
    args: MerakArguments, grid: Grid, model: nn.Module, leaf_modules: tuple[type[nn.Module] | str, ...] = ()
) -> Strategy:
    """The methods that arguments, degrees and lists of layers stand for."""
    steps: list[Any] = []
    if grid.world_size() > 1:
        steps.append(("parallel_mode", {"axes": [[name, size] for name, size in grid.axes]}))
    steps += precision(args)
    if grid.get_dim("model") > 1:
        steps.append(("tensor_parallel", tensor(args, model)))
    if grid.get_dim("sequence") > 1:
        steps.append(("sequence_parallel", {}))
    if grid.get_dim("pipe") > 1:
        steps.append(("pipeline_parallel", pipeline(args, leaf_modules)))
    steps += recomputation(args, grid.get_dim("pipe"))
    steps += data(args, grid)
    if args.torch_compile:
        steps.append("compile")
    return Strategy(steps)


def precision(args: MerakArguments) -> list[Step]:
    """Mixed precision, with weights in fp32 as in transformers' Trainer."""
    if args.fp16:
        return [("amp_native", {"dtype": "fp16", **loss_scaling(args)})]
    return [("amp_native", {"dtype": "bf16"})] if args.bf16 else []


def loss_scaling(args: MerakArguments) -> dict[str, Any]:
    """The loss scale of fp16."""
    if args.loss_scale:
        return {"static_scale": args.loss_scale}
    return {
        "init_scale": 2.0**args.initial_scale_power,
        "growth_interval": args.loss_scale_window,
        "hysteresis": args.hysteresis,
        "min_scale": float(args.min_loss_scale),
    }


def tensor(args: MerakArguments, model: nn.Module) -> dict[str, Any]:
    """How layers are divided."""
    lists = lists_for(model)
    config: dict[str, Any] = {} if lists is None else lists.as_config()
    if args.sequence_parallel:
        config |= {"sequence": True, "sequence_dim": args.sequence_dim}
    if args.tp_overlapping_level:
        config["overlap"] = True
    if lists is None and not args.parallel_vocab:
        config["vocabulary"] = False
    return config


def pipeline(args: MerakArguments, leaf_modules: Sequence[type[nn.Module] | str] = ()) -> dict[str, Any]:
    """How the model is cut, and how its stages are run."""
    config: dict[str, Any] = {
        "schedule": "auto" if args.train_schedule == "auto" else get_schedule(args.train_schedule).name,
        "num_micro_batches": args.gradient_accumulation_steps,
        "split_method": args.partition_method,
    }
    if args.partition_method == "custom":
        config["custom_partition"] = list(args.partition)
    if leaf_modules:
        config["leaf_modules"] = [one if isinstance(one, str) else one.__name__ for one in leaf_modules]
    if args.custom_split_points:
        config |= {"shards": "split_points", "split_points": args.custom_split_points}
    elif args.split_method != "layer_split":
        config["shards"] = args.split_method
        if args.shard_count is not None and args.split_method == "farthest_min_deps":
            config["shard_count"] = args.shard_count
    return config


def recomputation(args: MerakArguments, num_stages: int) -> list[Step]:
    """Which blocks are recomputed."""
    if args.text_generation or not (args.activation_checkpointing and args.checkpoint_num_layers):
        return []
    config: dict[str, Any] = {}
    if args.checkpoint_num_layers > 1:
        config["chunk"] = args.checkpoint_num_layers
    shares = args.recompute_shares
    if shares is not None:
        config["share"] = list(shares) if isinstance(shares, tuple) else shares
        if not isinstance(shares, tuple) and num_stages > 1:
            config["by_stage"] = "merak"
    return [("checkpoint", config)]


def data(args: MerakArguments, grid: Grid) -> list[Step]:
    """What synchronises gradients, and what data ranks shard."""
    if grid.get_dim("data") == 1:
        return []
    divided = grid.world_size() > grid.get_dim("data")
    if args.zero_stage in _SHARDED_BY:
        return [(_SHARDED_BY[args.zero_stage], {})]
    if args.zero_stage == 1:
        return [("zero2", {})] if divided else [("zero1", {})]
    mib = args.zero_reduce_bucket_size * _BYTES_OF_FP32 / 2**20
    config: dict[str, Any] = {"bucket_cap_mb": mib} if mib < 25 else {}
    if args.prescale_gradients:
        config |= {"reducer": "own", "predivide_factor": args.gradient_predivide_factor}
    return [("ddp", config)]


def notes_of(args: MerakArguments) -> list[str]:
    """What the report says about arguments that do less, or something else, than in Merak."""
    return args.without_use()
