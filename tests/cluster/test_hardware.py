"""Rates of devices and links, where figures are absent or shared."""

from __future__ import annotations

import pytest

from atorch_ns.cluster import LINKS, Device, Link, Rate


def test_a_collective_without_a_rate_of_its_own_has_the_link_s() -> None:
    usual, own = Rate(1e-6, 1e9), Rate(2e-6, 5e8)
    link = Link(name="mine", rate=usual, collectives={"all_to_all": own})
    assert link.rate_of("all_to_all") is own
    assert link.rate_of("all_reduce") is usual


def test_ranks_of_a_node_divide_an_adapter_that_they_share() -> None:
    shared, alone = LINKS["eth100"].link("eth100", 4), LINKS["eth100"].link("eth100")
    assert shared.rate.bytes_per_s == pytest.approx(alone.rate.bytes_per_s / 4)
    assert shared.rate.latency_s == alone.rate.latency_s
    assert LINKS["ib400"].link("ib400", 4) == LINKS["ib400"].link("ib400"), "one adapter per device"


def test_a_device_without_a_figure_uses_the_next_best() -> None:
    given = {"name": "mine", "type": "cuda", "memory_bytes": 1, "memory_bytes_per_s": 10.0, "launch_s": 0.0}
    device = Device(flops_per_s={"float32": 1.0, "bfloat16": 2.0}, **given)
    assert (device.flops_of("bfloat16"), device.flops_of("float8")) == (2.0, 1.0)
    assert device.update_bytes_per_s == 10.0
    in_place = Device(flops_per_s={"float32": 1.0}, in_place_bytes_per_s=30.0, **given)
    assert in_place.update_bytes_per_s == 30.0


def test_messages_take_as_long_as_rings_of_their_size_were_measured_to() -> None:
    link = LINKS["nvlink3"].link("nvlink3")
    (first, share), *_, (last, whole) = link.ramp
    assert whole == pytest.approx(1, abs=0.01)
    # nccl-tests on eight A100: an all-reduce of 256 MiB in 2.42 ms.
    assert 14 * link.message_seconds("all_reduce", 2**28 / 8) == pytest.approx(2.42e-3, rel=0.01)
    assert link.message_seconds("all_reduce", 1) == link.message_seconds("all_reduce", first), (
        "no less than the least"
    )
    assert link.message_seconds("all_reduce", first) == pytest.approx(first / link.rate.bytes_per_s / share)
    assert link.message_seconds("all_reduce", 8 * last) == pytest.approx(
        8 * link.message_seconds("all_reduce", last)
    )
