"""Checkpoints of a Trainer: a folder for each, ``last`` and ``best``, and what a run resumes from.

::

    checkpoints/
      0000-0010/          epoch 0, after 10 steps
        step-10/          a checkpoint of atorch_ns.checkpoint: complete or absent
        0.ckpt  1.ckpt    of each rank: what hooks have added, and random states of the epoch's begin
      last -> 0000-0010
      best -> 0000-0010
      .0000-0020.tmp/     being written: a rename makes it a checkpoint
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atorch_ns import checkpoint
from atorch_ns.checkpoint.files import check_files, record_of
from atorch_ns.checkpoint.folder import MANIFEST
from atorch_ns.checkpoint.manifest import FileRecord, Manifest
from atorch_ns.checkpoint.one_file import merge, unmerge
from atorch_ns.cluster import Cluster
from atorch_ns.errors import CheckpointError, InputError
from atorch_ns.job import Result
from atorch_ns.text import error_text
from atorch_ns.trainer.args import CheckpointConfig

log = logging.getLogger("atorch_ns")

LAST, BEST = "last", "best"
_NAME = re.compile(r"\d{4,}-(\d{4,})")  # epoch and steps
_EPOCH_RNG = "epoch_rng"  # key of random states in a rank's file
_RANK_FILES = "rank_files"  # key in the manifest: sizes and digests of rank files
_FILE = "merged.ckpt"  # written for save_type=merged


@dataclass
class TrainStatus:
    """Progress of training.

    Attributes:
        epoch: the epoch, from 0.
        step_in_epoch: number of finished steps in the epoch.
        finished_train_steps: total number of finished steps.
        best_loss: the lowest loss of a checkpoint. Infinite before the first.
        train_loss: loss of the last step.
        val_loss: loss of the last validation; ``None`` before the first.
        global_batch_size: samples of a step over all ranks.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    finished_train_steps: int = 0
    best_loss: float = float("inf")
    train_loss: float | None = None
    val_loss: float | None = None
    global_batch_size: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain data, with infinite numbers as text, which JSON lacks."""
        return {key: str(value) if isinstance(value, float) else value for key, value in asdict(self).items()}

    @classmethod
    def of(cls, status: dict[str, Any]) -> TrainStatus:
        """Creates a status from :meth:`as_json`."""
        floats = ("best_loss", "train_loss", "val_loss")
        values: dict[str, Any] = {
            key: float(value) if key in floats and value is not None else value
            for key, value in status.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class Loaded:
    """Result of resuming from a checkpoint.

    Attributes:
        status: progress of training.
        custom: data added by hooks on this rank. Lists by rank if another number of ranks saved it.
        epoch_rng: this rank's random states at the start of the epoch; ``None`` for another number of ranks.
        notes: notes on differences.
        path, world_size: the checkpoint, and the number of ranks that saved it.
    """

    status: TrainStatus
    custom: dict[str, Any]
    epoch_rng: dict[str, torch.Tensor] | None
    notes: list[str]
    path: Path
    world_size: int


class Checkpoints:
    """Saves and loads the checkpoints of a run. Every method is collective.

    Args:
        config: settings for saving and resuming.
        result: the job.
        train_args: the trainer's arguments as plain data, kept with each checkpoint.
    """

    def __init__(self, config: CheckpointConfig, result: Result, train_args: dict[str, Any]) -> None:
        self._config, self._result, self._args = config, result, train_args
        self._folder = Path(config.save_dir).absolute()

    @property
    def _job_cluster(self) -> Cluster:
        return self._result.job.cluster

    def save(
        self, epoch: int, status: TrainStatus, custom: dict[str, Any], epoch_rng: dict[str, torch.Tensor]
    ) -> None:
        """Saves a checkpoint, and makes it ``last``, and ``best`` if its loss is the lowest.

        Raises:
            CheckpointError: on all ranks. Earlier checkpoints stay.
        """
        loss = status.train_loss if status.val_loss is None else status.val_loss
        assert loss is not None
        before = status.best_loss
        is_best = loss < before  # which a NaN is not
        status.best_loss = loss if is_best else before
        name = f"{epoch:04d}-{status.finished_train_steps:04d}"
        folder, draft = self._folder / name, self._folder / f".{name}.tmp"
        self._log_on_first_rank(
            f"Saving checkpoint after {status.finished_train_steps} steps with loss={loss:.3f}."
        )
        self._log_on_first_rank(f"Saving checkpoint to {self._display_path(folder)}")
        self._job_cluster.on_first(self._clear_drafts, what="making room for the checkpoint")
        # Rank files first: the manifest, which checkpoint.save writes last, holds their digests.
        record = self._job_cluster.agree(
            lambda: self._write_own(draft, {**custom, _EPOCH_RNG: epoch_rng}),
            what="saving what ranks have added",
        )
        extra = {
            "train_status": status.as_json(),
            "train_args": self._args,
            "tied": self._result.job.original.tied,
            _RANK_FILES: {  # digests, which a load checks first
                f"{rank}.ckpt": entry for rank, entry in enumerate(self._job_cluster.gathered(record))
            },
        }
        position = {
            "epoch": status.epoch,
            "batches": status.step_in_epoch,
            "global_batch_size": status.global_batch_size,
        }
        steps = status.finished_train_steps
        checkpoint.save(draft, self._result, step=steps, extra=extra, position=position)
        self._job_cluster.on_first(
            lambda: self._finish_save(draft, folder, is_best, before, loss=loss),
            what="linking the checkpoint",
        )

    @property
    def has_best(self) -> bool:
        """True if there is a best checkpoint in the folder. Collective."""
        return self._job_cluster.on_first(
            (self._folder / BEST).exists, what="looking for the best checkpoint"
        )

    def check_folder(self) -> None:
        """Creates the folder of checkpoints, to check before training that it is writable. Collective.

        Raises:
            CheckpointError: if it cannot be written.
        """

        def write() -> None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self._folder):
                    pass
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint.save_dir: cannot write to {self._folder}: {error}"
                ) from error

        if not self._config.no_save:
            self._job_cluster.agree(write, what="making the folder of checkpoints")

    def _clear_drafts(self) -> None:
        for draft in self._folder.glob(".*.tmp"):  # of interrupted saves
            _remove_path(draft)

    def _write_own(self, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
        path = folder / f"{self._job_cluster.rank}.ckpt"
        draft = path.with_name(f".{path.name}.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(content, draft)
            draft.replace(path)  # the file is complete or absent
            return record_of(path).model_dump()
        except Exception as error:  # what hooks add may be anything
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise CheckpointError(f"cannot write {path}: {error_text(error)}") from error

    def _finish_save(self, draft: Path, folder: Path, is_best: bool, before: float, *, loss: float) -> None:
        config = self._config
        try:
            if config.save_type == "merged":
                merge_folder(draft, draft / _FILE)
            old = _backup_path(folder)
            _remove_path(old)
            if folder.exists():  # the run was resumed from an earlier step
                folder.rename(old)  # a crash here leaves the backup, which _find_checkpoint reads
            draft.rename(folder)
            _remove_path(old)
            if config.save_last:
                log.info("Saving checkpoint as the last checkpoint.")
                self._update_alias(LAST, folder)
            if is_best:
                log.info("Best loss updated: %.3f -> %.3f", before, loss)
                if config.save_best:
                    log.info("Saving checkpoint as the best checkpoint.")
                    self._update_alias(BEST, folder)
            self._remove_expired(folder)
        except OSError as error:
            raise CheckpointError(f"cannot complete the checkpoint in {self._folder}: {error}") from error

    def _update_alias(self, name: str, folder: Path) -> None:
        target, draft = self._folder / name, self._folder / f".{name}.tmp"
        _remove_path(draft)
        if self._config.symlink_best_and_last:
            draft.symlink_to(folder.name)
        else:
            shutil.copytree(folder, draft)
        old = _backup_path(target)
        # One call replaces a link by a link; before any other exchange the old one is moved aside.
        if os.path.lexists(target) and not (draft.is_symlink() and target.is_symlink()):
            _remove_path(old)
            target.rename(old)
        draft.replace(target)
        _remove_path(old)

    def _remove_expired(self, newest: Path) -> None:
        keep = self._config.keep_last_n_checkpoints
        if keep is None:
            return
        checkpoints = sorted(  # the oldest first
            (path.stat().st_mtime_ns, path)
            for path in self._folder.iterdir()
            if _NAME.fullmatch(path.name) and not path.is_symlink()
        )
        pointers = {newest, *(self._folder / name for name in (LAST, BEST))}
        targets = {path.resolve() for path in pointers if path.exists()}
        for _, path in checkpoints[:-keep]:
            if path.resolve() not in targets:
                shutil.rmtree(path)

    def load(self) -> Loaded | None:
        """Resumes as the configuration says, or returns ``None`` to start anew.

        Raises:
            CheckpointError: if it is missing or damaged, or of another model. Nothing is changed then.
            InputError: if it is not a checkpoint.
        """
        source = self._config.resume_from
        if source is None:
            return None
        path = self._job_cluster.on_first(
            lambda: self._find_checkpoint(source), what="looking for the checkpoint"
        )
        if path is None:
            self._log_on_first_rank(
                f"There is no {source} checkpoint in {self._display_path(self._folder)}: training begins anew."
            )
            return None
        if path.is_file():
            return self._load_file(path)
        return self._load_folder(path, path)

    def _find_checkpoint(self, source: str) -> Path | None:
        if source in (LAST, BEST):
            path = self._folder / source
            target = path.readlink() if path.is_symlink() else Path(source)
            old = _backup_path(self._folder / target)  # where a crash came between two renames
            if path.is_symlink() and not (path.exists() or old.exists()):
                raise CheckpointError(
                    f"{path} is a link to {target}, which does not exist. Set checkpoint.resume_from to another folder."
                )
            return next((candidate.resolve() for candidate in (path, old) if candidate.exists()), None)
        path = Path(source).absolute()
        if not path.exists():
            raise InputError(f"checkpoint.resume_from={source}: no such file or folder: {path}.")
        # Either a checkpoint itself, of a Trainer or another front end, or the folder of a run with several.
        step_folder = checkpoint.latest(path)
        if step_folder is None or step_folder.parent == path:
            return path.resolve()
        return ((path / LAST) if (path / LAST).exists() else step_folder.parent).resolve()  # a run's folder

    def _load_folder(self, folder: Path, origin: Path) -> Loaded:
        self._job_cluster.on_first(lambda: _check_rank_files(folder), what="checking what ranks have added")
        info = checkpoint.load(folder, self._result, data_position=False)
        status = info["extra"].get("train_status")
        # By rank: 2.ckpt before 10.ckpt.
        files = sorted(folder.glob("*.ckpt"), key=lambda path: (len(path.name), path.name))
        rank_file = folder / f"{self._job_cluster.rank}.ckpt"
        same = info["world_size"] == self._job_cluster.world_size and rank_file.is_file()

        paths = [rank_file] if same else [path for path in files if path.stem.isdigit()]
        entries = self._job_cluster.agree(
            lambda: _read_rank_files(paths), what="reading what ranks have added"
        )
        rng = entries[0].get(_EPOCH_RNG) if same else None
        return Loaded(
            status=TrainStatus.of(status) if status else _status_of(info),
            custom={k: v for k, v in entries[0].items() if k != _EPOCH_RNG} if same else by_rank(entries),
            epoch_rng=rng,
            notes=info["notes"],
            path=origin,
            world_size=info["world_size"],
        )

    def _load_file(self, path: Path) -> Loaded:

        def read() -> Any:
            if self._job_cluster.rank:
                return None
            try:
                with zipfile.ZipFile(path) as archive:  # torch's files, with a digest of each tensor
                    if (bad_name := archive.testzip()) is not None:
                        raise CheckpointError(f"{path} is damaged: {bad_name} differs from what was written.")
                return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{path} cannot be read: {error_text(error)}") from error

        document = self._job_cluster.agree(read, what="reading the checkpoint")
        whole = self._job_cluster.from_first(isinstance(document, dict) and "manifest" in document)
        if not whole:
            state = document.get("model", document) if isinstance(document, dict) else {}
            checkpoint.import_state_dict(self._result, state)
            notes = ["a file of weights alone: the optimizer begins anew"]
            return Loaded(TrainStatus(), {}, None, notes, path, 1)
        with self._unmerged_folder(document, path) as folder:
            info = self._load_folder(folder, path)
        custom = self._job_cluster.from_first(document.get("custom", {}) if document else None)
        return Loaded(info.status, custom, None, info.notes, path, 1)

    @contextlib.contextmanager
    def _unmerged_folder(self, document: Any, path: Path) -> Iterator[Path]:
        def write() -> Path:
            try:
                folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))  # ranks share it
            except OSError as error:
                raise CheckpointError(
                    f"{path}: its folder must be writable to resume from it: {error}"
                ) from error
            unmerge(document, folder)
            return folder

        folder = self._job_cluster.on_first(write, what="taking the merged checkpoint apart")
        try:
            yield folder
        finally:
            if self._job_cluster.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def _display_path(self, path: Path) -> str:
        relative = os.path.relpath(path, self._folder)
        return str(Path(self._config.save_dir) / relative)

    def _log_on_first_rank(self, text: str) -> None:
        if self._job_cluster.rank == 0:
            log.info("%s", text)


def _status_of(info: dict[str, Any]) -> TrainStatus:
    # The checkpoint of another front end has no status: its position in the data says how far the run was.
    position = info["data"] or {"epoch": 0, "batches": 0, "global_batch_size": 0}
    return TrainStatus(
        epoch=position["epoch"],
        step_in_epoch=position["batches"],
        finished_train_steps=info["step"],
        global_batch_size=position["global_batch_size"],
    )


def by_rank(entries: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Data added by ranks, as a list by rank for each key."""
    keys = dict.fromkeys(key for entry in entries for key in entry if key != _EPOCH_RNG)
    return {key: [entry.get(key) for entry in entries] for key in keys}


