"""Weights in the Hugging Face folder format: ``model.safetensors`` and ``config.json``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from atorch_ns.checkpoint.export import Unmatched, import_state_dict, whole_tensors
from atorch_ns.checkpoint.folder import write_json
from atorch_ns.errors import CheckpointError, MissingPackageError
from atorch_ns.job import Result
from atorch_ns.text import error_text

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"


def export_safetensors(result: Result, folder: str | PathLike[str]) -> Path:
    """Writes the weights so that ``from_pretrained(folder)`` of transformers reads them. Collective.

    ``model.safetensors`` holds every parameter and persistent buffer, whole; a tied parameter once, under its
    first name. If the model has a ``config`` of transformers, ``config.json`` is written with the dtype
    of the exported weights (fp32 where the job keeps fp32 masters).

    Args:
        result: result of ``auto_accelerate``.
        folder: folder to write to, made if it does not exist; rank 0 writes.

    Returns:
        ``folder``.

    Raises:
        MissingPackageError: without the package safetensors.
        CheckpointError: if the folder cannot be written.
    """
    path, job = Path(folder), result.job
    library = job.cluster.agree(lambda: _import_library("safetensors.torch"), what="importing safetensors")
    tensors = whole_tensors(result)

    def write() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write_weights(library, tensors, path)
            _write_config(job.module, tensors, path)
        except OSError as error:
            raise CheckpointError(f"cannot write weights to {path}: {error}") from error

    job.cluster.on_first(write, what="writing the weights")
    return path


def import_safetensors(result: Result, folder: str | PathLike[str], strict: bool = True) -> Unmatched:
    """Reads weights from a folder of ``*.safetensors``, in one file or several with an index. Collective.

    Only rank 0 reads, tensor by tensor.

    Args:
        result: result of ``auto_accelerate``.
        folder: folder that transformers' ``save_pretrained`` or :func:`export_safetensors` has written.
        strict: whether every name must be in both.

    Returns:
        The names that were left out; empty with ``strict``.

    Raises:
        MissingPackageError: without the package safetensors.
        CheckpointError: if the files are missing, damaged or of another model.
    """
    cluster = result.job.cluster

    def open_files() -> Mapping[str, torch.Tensor]:
        return _Files(_import_library("safetensors"), Path(folder)) if cluster.rank == 0 else {}

    files = cluster.agree(open_files, what="opening the weights")
    return import_state_dict(result, files, strict)


class _Files(Mapping[str, torch.Tensor]):
    """Tensors by name, read on access."""

    def __init__(self, library: ModuleType, folder: Path) -> None:
        self._places: dict[str, Any] = {}
        file = folder / _INDEX
        try:
            for file in _files_of(folder):
                handle = library.safe_open(file, framework="pt")
                self._places |= dict.fromkeys(handle.keys(), handle)  # reads headers alone
        except Exception as error:  # a damaged index raises anything
            raise CheckpointError(
                f"cannot read weights from {folder}: {file.name} is missing or damaged: {error_text(error)}. "
                "Copy it again from where it came, or give another folder."
            ) from error

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._places[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _files_of(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _WEIGHTS]
    names = set(json.loads(index.read_text())["weight_map"].values())
    return [folder / name for name in sorted(names)]


def _import_library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        raise MissingPackageError(
            "safetensors",
            needed_by="reading and writing model.safetensors",
            install="pip install 'atorch-ns[hf]'",
            reason=str(error),
        ) from error


def _write_weights(library: ModuleType, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    temporary = folder / f".tmp-{_WEIGHTS}"
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}  # as save_file demands
    library.save_file(whole, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(folder / _WEIGHTS)


def _write_config(model: nn.Module, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config.save_pretrained(folder)
    document = json.loads((folder / _CONFIG).read_text())
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        document["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        document.pop("torch_dtype", None)  # transformers' older name
    # FSDP2 gives a model a new class, derived from the user's.
    user_class = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    document["architectures"] = [user_class.__name__]
    write_json(folder / _CONFIG, document)
