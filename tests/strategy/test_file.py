"""Strategy files: written whole, read safely."""

from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path

import pytest

import atorch_ns.strategy
from atorch_ns.errors import StrategyFileError
from atorch_ns.strategy import Requires, Strategy, convert_pickle, json_schema

STRATEGY = Strategy(
    ["parallel_mode", ("checkpoint", ["Block"]), ("amp_native", {"dtype": "bfloat16"})],
    requires=Requires(world_size=8, device="cuda", torch="2.13"),
    provenance={"made_by": "a test", "note": "größer"},
)


@pytest.mark.parametrize("name", ["s.json", "s.yaml", "s.yml", "no_suffix"])
def test_save_and_load(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    STRATEGY.save(path)
    assert Strategy.load(path) == STRATEGY
    assert Strategy.load(str(path)) == STRATEGY
    first = path.read_bytes()
    STRATEGY.save(path)
    assert path.read_bytes() == first
    assert first.lstrip().startswith(b"schema") == (path.suffix in (".yaml", ".yml"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_names_alone_in_lists_are_read_and_other_entries_are_told() -> None:
    assert Strategy.load('[["fsdp"], ["amp_native", "bf16"]]') == Strategy.load(
        '["fsdp", ["amp_native", "bf16"]]'
    )
    with pytest.raises(StrategyFileError, match="3 is not a method: write its name"):
        Strategy.load("[3]")


def test_a_bare_list_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("- fsdp\n- [amp_native, bf16]\n")
    assert Strategy.load(path) == Strategy(["fsdp", ("amp_native", "bf16")])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.json"
    STRATEGY.save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StrategyFileError, match="No space left"):
        Strategy(["fsdp"]).save(path)
    assert Strategy.load(path) == STRATEGY
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StrategyFileError, match="cannot write"):
        STRATEGY.save(tmp_path / "nowhere" / "s.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"   \n", "empty"),
        (b"{", "truncated"),
        (STRATEGY.to_bytes()[:-30], "truncated"),
        (b"\xff\xfe\x00garbage", "not a text file"),
        (b"3", "holds an int"),
        (b'{"schema": 2, "steps": []}', "schema 2"),
        (b'{"steps": []}', "schema None"),
        (b'{"schema": 1}', "steps"),
        (b'{"schema": 1, "steps": [{"nam": "x"}]}', "nam"),
        (b'{"schema": 1, "steps": [], "extra": 1}', "extra"),
        (b'{"schema": 1, "steps": [], "requires": {"world_size": "8"}}', "world_size"),
        (b"[" * 100000, "not readable"),
        (b'{"schema": 1, "steps": [{"name": "a", "config": NaN}]}', "nan"),
    ],
)
def test_bad_content_names_the_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as caught:
        Strategy.load(path)
    if isinstance(caught.value, StrategyFileError):
        assert "bad.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"schema: [", b"- !!python/object/apply:os.system [true]\n", b"\t- x"])
def test_bad_yaml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(StrategyFileError, match=r"bad\.yaml"):
        Strategy.load(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(StrategyFileError, match=r"no such strategy file.*Methods by name") as missing:
        Strategy.load("fsdp.json")
    assert Strategy.load("fsdp,checkpoint").names == ("fsdp", "checkpoint")  # as the message has it
    with pytest.raises(StrategyFileError, match=r"^no such strategy file \(.*fsdp.json\)$"):
        Strategy.load(tmp_path / "fsdp.json")
    with pytest.raises(StrategyFileError, match="cannot read") as folder:
        Strategy.load(tmp_path)
    assert str(missing.value).count("fsdp.json") == 1
    assert str(folder.value).count(str(tmp_path)) == 1


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch evil",))


def test_a_pickle_is_refused_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("s.json", "s.yaml", "s.pkl"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(_Evil()))
        with pytest.raises(StrategyFileError, match="pickle"):
            Strategy.load(path)
        with pytest.raises(StrategyFileError, match="system"):
            convert_pickle(path)
    with pytest.raises(StrategyFileError, match="pickle"):
        Strategy.load(pickle.dumps(["fsdp"]))
    assert not (tmp_path / "evil").exists()


def test_the_converter_reads_a_list_of_known_names(tmp_path: Path) -> None:
    import torch
    from torch import nn

    path = tmp_path / "old"
    content = [
        ("parallel_mode", pickle.dumps(([("data", 8)], None)), False),
        ("amp_native", pickle.dumps({"dtype": torch.bfloat16}), False),
        ("zero1", None, False),
    ]
    path.write_bytes(pickle.dumps(content))
    strategy = convert_pickle(path)
    assert strategy.names == ("parallel_mode", "amp_native", "zero1")
    assert strategy["parallel_mode"] == [[["data", 8]], None]
    assert strategy["amp_native"] == {"dtype": "bfloat16"}

    path.write_bytes(pickle.dumps([("checkpoint", (nn.Linear,))]))
    with pytest.raises(StrategyFileError, match=r"Linear.*--class torch.*classes="):
        convert_pickle(path)
    allowed = convert_pickle(path, classes={"torch.nn.modules.linear.Linear"})
    assert allowed["checkpoint"] == ["torch.nn.modules.linear.Linear"]


def test_names_with_commas_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Strategy.load("fsdp") == Strategy(["fsdp"])
    assert Strategy.load("fsdp, checkpoint,half").names == ("fsdp", "checkpoint", "half")
    Strategy(["zero1"]).save("fsdp")
    assert Strategy.load("fsdp").names == ("zero1",), "a file of that name comes first"


def test_truncated_pickle_and_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(pickle.dumps(["fsdp"])[:-4])
    with pytest.raises(StrategyFileError):
        convert_pickle(path)
    with pytest.raises(StrategyFileError):
        convert_pickle(tmp_path / "none")


def test_shipped_schema_is_current() -> None:
    shipped = Path(atorch_ns.strategy.__file__).with_name("schema.json")
    assert json.loads(shipped.read_text()) == json_schema()
