"""Ranks without processes: the work of one rank, done in the test's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from atorch_ns.cli._rank_work import WORKS, _attempt_work
from atorch_ns.processes import RankEnd


def run_inline(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    *,
    timeout_s: float | None = None,
    shown: bool = True,
    patient: bool = False,
) -> list[RankEnd]:
    """As ``run_local_ranks``, for one rank."""
    work, folder = arguments
    request = json.loads((Path(folder) / "request.json").read_text())
    code, answer = _attempt_work(WORKS[work], request)
    (Path(folder) / "answer_0.json").write_text(json.dumps(answer))
    return [RankEnd(rank=0, code=code, output="", ended_by_us=False)]
