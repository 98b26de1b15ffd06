"""Strategies and clusters from what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from atorch_ns import Strategy
from atorch_ns.cli._planning import check_strategy_is_there, one_node, read_strategy
from atorch_ns.errors import StrategyFileError
from atorch_ns.report import TrainingReport
from tests.report.outcomes import searched


@pytest.mark.parametrize("text", ["fsdp,amp_native", " fsdp , amp_native ,", '["fsdp", "amp_native"]'])
def test_a_strategy_by_names_or_json(text: str) -> None:
    assert read_strategy(text).names == ("fsdp", "amp_native")


def test_a_strategy_from_its_file_or_its_report(tmp_path: Path) -> None:
    strategy, report = tmp_path / "strategy.json", tmp_path / "report.json"
    Strategy(["ddp"]).save(strategy)
    TrainingReport(search=searched()).save(report)
    assert read_strategy(str(strategy)).names == ("ddp",)
    assert read_strategy(str(report)).names == ("fsdp", "amp_native")


@pytest.mark.parametrize("text", ["strategy.json", "folder/strategy"])
def test_what_looks_like_a_file_must_be_one(text: str) -> None:
    with pytest.raises(StrategyFileError, match="--strategy fsdp,checkpoint"):
        check_strategy_is_there(text, "--strategy")
    check_strategy_is_there("fsdp", "--strategy")
    check_strategy_is_there('["fsdp"]', "--strategy")


def test_one_node_is_distributed_from_two_processes_on() -> None:
    assert not one_node(1).distributed
    cluster = one_node(4, "cuda")
    assert (cluster.distributed, cluster.local_world_size, cluster.device_type) == (True, 4, "cuda")
