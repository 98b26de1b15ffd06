"""One row: a model under one strategy on forked ranks, compared with one process on the same global batches."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from atorch_ns import errors
from atorch_ns.capture.nests import floats_to, map_tensors
from atorch_ns.method import load_registry
from atorch_ns.sharding import choose_plan, trace_layers
from atorch_ns.system import parent_tie
from atorch_ns.testing import (
    Case,
    Outcome,
    ParityReport,
    SyntheticDataset,
    Trajectory,
    catch_ranks,
    compare,
    reference_run,
    take,
)
from atorch_ns.testing.parity import accelerate_case, whole_parameters
from benchmarks._models.entry import Unfit, num_batch_norms

__all__ = ["STRATEGIES", "Reference", "References", "Strategy", "judged", "run_row"]

STEPS: Final = 3
GLOBAL_BATCH: Final = 8
LONG_PLAN_S: Final = 3.0
"""CPU seconds of a call from which on it is measured what of them finds the division."""
PARAM_TOL: Final = 2e-4
LOSS_TOL: Final = 1e-5
ROUNDINGS: Final = 10.0
"""A run may differ by this many times what one rounding of the weights at the start changes."""
MOST_NOISE: Final = 0.02
_ATTEMPTS: Final = ((False, 1e-2), (False, 1e-3), (True, 1e-2), (True, 1e-4))
"""Whether in double precision, and the learning rate, until rounding is no longer what a run depends on."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A column of the sweep.

    Attributes:
        name: its heading.
        num_ranks: processes.
        methods: the strategy; ``None`` to have one found.
        every: only every n-th model is run under it.
        autocast_dtype: precision of the forward pass, of the reference too.
        mixtures_only: only models with experts.
    """

    name: str
    num_ranks: int
    methods: tuple[Any, ...] | None
    every: int = 1
    autocast_dtype: torch.dtype | None = None
    mixtures_only: bool = False


def _axes(**sizes: int) -> Any:
    return ("parallel_mode", (list(sizes.items()), None))


_PIPELINE: Final = ("pipeline_parallel", {"num_micro_batches": 2})
STRATEGIES: Final = (
    Strategy(name="fsdp + checkpoint", num_ranks=2, methods=("fsdp", "checkpoint")),
    Strategy(name="ddp", num_ranks=2, methods=("ddp",)),
    Strategy(name="zero1", num_ranks=2, methods=("zero1",)),
    Strategy(name="zero2", num_ranks=2, methods=("zero2",)),
    Strategy(name="tensor 2", num_ranks=2, methods=(_axes(tensor=2), "tensor_parallel")),
    Strategy(name="pipeline 2", num_ranks=2, methods=(_axes(pipeline=2), _PIPELINE)),
    Strategy(name="sequence 2", num_ranks=2, methods=(_axes(sequence=2), "sequence_parallel")),
    Strategy(name="expert 2", num_ranks=2, methods=(_axes(expert=2), "expert_parallel"), mixtures_only=True),
    Strategy(
        name="tensor 2 × pipeline 2",
        num_ranks=4,
        methods=(_axes(tensor=2, pipeline=2), "tensor_parallel", _PIPELINE),
    ),
    Strategy(
        name="tensor 2 × fsdp 2", num_ranks=4, methods=(_axes(tensor=2, zero=2), "tensor_parallel", "fsdp")
    ),
    Strategy(
        name="ddp, bf16",
        num_ranks=2,
        methods=("ddp", ("amp_native", "bf16")),
        every=5,
        autocast_dtype=torch.bfloat16,
    ),
    Strategy(name="automatic", num_ranks=2, methods=None, every=20),
)


@dataclass(frozen=True, kw_only=True)
class InParts(Case):
    """A case whose batch is computed in parts: the mean of their losses.

    Attributes:
        whole: the case itself.
        part: ``(batch, 0 or 1)`` to half of the batch.
        num_parts: 2, or 1 for a part that is a batch in another order.
    """

    whole: Case
    part: Callable[[Any, int], Any]
    num_parts: int = 2

    @classmethod
    def of(cls, case: Case, part: Callable[[Any, int], Any], num_parts: int = 2) -> InParts:
        """The case in parts."""

        def loss_func(batch: Any, outputs: Any) -> Tensor:
            losses = [case.loss_func(part(batch, number), output) for number, output in enumerate(outputs)]
            return torch.stack(losses).mean()

        given = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
        return cls(**{**given, "loss_func": loss_func}, whole=case, part=part, num_parts=num_parts)

    def call(self, model: nn.Module, batch: Any) -> Any:
        """The outputs of the parts."""
        return [self.whole.call(model, self.part(batch, number)) for number in range(self.num_parts)]


_PARTS: Final[Mapping[str, Callable[[Any, int], Any]]] = {
    "ranks": lambda batch, number: take(batch, slice(number, None, 2)),
    "micro-batches": lambda batch, number: take(
        batch, slice(number * GLOBAL_BATCH // 2, (number + 1) * GLOBAL_BATCH // 2)
    ),
}
"""Halves of a batch, as two data ranks and as two micro-batches have them."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One process with plain torch.

    Attributes:
        paths: files of its trajectories: of the whole batch under ``""``; where the loss is not a mean over parts, also of
            the batch in those parts, by what has them.
        double: whether everything is in double precision, as rounding decides what this model does in single.
        noise: how far a run gets from it that is rounded otherwise, in units of updates.
        loss_noise: the same of the losses.
        rate: learning rate.
        slowness: elapsed over processor time of the run: what others on this machine make of a second.
    """

    paths: Mapping[str, Path]
    double: bool
    noise: float
    loss_noise: float
    rate: float
    slowness: float


class References:
    """The runs of a case in one process, each found once.

    Args:
        case: the case.
        folder: where their trajectories are kept.
        timeout_s: the time limit of each, in seconds.
    """

    def __init__(self, case: Case, folder: Path, timeout_s: float) -> None:
        self._case, self._folder, self._timeout_s = case, folder, timeout_s
        self._found: dict[tuple[torch.dtype | None, bool], Reference] = {}

    def of(self, strategy: Strategy, *, double: bool = False) -> Reference:
        """The one with which a strategy is compared; in double precision, if that is asked for.

        Raises:
            Unfit: if the case does not train, or rounding decides what it does.
        """
        key = dtype, _ = strategy.autocast_dtype, double
        if key not in self._found:
            call = (self._case, self._folder, dtype, double)
            (outcome,) = catch_ranks(
                _reference, 1, args=call, timeout_s=self._timeout_s, init_process_group=False
            )
            if outcome.value is None:
                raise Unfit(f"in one process: {_last_line(outcome)}")
            self._found[key] = outcome.value
        return self._found[key]


def _reference(case: Case, folder: Path, dtype: torch.dtype | None, only_double: bool) -> Reference:
    began, began_cpu = time.perf_counter(), time.process_time()
    for double, rate in (attempt for attempt in _ATTEMPTS if attempt[0] or not only_double):
        exact, apart = _twice(_in_double(case) if double else case, rate, dtype)
        if apart.max_param_error <= MOST_NOISE or dtype is not None:
            break
    else:
        raise Unfit(
            f"a rounding of its weights changes its parameters by {apart.max_param_error:.0%} of their updates in {STEPS} "
            f"steps ({apart.worst_param}), in double precision too, so two runs cannot be compared"
        )
    tried, runs = _in_double(case) if double else case, {"": exact}
    runs |= {name: _run(InParts.of(tried, _PARTS[name]), rate, dtype) for name in _parts(tried)}
    paths = {name: folder / f"reference_{dtype}_{double}_{name}.pt" for name in runs}
    for name, path in paths.items():
        torch.save(runs[name], path)
    return Reference(
        paths=paths,
        double=double,
        noise=apart.max_param_error,
        loss_noise=apart.max_loss_error,
        rate=rate,
        slowness=max(1.0, (time.perf_counter() - began) / max(0.01, time.process_time() - began_cpu)),
    )


def _twice(case: Case, rate: float, dtype: torch.dtype | None) -> tuple[Trajectory, ParityReport]:
    """A run, and how far one gets from it whose weights begin one rounding off; with batch norms, whose samples stand in
    another order too, so that their statistics are rounded otherwise."""
    torch.manual_seed(1)
    exact = _run(case, rate, dtype)
    if not all(math.isfinite(loss) for loss in exact.losses):
        raise Unfit(f"losses of one process are {exact.losses}")
    torch.manual_seed(2)  # a model that draws random numbers is found by it
    if num_batch_norms(case.build()):
        case = InParts.of(
            case, lambda batch, _: map_tensors(lambda tensor: tensor.flip(0), batch), num_parts=1
        )
    return exact, compare(exact, _run(case, rate, dtype, prepare=_round))


def _run(
    case: Case, rate: float, dtype: torch.dtype | None, prepare: Callable[[nn.Module], object] | None = None
) -> Trajectory:
    """A run of a copy of the case's model."""
    return reference_run(
        dataclasses.replace(case, build=lambda: copy.deepcopy(case.build())),
        steps=STEPS,
        global_batch=GLOBAL_BATCH,
        optim_args=_adamw(rate),
        optim_param_func=trained,
        autocast_dtype=dtype,
        prepare=prepare,
    )


