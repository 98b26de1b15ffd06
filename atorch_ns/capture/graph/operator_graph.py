"""OperatorGraph: the operators of a captured model, with keys under which plans name them.

It has every operator, unlike a ``LayerGraph`` (layers that tensor parallelism divides) or a ``CallGraph`` (a
pipeline's calls of units).

A key is the path of the calling module, with ``*`` for the number of a repeated block, the operator's name,
and its place among those of that name in one call of the module: ``model.layers.*.mlp.down_proj/linear#0``.
Blocks of one container whose operators differ get ``*~1``, ``*~2`` …, in the order in which they first come.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from atorch_ns.capture.blocks import fingerprints, repeated_blocks
from atorch_ns.capture.graph.call import UNKNOWN_SIZE, Call, TensorSpec, iter_items
from atorch_ns.capture.graph.capture import Captured, Modes, Origin, capture, flat_arguments
from atorch_ns.capture.structure import Container, truncate
from atorch_ns.text import is_library
from atorch_ns.torch_compat import sample_size


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator of the graph.

    Attributes:
        key: its name in plans, shared with equal operators in other blocks.
        path: path of the module that calls it; empty for the model itself.
        classes: classes of the modules around the call, from the model inwards, joined by dots.
        name: the operator's short name, as ``linear``.
        inputs: its input values, one for each of :attr:`Call.tensors`.
        results: the nodes of its results; ``None`` for an unused one.
        call: the call as rules see it.
        modes: gradient and autocast modes around the call.
        source: file, line and text of the user's code that calls it.
        segment: number of its segment.
        pinned: whether it must not be divided.
    """

    key: str
    path: str
    classes: str
    name: str
    node: fx.Node
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    call: Call
    modes: Modes
    source: str
    segment: int
    pinned: bool

    def __str__(self) -> str:
        shapes = " × ".join(str(list(spec.shape)) for spec in self.call.tensors)
        return f"{self.key} on {shapes or 'nothing'}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class OperatorSegment:
    """Operators that run one after the other in one call of a block, or between two blocks.

    Attributes:
        path: path of the block; empty between blocks.
        nodes: its nodes, numbers included.
        kind: path of the block in keys.
    """

    path: str
    nodes: tuple[fx.Node, ...]
    kind: str


