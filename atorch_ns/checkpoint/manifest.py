"""Manifest of a checkpoint: its origin, and every state that is not a tensor, as readable JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from atorch_ns.checkpoint.folder import MANIFEST, STEP, DamagedError, step_name, write_json
from atorch_ns.errors import CheckpointError
from atorch_ns.strategy import JSON
from atorch_ns.text import first_few

_TAG = "$"  # key of a form that JSON does not have
_BARE = (bool, int, str)  # written as they are


def encode(value: Any, *, what: str) -> JSON:
    """JSON from which :func:`decode` makes an equal value.

    Numbers (infinite ones too), texts, lists, tuples, mappings with any such keys and ``Counter`` are kept as
    they are. A tensor or array of one element becomes its number.

    Args:
        value: the value to encode.
        what: name of the value, for the message: ``"the scheduler's state"``.

    Raises:
        CheckpointError: naming the place inside ``value`` that has no such form, and its type.
    """
    if value is None or type(value) in _BARE:  # a subclass would come back as its base
        return value  # type: ignore[no-any-return]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and _num_elements(value) == 1:
        return encode(value.item(), what=what)
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if type(value) is list:
        return [encode(item, what=f"{what}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "value": encode(list(value), what=what)}
    if type(value) in (dict, Counter):
        return _encode_mapping(value, what)
    raise CheckpointError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
        "objects are not pickled. Use only numbers, strings, lists, tuples and dicts."
    )


def decode(value: JSON) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        CheckpointError: for a form that it does not write.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    content = value.get("value")
    if kind == "float" and isinstance(content, str):
        return float(content)
    if kind == "tuple":
        return tuple(decode(content))
    if kind in ("dict", "Counter") and isinstance(content, list):
        pairs = [(decode(entry[0]), decode(entry[1])) for entry in content]  # type: ignore[index]
        return Counter(dict(pairs)) if kind == "Counter" else dict(pairs)
    raise CheckpointError(f"the checkpoint holds a value of unknown form {kind!r}; a newer version wrote it.")


def plain_json(value: Any, *, what: str) -> JSON:
    """``value`` as a new copy, if JSON holds it as it is.

    Raises:
        CheckpointError: naming the place that it cannot hold.
    """
    if value is None or type(value) in _BARE or (type(value) is float and math.isfinite(value)):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain_json(item, what=f"{what}[{key!r}]") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain_json(item, what=f"{what}[{index}]") for index, item in enumerate(value)]
    raise CheckpointError(
        f"{what} is {str(value)[:80]!r}, a {type(value).__qualname__}; JSON cannot hold it."
    )


def _encode_mapping(value: dict[Any, Any], what: str) -> JSON:
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, what=f"{what}[{key!r}]") for key, item in value.items()}
    pairs: list[JSON] = [
        [encode(key, what=f"a key of {what}"), encode(item, what=f"{what}[{key!r}]")]
        for key, item in value.items()
    ]
    return {_TAG: type(value).__name__, "value": pairs}


def _num_elements(value: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else int(value.size)


# The parameters themselves, and options of how the update is computed, which are this run's own.
_NOT_SAVED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


def record_groups(
    names: Sequence[Sequence[str]], groups: Sequence[Mapping[str, Any]]
) -> tuple[GroupRecord, ...]:
    """The groups' parameter names and hyperparameters.

    Args:
        names: parameter names of each group.
        groups: the optimizer's ``param_groups``.

    Raises:
        CheckpointError: for a hyperparameter that has no form in a checkpoint.
    """
    return tuple(
        GroupRecord(params=tuple(members), options=_encode_options(group, f"param_groups[{index}]"))
        for index, (members, group) in enumerate(zip(names, groups, strict=True))
    )


def check_groups(
    records: Sequence[GroupRecord],
    names: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    *,
    ordered: bool,
) -> None:
    """Checks that every group of the optimizer can get the hyperparameters its parameters were saved with.

    Groups may be cut differently if parameters of one group, on either side, are equal on the other side.

    Args:
        records: the checkpoint's groups.
        names: parameter names of each group of the optimizer.
        groups: the optimizer's ``param_groups``.
        ordered: whether a scheduler refers to groups by their number.

    Raises:
        CheckpointError: naming the parameters that prevent it.
    """
    _check_members(records, names)
    present = record_groups(names, groups)
    cuts = [[frozenset(group.params) for group in side] for side in (records, present)]
    if cuts[0] == cuts[1] or (not ordered and set(cuts[0]) == set(cuts[1])):
        return
    if ordered:
        raise CheckpointError(
            f"the checkpoint has {len(records)} parameter group(s) and this optimizer has {len(present)}, split or ordered "
            "differently, and the scheduler counts them. Make optim_param_func return the saved groups."
        )
    _check_uniform(present, records, "a group of this optimizer mixes parameters that the checkpoint has")
    _check_uniform(records, present, "a group of the checkpoint holds parameters that this optimizer has")


def restore_groups(
    records: Sequence[GroupRecord], names: Sequence[Sequence[str]], groups: Sequence[dict[str, Any]]
) -> None:
    """Sets every group's hyperparameters to those of its parameters; call :func:`check_groups` first."""
    options = _by_name(records)
    for members, group in zip(names, groups, strict=True):
        if members:  # a group without parameters keeps its own
            for key, value in decode(options[members[0]]).items():
                group[key] = _match_form(group.get(key), value)


