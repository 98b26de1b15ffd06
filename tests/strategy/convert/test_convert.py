"""Strategies from the files of Accelerate, DeepSpeed and ATorch."""

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
from atorch_ns.strategy import Conversion, convert_file

_FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer, Expert",
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False},
    "mixed_precision": "bf16",
    "gradient_accumulation_steps": 4,
    "num_processes": 8,
    "use_cpu": False,
    "main_process_port": 29501,
}
_FSDP1 = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_sharding_strategy": "HYBRID_SHARD",
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": 100000000,
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_forward_prefetch": "true",
        "fsdp_use_orig_params": True,
    },
    "mixed_precision": "fp16",
}
_ZERO3 = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "fp16": {"enabled": True, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": "auto",
    },
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "something_new": 1,
}


def _converted(folder: Path, document: Any, *, suffix: str = ".json", source: str = "auto") -> Conversion:
    path = folder / f"config{suffix}"
    path.write_text(json.dumps(document) if suffix == ".json" else yaml.safe_dump(document))
    found = convert_file(path, source=source)
    assert found.as_json()["source"] == found.source
    return found


def _keys(document: dict[str, Any], before: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in document.items():
        inner = _keys(value, f"{before}{key}.") if isinstance(value, dict) else set()
        found |= inner or {f"{before}{key}"}
    return found


@pytest.mark.parametrize(
    ("document", "suffix"),
    [(_FSDP2, ".yaml"), (_FSDP1, ".yaml"), (_ZERO3, ".json")],
    ids=["accelerate fsdp2", "accelerate fsdp1", "deepspeed"],
)
def test_every_key_is_told_of_and_the_strategy_is_valid(
    tmp_path: Path, document: dict[str, Any], suffix: str
) -> None:
    found = _converted(tmp_path, document, suffix=suffix)
    told = {remark.key for remark in (*found.carried, *found.left_out)}
    assert _keys(document) - told == set()
    assert all(remark.text for remark in (*found.carried, *found.left_out))
    cluster = Cluster(world_size=8, local_world_size=4, distributed=True)
    resolve(found.strategy, cluster, load_registry())


def test_accelerate_fsdp2(tmp_path: Path) -> None:
    found = _converted(tmp_path, _FSDP2, suffix=".yaml")
    assert found.source == "accelerate"
    assert dict(found.strategy["fsdp"]) == {  # type: ignore[arg-type]
        "atorch_wrap_cls": ["LlamaDecoderLayer", "Expert"],
        "cpu_offload": True,
        "sharding_strategy": "SHARD_GRAD_OP",
    }
    assert found.strategy["amp_native"] == {"dtype": "bf16"}
    assert found.strategy["compile"] == {"backend": "inductor", "mode": "default", "dynamic": False}
    assert found.strategy["gradient_accumulation"] == {"num_micro_batches": 4}
    assert "checkpoint" in found.strategy
    assert found.strategy.requires.world_size == 8
    left = dict(found.left_out)
    assert "launcher" in left["main_process_port"]
    assert "checkpoint" in left["fsdp_config.fsdp_state_dict_type"]


def test_accelerate_fsdp1(tmp_path: Path) -> None:
    found = _converted(tmp_path, _FSDP1, suffix=".yaml")
    config = found.strategy["fsdp"]
    assert isinstance(config, dict)
    assert config["sharding_strategy"] == "HYBRID_SHARD"
    assert config["atorch_size_based_min_num_params"] == 100000000
    assert config["backward_prefetch"] == "BACKWARD_POST"
    assert config["forward_prefetch"] is True
    assert "FSDP2 trains the same" in dict(found.carried)["distributed_type"]


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "no"}, ("ddp",)),
        ({"distributed_type": "NO", "mixed_precision": "fp8"}, ("amp_native", "fp8")),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 3}}, ("ddp",)),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0},
            },
            ("zero2",),
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2},
            },
            ("parallel_mode", "pipeline_parallel", "tensor_parallel"),
        ),
        (
            {
                "distributed_type": "NO",
                "parallelism_config": {
                    "parallelism_config_dp_shard_size": 4,
                    "parallelism_config_tp_size": 2,
                },
            },
            ("parallel_mode",),
        ),
    ],
)
def test_other_ways_of_accelerate(tmp_path: Path, document: dict[str, Any], names: tuple[str, ...]) -> None:
    found = _converted(tmp_path, document, suffix=".yaml")
    assert sorted(found.strategy.names) == sorted(names)


