"""Speed of tensor, operator and pipeline parallelism against the same plan written by hand, or made by layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atorch_ns import auto_accelerate
from benchmarks._by_hand import OPTIM_ARGS
from benchmarks._llama import SMALL, TINY, Llama, next_token_loss, random_batch
from benchmarks._model_axes_by_hand import pipeline_step, tensor_step
from benchmarks._pairs import Block, Pair, combine, measure, ratios, spread_of
from benchmarks._ranks import barrier, on_ranks
from benchmarks._results import Column, Findings, Spread

__all__ = ["MICRO_BATCHES", "TARGET", "Plan", "batch_text", "compared", "run"]

TARGET = 1.03
"""The largest ratio of a step to the same step by hand."""

OPERATORS_TARGET = 1.05
"""The same of operators that are divided as `tensor_parallel` divides layers."""

_NUM_TOKENS = 128
_BATCH_SIZE = 8
MICRO_BATCHES = 4
_WARM_UP = 3
_PAIRS: tuple[Pair, ...] = (("ours", "by hand"), ("by hand again", "by hand"))
_TEXT = """
The time of one training step (forward, backward, AdamW) of `result.train_step`, over that of the same plan written by
hand: `parallelize_module` with torch's column and row styles, or stages cut by hand under `Schedule1F1B`. All of them
live in the same processes; steps run in turns, a b, b a, …; every ratio is of two neighbouring steps. *control*: a
second model made by hand against the first. *operators* are divided by `operator_parallel`, by the plan of Megatron in a
block; there `tensor_parallel` with the same plan stands for by hand.

- *cpu*: processor time of all ranks. *wall*: the slowest rank's elapsed time. Both are the median of the ratios with
  its 95 % confidence interval. Ranks that wait for each other burn processor time here, so that of the pipeline says
  little; look at its wall ratio.
- *within*: the median of the wall ratios is at most {target}, for operators {operators}.
"""
_COLUMNS = (
    Column(title="plan", key="plan"),
    Column(title="processes", key="num_ranks"),
    Column(title="step", key="step"),
    Column(title="wall ratio", key="wall_ratio", confidence=True),
    Column(title="cpu ratio", key="cpu_ratio", confidence=True),
    Column(title="pairs", key="pairs"),
    Column(title="within", key="holds"),
    Column(title="ms by hand, wall (p25..p75)", key="wall_ms_by_hand", digits=0),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy, and its counterpart by hand."""

    name: str
    axis: str
    method: str
    options: Mapping[str, Any]
    by_hand: Callable[[Llama, dict[str, torch.Tensor]], Callable[[], object]]
    target: float = TARGET

    def strategy(self, num_ranks: int) -> list[Any]:
        """As `load_strategy`."""
        return [("parallel_mode", ([(self.axis, num_ranks)], None)), (self.method, dict(self.options))]


def _megatron() -> dict[str, Any]:
    """The operator plan by which a block of Llama is divided as Megatron divides it."""
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    columns = [f"{attention}.{name}_proj" for name in "qkv"] + [
        f"{mlp}.{name}_proj" for name in ("gate", "up")
    ]
    rows = [f"{attention}.o_proj", f"{mlp}.down_proj"]
    by_heads = {
        "view": ("2 <- 2", 3),
        "transpose": ("1 <- 2", 3),
        "mul": ("1 <- 1,R", 4),
        "slice": ("1 <- 1", 4),
        "neg": ("1 <- 1", 2),
        "cat": ("1 <- 1,1", 2),
        "add": ("1 <- 1,1", 2),
        "scaled_dot_product_attention": ("1 <- 1,1,1,R", 1),
        "reshape": ("1 <- 1", 1),
    }
    return {
        "schema": 1,
        "operators": {
            **{f"{path}/linear#0": "2 <- R,0" for path in columns},
            **{f"{path}/linear#0": "P <- 2,1" for path in rows},
            **{f"{attention}/{name}#{k}": rule for name, (rule, n) in by_heads.items() for k in range(n)},
            f"{attention}/transpose#3": "2 <- 1",
            f"{attention}/reshape#1": "2 <- 2",
            f"{mlp}.act_fn/silu#0": "2 <- 2",
            f"{mlp}/mul#0": "2 <- 2,2",
        },
        "parameters": {f"{path}.weight": "0" for path in columns} | {f"{path}.weight": "1" for path in rows},
    }


