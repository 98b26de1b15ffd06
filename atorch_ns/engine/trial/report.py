"""Report of one rank on one trial, the worker protocol, and a count of collectives."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from torch.distributed.tensor import DTensor

from atorch_ns.capture.nests import tensors_of
from atorch_ns.search import TrialStatus, TrialTask
from atorch_ns.system import table_rows
from atorch_ns.torch_compat import TorchDispatchMode

_NAMESPACES: Final = ("c10d", "_c10d_functional")

# By the operator's name without trailing underscores: the kind, and which argument (or "result") is the
# whole tensor. https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/Ops.cpp
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    row["operator"]: (row["kind"], row["whole"])
    for row in table_rows(Path(__file__).with_name("collectives.csv"))
}

_RECORD_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Of torch's flight recorder; measured with torch 2.13 for 8 to 140 Python frames, to within 1%.
_ENTRY_BYTES, _FRAME_BYTES = 770, 16


class CollectiveCount(TorchDispatchMode):
    """Counts the collectives that are started inside its ``with`` block, by Python or by C++ (DDP's buckets).

    Attributes:
        totals: by kind, the calls and the bytes of whole tensors (the gathered result, or the reduced input).
        record_bytes: host memory in which torch's flight recorder keeps them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.totals: dict[str, tuple[int, int]] = {}
        self.record_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operator, and counts it if it communicates."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as the operators that it stands for
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._count_collective(func._schema.name.partition("::")[2].rstrip("_"), args, result)
        return result

    def _count_collective(self, operator: str, args: tuple[Any, ...], result: Any) -> None:
        entry = _KINDS.get(operator)
        if entry is None:  # barriers, waits and other operators that move no tensor
            return
        kind, where = entry
        whole = result if where == "result" else args[int(where)]
        calls, num_bytes = self.totals.get(kind, (0, 0))
        num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(whole))
        self.totals[kind] = (calls + 1, num_bytes)
        # Room for frames grows by doubling: to the next power of two.
        self.record_bytes += _ENTRY_BYTES + _FRAME_BYTES * (1 << (_num_frames() - 1).bit_length())


def record_entries() -> int:
    """Number of latest collectives that torch's flight recorder keeps, read from its variable as C++ does."""
    setting = next((os.environ[name] for name in _RECORD_SIZES if name in os.environ), "")
    number = re.match(r"\s*[+-]?\d+", setting)
    # torch's default where the variable is not set or no number.
    return 2000 if number is None else max(0, int(number[0]))


def _num_frames() -> int:
    return sum(1 for _ in traceback.walk_stack(sys._getframe(3)))  # without the three frames that count


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's part of a trial's outcome. Plain values only (JSON by pydantic's ``TypeAdapter``).

    Attributes:
        task_id: id of the task.
        rank: rank that reports.
        status: status on this rank.
        step_seconds: each timed step, the maximum over ranks; the same on every rank.
        peak_bytes: the most that tensors (CPU) or the allocator (GPU) held; ``None`` if it was not measured.
        process_bytes: the most that the process (CPU) or its part of the device (GPU) grew by, tensors
            among it; ``None`` if it was not measured.
        further_bytes: expected addition of a run of 1,000 steps, by the growth over the trial's steps.
        state_bytes: parameters, gradients and optimizer states after the last step.
        collectives: calls and bytes in one step by kind.
        loss: loss of the last step, the mean over ranks.
        setup_seconds, total_seconds: to the first timed step, and to the end.
        reason: reason of a failure: the exception's type and text, or how the process ended.
        log: path of the file with its output and traceback.
        refused_by: the method that refused to be applied, where one did.
        while_applying: whether it failed before the first step.
        enforced: whether the system enforced the limit of memory.
    """

    task_id: int
    rank: int
    status: TrialStatus
    step_seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    process_bytes: int | None = None
    further_bytes: int = 0
    state_bytes: int | None = None
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    loss: float | None = None
    setup_seconds: float = 0.0
    total_seconds: float = 0.0
    reason: str = ""
    log: str = ""
    refused_by: str | None = None
    while_applying: bool = False
    enforced: bool = False


class Worker(Protocol):
    """Runs the trials of one rank, one at a time."""

    def run(self, task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        """Runs a trial. Failures of the trial never raise.

        Args:
            task: the task to run. Overrunning ``task.deadline_s`` gives the status "hung".
            cancelled: polled several times a second; once true, the trial ends with the status "cancelled".
        """

    def close(self) -> None:
        """Ends whatever it started; may be called twice."""
