"""A division problem: the options of a model's operators, the values between them, and the price of a choice.

Operators that are equal in every layer are one node, with the number of its instances. A value goes from a
result of a node to its *uses*. A use is the readers of the value in one segment of the model, such as a
layer. Those that need the same label share one conversion. Labels are any hashable objects. A value from
outside has a node with one option and no inputs, which fixes its label.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from typing import NamedTuple

from atorch_ns.errors import InputError

Label = Hashable
"""A placement under any name, such as ``"R"``, ``"P"`` or ``"0"``."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a node. Costs cover all instances, unless noted otherwise.

    Attributes:
        outputs: the label of each result.
        needs: the label needed for each of :attr:`OperatorNode.inputs`.
        seconds: time of the forward and the backward pass.
        forward_seconds: the part of ``seconds`` that recomputation repeats.
        resident: bytes that are always held, such as parameters and optimizer states.
        gradients: bytes that are added in the backward pass, while saved tensors are freed.
        saved: bytes held until the backward pass besides inputs and results, such as masks.
        transient: peak bytes that one instance holds only while it runs.
    """

    outputs: tuple[Label, ...] = ()
    needs: tuple[Label, ...] = ()
    seconds: float = 0.0
    forward_seconds: float = 0.0
    resident: float = 0.0
    gradients: float = 0.0
    saved: float = 0.0
    transient: float = 0.0


class Input(NamedTuple):
    """A value that a node reads: index in :attr:`PlacementProblem.uses`, and whether autograd saves it."""

    use: int
    saved: bool = False


@dataclass(frozen=True, kw_only=True)
class OperatorNode:
    """A class of equal operators.

    Attributes:
        name: name in messages.
        options: the ways to run it. A single option is a fixed choice.
        inputs: the values that it reads. If an argument has several values, such as the embedding in the
            first layer and a layer's result in others, it is listed for each, and every option needs the same
            label of them.
        count: the number of instances.
        group: the recomputation group, a key of :attr:`PlacementProblem.groups`; empty for none.
    """

    name: str
    options: tuple[Option, ...]
    inputs: tuple[Input, ...] = ()
    count: int = 1
    group: str = ""


class ConversionCost(NamedTuple):
    """Cost of converting one instance of a value, forward and backward. Recomputation repeats
    ``forward_seconds``. A copy, such as a gathered parameter, is held until the backward pass."""

    seconds: float = 0.0
    bytes_moved: float = 0.0
    forward_seconds: float = 0.0
    copy_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Use:
    """The readers of a value in one segment of the model, all in the same recomputation group or in none.

    Attributes:
        node, result: the node that produces the value, and the index of the value among its results.
        conversions: cost by ``(given label, needed label)``, equal labels too. Other pairs are impossible.
        saved: bytes of one instance by needed label, held until the backward pass if a reader saves it.
        count: the number of instances.
        enters: whether it enters the recomputed part from outside, so it is converted once and always held.
    """

    node: int
    result: int = 0
    conversions: Mapping[tuple[Label, Label], ConversionCost]
    saved: Mapping[Label, float] = field(default_factory=dict)
    count: int = 1
    enters: bool = False

    def label(self, option: Option) -> Label:
        """The label of the value under an option of its node."""
        return option.outputs[self.result]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes in ``count`` copies, recomputed together if ``recomputed``. ``None``: the solver decides."""

    count: int = 1
    recomputed: bool | None = None


class UseReader(NamedTuple):
    """The node that reads a use, and the position of the use among its inputs."""

    node: int
    position: int

    def label(self, option: Option) -> Label:
        """The label that an option of the node needs."""
        return option.needs[self.position]


