"""Files that are not as they were written are found before anything is changed, and a whole step is named."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atorch_ns import checkpoint
from atorch_ns.checkpoint.files import _CHUNK_BYTES, record_of, share_of
from atorch_ns.checkpoint.source import Source
from atorch_ns.errors import CheckpointError
from atorch_ns.job import Result
from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import snapshot
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.checkpoint.jobs import batches, make, step

MLP = {"case": get_case("mlp"), "optim_param_func": None}


def save_steps(folder: Path, strategy: str, count: int = 2, **options: Any) -> None:
    result = make(strategy, **MLP)
    data = batches(result)
    for _ in range(count):
        step(result, next(data))
        pending = checkpoint.save(folder, result, **options)
        if pending is not None:
            pending.wait()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_steps(tmp_path, "alone")
    return tmp_path


def resume_unchanged(folder: Path, result: Result) -> str:
    """What ``resume`` says; fails if it changed anything."""
    before = snapshot(result.model)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resume(folder, result)
    after = snapshot(result.model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert result.train_step.num_steps == 0
    assert result.optim is not None
    assert len(result.optim.state) == 0
    return str(caught.value)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(704, 1104):
        data[place] ^= 0x41
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def forget_files(place: Path) -> None:
    """Makes the manifest one of a version that kept no digests."""
    manifest = place / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["files"]
    manifest.write_text(json.dumps(document))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_file_has_its_digest(tmp_path: Path, asynchronous: bool) -> None:
    run_ranks(partial(save_steps, asynchronous=asynchronous), 2, args=(tmp_path, "fsdp", 1))
    place = tmp_path / "step-1"
    files = json.loads((place / "manifest.json").read_text())["files"]
    assert set(files) == {path.name for path in place.iterdir()} - {"manifest.json"}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= set(files)
    for name, record in files.items():
        data = (place / name).read_bytes()
        assert record == {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}


@pytest.mark.parametrize("more", [0, 1, _CHUNK_BYTES + 1])
def test_a_file_that_is_read_piece_by_piece_has_one_digest(tmp_path: Path, more: int) -> None:
    path = tmp_path / "__0_0.distcp"
    content = os.urandom(_CHUNK_BYTES + more)
    path.write_bytes(content)
    found = record_of(path)
    assert (found.size, found.crc32) == (len(content), f"{zlib.crc32(content):08x}")


@pytest.mark.parametrize("damage", [flip, shorten, halve, Path.unlink])
def test_damage_is_found_before_anything_is_changed(saved: Path, damage: Callable[[Path], None]) -> None:
    damage(saved / "step-2" / "__0_0.distcp")
    said = resume_unchanged(saved, make("alone", **MLP))
    assert said.startswith(f"{saved / 'step-2'} is damaged: __0_0.distcp ")
    assert f"checkpoint.load('{saved / 'step-1'}', result)" in said
    if damage is flip:
        document = json.loads((saved / "step-2" / "manifest.json").read_text())
        found = zlib.crc32((saved / "step-2" / "__0_0.distcp").read_bytes())
        assert f"CRC-32 {found:08x}, and" in said
        assert f"CRC-32 {document['files']['__0_0.distcp']['crc32']} were written" in said
    assert checkpoint.load(saved / "step-1", make("alone", **MLP))["step"] == 1


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_the_way_out_passes_over_damaged_steps(saved: Path, name: str) -> None:
    save_steps(saved, "alone", 3)
    shorten(saved / "step-2" / "__0_0.distcp")
    halve(saved / "step-3" / name)
    said = resume_unchanged(saved, make("alone", **MLP))
    assert f"{saved / 'step-1'}: checkpoint.load(" in said
    halve(saved / "step-1" / name)
    assert f"There is no other whole step in {saved}" in resume_unchanged(saved, make("alone", **MLP))


def test_a_step_without_its_manifest_names_another(saved: Path) -> None:
    (saved / "step-2" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-2 is incomplete: .*step-1: checkpoint\.load"):
        checkpoint.load(saved / "step-2", make("alone", **MLP))


@pytest.mark.parametrize("damage", [shorten, halve, Path.unlink])
def test_sizes_are_checked_without_digests(saved: Path, damage: Callable[[Path], None]) -> None:
    for place in (saved / "step-1", saved / "step-2"):
        forget_files(place)
    assert checkpoint.load(saved, make("alone", **MLP))["step"] == 2
    damage(saved / "step-2" / "__0_0.distcp")
    said = resume_unchanged(saved, make("alone", **MLP))
    assert "step-2 is damaged: __0_0.distcp" in said
    assert f"{saved / 'step-1'}: checkpoint.load(" in said


def test_what_fails_later_says_that_the_job_is_changed(saved: Path) -> None:
    for place in (saved / "step-1", saved / "step-2"):
        forget_files(place)
    flip_everything(saved / "step-2" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"after a part of it was loaded") as caught:
        checkpoint.resume(saved, make("alone", **MLP))
    assert "The model and the optimizer have changed" in str(caught.value)
    assert f"{saved / 'step-1'}: checkpoint.load(" in str(caught.value)


def flip_everything(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 0x55 for byte in path.read_bytes()))


def resume(folder: Path, strategy: str) -> int:
    result = make(strategy, **MLP)
    before = snapshot(result.model)
    try:
        loaded = checkpoint.resume(folder, result)
    finally:
        changed = any(not torch.equal(before[name], now) for name, now in snapshot(result.model).items())
        (folder / f"changed-{changed}").touch()
    assert loaded is not None
    return int(loaded["step"])


@pytest.mark.parametrize(("strategy", "num_ranks"), [("fsdp", 2), ("ddp", 2), ("zero1", 4)])
def test_all_ranks_agree(tmp_path: Path, strategy: str, num_ranks: int) -> None:
    run_ranks(save_steps, 2, args=(tmp_path, "fsdp"))
    flip(tmp_path / "step-2" / "__1_0.distcp")
    outcomes = catch_ranks(resume, num_ranks, args=(tmp_path, strategy), timeout_s=60)
    kinds = [outcome.error_type for outcome in outcomes]
    assert sorted(kinds) == ["CheckpointError"] + ["RankError"] * (num_ranks - 1)
    for outcome in outcomes:
        assert "step-2 is damaged: __1_0.distcp has" in outcome.message
        assert "step-1: checkpoint.load(" in outcome.message
    assert [path.name for path in tmp_path.glob("changed-*")] == ["changed-False"]


def test_a_file_that_nobody_reads_may_be_damaged(tmp_path: Path) -> None:
    run_ranks(save_steps, 2, args=(tmp_path, "ddp", 1))
    place = tmp_path / "step-1"
    names = json.loads((place / "manifest.json").read_text())["files"]
    assert "__1_0.distcp" in names  # the second rank's random states at the least
    result = make("alone", **MLP)
    read = Source.open(place, result, data_position=True).files
    for name in names.keys() - read.keys() - {".metadata"}:
        (place / name).unlink()
    assert checkpoint.resume(tmp_path, result) is not None


def test_ranks_of_a_machine_share_the_work() -> None:
    files = {"a": 30, "b": 20, "c": 10}
    needed = [("one", files), ("one", files), ("two", files), ("two", {"d": 5})]
    shares = [share_of(rank, needed) for rank in range(4)]
    assert sorted(shares[0] + shares[1]) == ["a", "b", "c"]
    assert sorted(shares[2] + shares[3]) == ["a", "b", "c", "d"]
    assert shares[0] == ["a"]
    assert shares[1] == ["b", "c"]


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("")
    for given in (path, path / "runs"):
        with pytest.raises(CheckpointError, match=r"train\.py is a file"):
            checkpoint.resume(given, make("alone", **MLP))
    assert checkpoint.resume(tmp_path / "not" / "yet", make("alone", **MLP)) is None


def test_a_manifest_of_another_step_is_damaged(saved: Path) -> None:
    manifest = saved / "step-2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3', 1))
    assert "it describes step 3, but is in step-2" in resume_unchanged(saved, make("alone", **MLP))
