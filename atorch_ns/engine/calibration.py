"""Refit: what trials and training measured corrects the figures that the next estimate uses.

The estimate of a step is split in two: what is computed (forward, backward, recomputation, update, starting
operators) and what is communicated (gathering, reducing, moving to the host). For each precision ``p``

    measured ≈ compute_factor[p] · computed + communication_factor · communicated

The factors are fitted by least squares on the logarithms of both sides. A prior that weighs a tenth of an
observation draws them towards 1, so a single trial moves those that it says something about most of the way.
Memory has one factor for each precision: the median of measured over predicted peaks.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
from pydantic import Field

from atorch_ns.cluster import Cluster, Hardware, Link, Rate
from atorch_ns.cluster.measured import measured_for
from atorch_ns.cluster.spec import read_spec
from atorch_ns.errors import AtorchError, InputError
from atorch_ns.estimate import Estimate
from atorch_ns.method import Chosen, Registry, fold_plan, load_registry
from atorch_ns.search import Candidate, SearchOutcome, TrialOutcome, from_json
from atorch_ns.system import write_whole

_SCHEMA: Final = 1  # version of the file; load refuses any other
_COMMUNICATED: Final = ("gather", "reduce", "offload", "exchange")  # fields of TimeParts that links take
_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors of measured over predicted, on one kind of device.

    Attributes:
        compute: factors of computation, by its precision (``"float32"``, ``"bfloat16"``, …).
        communication: factor of communication and transfers.
        memory: factors of the peak, by precision.
        num_trials, num_steps: trials and steps of training that the factors come from.
        error_before, error_after: median relative error of the step time, without and with the factors.
    """

    compute: Mapping[str, _Factor] = field(default_factory=dict)
    communication: _Factor = 1.0
    memory: Mapping[str, _Factor] = field(default_factory=dict)
    num_trials: int = 0
    num_steps: int = 0
    error_before: float = 0.0
    error_after: float = 0.0

    def seconds(self, prediction: Estimate, precision: str) -> float:
        """A step's predicted time, corrected."""
        compute_s, communication_s = computed_and_communicated(prediction)
        return self.compute.get(precision, 1.0) * compute_s + self.communication * communication_s

    def bytes(self, prediction: Estimate, precision: str) -> float:
        """A peak's prediction, corrected."""
        # The factor was fitted to peaks of tensors, so memory outside them stays as predicted.
        beyond = prediction.peak_bytes - prediction.allocated_bytes
        return self.memory.get(precision, 1.0) * prediction.allocated_bytes + beyond

    def on(self, hardware: Hardware) -> Hardware:
        """The hardware with figures that make estimates come out as measured.

        Bandwidth and launch time, shared by all precisions, follow the factor of float32 or the others' mean.
        """
        device = hardware.device
        shared = self.compute.get("float32") or _geometric_mean(self.compute.values())  # 1 without factors
        flops = {name: rate / self.compute.get(name, shared) for name, rate in device.flops_per_s.items()}
        device = replace(
            device,
            flops_per_s=flops,
            memory_bytes_per_s=device.memory_bytes_per_s / shared,
            launch_s=device.launch_s * shared,  # a time, where the rates above are divided
            source=f"{device.source}; corrected by {self.num_trials} trials".lstrip("; "),
        )
        return replace(
            hardware,
            device=device,
            within_node=_slow_down_link(hardware.within_node, self.communication),
            between_nodes=_slow_down_link(hardware.between_nodes, self.communication),
            to_host=_slow_down_link(hardware.to_host, self.communication),
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors by device, as a small JSON file.

    Attributes:
        devices: factors by the device's name and the number of processes, as ``"H100-80GB x 16"``.
        schema: version of the file's form.
    """

    devices: Mapping[str, Factors]
    schema: int = _SCHEMA

    @staticmethod
    def key(device: str, world_size: int) -> str:
        """The name that factors are kept under."""
        return f"{device} x {world_size}"

    def factors(self, device: str, world_size: int) -> Factors:
        """The factors of a device; all 1 where none are known."""
        return self.devices.get(self.key(device, world_size), Factors())

    def merged(self, other: Calibration) -> Calibration:
        """The factors of both; for a device in both, those of ``other``."""
        return Calibration(devices={**self.devices, **other.devices})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, or adds to the one that is there; replaced in one step.

        Raises:
            InputError: if the file that is there is no calibration, or cannot be written.
        """
        target = Path(path)
        whole = Calibration.load(target).merged(self) if target.exists() else self
        text = json.dumps(asdict(whole), indent=2, sort_keys=True)
        try:
            write_whole(target, f"{text}\n")
        except OSError as error:
            raise InputError(f"the calibration was not written: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads the file.

        Raises:
            InputError: if it is missing, is none, or was written by a later version.
        """
        if _is_measured(path):
            raise InputError(
                f"{path} holds speeds measured by atorch-ns calibrate, not factors from trials. Name another file."
            )
        try:
            calibration = from_json(cls, Path(path).read_bytes())
        except (OSError, InputError) as error:
            raise InputError(f"{path} is not a calibration: {error}") from error
        if calibration.schema != _SCHEMA:
            raise InputError(f"{path} has schema {calibration.schema!r}; this version reads {_SCHEMA}.")
        return calibration


def _is_measured(path: str | os.PathLike[str]) -> bool:
    # A file of `atorch-ns calibrate` is a cluster specification with this key; one of factors has none.
    try:
        return "measured" in read_spec(Path(path), [])
    except InputError:
        return False


def read_calibration(path: str | os.PathLike[str], cluster: Cluster) -> Hardware | Calibration:
    """The file of ``search_calibration``: figures of ``atorch-ns calibrate``, or factors of earlier trials.

    Raises:
        InputError: if it is neither, or if the figures are of another cluster than this job's.
    """
    return measured_for(Path(path), cluster) if _is_measured(path) else Calibration.load(path)


def computed_and_communicated(prediction: Estimate) -> tuple[float, float]:
    """A predicted step in two parts, in seconds."""
    communication_s = sum(getattr(prediction.time, name) for name in _COMMUNICATED)
    return prediction.step_seconds - communication_s, communication_s


def _geometric_mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.exp(statistics.fmean(map(math.log, numbers))) if numbers else 1.0


def _slow_down_link(link: Link, factor: float) -> Link:
    def slower(rate: Rate) -> Rate:
        return Rate(rate.latency_s * factor, rate.bytes_per_s / factor)

    return replace(
        link,
        rate=slower(link.rate),
        collectives={name: slower(rate) for name, rate in link.collectives.items()},
    )


_PRIOR: Final = 0.1  # weight of the prior that factors are 1, in observations
_RANGE: Final = (0.05, 20.0)  # factors beyond this mean that the figures are of another machine
_ROUNDS: Final = 30  # iterations of Gauss-Newton; there is no test of convergence


class _Observation(NamedTuple):
    precision: str
    computed: float  # seconds, predicted
    communicated: float
    measured: float  # seconds, the median step of the trial
    weight: float


def refit(
    outcome: SearchOutcome, actual: TrialOutcome | None = None, *, registry: Registry | None = None
) -> Calibration:
    """Fits corrections of the estimate to a search's trials and to training with its winner.

    Args:
        outcome: the search.
        actual: steps of training with the winner, in the form of a trial; ``None`` for the trials alone.
            They count as much as all trials together, for they are many and undisturbed.
        registry: the methods, which tell a candidate's compute precision; ``None`` for all installed.

    Returns:
        The factors of the search's device. They are relative to the figures that the search priced with.

    Raises:
        InputError: if nothing was measured that was also predicted.
    """
    methods = load_registry() if registry is None else registry
    pairs = [(row.candidate, row.trial, 1.0) for row in outcome.rows if row.trial is not None]
    num_trials = sum(trial.succeeded for _, trial, _ in pairs)
    if actual is not None and outcome.winner is not None:
        pairs.append((outcome.winner.candidate, actual, float(max(1, num_trials))))
    times: list[_Observation] = []
    peaks: dict[str, list[float]] = {}
    for candidate, result, weight in pairs:
        prediction = candidate.estimate
        if prediction is None:
            continue
        precision = _compute_precision(candidate, methods)
        if result.succeeded and prediction.step_seconds > 0:
            parts = computed_and_communicated(prediction)
            times.append(_Observation(precision, *parts, result.median_seconds, weight))
        # A trial that ran and exceeded the memory limit gives no time, but its peak counts.
        if result.peak_bytes and prediction.allocated_bytes > 0:
            peaks.setdefault(precision, []).append(max(result.peak_bytes) / prediction.allocated_bytes)
    if not times and not peaks:
        raise InputError(
            "no candidate of the search was both priced and measured, so there is nothing to learn."
        )
    compute, communication = _fit_factors(times)
    factors = Factors(
        compute=compute,
        communication=communication,
        memory={name: _clamp_factor(statistics.median(ratios)) for name, ratios in peaks.items()},
        num_trials=num_trials,
        num_steps=0 if actual is None else len(actual.step_seconds),
        error_before=_median_error(times, {}, 1.0),
        error_after=_median_error(times, compute, communication),
    )
    key = Calibration.key(outcome.setting.device, outcome.setting.world_size)
    return Calibration(devices={key: factors})


def _compute_precision(candidate: Candidate, registry: Registry) -> str:
    steps = []
    for name, config in candidate.steps:
        if name in registry:  # a method that is not installed here is passed over
            method = registry.get(name)
            steps.append(Chosen(method, method.Config.model_validate(config)))
    try:
        plan = fold_plan(steps)
    except AtorchError:
        return "float32"
    return plan.precision.compute_dtype or plan.precision.parameter_dtype


def _fit_factors(observations: Sequence[_Observation]) -> tuple[dict[str, float], float]:
    names = sorted({point.precision for point in observations})
    theta = np.zeros(len(names) + 1)  # [P + 1] logarithms of the factors, communication last
    for _ in range(_ROUNDS if observations else 0):
        rows, targets, weights = [], [], []
        for point in observations:
            index = names.index(point.precision)
            compute_s = math.exp(theta[index]) * point.computed
            communication_s = math.exp(theta[-1]) * point.communicated
            total = compute_s + communication_s
            # The derivative of log(total) by the logarithm of a factor is the share of its part.
            row = np.zeros(len(theta))
            row[index], row[-1] = compute_s / total, communication_s / total
            rows.append(row)
            # Linearised at theta, with row @ theta added: the solution is the next theta, not a step.
            targets.append(math.log(point.measured / total) + row @ theta)
            weights.append(point.weight)
        design, weight = np.array(rows), np.array(weights)  # [N, P + 1] and [N]
        # The prior is a ridge on theta itself, so a factor without observations stays at 1.
        normal = design.T @ (weight[:, None] * design) + _PRIOR * np.eye(len(theta))
        update = np.linalg.solve(normal, design.T @ (weight * np.array(targets)))
        theta = np.clip(update, math.log(_RANGE[0]), math.log(_RANGE[1]))
    return {name: math.exp(theta[index]) for index, name in enumerate(names)}, math.exp(theta[-1])


def _median_error(
    observations: Sequence[_Observation], compute: Mapping[str, float], communication: float
) -> float:
    errors = []
    for point in observations:
        prediction = compute.get(point.precision, 1.0) * point.computed + communication * point.communicated
        errors.append(abs(prediction / point.measured - 1))
    return statistics.median(errors) if errors else 0.0


def _clamp_factor(value: float) -> float:
    return min(max(value, _RANGE[0]), _RANGE[1])
