"""Which models train under which strategies, and equally to one process?

Every row is a model under a strategy, in processes of its own with a time limit, compared with plain torch in one process
on the same global batches. A sweep that is killed goes on where it was: rows are kept in a file as they come.
"""

from __future__ import annotations

import fnmatch
import gc
import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from atorch_ns.method import load_registry
from benchmarks._models.entry import Entry
from benchmarks._models.row import GLOBAL_BATCH, STEPS, STRATEGIES
from benchmarks._models.sweep import Rows, sweep
from benchmarks._results import Column, Findings

__all__ = ["ROWS", "run", "selection"]

ROWS: Final = Path(__file__).parents[1] / "build" / "benchmarks" / "models.jsonl"
"""Rows as they come. Without it the sweep begins anew."""
SOURCES: Final = ("transformers", "timm", "torchvision", "by hand")
_TIMEOUT_S: Final = 60.0
_WORKERS: Final = 2
_QUICK: Final = ("transformers/llama", "transformers/bert", "by hand/mlp")

# What ranks would import one by one.
_WARM: Final = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "atorch_ns.api",
    "atorch_ns.engine.find",
    "atorch_ns.numerics",
)

_TEXT = f"""
Every model has the flags that its users have and tiny sizes, and is trained for {STEPS} steps of AdamW on {GLOBAL_BATCH} samples a
step, in fp32, on two or four processes (gloo) and in one process with plain torch. Only two things are changed: dropout is
off, since processes draw other masks than one does, so that no two such runs can be compared; and models with batch norms have
`sync_batchnorm` where a method offers it. Statistics are never shared over the micro-batches of a pipeline: with batch norms it is
compared with one process that has the same micro-batches, as every model is whose loss is not a mean over samples.

- *equal*: every loss and every parameter is that of one process (2e-4 of a parameter's update, or ten times what one rounding of
  the weights at the start changes), and all ranks end with the same bits. What is not equal so in fp32 is run again in fp64, and
  judged there.
- *refused*: our own error, with its reason, on every rank.
- *wrong*, *hung* (at the limit of {_TIMEOUT_S:.0f} s, more on a busy machine), *raw error* (an error of torch or of the model's code): none is wanted.

Models that do not train in one process, or of which two runs in one process differ, are listed with the reason and count nowhere.
"""


def run(*, quick: bool, report: Callable[[str], object], rows: str = "") -> Findings:
    """Runs the rows that are missing; with ``rows``, those that it selects, whether they are there or not.

    Args:
        quick: three models, from the beginning.
        report: told about every model.
        rows: patterns, separated by commas: an outcome such as ``wrong``, or ``MODEL:STRATEGY`` with wildcards, such as
            ``transformers/t5:tensor*``.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    kept = Rows(ROWS.with_name("models.quick.jsonl") if quick else ROWS)
    if quick:
        kept.path.unlink(missing_ok=True)
    there = kept.read()
    selected = selection(rows, there)
    entries, absent = _entries()
    if quick:
        entries = [entry for entry in entries if entry.key in _QUICK]
    _warm_up()
    sweep(
        entries,
        kept,
        again=bool(rows),
        chosen=selected,
        report=report,
        workers=_WORKERS,
        timeout_s=_TIMEOUT_S,
    )
    return _findings(kept.read(), [entry.key for entry in entries], absent)


def _entries() -> tuple[list[Entry], dict[str, str]]:
    """All models, and the packages that are not here with the reason."""
    from benchmarks._models import by_hand, from_timm, from_torchvision, from_transformers
    from benchmarks._models.vision_packages import prepare

    reason = prepare()  # before transformers asks what is installed
    modules: list[Any] = (
        [from_transformers, by_hand] if reason else [from_transformers, from_timm, from_torchvision, by_hand]
    )
    absent = {"timm": reason, "torchvision": reason} if reason else {}
    return [entry for module in modules for entry in module.entries()], absent


def _warm_up() -> None:
    for name in _WARM:
        importlib.import_module(name)
    load_registry()
    gc.collect()
    gc.freeze()


def selection(text: str, there: Mapping[tuple[str, str], Mapping[str, Any]]) -> Callable[[str, str], bool]:
    """``(model, strategy)`` to whether a text of patterns, as of :func:`run`, selects the row, given those that are there."""
    patterns = [part.strip() for part in text.split(",") if part.strip()]
    if not patterns:
        return lambda model, strategy: True

    def selected(model: str, strategy: str) -> bool:
        outcome = there.get((model, strategy), there.get((model, ""), {})).get("is", "")
        for pattern in patterns:
            first, _, second = pattern.partition(":")
            if pattern == outcome or (
                fnmatch.fnmatch(model, first) and fnmatch.fnmatch(strategy, second or "*")
            ):
                return True
        return False

    return selected


def _findings(
    rows: Mapping[tuple[str, str], Mapping[str, Any]], order: Sequence[str], absent: Mapping[str, str]
) -> Findings:
    models = [model for model in order if any(key[0] == model for key in rows)]
    outcomes = Counter(row["is"] for key, row in rows.items() if key[0] in set(models) and key[1])
    return Findings(
        name="models",
        title="Models under strategies",
        text=_TEXT,
        columns=(
            Column(title="model", key="model"),
            Column(title="kind", key="kind"),
            *(Column(title=strategy.name, key=strategy.name) for strategy in STRATEGIES),
        ),
        rows=[_model_row(model, rows) for model in models],
        settings={
            "strategies": [strategy.name for strategy in STRATEGIES],
            "steps": STEPS,
            "global batch": GLOBAL_BATCH,
            "rows": dict(outcomes),
            **({"absent": dict(absent)} if absent else {}),
        },
    )


def _model_row(model: str, rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Any]:
    """One model: its outcomes by strategy, with reasons and planning times in a mapping that the table leaves out."""
    own = {strategy: row for (name, strategy), row in rows.items() if name == model}
    first = next(iter(own.values()))
    found: dict[str, Any] = {
        "model": model,
        **{key: first[key] for key in ("kind", "class", "parameters") if key in first},
    }
    if "" in own and own[""]["is"] == "unfit":
        return {**found, "unfit": own[""]["reason"]}
    found |= {strategy.name: own[strategy.name]["is"] for strategy in STRATEGIES if strategy.name in own}
    found["reasons"] = {name: row["reason"] for name, row in own.items() if "reason" in row}
    found["plan_s"] = {name: row["plan_s"] for name, row in own.items() if "plan_s" in row}
    found["tensor_plan_s"] = own.get("tensor 2", {}).get("tensor_plan_s")
    return found
