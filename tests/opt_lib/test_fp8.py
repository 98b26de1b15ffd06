"""The method fp8: where it is left out, what it refuses, and what it says."""

from __future__ import annotations

import logging
import subprocess
import warnings
from typing import Any

import pytest
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.estimate import Workload
from atorch_ns.job import Inputs, Job
from atorch_ns.method import load_registry, resolve
from atorch_ns.profile import Profile
from atorch_ns.search import SearchSettings, explore
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing import get_case
from atorch_ns.testing.parity import accelerate_case
from opt_lib.fp8 import Fp8, Fp8Config
from tests.warm import COLD_PYTHON

EMULATED = {"backend": "torchao", "emulate": True}
HOPPER = Cluster(device_type="cuda", capability=(9, 0), device_name="H100", packages={"torchao": "0.18"})


def applied(
    model: nn.Module, config: Any = None, cluster: Cluster | None = None, **plan: Any
) -> tuple[Job, list[str]]:
    job = Job.start(
        Inputs(model=model), cluster or Cluster(packages={"torchao": "0"}), Plan().changed(**plan), seed=0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Fp8().apply(job, Fp8Config.model_validate({**EMULATED, **(config or {})}))
    return job, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("config", "cluster", "parts"),
    [
        (None, Cluster(packages={"torchao": "0"}), ("CPU", "emulate")),
        ("te", Cluster(packages={"torchao": "0"}), ("CPU",)),
        (
            {"backend": "te", "emulate": True},
            Cluster(packages={"torchao": "0"}),
            ("CPU", "Transformer Engine emulates none (it does not read emulate)"),
        ),
        (
            None,
            Cluster(device_type="cuda", capability=(8, 0), device_name="A100", packages={"torchao": "0"}),
            ("A100", "8.0", "8.9"),
        ),
        (
            None,
            Cluster(device_type="cuda", capability=(9, 0)),
            ("pip install 'transformer-engine[pytorch]'", "pip install 'atorch-ns[fp8]'"),
        ),
        ("te", HOPPER, ("pip install 'transformer-engine[pytorch]'",)),
        (EMULATED, Cluster(), ("pip install 'atorch-ns[fp8]'",)),
    ],
)
def test_where_it_cannot_be_used_it_is_left_out_with_a_reason(
    config: Any, cluster: Cluster, parts: tuple[str, ...]
) -> None:
    resolved = resolve(Strategy([("fp8", config)]), cluster, load_registry())
    (note,) = resolved.notes
    assert note.kind == "left out"
    assert all(part in note.text for part in parts), note.text
    assert not resolved.chosen
    assert resolved.plan.precision.narrow is None
    assert "fp8" in [step.name for step in resolved.strategy]


def test_left_out_is_one_warning_and_one_row() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = accelerate_case(get_case("mlp"), ["fp8"])
    told = [str(warning.message) for warning in caught if "fp8" in str(warning.message)]
    assert len(told) == 1
    assert [note for note in result.report.notes if "fp8 is left out" in note] == told


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), None])
def test_ada_hopper_and_later_have_it(capability: tuple[int, int] | None) -> None:
    cluster = Cluster(device_type="cuda", capability=capability, packages={"torchao": "0"})
    assert Fp8().unavailable(Fp8Config(), cluster) is None


@pytest.mark.parametrize(
    ("config", "unread"),
    [
        ({"margin": 2, "reduce_amax": False}, "margin, reduce_amax"),
        ({"backend": "torchao", "fp8_format": "E4M3"}, "fp8_format"),
        ({"recipe": "rowwise"}, None),
        ({"include": ("layers",), "verbose": True}, None),
    ],
)
def test_settings_of_the_other_package_are_a_notice(config: Any, unread: str | None) -> None:
    notices = list(Fp8().notices(Fp8Config.model_validate(config), HOPPER))
    assert notices == ([] if unread is None else [f"fp8: torchao does not read {unread}"])


@pytest.mark.parametrize(
    ("config", "key", "part"),
    [
        ({"incldue": ()}, "incldue", "Did you mean 'include'?"),
        ("transformer_engine", "backend", "'te' or 'torchao'"),
        ({"recipe": "blockwise"}, "recipe", "rowwise"),
        ({"recipe": "rowwise", "fsdp_all_gather": True}, None, "one scale for a whole weight"),
        ({"amax_history_len": 0}, "amax_history_len", "greater than or equal to 1"),
        ({"fp8_format": "E5M2"}, "fp8_format", "E4M3"),
        ({"include": ()}, None, "include is empty"),
        ({"exclude": ("",)}, None, "empty string"),
        ({"include": ("up", "down"), "exclude": ("up",)}, None, "'up' is in both include and exclude"),
    ],
)
def test_wrong_configs_are_problems(config: Any, key: str | None, part: str) -> None:
    with pytest.raises(StrategyError) as caught:
        resolve(Strategy([("fp8", config)]), HOPPER, load_registry())
    (problem,) = caught.value.problems
    assert (problem.method, problem.key) == ("fp8", key)
    assert part in str(problem)


def test_the_specification_s_default_config_is_the_default() -> None:
    written = {
        "include": None,
        "exclude": None,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "reduce_amax": True,
    }
    assert Fp8Config.model_validate(written) == Fp8Config()
    assert Fp8Config.model_validate({"include": "layers"}).include == ("layers",)


