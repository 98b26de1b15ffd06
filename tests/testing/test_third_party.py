"""A method that somebody else ships: found by its entry point, used by its name, checked by the suite."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from atorch_ns.method import load_registry
from atorch_ns.testing import assert_parity, compare, get_case, reference_run, run_ranks
from atorch_ns.testing.parity import accelerate_case, accelerated_run

PLUGIN = '''
from __future__ import annotations

from typing import Any, final

import torch
from pydantic import Field

from atorch_ns.method import Flag, Method, MethodConfig, Phase
from atorch_ns.profile import repeated_blocks


class SaveOnHostConfig(MethodConfig):
    """How activations are kept."""

    pin_memory: Flag = Field(default=False, description="Keep them in pinned memory.")
    every_n: int = Field(default=1, ge=1, description="Of every n-th block.")

    @classmethod
    def from_shorthand(cls, value: Any) -> dict[str, Any]:
        """``2``, every second block."""
        return {"every_n": value}


@final
class SaveOnHost(Method[SaveOnHostConfig]):
    """Keeps the activations of blocks in host memory until the backward pass."""

    name = "acme_save_on_host"
    aliases = ("acme_offload",)
    phase = Phase.RECOMPUTE
    Config = SaveOnHostConfig

    def apply(self, job: Any, config: SaveOnHostConfig) -> None:
        blocks = repeated_blocks(job.module)[:: config.every_n]
        for block in blocks:
            _save_on_host(block.module, config.pin_memory)
        job.explain(self.name, f"{len(blocks)} block(s)")


def _save_on_host(module: torch.nn.Module, pin_memory: bool) -> None:
    contexts: list[Any] = []

    def enter(*_: Any) -> None:
        contexts.append(torch.autograd.graph.save_on_cpu(pin_memory=pin_memory))
        contexts[-1].__enter__()

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
'''

SUITE = """
from acme_methods import SaveOnHost
from atorch_ns.testing.conformance import MethodConformance


class TestSaveOnHost(MethodConformance):
    method = SaveOnHost
    configs = (None, 2)
    cases = ("mlp",)
    bad_configs = ((0, "every_n"), ({"pin": True}, "pin"), ({"pin_memory": "yes"}, "pin_memory"))
"""

FAULTY = '''
import random
from atorch_ns.method import Method, MethodConfig, Phase


class FaultyConfig(MethodConfig):
    """Settings."""

    levels: list[int] = []
    lax: object = None


class Faulty(Method[FaultyConfig]):
    """faulty in every way that the suite looks for."""

    name = "faulty"
    phase = Phase.RECOMPUTE
    Config = FaultyConfig
    seen = []

    def check(self, config, cluster, profile):
        self.seen.append(1)
        random.random()
        return []

    def plan(self, plan, config):
        return plan.changed(recomputation={"every": plan.recomputation.every + 1})

    def options(self, profile, cluster):
        return [{"levels": 1}]

    def apply(self, job, config):
        self.seen.append(1)
        next(job.module.parameters()).register_hook(lambda gradient: gradient * len(self.seen) * 0.1)
        if job.inputs.optim_args:
            job.inputs.optim_args["lr"] = 0.5

    def explain(self, config, cluster):
        return ""
'''

FAULTY_SUITE = """
from faulty_methods import Faulty
from atorch_ns.testing.conformance import MethodConformance


class TestFaulty(MethodConformance):
    method = Faulty
    bad_configs = (({"lax": "anything"}, "lax"),)
    cases = ("mlp",)
