"""``python -m tests.loops NUM [SEED] [4 | compiled]``: that many random loops under every strategy of two ranks, of four, or of
those that compile, and what became of each.

Ends with 1 if one of them trained otherwise without a word, raised an error of torch's, or hung.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict

# Ranks are forked: before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import importlib

from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from tests.loops.judge import COMPILED, OF_FOUR, STRATEGIES, NoLoop, judge
from tests.loops.recipes import Recipe, recipes

_IMPORTED_BY_RANKS = ("torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.optim")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(num: int, first: int, strategies: tuple[str, ...]) -> int:
    """Prints what went wrong as it happens, and a table at the end."""
    for name in _IMPORTED_BY_RANKS:
        importlib.import_module(name)
    kinds = {strategy: Counter[str]() for strategy in strategies}
    seen: set[Recipe] = set()
    bad, start = 0, time.monotonic()

    @seed(first)
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes())
    def run(recipe: Recipe) -> None:
        nonlocal bad
        assume(recipe not in seen)
        seen.add(recipe)
        try:
            verdicts = judge(recipe, strategies)
        except NoLoop as error:
            kinds[strategies[0]]["no loop"] += 1
            _say(f"no loop: {recipe}: {str(error)[:200]}")
            return
        for strategy, verdict in verdicts.items():
            kinds[strategy][verdict.kind] += 1
            if not verdict.is_fine:
                bad += 1
                _say(f"{verdict.kind} under {strategy}: {recipe}\n{verdict.text[-1500:]}\n")
            if verdict.kind == "refused":
                _say(json.dumps({"refused": strategy, "text": verdict.text, **asdict(recipe)}))
        if len(seen) % 50 == 0:
            _say(f"[{time.monotonic() - start:.0f} s] {len(seen)} loops, {bad} bad")

    run()
    for strategy, counts in kinds.items():
        _say(f"{strategy:20} {dict(counts)}")
    return int(bad > 0)


if __name__ == "__main__":
    kinds_of_strategies = {"2": STRATEGIES, "4": OF_FOUR, "compiled": COMPILED}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("strategies", nargs="?", choices=kinds_of_strategies, default="2")
    options = parser.parse_args()
    sys.exit(main(options.num, options.seed, tuple(kinds_of_strategies[options.strategies])))