def _in_double(case: Case) -> Case:
    """The case in double precision."""

    def make_batch(batch_size: int, seed: int) -> Any:
        return floats_to(case.make_batch(batch_size, seed), torch.float64)

    return dataclasses.replace(case, build=lambda: case.build().double(), make_batch=make_batch)


def _parts(case: Case) -> list[str]:
    """The parts whose losses have another mean than the whole batch."""
    return [] if not num_batch_norms(case.build()) and _is_mean(case) else [*_PARTS]


def _is_mean(case: Case) -> bool:
    """Whether the loss of a batch is the mean of the losses of its parts."""
    model = case.build()
    batch = SyntheticDataset(case, GLOBAL_BATCH).batch(0, GLOBAL_BATCH)
    with torch.no_grad():
        whole = case.loss_func(batch, case.call(model, batch))
        for part in _PARTS.values():
            parts = InParts.of(case, part)
            if not torch.allclose(
                whole, parts.loss_func(batch, parts.call(model, batch)), rtol=1e-5, atol=1e-6
            ):
                return False
    return True


def _adamw(rate: float) -> dict[str, Any]:
    return {"lr": rate, "weight_decay": 0.1, "eps": 5e-3}


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _round(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                units = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * units)


def run_row(case: Case, strategy: Strategy, references: References, timeout_s: float) -> dict[str, Any]:
    """The row of a case under a strategy. What differs in single precision is run again in double.

    Raises:
        Unfit: if there is nothing to compare with.
    """
    reference = references.of(strategy)
    row = _row(case, strategy, reference, timeout_s)
    if row["is"] != "wrong" or reference.double or strategy.autocast_dtype is not None:
        return row
    try:
        double = references.of(strategy, double=True)
    except Unfit as error:
        return {**row, "in double precision": str(error)}
    return {**_row(case, strategy, double, timeout_s), "in single precision": row["reason"]}


