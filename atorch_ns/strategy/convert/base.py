"""Converter: methods and remarks collected from another system's file, and parts that such files share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from atorch_ns.errors import StrategyFileError
from atorch_ns.strategy.file import Requires
from atorch_ns.strategy.strategy import Strategy
from atorch_ns.system import table_rows

# Files of DeepSpeed are often JSON with comments and last commas. Strings match first, and stay as they are.
_STRING_OR_COMMENT: Final = re.compile(r'(?P<kept>"(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_LAST_COMMA: Final = re.compile(r'(?P<kept>"(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        StrategyFileError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise StrategyFileError(f"cannot be read: {error.strerror or error}", source=str(path)) from None


def parse_document(content: bytes, name: str) -> Any:
    """The document ``name``: YAML, or, if it begins with a bracket, JSON with comments and trailing commas.

    Raises:
        StrategyFileError: if it is neither JSON nor YAML.
    """
    try:
        text = content.decode("utf-8-sig")  # Windows editors write a byte order mark
        plain = _without_comments(text)
        return json.loads(plain) if plain.lstrip()[:1] in ("{", "[") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise StrategyFileError(
            "not readable as JSON or YAML: truncated or damaged, or with syntax beyond JSON and comments by //, # or "
            f"/* */: {reason}",
            source=name,
        ) from None


def _without_comments(text: str) -> str:
    bare_text = _STRING_OR_COMMENT.sub(lambda match: match["kept"] or " ", text)  # a space divides tokens
    return _STRING_OR_LAST_COMMA.sub(lambda match: match["kept"] or "", bare_text)


class Remark(NamedTuple):
    """A key of the other system's file, and its outcome."""

    key: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A strategy made from the file of another system.

    Attributes:
        strategy: the strategy that was made.
        source: the system: ``"atorch"``, ``"accelerate"`` or ``"deepspeed"``.
        carried: the keys that became part of the strategy, and how.
        left_out: the keys that did not, each with the reason.
        warnings: possible surprises in training for the file's author, with advice.
    """

    strategy: Strategy
    source: str
    carried: tuple[Remark, ...] = ()
    left_out: tuple[Remark, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The conversion as plain values."""
        return {
            "schema": 1,
            "source": self.source,
            "strategy": [{"name": step.name, "config": step.config} for step in self.strategy],
            "carried": [remark._asdict() for remark in self.carried],
            "left_out": [remark._asdict() for remark in self.left_out],
            "warnings": list(self.warnings),
        }


@dataclass(kw_only=True)
class Converter:
    """Collects methods and remarks. A key that nobody has remarked on is left out with a reason of its own.

    Attributes:
        document: the file's content.
        source: the system that the file belongs to.
        name: the file's path, for messages and for the folder of files that it names.
        reasons: why a key without a remark became nothing, by a pattern of its name or of a mapping around
            it; the first pattern that matches decides.
    """

    document: Mapping[str, Any]
    source: str
    name: str
    reasons: Mapping[str, str]
    _steps: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)  # configs by method
    _carried: list[Remark] = field(default_factory=list, init=False)
    _left_out: list[Remark] = field(default_factory=list, init=False)
    _warnings: list[str] = field(default_factory=list, init=False)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, with dots between nested keys. The caller records its outcome.

        The value ``"auto"``, which another program fills in later, counts as not given and is left out.
        """
        value = self.raw(key)
        if value is None:
            return default
        if value == "auto":
            self.leave(key, "'auto' is filled in by the program that reads the file; give the value itself")
            return default
        return value

    def raw(self, key: str) -> Any:
        """The value of a key as in the file, ``"auto"`` included. No outcome is recorded."""
        value: Any = self.document
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def flag(self, key: str, *, on: str, off: str) -> bool:
        """Whether a key is present and true. Carries it as ``on`` or ``off``, with ``{}`` for its value."""
        value = self.take(key)
        if value is None:
            return False
        is_on = self.switch(key, value)
        self.carry(key, (on if is_on else off).format(value))
        return is_on

    def switch(self, key: str, value: Any) -> bool:
        """A yes or no, as YAML and shells write it; raises StrategyFileError for anything else."""
        text = str(value).lower()
        if text not in _SWITCHES:
            raise self.wrong(key, value, "true, false")
        return _SWITCHES[text]

    def number(self, key: str, value: Any) -> int:
        """A positive whole number; raises StrategyFileError for anything else."""
        text = str(value).strip()
        if isinstance(value, bool) or not text.isdecimal() or int(text) < 1:
            raise self.wrong(key, value, "a whole number from 1 on")
        return int(text)

    def use(self, method: str, **config: Any) -> None:
        """Adds a method, or keys to the config of one that is there."""
        self._steps.setdefault(method, {}).update(config)

    def drop(self, method: str) -> None:
        """Takes a method back."""
        self._steps.pop(method, None)

    def config(self, method: str) -> dict[str, Any] | None:
        """The config of a method that is used; ``None`` if it is not."""
        return self._steps.get(method)

    def carry(self, key: str, text: str) -> None:
        """Records the counterpart of a key."""
        self._carried.append(Remark(key, text))

    def leave(self, key: str, reason: str) -> None:
        """Records why a key has no counterpart."""
        remark = Remark(key, reason)
        if remark not in self._left_out:
            self._left_out.append(remark)

    def has_remark(self, key: str) -> bool:
        """Whether a key, or a mapping that it is in, has a remark."""
        keys = {remark.key for remark in (*self._carried, *self._left_out)}
        return any(key == each or key.startswith(f"{each}.") for each in keys)

    def warn(self, text: str) -> None:
        """Adds a warning about a surprise in training for the file's author, with advice."""
        self._warnings.append(text)

    def absorb(self, other: Converter, *, prefix: str) -> None:
        """Takes over methods and remarks of another file that this one names; ``prefix`` marks its keys."""
        other._leave_the_rest()  # with reasons of its own system
        for method, config in other._steps.items():
            self.use(method, **config)
        self._carried += [Remark(f"{prefix}{key}", text) for key, text in other._carried]
        self._left_out += [Remark(f"{prefix}{key}", text) for key, text in other._left_out]
        self._warnings += other._warnings

    def finish(self, requires: Requires) -> Conversion:
        """The conversion. ``requires`` is the setting from the file."""
        self._leave_the_rest()
        steps = [(name, self._steps[name] or None) for name in _ORDER if name in self._steps]
        provenance = {"converted_from": f"{self.source} config"}
        return Conversion(
            strategy=Strategy(steps, requires=requires, provenance=provenance),
            source=self.source,
            carried=tuple(self._carried),
            left_out=tuple(self._left_out),
            warnings=tuple(self._warnings),
        )

    def wrong(self, key: str, value: Any, options: str) -> StrategyFileError:
        """The error for a value that means nothing."""
        return StrategyFileError(f"{key}={value!r} means nothing here. Accepted: {options}", source=self.name)

    def _leave_the_rest(self) -> None:
        for key in [key for key in _leaf_keys(self.document) if not self.has_remark(key)]:
            matching = (
                reason
                for pattern, reason in self.reasons.items()
                if fnmatchcase(key, pattern) or key.startswith(f"{pattern}.")
            )
            self.leave(key, next(matching, "this version knows no counterpart"))  # the first that matches


