"""One row: a model under one strategy on forked ranks, compared with one process on the same global batches."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from atorch_ns import errors
from atorch_ns.method import load_registry
from atorch_ns.testing import Case, Outcome, Trajectory, catch_ranks, compare, reference_run, run_ranks
from atorch_ns.testing.parity import accelerate_case, whole_parameters
from benchmarks._models.entry import Unfit, num_batch_norms

__all__ = ["STRATEGIES", "Reference", "Strategy", "find_reference", "run_row"]

STEPS: Final = 3
GLOBAL_BATCH: Final = 8
PARAM_TOL: Final = 2e-4
LOSS_TOL: Final = 1e-5
ROUNDINGS: Final = 10.0
"""A run may differ by this many times what one rounding of the weights at the start changes."""
MOST_NOISE: Final = 0.02
_RATES: Final = (1e-2, 1e-3, 1e-4)
_BATCH_NORM_METHODS: Final = ("ddp", "zero1", "zero2", "fsdp", "pipeline_parallel")


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


STRATEGIES: Final = (
    Strategy(name="fsdp + checkpoint", num_ranks=2, methods=("fsdp", "checkpoint")),
    Strategy(name="ddp", num_ranks=2, methods=("ddp",)),
    Strategy(name="zero1", num_ranks=2, methods=("zero1",)),
    Strategy(name="zero2", num_ranks=2, methods=("zero2",)),
    Strategy(name="tensor 2", num_ranks=2, methods=(_axes(tensor=2), "tensor_parallel")),
    Strategy(name="pipeline 2", num_ranks=2, methods=(_axes(pipeline=2), "pipeline_parallel")),
    Strategy(name="sequence 2", num_ranks=2, methods=(_axes(sequence=2), "sequence_parallel")),
    Strategy(name="expert 2", num_ranks=2, methods=(_axes(expert=2), "expert_parallel"), mixtures_only=True),
    Strategy(
        name="tensor 2 × pipeline 2",
        num_ranks=4,
        methods=(_axes(tensor=2, pipeline=2), "tensor_parallel", "pipeline_parallel"),
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
class Reference:
    """One process with plain torch.

    Attributes:
        path: file of its trajectory.
        noise: how far a run from weights that are one rounding off gets, in units of updates.
        loss_noise: the same of the losses.
        rate: learning rate.
        cpu_s: processor time of the run.
    """

    path: Path
    noise: float
    loss_noise: float
    rate: float
    cpu_s: float


def find_reference(case: Case, folder: Path, timeout_s: float, dtype: torch.dtype | None = None) -> Reference:
    """Trains the case in one process, twice: as it is, and from weights that are one rounding off.

    Raises:
        Unfit: if it does not train, or no learning rate makes two such runs comparable.
    """
    outcome = catch_ranks(
        _reference, 1, args=(case, folder, dtype), timeout_s=timeout_s, init_process_group=False
    )[0]
    if outcome.value is None:
        raise Unfit(f"does not train in one process: {_last_line(outcome)}")
    return outcome.value


def _reference(case: Case, folder: Path, dtype: torch.dtype | None) -> Reference:
    began = time.process_time()
    model = case.build()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run(rate: float, *, rounded: bool = False) -> Trajectory:
        model.load_state_dict(state)
        return reference_run(
            case,
            steps=STEPS,
            global_batch=GLOBAL_BATCH,
            optim_args={**_adamw(rate)},
            optim_param_func=trained,
            autocast_dtype=dtype,
            prepare=_round if rounded else None,
        )

    for rate in _RATES:
        torch.manual_seed(1)
        exact = run(rate)
        if not all(abs(loss) < float("inf") for loss in exact.losses):
            raise Unfit(f"losses of one process are {exact.losses}")
        torch.manual_seed(2)
        apart = compare(exact, run(rate, rounded=True))
        if apart.max_param_error <= MOST_NOISE or dtype is not None:
            break
    else:
        raise Unfit(
            f"a rounding of its weights changes its parameters by {apart.max_param_error:.0%} of their updates in {STEPS} "
            f"steps ({apart.worst_param}), so two runs cannot be compared"
        )
    path = folder / f"reference_{dtype}.pt"
    torch.save(exact, path)
    return Reference(
        path=path,
        noise=apart.max_param_error,
        loss_noise=apart.max_loss_error,
        rate=rate,
        cpu_s=time.process_time() - began,
    )


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


def run_row(case: Case, strategy: Strategy, reference: Reference, timeout_s: float) -> dict[str, Any]:
    """The row of a case under a strategy."""
    methods = None if strategy.methods is None else _with_batch_norms(strategy.methods, case.build())
    began = time.perf_counter()
    outcomes = catch_ranks(
        _train, strategy.num_ranks, args=(case, methods, reference), timeout_s=timeout_s
    )
    return {
        **_judged(outcomes, reference, strategy),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def _with_batch_norms(methods: tuple[Any, ...], model: nn.Module) -> list[Any]:
    """Statistics of the global batch, as one process has them, where a method can."""
    if not num_batch_norms(model):
        return list(methods)
    registry = load_registry()
    able = [
        name
        for name in _BATCH_NORM_METHODS
        if name in methods and "sync_batchnorm" in registry.get(name).Config.model_fields
    ]
    return [(method, {"sync_batchnorm": True}) if method in able else method for method in methods]


def _train(case: Case, methods: list[Any] | None, reference: Reference) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    began = time.process_time()
    result = accelerate_case(
        case,
        methods,
        steps=STEPS,
        global_batch=GLOBAL_BATCH,
        optim_args=_adamw(reference.rate),
        optim_param_func=trained,
        **({"time_limit": 20} if methods is None else {}),
    )
    planned = time.process_time()
    initial = whole_parameters(result)
    held = sum(parameter.numel() for parameter in result.model.parameters())
    losses = [float(result.train_step(batch)) for batch in result.dataloader]
    final = whole_parameters(result)
    trained_s = time.process_time() - planned
    report = compare(torch.load(reference.path, weights_only=False), Trajectory(losses=losses, initial=initial, final=final))
    digest = hashlib.sha256()
    for name in sorted(final):
        digest.update(final[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        "param_error": report.max_param_error,
        "worst": report.worst_param,
        "loss_error": report.max_loss_error,
        "losses": losses,
        "missing": [*report.missing, *report.unexpected],
        "digest": digest.hexdigest()[:16],
        "plan_s": round(planned - began, 2),
        "train_s": round(trained_s, 2),
        "applied": str(result.applied) if methods is None else "",
        "held": held,
    }


def _judged(outcomes: list[Outcome[Any]], reference: Reference, strategy: Strategy) -> dict[str, Any]:
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
        return {"is": "hung", "reason": f"{len(late)} ranks at the limit{said}", "trace": first.traceback[:3000]}
    own = [outcome for outcome in raised if outcome.error_type != "RankError"] or raised
    return {"is": "refused", "error": own[0].error_type, "reason": own[0].message.strip(), "ranks": len(raised)}


def _is_ours(outcome: Outcome[Any]) -> bool:
    return issubclass(getattr(errors, outcome.error_type, Exception), errors.AtorchError)


def _compared(values: list[dict[str, Any]], reference: Reference, strategy: Strategy) -> dict[str, Any]:
    reduced = strategy.autocast_dtype is not None
    param_tol = max(0.15 if reduced else PARAM_TOL, ROUNDINGS * reference.noise)
    loss_tol = max(4e-3 if reduced else LOSS_TOL, ROUNDINGS * reference.loss_noise)
    first = values[0]
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
        "plan_s": max(value["plan_s"] for value in values),
        "train_s": max(value["train_s"] for value in values),
        **({"applied": first["applied"]} if first["applied"] else {}),
    }


def _last_line(outcome: Outcome[Any]) -> str:
    lines = [line for line in outcome.message.strip().splitlines() if line.strip()]
    text = lines[0] if lines else outcome.status
    return f"{outcome.error_type}: {text}"[:500] if outcome.error_type else text[:500]
