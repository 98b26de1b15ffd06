"""Program of a rank's process: runs a module, and ends with the process that started it.

Arguments: the reading end of a pipe whose other end only the starting process holds, ``quiet`` if interrupts
end the rank silently, and the module with its arguments. The system closes the pipe however the process ends.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading

_INTERRUPTED = 130  # 128 and SIGINT, as shells report it


def main() -> None:
    """Runs the module as ``python -m`` does."""
    end, quiet, module = int(sys.argv[1]), sys.argv[2] == "quiet", sys.argv[3]
    if quiet:  # before anything that takes time is imported
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the parent has blocked it for the start
    os.set_inheritable(end, False)
    threading.Thread(target=_end_with, args=(end,), name="atorch_ns parent", daemon=True).start()
    sys.argv[:] = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(end: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(end, 1):  # nothing is written: it returns when the parent is gone
            pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)  # the group that it leads: itself and what it started
    os._exit(1)


if __name__ == "__main__":
    main()
