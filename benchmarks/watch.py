"""Watch: the share of training that comparing ranks takes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from atorch_ns import auto_accelerate
from atorch_ns.job.agreement import OutsideWeights, SameBatch, SameWeights
from atorch_ns.job.loss import LossCheck, RowCheck
from atorch_ns.job.same_place import SamePlace
from benchmarks._by_hand import OPTIM_ARGS
from benchmarks._llama import SMALL, TINY, Llama, next_token_loss, random_batch
from benchmarks._ranks import on_ranks
from benchmarks._results import Column, Findings

__all__ = ["TARGET", "run"]

TARGET = 1.002
"""The largest ratio of a step with the watch to one without."""

_STRATEGIES: Mapping[str, list[Any]] = {"DDP": ["ddp"], "ZeRO-1": ["zero1"], "FSDP2": ["fsdp"]}
_NUM_RANKS = 2
_NUM_TOKENS = 128
_OF_A_RUN = 1000
"""Updates over which comparisons are spread; a longer run has fewer."""
_COMPARISONS = 8
"""Among them: after the updates 1, 2, 3, 10, 30, 100, 300 and 1000."""

_WATCHED: Mapping[type, tuple[str, ...]] = {
    SameWeights: ("_note_gradient", "_note_gradients", "_after_update", "note_batch"),
    OutsideWeights: ("_check_update",),
    SamePlace: ("_add_call", "_before_forward", "_after_update", "_before_gathering"),
    SameBatch: ("check",),
    RowCheck: ("look",),
    LossCheck: ("_test_law",),
}
"""What compares ranks or looks at their calls, in every step or in some."""

_TEXT = """
The share of a training step (`result.train_step`) that what compares the ranks takes: their weights, batches and places in
the loop, and whether the loss is a mean. The functions of it are timed in the step, since a share of a thousandth is below
the noise of whole steps. What calls them, a hook of torch's each, is not in it.

- *in each step*: median over the steps without a comparison.
- *a comparison*: mean of what the steps with one spend beyond that.
- *of 1000 updates*: a step with both over a step without, where comparisons follow 8 of 1000 updates, as in a run of
  that length; later 1 of 1000 is compared.
- *within {target}*: that ratio is at most {target}.
"""

_COLUMNS = (
    Column(title="features", key="strategy"),
    Column(title="processes", key="num_ranks"),
    Column(title="ms of a step", key="step_ms", digits=0),
    Column(title="in each step, ms", key="each_ms"),
    Column(title="a comparison, ms", key="comparison_ms", digits=1),
    Column(title="of 1000 updates", key="ratio", digits=4),
    Column(title="within", key="holds"),
)


class _Step(NamedTuple):
    seconds: float
    watch_s: float


class _Clock:
    """Seconds inside of functions that may call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return timed


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every strategy.

    Args:
        quick: a tiny model and few steps, to see that it works; the numbers mean little.
        report: told what is being done.
    """
    model, num_steps = (TINY, 12) if quick else (SMALL, 110)
    rows = []
    for name, strategy in _STRATEGIES.items():
        report(f"watch: {name}")
        ranks = on_ranks(_measure_steps, _NUM_RANKS, strategy, model, num_steps)
        rows.append({"strategy": name, "num_ranks": _NUM_RANKS, **_worst_rank(ranks)})
    return Findings(
        name="watch",
        title="Cost of comparing ranks while they train",
        text=_TEXT.format(target=TARGET),
        columns=_COLUMNS,
        rows=rows,
        settings={
            "model": model.describe(),
            "batch": f"2 samples of {_NUM_TOKENS} tokens a process",
            "steps": num_steps,
        },
    )


def _worst_rank(ranks: list[list[_Step]]) -> dict[str, Any]:
    """The rank whose watch takes most."""
    return max((_summarise_steps(steps) for steps in ranks), key=lambda row: float(row["ratio"]))


def _summarise_steps(steps: list[_Step]) -> dict[str, Any]:
    compared = {number for number in (1, 2, 3, 10, 30, 100) if number <= len(steps)}
    plain = [step for number, step in enumerate(steps, 1) if number > 3 and number not in compared]
    step_s = statistics.median(step.seconds - step.watch_s for step in plain)
    each_s = statistics.median(step.watch_s for step in plain)
    comparison_s = statistics.mean(steps[number - 1].watch_s for number in compared) - each_s
    ratio = 1 + (each_s + comparison_s * _COMPARISONS / _OF_A_RUN) / step_s
    return {
        "step_ms": 1e3 * step_s,
        "each_ms": 1e3 * each_s,
        "comparison_ms": 1e3 * comparison_s,
        "ratio": ratio,
        "holds": ratio <= TARGET,
    }


@contextmanager
def _time_watch() -> Iterator[_Clock]:
    """Times the functions of the watch, of jobs that are made inside."""
    clock = _Clock()
    kept = [(kind, name, getattr(kind, name)) for kind, names in _WATCHED.items() for name in names]
    for kind, name, function in kept:
        setattr(kind, name, clock.around(function))
    try:
        yield clock
    finally:
        for kind, name, function in kept:
            setattr(kind, name, function)


def _measure_steps(strategy: list[Any], model: Llama, num_steps: int) -> list[_Step]:
    """On one rank."""
    batch = random_batch(model, 2, _NUM_TOKENS, seed=torch.distributed.get_rank())
    with _time_watch() as clock:
        _, result, _ = auto_accelerate(
            model.build(),
            torch.optim.AdamW,
            loss_func=next_token_loss,
            model_input_format="unpack_dict",
            optim_args=OPTIM_ARGS,
            load_strategy=strategy,
        )
        assert result is not None
        steps = []
        for _ in range(num_steps):
            began, before = time.perf_counter(), clock.seconds
            result.train_step(batch)
            steps.append(_Step(time.perf_counter() - began, clock.seconds - before))
    return steps
