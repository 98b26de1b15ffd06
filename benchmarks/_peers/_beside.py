"""Ranks in processes of their own, in environments of their own: how they are started, asked, and what they answer.

One line of text asks, one line of JSON answers: what was found, the processor seconds spent so far, or what went wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "FOLDER",
    "ROOT",
    "Beside",
    "ask_all",
    "environment",
    "python_of",
    "rank_variables",
    "serve",
    "source",
]

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(os.environ.get("BENCHMARK_PEERS", Path(__file__).parent.parent / ".peers"))
"""Where environments and sources are kept: ``BENCHMARK_PEERS``, or a folder that git ignores."""


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    return FOLDER / name / "bin" / "python"


def environment(name: str, installs: Sequence[Sequence[str]]) -> str:
    """Makes an environment, which takes minutes, if it is not there; the reason if that fails.

    Args:
        name: of its folder.
        installs: arguments of ``pip install``, call by call.
    """
    python, made = python_of(name), FOLDER / name / "made"
    if made.exists():
        return ""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n", encoding="utf-8")
    commands = [[sys.executable, "-m", "venv", str(python.parent.parent)]]
    commands += [[str(python), "-m", "pip", "install", "-q", *packages] for packages in installs]
    reason = next(filter(None, (_failure(command, FOLDER) for command in commands)), "")
    if not reason:
        made.touch()
    return reason and f"its environment could not be made: {reason}"


def source(name: str, repository: str, commit: str, build: Sequence[str] = ()) -> str:
    """Clones a peer's source, unless its folder is there already; the reason if that fails.

    Args:
        name: of its environment; the folder is ``NAME-source``.
        repository: to clone.
        commit: to check out.
        build: arguments of the environment's interpreter that build what is to be compiled.
    """
    folder = FOLDER / f"{name}-source"
    if not folder.exists():
        reason = _failure(["git", "clone", "-q", repository, str(folder)], FOLDER) or _failure(
            ["git", "checkout", "-q", commit], folder
        )
        if reason:
            return f"its source could not be had from {repository}: {reason}; {folder} may hold it"
    built = folder / "built"
    if build and not built.exists():
        reason = _failure([str(python_of(name)), *build], folder)
        if reason:
            return f"it could not be compiled: {reason}"
        built.touch()
    return ""


def _failure(command: Sequence[str], folder: Path) -> str:
    """What the command complained of last; empty if it succeeded."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    return said[-1]


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank, as a launcher would set it, without that of this interpreter."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    names |= {"GROUP_RANK": 0, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return {**kept, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}


class Beside:
    """One process that answers.

    Args:
        name: of the peer, for messages.
        python: its interpreter.
        arguments: of the interpreter.
        variables: its environment.
    """

    def __init__(
        self, name: str, python: str | Path, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=dict(variables),
        )
        self.cpu_s = 0.0

    def say(self, command: str) -> None:
        """Asks, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def answer(self) -> Mapping[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: if it says what went wrong, or has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name}'s process ended with exit code {self._process.wait()}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.cpu_s = float(answer.get("cpu_s", 0.0))
        return answer

    def ask(self, command: str) -> Mapping[str, Any]:
        """The answer to ``command``."""
        self.say(command)
        return self.answer()

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


def ask_all(ranks: Sequence[Beside], command: str) -> list[Mapping[str, Any]]:
    """What each of several ranks answers, all asked at once."""
    for rank in ranks:
        rank.say(command)
    return [rank.answer() for rank in ranks]


def serve(work: Callable[[Callable[[Mapping[str, Any]], str]], object]) -> NoReturn:
    """On the other side of the pipe: runs ``work``, and ends the process.

    Args:
        work: called with ``tell``, which answers and returns the next command; what it raises is the last answer.
    """
    # What the peer prints on the standard output must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(found: Mapping[str, Any]) -> str:
        print(json.dumps({**found, "cpu_s": time.process_time()}), file=answers, flush=True)
        command = sys.stdin.readline()
        if not command:
            os._exit(0)
        return command.strip()

    try:
        work(tell)
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()] or [""]
        tell({"error": f"{type(error).__name__}: {said[0]}"})
    os._exit(0)
