"""Pipelines: where a model is cut, which schedule runs the stages, and how long that takes."""

from __future__ import annotations

from atorch_ns.pipeline._actions import Action, Orders, actions, live_bytes, live_micro_batches
from atorch_ns.pipeline._advice import train_step_only
from atorch_ns.pipeline._block_costs import BlockCosts, split_backward
from atorch_ns.pipeline._choose import ScheduleCandidate, ScheduleChoice, choose_for_device, choose_schedule
from atorch_ns.pipeline._crossing import Carried, Crossing, plan_crossings, refused_cuts
from atorch_ns.pipeline._division import Division, divide_parameters
from atorch_ns.pipeline._graph import Call, CallGraph, TensorSpec, Value
from atorch_ns.pipeline._install import StageSettings, install_stages
from atorch_ns.pipeline._methods import custom_cuts, parameter_cuts, uniform_cuts, uniform_floor_cuts
from atorch_ns.pipeline._nests import num_rows
from atorch_ns.pipeline._partition import StageMemory, partition, stage_ranges
from atorch_ns.pipeline._runner import PipelineRunner
from atorch_ns.pipeline._schedules import SCHEDULES, ScheduleInfo, get_schedule
from atorch_ns.pipeline._simulate import StageCosts, Timeline, simulate
from atorch_ns.pipeline._stage import StageModule, Stub, Unit
from atorch_ns.pipeline._stage_set import Signature, StageSet, signature
from atorch_ns.pipeline._step import PipelineStep
from atorch_ns.pipeline._trace import CallTracer, HowToRun, trace_really, without_memory
from atorch_ns.pipeline._units import find_units

__all__ = [
    "SCHEDULES",
    "Action",
    "BlockCosts",
    "Call",
    "CallGraph",
    "CallTracer",
    "Carried",
    "Crossing",
    "Division",
    "HowToRun",
    "Orders",
    "PipelineRunner",
    "PipelineStep",
    "ScheduleCandidate",
    "ScheduleChoice",
    "ScheduleInfo",
    "Signature",
    "StageCosts",
    "StageMemory",
    "StageModule",
    "StageSet",
    "StageSettings",
    "Stub",
    "TensorSpec",
    "Timeline",
    "Unit",
    "Value",
    "actions",
    "choose_for_device",
    "choose_schedule",
    "custom_cuts",
    "divide_parameters",
    "find_units",
    "get_schedule",
    "install_stages",
    "live_bytes",
    "live_micro_batches",
    "num_rows",
    "parameter_cuts",
    "partition",
    "plan_crossings",
    "refused_cuts",
    "signature",
    "simulate",
    "split_backward",
    "stage_ranges",
    "trace_really",
    "train_step_only",
    "uniform_cuts",
    "uniform_floor_cuts",
    "without_memory",
]
