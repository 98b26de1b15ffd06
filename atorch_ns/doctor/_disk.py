"""Check: checkpoints can be written."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from typing import Final

from atorch_ns.doctor._base import Finding, Place

__all__ = ["check_disk"]

_NAME: Final = "disk"
_WRITTEN_BYTES: Final = 32 * 2**20
_FREE_BYTES: Final = 2 * 2**30


def check_disk(place: Place) -> list[Finding]:
    """The folder for checkpoints takes a file, flushed to the disk, and has space left."""
    block = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=place.folder, prefix=".atorch_ns_doctor_") as file:
            began = time.perf_counter()
            for _ in range(_WRITTEN_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
        free = shutil.disk_usage(place.folder).free
    except OSError as error:
        return [
            Finding(
                check=_NAME,
                verdict="fail",
                text=f"the folder for checkpoints, {place.folder}, cannot be written: {error.strerror or error}",
                fix="atorch-ns doctor --folder FOLDER   # with one that you may write",
            )
        ]
    figures = {"bytes_per_second": _WRITTEN_BYTES / seconds, "free_bytes": free}
    text = f"{_WRITTEN_BYTES / seconds / 2**20:,.0f} MiB/s written and flushed, {free / 2**30:,.1f} GiB free"
    if free >= _FREE_BYTES:
        return [Finding(check=_NAME, verdict="pass", text=text, figures=figures)]
    return [
        Finding(
            check=_NAME,
            verdict="warn",
            text=f"{text}: a checkpoint of a large model will not fit",
            fix="df -h .   # and choose another --folder",
            figures=figures,
        )
    ]
