"""The committed messages are those of the ``.proto`` file."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import __version__ as protobuf_version

from atorch_ns.engine import proto
from atorch_ns.engine.proto import coordinator_pb2 as pb
from atorch_ns.engine.rpc.servicer import CALLS, SERVICE

FOLDER = Path(next(iter(proto.__path__)))
SOURCE = re.sub(r"//.*", "", (FOLDER / "coordinator.proto").read_text())


def test_messages_are_up_to_date() -> None:
    written = {
        name: dict(re.findall(r"(\w+) = (\d+);", body))
        for name, body in re.findall(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", SOURCE)
    }
    committed = {
        name: {field.name: str(field.number) for field in message.fields}
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert committed == written, "run `make proto`"


def test_server_and_client_know_every_call() -> None:
    service = pb.DESCRIPTOR.services_by_name["Coordinator"]
    assert service.full_name == SERVICE
    assert {name: (f"{name}Request", f"{name}Reply") for name in CALLS} == {
        method.name: (method.input_type.name, method.output_type.name) for method in service.methods
    }


def test_messages_load_on_the_oldest_protobuf_that_is_supported() -> None:
    generated = re.search(r"Protobuf Python Version: (\S+)", (FOLDER / "coordinator_pb2.py").read_text())
    assert generated is not None
    # Protobuf reads what was generated for the same major version or the one before.
    assert generated[1] == "6.31.1"
    assert int(protobuf_version.split(".")[0]) in (6, 7)
