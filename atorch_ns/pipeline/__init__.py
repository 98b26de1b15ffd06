"""Pipelines: where a model is cut, which schedule runs the stages, and how long that takes."""

from __future__ import annotations

from atorch_ns.capture.nests import num_rows
from atorch_ns.pipeline.cut.crossing import Carried, Crossing, plan_crossings, refused_cuts
from atorch_ns.pipeline.cut.graph import Call, CallGraph, TensorSpec, Value, find_units
from atorch_ns.pipeline.cut.install import StageAssignment, StageSettings, divide_parameters, install_stages
from atorch_ns.pipeline.cut.partition import (
    StageMemory,
    custom_cuts,
    parameter_cuts,
    partition,
    stage_ranges,
    uniform_cuts,
    uniform_floor_cuts,
)
from atorch_ns.pipeline.cut.trace import CallTracer, HowToRun, trace_with_values, without_memory
from atorch_ns.pipeline.run.runner import PipelineRunner, Signature, StageSet, signature
from atorch_ns.pipeline.run.stage import StageModule, Stub, Unit
from atorch_ns.pipeline.schedule.actions import Action, Orders, actions, live_bytes, live_micro_batches
from atorch_ns.pipeline.schedule.choose import (
    BlockCosts,
    ScheduleCandidate,
    ScheduleChoice,
    choose_for_device,
    choose_schedule,
    split_backward,
)
from atorch_ns.pipeline.schedule.schedules import SCHEDULES, ScheduleInfo, get_schedule, train_step_only
from atorch_ns.pipeline.schedule.simulate import PipelineStep, StageCosts, Timeline, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "BlockCosts",
    "Call",
    "CallGraph",
    "CallTracer",
    "Carried",
    "Crossing",
    "HowToRun",
    "Orders",
    "PipelineRunner",
    "PipelineStep",
    "ScheduleCandidate",
    "ScheduleChoice",
    "ScheduleInfo",
    "Signature",
    "StageAssignment",
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
    "trace_with_values",
    "train_step_only",
    "uniform_cuts",
    "uniform_floor_cuts",
    "without_memory",
]
