"""The tables of devices and links: every figure with its source, and figures that agree with each other."""

from __future__ import annotations

import pytest

from atorch_ns.cluster import DEVICES, LINKS, Cluster, cluster_from_spec
from atorch_ns.cluster.cluster import CPU_FIGURES, machine_memory_bytes
from atorch_ns.cluster.devices import device_named
from atorch_ns.cluster.kernels import product_share
from atorch_ns.errors import InputError


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_of_a_device_names_its_source(name: str) -> None:
    sheet = DEVICES[name]
    for what, figure in sheet.figures().items():
        assert figure.value > 0, what
        assert len(figure.source) > 15, what
        named = ("data sheet", "white paper", "product brief", "assumed", "Engineering", "test-data")
        assert any(word in figure.source for word in named), f"{name}.{what}: {figure.source}"
    assert (
        "data sheet" in sheet.device(name).source
        or "paper" in sheet.device(name).source
        or "brief" in (sheet.device(name).source)
    )
    assert {sheet.within_node, sheet.to_host} <= set(LINKS)
    assert not sheet.kernels or product_share(sheet.kernels, "bfloat16"), "a name that kernels.csv lacks"


@pytest.mark.parametrize("name", DEVICES)
def test_figures_of_a_device_agree(name: str) -> None:
    sheet = DEVICES[name]
    rates = {dtype: figure.value for dtype, figure in sheet.flops_per_s.items()}
    assert rates["float32"] <= rates["float16"] <= rates.get("float8", float("inf"))
    assert rates["float16"] < 3e15, "a figure with sparsity"
    assert rates.get("float8", 0) == 0 or 1.9 < rates["float8"] / rates["float16"] < 2.1
    size = next((part for part in name.split("-") if part.endswith("GB") and part[:-2].isdecimal()), None)
    if size is not None:
        assert 0.9 < sheet.memory_bytes.value / (int(size[:-2]) * 2**30) < 1


@pytest.mark.parametrize(
    ("name", "figures", "best_tflops"),
    [  # TFLOP/s in bf16 and fp8, GB/s of memory, W, GB/s of a ring within a node
        ("B300", (2250, 4500, 8000, 1100, 682), 1769),
        ("GB300", (2500, 5000, 8000, 1400, 682), 1822),
        ("MI325X", (1307.4, 2614.9, 6000, 1000, 313.6), 784.9),
        ("MI355X", (2516.6, 5033.2, 8000, 1400, 374.85), 1565),
        ("H20", (148, 296, 4000, 500, 362), 142.25),
        ("H800", (989.5, 1979, 3350, 700, 164.8), 794.5),
        ("L40S", (362, 733, 864, 350, 25.2), 269.15),
        ("RTX-5090", (209.5, 419, 1792, 575, 50.4), 236.03),
        ("RTX-PRO-6000", (503.8, 1007.6, 1792, 600, 50.4), 417.98),
    ],
)
def test_devices_of_this_year_have_the_figures_of_their_sheets(
    name: str, figures: tuple[float, ...], best_tflops: float
) -> None:
    hardware = cluster_from_spec(f"2x{name}").hardware
    assert hardware is not None
    device, watts = hardware.device, DEVICES[hardware.device.name].power_w
    assert watts is not None
    found = (device.flops_of("bfloat16") / 1e12, device.flops_of("float8") / 1e12)
    found += (device.memory_bytes_per_s / 0.92e9, watts.value, hardware.within_node.rate.bytes_per_s / 1e9)
    assert found == pytest.approx(figures)
    assert device.products_of("bfloat16") == pytest.approx(best_tflops * 1e12)


@pytest.mark.parametrize("name", LINKS)
def test_every_figure_of_a_link_names_its_source(name: str) -> None:
    sheet = LINKS[name]
    for figure in (sheet.latency_s, sheet.bytes_per_s):
        assert figure.value > 0
        assert len(figure.source) > 15
    assert sheet.link(name).source


def test_every_assumption_about_cpus_says_so() -> None:
    assert all(figure.source.startswith("assumed") for figure in CPU_FIGURES.values())


def test_names_are_unique() -> None:
    names = [name.lower() for key, sheet in DEVICES.items() for name in (key, *sheet.aliases)]
    names += [name for key, link in LINKS.items() for name in (key, *link.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800-80GB"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce GT 710", None),
    ],
)
def test_devices_are_known_by_what_drivers_call_them(reported: str, name: str | None) -> None:
    assert device_named(reported) == name


def test_a_detected_gpu_gets_the_table_and_keeps_its_own_memory() -> None:
    cluster = Cluster(device_type="cuda", device_name="NVIDIA H100 80GB HBM3", device_memory_bytes=123)
    hardware = cluster.with_hardware().hardware
    assert hardware is not None
    assert (hardware.device.name, hardware.device.memory_bytes) == ("H100-80GB", 123)
    assert hardware.within_node.name == "nvlink4"
    with pytest.raises(InputError, match="no 'GT 710'"):
        Cluster(device_type="cuda", device_name="GT 710").with_hardware()


def test_cpu_ranks_share_the_machine() -> None:
    one, four = (Cluster(world_size=n, local_world_size=n).with_hardware() for n in (1, 4))
    assert one.hardware is not None
    assert four.hardware is not None
    assert one.hardware.device.memory_bytes == machine_memory_bytes() == one.device_memory_bytes
    assert four.hardware.device.memory_bytes == machine_memory_bytes() // 4
    assert four.hardware.device.flops_of("float32") <= one.hardware.device.flops_of("float32")
    assert four.with_hardware() is four
