"""Clusters that are written down, and what is said about mistakes in them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.cluster import Cluster, Hardware, cluster_from_spec
from atorch_ns.errors import InputError
from atorch_ns.text import did_you_mean


def _hardware(cluster: Cluster) -> Hardware:
    assert cluster.hardware is not None
    return cluster.hardware


def test_a_large_cluster() -> None:
    cluster = cluster_from_spec("8xH100-80GB, 16 nodes, ib400")
    assert (cluster.world_size, cluster.local_world_size, cluster.num_nodes) == (128, 8, 16)
    assert (cluster.distributed, cluster.device_type, cluster.capability) == (True, "cuda", (9, 0))
    assert cluster.device_memory_bytes == _hardware(cluster).device.memory_bytes
    assert _hardware(cluster).within_node.name == "nvlink4"
    assert _hardware(cluster).between_nodes.rate.bytes_per_s == pytest.approx(0.92 * 50e9)


def test_parts_may_stand_in_any_order_and_replace_figures() -> None:
    cluster = cluster_from_spec("60GiB, eth100, 2 nodes, $2.5/h, pcie5, 8 x h100")
    hardware = _hardware(cluster)
    assert (cluster.world_size, cluster.device_memory_bytes) == (16, 60 * 2**30)
    assert (hardware.device.name, hardware.device.price_per_hour) == ("H100-80GB", 2.5)
    assert (hardware.within_node.name, hardware.between_nodes.name) == ("pcie5", "eth100")
    assert hardware.between_nodes.rate.bytes_per_s == pytest.approx(0.9 * 100e9 / 8 / 8), (
        "8 share one adapter"
    )


def test_cpus_and_a_single_device() -> None:
    cpus = cluster_from_spec("2xcpu")
    assert (cpus.world_size, cpus.device_type, cpus.capability) == (2, "cpu", None)
    assert _hardware(cpus).within_node.name == "gloo"
    assert _hardware(cpus).within_node.overlap == 0
    one = cluster_from_spec("A100")
    assert (one.world_size, one.distributed) == (1, False)


def test_all_mistakes_are_told_together_with_near_misses() -> None:
    with pytest.raises(InputError) as caught:
        cluster_from_spec("8xH100-80G, 0 nodes, ib40, 3 bananas")
    text = str(caught.value)
    assert text.startswith("4 problems")
    assert "Did you mean 'H100-80GB'?" in text
    assert "Did you mean 'ib400'?" in text
    assert "3 bananas" in text
    assert "'0' nodes" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no device"),
        ("0xA100", "at least 1"),
        ("-2xA100", "at least 1"),
        ("1.5xA100", "at least 1"),
        ("2xA100, 2 nodes", "link between them"),
        ("2xA100, 4xA100", "given twice"),
        ("99999999xA100", "more than any cluster"),
        ("nowhere.yaml", "cannot be read"),
        ("8xH100-80GB + 8xA100-80GB, ib400", "several kinds of nodes.*name the slowest kind for all"),
        ("256xGB200", "more than the 72 that NVLink joins.*'64xGB200, 4 nodes, ib400'"),
        ("8xH100, nvlink4 spine 3:1", "'nvlink4 spine 3:1' is not a device, link"),
        ("8xH100, ib400, spine 2:1", "'spine 2:1' is not a device, link.*behind its link: 'ib400 spine 2:1'"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        cluster_from_spec(text)


def test_a_rack_of_72_is_one_node() -> None:
    cluster = cluster_from_spec("72xGB300, 4 nodes, ib800")
    assert (cluster.world_size, cluster.num_nodes, _hardware(cluster).within_node.name) == (288, 4, "nvlink5")


@pytest.mark.parametrize(
    ("written", "share"), [("ib400 rails", 1), ("NDR spine 2:1", 0.5), ("ib400 rails 4:1", 0.25)]
)
def test_an_oversubscribed_spine_divides_the_rate_between_nodes(written: str, share: float) -> None:
    plain, said = (_hardware(cluster_from_spec(f"8xH100, 16 nodes, {link}")) for link in ("ib400", written))
    assert said.between_nodes.rate.bytes_per_s == share * plain.between_nodes.rate.bytes_per_s
    assert said.between_nodes.rate.latency_s == plain.between_nodes.rate.latency_s
    assert said.within_node == plain.within_node


@given(st.text(max_size=40))
def test_no_text_gives_a_traceback(text: str) -> None:
    with contextlib.suppress(InputError):  # and nothing else
        assert cluster_from_spec(text).world_size >= 1


def test_a_file_with_a_device_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "device:\n  name: X1\n  like: H100\n  memory: 96GiB\n  flops_per_s: {bfloat16: 4e14}\n"
        "devices_per_node: 4\nnodes: 2\n"
        "between_nodes: {name: own, latency_s: 1e-5, bytes_per_s: 1e10}\n"
    )
    cluster = cluster_from_spec(path)
    hardware = _hardware(cluster)
    assert (cluster.world_size, cluster.device_name) == (8, "X1")
    assert hardware.device.memory_bytes == 96 * 2**30
    assert hardware.device.flops_of("bfloat16") == 4e14
    assert hardware.device.memory_bytes_per_s == pytest.approx(0.92 * 3.35e12)
    assert (hardware.between_nodes.rate.latency_s, hardware.between_nodes.rate.bytes_per_s) == (1e-5, 1e10)
    as_json = tmp_path / "cluster.json"
    as_json.write_text(json.dumps({"devices": "8xA100", "nodes": 1}))
    assert cluster_from_spec(str(as_json)).world_size == 8


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("8xH100, FlashAttention-4", "Did you mean 'FlashAttention-"),
        ("8xL4, cuDNN", "no rates of fused attention for L4"),
        ("8xMI300X, cuDNN", "no rates of cuDNN's attention for MI300X"),
        ("8xH100, cuDNN, FlashAttention-2", "attention is given twice"),
    ],
)
def test_a_wrong_library_of_attention_is_told(written: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        cluster_from_spec(written)


def test_a_limit_of_power_lowers_the_clock() -> None:
    free, limited = (cluster_from_spec(f"8xH100-80GB{more}") for more in ("", ", 350W"))
    share = _hardware(limited).device.flops_of("bfloat16") / _hardware(free).device.flops_of("bfloat16")
    assert share == pytest.approx(0.5 ** (1 / 3))
    assert _hardware(limited).device.memory_bytes_per_s == _hardware(free).device.memory_bytes_per_s
    with pytest.raises(InputError, match="up to 700 W"):
        cluster_from_spec("8xH100-80GB, 900W")
    with pytest.raises(InputError, match="for devices of the table"):
        cluster_from_spec("8xL4, 50W")


def test_an_efficiency_of_one_s_own_holds_for_all_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: {name: X1, like: H100, efficiency: 0.5}\n")
    device = _hardware(cluster_from_spec(path)).device
    assert device.products_of("float8") == 2 * device.products_of("bfloat16") == device.flops_of("bfloat16")


def test_mistakes_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("device: {name: X1, memory: lots, memroy: 1}\nnode: 2\nnodes: two\n")
    with pytest.raises(InputError) as caught:
        cluster_from_spec(path)
    text = str(caught.value)
    assert "Did you mean 'nodes'?" in text
    assert "device.memroy is not a key. Did you mean 'memory'?" in text
    assert "'two' nodes" in text
    for broken, said in (
        ("[1, 2]", "holds a list"),
        ("a: [", "is not YAML"),
        ("device: {like: H100, type: gpu}", "device.type='gpu': Input should be 'cuda' or 'cpu'"),
        ("device: {like: H100, capability: [9]}", r"device.capability.1=\[9\]: Field required"),
    ):
        path.write_text(broken)
        with pytest.raises(InputError, match=said):
            cluster_from_spec(path)


def test_only_what_is_nearly_as_close_as_the_best_is_suggested() -> None:
    assert did_you_mean("H100-80G", ["H100-80GB", "A100-80GB"]) == " Did you mean 'H100-80GB'?"
    assert did_you_mean("zzz", ["H100-80GB"]) == ""
