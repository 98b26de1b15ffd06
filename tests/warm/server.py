"""The warm process: imports, listens, and forks once for every command.

Arguments: the address of its socket, and the program that stands for Python. It ends when its standard input does.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).parents[2])
_IMPORTED = [
    "torch",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.data",
    "transformers",
    "typer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "atorch_ns.api",
    "atorch_ns.cli",
    "atorch_ns.doctor",
    "atorch_ns.engine.trial.worker",
    "atorch_ns.testing.models",
]
_HIGH = 500
"""The server's own files have higher numbers: those of commands are lower."""


def main() -> dict[str, Any]:
    """Serves; returns in forks only, with the command that the fork is for."""
    address, program = sys.argv[1:]
    path = [entry for entry in sys.path[1:] if entry != _ROOT]
    sys.path.insert(0, _ROOT)
    for name in _IMPORTED:
        importlib.import_module(name)
    sys.path[:] = path
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    Path(f"{address}.new").rename(address)  # from here on clients find it
    return {**_forked(_high(listener)), "program": program}


def _high(opened: socket.socket) -> socket.socket:
    number = fcntl.fcntl(opened.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    opened.close()
    return socket.socket(fileno=number)


def _forked(listener: socket.socket) -> dict[str, Any]:
    """A command, in its fork; the server leaves by ``os._exit``."""
    forks: dict[int, socket.socket] = {}
    waking, waker = (_high(end) for end in socket.socketpair())
    waker.setblocking(False)
    waking.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    selector = selectors.PollSelector()
    for source in (listener, waking, 0):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for pid in forks:
                    _end(pid)
                os._exit(0)
            elif key.fileobj is waking:
                with contextlib.suppress(BlockingIOError):
                    waking.recv(1000)
                _give_back(forks, selector)
            elif key.fileobj is listener:
                client = _high(listener.accept()[0])
                try:
                    request, files = _received(client)
                except (OSError, ValueError):  # killed while it asked
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for opened in (listener, waking, waker, client, *forks.values()):
                        opened.close()
                    _take(files, request["files"])
                    return request
                for file in files:
                    os.close(file)
                forks[pid] = client
                with contextlib.suppress(OSError):
                    client.sendall(pid.to_bytes(4, "big"))
                selector.register(client, selectors.EVENT_READ)
            elif key.fileobj in forks.values():  # the client is gone: killed
                selector.unregister(key.fileobj)
                for pid in [pid for pid, client in forks.items() if client is key.fileobj]:
                    _end(pid)


def _received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The command, and the files it came with, in the server's own numbers."""
    numbers = array.array("i")
    _, sent, _, _ = client.recvmsg(1, socket.CMSG_SPACE(250 * numbers.itemsize))
    for _, _, data in sent:
        numbers.frombytes(data)
    text = bytearray()
    size = int.from_bytes(client.recv(4, socket.MSG_WAITALL), "big")
    while len(text) < size:
        text += client.recv(size - len(text)) or b"?" * size
    files = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in numbers]
    for number in numbers:
        os.close(number)
    return json.loads(text.decode(errors="surrogateescape")), files


def _take(files: list[int], numbers: list[int]) -> None:
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)


def _give_back(forks: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tells clients how their forks ended."""
    for pid in list(forks):
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            continue
        client = forks.pop(pid)
        with contextlib.suppress(KeyError):
            selector.unregister(client)
        with contextlib.suppress(OSError):
            client.sendall(status.to_bytes(4, "big"))
        client.close()


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run(request: dict[str, Any]) -> None:
    """What ``python`` does with these arguments."""
    os.setsid()
    # It is, where a module is run that was imported here.
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import", category=RuntimeWarning)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    _reseed()
    try:
        _run_as_python(request)
        code = 0
    except SystemExit as ended:
        code = _exit_code(ended.code)
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # to take all modules down would cost more than most commands


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _run_as_python(request: dict[str, Any]) -> None:
    arguments = request["arguments"]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while arguments[0] == "-u":
        arguments, unbuffered = arguments[1:], True
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = _text(1, write_through=unbuffered)
    sys.stderr = _text(2, line_buffering=True, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.executable = request["program"]
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.path[:0] = [request["folder"], *paths]
        sys.argv[:] = ["-m", *arguments[2:]]
        sys.modules.pop(arguments[1], None)
        runpy._run_module_as_main(arguments[1])
    elif arguments[0] == "-c":
        sys.path[:0] = ["", *paths]
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        script = arguments[0]
        sys.path[:0] = [str(Path(script).resolve().parent), *paths]
        sys.argv[:] = arguments
        main.__file__ = str(Path(script).absolute())
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _text(file: int, **options: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(file, "w", closefd=False)), encoding="utf-8", **options
    )


def _reseed() -> None:
    """Forks of one process would draw the same numbers."""
    import numpy as np

    random.seed()
    np.random.seed()


if __name__ == "__main__":
    run(main())
