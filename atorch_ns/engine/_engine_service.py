"""The standalone engine as a process: its token, its address, its end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from atorch_ns.engine._auth import Tls, new_token, read_token
from atorch_ns.engine._coordinator_jobs import EngineJobs
from atorch_ns.engine._server import CoordinatorServer
from atorch_ns.errors import CoordinatorError, InputError

__all__ = ["serve_engine", "tls_files"]

_LOGGER = logging.getLogger(__name__)


def tls_files(cert: Path | None, key: Path | None) -> Tls | None:
    """Certificate and key, or neither.

    Raises:
        InputError: one without the other.
    """
    if (cert is None) != (key is None):
        raise InputError("TLS needs both files: --tls-cert and --tls-key")
    return None if cert is None else Tls(cert=cert, key=key)


def serve_engine(
    folder: Path,
    *,
    host: str,
    port: int,
    token_file: Path | None,
    tls: Tls | None,
    allow_plain_remote: bool,
    announce: Callable[[str], None],
) -> None:
    """Serves until SIGINT or SIGTERM; call it on the main thread.

    Args:
        folder: histories and jobs under way.
        host, port: where to listen; port 0 for the last one used in this folder, if it is free.
        token_file: with the token; without it ``folder/token`` is used, and made if it is not there.
        tls: certificate and key.
        allow_plain_remote: whether other machines may connect without TLS.
        announce: is given the address once the engine listens.

    Raises:
        InputError, CoordinatorError: as :class:`CoordinatorServer` and :class:`EngineJobs`.
    """
    with _ended_by_signals() as end:
        jobs = EngineJobs(folder)
        try:
            token = read_token(token_file) if token_file else _own_token(folder / "token")

            def listen(where: int) -> CoordinatorServer:
                return CoordinatorServer(
                    jobs, host=host, port=where, token=token, tls=tls, allow_plain_remote=allow_plain_remote
                )

            server = _at_last_port(listen, folder / "port") if port == 0 else listen(port)
        except BaseException:
            jobs.close(0.0)
            raise
        with server:
            for name in jobs.names:
                _LOGGER.info("waiting for the ranks of job %s", name)
            announce(server.address)
            end.wait()
            _LOGGER.info("ending; %d jobs under way go on when the engine is back", len(jobs.names))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[threading.Event]:
    end = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        end.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own_token(path: Path) -> str:
    with (
        contextlib.suppress(FileExistsError),
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(new_token() + "\n")
        _LOGGER.info("the token for jobs is in %s", path)
    return read_token(path)


def _at_last_port(listen: Callable[[int], CoordinatorServer], note: Path) -> CoordinatorServer:
    """Where the jobs of an engine that was killed look for it; elsewhere if that is taken."""
    server = None
    with contextlib.suppress(OSError, ValueError, CoordinatorError):
        server = listen(int(note.read_text()))
    server = server or listen(0)
    with contextlib.suppress(OSError):
        note.write_text(f"{server.port}\n")
    return server
