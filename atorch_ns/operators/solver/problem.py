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
"""A placement, by any name: such as ``"R"``, ``"P"`` or ``"0"``."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a node. Costs are of all instances together, unless said otherwise.

    Attributes:
        outputs: the label of each result.
        needs: the label in which each of :attr:`OperatorNode.inputs` is needed.
        seconds: time of the forward and the backward pass.
        forward_seconds: the part of it that is paid once more where the node is recomputed.
        resident: bytes that are always held: parameters, optimizer states.
        gradients: bytes that come in the backward pass, while what is saved goes.
        saved: bytes held until the backward pass beside inputs and results, such as masks.
        transient: bytes that one instance holds only while it runs, at their peak.
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
    """A value that a node reads: its index in :attr:`PlacementProblem.uses`; whether autograd saves it."""

    use: int
    saved: bool = False


@dataclass(frozen=True, kw_only=True)
class OperatorNode:
    """A class of equal operators.

    Attributes:
        name: as messages show it.
        options: the ways to run it; one is a fixed choice.
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
        node, result: the node that gives the value, and the position of the value among its results.
        conversions: cost by ``(label given, label needed)``, also of equal labels; others are impossible.
        saved: bytes of one instance by label needed, held until the backward pass if a reader saves it.
        count: the number of instances.
        enters: whether it comes from outside of the recomputed part, converted once and always held.
    """

    node: int
    result: int = 0
    conversions: Mapping[tuple[Label, Label], ConversionCost]
    saved: Mapping[Label, float] = field(default_factory=dict)
    count: int = 1
    enters: bool = False

    def label(self, option: Option) -> Label:
        """The label that an option of the node gives to the value."""
        return option.outputs[self.result]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes in ``count`` copies, recomputed together if ``recomputed``; ``None`` leaves it to the solver."""

    count: int = 1
    recomputed: bool | None = None


class UseReader(NamedTuple):
    """The node that reads a use, and the position of the use among its inputs."""

    node: int
    position: int

    def label(self, option: Option) -> Label:
        """The label in which an option of the node needs the value."""
        return option.needs[self.position]


@dataclass(frozen=True)
class PlacementProblem:
    """Nodes, the values between them, and groups of nodes that may be recomputed.

    Attributes:
        host_seconds: the least that a step takes, however it is divided: a host starts all operators.
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
        """The uses that have readers, with them and the name of their group."""
        for use, readers in zip(self.uses, self.readers, strict=True):
            if readers:
                yield use, readers, self.nodes[readers[0].node].group

    def saves(self, reader: UseReader) -> bool:
        """Whether a reader saves what it reads for the backward pass."""
        return self.nodes[reader.node].inputs[reader.position].saved

    def saved_bytes(
        self, use: Use, readers: Sequence[UseReader], options: Sequence[Option], *, is_recomputed: bool
    ) -> float:
        """Bytes of one instance of a use that its readers, of a recomputed group or not, let autograd save."""
        holds_all = is_recomputed and use.enters  # held for recomputation, even if no reader saves it
        labels = {entry.label(options[entry.node]) for entry in readers if holds_all or self.saves(entry)}
        return sum(use.saved.get(label, 0.0) for label in labels)

    @property
    def always_recomputed(self) -> frozenset[str]:
        """The groups that are recomputed in any case."""
        return frozenset(name for name, group in self.groups.items() if group.recomputed)


@dataclass(frozen=True, kw_only=True)
class Price:
    """The costs of a choice.

    Attributes:
        compute_seconds, conversion_seconds: time of all operators and conversions, recomputation included.
        bytes_moved: bytes that conversions move, without recomputation.
        resident: bytes that are always held.
        gradients: bytes of gradients that stand where activations stood.
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
        """Time of operators and conversions, or of starting them."""
        return max(self.compute_seconds + self.conversion_seconds, self.host_seconds)

    @property
    def memory(self) -> float:
        """The most bytes at one time: in the backward pass gradients come as what was saved goes."""
        return self.resident + max(self.saved, self.gradients) + self.transient + self.recomputing


def price(
    problem: PlacementProblem, choices: Sequence[int], recomputed: Collection[str] | None = None
) -> Price:
    """The price of one option for each node.

    Args:
        recomputed: the groups that are recomputed; ``None`` for :attr:`PlacementProblem.always_recomputed`.

    Raises:
        InputError: if a value is needed in a label to which the one it has cannot be converted.
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
    """The conversions of a use, by reader: of those that need the same label and share one, by the last.

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
