"""Dividing layers, samples and experts over ranks: plans, collectives, checks."""

from __future__ import annotations

from atorch_ns.sharding.collectives import (
    all_gather,
    all_to_all,
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from atorch_ns.sharding.expert.balance import GlobalBalance
from atorch_ns.sharding.expert.check import why_not_answerable, why_not_dividable
from atorch_ns.sharding.expert.find import FoundExperts, ListedExperts, UnfitExperts, find_experts
from atorch_ns.sharding.expert.fused import divide_experts
from atorch_ns.sharding.expert.list import divide_expert_list
from atorch_ns.sharding.rank_context import TensorGroup
from atorch_ns.sharding.sequence.block_chains import find_chains, join_at_first_call, join_blocks
from atorch_ns.sharding.sequence.chain import BlockChain, SequenceSettings
from atorch_ns.sharding.tensor.apply import Divided, divide
from atorch_ns.sharding.tensor.choose import ChosenPlan, choose_plan
from atorch_ns.sharding.tensor.divisibility import check_degree, degrees, misfits, parameter_dims
from atorch_ns.sharding.tensor.find import find_tensor_plan, with_vocabulary
from atorch_ns.sharding.tensor.plan import (
    STYLES,
    LayerStyle,
    Layout,
    Packing,
    RegionSpec,
    TensorPlan,
    kind_of,
    model_plan,
    style_named,
)
from atorch_ns.sharding.tensor.regions import regions_in
from atorch_ns.sharding.tensor.selftest import SelfTest
from atorch_ns.sharding.tensor.sequence import StreamSpec
from atorch_ns.sharding.tensor.trace import LayerGraph, trace_layers
from atorch_ns.sharding.vocabulary.logits import LogitUses
from atorch_ns.sharding.vocabulary.outputs import (
    LOSS_TOLERANCE,
    LogitOutputs,
    LossStudy,
    compare_losses,
    explain_divided_weights,
    study_logits,
)

__all__ = [
    "LOSS_TOLERANCE",
    "STYLES",
    "BlockChain",
    "ChosenPlan",
    "Divided",
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
    "SelfTest",
    "SequenceSettings",
    "StreamSpec",
    "TensorGroup",
    "TensorPlan",
    "UnfitExperts",
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
    "find_chains",
    "find_experts",
    "find_tensor_plan",
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
    "study_logits",
    "style_named",
    "trace_layers",
    "why_not_answerable",
    "why_not_dividable",
    "with_vocabulary",
]
