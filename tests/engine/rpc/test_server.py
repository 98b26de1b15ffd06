"""A real server on loopback, with clients in threads."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from atorch_ns.engine import RankReport
from atorch_ns.engine.coordinator.coordinator import Coordinator
from atorch_ns.engine.coordinator.events import event_from_json, event_to_json
from atorch_ns.engine.proto import coordinator_pb2 as pb
from atorch_ns.engine.rpc.auth import Tls, bearer, new_token
from atorch_ns.engine.rpc.channel import CoordinatorChannel, UnreachableError
from atorch_ns.engine.rpc.client import CoordinatorClient
from atorch_ns.engine.rpc.meeting import run_agent
from atorch_ns.engine.rpc.server import CoordinatorServer, tls_files
from atorch_ns.engine.rpc.servicer import SERVICE
from atorch_ns.errors import CoordinatorError, InputError, RankError
from atorch_ns.search import Ended, Event, SearchNote, SearchOutcome, TrialEnded, TrialStarted, TrialTask
from atorch_ns.testing import run_ranks
from tests.engine.fake_search import FakeClock, FakeSearch, FakeWorker, InThread, report, until_cancelled

TOKEN = new_token()
Behaviour = Callable[[TrialTask, Callable[[], bool]], RankReport]


def client(server: CoordinatorServer, rank: int, **options: Any) -> CoordinatorClient:
    options.setdefault("reconnect_s", 10.0)
    return CoordinatorClient(server.address, TOKEN, rank, **options)


def agent(server: CoordinatorServer, worker: FakeWorker, **options: Any) -> InThread:
    return InThread(lambda: run_agent(client(server, worker.rank, **options), worker, rank=worker.rank))


def slowly(rank: int, seconds: float) -> Behaviour:
    def run(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        time.sleep(seconds)
        return report(task.id, rank)

    return run


def test_ranks_return_the_same_outcome() -> None:
    coordinator = Coordinator(FakeSearch(), 2)
    with CoordinatorServer(coordinator, token=TOKEN) as server:
        workers = [FakeWorker(rank) for rank in (0, 1)]
        calls = [agent(server, worker) for worker in workers]
        outcomes = [call.wait().value for call in calls]
    assert isinstance(outcomes[0], SearchOutcome)
    assert outcomes[0] == outcomes[1] == coordinator.over.outcome  # type: ignore[union-attr]
    assert [worker.keys for worker in workers] == [["a", "b", "c"]] * 2
    assert server.counts == {}


def test_more_ranks_than_may_wait_at_once() -> None:
    search = FakeSearch(["a", "b"])
    with CoordinatorServer(Coordinator(search, 40), token=TOKEN) as server:
        calls = [agent(server, FakeWorker(rank)) for rank in range(40)]
        assert [call.wait(30.0).error for call in calls] == [None] * 40
    assert [outcome.status for _, outcome in search.told] == ["ok", "ok"]


def test_what_does_not_belong_here_disturbs_nothing() -> None:
    search = FakeSearch(["a", "b", "c", "d"])
    with CoordinatorServer(Coordinator(search, 2), token=TOKEN, max_message_mib=1) as server:
        calls = [agent(server, FakeWorker(rank, slowly(rank, 0.2))) for rank in (0, 1)]
        _garbage_on_the_socket(server.port)
        with grpc.insecure_channel(server.address) as channel:
            caller = pb.Caller(rank=1, incarnation="x")
            leave = pb.LeaveRequest(caller=caller, reason="an attack").SerializeToString()
            assert _code(channel, "Leave", leave, token="wrong") == grpc.StatusCode.UNAUTHENTICATED
            assert _code(channel, "Leave", leave, token=None) == grpc.StatusCode.UNAUTHENTICATED
            assert _code(channel, "Report", b"\xff" * 100) == grpc.StatusCode.INVALID_ARGUMENT
            assert _code(channel, "Report", b"\0" * (1024**2 + 1)) == grpc.StatusCode.OUT_OF_RANGE
            assert _code(channel, "Report", b"\0" * (3 * 1024**2)) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert _code(channel, "Nothing", b"") == grpc.StatusCode.UNIMPLEMENTED
            assert _code(channel, "Leave", leave) == grpc.StatusCode.FAILED_PRECONDITION
        assert [call.wait().error for call in calls] == [None, None]
    assert [outcome.status for _, outcome in search.told] == ["ok"] * 4
    assert server.counts == {
        "unauthenticated": 2,
        "invalid_argument": 1,
        "out_of_range": 1,
        "failed_precondition": 1,
    }


def test_a_report_that_is_none_is_refused() -> None:
    coordinator = Coordinator(FakeSearch(["a"]), 1)
    with CoordinatorServer(coordinator, token=TOKEN) as server:
        mine = client(server, 0)
        mine.join()
        caller = pb.Caller(incarnation=coordinator.incarnation)
        channel = CoordinatorChannel(server.address, TOKEN)
        for text in (b"{}", b"no json", b'{"task_id": 1, "rank": 3, "status": "ok"}', b"[" * 100_000):
            with pytest.raises(CoordinatorError, match="refuses Report"):
                channel.call("Report", pb.ReportRequest(caller=caller, report=text), timeout_s=5.0)
        channel.close()
        assert server.counts == {"invalid_argument": 4}
        mine.leave()
        mine.close()


def _garbage_on_the_socket(port: int) -> None:
    for data in (
        os.urandom(4096),
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(999),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
            connection.sendall(data)
            connection.settimeout(0.2)
            try:
                while connection.recv(4096):
                    pass
            except OSError:
                pass


def _code(channel: grpc.Channel, name: str, data: bytes, *, token: str | None = TOKEN) -> grpc.StatusCode:
    metadata = (bearer(token),) if token else ()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/{name}")(data, timeout=5.0, metadata=metadata)
    code = caught.value.code()  # type: ignore[attr-defined]
    assert isinstance(code, grpc.StatusCode)
    return code


def test_a_wrong_token_is_said_at_once() -> None:
    with CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN) as server:
        wrong = CoordinatorClient(server.address, new_token(), 0)
        start = time.monotonic()
        with pytest.raises(CoordinatorError, match="refuses the token"):
            run_agent(wrong, FakeWorker(0), rank=0)
        assert time.monotonic() - start < 2.0


def test_health_is_asked_without_a_token() -> None:
    server = CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN)
    with server, grpc.insecure_channel(server.address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for service in ("", SERVICE):
            reply = check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(health_pb2.HealthCheckRequest(service="other"), timeout=5.0)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_a_failure_reaches_the_others_within_half_a_second() -> None:
    search = FakeSearch(["a"])
    ended: list[float] = []

    def fails(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        time.sleep(0.5)
        ended.append(time.monotonic())
        return report(task.id, 1, "raised", reason="ValueError: no")

    waits = until_cancelled(0)

    def hangs(task: TrialTask, cancelled: Callable[[], bool]) -> RankReport:
        answer = waits(task, cancelled)
        ended.append(time.monotonic())
        return answer

    with CoordinatorServer(Coordinator(search, 2), token=TOKEN) as server:
        calls = [agent(server, FakeWorker(0, hangs)), agent(server, FakeWorker(1, fails))]
        assert [call.wait().error for call in calls] == [None, None]
    assert ended[1] - ended[0] < 0.5
    assert (search.told[0][1].status, search.told[0][1].rank) == ("raised", 1)


def test_a_rank_that_vanishes_ends_the_search_on_the_others() -> None:
    coordinator = Coordinator(FakeSearch(), 2, heartbeat_timeout_s=1.0)
    with CoordinatorServer(coordinator, token=TOKEN) as server:
        gone = client(server, 1)
        gone.join()
        gone.close()  # without a goodbye, as when the process is killed
        start = time.monotonic()
        error = agent(server, FakeWorker(0, until_cancelled(0))).wait().error
        assert isinstance(error, RankError)
        assert list(error.failures) == [1]
        assert "no sign of life since" in str(error)
        assert time.monotonic() - start < 4.0


def test_a_coordinator_that_is_killed_and_restarted_goes_on() -> None:
    first_search = FakeSearch(["a", "b", "c", "d"])
    server = CoordinatorServer(Coordinator(first_search, 2), token=TOKEN)
    workers = [FakeWorker(rank, slowly(rank, 0.2)) for rank in (0, 1)]
    calls = [agent(server, worker) for worker in workers]
    while len(first_search.told) < 2:
        time.sleep(0.01)
    server.close()
    told = [key for key, _ in first_search.told]
    time.sleep(0.5)
    left = [key for key in ("a", "b", "c", "d") if key not in told]
    second_search = FakeSearch(left)
    with CoordinatorServer(Coordinator(second_search, 2), token=TOKEN, port=server.port):
        outcomes = [call.wait() for call in calls]
    assert [call.error for call in outcomes] == [None, None]
    assert outcomes[0].value == outcomes[1].value
    assert [key for key, _ in second_search.told] == left
    for worker in workers:
        assert worker.ran == sorted(set(worker.ran)), "no id twice"


def test_events_are_seen_from_another_process() -> None:
    seen: list[Event] = []
    search = FakeSearch([str(number) for number in range(30)])
    coordinator = Coordinator(search, 2, candidates=search.candidates)
    with CoordinatorServer(coordinator, token=TOKEN) as server:
        calls = [agent(server, FakeWorker(0), on_event=seen.append), agent(server, FakeWorker(1))]
        assert [call.wait().error for call in calls] == [None, None]
    assert seen == coordinator.events.after(0) + coordinator.events.after(20) + coordinator.events.after(
        40
    ) + (coordinator.events.after(60))
    assert [type(event) for event in seen] == [TrialStarted, TrialEnded] * 30 + [Ended]


def test_an_observer_elsewhere_hears_of_a_restart_and_may_fail() -> None:
    seen: list[Event] = []

    def observe(event: Event) -> None:
        seen.append(event)
        raise RuntimeError("terminal gone")

    server = CoordinatorServer(Coordinator(FakeSearch(["a"]), 1), token=TOKEN)
    call = agent(server, FakeWorker(0, slowly(0, 1.0)), on_event=observe)
    while not seen:  # the trial has started, and takes a second
        time.sleep(0.01)
    server.close()
    with CoordinatorServer(Coordinator(FakeSearch(["b"]), 1), token=TOKEN, port=server.port):
        assert call.wait().error is None
    texts = [event.text if isinstance(event, SearchNote) else type(event).__name__ for event in seen]
    restarted = "the coordinator was started again; the search goes on"
    assert texts == ["TrialStarted", restarted, "TrialStarted", "TrialEnded", "Ended"]


def test_events_that_are_none_are_refused() -> None:
    note = SearchNote("a rank is late")
    assert event_from_json(event_to_json(note)) == note
    for data in (b"", b"[]", b'{"kind": "Other", "event": {}}', b'{"kind": "Note", "event": {"text": 3}}'):
        with pytest.raises(InputError):
            event_from_json(data)


def test_a_coordinator_that_stays_away_is_given_up() -> None:
    server = CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN)
    call = agent(server, FakeWorker(0, until_cancelled(0)), reconnect_s=1.0)
    time.sleep(0.3)
    server.close()
    start = time.monotonic()
    error = call.wait(15.0).error
    assert isinstance(error, CoordinatorError)
    assert f"the coordinator at {server.address} has not answered for" in str(error)
    assert time.monotonic() - start < 8.0


def test_a_coordinator_that_was_never_there_is_said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atorch_ns.engine.rpc.channel._FIRST_CONTACT_S", 0.5)
    server = CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN)
    server.close()
    start = time.monotonic()
    with pytest.raises(CoordinatorError, match=f"the coordinator at {server.address} has not answered for"):
        run_agent(client(server, 0, reconnect_s=60.0), FakeWorker(0), rank=0)
    assert time.monotonic() - start < 8.0


def test_a_coordinator_that_begins_a_moment_later_is_found() -> None:
    server = CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN)
    server.close()
    call = agent(server, FakeWorker(0), reconnect_s=60.0)
    time.sleep(1.0)
    with CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN, port=server.port):
        assert call.wait().error is None


def test_one_that_was_there_is_looked_for_longer_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atorch_ns.engine.rpc.channel._FIRST_CONTACT_S", 0.1)
    monkeypatch.setattr("atorch_ns.engine.rpc.channel._NOTE_AFTER_S", 0.2)
    seen: list[Event] = []
    server = CoordinatorServer(Coordinator(FakeSearch(["a"]), 2), token=TOKEN)
    calls = [agent(server, FakeWorker(0), on_event=seen.append)]  # waits for rank 1
    time.sleep(0.5)
    server.close()
    time.sleep(2.0)
    with CoordinatorServer(Coordinator(FakeSearch(["b"]), 2), token=TOKEN, port=server.port):
        calls.append(agent(server, FakeWorker(1)))
        assert [call.wait().error for call in calls] == [None, None]
    texts = [event.text for event in seen if isinstance(event, SearchNote)]
    told = [
        text for text in texts if text.startswith(f"the coordinator at {server.address} has not answered")
    ]
    assert len(told) == 1
    assert told[0].endswith("it is looked for until 10 s have passed")


def test_silence_while_this_process_was_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, channel = FakeClock(), CoordinatorChannel("127.0.0.1:1", TOKEN)
    monkeypatch.setattr("atorch_ns.engine.rpc.channel.time", SimpleNamespace(monotonic=clock))
    durations = iter([600.0, 5.0, 1.0, 15.0])

    def call(name: str, request: object, *, timeout_s: float) -> str:
        clock.now += next(durations)
        if clock.now < 706.0:
            raise UnreachableError("deadline exceeded", connected=True)
        return "answer"

    monkeypatch.setattr(channel, "call", call)
    assert channel.insist("Join", None, timeout_s=5.0, within_s=8.0) == "answer"
    clock.now = 100.0
    with pytest.raises(UnreachableError, match="has not answered for 15 s"):
        channel.insist("NextTask", None, timeout_s=15.0, within_s=8.0)
    channel.close()


def test_a_beat_without_answer_ends_a_trial_only_while_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with CoordinatorServer(Coordinator(FakeSearch(), 2), token=TOKEN) as server:
        mine = client(server, 0, reconnect_s=1.0)
        beat, num_beats = mine._call_heartbeat, 0

        def send(caller: pb.Caller) -> Any:
            nonlocal num_beats
            num_beats += 1
            if num_beats == 1:
                time.sleep(1.5)  # as where this process is suspended
            if num_beats == 1 or 5 < num_beats < 15:
                raise UnreachableError("deadline exceeded")
            return beat(caller)

        monkeypatch.setattr(mine, "_call_heartbeat", send)
        mine.join()
        was_ended = []
        while num_beats < 18:
            was_ended.append((num_beats, mine.cancelled(1)))
            time.sleep(0.01)
        mine.leave()
        mine.close()
    assert {number for number, is_ended in was_ended if is_ended} <= set(range(5, 16))
    assert (14, True) in was_ended


def test_a_taken_port_is_said() -> None:
    server = CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN)
    with server, pytest.raises(CoordinatorError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN, port=server.port)


def test_plain_addresses_that_others_reach_are_refused() -> None:
    with pytest.raises(InputError, match=r"0\.0\.0\.0 can be reached from other machines"):
        CoordinatorServer(Coordinator(FakeSearch(), 1), host="0.0.0.0", token=TOKEN)
    with pytest.raises(InputError, match="needs a token"):
        CoordinatorServer(Coordinator(FakeSearch(), 1), token="")
    server = CoordinatorServer(
        Coordinator(FakeSearch(), 1), host="0.0.0.0", token=TOKEN, allow_plain_remote=True
    )
    server.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl to make a certificate")
def test_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=engine"
    )
    files = ["-addext", "subjectAltName=DNS:engine", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    with pytest.raises(InputError, match=r"no\.pem cannot be read"):
        CoordinatorServer(
            Coordinator(FakeSearch(), 1), token=TOKEN, tls=Tls(cert=tmp_path / "no.pem", key=key)
        )
    server = CoordinatorServer(
        Coordinator(FakeSearch(), 1), host="0.0.0.0", token=TOKEN, tls=Tls(cert=cert, key=key)
    )
    address = f"127.0.0.1:{server.port}"
    with server:
        trusting = CoordinatorClient(address, TOKEN, 0, tls=Tls(cert=cert, server_name="engine"))
        assert run_agent(trusting, FakeWorker(0), rank=0).num_trials == 3
        for tls in (None, Tls(server_name="engine"), Tls(cert=cert, server_name="another")):
            stranger = CoordinatorClient(address, TOKEN, 0, tls=tls, reconnect_s=0.5)
            with pytest.raises(CoordinatorError, match="has not answered"):
                run_agent(stranger, FakeWorker(0), rank=0)


def search_alone() -> int:
    with CoordinatorServer(Coordinator(FakeSearch(), 1), token=TOKEN) as server:
        return run_agent(client(server, 0), FakeWorker(0), rank=0).num_trials


def test_forked_ranks_search_although_their_parent_did() -> None:
    assert search_alone() == 3
    assert run_ranks(search_alone, 2, timeout_s=30.0) == [3, 3]


def test_nothing_is_left_behind() -> None:
    me = psutil.Process()

    def threads() -> set[str]:
        return {
            one.name for one in threading.enumerate() if one.name.startswith(("coordinator", "heartbeat"))
        }

    for _ in range(3):
        server = CoordinatorServer(Coordinator(FakeSearch(), 2), token=TOKEN)
        assert threads()
        call = agent(server, FakeWorker(0))  # waits for rank 1 in vain
        time.sleep(0.1)
        start = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - start < 2.0, "nobody waits for a call that waits"
        other = CoordinatorServer(Coordinator(FakeSearch(["a"]), 1), token=TOKEN, port=server.port)
        assert call.wait().error is None
        other.close()
        limit = time.monotonic() + 3.0
        ports = {server.port}
        while time.monotonic() < limit and any(
            one.laddr.port in ports or (one.raddr and one.raddr.port in ports)
            for one in me.net_connections("tcp")
            if one.status != psutil.CONN_TIME_WAIT
        ):
            time.sleep(0.02)
        assert time.monotonic() < limit, "a socket is left"
        assert not threads()


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    assert tls_files(None, None) is None
    with pytest.raises(InputError, match="both files"):
        tls_files(tmp_path / "cert.pem", None)
