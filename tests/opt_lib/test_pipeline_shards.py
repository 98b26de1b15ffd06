"""Pipelines whose stages are made of shards: equal to one process, and cut between shards alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from atorch_ns.errors import AtorchError
from atorch_ns.job import Result
from atorch_ns.strategy import Plan
from atorch_ns.testing.models import Case, get_case, make_gpt2
from atorch_ns.testing.parity import (
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import run_ranks
from opt_lib._model_axes.pipeline_plan import PipelineParallelConfig
from opt_lib.pipeline_parallel import PipelineParallel

TWO = ("parallel_mode", [("pipeline", 2)])
SIZES = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}


def _t5() -> nn.Module:
    """Without dropout: one process draws other masks than a pipeline, which draws them by unit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return T5ForConditionalGeneration(
            T5Config(**SIZES, dropout_rate=0.0, decoder_start_token_id=0)
        ).train()


def _gpt2() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make_gpt2(num_hidden_layers=4).train()


def _pairs(batch_size: int, seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (batch_size, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.flip(1).contiguous()}


GPT2 = replace(get_case("hf_gpt2"), name="gpt2", build=_gpt2)
T5 = replace(get_case("hf_bert"), name="t5", build=_t5, make_batch=_pairs, block="T5Block")


def _with(**config: Any) -> list[Any]:
    return [TWO, ("pipeline_parallel", {"num_micro_batches": 4, **config})]


def _trained(jobs: Sequence[tuple[Case, Mapping[str, Any]]]) -> list[tuple[Trajectory, list[str]]]:
    said: list[list[str]] = []

    def step(result: Result, batch: Any) -> torch.Tensor:
        said.append(result.job.explained("pipeline_parallel"))
        return result.train_step(batch)

    return [(accelerated_run(case, _with(**config), step=step), said[-1]) for case, config in jobs]


@pytest.mark.parametrize(("case", "leaf"), [(GPT2, "GPT2Model"), (T5, "encoder")], ids=["gpt2", "t5"])
def test_stages_of_shards_train_as_one_process(case: Case, leaf: str) -> None:
    jobs: list[Any] = [
        (case, {"shards": "farthest_min_deps", "split_method": "uniform"}),
        (case, {"shards": "nearest_min_deps", "schedule": "Interleaved1F1B"}),
        (case, {"leaf_modules": leaf}),
    ]
    reference = reference_run(case)
    by_rank = run_ranks(_trained, 2, args=(jobs,), timeout_s=150)
    for place, (_, config) in enumerate(jobs):
        run, said = by_rank[0][place]
        assert_parity(compare(reference, run))
        assert_ranks_agree([runs[place][0] for runs in by_rank])
        cuts = said[0].partition("cut before ")[2].partition(";")[0].split(", ")
        if "shards" in config:
            assert f"units by {config['shards']}" in said[1]
            assert set(cuts) <= set(said[1].partition("which begin with ")[2].split(", "))
        else:
            assert not any(cut.startswith(("encoder.", "transformer.")) for cut in cuts)


def _cut(attempts: Sequence[tuple[Case, Mapping[str, Any]]]) -> list[str]:
    texts = []
    for case, config in attempts:
        try:
            texts.append(accelerate_case(case, _with(**config)).job.explained("pipeline_parallel")[0])
        except AtorchError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_partitions_count_shards_and_leaves_stay_whole() -> None:
    few = {"shards": "farthest_min_deps", "shard_count": 3}
    wanted: list[tuple[Case, dict[str, Any], str]] = [
        # wte, wpe, twice two blocks, and what comes after
        (GPT2, {**few, "split_method": "uniform_floor"}, "cut before transformer.h.0;"),
        (
            GPT2,
            {**few, "split_method": "custom", "custom_partition": [0, 3, 5]},
            "cut before transformer.h.2;",
        ),
        (
            GPT2,
            {**few, "split_method": "custom", "custom_partition": [0, 6, 8]},
            "blocks here are 5 shard(s)",
        ),
        (
            GPT2,
            {**few, "schedule": "Interleaved1F1B", "stages_per_rank": 3},
            "makes 6 stages, but there are 5 shard(s) of the model's 8 units",
        ),
        (
            GPT2,
            {
                "shards": "split_points",
                "split_points": [f"transformer.h.{n}" for n in (0, 1, 3)],
                "split_method": "uniform",
            },
            "cut before transformer.h.1;",
        ),
        (GPT2, {"leaf_modules": "GPT2Model", "split_method": "uniform"}, "cut before lm_head;"),
        (T5, {"leaf_modules": ["encoder"], "split_method": "uniform"}, "cut before decoder.block.2;"),
        (GPT2, {"leaf_modules": ["T5Stack"]}, "leaf_modules=T5Stack: no module of"),
    ]
    attempts = [(case, config) for case, config, _ in wanted]
    for texts in run_ranks(_cut, 2, args=(attempts,), timeout_s=120):
        for text, (_, config, part) in zip(texts, wanted, strict=True):
            assert part in text, config


def test_shards_are_planned_as_their_split_method() -> None:
    config = PipelineParallelConfig(shards="nearest_min_deps", split_method="uniform_floor")
    assert PipelineParallel().plan(Plan(), config).pipeline.split_method == "uniform_floor"


def test_settings_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="shards is nearest_min_deps"):
        PipelineParallelConfig(shards="nearest_min_deps", shard_count=4)
    with pytest.raises(ValidationError, match="needs split_points: name the modules"):
        PipelineParallelConfig(shards="split_points")
    with pytest.raises(ValidationError, match="split_points say where stages begin"):
        PipelineParallelConfig(shards="nearest_min_deps", split_points=("blocks.1",))
