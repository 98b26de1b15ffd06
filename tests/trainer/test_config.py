"""Configuration of the Trainer: the command line's grammar, types, components by name, every field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.errors import InputError
from atorch_ns.trainer import (
    CheckpointConfig,
    DatasetConfig,
    HookConfig,
    HookMapConfig,
    ModelConfig,
    OptimizerConfig,
    Trainer,
    TrainerArgs,
)
from atorch_ns.trainer.components import arguments, check_names, make
from atorch_ns.trainer.overrides import BARE, override, parse, resolve_references
from atorch_ns.trainer.reading import made_args, read_args

WORDS = st.text("abc_xyz", min_size=1, max_size=4)
VALUES = st.integers() | st.text("abc", max_size=3)
TREES = st.recursive(
    VALUES, lambda inner: st.dictionaries(WORDS, inner, max_size=3) | st.lists(inner, max_size=3)
)


def at(tree: Any, path: list[str]) -> Any:
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


@given(st.dictionaries(WORDS, TREES), st.lists(WORDS, min_size=1, max_size=4), VALUES)
def test_what_is_put_at_a_path_is_found_there_and_nothing_else_is_changed(
    tree: dict[str, Any], path: list[str], value: Any
) -> None:
    inside: Any = tree
    for part in path:
        if isinstance(inside, list):
            return  # a word is not an index
        inside = inside.get(part) if isinstance(inside, dict) else None
    before = repr(tree)
    made = override(tree, [(".".join(path), value)])
    assert at(made, path) == value
    assert repr(tree) == before
    assert {key: made[key] for key in made if key != path[0]} == {
        key: tree[key] for key in tree if key != path[0]
    }


@given(st.dictionaries(WORDS, TREES), WORDS)
def test_deletion_takes_out_what_is_there(tree: dict[str, Any], key: str) -> None:
    words = [(f"{key}!", BARE)]
    if key in tree:
        assert override(tree, words) == {name: tree[name] for name in tree if name != key}
    else:
        with pytest.raises(InputError, match="to remove"):
            override(tree, words)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--a.b 3", {"a": {"b": "3", "c": 1}, "l": [1, {"x": 2}]}),
        ("--a.b=3", {"a": {"b": "3", "c": 1}, "l": [1, {"x": 2}]}),
        ("--a.d-e", {"a": {"c": 1, "d_e": "true"}, "l": [1, {"x": 2}]}),
        ("--a 3", {"a": "3", "l": [1, {"x": 2}]}),
        ("--a!.b 3", {"a": {"b": "3"}, "l": [1, {"x": 2}]}),
        ("--a!", {"l": [1, {"x": 2}]}),
        ("--l.1.x 5", {"a": {"c": 1}, "l": [1, {"x": "5"}]}),
        ("--l.1!.y 5", {"a": {"c": 1}, "l": [1, {"y": "5"}]}),
        ("--l.2.x 5", {"a": {"c": 1}, "l": [1, {"x": 2}, {"x": "5"}]}),
        ("--l.0!", {"a": {"c": 1}, "l": [{"x": 2}]}),
        ("--l!.0 5", {"a": {"c": 1}, "l": ["5"]}),
        ("--n.0.x 5 --n.1 6", {"a": {"c": 1}, "l": [1, {"x": 2}], "n": [{"x": "5"}, "6"]}),
        ("--a.c -1", {"a": {"c": "-1"}, "l": [1, {"x": 2}]}),
    ],
)
def test_overrides(words: str, wanted: Any) -> None:
    assert override({"a": {"c": 1}, "l": [1, {"x": 2}]}, parse(words.split())) == wanted


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("a 3", "'a' is not an override"),
        ("--.a 3", "is not an override"),
        ("--l.x 3", "is not an index"),
        ("--l.3 3", "next item has index 1"),
    ],
)
def test_words_that_are_no_overrides(words: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        override({"l": [1]}, parse(words.split()))


def test_references() -> None:
    config = {
        "a": {"b": 3, "l": [1, "$(a.b)"]},
        "whole": "$(a.b)",
        "part": "x-${a.b}-$(HOME_OF)",
        "far": "$(whole)",
        "kept": r"$\(a.b) $\{a.b}",
        "tree": "${a}",
    }
    assert resolve_references(config, {"HOME_OF": "me"}) == {
        "a": {"b": 3, "l": [1, 3]},
        "whole": 3,
        "part": "x-3-me",
        "far": 3,
        "kept": "$(a.b) ${a.b}",
        "tree": {"b": 3, "l": [1, 3]},
    }
    with pytest.raises(InputError, match=r"a → b|b → a"):
        resolve_references({"a": "$(b)", "b": "$(a)"}, {})
    with pytest.raises(InputError, match=r"neither .* has 'optimiser'.* Did you mean 'optimizer'"):
        resolve_references({"optimizer": 1, "a": "$(optimiser)"}, {})


MINIMAL = {
    "model": {"type": "tests.trainer.parts.Model"},
    "optimizer": {"type": "torch.optim.SGD", "args": {"lr": "1e-3"}},
    "dataset": {"type": "tests.trainer.parts.Dataset", "train_args": {"size": "3"}},
}


def written(folder: Path, **more: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **more}))
    return str(path)


def test_texts_become_what_fields_are(tmp_path: Path) -> None:
    words = "--max_epochs 2 --enable-progress-bar false --optimizer.args.nesterov true --model.args.name.__value_type str "
    words += (
        "--model.args.name.value 1 --checkpoint.no_save --val_every_n_epochs None --optimizer.clip_gnorm 1 "
    )
    words += "--compute_config.plan_ngpus 1 --compute_config.use_end2end --compute_config.pas_config.seed 4"
    args = read_args(["-f", written(tmp_path), *words.split()])
    assert (args.max_epochs, args.enable_progress_bar, args.val_every_n_epochs) == (2, False, None)
    assert args.optimizer.args == {"lr": 1e-3, "nesterov": True}
    assert args.optimizer.clip_gnorm == 1.0
    assert args.checkpoint.no_save is True
    assert args.compute_config is not None
    assert (args.compute_config.use_end2end, args.compute_config.pas_config) == (True, {"seed": 4})
    assert arguments(args.model.args, what="") == {"name": "1"}
    args.check()


def test_every_mistake_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    words = "--max_epoch 3 --max_train_steps many --model.tpe x --checkpoint.save_type whole --log.0.typ x --hook.on_epoch_strat f"
    words += " --compute_config.plan_gpus 2 --precision.weights fp32 --micro_batch_size"
    with pytest.raises(InputError) as error:
        read_args(["-f", written(tmp_path), *words.split()])
    text = str(error.value)
    for named in (
        "no field max_epoch. Did you mean 'max_epochs'",
        "max_train_steps is 'many'",
        "no field model.tpe. Did you mean 'type'",
        "checkpoint.save_type is 'whole'",
        "no field log.0.typ. Did you mean 'type'",
        "no field hook.on_epoch_strat. Did you mean 'on_epoch_start'",
        "no field plan_gpus. Did you mean 'plan_ngpus'",
        "precision",
        "micro_batch_size is 'true'",
    ):
        assert named in text, text


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": {}}, "model.type must be set"),
        ({"micro_batch_size": 0}, "micro_batch_size must be a positive integer"),
        ({"max_epochs": -1}, "max_epochs must be a positive integer"),
        ({"checkpoint": {"keep_last_n_checkpoints": 0}}, "checkpoint.keep_last_n_checkpoints must be"),
        ({"checkpoint": {"every_n_epochs": 1, "every_n_train_steps": 1}}, "give one of them"),
        ({"compute_config": {"plan_ngpus": 1}}, "use_end2end must be True"),
        (
            {"optimizer": {"type": "x", "grad_reduction": "per-token-mean"}},
            "needs optimizer.aggregate_outputs_fn",
        ),
        ({"optimizer": {"type": "x", "clip_gnorm": -1}}, "clip_gnorm must be a norm"),
        ({"dataloader": {"train_args": {"batch_size": 2}}}, "set that"),
        ({"lr_scheduler": {}}, "lr_scheduler.type must be set"),
        ({"log": [{}]}, "log.0.type must be set"),
    ],
)
def test_contradictions_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Trainer(train_args={**MINIMAL, **changed})


@pytest.mark.parametrize(
    ("sizes", "ranks", "wanted"),
    [((2, None, None), 4, 1), ((2, None, 3), 4, 3), ((2, 16, None), 4, 2), ((2, 16, 2), 4, 2)],
)
def test_sizes_of_batches(sizes: tuple[int, int | None, int | None], ranks: int, wanted: int) -> None:
    one, whole, parts = sizes
    args = TrainerArgs(micro_batch_size=one, global_batch_size=whole, grad_accumulation_steps=parts)
    assert args.num_micro_batches(ranks) == wanted


@pytest.mark.parametrize(
    ("sizes", "named"),
    [((2, 12, None), "not a multiple of micro_batch_size=2"), ((2, 16, 3), "makes 2 micro-batches of 2")],
)
def test_sizes_that_contradict_each_other(sizes: tuple[int, int, int | None], named: str) -> None:
    one, whole, parts = sizes
    args = TrainerArgs(micro_batch_size=one, global_batch_size=whole, grad_accumulation_steps=parts)
    with pytest.raises(InputError, match=named):
        args.num_micro_batches(4)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"optimizer": OptimizerConfig(type="x", grad_reduction="average")},
            "optimizer.grad_reduction is 'average'",
        ),  # type: ignore[arg-type]
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"precision": {"foo": "bf16"}}, "precision"),
        ({"run_mode": "Compile"}, "run_mode is 'Compile'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"log": {"type": "x"}}, "log is"),
        ({"model": {"typ": "x"}}, "no field model.typ. Did you mean 'type'"),
        ({"compute_config": {"plan_ngpus": 1}}, "compute_config must be a ComputeConfig"),
        ({"checkpoint": CheckpointConfig(resume_from=3)}, "checkpoint.resume_from is 3"),  # type: ignore[arg-type]
    ],
)
def test_values_from_python_are_checked_too(changed: dict[str, Any], named: str) -> None:
    fields: dict[str, Any] = {
        "model": ModelConfig(type="x"),
        "optimizer": OptimizerConfig(type="x"),
        "dataset": DatasetConfig(type="x"),
    }
    with pytest.raises(InputError) as error:
        Trainer(train_args=TrainerArgs(**{**fields, **changed}))
    assert named in str(error.value)


def test_odd_files(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text, named in (
        ("hook: &a {type: x, args: *a}", "contains itself"),
        ("hook: job.Hook", "it has a type"),
        ("[1]", "holds a list"),
        ("", "holds a NoneType"),
        ("a: [", "cannot read"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=named):
            read_args(["-f", str(path)])


@dataclasses.dataclass
class Settings:
    """A class that an argument is of."""

    width: int
    depth: int = 1


def test_arguments_that_are_objects() -> None:
    given_args = {
        "one": {"__type": "tests.trainer.test_config.Settings", "width": 3},
        "many": [{"__type": Settings, "width": {"__value_type": "int", "value": "4"}}],
        "text": {"__value_type": "str", "value": 1},
        "function": {"__value_type": "function", "value": "torch.nn.functional.relu"},
        "plain": {"a": 1},
    }
    assert arguments(given_args, what="x") == {
        "one": Settings(3),
        "many": [Settings(4)],
        "text": "1",
        "function": torch.nn.functional.relu,
        "plain": {"a": 1},
    }
    with pytest.raises(InputError, match=r"model: Settings\(deep=\) failed"):
        make(Settings, options={"deep": 1}, what="model")
    with pytest.raises(InputError, match="its only other key must be value"):
        arguments({"a": {"__value_type": "str"}}, what="x")


def test_every_documented_field_is_one() -> None:
    """The names of the specification's dataclasses."""
    documented = {
        "compute_config gen_savedir gen_reuse pas_policy broadcast_strategy instance_name run_mode tracing_from_weights model "
        "optimizer dataset dataloader dataset_sampler lr_scheduler checkpoint log hook precision micro_batch_size "
        "global_batch_size grad_accumulation_steps max_epochs max_train_steps max_val_steps val_every_n_train_steps "
        "val_every_n_epochs enable_progress_bar seed init_env_fn"
    }
    known = {field.name for field in dataclasses.fields(TrainerArgs)}
    assert set(next(iter(documented)).split()) <= known
    assert known - set(next(iter(documented)).split()) == {
        "log_progress_every_n_train_steps",
        "save_strategy_to_file",
    }
    hooks = {field.name for field in dataclasses.fields(HookMapConfig)}
    from atorch_ns.trainer.hooks import HOOKS

    assert hooks == set(HOOKS)
    assert [field.name for field in dataclasses.fields(HookConfig)] == ["type", "args"]


