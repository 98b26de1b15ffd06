"""The manifest: what a checkpoint is of, and every small state in it, as readable JSON beside the tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from atorch_ns.checkpoint._folder import MANIFEST, DamagedError, write_json

__all__ = ["FileRecord", "GroupRecord", "Manifest", "OptimizerRecord", "SchedulerRecord", "TensorRecord"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorRecord(_Record):
    """A tensor of the model: its whole shape and its dtype."""

    shape: tuple[int, ...]
    dtype: str


class FileRecord(_Record):
    """A file of tensors, or torch's index of them: its size in bytes and its CRC-32, eight hexadecimal digits."""

    size: int
    crc32: str


class GroupRecord(_Record):
    """A parameter group: names, and hyperparameters encoded by ``_values.encode``."""

    params: tuple[str, ...]
    options: dict[str, Any]


class OptimizerRecord(_Record):
    """An optimizer without its tensors.

    Attributes:
        class_name: qualified name of its class.
        groups: its parameter groups.
        values: entries of its state that are no tensors, encoded, by parameter.
        num_skipped: steps skipped for bad gradients.
    """

    class_name: str
    groups: tuple[GroupRecord, ...]
    values: dict[str, dict[str, Any]]
    num_skipped: int


class SchedulerRecord(_Record):
    """A scheduler's class and its encoded ``state_dict``."""

    class_name: str
    state: Any


class Manifest(_Record):
    """What stands in ``manifest.json``.

    Attributes:
        format: the version of this layout.
        step: steps trained.
        world_size: number of processes that wrote it.
        strategy: the methods it was trained under, ``{"name", "config"}`` each.
        versions: of atorch_ns and torch.
        model_class: qualified name of the model's class.
        weights: every parameter, by its first name.
        buffers: every persistent buffer.
        extra_states: modules with an extra state of their own (a tensor).
        optimizer: ``None`` if there was none.
        scheduler: ``None`` if there was none.
        scaler: state of the loss scaler; ``None`` if there was none.
        data: position in the data; ``None`` if there was no data loader.
        rng_digests: a digest of each rank's random states.
        extra: what the caller gave.
        files: every other file of the checkpoint, by name; ``None`` in those of versions that kept no digests.
    """

    format: Literal[1] = 1
    step: int
    world_size: int
    strategy: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    model_class: str
    weights: dict[str, TensorRecord]
    buffers: dict[str, TensorRecord]
    extra_states: dict[str, TensorRecord]
    optimizer: OptimizerRecord | None
    scheduler: SchedulerRecord | None
    scaler: Any
    data: dict[str, Any] | None
    rng_digests: tuple[str, ...]
    extra: dict[str, Any]
    files: dict[str, FileRecord] | None = None

    def write(self, folder: Path) -> None:
        """Writes it into ``folder``."""
        write_json(folder / MANIFEST, self.model_dump(mode="json"))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads it from ``folder``.

        Raises:
            CheckpointError: if it cannot be read, is damaged, or has another format.
        """
        try:
            manifest = cls.model_validate_json((folder / MANIFEST).read_bytes())
        except OSError as error:
            raise DamagedError(f"cannot read {folder / MANIFEST}: {error}") from error
        except ValidationError as error:
            issues = "; ".join(
                f"{'.'.join(map(str, issue['loc'])) or 'the file'}: {issue['msg']}"
                for issue in error.errors()[:4]
            )
            raise DamagedError(
                f"{folder / MANIFEST} is damaged, or of a version that this one cannot read: {issues}."
            ) from error
        if re.fullmatch(r"step-\d+", folder.name) and folder.name != f"step-{manifest.step}":
            raise DamagedError(
                f"{folder / MANIFEST} is damaged: it is of step {manifest.step}, and stands in {folder.name}."
            )
        return manifest