class OperatorGraph:
    """The operators of a captured forward pass.

    Args:
        blocks: paths of repeated blocks in the captured model.
        counts: number of blocks of the whole model that each block represents, if some were left out.
        units: paths of modules that are divided each by itself, as a pipeline's stages call them: tensors
            between them are whole. ``None`` if the model is divided as one.
        within: path in keys of the unit if the captured model is one; empty for a whole model.
    """

    def __init__(
        self,
        captured: Captured,
        blocks: Sequence[str] = (),
        counts: Mapping[str, int] | None = None,
        *,
        units: Collection[str] | None = None,
        within: str = "",
    ) -> None:
        self.captured = captured
        self.origins: Mapping[fx.Node, Origin] = captured.origins
        self.in_units = units is not None
        self.within = within
        self._counts = counts or {}
        self._learnt = _find_learnt_values(captured)
        self.segments = _cut_segments(captured.graph, frozenset(blocks), frozenset(units or ()))
        self.operators = tuple(self._iter_operators())

    @cached_property
    def by_key(self) -> Mapping[str, tuple[Operator, ...]]:
        """The operators by key, in order."""
        groups: dict[str, list[Operator]] = {}
        for op in self.operators:
            groups.setdefault(op.key, []).append(op)
        return {key: tuple(ones) for key, ones in groups.items()}

    @cached_property
    def producers(self) -> Mapping[fx.Node, tuple[Operator, int]]:
        """The operator that produces each value, and the index of the value among its results."""
        return {
            node: (op, number)
            for op in self.operators
            for number, node in enumerate(op.results)
            if node is not None
        }

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The values that the model returns."""
        *_, last = self.captured.graph.nodes
        return tuple(last.args[0])

    def spec(self, value: fx.Node) -> TensorSpec:
        """The shape and dtype of a value, and whether it receives gradients."""
        return spec_of(value.meta["val"], learnt=value in self._learnt)

    def count(self, segment: int) -> int:
        """Number of segments of the whole model that a segment represents."""
        return self._counts.get(self.segments[segment].path, 1)

    def parameter_key(self, node: fx.Node) -> str:
        """The key of a parameter or buffer: its name with ``*`` for the number of a block."""
        name = self.origins[node].name
        for segment in self.segments:
            if segment.path and name.startswith(f"{segment.path}."):
                return segment.kind + name.removeprefix(segment.path)
        return self._shared_key(name)

    def _shared_key(self, path: str) -> str:
        return ".".join(filter(None, (self.within, path)))

    def is_between(self, op: Operator) -> bool:
        """Whether an operator lies between units. Such an operator is never divided."""
        return self.in_units and not self.segments[op.segment].path

    def _iter_operators(self) -> Iterator[Operator]:
        between: Counter[tuple[str, str]] = Counter()
        for number, segment in enumerate(self.segments):
            counts = Counter() if segment.path else between
            for node in segment.nodes:
                if not _is_operator(node):
                    continue
                path = module_path(node)
                name = short_name(node)
                index = counts[path, name]
                counts[path, name] += 1
                kind = (
                    segment.kind + path.removeprefix(segment.path) if segment.path else self._shared_key(path)
                )
                call, inputs = _make_call(node, self._learnt)
                yield Operator(
                    key=f"{kind}/{name}#{index}",
                    path=path,
                    classes=_class_path(node),
                    name=name,
                    node=node,
                    inputs=inputs,
                    results=_result_nodes(node),
                    call=call,
                    modes=node.meta.get("modes", ()),
                    source=source_line(node),
                    segment=number,
                    pinned=node in self.captured.pinned,
                )


def _find_learnt_values(program: Captured) -> frozenset[fx.Node]:
    nodes: set[fx.Node] = set()
    for node in program.graph.nodes:  # in topological order
        origin = program.origins.get(node)
        if origin is not None:
            value = node.meta["val"]
            needs_grad = (
                value.requires_grad
                if origin.kind == "parameter"
                else origin.kind == "input" and value.is_floating_point()
            )
        else:
            # Gradients stop under no_grad, and at detach().
            is_detached = ("grad", False) in node.meta.get("modes", ()) or short_name(node) == "detach"
            needs_grad = not is_detached and any(value in nodes for value in node.all_input_nodes)
        if needs_grad:
            nodes.add(node)
    return frozenset(nodes)


def spec_of(value: torch.Tensor, *, learnt: bool = False) -> TensorSpec:
    """The shape and dtype of a fake tensor, with the sample's sizes where sizes vary."""
    floats = value.dtype.is_floating_point
    shape = tuple(sample_size(size, UNKNOWN_SIZE) for size in value.shape)
    return TensorSpec(shape, value.dtype, learnt and floats)


def module_path(node: fx.Node) -> str:
    """Path of the module that calls a node."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if not path.startswith("_empty")]
    path = re.sub(r"@\d+", "", paths[-1]) if paths else ""  # export appends the number of a further call
    return "" if path == "inner" else path.removeprefix("inner.")  # "inner" is the model inside _Flat


def _class_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return ".".join(kind if isinstance(kind, str) else kind.__qualname__ for _, kind in stack[1:])


def short_name(node: fx.Node) -> str:
    """The name of a node's operator without namespace and overload."""
    parts = str(node.target).split(".")  # such as "aten.linear.default"
    return parts[1] if len(parts) >= 3 else parts[-1]


def source_line(node: fx.Node) -> str:
    """``file:line: text`` of the line of the user's code that calls a node."""
    frames = re.findall(r'File "(.+?)", line (\d+), in .+\n\s*(.*)', node.meta.get("stack_trace") or "")
    for file, line, text in reversed(frames):  # from the innermost frame
        if not is_library(file):
            return f"{Path(file).name}:{line}: {text.strip()}"
    return ""


def _is_operator(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is not operator.getitem  # it picks one of several results
        and any(isinstance(item, torch.Tensor) for item in iter_items(node.meta.get("val")))  # not sizes
    )


def _make_call(node: fx.Node, learnt: Collection[fx.Node] = ()) -> tuple[Call, tuple[fx.Node, ...]]:
    inputs: list[fx.Node] = []

    def spec(value: fx.Node) -> Any:
        example = value.meta["val"]
        if isinstance(example, torch.Tensor):
            inputs.append(value)
            return spec_of(example, learnt=value in learnt)
        if isinstance(example, (torch.SymInt, int)):
            return sample_size(example, UNKNOWN_SIZE)
        return example

    args = fx.node.map_arg(node.args, spec)
    kwargs = fx.node.map_arg(node.kwargs, spec)
    results = [item for item in iter_items(node.meta["val"]) if isinstance(item, torch.Tensor)]
    outputs = tuple(spec_of(value, learnt=node in learnt) for value in results)
    return Call(node.target, tuple(args), dict(kwargs), outputs), tuple(inputs)  # type: ignore[arg-type]