def test_the_yaml_of_the_page_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    args = made_args(yaml.safe_load(block))
    args.check()
    assert (args.model.type, args.optimizer.args, args.checkpoint.resume_from) == (
        "job.Model",
        {"lr": 1e-3},
        "last",
    )


def test_the_yaml_of_the_specification_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
compute_config: {plan_ngpus: 4, runtime_ngpus: 100, constant_folding: true, use_zero: true, use_end2end: true}
run_mode: run
pas_policy: autodist
micro_batch_size: 2
global_batch_size: 8
max_epochs: 4
max_train_steps: 10
model: {type: tests.cli.common.MLP, args: {dim: 16, nlayers: 16}}
optimizer: {type: torch.optim.Adam, args: {lr: 0.01}}
dataset: {type: tests.cli.common.SimpleDataset, train_args: {dim: 16, size: 100}, val_args: {dim: 16, size: 10}}
checkpoint: {keep_last_n_checkpoints: 30, every_n_train_steps: 1, save_type: deduped}
"""
    )
    args = made_args(yaml.safe_load(path.read_text()))
    args.check()
    assert args.compute_config is not None
    assert args.compute_config.num_units == 25


def test_all_names_that_name_nothing_are_told_at_once() -> None:
    scheduler = {"type": "torch.optim.lr_scheduler.LambdaLR", "args": {"lr_lambda": {"__type": "nix.Rate"}}}
    config = {
        **MINIMAL,
        "optimizer": {"type": "torch.optim.Nope"},
        "lr_scheduler": scheduler,
        "log": [{"type": "nada.Log"}],
    }
    compute = {"plan_ngpus": 1, "runtime_ngpus": 1, "use_end2end": True}
    with pytest.raises(InputError) as caught:
        Trainer(train_args={**config, "compute_config": compute, "max_epochs": 1}).run()
    told = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "optimizer.type='torch.optim.Nope'",
        "lr_scheduler.args.lr_lambda.__type",
        "log.0.type",
    ]
    check_names(made_args({**MINIMAL, "dataset": {**MINIMAL["dataset"], "val_args": {"type": "a word"}}}))
