"""Coordinator server over gRPC, and the standalone engine as a process: its token, its address, its end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.engine.coordinator.jobs import EngineJobs, NoSuchJobError, OneJob
from atorch_ns.engine.coordinator.trial import NotJoinedError
from atorch_ns.engine.proto import coordinator_pb2 as pb
from atorch_ns.engine.rpc.auth import Tls, is_loopback, new_token, read_token, same_token
from atorch_ns.engine.rpc.servicer import CALLS, SERVICE, Calls
from atorch_ns.errors import AtorchError, CoordinatorError, InputError
from atorch_ns.text import bytes_text, error_text

_LOGGER = logging.getLogger(__name__)
_MIB = 1024**2
_TICK_S = 0.5  # between two looks at the clock, which find ranks that are silent or late
_HEALTH = "grpc.health.v1.Health"
_MAX_WAITING = 32  # calls with a thread each; ranks beyond that call again in half a second
_MAX_BRIEF = 8  # threads that no waiting call takes, for heartbeats and reports


class CoordinatorServer:
    """Serves one coordinator, or the jobs of a standalone engine. Starts at once.

    Every call needs the token, but for ``grpc.health.v1.Health/Check``. What cannot be understood is
    answered with an error and counted in ``counts``; it reaches no coordinator.

    Args:
        coordinators: the coordinator of one search, or the jobs of an engine.
        host: address to listen on; the default serves this machine only.
        port: 0 for any that is free.
        token: secret that every caller must show.
        tls: certificate and key; without them nothing is encrypted.
        allow_plain_remote: whether an address that other machines reach may go without TLS.
        max_message_mib: larger messages are refused.

    Attributes:
        address: ``host:port``, to be given to clients.
        port: the port alone.
        counts: number of refused calls by reason.

    Raises:
        InputError: a plain address that other machines reach.
        CoordinatorError: the port is taken, or the address is not of this machine.
    """

    def __init__(
        self,
        coordinators: Coordinator | EngineJobs,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str,
        tls: Tls | None = None,
        allow_plain_remote: bool = False,
        max_message_mib: int = 8,
    ) -> None:
        if not token:
            raise InputError("a coordinator needs a token; new_token() makes one")
        if tls is None and not allow_plain_remote and not is_loopback(host):
            raise InputError(
                f"{host} can be reached from other machines, and without TLS anyone on the network can read the "
                "token. Give a certificate and a key, or bind to 127.0.0.1, or declare the network trusted "
                "(allow_plain_remote)."
            )
        self.counts: Counter[str] = Counter()
        self._jobs = OneJob(coordinators) if isinstance(coordinators, Coordinator) else coordinators
        self._token, self._max_bytes = token, max_message_mib * _MIB
        self._room = threading.BoundedSemaphore(_MAX_WAITING)
        self._pool = ThreadPoolExecutor(_MAX_WAITING + _MAX_BRIEF, thread_name_prefix="coordinator")
        self._closing = threading.Event()
        self._server = grpc.server(
            self._pool, options=_server_options(self._max_bytes), maximum_concurrent_rpcs=4 * _MAX_WAITING
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, {name: self._make_rpc(name) for name in CALLS}),
                grpc.method_handlers_generic_handler(_HEALTH, {"Check": self._health_handler()}),
            )
        )
        try:
            self.port = self._bind_port(host, port, tls)
            self._server.start()
        except BaseException:
            self._pool.shutdown()
            raise
        self.address = _format_address(host, self.port)
        self._ticker = threading.Thread(target=self._tick_jobs, name="coordinator-clock", daemon=True)
        self._ticker.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits a moment for ranks to leave; then ends calls, threads and the port. May be called twice."""
        if self._closing.is_set():
            return
        self._jobs.close(timeout_s)  # while calls are still answered: ranks ask for the end
        self._closing.set()
        # With a grace, a thread of gRPC's own would outlive the server by that long.
        self._server.stop(grace=None).wait(timeout_s)
        self._ticker.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> CoordinatorServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind_port(self, host: str, port: int, tls: Tls | None) -> int:
        address = _format_address(host, port)
        try:
            if tls is None:
                bound_port = self._server.add_insecure_port(address)
            else:
                cert, key = tls.read()
                if cert is None or key is None:
                    raise InputError("TLS needs a certificate and its key on the server")
                bound_port = self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))
        except RuntimeError as error:
            bound_port, why = 0, f": {error}"
        else:
            why = ""
        if not bound_port:
            raise CoordinatorError(
                f"cannot listen on {address}{why}. The port is taken or this machine does not have the address; "
                "port 0 selects any free port."
            )
        return int(bound_port)

    def _tick_jobs(self) -> None:
        while not self._closing.wait(_TICK_S):
            self._jobs.tick()

    def _make_rpc(self, name: str) -> Any:
        kind, method = getattr(pb, f"{name}Request"), CALLS[name]

        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            request = self._read_request(kind, data, context)
            calls = Calls(self._jobs, self._room, lambda: context.is_active() and not self._closing.is_set())
            code, why = grpc.StatusCode.INTERNAL, ""  # for errors that are none of this package's
            try:
                reply: bytes = method(calls, request).SerializeToString()
                return reply
            except NotJoinedError as error:
                code, why = grpc.StatusCode.FAILED_PRECONDITION, str(error)
            except NoSuchJobError as error:
                code, why = grpc.StatusCode.NOT_FOUND, str(error)
            except InputError as error:
                code, why = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            except AtorchError as error:
                code, why = grpc.StatusCode.ABORTED, str(error)
            except Exception as error:
                _LOGGER.exception("a call of %s failed", name)
                why = error_text(error)
            self._abort_call(context, code, why)
            raise AssertionError("abort raises")

        # Bytes come in as they are, so that nothing is decoded before the token was seen.
        return grpc.unary_unary_rpc_method_handler(answer)

    def _read_request(self, kind: type[Any], data: bytes, context: grpc.ServicerContext) -> Any:
        header = dict(context.invocation_metadata()).get("authorization")
        if not same_token(header, self._token):
            self._abort_call(context, grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        if len(data) > self._max_bytes:
            size = f"{bytes_text(len(data))} of {bytes_text(self._max_bytes)}"
            self._abort_call(context, grpc.StatusCode.OUT_OF_RANGE, f"message too large: {size}")
        try:
            return kind.FromString(data)
        except Exception:
            self._abort_call(
                context, grpc.StatusCode.INVALID_ARGUMENT, f"these bytes are not a {kind.__name__}"
            )

    def _abort_call(self, context: grpc.ServicerContext, code: grpc.StatusCode, why: str) -> None:
        self.counts[code.name.lower()] += 1
        context.abort(code, why[:2000])  # raises; the text travels in a header, whose size is limited

    def _health_handler(self) -> Any:
        def check(request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Any:
            if request.service not in ("", SERVICE):
                context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r} here")
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

        return grpc.unary_unary_rpc_method_handler(
            check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )


def _format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _server_options(max_bytes: int) -> list[tuple[str, Any]]:
    return [
        # gRPC's own limit lies above ours, so that ours is the one that answers and counts.
        ("grpc.max_receive_message_length", 2 * max_bytes),
        ("grpc.max_send_message_length", 4 * max_bytes),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.max_concurrent_streams", 256),
        ("grpc.so_reuseport", 0),  # two servers must not share a port unnoticed
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


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
        host, port: address to listen on; port 0 for the last one used in this folder, if it is free.
        token_file: file with the token; ``None`` for ``folder/token``, made if it is not there.
        tls: certificate and key.
        allow_plain_remote: whether other machines may connect without TLS.
        announce: called with the address once the engine listens.

    Raises:
        InputError, CoordinatorError: as :class:`CoordinatorServer` and :class:`EngineJobs`.
    """
    with _ended_by_signals() as end:
        jobs = EngineJobs(folder)  # locks the folder before anything else is written in it
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
        contextlib.suppress(FileExistsError),  # an engine that ran here before has made it
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
    ):
        file.write(new_token() + "\n")
        _LOGGER.info("the token for jobs is in %s", path)
    return read_token(path)


def _at_last_port(listen: Callable[[int], CoordinatorServer], note: Path) -> CoordinatorServer:
    server = None
    with contextlib.suppress(OSError, ValueError, CoordinatorError):
        server = listen(int(note.read_text()))  # where the ranks of jobs under way look for it
    server = server or listen(0)  # that port is taken, or none was noted
    with contextlib.suppress(OSError):
        note.write_text(f"{server.port}\n")
    return server
