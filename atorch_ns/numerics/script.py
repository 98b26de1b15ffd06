"""A user's script, run under a strategy and in one process, whose weights are compared after each update.

A :class:`ScriptWatch` is active while the script runs (:data:`atorch_ns.apply.WATCH`). Front ends ask it for
the strategy and hand it what they have made. It writes each rank's updates for :func:`compare_runs`. A second
run in one process, with gradients that are off by rounding, shows how far rounding alone leads.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.numerics.verdict import NOISE_FACTOR, REDUCED_TOLERANCE, TOLERANCE
from atorch_ns.sharding.rank_context import local_part
from atorch_ns.text import is_library
from atorch_ns.torch_compat import local_box, persistent_buffers

ROUNDING: Final = TOLERANCE / 10
"""Error of a gradient in the second run, relative to its largest element: rounding reaches it in fp32."""
REDUCED_ROUNDING: Final = REDUCED_TOLERANCE / 10
"""The same in less than fp32: bfloat16 rounds by 2^-8, near this."""
_DROPOUTS: Final = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_MOST_UPDATES: Final = 10
"""Updates of all optimizers, as a multiple of ``num_steps``, that end scripts whose optimizers alternate."""


class Enough(SystemExit):
    """Ends a script after the steps that were asked for; handlers of ``Exception`` let it through."""


@dataclass(frozen=True, kw_only=True)
class ScriptDifference:
    """A difference between the ranks and one process.

    Attributes:
        job: number of the call of a front end, from 0, in the order of the script.
        step: updates of its optimizer so far; 0 before the first.
        where: the line that updated, or that called the front end.
        kind: ``"weight"``, ``"buffer"``, ``"state"`` of the optimizer, or ``"steps"`` if one side took none.
        name: the tensor's name in the user's model, of a state with its own; or who did not take the step.
        rank: a rank that has it.
        error, tolerance: the largest difference of an element, and its limit; infinite for what is missing.
        others: tensors that differ at the same step, besides.
    """

    job: int
    step: int
    where: str
    kind: str
    name: str
    rank: int = 0
    error: float = math.inf
    tolerance: float = 1.0
    others: int = 0

    @property
    def excess(self) -> float:
        """The error in units of its tolerance."""
        return self.error / self.tolerance


class ScriptWatch:
    """Observer of a script's front ends during a comparison.

    Args:
        folder: folder for this run's records.
        strategy: replacement for each ``load_strategy``; ``None`` for the script's own strategy.
        num_steps: updates of each optimizer after which the script is ended.
        rounding: error added to gradients before an update, relative to their largest element.
    """

    def __init__(self, folder: Path, strategy: Any, num_steps: int, rounding: float = 0.0) -> None:
        self.strategy = strategy
        self.num_dropouts = 0
        self.is_reduced = False
        self.strategies: list[str] = []
        self._folder, self._num_steps, self._rounding = folder, num_steps, rounding
        self._counts: list[int] = []
        self._num_records = 0
        self._noise = torch.Generator().manual_seed(1)

    def follow(self, result: Result) -> None:
        """Records the result of a front end, and each later update of its optimizer."""
        number, optimizer = len(self._counts), result.optim
        assert optimizer is not None
        self._counts.append(0)
        self.strategies.append(" + ".join(step.name for step in result.applied.strategy) or "one process")
        precision = result.job.plan.precision
        dtypes = {precision.parameter_dtype, precision.compute_dtype}
        self.is_reduced |= not dtypes <= {None, "float32"}
        self._leave_out_dropout(result)
        update = vars(optimizer).get("step")  # of a scheduler, say

        def step(target: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._end_if_enough(number)
            if self._rounding:
                self._disturb_gradients(target)
            loss = type(target).step(target, *args, **kwargs) if update is None else update(*args, **kwargs)
            self._counts[number] += 1
            self._write_record(result, number)
            return loss

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        self._write_record(result, number)  # the state before any update

    def _end_if_enough(self, number: int) -> None:
        if self._counts[number] < self._num_steps:
            return
        # Optimizers that take turns may never all reach num_steps, so the total of updates is bounded.
        if min(self._counts) >= self._num_steps or sum(self._counts) >= _MOST_UPDATES * self._num_steps:
            raise Enough(0)

    def _leave_out_dropout(self, result: Result) -> None:
        for root in (result.job.module, *result.job.parts.stages):
            for module in root.modules():
                if isinstance(module, _DROPOUTS) and module.p:  # masks differ between ranks and one process
                    module.p = 0.0
                    self.num_dropouts += 1

    @torch.no_grad()
    def _disturb_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.numel():
                    gradient = parameter.grad
                    noise = torch.randn(gradient.shape, generator=self._noise).to(gradient)
                    gradient.add_(noise * gradient.abs().max() * self._rounding)  # as rounding does

    @torch.no_grad()
    def _write_record(self, result: Result, number: int) -> None:
        job = result.job
        states = job.make_states(job, result.optim)
        tensors = {("weight", name): weight for name, weight in states.weights().items()}
        tensors |= {("buffer", name): buffer for name, buffer in persistent_buffers(job.module).items()}
        try:
            optim_states = states.optimizer_states().tensors
        except CheckpointError:  # states without a form of their own are not compared
            optim_states = {}
        tensors |= {
            ("state", f"{name}: {entry}"): state
            for name, entries in optim_states.items()
            for entry, state in entries.items()
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        rank = job.cluster.rank
        path = self._folder / f"{self._num_records}-{number}-{self._counts[number]}-{rank}.pt"
        record = {
            "where": _line_of_user(),
            "tensors": {key: local_part(t).detach().to("cpu", copy=True) for key, t in tensors.items()},
            "boxes": {
                key: (t.shape, local_box(t)[0]) for key, t in tensors.items() if isinstance(t, DTensor)
            },
        }
        torch.save(record, path.with_suffix(".draft"))
        path.with_suffix(".draft").rename(path)  # a rank that is ended leaves no half of a record
        self._num_records += 1


def _line_of_user() -> str:
    frames = [frame for frame in traceback.extract_stack() if not is_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def compare_runs(
    folder: Path, num_ranks: int, *, reduced: bool
) -> tuple[ScriptDifference | None, list[ScriptDifference]]:
    """The first difference beyond rounding, and the largest of each update, in units of its tolerance.

    Args:
        folder: folder with the records of the three runs ``one``, ``ranks`` and ``rounding``.
        num_ranks: ranks of the second run.
        reduced: whether something was computed in less than float32.
    """
    largest: list[ScriptDifference] = []
    begins: dict[int, Mapping[Any, torch.Tensor]] = {}
    runs = [folder / name for name in ("one", "ranks", "rounding")]
    for moment in sorted(_list_moments(runs[0]) | _list_moments(runs[1])):  # moments of both runs
        _, job, step = moment
        plain, ranks, noisy_records = (_read_records(run, moment) for run in runs)
        left_out = [f"rank {rank}" for rank in range(num_ranks) if rank not in ranks]
        if not plain or left_out:
            who = "one process" if not plain else "the ranks" if not ranks else left_out[0]
            where = next(iter((plain or ranks).values()))["where"]
            return ScriptDifference(job=job, step=step, where=where, kind="steps", name=who), largest
        whole = plain[0]["tensors"]
        begin = begins.setdefault(job, whole)  # values before any update
        noisy = noisy_records[0]["tensors"] if noisy_records else whole  # no noise without that run
        differences = [
            ScriptDifference(job=job, step=step, where=record["where"], rank=rank, **fields)
            for rank, record in ranks.items()
            for fields in _compare_tensors(whole, record, noisy, begin, reduced=reduced)
        ]
        for kind, name in whole.keys() - {key for record in ranks.values() for key in record["tensors"]}:
            differences.append(
                ScriptDifference(job=job, step=step, where=ranks[0]["where"], kind=kind, name=name)
            )
        differences.sort(key=lambda row: -row.excess)
        largest += differences[:1]
        beyond = {(row.kind, row.name) for row in differences if row.excess > 1.0}
        if beyond:
            return replace(differences[0], others=len(beyond) - 1), largest
    return None, largest


_Moment = tuple[int, int, int]
"""Number of a record in the order of the script, its job, and the updates of that."""


def _list_moments(folder: Path) -> set[_Moment]:
    names = [path.stem.split("-") for path in folder.glob("*.pt")]
    return {(int(order), int(job), int(step)) for order, job, step, _ in names}


def _read_records(folder: Path, moment: _Moment) -> dict[int, Any]:
    order, job, step = moment
    return {
        int(path.stem.split("-")[-1]): torch.load(path, weights_only=True)
        for path in sorted(folder.glob(f"{order}-{job}-{step}-*.pt"))
    }


def _compare_tensors(
    plain: Mapping[Any, torch.Tensor],
    record: Mapping[str, Mapping[Any, Any]],
    noisy: Mapping[Any, torch.Tensor],
    begin: Mapping[Any, torch.Tensor],
    *,
    reduced: bool,
) -> Iterator[dict[str, Any]]:
    """Kind, name, error and tolerance of each tensor that a rank has recorded, whole or its part."""
    share, unit = REDUCED_TOLERANCE if reduced else TOLERANCE, torch.finfo(torch.float32)
    for (kind, name), tensor in record["tensors"].items():
        whole = plain.get((kind, name))
        shape, offsets = record["boxes"].get((kind, name), (tensor.shape, [0] * tensor.dim()))
        if whole is None or whole.shape != shape:  # missing in one process
            yield {"kind": kind, "name": name}
            continue
        part = whole[tuple(slice(first, first + n) for first, n in zip(offsets, tensor.shape, strict=True))]
        error = _widen_values(tensor) - part
        error[(tensor == part) | (tensor.isnan() & part.isnan())] = 0.0  # infinite ones are equal, too
        # A weight is judged by its update since the first record, other tensors by their values.
        update = _widen_values(whole) - (_widen_values(begin[kind, name]) if kind == "weight" else 0.0)
        noise = _widen_values(noisy[kind, name]) - whole if (kind, name) in noisy else update * 0.0
        # 16-bit weights, which one process has in fp32, are rounded from the first record on.
        eps = max(unit.eps, torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0)
        rounding = 2 * eps * _largest_finite(whole) + unit.tiny
        yield {
            "kind": kind,
            "name": name,
            "error": float(error.abs().nan_to_num(nan=math.inf).max()) if error.numel() else 0.0,
            "tolerance": share * _largest_finite(update) + NOISE_FACTOR * _largest_finite(noise) + rounding,
        }


def _widen_values(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float64))  # complex ones stay complex


def _largest_finite(values: torch.Tensor) -> float:
    # Infinite and NaN values must not widen a tolerance.
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0