def test_lora_is_refused_with_the_reason() -> None:
    peft = pytest.importorskip("peft", exc_type=Exception)
    model = peft.get_peft_model(get_case("hf_llama").build(), peft.LoraConfig(target_modules=["q_proj"], r=4))
    profile = Profile.of(model)
    for config, refused in ((EMULATED, True), ({**EMULATED, "include": ("mlp",)}, False)):
        problems = Fp8().check(Fp8Config.model_validate(config), Cluster(), profile)
        assert bool(problems) is refused
    problems = Fp8().check(Fp8Config(), Cluster(), profile)
    assert "LoRA" in str(problems[0])
    assert "q_proj (2)" in str(problems[0])


def test_the_report_says_which_and_why_not() -> None:
    job, told = applied(get_case("tied_llama").build())
    did, kept = job.explanations["fp8"]
    assert isinstance(did, str)
    assert "torchao, tensorwise, emulated" in did
    assert "layers.*.mlp.up_proj (4)" in did
    assert "lm_head: it makes the logits" in str(kept)
    (warning,) = told
    assert "lm_head stays as it is" in warning


@pytest.mark.parametrize("config", [{"include": ("layers",)}, {"exclude": ("lm_head",)}])
def test_who_names_the_layers_hears_nothing_of_the_head(config: Any) -> None:
    assert applied(get_case("tied_llama").build(), config)[1] == []


@pytest.mark.parametrize(
    ("key", "config"),
    [("include", {"include": ("layers", "mpl")}), ("exclude", {"include": ("layers",), "exclude": ("mpl",)})],
)
def test_a_part_that_no_name_contains_is_one_warning(key: str, config: Any) -> None:
    (text,) = applied(get_case("tied_llama").build(), config)[1]
    assert f"from {key}." in text
    assert "Nearest: mlp" in text


def test_a_model_that_is_one_linear_is_named() -> None:
    pytest.importorskip("torchao", exc_type=Exception)
    job, _ = applied(nn.Linear(16, 16))
    assert "emulated: the model itself" in str(job.explanations["fp8"][0])


def test_a_second_conversion_says_what_the_first_did() -> None:
    pytest.importorskip("torchao", exc_type=Exception)
    job, _ = applied(nn.Sequential(nn.Linear(16, 16)))
    again, told = applied(job.module)
    assert told == ["fp8 is left out: 0: in fp8 before"]
    assert again.module[0] is job.module[0]  # type: ignore[index]


def test_verbose_names_every_layer() -> None:
    _, told = applied(get_case("mlp").build(), {"verbose": True})
    (text,) = told
    assert "replaced stem, blocks.0.up, blocks.0.down, blocks.1.up" in text
    assert "not replaced: head: dims that are not multiples of 16" in text


@pytest.mark.parametrize(
    ("model", "part"),
    [(nn.Sequential(nn.Linear(3, 3)), "0: dims that are not multiples"), (nn.LayerNorm(16), "no nn.Linear")],
)
def test_nothing_to_replace_is_a_warning(model: nn.Module, part: str) -> None:
    job, told = applied(model)
    (text,) = told
    assert "fp8 is left out" in text
    assert part in text
    (said,) = job.explanations["fp8"]
    assert str(said).startswith("nothing was replaced: ")
    assert part in str(said)
    assert "torchao" not in str(said)


def test_gathering_in_fp8_without_sharding_is_a_warning() -> None:
    _, told = applied(get_case("mlp").build(), {"fsdp_all_gather": True})
    (text,) = told
    assert "fsdp_all_gather does nothing" in text


def test_only_rank_0_warns() -> None:
    cluster = Cluster(world_size=2, rank=1, packages={"torchao": "0"})
    assert applied(nn.LayerNorm(16), cluster=cluster)[1] == []


def test_a_search_takes_it_only_where_it_was_asked_for() -> None:
    def searched(cluster: Cluster, **asked: Any) -> list[set[str]]:
        profile = Profile.of(get_case("tied_llama").build())
        space = explore(profile, cluster, workload, load_registry(), settings=SearchSettings(), **asked)
        return [{name for name, _ in one.steps} for one in space.candidates if one.pruned is None]

    workload = Workload(global_batch=8, num_tokens=8)
    assert searched(HOPPER)
    assert not any("fp8" in names for names in searched(HOPPER))
    wanted = searched(HOPPER, included=["fp8"])
    assert wanted
    assert all("fp8" in names for names in wanted)


def test_a_plan_that_is_asked_twice_is_the_same() -> None:
    for config in (Fp8Config(), Fp8Config(backend="te"), Fp8Config(include=("layers",))):
        once = Fp8().plan(Plan(), config)
        assert Fp8().plan(once, config) == once
        assert once.precision.narrow is not None


def test_the_import_of_torchao_is_silent() -> None:
    script = (
        "import logging, warnings; warnings.simplefilter('always'); logging.basicConfig(level=logging.DEBUG)\n"
        "from opt_lib._fp8.torchao import load; load()\n"
    )
    done = subprocess.run([COLD_PYTHON, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "Failed to load" not in done.stderr
    assert "KernelPreference" not in done.stderr
    assert logging.getLogger("torchao").filters == []
