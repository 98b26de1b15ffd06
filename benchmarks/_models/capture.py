"""Share of architectures whose operators can be captured, in the order of the sweep: ``python -m benchmarks._models.capture 104``.

Decides the gate of ``docs/design/house.md``.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.graph.operator_graph import capture_shallow
from atorch_ns.data import call_model
from benchmarks._models import by_hand, from_timm, from_torchvision, from_transformers, vision_packages

LIMIT_S = 60
"""Seconds for one architecture, which takes 4.5 in the mean on two cores."""


def _arguments(model: nn.Module, batch: Any, input_format: str | None) -> tuple[Any, Any]:
    """What the model is called with for a batch."""

    class Called(Exception):
        pass

    calls: list[tuple[Any, Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise Called

    handle = model.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        call_model(model, batch, input_format)
    except Called:
        pass
    finally:
        handle.remove()
    return calls[0]


def _outcome(entry: Any) -> str:
    try:
        case = entry.case()
        model, batch = case.build(), case.make_batch(2, 0)
    except Exception as error:
        return f"not built: {error}"
    try:
        args, kwargs = _arguments(model, batch, case.model_input_format)
        capture_shallow(model.train(), args, kwargs, device=torch.device("cpu"))
    except Exception as error:
        return f"refused: {error}"
    return "captured"


def _in_a_fork(entry: Any) -> str:
    # One architecture's crash, memory or endless loop must not end the others.
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        os.write(sender, _outcome(entry)[:4000].encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as stream:
        text = stream.read().decode(errors="replace")
    os.waitpid(child, 0)
    return text or f"refused: no answer in {LIMIT_S} s"


def main(most: int) -> None:
    """Prints a line for each architecture, and the share."""
    torch.set_num_threads(1)
    vision_packages.prepare()
    rooms = (by_hand, from_torchvision, from_timm, from_transformers)
    entries = sorted((entry for room in rooms for entry in room.entries()), key=lambda entry: entry.place)
    outcomes = []
    for entry in entries[:most]:
        outcomes.append(_in_a_fork(entry))
        print(entry.key, outcomes[-1].splitlines()[0][:200], flush=True)
    built = [outcome for outcome in outcomes if not outcome.startswith("not built")]
    print(
        f"{built.count('captured')} of {len(built)} captured; {len(outcomes) - len(built)} could not be built small"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
