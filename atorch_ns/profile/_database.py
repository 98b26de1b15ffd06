"""Measured times of blocks, kept in a file and used again."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["BlockKey", "BlockSeconds", "ProfileDatabase"]

_SCHEMA = 1


class BlockKey(NamedTuple):
    """What a measured time depends on.

    Attributes:
        device: name of the device, as :func:`device_name` gives it.
        torch_version: of torch.
        fingerprint: of the block.
        precision: its precision key.
        num_samples, num_tokens: B and T of the batch.
        flops: of the forward pass; tells inputs of other sizes (images) apart.
    """

    device: str
    torch_version: str
    fingerprint: str
    precision: str
    num_samples: int
    num_tokens: int
    flops: int

    def text(self) -> str:
        """The key as one line."""
        return "|".join(map(str, self))


class BlockSeconds(NamedTuple):
    """Median seconds of one instance of a block."""

    forward: float
    backward: float


class ProfileDatabase:
    """Times by block, in a JSON file that processes may read and write at the same time.

    A file that cannot be read is replaced with a warning: its times can be measured again.

    Args:
        path: of the file; folders are made when it is first written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def get(self, key: BlockKey) -> BlockSeconds | None:
        """The times of a block; ``None`` if they were not measured."""
        found = self._read().get(key.text())
        return None if found is None else BlockSeconds(*found)

    def update(self, times: Mapping[BlockKey, BlockSeconds]) -> None:
        """Adds times; those under the same keys are replaced, all others stay, whoever wrote them."""
        if not times:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            entries = self._read()
            entries.update({key.text(): (value.forward, value.backward) for key, value in times.items()})
            self._write(entries)

    def _read(self) -> dict[str, tuple[float, float]]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["schema"] != _SCHEMA:
                raise ValueError(f"schema {data['schema']!r}, where {_SCHEMA} is read")
            return {str(key): _pair(value) for key, value in data["entries"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.warn(
                f"the profile database {self.path} cannot be read ({error}); blocks are measured anew.",
                stacklevel=3,
            )
            return {}

    def _write(self, entries: Mapping[str, Any]) -> None:
        text = json.dumps({"schema": _SCHEMA, "entries": dict(sorted(entries.items()))}, indent=1)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with self.path.with_name(f"{self.path.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _pair(value: Any) -> tuple[float, float]:
    forward, backward = value
    return float(forward), float(backward)
