"""The file of measured times: shared, atomic, and no loss when it is broken."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path

import pytest

from atorch_ns.profile import ProfileDatabase
from atorch_ns.profile.timing import BlockKey, BlockSeconds


def _key(name: str) -> BlockKey:
    return BlockKey("CPU", "2.13", name, "float32/bfloat16", 4, 16, 1000)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "times.json"
    database = ProfileDatabase(path)
    assert database.get(_key("a")) is None
    database.update({_key("a"): BlockSeconds(1.0, 2.0)})
    database.update({_key("b"): BlockSeconds(3.0, 4.0), _key("a"): BlockSeconds(5.0, 6.0)})
    again = ProfileDatabase(path)
    assert again.get(_key("a")) == BlockSeconds(5.0, 6.0)
    assert again.get(_key("b")) == BlockSeconds(3.0, 4.0)
    assert again.get(_key("b")._replace(torch_version="2.14")) is None
    assert again.get(_key("b")._replace(num_samples=8)) is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": 9, "entries": {}}', '{"schema": 1, "entries": {"a": 1}}']
)
def test_broken_file_is_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    database = ProfileDatabase(path)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert database.get(_key("a")) is None
    with pytest.warns(UserWarning, match="cannot be read"):
        database.update({_key("a"): BlockSeconds(1.0, 2.0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert database.get(_key("a")) == BlockSeconds(1.0, 2.0)


def _write(path: Path, writer: int) -> None:
    for index in range(20):
        ProfileDatabase(path).update({_key(f"{writer}-{index}"): BlockSeconds(writer, index)})


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    database = ProfileDatabase(path)
    for writer in range(4):
        for index in range(20):
            assert database.get(_key(f"{writer}-{index}")) == BlockSeconds(writer, index)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["times.json", "times.json.lock"]
