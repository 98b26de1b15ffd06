"""Operator planning: the time from a model to its operator plan, in a fresh process with nothing cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._results import Column, Findings, Spread
from benchmarks._yardstick import WORDS, in_yardsticks

__all__ = ["TARGET", "TARGET_MIB", "run"]

TARGET, TARGET_MIB = 80.0, 1024
_CASES = ((24, 8), (96, 8), (24, 3), (24, 6), (24, 32), (24, 128))
_TEXT = """
A Llama (width 256, 128 tokens, 8 samples) on the meta device is captured, its operators' rules are looked up and priced for
H100s, and the fastest plan within their memory is solved for, each time in a fresh process. *plan*: processor time of all
threads and children, from the model to the plan; *all*: with the imports of torch and transformers. *MiB*: the largest
resident set of the process. nnScaler 0.8 takes 55 s of processor time for 24 layers on 8 devices (imports not counted, on
another machine of two cores).

- *within*: *plan* at most {target:.0f} yardsticks and {mib} MiB; {yardstick}.
"""
_COLUMNS = (
    Column(title="layers", key="layers"),
    Column(title="devices", key="devices"),
    Column(title="plan, cpu s", key="plan_s", digits=2),
    Column(title="yardsticks", key="yardsticks", digits=1),
    Column(title="all, cpu s", key="all_s", digits=2),
    Column(title="MiB", key="mib"),
    Column(title="within", key="holds"),
)
_PROGRAM = """
import json, resource, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
layers, devices = map(int, sys.argv[1:])
config = LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=4,
                     num_key_value_heads=4, vocab_size=32000)
with torch.device("meta"):
    model = LlamaForCausalLM(config).train()
ids = torch.zeros(8, 128, dtype=torch.long)
cpu = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
began = cpu()
from atorch_ns.cluster import cluster_from_spec
from atorch_ns.operators import Prices, States, capture_shallow, solved_plan
shallow = capture_shallow(model, (), {"input_ids": ids, "labels": ids.clone()}, device=torch.device("cpu"))
prices = Prices.on(cluster_from_spec(f"{devices}xH100-80GB"), devices, "bfloat16")
solved = solved_plan(shallow.graph, devices, prices, States(), torch.device("cpu"), memory_limit=80 * 2**30)
assert solved.outcome.status == "optimal"
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({"plan": cpu() - began, "all": cpu(), "mib": mib}))
"""


def run(*, quick: bool, report: Callable[[str], object]) -> Findings:
    """Measures every depth and number of devices.

    Args:
        quick: the first alone, once.
        report: told what is being done.
    """
    rows: list[dict[str, Any]] = []
    for layers, devices in _CASES[: 1 if quick else None]:
        report(f"operator_planning: {layers} layers, {devices} devices")
        found = [_measured(layers, devices) for _ in range(1 if quick else 3)]
        plan = Spread.of([one["plan"] for one in found])
        mib = max(one["mib"] for one in found)
        rows.append(
            {
                "layers": layers,
                "devices": devices,
                "plan_s": plan,
                "yardsticks": in_yardsticks(plan.median),
                "all_s": Spread.of([one["all"] for one in found]),
                "mib": mib,
                "holds": in_yardsticks(plan.median) <= TARGET and mib <= TARGET_MIB,
            }
        )
    return Findings(
        name="operator_planning",
        title="Time of an operator plan",
        text=_TEXT.format(target=TARGET, mib=TARGET_MIB, yardstick=WORDS),
        columns=_COLUMNS,
        rows=rows,
        settings={"model": "Llama, width 256, 128 tokens, 8 samples"},
    )


def _measured(layers: int, devices: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(layers), str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