def _encode_options(group: Mapping[str, Any], what: str) -> dict[str, Any]:
    return {
        key: encode(_tensors_to_numbers(value), what=f"{what}[{key!r}]")
        for key, value in group.items()
        if key not in _NOT_SAVED
    }


def _tensors_to_numbers(value: Any) -> Any:
    # Learning rates and betas may be tensors, also inside a tuple.
    if isinstance(value, (tuple, list)):
        return type(value)(_tensors_to_numbers(item) for item in value)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _match_form(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor):
        present.fill_(value)  # the same tensor, which kernels may have captured
        return present
    if isinstance(present, (tuple, list)) and isinstance(value, (tuple, list)) and len(present) == len(value):
        return type(present)(_match_form(*pair) for pair in zip(present, value, strict=True))
    return value


def _check_members(records: Iterable[GroupRecord], names: Iterable[Iterable[str]]) -> None:
    saved_names = {name for group in records for name in group.params}
    present = {name for members in names for name in members}
    problems = []
    if missing := sorted(present - saved_names):
        problems.append(f"{len(missing)} that the checkpoint did not train: {first_few(missing)}")
    if extra := sorted(saved_names - present):
        problems.append(f"without {len(extra)} that it did: {first_few(extra)}")
    if problems:
        raise CheckpointError(
            f"the optimizer trains other parameters than the checkpoint's: {'; '.join(problems)}. Freeze and "
            "group parameters as they were, or use import_state_dict for the weights alone."
        )


def _check_uniform(groups: Iterable[GroupRecord], other: Sequence[GroupRecord], what: str) -> None:
    options = _by_name(other)
    for group in groups:
        first = group.params[0] if group.params else ""
        for name in group.params[1:]:
            if options[name] != options[first]:
                keys = sorted(
                    key
                    for key in options[name].keys() | options[first].keys()
                    if options[name].get(key) != options[first].get(key)
                )
                raise CheckpointError(
                    f"the parameter groups were split differently: {what} under different {', '.join(keys)}: "
                    f"{first} and {name}. Make optim_param_func return the saved groups."
                )


def _by_name(groups: Iterable[GroupRecord]) -> dict[str, dict[str, Any]]:
    return {name: group.options for group in groups for name in group.params}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")  # a newer version's fields are refused


class TensorRecord(_Record):
    """A tensor of the model: its whole shape and its dtype."""

    shape: tuple[int, ...]
    dtype: str


class FileRecord(_Record):
    """A file of tensors, or torch's index of them: its size in bytes and its CRC-32 in eight hex digits."""

    size: int
    crc32: str


class GroupRecord(_Record):
    """A parameter group: names, and hyperparameters encoded by :func:`encode`."""

    params: tuple[str, ...]
    options: dict[str, Any]


class OptimizerRecord(_Record):
    """An optimizer without its tensors.

    Attributes:
        class_name: qualified name of its class.
        groups: its parameter groups.
        values: entries of its state other than tensors, encoded, by parameter.
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
    """Content of ``manifest.json``.

    Attributes:
        format: the version of this layout.
        step: steps trained.
        world_size: number of processes that wrote it.
        strategy: the methods it was trained under, ``{"name", "config"}`` each.
        versions: versions of atorch_ns and torch.
        model_class: qualified name of the model's class.
        weights: every parameter, by its first name.
        buffers: every persistent buffer.
        extra_states: modules with an extra state of their own (a tensor).
        optimizer, scheduler, scaler: of the optimizer, scheduler, loss scaler; ``None`` if there was none.
        data: position in the data: ``epoch``, ``batches``, ``global_batch_size``; ``None`` if not counted.
        rng_digests: a digest of each rank's random states.
        extra: values of the caller.
        files: every other file of the checkpoint, by name; ``None`` where an earlier version kept no digests.
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
                f"{folder / MANIFEST} is damaged, or this version cannot read it: {issues}."
            ) from error
        if STEP.fullmatch(folder.name) and folder.name != step_name(manifest.step):
            raise DamagedError(
                f"{folder / MANIFEST} is damaged: it describes step {manifest.step}, but is in {folder.name}."
            )
        return manifest
