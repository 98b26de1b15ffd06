"""Program of a rank's process: runs a module, and ends with the process that started it.

Arguments: the reading end of a pipe whose other end only the starting process holds, ``quiet`` if an interrupt is to
end the rank silently, and the module with its arguments. The system closes the pipe however that process ends.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading

_INTERRUPTED = 130


def main() -> None:
    """Runs the module as ``python -m`` does."""
    end, quiet, module = int(sys.argv[1]), sys.argv[2] == "quiet", sys.argv[3]
    if quiet:  # before anything that takes time is imported
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.set_inheritable(end, False)
    threading.Thread(target=_end_with, args=(end,), name="atorch_ns parent", daemon=True).start()
    sys.argv[:] = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(end: int) -> None:
    """Ends this rank and all that it has started once the other end is closed."""
    with contextlib.suppress(OSError):
        while os.read(end, 1):
            pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
