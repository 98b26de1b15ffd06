"""A recipe in one process and under strategies: equal, refused in words, or wrong."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.errors import AtorchError
from atorch_ns.testing.rank_pool import Outcome
from atorch_ns.testing.workers import catch_ranks
from tests.loops.loops import BATCH, EVENTS, LOSSES, OPTIMIZERS, STEPS, Training, X, num_counted
from tests.loops.models import build
from tests.loops.recipes import Recipe

log = logging.getLogger("atorch_ns")

STRATEGIES: Final[Mapping[str, list[Any]]] = {
    "ddp": ["ddp"],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "tensor": [("parallel_mode", ([("tensor", 2)], None))],
    "pipeline": [
        ("parallel_mode", ([("pipeline", 2)], None)),
        ("pipeline_parallel", {"num_micro_batches": 2}),
    ],
    "ddp, micro-batches": ["ddp", ("gradient_accumulation", 2)],
    "fsdp, micro-batches": ["fsdp", ("gradient_accumulation", 2)],
}
_COMPILE: Final = ("compile", "aot_eager")
OF_FOUR: Final[Mapping[str, list[Any]]] = {
    "tensor, fsdp": [("parallel_mode", ([("tensor", 2), ("zero", 2)], None)), "fsdp"],
    "tensor, ddp": [("parallel_mode", ([("tensor", 2), ("data", 2)], None))],
    "tensor, zero1": [("parallel_mode", ([("tensor", 2), ("zero", 2)], None)), "zero1"],
    "compile, tensor, zero1": [("parallel_mode", ([("tensor", 2), ("zero", 2)], None)), "zero1", _COMPILE],
    "tensor, zero2": [("parallel_mode", ([("tensor", 2), ("zero", 2)], None)), "zero2"],
    "hybrid fsdp": [("parallel_mode", ([("data", 2), ("zero", 2)], None)), "fsdp"],
    "pipeline, fsdp": [
        ("parallel_mode", ([("pipeline", 2), ("zero", 2)], None)),
        "fsdp",
        ("pipeline_parallel", {"num_micro_batches": 2}),
    ],
    "pipeline, ddp": [
        ("parallel_mode", ([("pipeline", 2), ("data", 2)], None)),
        ("pipeline_parallel", {"num_micro_batches": 2}),
    ],
}
"""Strategies on four ranks, which take three times as long."""
COMPILED: Final[Mapping[str, list[Any]]] = {
    "compile, ddp": ["ddp", _COMPILE],
    "compile, zero1": ["zero1", _COMPILE],
    "compile, zero2": ["zero2", _COMPILE],
    "compile, fsdp": ["fsdp", _COMPILE],
    "compile, tensor": [*STRATEGIES["tensor"], _COMPILE],
    "compile, pipeline": [*STRATEGIES["pipeline"], _COMPILE],
}
"""Strategies whose blocks are compiled, on two ranks."""
NEAR: Final = 1e-7
"""Above rounding in float64, after Adam's root of a gradient of nearly zero, and below what fp32 would round."""
_DIFFERS: Final = ("step updates no gathered parameter", "gradient hooks are called once for all")
"""What is said where training goes on otherwise than in one process."""
_SECONDS: Final = 60.0
"""A strategy takes a second; on a busy machine ten times as long."""


@dataclass(frozen=True)
class Verdict:
    """What became of a recipe under a strategy.

    Attributes:
        kind: "equal"; "refused" in words on all ranks; "told": trained otherwise and said so on all ranks; "wrong":
            trained otherwise and said nothing; "raw": an error of torch or of Python, or ranks that ended otherwise;
            "hung".
        text: the largest difference, or what was said.
    """

    kind: str
    text: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether a user knows what he has."""
        return self.kind in ("equal", "refused", "told")


_LARGEST = 1e3
"""Weights begin below 1: training that has come here diverges, and multiplies each rounding error."""


class NoLoop(Exception):
    """What one process cannot train is not a loop."""


def reference(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Weights and buffers after the loop in one process with the global batches."""
    optimizer, options = OPTIMIZERS[recipe.optimizer]
    model = build(recipe.blocks, recipe.changes)
    training = Training(model, optimizer(model.parameters(), **options), LOSSES[recipe.loss])
    _run(recipe, training, X.split(BATCH))
    return model.state_dict()


def judge(recipe: Recipe, strategies: Sequence[str] = tuple(STRATEGIES)) -> dict[str, Verdict]:
    """Trains by the recipe under each strategy on its ranks, two or four.

    Raises:
        NoLoop: if one process cannot train by it.
    """
    try:
        expected = reference(recipe)
    except Exception as error:
        raise NoLoop(f"{type(error).__name__}: {error}") from error
    largest = max(float(value.abs().max()) for value in expected.values() if value.numel())
    if not largest < _LARGEST:
        raise NoLoop(f"it diverges: a weight has become {largest:.1e}, and rounding grows with it")
    found: dict[str, Verdict] = {}
    for names in ([s for s in strategies if s not in OF_FOUR], [s for s in strategies if s in OF_FOUR]):
        found |= _judged(recipe, names, expected) if names else {}
    return found


