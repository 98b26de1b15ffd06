"""Checks of torch.distributed on one machine: the backends, and an all-reduce of ranks by gloo and NCCL."""

from __future__ import annotations

import json
from typing import Any, Final

from atorch_ns.doctor.base import Finding, Place, failed, passed, warned
from atorch_ns.doctor.node_findings import all_reduce_finding
from atorch_ns.launch import RankEnd, run_local_ranks, scratch_folder
from atorch_ns.text import clipped

_NAME: Final = "all-reduce"
_SHOWN_CHARS: Final = 300


def check_backends(place: Place) -> list[Finding]:
    """torch has the backends that jobs here need."""
    import torch
    import torch.distributed as dist

    has = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    needed = ["gloo", *(["nccl"] if torch.cuda.is_available() else [])]
    missing = [name for name in needed if not has[name]]
    if missing:
        text = f"torch was built without {' and '.join(missing)}, which jobs on this machine use"
        return [failed("backends", text, "pip install --force-reinstall torch")]
    there = ", ".join(name for name, present in has.items() if present)
    return [passed("backends", f"{there}; jobs here use {' and '.join(needed)}")]


def check_collectives(place: Place) -> list[Finding]:
    """Ranks are started with a time limit and sum tensors; every rank must get the same, right sum."""
    with scratch_folder() as folder:
        program, arguments = "atorch_ns.doctor.benchmark", [str(folder), str(place.timeout_s)]
        ends = run_local_ranks(program, arguments, place.num_ranks, timeout_s=place.timeout_s, shown=False)
        path = folder / "figures_0"
        figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not figures or any(end.code for end in ends):
        return [_failed(place, ends)]
    summed = [
        all_reduce_finding(_NAME, f"{place.num_ranks} ranks by {name}", rounds["all"])
        for name, rounds in figures["backends"].items()
    ]
    return [*summed, *_not_tried(place, figures["num_gpus"]), _clock(figures["clocks"]["monotonic"])]


def _not_tried(place: Place, num_gpus: int) -> list[Finding]:
    """NCCL takes a GPU for every rank."""
    if not 0 < num_gpus < place.num_ranks:
        return []
    text = f"NCCL was not tried: there are {num_gpus} GPU(s) for {place.num_ranks} ranks"
    return [warned(_NAME, text, f"atorch-ns doctor --nproc {num_gpus}")]


def _clock(monotonic: bool) -> Finding:
    if monotonic:
        return passed("clock", "the clock does not run backwards")
    text = "the clock ran backwards while it was watched"
    fix = "sudo systemctl restart chronyd   # or whatever sets this machine's time"
    return warned("clock", text, fix)


def _failed(place: Place, ends: list[RankEnd]) -> Finding:
    late = [end.rank for end in ends if end.ended_by_us]
    broken = [end for end in ends if end.code and not end.ended_by_us]
    if broken:
        why = f"rank {broken[0].rank} failed: {last_error(broken[0].output) or f'exit code {broken[0].code}'}"
    else:
        why = f"rank(s) {', '.join(map(str, late))} gave no answer within {place.timeout_s:.0f} s"
    fix = "GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=INFO atorch-ns doctor   # names the interface, and says more"
    return failed(_NAME, f"{place.num_ranks} ranks could not sum a tensor: {why}", fix)


def last_error(output: str) -> str:
    """The line of a rank's output that names the exception; Python's, rather than what threads print afterwards."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if "Error" in line.partition(":")[0] and ":" in line]
    return clipped((raised or lines or [""])[-1], _SHOWN_CHARS)