def test_deepspeed(tmp_path: Path) -> None:
    found = _converted(tmp_path, _ZERO3)
    assert found.source == "deepspeed"
    assert found.strategy["half"] == {"dtype": "fp16", "master_weights": True}
    assert found.strategy["fsdp"] == {"cpu_offload": True}
    left = dict(found.left_out)
    assert left["gradient_clipping"] == "an argument of auto_accelerate: max_grad_norm=1.0"
    assert left["something_new"] == "this version knows no counterpart"
    assert "optim_func" in left["optimizer.type"]
    assert "64" in left["train_batch_size"]


@pytest.mark.parametrize(("stage", "method"), [(0, "ddp"), (1, "zero1"), (2, "zero2"), (3, "fsdp")])
def test_stages_of_zero(tmp_path: Path, stage: int, method: str) -> None:
    document = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "train_batch_size": "auto"}
    found = _converted(tmp_path, document)
    assert method in found.strategy
    assert found.strategy["half"] == {"dtype": "bf16", "master_weights": True}
    assert "'auto'" in dict(found.left_out)["train_batch_size"]


def test_what_nvme_loses_is_said_and_the_rest_is_kept(tmp_path: Path) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    found = _converted(tmp_path, {"zero_optimization": {"stage": 3, **offload}})
    assert "fsdp.cpu_offload" in dict(found.carried)["zero_optimization.offload_optimizer.device"]
    lost = dict(found.left_out)["zero_optimization.offload_param.device"]
    assert "nothing is kept on NVMe" in lost
    assert "host memory must hold the parameters" in lost
    assert found.strategy["fsdp"] == {"cpu_offload": True}


def test_deepspeed_axes_are_fitted_to_the_ranks(tmp_path: Path) -> None:
    document = {
        "train_batch_size": 8,
        "pipeline": {"stages": 2, "partition_method": "parameters", "seed_layers": False},
        "tensor_parallel": {"autotp_size": 2},
    }
    found = _converted(tmp_path, document)
    assert found.strategy["pipeline_parallel"] == {"split_method": "parameters"}
    cluster = Cluster(world_size=8, local_world_size=8, distributed=True)
    resolved = resolve(found.strategy, cluster, load_registry())
    assert dict(resolved.strategy["parallel_mode"]["axes"]) == {  # type: ignore[index,call-overload,arg-type]
        "pipeline": 2,
        "tensor": 2,
        "data": 2,
    }


def test_atorch(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(pickle.dumps([("fsdp", {"sync_module_states": True}, False)]))
    assert convert_file(old).strategy.names == ("fsdp",)
    assert _converted(tmp_path, ["zero1", ["amp_native", {"dtype": "bf16"}]]).strategy.names == (
        "zero1",
        "amp_native",
    )


@pytest.mark.parametrize(
    ("content", "source", "words"),
    [
        ("{", "auto", "truncated or damaged"),
        ("key: [", "accelerate", "truncated or damaged"),
        ("hello: 1", "auto", "whose file this is"),
        ("[1, 2]", "deepspeed", "must be a mapping"),
        ('{"zero_optimization": {"stage": 7}}', "auto", "0, 1, 2, 3"),
        ('{"distributed_type": "MPI"}', "accelerate", "MULTI_GPU"),
        ('{"mixed_precision": "int8"}', "accelerate", "fp16, bf16, fp8"),
        ('{"gradient_accumulation_steps": -1}', "deepspeed", "a whole number"),
        ('{"bf16": {"enabled": "perhaps"}}', "deepspeed", "true, false"),
    ],
)
def test_what_means_nothing_is_an_error_that_names_it(
    tmp_path: Path, content: str, source: str, words: str
) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(StrategyFileError, match=words):
        convert_file(path, source=source)


def test_a_pickle_that_names_a_function_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "evil"
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(StrategyFileError, match=r"builtins\.print, and .*do not trust this file"):
        convert_file(path)
    with pytest.raises(StrategyFileError, match="only ATorch"):
        convert_file(path, source="deepspeed")


def test_an_unknown_system(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="accelerate or deepspeed"):
        convert_file(tmp_path / "x", source="megatron")