def _judged(
    recipe: Recipe, strategies: Sequence[str], expected: Mapping[str, torch.Tensor]
) -> dict[str, Verdict]:
    outcomes = _on_ranks(recipe, strategies)
    if all(outcome.status == "returned" for outcome in outcomes):
        found = {name: _of([outcome.value[name] for outcome in outcomes], expected) for name in strategies}
        if all(verdict.is_fine for verdict in found.values()):
            return found
    # A failure may be of a strategy before: each by itself.
    return {name: _alone(recipe, name, expected) for name in strategies}


def _on_ranks(recipe: Recipe, strategies: Sequence[str]) -> list[Outcome[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return catch_ranks(
            _attempts,
            4 if strategies[0] in OF_FOUR else 2,
            args=(recipe, strategies, folder),
            timeout_s=_SECONDS * len(strategies),
            init_process_group=False,
        )


def _alone(recipe: Recipe, strategy: str, expected: Mapping[str, torch.Tensor]) -> Verdict:
    outcomes = _on_ranks(recipe, [strategy])
    if all(outcome.status == "returned" for outcome in outcomes):
        return _of([outcome.value[strategy] for outcome in outcomes], expected)
    if any(outcome.status == "timed_out" for outcome in outcomes):
        return Verdict("hung", "\n".join(outcome.describe() for outcome in outcomes))
    # The watch of places ends a process that waits in a collective, and prints why.
    if all("atorch_ns:" in outcome.output for outcome in outcomes if outcome.status == "died"):
        return Verdict("refused", outcomes[0].output or outcomes[1].output)
    return Verdict("raw", "\n".join(outcome.describe() for outcome in outcomes))


def _attempts(recipe: Recipe, strategies: Sequence[str], folder: str) -> dict[str, tuple[str, Any]]:
    """On a rank: how each strategy ended, and its weights on rank 0 or its error."""
    gc.freeze()  # what is imported lives on: each check collects garbage, which would look through all of it
    return {name: _attempt(recipe, name, Path(folder) / str(n)) for n, name in enumerate(strategies)}


def _attempt(recipe: Recipe, strategy: str, meeting: Path) -> tuple[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(meeting), world_size)
    limit = timedelta(seconds=_SECONDS / 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        weights = _trained(recipe, {**STRATEGIES, **OF_FOUR, **COMPILED}[strategy])
        return "trained", (weights, said)
    except AtorchError as error:
        return "refused", str(error)
    except Exception:
        return "raw", traceback.format_exc()
    finally:
        log.removeHandler(handler)
        dist.destroy_process_group()


def _trained(recipe: Recipe, strategy: list[Any]) -> dict[str, torch.Tensor]:
    optimizer, options = OPTIMIZERS[recipe.optimizer]
    _, result, _ = auto_accelerate(
        build(recipe.blocks, recipe.changes),
        optimizer,
        X,
        LOSSES[recipe.loss],
        optim_args=options,
        dataloader_args={"batch_size": BATCH, "shuffle": False},
        load_strategy=strategy,
        **({"weight_func": num_counted} if recipe.loss == "counted" else {}),
    )
    assert result is not None
    training = Training(result.model, result.optim, LOSSES[recipe.loss], result)
    _run(recipe, training, result.dataloader)
    return checkpoint.export_state_dict(result)


def _run(recipe: Recipe, training: Training, batches: Any) -> None:
    step = STEPS[recipe.step]
    for number, batch in enumerate(batches):
        for when, event in recipe.events:
            if when == number:
                EVENTS[event](training)
        step(training, batch)


def _of(found: Sequence[tuple[str, Any]], expected: Mapping[str, torch.Tensor]) -> Verdict:
    """The verdict on what the ranks report."""
    kinds = [kind for kind, _ in found]
    if set(kinds) == {"trained"}:
        weights, said = found[0][1]
        is_told = all(any(text in line for text in _DIFFERS for line in said) for _, (_, said) in found)
        missing = [name for name in expected if name not in weights]
        if missing:
            return Verdict("wrong", f"{', '.join(missing)} not in {sorted(weights)}")
        off = max(
            (float((weights[n] - value).abs().max()), n) for n, value in expected.items() if value.numel()
        )
        kind = "equal" if off[0] <= NEAR else "told" if is_told else "wrong"
        return Verdict(kind, f"{off[1]} off by {off[0]:.1e}; {said}")
    text = "\n".join(str(each) for kind, each in found if kind != "trained")
    if "no longer answers" in text:  # a rank has waited for another that was told earlier
        return Verdict("hung", text)
    return Verdict("refused" if set(kinds) == {"refused"} else "raw", f"{kinds}: {text}")
