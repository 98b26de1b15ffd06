"""Plans that are found: known answers, the memory they keep to, and problems that depth does not change."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from atorch_ns.capture.graph.operator_graph import Operator
from atorch_ns.cluster import cluster_from_spec
from atorch_ns.errors import InputError
from atorch_ns.operators import (
    OperatorPrices,
    Shallow,
    Solved,
    States,
    capture_shallow,
    legal_rules,
    solved_plan,
)
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.operators.solver.assemble import assemble
from atorch_ns.operators.solver.problem import price
from tests.operators.networks import network

CPU = torch.device("cpu")
DEGREE = 8


@functools.cache
def llama(rows: int, tokens: int, layers: int = 8) -> Shallow:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=64, vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    return capture_shallow(model, (), {"input_ids": ids, "labels": ids.clone()}, device=CPU)


def found(shallow: Shallow, degree: int = DEGREE, **given: Any) -> Solved:
    prices = OperatorPrices.on(cluster_from_spec(f"{degree}xH100-80GB"), degree, "bfloat16")
    return solved_plan(shallow.graph, degree, prices, States(), device=CPU, **given)


def by_heads(one: Operator, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Heads as the only way to divide attention."""
    attends = one.name == "scaled_dot_product_attention"
    return tuple(rule for rule in rules if rule.inputs[0] == Shard(1)) if attends else rules


def test_with_heads_alone_it_is_megatrons_plan() -> None:
    """Columns for queries, keys, values, gate and up, rows for output and down; one sum a pair."""
    rules = found(llama(1, 4096), allow=by_heads).plan.operators
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert {str(rules[f"model.layers.*.{name}/linear#0"]) for name in columns} == {"2 <- R,0"}
    rows = ("self_attn.o_proj", "mlp.down_proj")
    assert {str(rules[f"model.layers.*.{name}/linear#0"]) for name in rows} == {"P <- 2,1"}


def test_for_long_sequences_it_is_the_batch() -> None:
    rules = found(llama(8, 65536)).plan.operators
    linear = {str(rule) for key, rule in rules.items() if "/linear#" in key and "layers" in key}
    assert linear == {"0 <- 0,R"}
    assert str(rules["model.layers.*.self_attn/scaled_dot_product_attention#0"]) == "0 <- 0,0,0,0"


def test_less_memory_costs_time_and_is_kept_to() -> None:
    free = found(llama(8, 4096))
    limit = 0.6 * free.outcome.price.memory
    tight = found(llama(8, 4096), memory_limit=limit)
    assert tight.outcome.price.memory <= limit * 1.0001
    assert tight.outcome.price.seconds >= free.outcome.price.seconds
    assert len(tight.plan.parameters) > len(free.plan.parameters)
    with pytest.raises(
        InputError, match=r"no division fits in 1.00 GiB of memory: at least .* GiB are needed"
    ):
        found(llama(8, 4096), memory_limit=2.0**30)


def test_depth_does_not_change_the_problem() -> None:
    prices = OperatorPrices.on(cluster_from_spec("8xH100-80GB"), DEGREE, "bfloat16")
    few, many = (
        assemble(shallow.graph, legal_rules(shallow.graph, DEGREE), prices, States(), device=CPU)
        for shallow in (llama(1, 4096), llama(1, 4096, 40))
    )
    assert len(few.problem.nodes) == len(many.problem.nodes)
    counts = [{node.name: node.count for node in each.problem.nodes} for each in (few, many)]
    key = "model.layers.*.mlp.up_proj/linear#0"
    assert [each[key] for each in counts] == [8, 40]


def test_masks_outside_of_recomputed_blocks_are_saved_and_those_inside_while_a_block_is_recomputed() -> None:
    model, batch = network("gpt2")
    graph = capture_shallow(model, (), batch, device=CPU).graph
    prices = OperatorPrices.on(cluster_from_spec("2xH100-80GB"), 2, "bfloat16")
    problem = assemble(graph, legal_rules(graph, 2), prices, States(), device=CPU, recomputed=True).problem
    bare = [
        replace(node, options=tuple(replace(option, saved=0.0) for option in node.options))
        for node in problem.nodes
    ]
    whole = [0] * len(bare)
    mine, other = price(problem, whole), price(replace(problem, nodes=tuple(bare)), whole)
    masks = {node.name: (node.group, node.options[0].saved / node.count) for node in problem.nodes}
    assert masks["transformer.drop/dropout#0"] == ("", 4 * 16 * 64)  # a byte for each element
    assert mine.saved - other.saved == sum(size for group, size in masks.values() if not group)
    assert mine.recomputing - other.recomputing == sum(size for group, size in masks.values() if group)


@pytest.mark.parametrize("degree", [3, 6, 32, 128])
def test_any_number_of_devices(degree: int) -> None:
    solved = found(llama(8, 4096), degree)
    assert solved.outcome.status == "optimal"
    assert solved.outcome.price.seconds > 0