_SWITCHES: Final = {  # as YAML and shells write them
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0", "none"), False),
}
# Order of converted methods in the strategy.
_ORDER: Final = (
    "parallel_mode", "pipeline_parallel", "tensor_parallel", "half", "amp_native", "fp8", "checkpoint",
    "ddp", "zero1", "zero2", "fsdp", "optimizer_offload", "compile", "gradient_accumulation",
)  # fmt: skip


def _leaf_keys(document: Mapping[str, Any], before: str = "") -> list[str]:
    names = []
    for key, value in document.items():
        name = f"{before}{key}"
        names += _leaf_keys(value, f"{name}.") if isinstance(value, Mapping) and value else [name]
    return names


_AXIS_ORDER: Final = ("tensor", "sequence", "expert", "zero", "data", "pipeline")  # innermost first


def use_axes(converter: Converter, sizes: Mapping[str, int], *, processes: int | None = None) -> None:
    """Adds ``parallel_mode`` with the axes that are larger than 1, the innermost first.

    ``data`` takes the processes that are left, where the file says how many there are.

    Raises:
        StrategyFileError: if the other sizes do not divide ``processes``.
    """
    large = {axis: size for axis, size in sizes.items() if size > 1}
    if not large:
        return
    # All axes but data have sizes in the file; data takes the processes that are left.
    others = math.prod(size for axis, size in large.items() if axis != "data")
    if processes is not None:
        if processes % others:
            parts = ", ".join(f"{axis}={size}" for axis, size in large.items() if axis != "data")
            raise converter.wrong("num_processes", processes, f"a multiple of {others}, required by {parts}")
        if large.get("data", 1) != processes // others:
            large["data"] = processes // others
            converter.carry("the axis data", f"{large['data']}: the ranks that are left")
    else:
        # Named although it is 1: an axis that is added when the job starts stands outside of all others.
        large.setdefault("data", 1)
        converter.carry("the axis data", "takes the ranks that are left; it is fitted when the job starts")
    converter.use("parallel_mode", axes=[[axis, large[axis]] for axis in _AXIS_ORDER if axis in large])


def read_degrees(converter: Converter, axes: Mapping[str, str], *, methods: bool) -> dict[str, int]:
    """The sizes of the axes that keys give, by name; those of 1 are left out.

    Args:
        converter: the file's converter.
        axes: the axis that each key gives the size of.
        methods: whether the method of each axis is added; else two keys for one axis are an error.

    Raises:
        StrategyFileError: for a size that is not a positive whole number, or a second one.
    """
    sizes: dict[str, int] = {}
    for key, axis in axes.items():
        value = converter.take(key)
        if value is None:
            continue
        size = converter.number(key, value)
        if size == 1:
            converter.carry(key, "1: nothing to divide")
            continue
        if methods:
            converter.use(f"{axis}_parallel")
        elif axis in sizes:
            raise converter.wrong(key, value, f"1, since another key sets the size of the axis {axis}")
        sizes[axis] = size
        converter.carry(key, f"{value} → the axis {axis} of parallel_mode")
    return sizes


