"""torchrun: its checked arguments, and its run in this process with the exit code of script or signal."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atorch_ns.errors import InputError

_COUNT = re.compile(r"[1-9][0-9]*")
_NODES = re.compile(r"[1-9][0-9]*(:[1-9][0-9]*)?")
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):([0-9]+)")
_LAST_PORT = 65535
_NAMED_COUNTS = ("auto", "cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Arguments of a torchrun launch.

    Attributes:
        target: the script's path, or with ``module`` a module's name, and the arguments for it.
        nproc: processes on this node: a number, or ``auto``, ``cpu`` or ``gpu`` for torchrun to count.
        nnodes: number of nodes, or ``MIN:MAX``.
        node_rank: rank of this node among a fixed number; ``None`` to let the rendezvous number them.
        rendezvous: ``host:port`` at which several nodes meet.
        max_restarts: number of restarts of a failed group.
        threads: ``OMP_NUM_THREADS`` of each process; ``None`` to decide.
        module: whether ``target`` begins with a module's name.

    Raises:
        InputError: naming every option that cannot be used.
    """

    target: tuple[str, ...]
    nproc: str = "1"
    nnodes: str = "1"
    node_rank: int | None = None
    rendezvous: str | None = None
    max_restarts: int = 0
    threads: int | None = None
    module: bool = False

    def __post_init__(self) -> None:
        problems = list(self._find_problems())
        if problems:
            raise InputError("\n".join(problems))

    @property
    def one_node(self) -> bool:
        """True if this node is the only one."""
        return self.nnodes == "1"

    @property
    def command(self) -> list[str]:
        """Full command line, interpreter included."""
        return [sys.executable, "-m", "torch.distributed.run", *self.arguments]

    @property
    def rendezvous_endpoint(self) -> tuple[str, int] | None:
        """Host and port of the rendezvous, if several nodes meet."""
        match = _ENDPOINT.fullmatch(self.rendezvous or "")
        return None if match is None else (match[1].strip("[]"), int(match[2]))

    def environment(self, variables: Mapping[str, str], *, num_cores: int) -> dict[str, str]:
        """Variables to add to ``variables``: ``OMP_NUM_THREADS``, unless it is set there.

        Args:
            variables: the environment of this process.
            num_cores: cores that this process may use.
        """
        if self.threads is not None:
            return {"OMP_NUM_THREADS": str(self.threads)}
        if "OMP_NUM_THREADS" in variables or not _COUNT.fullmatch(self.nproc):
            return {}
        return {"OMP_NUM_THREADS": str(threads_of_rank(num_cores, int(self.nproc)))}

    def shell_command(self, variables: Mapping[str, str]) -> str:
        """The command as one would type it into a shell."""
        set_first = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        return " ".join([*set_first, "torchrun", shlex.join(self.arguments)])

    @property
    def arguments(self) -> list[str]:
        """Arguments for torchrun."""
        restarts = [f"--max-restarts={self.max_restarts}"] if self.max_restarts else []
        script, *rest = self.target
        if script.startswith("-") and not self.module:
            script = f"./{script}"  # Python would take it for an option
        return [
            *(["--standalone"] if self.one_node else self._rendezvous_arguments()),
            f"--nproc-per-node={self.nproc}",
            *restarts,
            *(["--module"] if self.module else []),
            *self._script_separator(),
            script,
            *rest,
        ]

    def _rendezvous_arguments(self) -> list[str]:
        # The c10d rendezvous numbers nodes as they come, whatever rank they ask for; the static one does not.
        if self.node_rank is None:
            meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.rendezvous}", "--rdzv-id=atorch-ns"]
        else:
            host, port = self.rendezvous_endpoint or ("", 0)
            meeting = [f"--node-rank={self.node_rank}", f"--master-addr={host}", f"--master-port={port}"]
        return [f"--nnodes={self.nnodes}", *meeting]

    def _script_separator(self) -> list[str]:
        # Without it torchrun takes an option of the script for an abbreviation of its own.
        return ["--"] if any(argument.startswith("-") for argument in self.target[1:]) else []

    def _one_node_problems(self) -> list[str]:
        options = {"--rendezvous": self.rendezvous, "--node-rank": self.node_rank}
        names = [name for name, value in options.items() if value is not None]
        if not names:
            return []
        subject = f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'}"
        return [f"{subject} no effect on one node. Leave out what is not meant, or give --nnodes."]

    def _node_problems(self) -> list[str]:
        problems, endpoint, rank = [], self.rendezvous_endpoint, self.node_rank
        if self.rendezvous is not None and endpoint is None:
            problems.append(
                f"--rendezvous={self.rendezvous!r} is not a host:port, such as node0:29400 or [fd00::1]:29400."
            )
        elif endpoint is not None and not 0 < endpoint[1] <= _LAST_PORT:
            problems.append(f"--rendezvous={self.rendezvous!r}: a port is a number from 1 to {_LAST_PORT}.")
        if rank is not None and rank < 0:
            problems.append(f"--node-rank={rank} must be at least 0.")
        if rank is not None and ":" in self.nnodes:
            problems.append(
                f"--node-rank={rank} cannot be kept with --nnodes={self.nnodes}: nodes that come and go are "
                "numbered as they come. Leave it out, or give a fixed number of nodes."
            )
        elif rank is not None and self.nnodes.isdecimal() and rank >= int(self.nnodes):
            problems.append(f"--node-rank={rank} must be less than --nnodes={self.nnodes}.")
        return problems

    def _find_problems(self) -> list[str]:
        problems = []
        if not self.target:
            problems.append("there is nothing to launch. Give a script, or --module with a module's name.")
        if self.nproc not in _NAMED_COUNTS and not _COUNT.fullmatch(self.nproc):
            problems.append(
                f"--nproc={self.nproc!r}: at least one process is needed. Use a number such as 2, or auto, cpu or gpu."
            )
        if not _NODES.fullmatch(self.nnodes):
            problems.append(
                f"--nnodes={self.nnodes!r}: at least one node is needed. Use a number, or MIN:MAX for an elastic group."
            )
        elif int(self.nnodes.partition(":")[0]) > int(self.nnodes.rpartition(":")[2]):
            problems.append(f"--nnodes={self.nnodes!r}: MIN is more than MAX.")
        elif not self.one_node and self.rendezvous is None:
            problems.append(
                f"--nnodes={self.nnodes} needs --rendezvous host:port, an address of one node that all reach."
            )
        problems += self._one_node_problems() if self.one_node else self._node_problems()
        if self.max_restarts < 0:
            problems.append(f"--max-restarts={self.max_restarts} must be at least 0.")
        if self.threads is not None and self.threads < 1:
            problems.append(f"--threads={self.threads} must be at least 1.")
        return problems


def threads_of_rank(num_cores: int, num_ranks: int) -> int:
    """Threads that each of ``num_ranks`` equal ranks may use without taking the others' cores; at least 1."""
    return max(1, num_cores // max(1, num_ranks))


def run_torchrun(arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs torchrun to its end; call it on the main thread, once in a process.

    Args:
        arguments: torchrun's arguments.
        variables: environment variables of this process and of all that it starts.

    Returns:
        0, or the exit code of the rank that failed first; 128 and its number for a signal that ended that
        rank, or that came to this process.
    """
    os.environ.update(variables)  # torchrun sets OMP_NUM_THREADS to 1 where it is not set
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(list(arguments))
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        code = int(error.get_first_failure()[1].exitcode)
        return 128 - code if code < 0 else code or 1  # negative for a signal
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:  # before torchrun has started anything
        return 130
    return 0