@dataclass(frozen=True)
class PlacementProblem:
    """Nodes, the values between them, and groups of nodes that may be recomputed.

    Attributes:
        host_seconds: lower bound of a step's time under any division, since the host starts all operators.
    """

    nodes: tuple[OperatorNode, ...]
    uses: tuple[Use, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    host_seconds: float = 0.0

    def __post_init__(self) -> None:
        for node in self.nodes:
            assert node.options, f"{node.name} has no option"
            assert not node.group or node.group in self.groups, f"{node.name} is of an unknown group"
            for option in node.options:
                assert len(option.needs) == len(node.inputs), f"{node.name}: {option} does not fit its inputs"
        for use, readers in zip(self.uses, self.readers, strict=True):
            source = self.nodes[use.node]
            assert all(len(option.outputs) > use.result for option in source.options), (
                f"{source.name}: results"
            )
            assert len({self.nodes[reader.node].group for reader in readers}) < 2, (
                f"{source.name}: groups of a use"
            )

    @cached_property
    def readers(self) -> tuple[tuple[UseReader, ...], ...]:
        """The readers of each use."""
        by_use: list[list[UseReader]] = [[] for _ in self.uses]
        for index, node in enumerate(self.nodes):
            for position, read in enumerate(node.inputs):
                by_use[read.use].append(UseReader(index, position))
        return tuple(map(tuple, by_use))

    def read(self) -> Iterator[tuple[Use, tuple[UseReader, ...], str]]:
        """Each use that has readers, with its readers and the name of their group."""
        for use, readers in zip(self.uses, self.readers, strict=True):
            if readers:
                yield use, readers, self.nodes[readers[0].node].group

    def saves(self, reader: UseReader) -> bool:
        """Whether a reader saves what it reads for the backward pass."""
        return self.nodes[reader.node].inputs[reader.position].saved

    def saved_bytes(
        self, use: Use, readers: Sequence[UseReader], options: Sequence[Option], *, is_recomputed: bool
    ) -> float:
        """Bytes that autograd saves for one instance of a use, in a recomputed group or not."""
        holds_all = is_recomputed and use.enters  # held for recomputation, even if no reader saves it
        labels = {entry.label(options[entry.node]) for entry in readers if holds_all or self.saves(entry)}
        return sum(use.saved.get(label, 0.0) for label in labels)

    @property
    def always_recomputed(self) -> frozenset[str]:
        """The groups that are always recomputed."""
        return frozenset(name for name, group in self.groups.items() if group.recomputed)


@dataclass(frozen=True, kw_only=True)
class Price:
    """The costs of a choice.

    Attributes:
        compute_seconds, conversion_seconds: time of all operators and conversions, recomputation included.
        bytes_moved: bytes that conversions move, without recomputation.
        resident: bytes that are always held.
        gradients: bytes of gradients that replace activations in the backward pass.
        saved: bytes held until the backward pass.
        transient: bytes of the two largest peaks inside operators.
        recomputing: bytes that the largest recomputed group saves while its backward pass runs.
    """

    compute_seconds: float
    conversion_seconds: float
    bytes_moved: float
    resident: float
    gradients: float
    saved: float
    transient: float
    recomputing: float
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of operators and conversions, at least the time to start them."""
        return max(self.compute_seconds + self.conversion_seconds, self.host_seconds)

    @property
    def memory(self) -> float:
        """Peak bytes. In the backward pass gradients are added while saved tensors are freed."""
        return self.resident + max(self.saved, self.gradients) + self.transient + self.recomputing


def price(
    problem: PlacementProblem, choices: Sequence[int], recomputed: Collection[str] | None = None
) -> Price:
    """The price of a choice of one option per node.

    Args:
        recomputed: the groups that are recomputed; ``None`` for :attr:`PlacementProblem.always_recomputed`.

    Raises:
        InputError: if a value cannot be converted to a needed label.
    """
    again = problem.always_recomputed if recomputed is None else recomputed
    nodes = problem.nodes
    options = [node.options[choice] for node, choice in zip(nodes, choices, strict=True)]
    conversion_seconds = bytes_moved = saved_bytes = 0.0
    inner = dict.fromkeys(again, 0.0)  # bytes that one instance of a recomputed group saves
    for use, readers, group in problem.read():
        is_repeated = group in again and not use.enters  # computed anew in the backward pass
        conversions = shared_conversions(problem, use, readers, options).values()
        for conversion in conversions:
            repeat_seconds = conversion.forward_seconds if is_repeated else 0.0
            conversion_seconds += use.count * (conversion.seconds + repeat_seconds)
            bytes_moved += use.count * conversion.bytes_moved
        copies = sum(conversion.copy_bytes for conversion in conversions)
        saved = problem.saved_bytes(use, readers, options, is_recomputed=group in again)
        num_bytes = use.count * (copies + saved)
        if is_repeated:
            inner[group] += num_bytes / problem.groups[group].count  # one instance is recomputed at a time
        else:
            saved_bytes += num_bytes
    for option, node in zip(options, nodes, strict=True):
        if node.group in again:
            inner[node.group] += option.saved / problem.groups[node.group].count
        else:
            saved_bytes += option.saved
    peaks = [  # both of the largest may be of one node, if it has two instances
        entry.transient for entry, node in zip(options, nodes, strict=True) for _ in range(min(2, node.count))
    ]
    return Price(
        compute_seconds=sum(
            entry.seconds + (entry.forward_seconds if node.group in again else 0.0)
            for entry, node in zip(options, nodes, strict=True)
        ),
        conversion_seconds=conversion_seconds,
        bytes_moved=bytes_moved,
        resident=sum(entry.resident for entry in options),
        gradients=sum(entry.gradients for entry in options),
        saved=saved_bytes,
        transient=sum(nlargest(2, peaks)),
        recomputing=max(inner.values(), default=0.0),
        host_seconds=problem.host_seconds,
    )


def shared_conversions(
    problem: PlacementProblem, use: Use, readers: Sequence[UseReader], options: Sequence[Option]
) -> dict[UseReader, ConversionCost]:
    """The conversions of a use by reader. Readers of the same label share one, listed by the last of them.

    Raises:
        InputError: as :func:`price`.
    """
    label = use.label(options[use.node])
    by_label = {reader.label(options[reader.node]): reader for reader in readers}
    for target, reader in by_label.items():
        if (label, target) not in use.conversions:
            raise InputError(
                f"{problem.nodes[use.node].name} gives {label}, but {problem.nodes[reader.node].name} needs {target}, and "
                f"there is no conversion between them. Choose another option for one of the two."
            )
    return {reader: use.conversions[label, target] for target, reader in by_label.items()}
