"""A warm Python for tests: commands run in forks of a process that has imported what they would.

A fresh Python needs 5 seconds of the processor for torch and a model of transformers, and the tests start hundreds.
Inside :func:`warm_python`, ``sys.executable`` is a small program (``client.py``) that hands its arguments, environment,
folder and open files to a server (``server.py``), which forks. What the fork starts by ``sys.executable``, ``torchrun``
or ``atorch-ns`` is warm too. A command that the server cannot stand for starts a fresh Python.

``COLD_PYTHON`` is the interpreter itself, for tests of what an import costs, of stopped processes and of terminals.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["COLD_PYTHON", "warm_python", "warm_servers"]

COLD_PYTHON = sys.executable
warm_servers: set[int] = set()
"""Process ids of the servers of this process."""

_HERE = Path(__file__).parent
_MODULES = {"python": None, "torchrun": "torch.distributed.run", "atorch-ns": "atorch_ns.cli"}


@contextlib.contextmanager
def warm_python() -> Iterator[None]:
    """Inside, commands are warm, once the server has imported everything."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address = f"{folder}/server"
        client = (_HERE / "client.py").read_text()
        for name, module in _MODULES.items():
            program = Path(folder, name)
            settings = f"{address!r}, {COLD_PYTHON!r}, {module!r}, {dict(os.environ)!r}"
            program.write_text(f"#!{COLD_PYTHON} -IS\n{client}\n\nmain({settings})\n")
            program.chmod(0o755)
        executable = f"{folder}/python"
        server = subprocess.Popen(
            [COLD_PYTHON, str(_HERE / "server.py"), address, executable],
            stdin=subprocess.PIPE,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            start_new_session=True,  # an interrupt is for the commands
        )
        warm_servers.add(server.pid)
        sys.executable = executable
        try:
            yield
        finally:
            warm_servers.remove(server.pid)
            sys.executable = COLD_PYTHON
            assert server.stdin is not None
            server.stdin.close()  # the server ends with it
            server.wait(timeout=20)
