"""Strategies from the files of other systems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

from atorch_ns.errors import InputError, StrategyFileError
from atorch_ns.strategy.convert.accelerate import convert_accelerate
from atorch_ns.strategy.convert.atorch_pickle import convert_pickle
from atorch_ns.strategy.convert.base import Conversion, Remark, parse_document, read_bytes
from atorch_ns.strategy.convert.deepspeed import convert_deepspeed
from atorch_ns.strategy.strategy import Strategy
from atorch_ns.text import with_article

_CONVERTERS: Final[Mapping[str, Callable[..., Conversion]]] = {
    "accelerate": convert_accelerate,
    "deepspeed": convert_deepspeed,
}
_SIGNS: Final = {  # keys by which a file is known
    "accelerate": {
        *("compute_environment", "distributed_type", "mixed_precision", "fsdp_config", "num_machines")
    },
    "deepspeed": {
        *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16"),
        *("gradient_clipping", "zero_allow_untested_optimizer"),
    },
}


def convert_file(
    path: str | PathLike[str], *, source: str = "auto", classes: Collection[str] = ()
) -> Conversion:
    """Reads a strategy that another system wrote. Nothing in the file is run.

    Args:
        path: a pickle or list of ATorch, a YAML file of Accelerate, or a JSON file of DeepSpeed.
        source: ``"atorch"``, ``"accelerate"``, ``"deepspeed"``, or ``"auto"`` to know it by its keys.
        classes: for pickles: see :func:`~atorch_ns.strategy.convert_pickle`.

    Raises:
        InputError: if ``source`` is none of these.
        StrategyFileError: if the file cannot be read, or is not of that system.
    """
    file_path = Path(path)
    if source not in ("auto", "atorch", *_CONVERTERS):
        raise InputError(f"--from={source!r} is not known. Use auto, atorch, accelerate or deepspeed.")
    content = read_bytes(file_path)
    if content[:1] == b"\x80":  # pickles of protocol 2 and later begin so
        if source not in ("auto", "atorch"):
            raise StrategyFileError(
                "this is a pickle, which only ATorch wrote; use --from atorch", source=str(file_path)
            )
        return _as_it_is(convert_pickle(file_path, classes=classes))
    document = parse_document(content, str(file_path))
    system = _system_of(document, str(file_path)) if source == "auto" else source
    if system == "atorch":
        return _as_it_is(Strategy.load(file_path))
    if not isinstance(document, Mapping):
        raise StrategyFileError(
            f"a {system} config must be a mapping; this holds {with_article(document)}", source=str(file_path)
        )
    return _CONVERTERS[system](document, name=str(file_path))


def _as_it_is(strategy: Strategy) -> Conversion:
    remarks = tuple(Remark(step.name, "as it is") for step in strategy)
    return Conversion(strategy=strategy, source="atorch", carried=remarks)


def _system_of(document: Any, name: str) -> str:
    if isinstance(document, list) or (isinstance(document, Mapping) and {"steps", "schema"} & set(document)):
        return "atorch"
    keys = set(document) if isinstance(document, Mapping) else set()
    # The system with most known keys; a tie tells nothing.
    counts = {system: len(keys & signs) for system, signs in _SIGNS.items()}
    best = max(counts, key=counts.__getitem__)
    if not counts[best] or list(counts.values()).count(counts[best]) > 1:  # none, or a tie
        raise StrategyFileError(
            "it is not clear whose file this is. Name the tool: --from atorch, accelerate or deepspeed",
            source=name,
        )
    return best
