"""Dividing layers, samples and experts over ranks: plans, collectives, checks."""

from atorch_ns.sharding.collectives import traced_gather, traced_scatter
from atorch_ns.sharding.divided_tensor import LogitUses
from atorch_ns.sharding.expert.balance import GlobalBalance
from atorch_ns.sharding.expert.check import why_not_answerable, why_not_dividable
from atorch_ns.sharding.expert.find import FoundExperts, ListedExperts, UnfitExperts, find_experts
from atorch_ns.sharding.expert.fused import divide_experts
from atorch_ns.sharding.expert.list import divide_expert_list
from atorch_ns.sharding.rank_context import TensorGroup, unit_dim
from atorch_ns.sharding.sequence.block_chain import BlockChain
from atorch_ns.sharding.sequence.find_chains import Links, join_at_first_call, join_blocks
from atorch_ns.sharding.sequence.plan import SequenceSettings
from atorch_ns.sharding.sequence.tail import study_links, study_tail
from atorch_ns.sharding.tensor.apply import divide, divide_parameters
from atorch_ns.sharding.tensor.choose import ChosenPlan, choose_plan, find_dims
from atorch_ns.sharding.tensor.divisibility import parameter_dims
from atorch_ns.sharding.tensor.plan import Layout, Packing, TensorPlan, kind_of, style_named
from atorch_ns.sharding.tensor.sequence import StreamSpec
from atorch_ns.sharding.tensor.trace import LayerGraph, trace_layers
from atorch_ns.sharding.vocabulary.outputs import (
    LOSS_TOLERANCE,
    LogitOutputs,
    LossStudy,
    compare_losses,
    study_logits,
)

__all__ = [
    "LOSS_TOLERANCE", "BlockChain", "ChosenPlan", "FoundExperts", "GlobalBalance", "LayerGraph", "Layout", "Links",
    "ListedExperts", "LogitOutputs", "LogitUses", "LossStudy", "Packing", "SequenceSettings", "StreamSpec",
    "TensorGroup", "TensorPlan", "UnfitExperts", "choose_plan", "compare_losses", "divide", "divide_expert_list",
    "divide_experts", "divide_parameters", "find_dims", "find_experts", "join_at_first_call", "join_blocks",
    "kind_of", "parameter_dims", "study_links", "study_logits", "study_tail", "style_named", "trace_layers",
    "traced_gather", "traced_scatter", "unit_dim", "why_not_answerable", "why_not_dividable",
]  # fmt: skip