"""

FAULTS = {
    "test_the_class_is_final_named_and_documented": "typing.final",
    "test_every_setting_is_described": "does not describe levels, lax",
    "test_a_config_cannot_be_changed": "unhashable type",
    "test_a_bad_config_is_refused": "is accepted",
    "test_the_plan_is_pure": "planning twice adds to the plan",
    "test_checks_are_pure": "changed: the random state of Python",
    "test_it_offers_a_search_only_what_it_accepts": "is no FaultyConfig",
    "test_it_explains_itself": "explain gives nothing",
    "test_one_process_trains_the_same_model": "ended with different values",
    "test_ranks_train_the_same_model": "no parity",
    "test_what_the_caller_gave_is_left_alone": "'lr': 0.001",
    "test_it_is_found_by_its_name": "",
    "test_the_defaults_are_the_empty_config": "",
    "test_a_config_survives_its_file": "",
    "test_a_failure_on_one_rank_ends_all_with_its_cause": "",
}
"""For every test of the suite, a part of what it says about the faulty method; empty where it passes."""


def _install(folder: Path, distribution: str, module: str, source: str, entry_points: str) -> None:
    """What pip would leave in site-packages."""
    (folder / f"{module}.py").write_text(source)
    information = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[atorch_ns.methods]\n{entry_points}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path for distributions; forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for name in set(sys.modules) - before:
        monkeypatch.delitem(sys.modules, name)
    for name in ("acme_methods", "faulty_methods"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def acme(site: Path) -> Path:
    entry = "acme_save_on_host = acme_methods:SaveOnHost"
    _install(site, "acme-methods", "acme_methods", PLUGIN, entry)
    return site


def test_a_plug_in_is_found_and_used_by_name(acme: Path) -> None:
    registry = load_registry()
    assert registry.origin("acme_save_on_host") == "acme-methods"
    assert registry.get("acme_offload") is registry.get("acme_save_on_host")
    case = get_case("mlp")
    result = accelerate_case(case, [("acme_offload", 2), "checkpoint"])
    assert result.report.strategy.names == ("acme_save_on_host", "checkpoint")
    assert "2 block(s)" in str(result.report)
    reference = reference_run(case)
    runs = run_ranks(lambda: accelerated_run(case, ["fsdp", "acme_save_on_host"]), 2)
    assert_parity(compare(reference, runs[0]))


def test_a_strategy_with_a_plug_in_survives_its_file(acme: Path, tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    case = get_case("mlp")
    accelerate_case(case, [("acme_save_on_host", 3)], save_strategy_to_file=path)
    assert "3" in path.read_text()
    result = accelerate_case(case, path)
    assert result.report.strategy["acme_save_on_host"] == {"every_n": 3}


@pytest.mark.parametrize(
    ("source", "entry", "reason"),
    [
        ("import no_such_package", "broken = broken_methods:Broken", "No module named 'no_such_package'"),
        ("", "broken = broken_methods:Broken", "has no attribute 'Broken'"),
        ("Broken = dict", "broken = broken_methods:Broken", "not a subclass"),
        ("raise RuntimeError('no driver')", "broken = broken_methods:Broken", "no driver"),
        (
            PLUGIN.replace("acme_save_on_host", "fsdp"),
            "broken = broken_methods:SaveOnHost",
            "'fsdp' is taken",
        ),
    ],
    ids=["missing import", "missing class", "no method", "raises", "taken name"],
)
def test_a_broken_plug_in_is_a_warning_that_names_its_distribution(
    site: Path, monkeypatch: pytest.MonkeyPatch, source: str, entry: str, reason: str
) -> None:
    monkeypatch.delitem(sys.modules, "broken_methods", raising=False)
    _install(site, "broken-methods", "broken_methods", source, entry)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = load_registry()
    (warning,) = [str(w.message) for w in caught if "was not loaded" in str(w.message)]
    sys.modules.pop("broken_methods", None)
    assert "'broken' of broken-methods" in warning
    assert reason in warning
    assert {"fsdp", "amp_native", "checkpoint"} <= {method.name for method in registry}
    assert registry.origin("fsdp") == "atorch-ns"


def test_the_suite_passes_a_sound_method_and_fails_a_faulty_one(acme: Path) -> None:
    _install(acme, "faulty-methods", "faulty_methods", FAULTY, "faulty = faulty_methods:Faulty")
    (acme / "test_sound.py").write_text(SUITE)
    (acme / "test_faulty.py").write_text(FAULTY_SUITE)
    (acme / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(acme), "COLUMNS": "1000"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "."],
        cwd=acme,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    told = done.stdout[-4000:] + done.stderr[-2000:]
    sound = [line for line in lines if "test_sound" in line]
    assert len(sound) > 20, told
    assert all(line.startswith("PASSED") for line in sound), told
    faulty = {line.split("::")[2].split("[")[0].split()[0]: line for line in lines if "test_faulty" in line}
    assert faulty.keys() == FAULTS.keys(), told
    for name, line in faulty.items():
        assert line.startswith("FAILED" if FAULTS[name] else "PASSED"), line
        assert FAULTS[name] in line, line
