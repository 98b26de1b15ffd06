"""Segments of the whole model, from recorded steps in all precisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from atorch_ns.capture.blocks import num_experts
from atorch_ns.capture.structure import Container
from atorch_ns.profile.analysis import (
    Divisible,
    MeasuredRecording,
    costs_of,
    divided_operands,
    kernel_operands,
    kinds_of,
)
from atorch_ns.profile.record.recorder import Occurrence, Recording
from atorch_ns.profile.record.steps import RecordedStep, TracedModel
from atorch_ns.profile.trace import Growth, ParameterSpec, Segment, by_divisor, by_lengths, by_samples


class Stretch(NamedTuple):
    """A stretch of the whole model's forward pass.

    Attributes:
        block: path of the block in the user's model; empty for code between blocks.
        recorded: index among the recorded stretches.
    """

    block: str
    recorded: int


def merge_stretches(
    occurrences: Sequence[Occurrence], work_flags: Sequence[bool], use_flags: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """Groups recorded stretches into segments.

    A stretch between blocks that does nothing belongs to the block before it, and so does one between two
    blocks of one container that uses no parameters.

    Args:
        work_flags, use_flags: whether each stretch ran an operator, and whether it used a parameter.

    Returns:
        The segment that each recorded stretch belongs to, and the first recorded stretch of each segment.
    """
    segment_of: list[int] = []
    firsts: list[int] = []
    for index, occurrence in enumerate(occurrences):
        joins = (
            not occurrence.block
            and firsts
            and (not work_flags[index] or _is_between_siblings(occurrences, index, use_flags))
        )
        if not joins and (occurrence.block or work_flags[index] or len(occurrences) == 1):
            firsts.append(index)
        segment_of.append(max(len(firsts) - 1, 0))  # what does nothing before the first segment joins it
    return segment_of, firsts


def _is_between_siblings(occurrences: Sequence[Occurrence], index: int, use_flags: Sequence[bool]) -> bool:
    if use_flags[index] or not 0 < index < len(occurrences) - 1:
        return False
    before, after = (occurrences[index + step].block.rpartition(".")[0] for step in (-1, 1))
    return before == after


def unfold(
    occurrences: Sequence[Occurrence], firsts: Sequence[int], containers: Mapping[str, Container]
) -> list[Stretch] | None:
    """The stretches of the whole model; ``None`` if the kept blocks did not run once each and in order.

    Blocks of one kind must also have been called with equal shapes, or they do not stand for each other.
    """
    by_copy = {
        container.copy_path(index): (container, index)
        for container in containers.values()
        for index in range(len(container.kept))
    }
    stretches: list[Stretch] = []
    position = 0
    paths: set[str] = set()  # containers whose blocks have run
    while position < len(firsts):
        occurrence = occurrences[firsts[position]]
        if occurrence.block not in by_copy:
            stretches.append(Stretch(occurrence.block, position))
            position += 1
            continue
        container, _ = by_copy[occurrence.block]
        run = [occurrences[first] for first in firsts[position : position + len(container.kept)]]
        copy_paths = [container.copy_path(index) for index in range(len(container.kept))]
        if container.path in paths or [call.block for call in run] != copy_paths:
            return None
        shapes: dict[str, object] = {}  # inputs of the first block of each kind
        if any(
            shapes.setdefault(kind, call.inputs) != call.inputs
            for kind, call in zip(container.kinds, run, strict=True)
        ):
            return None
        paths.add(container.path)
        stretches += [
            Stretch(path, position + index)
            for path, index in zip(container.blocks, container.stands_for, strict=True)
        ]
        position += len(container.kept)
    return stretches


def _mark_divisible(segment: Segment, kind: Divisible, num_experts: int) -> Segment:
    specs = []
    layers = {_expert_layer(spec, num_experts) for spec in segment.parameters} - {None}  # of experts
    for spec in segment.parameters:
        is_bias = spec.shape[:1] == (num_experts,) and spec.name.rpartition(".")[0] in layers
        is_expert = is_bias or _expert_layer(spec, num_experts) is not None
        fields = kind.parameters.get(spec.name, kind.parameters.get(spec.tied_to or "", {}))
        specs.append(replace(spec, is_expert=is_expert, **fields))
    return replace(segment, parameters=tuple(specs), num_routed=len(layers), **kind.fields)


def _expert_layer(spec: ParameterSpec, num_experts: int) -> str | None:
    """The layer of experts that a parameter belongs to; ``None`` for other parameters."""
    owner, _, _ = spec.name.rpartition(".")
    if num_experts < 2:
        return None
    if len(spec.shape) > 2 and spec.shape[0] == num_experts:
        return owner  # one tensor for all experts
    parts = spec.name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part == "experts" and parts[index + 1].isdigit():
            return ".".join(parts[: index + 1])  # a list of modules, one for each expert
    return None


def _with_incoming(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    later: dict[str, Growth] = {}  # what later segments keep, by precision
    result = []
    for segment in reversed(segments):  # in the order of the backward pass
        costs = {}
        for key, cost in segment.costs.items():
            costs[key] = replace(cost, incoming=later.get(key, Growth()))
            later[key] = costs[key].incoming + cost.kept * segment.count
        result.append(replace(segment, costs=MappingProxyType(costs)))
    return tuple(reversed(result))


def _is_same_block(first: Segment, second: Segment) -> bool:
    return first.is_block and replace(first, name="", paths=()) == replace(second, name="", paths=())


class _Maker:
    """Makes segments without costs. Unused parameters belong to the first stretch between blocks."""

    def __init__(
        self,
        model: nn.Module,
        stretches: Sequence[Stretch],
        fingerprints: Mapping[str, str],
        uses: Mapping[str, Sequence[int]],
    ) -> None:
        self._model = model
        self._stretches = stretches
        self._fingerprints = fingerprints
        self._uses = uses
        self._called_blocks: set[str] = set()  # blocks with a segment
        self._names: dict[int, list[str]] = {}  # all names of a parameter, by id
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
            self._parameters[name] = parameter
        blocks = {stretch.block for stretch in stretches if stretch.block}
        self._in_blocks = tuple(f"{block}." for block in blocks)
        self._home = next((i for i, stretch in enumerate(stretches) if not stretch.block), 0)

    def make(self, index: int) -> Segment:
        """The segment of one stretch."""
        path = self._stretches[index].block
        return self._block_segment(path) if path else self._segment_between_blocks(index)

    def _block_segment(self, path: str) -> Segment:
        module = self._model.get_submodule(path)
        again = path in self._called_blocks  # a block that is called twice has its parameters once
        self._called_blocks.add(path)
        specs = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = self._names[id(parameter)][0]
            tied_to = None if first == f"{path}.{name}" and not again else first
            specs.append(_parameter_spec(name, parameter, tied_to))
        return Segment(
            name=path,
            paths=(path,),
            block_class=type(module).__name__,
            fingerprint=self._fingerprints[path],
            parameters=tuple(specs),
            buffer_bytes=0 if again else _num_bytes(module.buffers()),
        )

    def _segment_between_blocks(self, index: int) -> Segment:
        number = self._stretches[index].recorded
        specs = []
        for first, places in self._uses.items():
            order = list(dict.fromkeys(places))
            if number not in order:
                continue
            names = self._names[id(self._parameters[first])]
            name = names[min(order.index(number), len(names) - 1)]
            again = order.index(number) > 0 or first != names[0]
            specs.append(_parameter_spec(name, self._parameters[first], names[0] if again else None))
        buffers = 0
        if index == self._home:  # the first stretch between blocks
            specs += self._unused_specs()
            inside = {
                id(b) for name in self._in_blocks for b in self._model.get_submodule(name[:-1]).buffers()
            }
            buffers = _num_bytes(b for b in self._model.buffers() if id(b) not in inside)
        return Segment(name=_make_name(self._stretches, index), parameters=tuple(specs), buffer_bytes=buffers)

    def _unused_specs(self) -> list[ParameterSpec]:
        numbers = {stretch.recorded for stretch in self._stretches}
        in_use = {name for name, places in self._uses.items() if numbers.intersection(places)}
        return [
            _parameter_spec(names[0], self._parameters[names[0]], None)
            for names in self._names.values()
            if not in_use.intersection(names) and not any(name.startswith(self._in_blocks) for name in names)
        ]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _make_name(stretches: Sequence[Stretch], index: int) -> str:
    before = next((s.block for s in reversed(stretches[:index]) if s.block), "")
    after = next((s.block for s in stretches[index + 1 :] if s.block), "")
    before, after = (path.rpartition(".")[0] or path for path in (before, after))
    if before and after:
        return f"between {before} and {after}" if before != after else f"within {before}"
    return f"after {before}" if before else f"before {after}" if after else "model"


def _parameter_spec(name: str, parameter: nn.Parameter, tied_to: str | None) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        trainable=parameter.requires_grad,
        tied_to=tied_to,
    )


class DifferentEventsError(Exception):
    """Steps that should have run the same operators did not, or blocks did not run as their list has them."""


def segments_of(
    subject: TracedModel, steps: Mapping[str, Sequence[RecordedStep]], containers: Mapping[str, Container]
) -> tuple[Segment, ...]:
    """The segments of the whole model, with consecutive equal blocks as one.

    Args:
        steps: recorded steps by precision key: of one B that shows what grows with it, at one T or at
            three; or of two B at one T.
        containers: the containers that were shortened.

    Raises:
        DifferentEventsError: if the steps cannot be compared.
    """
    firsts_of_each = [group[0] for group in steps.values()]
    blocks = [occurrence.block for occurrence in firsts_of_each[0].occurrences]
    for step in firsts_of_each:
        if [occurrence.block for occurrence in step.occurrences] != blocks:
            raise DifferentEventsError("the precisions call the blocks in different orders")
    work_flags = [any(flags) for flags in zip(*(step.worked() for step in firsts_of_each), strict=True)]
    use_flags = [any(flags) for flags in zip(*(step.used() for step in firsts_of_each), strict=True)]
    segment_of, firsts = merge_stretches(firsts_of_each[0].occurrences, work_flags, use_flags)
    stretches = unfold(firsts_of_each[0].occurrences, firsts, containers)
    if stretches is None:
        raise DifferentEventsError("blocks of one kind did not run once each, in order, with equal shapes")
    costs = {key: costs_of(_combine_steps(group, subject.at), segment_of) for key, group in steps.items()}
    uses = {
        name: [segment_of[position] for position in places] for name, places in firsts_of_each[0].uses.items()
    }
    kinds = kinds_of(firsts_of_each[0], segment_of, firsts)
    maker = _Maker(subject.model, stretches, subject.fingerprints, uses)
    experts = num_experts(subject.model)
    segments: list[Segment] = []
    for index, stretch in enumerate(stretches):
        group = {key: values[stretch.recorded] for key, values in costs.items()}
        segment = _mark_divisible(replace(maker.make(index), costs=group), kinds[stretch.recorded], experts)
        if segments and _is_same_block(segments[-1], segment):
            segments[-1] = replace(segments[-1], paths=segments[-1].paths + segment.paths)
        else:
            segments.append(segment)
    return _with_incoming(segments)


def _combine_steps(steps: Sequence[RecordedStep], at: tuple[int, int]) -> MeasuredRecording:
    first = steps[0]
    if not all(first.recording.same_events(step.recording) for step in steps[1:]):
        raise DifferentEventsError("the steps with other sizes ran different operators")
    recordings = [step.recording for step in steps]
    return MeasuredRecording(
        recording=first.recording,
        division=first.division,
        sizes=_fit_coefficients([recording.sizes for recording in recordings], steps, at[0]),
        moved=_sum_coefficients([recording.moved for recording in recordings], steps, at[0]),
        divided=_sum_coefficients(
            _masked_bytes(recordings, divided_operands(first.recording, first.division)), steps, at[0]
        ),
        fused=_sum_coefficients(_masked_bytes(recordings, kernel_operands(first.recording)), steps, at[0]),
        outputs=_sum_coefficients(
            [[call.outputs for call in step.occurrences] for step in steps], steps, at[0]
        ),
        at=at,
    )


def _masked_bytes(
    recordings: Sequence[Recording], masks: Sequence[Sequence[bool]]
) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(compress(sizes, mask)) for sizes, mask in zip(recording.moved, masks, strict=True)]
        for recording in recordings
    ]


def _fit_coefficients(values: Sequence[Sequence[int]], steps: Sequence[RecordedStep], at: int) -> np.ndarray:
    if len({step.sizes[0] for step in steps}) > 1:  # two B, of real steps
        return by_samples(values, [step.sizes[0] for step in steps])
    each = [by_divisor(row, steps[0].sizes[0], at) for row in values]  # one B, at one T or at three
    return each[0] if len(steps) == 1 else by_lengths(each, [step.sizes[1] for step in steps])


def _sum_coefficients(
    values: Sequence[Sequence[tuple[int, ...]]], steps: Sequence[RecordedStep], at: int
) -> np.ndarray:
    # Term by term, since the divisor tells of a term whether it grows, but not of a sum of both kinds.
    terms = _fit_coefficients([[size for group in row for size in group] for row in values], steps, at)
    owners = np.repeat(np.arange(len(values[0])), [len(group) for group in values[0]])  # [terms] row of each
    sums = np.zeros((len(values[0]), 4))
    np.add.at(sums, owners, terms)
    return sums