def _row(case: Case, strategy: Strategy, reference: Reference, timeout_s: float) -> dict[str, Any]:
    methods = None if strategy.methods is None else _with_batch_norms(strategy.methods, case.build())
    began = time.perf_counter()
    outcomes = catch_ranks(
        _train,
        strategy.num_ranks,
        args=(case, methods, reference, parent_tie()),
        timeout_s=timeout_s * reference.slowness,
    )
    row = {**judged(outcomes, reference, strategy), "wall_s": round(time.perf_counter() - began, 1)}
    if strategy.name == "tensor 2" and row.get("plan_s", 0.0) > LONG_PLAN_S:
        row["tensor_plan_s"] = round(_tensor_plan_s(case), 2)
    return row


def _tensor_plan_s(case: Case) -> float:
    """CPU seconds in which the division itself is found and tested, without the comparison with one process."""
    model, batch = case.build(), case.make_batch(GLOBAL_BATCH, 0)
    began = time.process_time()
    choose_plan(model, 2, trace_layers(model, batch, case.call))
    return time.process_time() - began


def _with_batch_norms(methods: tuple[Any, ...], model: nn.Module) -> list[Any]:
    """Statistics of the global batch, as one process has them, where a method can."""
    if not num_batch_norms(model):
        return list(methods)
    registry, found = load_registry(), []
    for method in methods:
        name, config = method if isinstance(method, tuple) else (method, {})
        if "sync_batchnorm" in registry.get(name).Config.model_fields:
            config = {**config, "sync_batchnorm": True}
        found.append((name, config) if config else name)
    return found


