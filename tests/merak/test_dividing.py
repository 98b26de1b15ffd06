"""How models are divided: lists of layers under tensor parallelism, and shards and stages of a pipeline."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.merak import MP_MODEL_MAPPING, set_tp_layer_lists
from atorch_ns.merak.mapping import lists_for
from atorch_ns.testing.workers import catch_ranks, run_ranks
from atorch_ns.torch_compat import plain_name
from tests.merak.parts import QUICK, Run, assert_equal_runs, model, run_each, run_merak, run_plain

MICRO_BATCHES = 2


@functools.cache
def plain(name: str) -> Run:
    """Two steps in one process."""
    (found,) = run_ranks(functools.partial(run_plain, name, MICRO_BATCHES, **QUICK), 1, timeout_s=100)
    return found


def shapes(trainer: Any) -> dict[str, tuple[int, ...]]:
    """The shapes that this rank holds."""
    return {
        plain_name(name): tuple(getattr(parameter, "_local_tensor", parameter).shape)
        for name, parameter in trainer.result.job.module.named_parameters(remove_duplicate=False)
    }


def cuts(trainer: Any) -> list[str]:
    """Where stages begin, the first left out."""
    rows = {row.name: row.why for row in trainer.result.applied.rows}
    found = re.search(r"cut before ([^;]+);", rows["pipeline_parallel"])
    assert found is not None
    return found[1].split(", ")


class OtherList(nn.Linear):
    """A class of models that inherits its lists."""


def test_lists_are_those_of_the_class_or_of_one_that_it_inherits_from() -> None:
    try:
        set_tp_layer_lists(col_para_list=["for all"])
        set_tp_layer_lists(col_para_list=["for linear"], model_class=nn.Linear)
        set_tp_layer_lists(row_para_list=["by name"], model_class="Embedding")
        of = {
            one: lists_for(one) for one in (nn.Linear(1, 1), OtherList(1, 1), nn.Embedding(1, 1), nn.ReLU())
        }
        assert [None if one is None else one.col_para_list or one.row_para_list for one in of.values()] == [
            ("for linear",),
            ("for linear",),
            ("by name",),
            ("for all",),
        ]
    finally:
        for name in (None, nn.Linear, "Embedding"):
            set_tp_layer_lists(model_class=name)
    assert lists_for(nn.Linear(1, 1)) is None


def test_a_text_is_no_list() -> None:
    with pytest.raises(InputError, match="col_para_list must be a list"):
        set_tp_layer_lists(col_para_list="query")
    with pytest.raises(InputError, match="tp_attr_list must be a list"):
        set_tp_layer_lists(tp_attr_list=4)  # type: ignore[arg-type]


def _with_lists(name: str) -> Run:
    set_tp_layer_lists(**vars(MP_MODEL_MAPPING[name]), model_class=type(model(name)))
    return run_merak(name, {"tp": 2}, MICRO_BATCHES, look=shapes, parallel_vocab=True, **QUICK)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (32, 48)),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wi.weight", (32, 32)),
        pytest.param(
            "bert", "bert.encoder.layer.0.attention.self.query.weight", (16, 32), marks=pytest.mark.slow
        ),
        pytest.param("vit", "vit.layers.0.mlp.fc1.weight", (32, 32), marks=pytest.mark.slow),
    ],
)
def test_merak_s_own_lists_divide_its_models(name: str, layer: str, shape: tuple[int, int]) -> None:
    every = run_ranks(_with_lists, 2, args=(name,), timeout_s=150)
    for found in every:
        assert "the plan given" in found.rows["tensor_parallel"]
        assert "parallel_vocab changes nothing" in found.rows["notes"]
        assert found.seen[layer] == shape
    assert_equal_runs(every[0], plain(name))


TENSOR: dict[str, dict[str, Any]] = {
    "usual": {},
    "vocabulary": {"parallel_vocab": True},
    "sequence": {"sequence_parallel": True},
    "both": {"sequence_parallel": True, "parallel_vocab": True},
}


def _tensor() -> dict[str, Run]:
    runs = {
        key: {"accumulation": MICRO_BATCHES, "look": shapes, **QUICK, **given}
        for key, given in TENSOR.items()
    }
    return run_each(functools.partial(run_merak, "gpt2", {"tp": 2}), runs)


@pytest.mark.timeout(200)
def test_vocabulary_and_sequence_are_divided_when_asked_for() -> None:
    every = run_ranks(_tensor, 2, timeout_s=150)
    for found in every:
        for key, run in found.items():
            rows = 52 if "parallel_vocab" in TENSOR[key] else 104
            assert run.seen["transformer.wte.weight"] == (rows, 32), key
            said = "the sequence is divided between divided layers" in run.rows["tensor_parallel"]
            assert said == ("sequence_parallel" in TENSOR[key])
    for run in every[0].values():
        assert_equal_runs(run, plain("gpt2"))


def _wrongly(lists: dict[str, Any], fields: dict[str, Any]) -> None:
    set_tp_layer_lists(**lists)
    run_merak("gpt2", {"tp": 2}, MICRO_BATCHES, **QUICK, **fields)


@pytest.mark.parametrize(
    ("lists", "fields", "said"),
    [
        (
            {"col_para_list": ["c_attn", "c_fc"], "row_para_list": ["c_proj"]},
            {},
            "The plan lacks attributes: transformer.h.0.attn.num_heads",
        ),
        ({"col_para_list": ["no_such_layer"]}, {}, "no_such_layer"),
        ({}, {"sequence_parallel": True, "sequence_dim": 2}, "sequence_dim|dimension"),
    ],
)
def test_lists_and_dimensions_that_are_wrong_are_refused(
    lists: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    for outcome in catch_ranks(_wrongly, 2, args=(lists, fields), timeout_s=100):
        assert isinstance(outcome.error, InputError), outcome.describe()
        assert re.search(said, str(outcome.error)), str(outcome.error)


CUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "usual": ({}, ["transformer.h.2"]),
    "nearest": ({"split_method": "nearest_min_deps"}, ["transformer.h.2"]),
    "layers": ({"split_method": "layer_split"}, ["transformer.h.2"]),
    "points": (
        {"split_method": "layer_split", "custom_split_points": ["transformer.h.3"]},
        ["transformer.h.3"],
    ),
    "custom": ({"partition_method": "custom", "custom_partition": ["0,3,7"]}, ["transformer.h.1"]),
    "floor": ({"partition_method": "uniform_floor"}, ["transformer.h.1"]),
    "parameters": ({"partition_method": "parameters"}, ["transformer.h.2"]),
    # Each embedding is a shard of its own.
    "two shards": ({"shard_count": 2}, ["transformer.h.0"]),
}
"""Cuts of a model of two embeddings, four blocks, a norm and a head."""


def _pipelines() -> dict[str, Run]:
    runs = {
        key: {"accumulation": MICRO_BATCHES, "look": cuts, **QUICK, **given}
        for key, (given, _) in CUTS.items()
    }
    return run_each(functools.partial(run_merak, "gpt2", {"pp": 2}), runs)


@pytest.mark.timeout(250)
def test_stages_are_cut_as_the_methods_say() -> None:
    every = run_ranks(_pipelines, 2, timeout_s=200)
    for found in every:
        assert {key: run.seen for key, run in found.items()} == {key: cut for key, (_, cut) in CUTS.items()}
    for run in every[0].values():
        assert_equal_runs(run, plain("gpt2"))


def _cut_wrongly(fields: dict[str, Any]) -> None:
    run_merak("gpt2", {"pp": 2}, MICRO_BATCHES, **QUICK, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"partition_method": "custom", "custom_partition": ["0,3,99"]}, "99"),
        ({"partition_method": "custom", "custom_partition": ["0,2,4,7"]}, "[0, 2, 4, 7] has 4"),
        ({"split_method": "layer_split", "custom_split_points": ["transformer.x"]}, "transformer.x"),
    ],
)
def test_cuts_that_are_not_there_are_refused(fields: dict[str, Any], said: str) -> None:
    for outcome in catch_ranks(_cut_wrongly, 2, args=(fields,), timeout_s=100):
        assert isinstance(outcome.error, InputError), outcome.describe()
        assert said in str(outcome.error)
