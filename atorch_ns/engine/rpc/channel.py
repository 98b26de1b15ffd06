"""Channel to a coordinator: retries what a restart or a lost packet ends, and names what it cannot repair."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from atorch_ns.engine.coordinator.trial import NotJoinedError
from atorch_ns.engine.proto import coordinator_pb2 as pb
from atorch_ns.engine.rpc.auth import Tls, bearer
from atorch_ns.engine.rpc.servicer import CALLS, SERVICE
from atorch_ns.errors import CoordinatorError
from atorch_ns.text import bytes_text

_MIB = 1024**2
_PAUSE_S = 0.2  # between attempts
# Who has never answered is more likely at another address than away; a process that starts takes less.
_FIRST_CONTACT_S = 10.0
_NOTE_AFTER_S = 10.0  # of silence
_LATE_S = 2.0  # by which a call of a process that runs does not outlast its deadline
# https://grpc.io/docs/guides/retry: the first line of defence, within one call's deadline.
_RETRY_POLICY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_SERVICE_CONFIG = {"methodConfig": [{"name": [{}], "retryPolicy": _RETRY_POLICY}]}
_PASSING = (  # of the network, or of a server whose threads are all taken: to be tried again
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class UnreachableError(CoordinatorError):
    """Nobody answers at the coordinator's address.

    Attributes:
        connected: whether there was a connection, on which no answer came in time.
    """

    def __init__(self, message: str, *, connected: bool = False) -> None:
        self.connected = connected
        super().__init__(message)


class CoordinatorChannel:
    """Calls with the token and a deadline each. Thread-safe.

    Args:
        address: ``host:port``.
        token: the server's token.
        tls: the certificates to trust; without it nothing is encrypted.
        max_message_mib: a larger message is not sent.
    """

    def __init__(self, address: str, token: str, *, tls: Tls | None = None, max_message_mib: int = 8) -> None:
        self.address = address
        self._metadata = (bearer(token),)
        self._max_bytes = max_message_mib * _MIB
        self._closing = threading.Event()
        self._has_answered = False  # of anybody at the address, ever
        options = _channel_options(self._max_bytes)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            roots, _ = tls.read()
            if tls.server_name:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
            self._channel = grpc.secure_channel(
                address, grpc.ssl_channel_credentials(root_certificates=roots), options=options
            )
        self._methods = {
            name: self._channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=getattr(pb, f"{name}Request").SerializeToString,
                response_deserializer=getattr(pb, f"{name}Reply").FromString,
            )
            for name in CALLS
        }

    def call(self, name: str, request: Any, *, timeout_s: float) -> Any:
        """One call, within its deadline.

        Raises:
            NotJoinedError: the coordinator does not know this rank: it was restarted.
            UnreachableError: no answer.
            CoordinatorError: it refuses.
        """
        if request.ByteSize() > self._max_bytes:
            raise CoordinatorError(
                f"{name}: a message of {bytes_text(request.ByteSize())} is larger than the "
                f"{bytes_text(self._max_bytes)} that a coordinator accepts (max_message_mib)"
            )
        try:
            reply = self._methods[name](request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate_error(name, error) from None
        except ValueError as error:  # the channel was closed by another thread
            raise UnreachableError(f"{name}: {error}") from None
        self._has_answered = True
        return reply

    def insist(
        self,
        name: str,
        request: Any,
        *,
        timeout_s: float,
        within_s: float,
        on_silence: Callable[[str], None] = lambda text: None,
    ) -> Any:
        """Calls until there is an answer, as through a restart. A first connection has ten seconds to come.

        Args:
            name, request: the call and its message.
            timeout_s: deadline of each attempt.
            within_s: seconds to go on without an answer.
            on_silence: called once, with a message, when there has been no answer for ten seconds.

        Raises:
            NotJoinedError, CoordinatorError: as :meth:`call`; ``UnreachableError`` after ``within_s``.
        """
        start, has_noted = time.monotonic(), False
        while True:
            attempt = time.monotonic()
            try:
                return self.call(name, request, timeout_s=timeout_s)
            except UnreachableError as error:
                now = time.monotonic()
                if now - attempt > timeout_s + _LATE_S:  # this process was suspended, the other not silent
                    start = now
                silence_s = now - start
                never_heard = not self._has_answered and not error.connected
                limit_s = min(within_s, _FIRST_CONTACT_S) if never_heard else within_s
                if silence_s > limit_s or self._closing.is_set():
                    raise UnreachableError(
                        f"the coordinator at {self.address} has not answered for {silence_s:.0f} s ({error}). "
                        "Is its process alive, and can this machine reach that address?"
                    ) from None
                if silence_s > _NOTE_AFTER_S and not has_noted:
                    has_noted = True
                    on_silence(
                        f"the coordinator at {self.address} has not answered for {silence_s:.0f} s ({error}); it is looked "
                        f"for until {within_s:.0f} s have passed"
                    )
            self._closing.wait(_PAUSE_S)

    def close(self) -> None:
        """Ends all calls and the connection; may be called twice."""
        self._closing.set()
        self._channel.close()

    def _translate_error(self, name: str, error: Any) -> Exception:
        code, details = error.code(), error.details() or ""
        if code in _PASSING or (code == grpc.StatusCode.CANCELLED):
            text = f"{name}: {code.name.lower().replace('_', ' ')}: {details}"
            return UnreachableError(text, connected=code != grpc.StatusCode.UNAVAILABLE)
        self._has_answered = True  # a refusal is an answer, too
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            return NotJoinedError(details)
        if code == grpc.StatusCode.UNAUTHENTICATED:
            return CoordinatorError(
                f"the coordinator at {self.address} refuses the token: it belongs to another job, or the token "
                "file is not the server's"
            )
        return CoordinatorError(f"the coordinator at {self.address} refuses {name}: {details}")


def _channel_options(max_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        ("grpc.enable_retries", 1),
        ("grpc.max_receive_message_length", 4 * max_bytes),  # limit of the server's messages
        ("grpc.max_send_message_length", 2 * max_bytes),  # never reached: call checks before
        ("grpc.enable_http_proxy", 0),  # a web proxy does not reach ranks
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, so that closing it ends it
        # A coordinator that comes back is found within a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 10_000),  # notices a machine that vanished
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