_STYLES = {
    entry.removesuffix("/linear#0"): "rowwise" if rule.startswith("P") else "colwise"
    for entry, rule in _megatron()["operators"].items()
    if entry.endswith("/linear#0")
}


_BY_LAYERS = Plan(
    name="layers", axis="tensor", method="tensor_parallel", options={"plan": _STYLES}, by_hand=tensor_step
)
_PLANS = (
    Plan(name="tensor", axis="tensor", method="tensor_parallel", options={}, by_hand=tensor_step),
    Plan(
        name="operators",
        axis="tensor",
        method="operator_parallel",
        options={"plan": _megatron()},
        by_hand=lambda model, batch: _ours(_BY_LAYERS, model, batch),
        target=OPERATORS_TARGET,
    ),
    Plan(
        name="pipeline, 1F1B",
        axis="pipeline",
        method="pipeline_parallel",
        options={"schedule": "1F1B", "num_micro_batches": MICRO_BATCHES, "split_method": "uniform"},
        by_hand=lambda model, batch: pipeline_step(model, batch, MICRO_BATCHES),
    ),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every plan on two processes.

    Args:
        quick: a tiny model and few pairs, to see that it works; the numbers mean little.
        report: told what is being done.
    """
    model, launches, rounds = (TINY, 2, 2) if quick else (SMALL, 6, 8)
    torch.optim.AdamW(model.build("meta").parameters())  # imports here, once, what every rank would
    rows = []
    for plan in _PLANS:
        rows += compared(plan, model, launches, rounds, lambda text: report(f"model_axes: {text}"))
    return Findings(
        name="model_axes",
        title="Speed of a training step with a divided model",
        text=_TEXT.format(target=TARGET, operators=OPERATORS_TARGET),
        columns=_COLUMNS,
        rows=rows,
        settings={"model": model.describe(), "batch": batch_text(), "starts": launches},
    )


def batch_text() -> str:
    """The batch in words."""
    return f"{_BATCH_SIZE} samples of {_NUM_TOKENS} tokens; {MICRO_BATCHES} micro-batches in pipelines"


def compared(
    plan: Plan, model: Llama, launches: int, rounds: int, report: Callable[[str], object]
) -> list[dict[str, Any]]:
    """The rows of a plan, of two processes that are started ``launches`` times."""
    blocks: list[Block] = []
    for launch in range(launches):
        report(f"{plan.name}, {launch + 1} of {launches}")
        blocks += combine(on_ranks(_measure, 2, plan, model, rounds, launch))
    return _rows(plan, blocks)


def _measure(plan: Plan, model: Llama, rounds: int, launch: int) -> list[Block]:
    """On one rank; the number of the launch decides which model is built first."""
    batch = random_batch(model, _BATCH_SIZE, _NUM_TOKENS, seed=0)
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "by hand": lambda: plan.by_hand(model, batch),
        "ours": lambda: _ours(plan, model, batch),
        "by hand again": lambda: plan.by_hand(model, batch),
    }
    names = list(makers)
    first = launch % len(names)
    sides = {name: makers[name]() for name in (*names[first:], *names[:first])}
    for step in sides.values():
        for _ in range(_WARM_UP):
            step()
    return measure(sides, _PAIRS, rounds=rounds, calls=1, barrier=barrier)


def _ours(plan: Plan, model: Llama, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    _, result, _ = auto_accelerate(
        model.build(),
        torch.optim.AdamW,
        loss_func=next_token_loss,
        model_input_format="unpack_dict",
        optim_args=OPTIM_ARGS,
        sample_batch=batch,
        load_strategy=plan.strategy(torch.distributed.get_world_size()),
    )
    assert result is not None
    return lambda: result.train_step(batch)


def _rows(plan: Plan, blocks: list[Block]) -> list[dict[str, Any]]:
    by_hand = spread_of(blocks, "by hand", lambda block: block.wall_s, scale=1000)
    rows = []
    for pair in _PAIRS:
        wall = Spread.of(ratios(blocks, pair, lambda block: block.wall_s))
        rows.append(
            {
                "plan": plan.name,
                "num_ranks": 2,
                "step": "train_step" if pair[0] == "ours" else "control: by hand",
                "pairs": wall.n,
                "cpu_ratio": Spread.of(ratios(blocks, pair, lambda block: block.cpu_s)),
                "wall_ratio": wall,
                "asked": plan.target,
                "holds": wall.median <= plan.target,
                "wall_ms_by_hand": by_hand,
            }
        )
    return rows
