"""Policies: what nnScaler calls PAS policies, as strategies of this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atorch_ns.errors import InputError
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.system import table_rows
from atorch_ns.text import did_you_mean, with_article

POLICIES: Final = ("dp", "tp", "pp", "data", "hybrid", "autodist")

_FILES: Final = (".json", ".yaml", ".yml")  # suffixes of strategy files

Step = tuple[str, Any]

_NUMBER = (int, float)
_TYPES: Final = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple)}
_ROWS: Final = table_rows(Path(__file__).with_name("settings.csv"))
_SETTINGS: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {  # types of each setting, by policy
    policy: {
        row["setting"]: tuple(_TYPES[name] for name in row["types"].split())
        for row in _ROWS
        if policy in row["policies"].split()
    }
    for policy in POLICIES
}
_REFUSED: Final = {row["setting"]: row["refused"] for row in _ROWS if row["refused"]}  # with the reasons


@dataclass(frozen=True)
class Division:
    """Division of one scale unit by a policy.

    Attributes:
        num_stages: stages of the pipeline, 1 for none.
        stages_per_rank: stages on each rank of the pipeline.
        operators: the config of ``operator_parallel``; ``None`` if nothing is divided.
        pipeline: the config of ``pipeline_parallel``.
        recompute: the config of ``checkpoint``.
        notes: explanations of settings whose meaning here is not obvious.
    """

    num_stages: int = 1
    stages_per_rank: int = 1
    operators: dict[str, Any] | None = None
    pipeline: dict[str, Any] = field(default_factory=dict)
    recompute: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def pipeline_ranks(self) -> int:
        """Number of ranks along the pipeline."""
        return self.num_stages // self.stages_per_rank


def check_settings(policy: str, settings: Mapping[str, Any]) -> None:
    """Checks the ``pas_config`` of a policy.

    Raises:
        InputError: naming every key and value that is wrong.
    """
    types = _SETTINGS[policy]
    problems = []
    for key, value in settings.items():
        if key.startswith("_"):  # the user's own
            continue
        if key in _REFUSED:
            problems.append(f"{key} is not taken: {_REFUSED[key]}.")
        elif key not in types:
            hint = did_you_mean(
                key, types, otherwise=f"The policy {policy} has {', '.join(types) or 'no settings'}."
            )
            problems.append(
                f"{key!r} is unknown.{hint} Keys of your own begin with '_', or stand in user_config."
            )
        elif not isinstance(value, types[key]) or (isinstance(value, bool) and bool not in types[key]):
            problems.append(f"{key} is {value!r}, {with_article(value)}.")
        elif isinstance(value, _NUMBER) and not isinstance(value, bool) and key != "seed" and value <= 0:
            problems.append(f"{key} must be positive; it is {value!r}.")
    if problems:
        raise InputError("\n".join(f"pas_config of {policy}: {problem}" for problem in problems))


def division_by(policy: str, config: ComputeConfig) -> Division:
    """The division of a scale unit by a named policy.

    Raises:
        InputError: if there is no such policy, or it cannot satisfy the config.
    """
    if policy not in POLICIES:
        raise InputError(
            f"unknown policy {policy!r}.{did_you_mean(policy, POLICIES)} Policies are {', '.join(POLICIES)}, or a "
            "function (graph, config) -> graph."
        )
    settings = config.pas_config
    check_settings(policy, settings)
    if policy == "dp":
        if config.plan_ngpus != 1:
            raise InputError(
                f"the policy dp divides nothing, so plan_ngpus must be 1; it is {config.plan_ngpus}."
            )
        return Division()
    if policy == "tp":
        return Division(operators={"policy": "random", "seed": settings.get("seed", 1)})  # as in nnScaler
    if policy == "data":
        return Division(operators={"policy": "batch"})  # along the samples
    if policy == "autodist":
        return _autodist_division(config, settings)
    num_stages = config.plan_ngpus if policy == "pp" else _num_stages(config, settings)
    operators = None if policy == "pp" else {"policy": "batch"}
    return _staged_division(policy, config, settings, num_stages, operators=operators)


def _autodist_division(config: ComputeConfig, settings: Mapping[str, Any]) -> Division:
    operators: dict[str, Any] = {}
    if "mem_constraint" in settings:
        operators["memory_gib"] = settings["mem_constraint"] * 1e9 / 2**30  # from GB
    if "partition_constraints_path" in settings:
        operators["constraints"] = settings["partition_constraints_path"]
    if "load_plan_path" in settings:
        operators["plan"] = settings["load_plan_path"]
    recompute = None
    if settings.get("recompute_modules"):
        recompute = {"wrap_class": [name.strip() for name in settings["recompute_modules"].split(",")]}
    num_stages = _num_stages(config, settings)
    degree = settings.get("max_partition_degree", config.plan_ngpus)
    if degree > config.plan_ngpus:
        raise InputError(
            f"max_partition_degree={degree} exceeds plan_ngpus={config.plan_ngpus}, the number of ranks."
        )
    if num_stages == 1 and degree < config.plan_ngpus:
        raise InputError(
            f"max_partition_degree={degree} is below plan_ngpus={config.plan_ngpus}, so the module must be cut into stages: give "
            "pipeline_pivots or pipeline_nstages."
        )
    if settings.get("pp_size", num_stages) != num_stages:
        raise InputError(
            "pp_size: autodist puts one stage on each rank, so pp_size is the number of stages; leave it out."
        )
    notes = tuple(_autodist_notes(settings))
    return _staged_division(
        "autodist", config, settings, num_stages, operators=operators, recompute=recompute, notes=notes
    )


def _autodist_notes(settings: Mapping[str, Any]) -> list[str]:
    dtypes = ("use_fp16", "use_bf16", "use_memory_efficient_fp16", "use_memory_efficient_bf16")
    notes = [
        f"{key}: memory is counted by the parameters' own dtype; set it by module_dtype"
        for key in dtypes
        if settings.get(key)
    ]
    if settings.get("use_apex_fused_adam_v2"):
        notes.append(
            "use_apex_fused_adam_v2: two states of the parameters' dtype are counted, as for any Adam"
        )
    notes += [
        f"{key}: operators are priced by the device's figures, not by runs of each, so there is nothing to redo"
        for key in ("re_profile", "parallel_profile")
        if key in settings
    ]
    if "task_name" in settings:
        notes.append(f"task_name: this is the plan of {settings['task_name']}")
    if settings.get("verbose"):
        notes.append("verbose: the longest operators are in the log, and in the report")
    if "transient_mem_coef" in settings:
        notes.append("transient_mem_coef: the two largest peaks are counted as they are, not by a factor")
    return notes


def is_strategy_file(policy: Any) -> bool:
    """Returns whether a policy is the path of a strategy file."""
    return isinstance(policy, str) and policy.endswith(_FILES)


def pivots_of(settings: Mapping[str, Any]) -> list[str]:
    """The modules at which stages may begin."""
    return [name.strip() for name in settings.get("pipeline_pivots", "").split(",") if name.strip()]


def _num_stages(config: ComputeConfig, settings: Mapping[str, Any]) -> int:
    number, pivots = settings.get("pipeline_nstages", "auto"), pivots_of(settings)
    if number == "auto":
        return min(config.plan_ngpus, len(pivots) + 1)  # one begins at each pivot
    if not isinstance(number, int):
        raise InputError(f"pipeline_nstages must be a number or 'auto'; it is {number!r}.")
    if number == 1 and pivots:
        raise InputError("pipeline_pivots are given and pipeline_nstages is 1: leave one of them out.")
    return number


def _staged_division(
    policy: str,
    config: ComputeConfig,
    settings: Mapping[str, Any],
    num_stages: int,
    *,
    operators: dict[str, Any] | None,
    recompute: dict[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> Division:
    if num_stages == 1:
        of_stages = [key for key in (*_SETTINGS["hybrid"], "update_freq") if key in settings]
        idle = [key for key in of_stages if key != "pipeline_nstages"]  # which asked for one stage
        notes = (*notes, *(f"{key}: there is one stage, so nothing uses it" for key in idle))
        return Division(operators=operators, recompute=recompute, notes=notes)
    if not config.use_end2end:
        raise InputError(
            f"the policy {policy} makes a pipeline of {num_stages} stages, which trains micro-batches with train_step: set "
            "use_end2end=True, for a module whose forward takes one sample and returns the loss first."
        )
    ranks = settings.get("pp_size", num_stages)
    if num_stages % ranks or config.plan_ngpus % ranks:
        raise InputError(
            f"{num_stages} stages on pp_size={ranks} of {config.plan_ngpus} ranks: pp_size must divide both."
        )
    is_divided = config.plan_ngpus // ranks > 1
    return Division(
        num_stages=num_stages,
        stages_per_rank=num_stages // ranks,
        operators=operators if is_divided else None,
        pipeline=_pipeline_config(policy, config, settings, num_stages, ranks=ranks),
        recompute=recompute,
        notes=notes,
    )


def _pipeline_config(
    policy: str, config: ComputeConfig, settings: Mapping[str, Any], num_stages: int, *, ranks: int
) -> dict[str, Any]:
    micros = settings.get("pipeline_nmicros")
    if micros is None and policy == "autodist":
        micros = settings.get("update_freq")
    if not isinstance(micros, int):
        raise InputError(
            f"the policy {policy} with {num_stages} stages needs pipeline_nmicros in pas_config."
        )
    schedule = settings.get("pipeline_scheduler", "1f1b" if num_stages == ranks else "1f1b_interleaved")
    if schedule == "1f1b_plus":
        raise InputError(
            "pipeline_scheduler 1f1b_plus puts a large embedding on all ranks; use 1f1b, and divide the operators of each stage "
            "(pipeline_nstages below plan_ngpus), which divides the embedding too."
        )
    if schedule == "infer_pipe" and not config.inference_only:
        raise InputError(
            "pipeline_scheduler infer_pipe has no backward passes: set inference_only=True, or use 1f1b."
        )
    pipeline: dict[str, Any] = {
        "schedule": "GPipe" if schedule == "infer_pipe" else schedule,  # only its forward passes run
        "num_micro_batches": micros,
        "stages_per_rank": num_stages // ranks,
    }
    pivots = pivots_of(settings)
    if policy == "autodist":
        pass  # which chooses among them
    elif not pivots:
        pipeline["split_method"] = "uniform"
    elif len(pivots) == num_stages - 1:
        pipeline["split_points"] = pivots
    else:
        raise InputError(
            f"the policy {policy} begins a stage at each of pipeline_pivots, so {num_stages} stages need {num_stages - 1}, but "
            f"there are {len(pivots)}; autodist chooses among them."
        )
    return pipeline


def strategy_of(division: Division, config: ComputeConfig) -> list[Step]:
    """The methods for a division and the config beside it.

    Raises:
        InputError: if the stages do not divide the ranks of a unit.
    """
    pipeline = division.pipeline_ranks
    if config.plan_ngpus % pipeline:
        raise InputError(f"{pipeline} stages do not divide the {config.plan_ngpus} ranks of a scale unit.")
    tensor = config.plan_ngpus // pipeline
    axes = [("tensor", tensor), ("pipeline", pipeline)]  # innermost first
    # Each of zero_ngroups groups holds all optimizer states once; the units of a group are the axis zero.
    if config.zero_ngroups > 1:
        axes += [("zero", config.num_units // config.zero_ngroups), ("data", config.zero_ngroups)]
    else:
        axes.append(("data", config.num_units))
    steps: list[Step] = [("parallel_mode", {"axes": axes})]
    if pipeline > 1:
        steps.append(("pipeline_parallel", division.pipeline))
    if tensor > 1:
        if division.operators is None:
            raise InputError(f"nothing divides the operators of a stage over its {tensor} ranks.")
        steps.append(("operator_parallel", division.operators))
    if division.recompute is not None:
        steps.append(("checkpoint", division.recompute))
    if config.runtime_ngpus > 1:
        zero = config.use_zero and not config.inference_only
        steps.append(("zero2", {}) if zero else ("ddp", {"reducer": "own"}))
    return steps
