"""Check: ranks on this machine can talk to each other, by gloo and, on GPUs, by NCCL; and their clocks agree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from atorch_ns.doctor._base import Finding, Place
from atorch_ns.launch import RankEnd, run_local_ranks

__all__ = ["check_backends", "check_collectives"]

_NAME: Final = "all-reduce"
_SKEW_S: Final = 0.5
"""Clocks of nodes further apart than this make logs and time limits hard to compare."""


def check_backends(place: Place) -> list[Finding]:
    """torch has the backends that jobs here need."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [
            Finding(
                check="backends",
                verdict="fail",
                text="torch was built without torch.distributed",
                fix="pip install --force-reinstall torch",
            )
        ]
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    needed = ["gloo", *(["nccl"] if torch.cuda.is_available() else [])]
    missing = [name for name in needed if not has[name]]
    if missing:
        return [
            Finding(
                check="backends",
                verdict="fail",
                text=f"torch was built without {' and '.join(missing)}, which jobs on this machine use",
                fix="pip install --force-reinstall torch",
            )
        ]
    there = ", ".join(name for name, present in has.items() if present)
    return [Finding(check="backends", verdict="pass", text=f"{there}; jobs here use {' and '.join(needed)}")]


def check_collectives(place: Place) -> list[Finding]:
    """Ranks are started with a time limit and sum tensors; every rank must get the same, right sum."""
    with tempfile.TemporaryDirectory(prefix="atorch_ns_doctor_") as folder:
        answer = Path(folder) / "answer.json"
        arguments = [str(answer), str(place.timeout_s)]
        ends = run_local_ranks(
            "atorch_ns.doctor._collectives_rank",
            arguments,
            place.num_ranks,
            timeout_s=place.timeout_s,
            shown=False,
        )
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    if not found or any(end.code for end in ends):
        return [_failed(place, ends)]
    talked = [_backend(place, name, one) for name, one in found["backends"].items()]
    return [*talked, *_not_tried(place, found["num_gpus"]), _clock(found)]


def _backend(place: Place, name: str, one: dict[str, Any]) -> Finding:
    figures = {"latency_seconds": one["latency_s"], "bytes_per_second": one["bytes_per_s"]}
    return Finding(
        check=_NAME,
        verdict="pass",
        text=f"{place.num_ranks} ranks by {name}: {one['latency_s'] * 1e3:.2f} ms for one number, "
        f"{one['bytes_per_s'] / 2**30:.2f} GiB/s for {one['num_bytes'] / 2**20:.0f} MiB (n={one['n']})",
        figures=figures,
    )


def _not_tried(place: Place, num_gpus: int) -> list[Finding]:
    """NCCL takes a GPU for every rank."""
    if not 0 < num_gpus < place.num_ranks:
        return []
    return [
        Finding(
            check=_NAME,
            verdict="warn",
            text=f"NCCL was not tried: there are {num_gpus} GPU(s) for {place.num_ranks} ranks",
            fix=f"atorch-ns doctor --nproc {num_gpus}",
        )
    ]


def _clock(found: dict[str, Any]) -> Finding:
    skew = float(found["skew_s"])
    text = f"the ranks' clocks are {skew * 1e3:.1f} ms apart, and none runs backwards"
    if not found["monotonic"]:
        return Finding(
            check="clock",
            verdict="warn",
            text="a rank's clock ran backwards while it was watched",
            fix="sudo systemctl restart chronyd   # or whatever sets this machine's time",
        )
    if skew <= _SKEW_S:
        return Finding(check="clock", verdict="pass", text=text, figures={"skew_seconds": skew})
    return Finding(
        check="clock",
        verdict="warn",
        text=text,
        fix="sudo chronyc makestep   # on every node",
        figures={"skew_seconds": skew},
    )


def _failed(place: Place, ends: list[RankEnd]) -> Finding:
    late = [end.rank for end in ends if end.ended_by_us]
    broken = [end for end in ends if end.code and not end.ended_by_us]
    if broken:
        last = " ".join(broken[0].output.splitlines()[-1:]) or f"exit code {broken[0].code}"
        why = f"rank {broken[0].rank} failed: {last}"
    else:
        why = f"rank(s) {', '.join(map(str, late))} gave no answer within {place.timeout_s:.0f} s"
    return Finding(
        check=_NAME,
        verdict="fail",
        text=f"{place.num_ranks} ranks could not sum a tensor: {why}",
        fix="GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=INFO atorch-ns doctor   # names the interface, and says more",
    )