def read_reasons(source: str) -> dict[str, str]:
    """Reasons why keys of another system have no counterpart, by key pattern, from ``reasons.csv``."""
    rows = table_rows(Path(__file__).with_name("reasons.csv"))
    return {row["key"]: row["reason"] for row in rows if row["source"] == source}


def read_recomputation(converter: Converter, key: str) -> None:
    """Adds ``checkpoint`` where the key is on."""
    if converter.flag(key, on="true → checkpoint", off="false: nothing is recomputed"):
        converter.use("checkpoint")


def read_accumulation(converter: Converter, key: str) -> None:
    """Adds gradient accumulation where the key is more than one."""
    value = converter.take(key)
    if value is None:
        return
    steps = converter.number(key, value)
    if steps == 1:
        converter.carry(key, "1: every batch is computed in one pass")
        return
    converter.use("gradient_accumulation", num_micro_batches=steps)
    converter.carry(
        key,
        f"{steps} → gradient_accumulation: train_step splits each batch into {steps}, so the loader gives the "
        "batch of a whole optimizer step",
    )


def read_clipping(converter: Converter, key: str) -> None:
    """Leaves the norm that gradients are clipped to: it is not part of a strategy."""
    norm = converter.take(key)
    if norm is not None:
        converter.leave(key, f"an argument of auto_accelerate: max_grad_norm={norm}")


_TOGETHER: Final = "parameters, gradients and optimizer states together, each rank its shard"
_LOST: Final = {
    "optimizer": "host memory must hold the optimizer states as well, 12 bytes of each parameter with Adam and fp32 "
    "masters, divided over the ranks",
    "param": "host memory must hold the parameters as well, divided over the ranks",
}


def read_offload(
    converter: Converter, method: str, devices: Mapping[str, tuple[str, Any]], *, one_process: bool = False
) -> None:
    """Adds the method for offloading to host memory. Read the precision first, since it limits the choice.

    Args:
        converter: holds the precision and the method of the ZeRO stage.
        method: the stage's method: ``ddp``, ``zero1``, ``zero2`` or ``fsdp``.
        devices: the key that was read and its device, or ``None``, of ``"optimizer"`` and ``"param"``.
        one_process: whether the file says that there is only one.

    Raises:
        StrategyFileError: for a device other than none, cpu and nvme.
    """
    targets = {}
    for part, (key, value) in devices.items():
        device = "none" if value is None else str(value).lower()
        if device not in ("none", "cpu", "nvme"):
            raise converter.wrong(key, value, "none, cpu, nvme")
        if device != "none":
            targets[part] = (key, device)
        elif value is not None:
            converter.carry(key, "none: nothing is offloaded")
    # What DeepSpeed itself does not offload in this stage is left out, with the reason.
    if method == "ddp":
        for part, (key, device) in targets.items():
            least = "1" if part == "optimizer" else "3"
            converter.leave(
                key,
                f"{device}: DeepSpeed offloads this from stage {least} on. optimizer_offload with ddp keeps optimizer "
                "states on the host, in fp32 or bf16",
            )
        return
    if method != "fsdp" and "param" in targets:
        converter.leave(targets.pop("param")[0], "DeepSpeed offloads parameters in stage 3 only")
    if not targets:
        return
    target = _into_host_memory(converter, method, one_process=one_process)
    for part, (key, device) in targets.items():
        if device == "cpu":
            converter.carry(key, f"cpu → {target}")
        else:
            converter.leave(key, f"nvme: nothing is kept on NVMe, so {_LOST[part]}. Now: {target}")


def _into_host_memory(converter: Converter, method: str, *, one_process: bool) -> str:
    """Adds the offloading method, and returns its effect in words."""
    if method == "fsdp":
        converter.use("fsdp", cpu_offload=True)
        return f"fsdp.cpu_offload: {_TOGETHER}"
    fp16 = any((converter.config(name) or {}).get("dtype") == "fp16" for name in ("half", "amp_native"))
    converter.drop(method)  # the method that offloads takes its place
    if one_process and not fp16:
        converter.use("optimizer_offload")
        return f"optimizer_offload, without {method}, which has nothing to shard over in one process"
    converter.use("zero2", cpu_offload=True)
    other = (
        "optimizer_offload would leave parameters on the device, but refuses fp16"
        if fp16
        else f"to leave parameters on the device, name ddp and optimizer_offload instead of {method}: then the host "
        "holds the states of the whole model for every rank"
    )
    return f"zero2.cpu_offload: {_TOGETHER}; {other}"
