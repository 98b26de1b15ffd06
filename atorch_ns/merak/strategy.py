"""The strategy that MerakArguments and the grid describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from atorch_ns.capture.blocks import repeated_blocks, select_modules
from atorch_ns.errors import InputError
from atorch_ns.merak.args import MerakArguments
from atorch_ns.merak.mapping import lists_for
from atorch_ns.merak.mpu import Grid
from atorch_ns.pipeline import get_schedule
from atorch_ns.strategy import Strategy

Step = tuple[str, dict[str, Any]]

_BYTES_OF_FP32: Final = 4
_USUAL_BUCKET: Final = 5e8  # elements: Merak's default
_SHARDING: Final = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}  # methods by zero_stage


def strategy_of(
    args: MerakArguments,
    grid: Grid,
    model: nn.Module,
    leaf_modules: tuple[type[nn.Module] | str, ...] = (),
    *,
    recomputes: bool | None = None,
) -> Strategy:
    """The methods for arguments, degrees and lists. ``recomputes`` overrides ``activation_checkpointing``."""
    for leaf in leaf_modules:
        name = leaf if isinstance(leaf, str) else leaf.__name__
        if not select_modules(model, (name,)):
            raise InputError(f"leaf_modules: {type(model).__name__} has no module of class or path {name!r}.")
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
    if args.neftune_noise_alpha is not None and grid.world_size() > grid.get_dim("data"):
        raise InputError(
            "neftune_noise_alpha: ranks that share a divided model would each add different noise. Use only dp."
        )
    if (args.activation_checkpointing if recomputes is None else recomputes) and repeated_blocks(model):
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
    """Config for dividing layers."""
    lists = lists_for(model)
    config: dict[str, Any] = {} if lists is None else lists.as_config()
    if args.sequence_parallel:
        config |= {"sequence": True, "sequence_dim": args.sequence_dim}
    elif args.tp_overlapping_level:  # sequence_parallel leaves no all-reduce to overlap
        config["overlap"] = True
    if lists is None and not args.parallel_vocab:
        config["vocabulary"] = False  # Merak divides it for parallel_vocab alone
    return config


def pipeline(args: MerakArguments, leaf_modules: Sequence[type[nn.Module] | str] = ()) -> dict[str, Any]:
    """Config for cutting the model and running its stages."""
    config: dict[str, Any] = {
        "schedule": "auto" if args.train_schedule == "auto" else get_schedule(args.train_schedule).name,
        "num_micro_batches": args.gradient_accumulation_steps,
        "split_method": args.partition_method,
    }
    if args.partition_method == "custom":
        config["custom_partition"] = list(args.partition)
    if leaf_modules:
        config["leaf_modules"] = [leaf if isinstance(leaf, str) else leaf.__name__ for leaf in leaf_modules]
    if args.custom_split_points:
        config |= {"shards": "split_points", "split_points": args.custom_split_points}
    elif args.split_method != "layer_split":
        config["shards"] = args.split_method
        if args.shard_count is not None and args.split_method == "farthest_min_deps":
            config["shard_count"] = args.shard_count
    return config


def recomputation(args: MerakArguments, num_stages: int) -> list[Step]:
    """Methods that recompute blocks."""
    if args.text_generation or not args.checkpoint_num_layers:
        return []
    config: dict[str, Any] = {}
    if args.checkpoint_num_layers > 1:
        config["chunk"] = args.checkpoint_num_layers
    shares = args.recompute_shares
    if shares is not None:
        config["share"] = list(shares) if isinstance(shares, tuple) else shares
        if not isinstance(shares, tuple) and num_stages > 1:
            config["by_stage"] = "merak"  # its formula gives later stages their shares
    return [("checkpoint", config)]


def data(args: MerakArguments, grid: Grid) -> list[Step | str]:
    """Methods that synchronise gradients, and shard states over data ranks.

    Raises:
        InputError: for a division of gradients in two where they are sharded as they are summed.
    """
    if grid.get_dim("data") == 1:
        return []
    method = _SHARDING[args.zero_stage]
    if method in ("zero2", "fsdp"):
        if args.prescale_gradients:
            raise InputError(
                f"prescale_gradients: {method} sums and divides gradients in one step. Use zero_stage=0 or "
                "zero_stage=1."
            )
        return [method]
    mib = args.zero_reduce_bucket_size * _BYTES_OF_FP32 / 2**20  # from elements
    config: dict[str, Any] = {"bucket_cap_mb": mib} if args.zero_reduce_bucket_size != _USUAL_BUCKET else {}
    if args.prescale_gradients:
        config |= {"reducer": "own", "predivide": args.gradient_predivide_factor}
    return [("ddp", config), *(["zero1"] if method == "zero1" else [])]


def notes_of(
    args: MerakArguments, grid: Grid, model: nn.Module | None = None, *, recomputes: bool = True
) -> list[str]:
    """Notes for the report on arguments that do less than in Merak, or something else."""
    notes = args.without_use()
    if recomputes and model is not None and not repeated_blocks(model):
        notes.append("nothing is recomputed: the model repeats no block.")
    method = _SHARDING[args.zero_stage] if grid.get_dim("data") > 1 else ""
    sizes = {args.zero_allgather_bucket_size, args.zero_reduce_bucket_size}
    if method in ("zero2", "fsdp") and sizes != {_USUAL_BUCKET}:
        notes.append(f"zero_*_bucket_size change nothing: {method} gathers and reduces block by block.")
    elif method and args.zero_allgather_bucket_size != _USUAL_BUCKET:
        notes.append(
            "zero_allgather_bucket_size changes nothing: ranks hold whole parameters, and zero1 sends each rank's part of the "
            "updated ones at once."
        )
    if args.shard_count is not None and args.split_method != "farthest_min_deps" and grid.get_dim("pipe") > 1:
        notes.append(f"shard_count changes nothing: it is for farthest_min_deps, not {args.split_method}.")
    if args.parallel_vocab and grid.get_dim("model") > 1 and model is not None and lists_for(model):
        notes.append("parallel_vocab changes nothing: the lists of set_tp_layer_lists say what is divided.")
    if args.tp_overlapping_level and args.sequence_parallel and grid.get_dim("model") > 1:
        notes.append(
            f"tp_overlapping_level={args.tp_overlapping_level} changes nothing: it overlaps all-reduces, of which "
            "sequence_parallel leaves none."
        )
    elif args.tp_overlapping_level > 1 and grid.get_dim("model") > 1:
        notes.append(
            f"tp_overlapping_level={args.tp_overlapping_level} is run as 1: higher levels rewrite the blocks of one model."
        )
    return notes
