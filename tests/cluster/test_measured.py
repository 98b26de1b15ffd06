"""The file of a measured cluster: what is read is what was written, and where it may be used."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from atorch_ns.cluster import DEVICES, LINKS, AttentionKind, Cluster, Hardware, Link, Rate, cluster_from_spec
from atorch_ns.cluster.calibrate import Measurement, measure
from atorch_ns.cluster.measured import (
    comparisons,
    holds_something_else,
    measured_document,
    measured_for,
    write_measured,
)
from atorch_ns.cluster.speed_probes import probe_flops
from atorch_ns.errors import InputError
from atorch_ns.system import cpu_model


def _gpus(num_nodes: int = 2) -> tuple[Cluster, Measurement]:
    """A measurement as of 8 GPUs on each node, each figure other than the table's."""
    device = replace(
        DEVICES["H100-80GB"].device("H100-80GB"),
        memory_bytes_per_s=2.7e12,
        flops_per_s={"float32": 5.1e13, "bfloat16": 6.123e14},
        launch_s=4.2e-6,
        efficiency=1.0,
        efficiencies={},
        in_place_bytes_per_s=2.9e12,
        attention="FlashAttention-2",
        attention_factors={"forward/bfloat16": 1.1, "backward/bfloat16": 0.9},
        price_per_hour=2.5,
        source="measured on 16 × H100-80GB on 2 nodes",
    )

    def link(name: str, factor: float) -> Link:
        rates = {"all_reduce": Rate(3e-6, 2e11 * factor), "send": Rate(5e-6, 3e11 * factor)}
        return Link(
            name=name, rate=rates["all_reduce"], collectives=rates, overlap=0.81, source="measured on 16"
        )

    within, between = link("nvlink4", 1.0), link("ib400", 0.1)
    to_host = LINKS["pcie5"].link("pcie5")
    hardware = Hardware(
        device=device,
        within_node=within,
        between_nodes=between if num_nodes > 1 else within,
        to_host=to_host,
        measured=True,
    )
    cluster = Cluster(
        world_size=8 * num_nodes,
        local_world_size=8,
        distributed=True,
        device_type="cuda",
        device_name="NVIDIA H100 80GB HBM3",
        device_memory_bytes=device.memory_bytes,
        capability=(9, 0),
        torch="2.13.0",
    )
    seconds = {
        "product/bfloat16/4096x4096x4096": 2.5e-4,
        "square/bfloat16/512x512x512": 1e-5,
        "attention_training/bfloat16/4x16x4096x128": 1e-3,
        "within_node/all_reduce/1048576": 1e-4,
        "within_node/send/1048576": 1e-5,
    }
    return cluster, Measurement(hardware, cluster.with_hardware().hardware, seconds, {"within_node": 8})