def _train(
    case: Case, methods: list[Any] | None, reference: Reference, tie: Callable[[], None]
) -> dict[str, Any]:
    tie()
    warnings.simplefilter("ignore")
    began = time.process_time()
    result = accelerate_case(
        _in_double(case) if reference.double else case,
        methods,
        steps=STEPS,
        global_batch=GLOBAL_BATCH,
        optim_args=_adamw(reference.rate),
        optim_param_func=trained,
        **({"time_limit": 30} if methods is None else {}),
    )
    planned = time.process_time()
    initial = whole_parameters(result)
    held = sum(parameter.numel() for parameter in result.model.parameters())
    losses = [float(result.train_step(batch)) for batch in result.dataloader]
    final = whole_parameters(result)
    trained_s = time.process_time() - planned
    ours = Trajectory(losses=losses, initial=initial, final=final)
    # Where batch norms are asked to share statistics over ranks, a run on parts would not do.
    paths = dict(reference.paths)
    if methods is not None and num_batch_norms(result.job.module):
        paths.pop("ranks", None)
    reports = {name: compare(torch.load(path, weights_only=False), ours) for name, path in paths.items()}
    like, report = min(reports.items(), key=lambda item: item[1].max_param_error)
    digest = hashlib.sha256()
    for name in sorted(final):
        digest.update(final[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        "param_error": report.max_param_error,
        "worst": report.worst_param,
        "loss_error": report.max_loss_error,
        "losses": losses,
        "missing": [*report.missing, *report.unexpected],
        "like": like,
        "digest": digest.hexdigest()[:16],
        "plan_s": round(planned - began, 2),
        "train_s": round(trained_s, 2),
        "applied": str(result.applied) if methods is None else "",
        "held": held,
    }


def judged(outcomes: list[Outcome[Any]], reference: Reference, strategy: Strategy) -> dict[str, Any]:
    late = [outcome for outcome in outcomes if outcome.status == "timed_out"]
    raised = [outcome for outcome in outcomes if outcome.status == "raised"]
    died = [outcome for outcome in outcomes if outcome.status == "died"]
    if not (late or raised or died):
        return _compared([outcome.value for outcome in outcomes], reference, strategy)
    raw = [outcome for outcome in raised if not _is_ours(outcome)]
    if died or raw:
        first = (died or raw)[0]
        return {"is": "raw error", "reason": _last_line(first), "trace": first.describe()[-3000:]}
    if late:
        first = late[0]
        said = f"; rank {raised[0].rank} said: {_last_line(raised[0])}" if raised else ""
        return {
            "is": "hung",
            "reason": f"{len(late)} ranks at the limit{said}",
            "trace": first.traceback[:3000],
        }
    own = [outcome for outcome in raised if outcome.error_type != "RankError"] or raised
    return {
        "is": "refused",
        "error": own[0].error_type,
        "reason": own[0].message.strip(),
        "ranks": len(raised),
    }


def _is_ours(outcome: Outcome[Any]) -> bool:
    return issubclass(getattr(errors, outcome.error_type, Exception), errors.AtorchError)


def _compared(values: list[dict[str, Any]], reference: Reference, strategy: Strategy) -> dict[str, Any]:
    first = values[0]
    reduced = strategy.autocast_dtype is not None
    reduced = reduced or "bf16" in first["applied"] or "fp16" in first["applied"]
    param_tol = max(0.5 if reduced else PARAM_TOL, ROUNDINGS * reference.noise)
    loss_tol = max(1e-2 if reduced else LOSS_TOL, ROUNDINGS * reference.loss_noise)
    scale = max(1.0, *(abs(loss) for loss in first["losses"]))
    problems = []
    if first["missing"]:
        problems.append(f"other parameters: {', '.join(first['missing'][:5])}")
    if not first["param_error"] <= param_tol:
        problems.append(f"{first['worst']} is off by {first['param_error']:.1e} of its update")
    if not first["loss_error"] <= loss_tol * scale:
        problems.append(f"a loss is off by {first['loss_error']:.1e} of {first['losses'][0]:.3f}")
    if len({value["digest"] for value in values}) > 1:
        problems.append("ranks end with different parameters")
    return {
        "is": "wrong" if problems else "equal",
        **({"reason": "; ".join(problems)} if problems else {}),
        "param_error": first["param_error"],
        "loss_error": first["loss_error"],
        "noise": reference.noise,
        **({"double": True} if reference.double else {}),
        **({"parts of": first["like"]} if first["like"] else {}),
        "plan_s": max(value["plan_s"] for value in values),
        "train_s": max(value["train_s"] for value in values),
        **({"applied": first["applied"]} if first["applied"] else {}),
    }


def _last_line(outcome: Outcome[Any]) -> str:
    lines = [line for line in outcome.message.strip().splitlines() if line.strip()]
    text = lines[0] if lines else outcome.status
    return f"{outcome.error_type}: {text}"[:500] if outcome.error_type else text[:500]