def _result_nodes(node: fx.Node) -> tuple[fx.Node | None, ...]:
    output = node.meta["val"]
    if isinstance(output, torch.Tensor):
        return (node,)
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return tuple(items.get(number) for number, value in enumerate(output) if isinstance(value, torch.Tensor))


def _cut_segments(
    graph: fx.Graph, blocks: frozenset[str], units: frozenset[str]
) -> tuple[OperatorSegment, ...]:
    roots = blocks | units
    entries: list[tuple[str, str, fx.Node]] = []
    before = ("", "")
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path for path, _ in stack.values() if not path.startswith("_empty")]
        # Nodes without a module, and items of results, stay with the nodes before them.
        if paths and node.target is not operator.getitem:
            plain = ((re.sub(r"@\d+", "", path).removeprefix("inner."), path) for path in paths)
            before = next((pair for pair in plain if pair[0] in roots), ("", ""))  # the outermost match
        entries.append((*before, node))
    runs = [
        (path, tuple(node for *_, node in run)) for (path, _), run in groupby(entries, lambda item: item[:2])
    ]
    kinds = _segment_kinds(runs, units - blocks)
    return tuple(OperatorSegment(path, nodes, kind) for (path, nodes), kind in zip(runs, kinds, strict=True))


def _segment_kinds(runs: Sequence[tuple[str, tuple[fx.Node, ...]]], single: frozenset[str]) -> list[str]:
    by_base: dict[str, list[Any]] = {}
    kinds = []
    for path, nodes in runs:
        if not path:
            kinds.append("")
            continue
        container, _, _ = path.rpartition(".")
        base = path if path in single else f"{container}.*".removeprefix(".")
        alike = tuple(_operator_signature(path, node) for node in nodes if _is_operator(node))
        # Blocks of one container, or calls of a unit, whose operators differ get marks: *, *~1, *~2.
        signatures = by_base.setdefault(base, [])
        if alike not in signatures:
            signatures.append(alike)
        mark = signatures.index(alike)
        kinds.append(base + (f"~{mark}" if mark else ""))
    return kinds


def _operator_signature(block: str, node: fx.Node) -> Any:
    call, _ = _make_call(node)
    return module_path(node).removeprefix(block), call.name, call.tensors, call.outputs


@dataclass(frozen=True, eq=False)
class Shallow:
    """The graph of a shallow copy of a model.

    Attributes:
        graph: its operators, with the number of the model's blocks that each block represents.
        containers: the lists of blocks that were shortened.
        inputs: the tensors among the arguments.
    """

    graph: OperatorGraph
    containers: Mapping[str, Container]
    inputs: Sequence[torch.Tensor]

    def copy_name(self, name: str) -> str:
        """The name in the copy of a parameter or module of the model."""
        for path, container in self.containers.items():
            for block, index in zip(container.blocks, container.stands_for, strict=True):
                if name == block or name.startswith(f"{block}."):
                    return container.copy_path(index) + name.removeprefix(block)
            assert not name.startswith(f"{path}.") or path == "", name
        return name


def capture_shallow(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device,
    units: Collection[str] | None = None,
) -> Shallow:
    """Captures the first block, the last, and one of each kind in between of every list of blocks.

    Args:
        units: paths of modules that are divided each by itself; ``None`` if the model is divided as one.

    Raises:
        InputError: as :func:`~atorch_ns.capture.graph.capture.capture` does.
    """
    modules = {block.name: block.module for block in repeated_blocks(model)}
    blocks = {path: module for path, module in modules.items() if units is None or path in units}
    containers = truncate(model, blocks, fingerprints(blocks))
    with torch.enable_grad():
        program = capture(model, args, kwargs, containers=containers, dtypes=dtypes, device=device)
    # How many blocks of the model each captured block stands for.
    paths: dict[str, int] = {}
    for path in blocks:
        container = containers.get(path.rpartition(".")[0])
        if container is None:
            paths[path] = 1
        else:
            places = Counter(container.stands_for)
            paths.update((container.copy_path(index), places[index]) for index in range(len(container.kept)))
    tensors, _ = flat_arguments(args, kwargs)
    single = None if units is None else [path for path in units if path not in blocks]
    return Shallow(OperatorGraph(program, tuple(paths), paths, units=single), containers, tensors)