@pytest.mark.parametrize("name", ["calibration.yaml", "calibration.json"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_cluster_is_read_as_it_was_measured(tmp_path: Path, name: str, num_nodes: int) -> None:
    cluster, found = _gpus(num_nodes)
    write_measured(tmp_path / name, measured_document(cluster, found))
    read = cluster_from_spec(tmp_path / name)
    assert read.hardware == found.hardware
    assert (read.world_size, read.local_world_size) == (cluster.world_size, 8)
    assert (read.device_type, read.capability) == ("cuda", (9, 0))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_measurement_of_this_machine_is_read_as_it_was_made(tmp_path: Path) -> None:
    cluster = Cluster()
    found = measure(cluster, seconds=0.5, thorough=True)
    write_measured(tmp_path / "c.yaml", measured_document(cluster, found))
    read = cluster_from_spec(tmp_path / "c.yaml").hardware
    assert read == found.hardware
    assert read is not None
    assert read.measured
    forward = {name: seconds for name, seconds in found.seconds.items() if name.startswith("attention/")}
    predicted: dict[str, list[float]] = {}
    for name, seconds in forward.items():
        _, dtype, shape = name.split("/")
        tokens, width = map(int, shape.split("x")[2:])
        both = found.seconds[f"attention_training/{dtype}/{shape}"]
        for passes, flops, spent in (("forward", 1.0, seconds), ("backward", 2.5, both - seconds)):
            rate = read.device.attention_of(dtype, AttentionKind(passes, width, True, tokens))
            predicted.setdefault(f"{passes}/{dtype}", []).append(flops * probe_flops(name) / rate / spent)
    assert len(predicted) == 4
    for key, ratios in predicted.items():
        assert statistics.median(ratios) == pytest.approx(1.0, rel=0.01), key
    figures = [row.figure for row in comparisons(found)]
    assert "product, float32, 256 × 256 × 256" in figures
    assert any(figure.startswith("causal attention forward and backward, bfloat16") for figure in figures)
    assert all(row.measured > 0 and row.share for row in comparisons(found))


def test_factors_of_attention_by_pass_alone_are_those_of_all_dtypes() -> None:
    device, kind = DEVICES["H100-80GB"].device("H100-80GB"), AttentionKind("backward", 128, True, 4096)
    slower = replace(device, attention_factors={"backward": 0.5, "backward/float16": 0.25})
    for dtype, factor in (("bfloat16", 0.5), ("float16", 0.25)):
        assert slower.attention_of(dtype, kind) == pytest.approx(factor * device.attention_of(dtype, kind))


def test_figures_stand_beside_the_table() -> None:
    rows = {row.figure: row for row in comparisons(_gpus()[1])}
    layers = rows["products, bfloat16"]
    assert layers.measured == 6.123e14
    assert layers.table == pytest.approx(DEVICES["H100-80GB"].device("").products_of("bfloat16"))
    assert rows["product, bfloat16, 512 × 512 × 512"].measured == pytest.approx(2 * 512**3 / 1e-5)
    attention = rows["causal attention forward and backward, bfloat16, 4 × 16 × 4096 × 128"]
    assert attention.measured == pytest.approx(7 * 4 * 16 * 4096**2 * 128 / 1e-3)
    # cuDNN on H100: 518 TFLOP/s forward, and 499 backward by the same share for the mask.
    assert attention.table == pytest.approx(3.5 / (1 / 518e12 + 2.5 / (499e12 * 518 / 609)), rel=0.01)
    nvlink = LINKS["nvlink4"].link("nvlink4").rate
    ring = rows["all_reduce within a node, 1 MiB"]
    expected = 14 * (nvlink.latency_s + 2**17 / nvlink.bytes_per_s)
    assert ring.table == pytest.approx(expected)
    assert ring.share == pytest.approx(expected / 1e-4)
    assert rows["send within a node, 1 MiB"].table == pytest.approx(
        nvlink.latency_s + 2**20 / nvlink.bytes_per_s
    )


def test_more_nodes_need_a_link_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    cluster, found = _gpus(num_nodes=1)
    document = measured_document(cluster, found)
    write_measured(path, {**document, "nodes": 4})
    with pytest.raises(InputError, match="4 nodes need the link between them"):
        cluster_from_spec(path)
    write_measured(path, {**document, "nodes": 4, "between_nodes": "ib400"})
    read = cluster_from_spec(path).hardware
    assert read is not None
    assert read.within_node == found.hardware.within_node
    assert read.between_nodes == LINKS["ib400"].link("ib400")


def test_figures_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    document = measured_document(*_gpus())
    document["within_node"]["collectives"] = {"all_reduce": {"latency_s": "x", "bytes_per_s": 0}}
    document["device"] |= {"in_place_bytes_per_s": -1, "launch_s": float("nan"), "colour": "red"}
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError) as caught:
        cluster_from_spec(path)
    text = str(caught.value)
    assert "device.colour is not a key" in text
    assert "device.in_place_bytes_per_s=-1: give a positive number" in text
    assert "device.launch_s=nan" in text
    assert "within_node.collectives.all_reduce.bytes_per_s=0" in text


def test_a_job_on_the_measured_cluster_uses_them_with_its_own_memory(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    cluster, found = _gpus()
    write_measured(path, measured_document(cluster, found))
    here = replace(cluster, device_memory_bytes=79 * 2**30)
    used = measured_for(path, here)
    assert used == replace(found.hardware, device=replace(found.hardware.device, memory_bytes=79 * 2**30))
    assert measured_for(path, replace(cluster, world_size=32)).between_nodes == found.hardware.between_nodes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"device_name": "NVIDIA A100-SXM4-80GB"},
            "NVIDIA H100 80GB HBM3, and this job has cuda NVIDIA A100",
        ),
        ({"device_type": "cpu"}, "they are of cuda"),
        ({"world_size": 16}, "they are of one node, and this job has 2"),
    ],
)
def test_another_cluster_is_refused_with_what_to_do(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = tmp_path / "c.yaml"
    cluster, found = _gpus(num_nodes=1)
    write_measured(path, measured_document(cluster, found))
    with pytest.raises(InputError, match=said) as caught:
        measured_for(path, replace(cluster, **changes))  # type: ignore[arg-type]
    assert "atorch-ns calibrate -o c.yaml" in str(caught.value)


def test_cpus_that_are_shared_by_other_numbers_of_processes_are_another_cluster(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    document = measured_document(Cluster(), measure(Cluster(), seconds=0.1))
    assert document["measured"]["machine"] == cpu_model()
    write_measured(path, document)
    assert measured_for(path, Cluster()).measured
    with pytest.raises(InputError, match="1 processes shared each machine's cores, and here 2 do"):
        measured_for(path, Cluster(world_size=2, local_world_size=2))


def test_files_of_others_are_known(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    assert not holds_something_else(path)
    write_measured(path, measured_document(*_gpus()))
    assert not holds_something_else(path)
    for text in ("devices: 2xcpu\n", "[1]", "a: [", "\0"):
        path.write_text(text)
        assert holds_something_else(path), text


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was not written: No such file"):
        write_measured(tmp_path / "none" / "c.yaml", measured_document(*_gpus()))
    assert not list(tmp_path.iterdir())
