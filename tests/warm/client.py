"""The program that stands for Python: asks the server for a fork, and is to others what the fork is."""

import array
import json
import os
import select
import signal
import socket
import stat
import sys

# Settings that libraries read when they are imported; torchrun gives the excepted ones to its ranks.
_READ_AT_IMPORT = (
    "ATEN_",
    "CUDA_",
    "HF_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "PYTHON",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
)
_EXCEPTED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHON_EXEC", "TORCHELASTIC_", "TORCH_NCCL_")
# Packages that a folder of PYTHONPATH must not hide.
_IMPORTED = ("torch", "transformers", "typer", "rich")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def main(address: str, python: str, module: str | None, usual: dict[str, str]) -> None:
    """Runs the command in a fork of the server, or in a fresh Python in this process's place."""
    arguments = sys.argv[1:] if module is None else ["-m", module, *sys.argv[1:]]
    server = socket.socket(socket.AF_UNIX)
    try:
        if not _can_fork(arguments, usual):
            raise OSError
        server.connect(address)
    except OSError:
        os.execv(python, [python, *arguments])
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if file != server.fileno() and _is_open(file)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    ignored = [number for number in _FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "files": files,
        "mask": [int(number) for number in mask],
        "ignored": [int(number) for number in ignored],
    }
    server.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    text = json.dumps(request).encode(errors="surrogateescape")
    server.sendall(len(text).to_bytes(4, "big") + text)
    pid = int.from_bytes(server.recv(4), "big")
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signaled, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())  # also for a signal that comes just before the wait
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while server not in select.select([server, signaled], [], [])[0]:
        signaled.recv(100)
    answer = server.recv(4)
    status = int.from_bytes(answer, "big") if answer else 1 << 8
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _can_fork(arguments: list[str], usual: dict[str, str]) -> bool:
    """Whether a fork of the server does what a fresh Python would with these arguments and this environment."""
    while arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    first = arguments[0] if arguments else "-"
    ours = first in ("-m", "-c") or (first.endswith(".py") and "site-packages" not in first)
    if not ours or (first == "-m" and arguments[1].partition(".")[0] not in ("atorch_ns", "torch")):
        return False
    for name in {*os.environ, *usual}:
        matters = name.startswith(_READ_AT_IMPORT) and not name.startswith(_EXCEPTED)
        if matters and os.environ.get(name) != usual.get(name):
            return False
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if any(os.path.exists(os.path.join(folder, name + end)) for name in _IMPORTED for end in ("", ".py")):
            return False
    return not any(os.isatty(file) for file in (0, 1, 2))


def _is_open(file: int) -> bool:
    try:
        return stat.S_IFMT(os.fstat(file).st_mode) != stat.S_IFDIR
    except OSError:
        return False
