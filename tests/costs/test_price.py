"""One price: estimates of ``ddp`` and operator plans that divide the batch predict the same seconds of computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atorch_ns import planning
from atorch_ns.cluster import Cluster, cluster_from_spec
from atorch_ns.costs import host_seconds
from atorch_ns.data import call_arguments
from atorch_ns.operators import (
    OperatorPrices,
    States,
    assemble,
    batch_plan,
    capture_shallow,
    legal_rules,
    solved_plan,
)
from atorch_ns.testing.models import get_case
from tests.operators.solver.test_assemble import by_heads

CPU = torch.device("cpu")
MODELS = ("tied_llama", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit", "hf_mixtral", "encoder_decoder")
ROWS = 64


def without_launches(spec: str) -> Cluster:
    """A cluster on which starting an operator takes no time: estimates count it apart from computation."""
    known = cluster_from_spec(spec).with_hardware()
    assert known.hardware is not None
    device = replace(known.hardware.device, launch_s=0.0)
    return replace(known, hardware=replace(known.hardware, device=device))


@pytest.mark.parametrize("name", MODELS)
def test_an_estimate_and_an_operator_plan_agree(name: str) -> None:
    """Within 8 %: a capture has the mask of attention as a tensor, adds what autograd adds, and leaves some operators whole."""
    case = get_case(name)
    batch, model = case.make_batch(ROWS, seed=0), case.build().train()
    args, kwargs = call_arguments(model, batch, case.model_input_format)
    graph = capture_shallow(model, args, kwargs, device=CPU).graph
    for spec in ("2xH100-80GB", "2xcpu"):
        cluster = without_launches(spec)
        estimate = planning.estimate(
            model,
            ["ddp"],
            cluster,
            batch=ROWS,
            sample=batch,
            loss=case.loss_func,
            input_format=case.model_input_format or "auto",  # type: ignore[arg-type]
        )
        assembled = assemble(
            graph, legal_rules(graph, 2), OperatorPrices.on(cluster, 2, "float32"), States(), device=CPU
        )
        price = assembled.price(batch_plan(graph, 2))
        assert price.compute_seconds == pytest.approx(estimate.time.compute, rel=0.08), spec


def test_megatron_with_divided_sequences_is_one_price_too() -> None:
    """Columns, rows and norms on parts of the sequence: the plan that the solver finds, and the method ``tensor_parallel``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8}
    config = LlamaConfig(**sizes, num_attention_heads=64, num_key_value_heads=64, vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.zeros(1, 4096, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    cluster, degree = cluster_from_spec("8xH100-80GB"), 8
    graph = capture_shallow(model, (), batch, device=CPU).graph
    prices = OperatorPrices.on(cluster, degree, "bfloat16")
    price = solved_plan(graph, degree, prices, States(), device=CPU, allow=by_heads).outcome.price
    axes = ("parallel_mode", ([("tensor", degree)], None))
    strategy = [axes, ("tensor_parallel", {"sequence": True}), ("half", "bf16")]
    estimate = planning.estimate(model, strategy, cluster, batch=1, sample=batch)
    assert price.compute_seconds == pytest.approx(estimate.time.compute, rel=0.08)
    assert price.conversion_seconds == pytest.approx(estimate.time.exchange, rel=0.15)


def test_a_gpu_hides_its_host_and_a_cpu_is_it() -> None:
    gpu, cpu = (cluster_from_spec(spec).with_hardware().hardware for spec in ("1xH100-80GB", "1xcpu"))
    assert gpu is not None
    assert cpu is not None
    started = 1000 * gpu.device.launch_s
    assert host_seconds(gpu.device, 1000, 2 * started) == 0
    assert host_seconds(gpu.device, 1000, started / 4) == pytest.approx(started * 3 / 4)
    assert host_seconds(cpu.device, 1000, np.inf) == pytest.approx(1000 * cpu.device.launch_s)


def test_a_step_takes_as_long_as_its_host() -> None:
    """A small model on a fast device: what divides it best, the host starts all of its operators."""
    case = get_case("mlp")
    batch, model = case.make_batch(4, seed=0), case.build().train()
    args, kwargs = call_arguments(model, batch, case.model_input_format)
    graph = capture_shallow(model, args, kwargs, device=CPU).graph
    cluster = cluster_from_spec("2xH100-80GB")
    assembled = assemble(
        graph, legal_rules(graph, 2), OperatorPrices.on(cluster, 2, "float32"), States(), device=CPU
    )
    price = assembled.price(batch_plan(graph, 2))
    assert price.seconds == price.host_seconds > price.compute_seconds + price.conversion_seconds
