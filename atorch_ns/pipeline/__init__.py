"""Pipelines: where a model is cut, which schedule runs the stages, and how long that takes."""

from atorch_ns.capture.nests import num_rows
from atorch_ns.pipeline.cut.crossing import plan_crossings, refused_cuts
from atorch_ns.pipeline.cut.graph import CallGraph, find_units, split_units
from atorch_ns.pipeline.cut.install import StageAssignment, StageSettings, divide_parameters, install_stages
from atorch_ns.pipeline.cut.shards import Shards, make_shards
from atorch_ns.pipeline.cut.trace import CallTracer, HowToRun, trace_with_values, without_memory
from atorch_ns.pipeline.plan.choose import (
    BUFFERS,
    BlockCosts,
    ScheduleChoice,
    choose_for_device,
    num_recomputed,
    split_backward,
)
from atorch_ns.pipeline.plan.partition import (
    custom_cuts,
    partition,
    stage_ranges,
    uniform_cuts,
    uniform_floor_cuts,
)
from atorch_ns.pipeline.run.executor import Links
from atorch_ns.pipeline.run.runner import PipelineRunner, Signature, StageSet, signature
from atorch_ns.pipeline.run.stage import StageModule, own_units
from atorch_ns.pipeline.schedule.actions import Action, Orders, live_bytes, live_micro_batches
from atorch_ns.pipeline.schedule.orders import PipelineSize
from atorch_ns.pipeline.schedule.recompute import RecomputeShare
from atorch_ns.pipeline.schedule.schedules import ScheduleInfo, get_schedule, train_step_only
from atorch_ns.pipeline.schedule.simulate import PipelineStep, StageCosts, checked_orders, simulate

__all__ = [
    "BUFFERS", "Action", "BlockCosts", "CallGraph", "CallTracer", "HowToRun", "Links", "Orders", "PipelineRunner",
    "PipelineSize", "PipelineStep", "RecomputeShare", "ScheduleChoice", "ScheduleInfo", "Shards", "Signature",
    "StageAssignment", "StageCosts", "StageModule", "StageSet", "StageSettings", "checked_orders",
    "choose_for_device", "custom_cuts", "divide_parameters", "find_units", "get_schedule", "install_stages",
    "live_bytes", "live_micro_batches", "make_shards", "num_recomputed", "num_rows", "own_units", "partition",
    "plan_crossings", "refused_cuts", "signature", "simulate", "split_backward", "split_units", "stage_ranges",
    "trace_with_values", "train_step_only", "uniform_cuts", "uniform_floor_cuts", "without_memory",
]  # fmt: skip
