"""``atorch-ns strategy convert``: what it prints, refuses and writes."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import yaml

from atorch_ns import Strategy
from tests.cli.conftest import Run

_STAGE_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize("name", ["out.txt", "out", "out.json.bak"])
def test_a_file_of_another_suffix_is_not_written(job: Path, run: Run, name: str) -> None:
    (job / "ds.json").write_text(json.dumps(_STAGE_3))
    done = run("strategy", "convert", "ds.json", name)
    assert done.returncode == 2
    assert "suffix of a strategy file" in done.stderr
    assert not (job / name).exists()


def test_an_open_precision_is_said_on_standard_error(job: Path, run: Run) -> None:
    (job / "ds.json").write_text(json.dumps(_STAGE_3))
    done = run("strategy", "convert", "ds.json", "out.yml", "--json")
    assert done.returncode == 0
    assert "warning: bf16.enabled is 'auto'" in done.stderr
    assert json.loads(done.stdout)["warnings"][0] in done.stderr
    assert Strategy.load(job / "out.yml").names == ("fsdp",)


def test_a_missing_file_that_a_config_names_is_wrong_usage(job: Path, run: Run) -> None:
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (job / "accelerate.yaml").write_text(yaml.safe_dump(document))
    done = run("strategy", "convert", "accelerate.yaml", "out.json")
    assert done.returncode == 2
    assert "deepspeed_config_file='ds.json'" in done.stderr
    assert not (job / "out.json").exists()


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch ran",))


def test_class_names_a_module_class_only(job: Path, run: Run) -> None:
    (job / "evil").write_bytes(pickle.dumps(_Evil()))
    refused = run("strategy", "convert", "evil", "out.json")
    assert refused.returncode == 2
    assert "--class" not in refused.stderr
    allowed = run("strategy", "convert", "evil", "out.json", "--class", "posix.system")
    assert allowed.returncode == 2
    assert "posix.system cannot be allowed" in allowed.stderr
    assert not (job / "ran").exists()
    content = pickle.dumps([("checkpoint", ("Block",))], protocol=2)
    # As a script of ATorch's user saves a class of its own.
    (job / "old").write_bytes(content.replace(pickle.dumps("Block", protocol=2)[2:-3], b"c__main__\nBlock\n"))
    unnamed = run("strategy", "convert", "old", "out.json")
    assert unnamed.returncode == 2
    assert "--class __main__.Block" in unnamed.stderr
    assert run("strategy", "convert", "old", "out.json", "--class", "__main__.Block").returncode == 0
    assert Strategy.load(job / "out.json")["checkpoint"] == ["__main__.Block"]
