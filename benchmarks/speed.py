"""Speed: a training step of an accelerated model against the same features of torch called by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from atorch_ns import Result, auto_accelerate
from benchmarks._by_hand import CPU, OPTIM_ARGS, SCENARIOS, Scenario, step_by_hand
from benchmarks._llama import SMALL, TINY, Llama, next_token_loss, random_batch
from benchmarks._pairs import Block, Pair, combine, measure, ratios, spread_of
from benchmarks._ranks import barrier, on_ranks
from benchmarks._results import Column, Findings, Spread

__all__ = ["TARGET", "run"]

TARGET = 1.02
"""The largest ratio of a step to the same step by hand."""

_NUM_TOKENS = 128
_WARM_UP = 3
_PAIRS: Mapping[Pair, str] = {
    ("plain loop", "by hand"): "plain loop",
    ("train_step", "by hand"): "train_step",
    ("by hand again", "by hand"): "control: by hand",
}

_TEXT = """
The time of one training step (forward, backward, AdamW) of a model from `auto_accelerate`, over that of the same
features of torch called by hand with the same settings. Both models live in the same processes; steps run in turns,
a b, b a, …; every ratio is of two neighbouring steps. The processes are started anew several times, with the models
built in another order each time, since a model's place in memory alone makes a step a per cent faster or slower.

- *plain loop*: the user's own loop over `result.model`, `loss_func` and `optim`; *train_step*: `result.train_step`,
  which also averages the loss over the ranks; *control*: a second model made by hand against the first, which
  shows what noise and the place in memory amount to.
- *cpu*: processor time of all ranks; it does not see other programs on the machine. *wall*: the slowest rank's
  elapsed time. Both are the median of the ratios with its 95 % confidence interval.
- *within {target}*: the median of the cpu ratios is at most {target}.
"""

_COLUMNS = (
    Column(title="features", key="scenario"),
    Column(title="processes", key="num_ranks"),
    Column(title="step", key="step"),
    Column(title="cpu ratio", key="cpu_ratio", confidence=True),
    Column(title="wall ratio", key="wall_ratio", confidence=True),
    Column(title="pairs", key="pairs"),
    Column(title="within", key="holds"),
    Column(title="ms by hand, wall (p25..p75)", key="wall_ms_by_hand", digits=0),
)


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every scenario.

    Args:
        quick: a tiny model and few pairs, to see that it works; the numbers mean little.
        report: told what is being done.
    """
    model, launches, rounds = (TINY, 2, 2) if quick else (SMALL, 6, 8)
    torch.optim.AdamW(model.build("meta").parameters())  # imports here, once, what every rank would
    rows = []
    for scenario in SCENARIOS:
        blocks: list[Block] = []
        for launch in range(launches):
            report(f"speed: {scenario.name}, {launch + 1} of {launches}")
            blocks += combine(on_ranks(_measure, scenario.num_ranks, scenario, model, rounds, launch))
        rows += _rows(scenario, blocks)
    return Findings(
        name="speed",
        title="Speed of a training step",
        text=_TEXT.format(target=TARGET),
        columns=_COLUMNS,
        rows=rows,
        settings={
            "model": model.describe(),
            "batch": f"{_NUM_TOKENS} tokens a sample; 2 samples a process, 4 with bf16",
            "starts": launches,
        },
    )


def _measure(scenario: Scenario, model: Llama, rounds: int, launch: int) -> list[Block]:
    """On one rank; the number of the launch decides which model is built first."""
    seed = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    batch = random_batch(model, scenario.batch_size, _NUM_TOKENS, seed=seed)
    makers = {
        "by hand": lambda: {"by hand": _by_hand(scenario, model, batch)},
        "ours": lambda: _ours(scenario, model, batch),
        "by hand again": lambda: {"by hand again": _by_hand(scenario, model, batch)},
    }
    names = list(makers)
    first = launch % len(names)
    sides: dict[str, Callable[[], object]] = {}
    for name in (*names[first:], *names[:first]):
        sides |= makers[name]()
    for step in sides.values():
        for _ in range(_WARM_UP):
            step()
    return measure(sides, list(_PAIRS), rounds=rounds, calls=1, barrier=barrier)


def _by_hand(scenario: Scenario, model: Llama, batch: dict[str, torch.Tensor]) -> Callable[[], object]:
    wrapped = scenario.by_hand(model.build())
    optimizer = torch.optim.AdamW(wrapped.parameters(), **OPTIM_ARGS, fused=scenario.fused)
    return lambda: step_by_hand(wrapped, optimizer, batch, bf16=scenario.bf16)


def _accelerated(scenario: Scenario, model: Llama) -> Result:
    _, result, _ = auto_accelerate(
        model.build(),
        torch.optim.AdamW,
        loss_func=next_token_loss,
        model_input_format="unpack_dict",
        optim_args=OPTIM_ARGS,
        load_strategy=list(scenario.strategy),
    )
    assert result is not None
    return result


def _ours(
    scenario: Scenario, model: Llama, batch: dict[str, torch.Tensor]
) -> dict[str, Callable[[], object]]:
    result = _accelerated(scenario, model)
    return {"plain loop": lambda: _plain_loop(result, batch), "train_step": lambda: result.train_step(batch)}


def _plain_loop(result: Result, batch: dict[str, torch.Tensor]) -> None:
    assert result.optim is not None
    assert result.loss_func is not None
    result.optim.zero_grad()
    data = result.prepare_input(batch, CPU)
    loss = result.loss_func(data, result.model(**data))
    loss.backward()
    result.optim.step()


def _rows(scenario: Scenario, blocks: list[Block]) -> list[dict[str, Any]]:
    by_hand = spread_of(blocks, "by hand", lambda block: block.wall_s, scale=1000)
    rows = []
    for pair, step in _PAIRS.items():
        cpu = Spread.of(ratios(blocks, pair, lambda block: block.cpu_s))
        rows.append(
            {
                "scenario": scenario.name,
                "strategy": [
                    list(entry) if isinstance(entry, tuple) else entry for entry in scenario.strategy
                ],
                "num_ranks": scenario.num_ranks,
                "step": step,
                "pairs": cpu.n,
                "cpu_ratio": cpu,
                "wall_ratio": Spread.of(ratios(blocks, pair, lambda block: block.wall_s)),
                "holds": cpu.median <= TARGET,
                "wall_ms_by_hand": by_hand,
            }
        )
    return rows
