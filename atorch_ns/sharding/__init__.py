"""Dividing layers, samples and experts over ranks: plans, collectives, checks."""

from __future__ import annotations

from atorch_ns.sharding._collectives import (
    all_gather,
    all_to_all,
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from atorch_ns.sharding._divided_logits import LogitUses
from atorch_ns.sharding._expert_list import divide_expert_list
from atorch_ns.sharding._expert_list_check import why_not_answerable
from atorch_ns.sharding._experts import divide_experts
from atorch_ns.sharding._experts_balance import GlobalBalance
from atorch_ns.sharding._experts_check import why_not_dividable
from atorch_ns.sharding._experts_find import FoundExperts, ListedExperts, UnfitExperts, find_experts
from atorch_ns.sharding._loss_guard import explain_divided_weights
from atorch_ns.sharding._packing import Packing
from atorch_ns.sharding._runs import find_runs
from atorch_ns.sharding._sequence_join import join_at_first_call, join_blocks
from atorch_ns.sharding._sequence_run import SequenceRun, SequenceSettings
from atorch_ns.sharding._tensor_apply import Divided, RegionSpec, divide
from atorch_ns.sharding._tensor_choose import ChosenPlan, choose_plan
from atorch_ns.sharding._tensor_degree import check_degree, degrees
from atorch_ns.sharding._tensor_find import find_tensor_plan, with_vocabulary
from atorch_ns.sharding._tensor_kinds import kind_of
from atorch_ns.sharding._tensor_misfits import misfits, parameter_dims
from atorch_ns.sharding._tensor_model_plan import model_plan
from atorch_ns.sharding._tensor_plan import STYLES, LayerStyle, Layout, TensorPlan, style_named
from atorch_ns.sharding._tensor_region import Division
from atorch_ns.sharding._tensor_regions import regions_in
from atorch_ns.sharding._tensor_sequence import StreamSpec
from atorch_ns.sharding._tensor_test import Tested, fits, self_test
from atorch_ns.sharding._tensor_trace import LayerGraph, trace_layers
from atorch_ns.sharding._tensor_units import Unit, unit_for
from atorch_ns.sharding._vocabulary_outputs import LogitOutputs
from atorch_ns.sharding._vocabulary_test import LOSS_TOLERANCE, LossStudy, compare_losses, study_logits

__all__ = [
    "LOSS_TOLERANCE",
    "STYLES",
    "ChosenPlan",
    "Divided",
    "Division",
    "FoundExperts",
    "GlobalBalance",
    "LayerGraph",
    "LayerStyle",
    "Layout",
    "ListedExperts",
    "LogitOutputs",
    "LogitUses",
    "LossStudy",
    "Packing",
    "RegionSpec",
    "SequenceRun",
    "SequenceSettings",
    "StreamSpec",
    "TensorPlan",
    "Tested",
    "UnfitExperts",
    "Unit",
    "all_gather",
    "all_to_all",
    "check_degree",
    "choose_plan",
    "compare_losses",
    "copy_to",
    "degrees",
    "divide",
    "divide_expert_list",
    "divide_experts",
    "exchange",
    "explain_divided_weights",
    "find_experts",
    "find_runs",
    "find_tensor_plan",
    "fits",
    "gather_from",
    "join_at_first_call",
    "join_blocks",
    "kind_of",
    "misfits",
    "model_plan",
    "parameter_dims",
    "reduce_from",
    "reduce_scatter",
    "regions_in",
    "scatter_to",
    "self_test",
    "study_logits",
    "style_named",
    "trace_layers",
    "unit_for",
    "why_not_answerable",
    "why_not_dividable",
    "with_vocabulary",
]
