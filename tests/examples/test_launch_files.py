"""The files of examples/launch start what they say, as far as one machine without those systems can tell."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "launch"


def program(folder: Path, name: str, text: str) -> None:
    """A command of that name, which stands first in PATH."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables, "PATH": path}, capture_output=True, text=True,
        timeout=20, check=False,
    )  # fmt: skip


def read_torchrun(line: str) -> Namespace:
    """The line as torchrun itself understands it."""
    from torch.distributed.run import get_args_parser

    name, *arguments = shlex.split(line)
    assert name == "torchrun"
    return get_args_parser().parse_args(arguments)


ECHO = 'printf "%q " torchrun "$@"'


def slurm(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The batch script, with Slurm's two commands replaced."""
    program(folder, "torchrun", ECHO)
    program(folder, "scontrol", '[ "$*" = "show hostnames n[07-08]" ] && printf "n07\\nn08\\n"')
    program(folder, "srun", 'while [[ "$1" == --* ]]; do echo "$1" >> options; shift; done; exec "$@"'.replace(
        ">> options", f">> {shlex.quote(str(folder / 'options'))}"))  # fmt: skip
    known = {"SLURM_JOB_NODELIST": "n[07-08]", "SLURM_JOB_ID": "4123456", "SLURM_NNODES": "2"}
    return run(folder, "bash", str(FILES / "slurm.sbatch"), *arguments, **(known | variables))


def test_slurm_starts_one_torchrun_a_node(tmp_path: Path) -> None:
    done = slurm(tmp_path, "train.py", "--name", "two words")
    assert done.returncode == 0, done.stderr
    asked = read_torchrun(done.stdout)
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_backend) == ("2", "gpu", "c10d")
    assert (asked.rdzv_endpoint, asked.rdzv_id) == ("n07:23456", "4123456")
    assert [asked.training_script, *asked.training_script_args] == ["train.py", "--name", "two words"]
    assert "--ntasks-per-node=1" in (tmp_path / "options").read_text().split()


def test_slurm_without_gpus_and_without_a_script(tmp_path: Path) -> None:
    assert read_torchrun(slurm(tmp_path, "t.py", NPROC_PER_NODE="4").stdout).nproc_per_node == "4"
    asked = read_torchrun(slurm(tmp_path, "-m", "atorch_ns.cli", "doctor", "--only", "reach").stdout)
    assert (asked.module, asked.training_script) == (True, "atorch_ns.cli")
    assert asked.training_script_args == ["doctor", "--only", "reach"]
    done = slurm(tmp_path)
    assert done.returncode != 0
    assert "name the script" in done.stderr


def test_slurm_reads_its_options_before_the_first_command() -> None:
    text = (FILES / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", str(FILES / "slurm.sbatch")], check=False).returncode == 0
    options = [match.start() for match in re.finditer(r"^#SBATCH --\S+", text, re.MULTILINE)]
    first_command = re.search(r"^[^#\n]", text, re.MULTILINE)
    assert first_command
    assert options
    assert max(options) < first_command.start()


def loaded(name: str) -> Any:
    return yaml.safe_load((FILES / name).read_text())


def assert_options_suit(arguments: list[str], *, num_ranks: int) -> Path:
    """Options of ``elastic.py``: every rank has a part of a batch, and checkpoints go where all ranks see them."""
    options = dict(argument.removeprefix("--").split("=") for argument in arguments)
    assert int(options["batchsize"]) % num_ranks == 0
    assert Path(options["save"]).is_absolute()
    return Path(options["save"])


def test_the_train_job_has_the_fields_of_kubeflow() -> None:
    job = loaded("kubernetes.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = job["spec"]["trainer"]
    known = {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert trainer.keys() <= known
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    command = [*trainer["command"], *trainer["args"]]
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h"}
    read = "from torch.distributed.run import get_args_parser; import sys; a = get_args_parser().parse_args(sys.argv[1:]);"
    show = "print(a.nnodes, a.nproc_per_node, a.node_rank, a.master_addr, a.training_script)"
    done = subprocess.run(
        [sys.executable, "-c", read + show, *command[1:]], env={**os.environ, **variables},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "8", "1", "h", command[1]], done.stderr
    assert (ROOT / command[1]).is_file()
    assert_options_suit(trainer["args"], num_ranks=16)


def test_skypilot_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    task = loaded("skypilot.yaml")
    assert task.keys() == {"name", "num_nodes", "workdir", "file_mounts", "resources", "setup", "run"}
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    program(tmp_path, "torchrun", ECHO)
    done = run(
        tmp_path, "bash", "-euc", task["run"], SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = read_torchrun(done.stdout)
    assert (asked.nnodes, asked.node_rank, asked.nproc_per_node) == ("2", 1, "8")
    assert (asked.master_addr, asked.master_port) == ("10.0.0.1", 29400)
    assert (ROOT / asked.training_script).is_file()
    saved = assert_options_suit(asked.training_script_args, num_ranks=16)
    assert str(saved) in task["file_mounts"]  # a workdir is a copy on each node


# A worker is lost, once, right after the second checkpoint.
LOSES_A_WORKER = """
import os
from pathlib import Path

import ray_train

train = ray_train.train


def loses_a_worker(config):
    from atorch_ns import checkpoint

    save, marker = checkpoint.save, Path(config["save"]) / "lost"

    def save_and_end(folder, result):
        save(folder, result)
        if result.train_step.num_steps == 10 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os._exit(9)

    checkpoint.save = save_and_end
    train(config)


ray_train.train = loses_a_worker
ray_train.main()
"""


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'atorch-ns[ray]'"
)
@pytest.mark.parametrize("loses_a_worker", [False, True])
def test_ray_trains_on_two_workers(tmp_path: Path, loses_a_worker: bool) -> None:
    """A real cluster of this machine, started and ended by the script."""
    path = os.pathsep.join([str(ROOT), str(FILES)])
    variables = {"PYTHONPATH": path, "HOME": str(tmp_path), "RAY_TRAIN_V2_ENABLED": "1"}
    (tmp_path / "loses_a_worker.py").write_text(LOSES_A_WORKER)
    script = tmp_path / "loses_a_worker.py" if loses_a_worker else FILES / "ray_train.py"
    done = subprocess.run(
        [sys.executable, str(script), f"--save={tmp_path}"], cwd=tmp_path, env={**os.environ, **variables},
        capture_output=True, text=True, timeout=340, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]  # one worker writes, and no step is done twice
    assert rows[-1]["train/loss"] < 0.9 * rows[0]["train/loss"]
    assert (tmp_path / "lost").exists() == loses_a_worker
    assert "data=2" in done.stderr + done.stdout
