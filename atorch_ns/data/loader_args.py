"""``dataloader_args``: checked as a whole, with all problems in one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch

from atorch_ns.data.samplers import distributed_position, nearest_sizes
from atorch_ns.errors import BatchSizeError, InputError
from atorch_ns.text import did_you_mean, with_article

_OURS: Final = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")
_PASSED: Final = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
KNOWN_KEYS: Final = _OURS + _PASSED


@final
@dataclass(frozen=True, kw_only=True)
class LoaderArgs:
    """Arguments of the loader, and the place of this rank in the global batch.

    Attributes:
        batch_size: the global batch size. None if a batch sampler decides, or without batching.
        num_ranks: number of data-parallel ranks that share a batch.
        rank: this rank's position among them.
        shuffle: whether the default sampler shuffles.
        sampler: the user's sampler.
        batch_sampler: the user's batch sampler.
        drop_last: whether the incomplete last batch is dropped.
        generator: the user's generator.
        passed: the other arguments, for torch's loader.
    """

    batch_size: int | None
    num_ranks: int
    rank: int
    shuffle: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Sequence[Any]] | None
    drop_last: bool
    generator: torch.Generator | None
    passed: Mapping[str, Any]

    @property
    def batch_size_per_rank(self) -> int | None:
        """Samples that this rank loads for one step."""
        return None if self.batch_size is None else self.batch_size // self.num_ranks


def read_loader_args(
    args: Mapping[str, Any] | None, *, is_stream: bool, has_sampler_cls: bool, rank: int, num_ranks: int
) -> LoaderArgs:
    """Checks the arguments for a map-style dataset, or for an iterable one (``is_stream``).

    Raises:
        BatchSizeError: if the only problem is a batch size that the ranks cannot share.
        InputError: for any other problem, or several. The message lists all of them.
    """
    if not isinstance(args or {}, Mapping):
        raise InputError(f"dataloader_args must be a dictionary; it is {with_article(args)}.")
    options = dict(args or {})
    position = (num_ranks, rank)
    size_problem = _batch_size_problem(options, num_ranks)
    problems = [
        *_unknown_keys(options),
        *_wrong_types(options),
        *_find_conflicts(options, has_sampler_cls=has_sampler_cls),
        *(_stream_problems(options, has_sampler_cls=has_sampler_cls) if is_stream else ()),
        *_position_problems(options, position),
        *_unbatched_problems(options, num_ranks),
    ]
    if size_problem and not problems:
        raise BatchSizeError(size_problem)
    problems += [size_problem] if size_problem else []
    if problems:
        raise InputError("\n".join(problems))
    batches_itself = options.get("batch_sampler") is not None
    return LoaderArgs(
        batch_size=None if batches_itself else options.get("batch_size", num_ranks),
        num_ranks=num_ranks,
        rank=rank,
        shuffle=bool(options.get("shuffle")),
        sampler=options.get("sampler"),
        batch_sampler=options.get("batch_sampler"),
        drop_last=bool(options.get("drop_last")),
        generator=options.get("generator"),
        passed={key: options[key] for key in _PASSED if key in options},
    )


def _unknown_keys(arguments: Mapping[str, Any]) -> list[str]:
    problems = []
    for key in arguments:
        if key == "dataset":
            problems.append(
                "dataloader_args['dataset']: the dataset is an argument of its own; leave it out."
            )
        elif key not in KNOWN_KEYS:
            hint = did_you_mean(str(key), KNOWN_KEYS, otherwise=f"Known are {', '.join(KNOWN_KEYS)}.")
            problems.append(f"dataloader_args[{key!r}]: torch's DataLoader has no such argument.{hint}")
    return problems


def _batch_size_problem(arguments: Mapping[str, Any], num_ranks: int) -> str | None:
    size: Any = arguments.get("batch_size")
    if not _is_size(size) or arguments.get("batch_sampler") is not None or size % num_ranks == 0:
        return None
    return (
        f"dataloader_args['batch_size']={size} is the global batch size, and {num_ranks} data-parallel "
        f"ranks cannot share it evenly. {nearest_sizes(size, num_ranks)}"
    )


def _wrong_types(arguments: Mapping[str, Any]) -> list[str]:
    problems = [
        f"dataloader_args[{key!r}]={arguments[key]!r} must be True or False."
        for key in ("shuffle", "drop_last")
        if not isinstance(arguments.get(key), (bool, type(None)))
    ]
    size = arguments.get("batch_size")
    if size is not None and not _is_size(size):
        problems.append(f"dataloader_args['batch_size']={size!r} must be a positive integer.")
    if not isinstance(arguments.get("generator"), (torch.Generator, type(None))):
        kind = with_article(arguments["generator"])
        problems.append(f"dataloader_args['generator'] must be a torch.Generator; it is {kind}.")
    for key in ("sampler", "batch_sampler"):
        value = arguments.get(key)
        if value is not None and not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
            problems.append(f"dataloader_args[{key!r}] must be iterable; it is {with_article(value)}.")
        elif hasattr(value, "__next__"):
            problems.append(
                f"dataloader_args[{key!r}] is an iterator, which is empty after one epoch: give a Sampler or a list."
            )
    return problems


def _find_conflicts(arguments: Mapping[str, Any], *, has_sampler_cls: bool) -> list[str]:
    problems = []
    if arguments.get("batch_sampler") is not None:
        clashes = [key for key in ("shuffle", "sampler", "drop_last") if _is_given(arguments, key)]
        if arguments.get("batch_size", 1) != 1:
            clashes.insert(0, "batch_size")
        if clashes:
            problems.append(
                f"dataloader_args: batch_sampler decides alone what a batch is; leave out {', '.join(clashes)}."
            )
    elif arguments.get("sampler") is not None and arguments.get("shuffle"):
        problems.append("dataloader_args: a sampler gives the order; leave out shuffle, or the sampler.")
    if has_sampler_cls:
        problems += [
            f"distributed_sampler_cls and dataloader_args[{key!r}] both give the order; leave out one of them."
            for key in ("sampler", "batch_sampler")
            if arguments.get(key) is not None
        ]
    return problems


def _stream_problems(arguments: Mapping[str, Any], *, has_sampler_cls: bool) -> list[str]:
    names = [
        f"dataloader_args[{key!r}]"
        for key in ("shuffle", "sampler", "batch_sampler")
        if _is_given(arguments, key)
    ]
    names += ["distributed_sampler_cls"] if has_sampler_cls else []
    reason = "cannot be used with an iterable dataset, which gives its own order; shuffle inside the dataset."
    return [f"{name} {reason}" for name in names]


def _position_problems(arguments: Mapping[str, Any], mine: tuple[int, int]) -> list[str]:
    problems = []
    for key in ("sampler", "batch_sampler"):
        position = distributed_position(arguments.get(key))
        if position is not None and position != mine:
            problems.append(
                f"dataloader_args[{key!r}] is a distributed sampler with (num_replicas, rank)={position}, but the "
                f"data-parallel position of this process is {mine}. Make it with those, or leave it out."
            )
    return problems


def _unbatched_problems(arguments: Mapping[str, Any], num_ranks: int) -> list[str]:
    if arguments.get("batch_size", 1) is not None or arguments.get("batch_sampler") is not None:
        return []
    problems = []
    if num_ranks > 1:
        problems.append(
            f"dataloader_args['batch_size']=None turns batching off, so there is no global batch that {num_ranks} "
            "data-parallel ranks could share. Give a batch_size, or a batch_sampler."
        )
    if arguments.get("drop_last"):
        problems.append("dataloader_args: batch_size=None turns batching off; leave out drop_last.")
    return problems


def _is_given(arguments: Mapping[str, Any], key: str) -> bool:
    return arguments.get(key) is not None and arguments[key] is not False


def _is_size(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) > 0