def merge_folder(folder: Path, output: Path) -> None:
    """Writes a checkpoint of a Trainer as one file.

    Raises:
        CheckpointError: if it is missing or damaged, or the file cannot be written.
    """
    _check_rank_files(folder)
    paths = sorted(
        (path for path in folder.glob("*.ckpt") if path.stem.isdigit()), key=lambda path: int(path.stem)
    )
    custom = by_rank(_read_rank_files(paths))
    manifest_path = next(folder.glob(f"step-*/{MANIFEST}"), None)
    if manifest_path is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint.")
    extra = Manifest.read(manifest_path.parent).extra
    metadata: dict[str, Any] = {key: extra[key] for key in ("train_status", "train_args") if key in extra}
    merge(manifest_path.parent, output, tied=extra.get("tied"), more={**metadata, "custom": custom})


def _read_rank_files(paths: Iterable[Path]) -> list[dict[str, Any]]:
    entries = []
    for path in paths:
        try:  # weights_only=False, as hooks may have added objects of any class
            entries.append(torch.load(path, map_location="cpu", weights_only=False))
        except Exception as error:  # unpickling raises anything
            raise CheckpointError(
                f"{path}, which holds what hooks have added, cannot be read: {error_text(error)}. If it lacks a class, "
                "make it importable as it was at the save; if the file is damaged, resume from another checkpoint."
            ) from error
    return entries


def _check_rank_files(folder: Path) -> None:
    step_folder = checkpoint.latest(folder)
    records = {} if step_folder is None else Manifest.read(step_folder).extra.get(_RANK_FILES, {})
    check_files(folder, {name: FileRecord(**entry) for name, entry in records.items()}, records)


def _backup_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")  # while another one takes its name


def _remove_path(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
