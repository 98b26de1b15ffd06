"""What conversions decide: the mesh, offloading, precision, comments, and files that name files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError, StrategyFileError
from atorch_ns.method import load_registry, resolve
from atorch_ns.strategy import Conversion, convert_file, convert_pickle

_MEGATRON = {
    "megatron_lm_gradient_clipping": 1.0,
    "megatron_lm_num_micro_batches": 2,
    "megatron_lm_pp_degree": 2,
    "megatron_lm_recompute_activations": True,
    "megatron_lm_sequence_parallelism": True,
    "megatron_lm_tp_degree": 2,
    "megatron_lm_use_distributed_optimizer": True,
}


def _converted(folder: Path, document: Any, *, name: str = "config.yaml") -> Conversion:
    path = folder / name
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    found = convert_file(path)
    keys = [remark.key for remark in (*found.carried, *found.left_out)]
    assert sorted(keys) == sorted(set(keys)), "each key is told of once"
    return found


def _with_deepspeed(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 8, **keys}


def _resolved(found: Conversion, world_size: int = 8) -> Any:
    cluster = Cluster(world_size=world_size, local_world_size=world_size, distributed=world_size > 1)
    return resolve(found.strategy, cluster, load_registry()).strategy


def _axes(found: Conversion) -> Any:
    config = found.strategy["parallel_mode"]
    assert isinstance(config, dict)
    return config["axes"]


def test_axes_of_accelerate_stand_with_the_innermost_first(tmp_path: Path) -> None:
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 1}
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {f"parallelism_config_{key}": size for key, size in sizes.items()},
        "num_processes": 8,
    }
    found = _converted(tmp_path, document)
    assert _axes(found) == [["tensor", 2], ["zero", 2], ["data", 2]]
    assert dict(found.carried)["parallelism_config.parallelism_config_cp_size"] == "1: nothing to divide"
    _resolved(found)


def test_megatron_keeps_its_mesh_micro_batches_and_sharded_optimizer(tmp_path: Path) -> None:
    document = {"distributed_type": "MEGATRON_LM", "megatron_lm_config": _MEGATRON, "num_processes": 16}
    found = _converted(tmp_path, document)
    assert _axes(found) == [["tensor", 2], ["data", 4], ["pipeline", 2]]
    assert found.strategy["pipeline_parallel"] == {"num_micro_batches": 2}
    assert found.strategy["tensor_parallel"] == {"sequence": True}
    assert "zero1" in found.strategy
    assert _resolved(found, 16)["parallel_mode"]["axes"] == [["tensor", 2], ["data", 4], ["pipeline", 2]]


def test_megatron_without_axes_is_zero_1_and_accumulation(tmp_path: Path) -> None:
    section = {**_MEGATRON, "megatron_lm_pp_degree": 1, "megatron_lm_tp_degree": 1}
    document = {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": section,
        "num_processes": 8,
        "gradient_accumulation_steps": 4,
    }
    found = _converted(tmp_path, document)
    assert found.strategy.names == ("checkpoint", "zero1", "gradient_accumulation")
    assert found.strategy["gradient_accumulation"] == {"num_micro_batches": 2}
    assert "Megatron-LM accumulates" in dict(found.left_out)["gradient_accumulation_steps"]
    _resolved(found)


def test_a_mesh_that_the_processes_do_not_fill_is_an_error(tmp_path: Path) -> None:
    document = {"distributed_type": "MEGATRON_LM", "megatron_lm_config": _MEGATRON, "num_processes": 6}
    with pytest.raises(StrategyFileError, match="a multiple of 4, required by tensor=2, pipeline=2"):
        _converted(tmp_path, document)


def test_a_pipeline_of_deepspeed_with_zero_1(tmp_path: Path) -> None:
    document = {
        "train_batch_size": 8,
        "pipeline": {"stages": 2},
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1},
    }
    found = _converted(tmp_path, document)
    assert [axis for axis, _ in _axes(found)] == ["tensor", "data", "pipeline"]
    assert _resolved(found)["parallel_mode"]["axes"] == [["tensor", 2], ["data", 2], ["pipeline", 2]]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_deepspeed_has_the_same_precision_from_either_file(tmp_path: Path, dtype: str) -> None:
    document = _with_deepspeed(deepspeed_config={"zero_stage": 2}, mixed_precision=dtype)
    accelerate = _converted(tmp_path, document)
    own = _converted(
        tmp_path, {dtype: {"enabled": True, "auto_cast": True}, "zero_optimization": {"stage": 2}}
    )
    assert accelerate.strategy["half"] == own.strategy["half"] == {"dtype": dtype, "master_weights": True}
    assert "amp_native" not in accelerate.strategy
    assert "amp_native" not in own.strategy


def test_two_precisions_at_once_are_refused_as_deepspeed_does(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true}}')
    section = {"deepspeed_config_file": "ds.json"}
    with pytest.raises(StrategyFileError, match="since fp16 is enabled too"):
        _converted(tmp_path, _with_deepspeed(deepspeed_config=section, mixed_precision="bf16"))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_offloaded_optimizers_of_stages_1_and_2(tmp_path: Path, stage: int, dtype: str) -> None:
    offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    found = _converted(tmp_path, {"zero_optimization": offload, dtype: {"enabled": True}})
    assert found.strategy.names == ("half", "zero2")
    assert found.strategy["zero2"] == {"cpu_offload": True}
    told = dict(found.carried)["zero_optimization.offload_optimizer.device"]
    assert ("refuses fp16" in told) is (dtype == "fp16")
    assert "optimizer_offload" in told
    _resolved(found)


def test_one_process_offloads_its_optimizer_alone(tmp_path: Path) -> None:
    section = {"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    document = _with_deepspeed(deepspeed_config=section, mixed_precision="bf16", num_processes=1)
    found = _converted(tmp_path, document)
    assert found.strategy.names == ("half", "optimizer_offload")
    _resolved(found, 1)
    fp16 = _converted(tmp_path, {**document, "mixed_precision": "fp16"})
    assert fp16.strategy.names == ("half", "zero2")


@pytest.mark.parametrize("old", ["cpu_offload_param", "cpu_offload_params"])
def test_old_names_of_offloading(tmp_path: Path, old: str) -> None:
    section = {"stage": 3, "cpu_offload": True, old: True, "cpu_offload_use_pin_memory": True}
    found = _converted(tmp_path, {"zero_optimization": section})
    assert found.strategy["fsdp"] == {"cpu_offload": True}
    carried = dict(found.carried)
    assert "fsdp.cpu_offload" in carried["zero_optimization.cpu_offload"]
    assert "fsdp.cpu_offload" in carried[f"zero_optimization.{old}"]
    assert "buckets" not in dict(found.left_out)["zero_optimization.cpu_offload_use_pin_memory"]


def test_an_optimizer_on_nvme_leaves_the_cpu_part(tmp_path: Path) -> None:
    section = {
        "zero_stage": 3,
        "offload_optimizer_device": "nvme",
        "offload_param_device": "cpu",
        "deepspeed_config_file": "none",
    }
    found = _converted(tmp_path, _with_deepspeed(deepspeed_config=section))
    assert found.strategy["fsdp"] == {"cpu_offload": True}
    assert "12 bytes of each parameter" in dict(found.left_out)["deepspeed_config.offload_optimizer_device"]


def test_offloading_without_sharding_names_the_choices(tmp_path: Path) -> None:
    offload = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    found = _converted(tmp_path, {"zero_optimization": offload})
    assert found.strategy.names == ("ddp",)
    told = dict(found.left_out)["zero_optimization.offload_optimizer.device"]
    assert "from stage 1 on" in told
    assert "optimizer_offload" in told
    with pytest.raises(StrategyFileError, match="none, cpu, nvme"):
        _converted(tmp_path, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}})


def test_comments_in_json(tmp_path: Path) -> None:
    text = """// of the team
    {   # a stage
        "zero_optimization": {"stage": 3, /* all
            of it */ "nvme": "//host/#1 /* \\" */",},  // and a last comma
        "bf16": {"enabled": true},
    }
    """
    found = _converted(tmp_path, text, name="ds.json")
    assert found.strategy.names == ("half", "fsdp")
    assert "zero_optimization.nvme" in dict(found.left_out), "what stands in strings is not a comment"
    with pytest.raises(StrategyFileError, match="comments"):
        _converted(tmp_path, '{"bf16": {enabled: ; true}}', name="ds.json")


def test_a_file_of_deepspeed_that_accelerate_names(tmp_path: Path) -> None:
    inner = {
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
    }
    (tmp_path / "ds.json").write_text("// stage 3\n" + json.dumps(inner))
    section = {"deepspeed_config_file": "ds.json", "zero_stage": 3, "gradient_clipping": 0.5}
    document = _with_deepspeed(
        deepspeed_config=section, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    found = _converted(tmp_path, document)
    assert found.strategy.names == ("half", "fsdp", "gradient_accumulation")
    assert found.strategy["fsdp"] == {"cpu_offload": True}
    assert found.strategy["half"] == {"dtype": "bf16", "master_weights": True}
    assert found.strategy["gradient_accumulation"] == {"num_micro_batches": 2}
    assert found.strategy.requires.world_size == 8
    assert found.warnings == ()
    assert dict(found.carried)["ds.json: zero_optimization.stage"] == "3 → fsdp"
    left = dict(found.left_out)
    assert "ds.json decides" in left["deepspeed_config.gradient_clipping"]
    assert left["ds.json: gradient_clipping"] == "an argument of auto_accelerate: max_grad_norm=1.0"


@pytest.mark.parametrize("content", [None, "[1]", "{"])
def test_a_named_file_that_cannot_be_used_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "gone.json").write_text(content)
    with pytest.raises(StrategyFileError, match=r"gone\.json"):
        _converted(tmp_path, _with_deepspeed(deepspeed_config={"deepspeed_config_file": "gone.json"}))


def test_a_precision_that_is_auto_is_a_warning(tmp_path: Path) -> None:
    document = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    (warning,) = _converted(tmp_path, document).warnings
    assert "bf16.enabled and fp16.enabled are both 'auto'" in warning
    assert "trains in fp32" in warning
    assert '("half", {"dtype": "bf16", "master_weights": True})' in warning
    decided = _converted(tmp_path, {**document, "fp16": {"enabled": True}})
    assert decided.warnings == ()
    (stage,) = _converted(tmp_path, {"zero_optimization": {"stage": "auto"}}).warnings
    assert "nothing is sharded" in stage


def test_what_is_carried_is_told_once_and_by_its_own_key(tmp_path: Path) -> None:
    found = _converted(tmp_path, {"distributed_type": "MULTI_GPU", "dynamo_backend": "INDUCTOR"})
    assert "compile" in found.strategy
    assert dict(found.carried)["dynamo_backend"] == "INDUCTOR → compile, block by block"
    assert not found.left_out


def test_no_shard_keeps_recomputation(tmp_path: Path) -> None:
    section = {
        "fsdp_sharding_strategy": "NO_SHARD",
        "fsdp_activation_checkpointing": True,
        "fsdp_offload_params": True,
        "fsdp_sync_module_states": True,
    }
    found = _converted(tmp_path, {"distributed_type": "FSDP", "fsdp_config": section})
    assert found.strategy.names == ("checkpoint", "ddp")
    left = dict(found.left_out)
    assert "optimizer_offload" in left["fsdp_config.fsdp_offload_params"]
    assert "no counterpart" not in " ".join(left.values())


def test_classes_inside_a_config_are_allowed_by_name(tmp_path: Path) -> None:
    from torch import nn

    path = tmp_path / "old"
    config = pickle.dumps({"atorch_wrap_cls": {nn.TransformerEncoderLayer}})
    path.write_bytes(pickle.dumps([("fsdp", config, False)]))
    name = "torch.nn.modules.transformer.TransformerEncoderLayer"
    with pytest.raises(StrategyFileError, match=f"--class {name}"):
        convert_pickle(path)
    assert convert_pickle(path, classes={name})["fsdp"] == {"atorch_wrap_cls": [name]}


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"\x80\x02cposix\nsystem\n.", "posix.system"), (b"\x80\x02ctorch\nload\n.", "torch.load")],
)
def test_functions_are_neither_allowed_nor_suggested(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / "evil"
    path.write_bytes(content)
    with pytest.raises(StrategyFileError, match=r"do not trust this file") as caught:
        convert_file(path)
    assert "--class" not in str(caught.value)
    with pytest.raises(InputError, match=f"{name} cannot be allowed"):
        convert_file(path, classes={name})
