"""The line of torchrun."""

from __future__ import annotations

import shlex

import pytest

from atorch_ns.errors import InputError
from atorch_ns.processes import Launch, threads_of_rank


def test_one_node() -> None:
    asked = Launch(target=("train.py", "--lr", "1e-3"), nproc="4")
    variables = asked.environment({}, num_cores=8)
    assert asked.shell_command(variables) == (
        "OMP_NUM_THREADS=2 torchrun --standalone --nproc-per-node=4 -- train.py --lr 1e-3"
    )
    assert asked.command[1:3] == ["-m", "torch.distributed.run"]
    assert shlex.split(asked.shell_command({}))[1:] == asked.command[3:]


def test_several_nodes() -> None:
    asked = Launch(
        target=("pkg.train",),
        module=True,
        nproc="gpu",
        nnodes="1:3",
        rendezvous="node0:29400",
        max_restarts=2,
    )
    assert asked.shell_command(asked.environment({}, num_cores=8)) == (
        "torchrun --nnodes=1:3 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=atorch-ns "
        "--nproc-per-node=gpu --max-restarts=2 --module pkg.train"
    )


def test_a_node_keeps_the_number_that_it_is_given() -> None:
    """torchrun's dynamic rendezvous would not look at it."""
    asked = Launch(target=("a.py",), nnodes="2", node_rank=1, rendezvous="node0:29400")
    assert asked.shell_command({}) == (
        "torchrun --nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29400 --nproc-per-node=1 a.py"
    )
    with pytest.raises(InputError, match="numbered as they come"):
        Launch(target=("a.py",), nnodes="1:3", node_rank=1, rendezvous="node0:29400")
    with pytest.raises(InputError, match="less than --nnodes=2"):
        Launch(target=("a.py",), nnodes="2", node_rank=2, rendezvous="node0:29400")


def test_threads_are_the_share_of_the_cores_unless_they_are_set() -> None:
    asked = Launch(target=("a.py",), nproc="3")
    assert asked.environment({}, num_cores=8) == {"OMP_NUM_THREADS": "2"}
    assert asked.environment({"OMP_NUM_THREADS": "5"}, num_cores=8) == {}
    wanted = Launch(target=("a.py",), nproc="3", threads=4)
    assert wanted.environment({"OMP_NUM_THREADS": "5"}, num_cores=8) == {"OMP_NUM_THREADS": "4"}
    assert threads_of_rank(2, 8) == 1


def test_a_rendezvous_of_ip_version_6() -> None:
    asked = Launch(target=("a.py",), nnodes="2", rendezvous="[fd00::1]:80")
    assert asked.rendezvous_endpoint == ("fd00::1", 80)
    assert "--rdzv-endpoint=[fd00::1]:80" in asked.arguments
    numbered = Launch(target=("a.py",), nnodes="2", node_rank=0, rendezvous="[fd00::1]:80")
    assert {"--master-addr=fd00::1", "--master-port=80"} <= set(numbered.arguments)


def test_a_script_that_is_named_like_an_option() -> None:
    assert Launch(target=("-d.py", "-x")).arguments[-3:] == ["--", "./-d.py", "-x"]


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        Launch(target=(), nproc="0", nnodes="2", node_rank=-1, max_restarts=-1, threads=0)
    for word in (
        "nothing to launch",
        "--nproc='0'",
        "--rendezvous",
        "--node-rank",
        "--max-restarts",
        "--threads",
    ):
        assert word in str(caught.value)
    with pytest.raises(InputError, match="host:port"):
        Launch(target=("a.py",), nnodes="2", rendezvous="node0")


def test_the_options_are_torchrun_s_own() -> None:
    """torchrun itself reads the line."""
    from torch.distributed.run import parse_args

    asked = Launch(target=("a.py", "--nproc", "7"), nproc="2", nnodes="2", rendezvous="n:1", node_rank=0)
    read = parse_args(asked.command[3:])
    assert (read.nnodes, read.nproc_per_node, read.node_rank) == ("2", "2", 0)
    assert (read.rdzv_backend, read.master_addr, read.master_port) == ("static", "n", 1)
    assert read.training_script_args == ["--nproc", "7"]
