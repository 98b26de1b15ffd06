"""Capture of a model's operators: its forward pass by ``torch.export``, on fake tensors, for any batch size.

The graph is export's training form: composite operators are whole, nothing is functional, and autograd and
autocast act as on the model's own code. Operators that write to a tensor return a new one instead where
nothing sees the difference. Else they and what shares their memory are *pinned*: never divided.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export

from atorch_ns.capture.graph.call import iter_items
from atorch_ns.capture.graph.python_state import (
    ChangedError,
    UnrepeatableError,
    reads_recorded,
    refuse_hooks,
    repeatable,
)
from atorch_ns.capture.nests import leaves, map_leaves
from atorch_ns.capture.random_states import caches_off, random_states_kept
from atorch_ns.capture.structure import Container, copy_structure
from atorch_ns.errors import InputError
from atorch_ns.text import error_line, user_frame
from atorch_ns.torch_compat import exporting_fake_mode, quiet_fake_kernels

Modes = tuple[tuple[Any, ...], ...]
"""Modes, outermost first: ``("grad", False)``, ``("autocast", device, dtype, enabled, cache)``."""


class CaptureError(InputError):
    """A model whose operators cannot be captured."""


@dataclass(frozen=True)
class Origin:
    """Origin of an input of the graph.

    Attributes:
        kind: ``parameter``, ``buffer``, ``constant`` or ``input``.
        name: name of the parameter, buffer or constant; for an input, its index.
    """

    kind: str
    name: str


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured forward pass.

    Attributes:
        graph: the fx graph. Placeholders come first, and the output is a tuple.
        origins: origin of each placeholder's value.
        constants: tensors that the model's code makes, by name.
        pinned: nodes that share memory with a value written in place.
        guards: sizes (an int, or the name of a varying size) and dtype of each input.
        structure: the nest of arguments, with indices in place of tensors.
        outputs: the nest of results, with indices in place of tensors.
        reads: attributes of modules and configs that the code has read, as owner's path and name.
    """

    graph: fx.Graph
    origins: Mapping[fx.Node, Origin]
    constants: Mapping[str, torch.Tensor]
    pinned: frozenset[fx.Node]
    guards: tuple[tuple[tuple[int | str, ...], torch.dtype], ...]
    structure: Any
    outputs: Any
    reads: frozenset[tuple[str, str]] = frozenset()

    def fits(self, tensors: Sequence[torch.Tensor], structure: Any) -> bool:
        """Whether the capture fits these inputs: same nest, dtypes and fixed sizes, one size per name."""
        sizes: dict[int | str, int] = {}
        if structure != self.structure or len(tensors) != len(self.guards):
            return False
        for tensor, (shape, dtype) in zip(tensors, self.guards, strict=True):
            if tensor.dtype != dtype or tensor.dim() != len(shape):
                return False
            for size, guard in zip(tensor.shape, shape, strict=True):
                # A name stands for one size everywhere. Export assumes that such a size is at least 2.
                target = guard if isinstance(guard, int) else sizes.setdefault(guard, size)
                if target != size or (isinstance(guard, str) and size < 2):
                    return False
        return True


def flat_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Any]:
    """The tensors among arguments in order, and the nest of arguments with indices in place of tensors."""
    tensors: list[torch.Tensor] = []

    def number(_: Any, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Place(len(tensors) - 1)

    return tensors, map_leaves(number, (tuple(args), dict(kwargs)))


class _Place:
    """The place of a tensor in a nest. Not a dataclass, which would be a nest itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def fill_nest(nest: Any, tensors: Sequence[Any]) -> Any:
    """A nest with tensors in place of the indices from :func:`flat_arguments`."""
    return map_leaves(lambda _, leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf, nest)


class _Flat(nn.Module):
    """A model that takes and returns lists of tensors."""

    def __init__(
        self, model: nn.Module, structure: Any, results: Callable[[Any], object], reads: set[tuple[str, str]]
    ) -> None:
        super().__init__()
        self.inner = model
        self._structure = structure
        self._reads = reads
        self._results = results  # export takes back what a forward pass writes to its module

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = fill_nest(self._structure, tensors)
        with repeatable(self.inner), reads_recorded(self.inner) as reads:
            results = self.inner(*args, **kwargs)
        self._reads.update(reads)
        outputs: list[torch.Tensor] = []
        numbers: dict[int, int] = {}

        def number(_: Any, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(outputs)
                outputs.append(leaf)
            return _Place(numbers[id(leaf)])

        self._results(map_leaves(number, results))
        return outputs


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    containers: Mapping[str, Container] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device,
) -> Captured:
    """Captures the forward pass of ``model`` on ``args`` and ``kwargs``, in its modules' training mode.

    Nothing is computed, no memory is taken, and no values of the model or of the arguments are read. Autocast
    and gradient mode are the caller's.

    Args:
        model: the user's model, before any division; its parameters may be on the meta device.
        containers: lists of blocks with some left out, by :func:`~atorch_ns.capture.structure.truncate`.
        dtypes: dtypes of parameters, by name, where they differ from the model's own.
        device: device that the tensors claim to be on.

    Raises:
        CaptureError: naming the user's line, if the code decides by values, does what a graph would not
            repeat, or cannot be captured for another reason.
    """
    tensors, structure = flat_arguments(args, kwargs)
    mode = exporting_fake_mode()
    as_dtype = (
        {id(p): dtypes[name] for name, p in model.named_parameters() if name in dtypes} if dtypes else {}
    )

    def fake(kind: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = as_dtype.get(id(tensor), tensor.dtype)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)

    results: list[Any] = []
    reads: set[tuple[str, str]] = set()
    with mode:
        clone = copy_structure(model, fake, containers or {})  # every tensor becomes fake
        for hooks in (clone._forward_hooks, clone._forward_pre_hooks):
            hooks.clear()  # of the model, which is called as before
        flat = _Flat(clone, structure, results.append, reads)
        inputs = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors)
    # Export bakes in a size of 1.
    shapes = tuple({0: Dim.AUTO} if tensor.dim() and tensor.shape[0] != 1 else None for tensor in tensors)
    try:
        with random_states_kept(device), caches_off(flat.inner, always=True), quiet_fake_kernels():
            refuse_hooks(flat.inner.named_modules())
            try:
                program = export(flat, inputs, dynamic_shapes=(shapes,), strict=False)
            except Exception as error:
                change = _find_cause(error, ChangedError)
                if change is None:
                    raise
                change.settle()  # keep what a first pass sets once
                program = export(flat, inputs, dynamic_shapes=(shapes,), strict=False)  # if it has settled
    except Exception as error:  # of the model's code, or of what it meets in torch
        raise _make_capture_error(model, error) from error
    _check_outputs(model, results[-1])
    trace = _clean_program(program, structure, results[-1], tensors, first_names=_first_names(flat.inner))
    return replace(trace, reads=frozenset(reads))


def _make_capture_error(model: nn.Module, error: Exception) -> CaptureError:
    frame = user_frame(error)
    where = f" at {frame.filename}, line {frame.lineno}: {frame.line}" if frame is not None else ""
    unrepeatable = _find_cause(error, UnrepeatableError)
    by_values = "DataDependent" in type(error).__name__ or "data-dependent" in str(error)
    why = "its code decides by the values of tensors" if by_values else error_line(error)
    problem = f"the operators of {type(model).__name__} cannot be captured:"
    if unrepeatable is not None:
        return CaptureError(f"{problem} {unrepeatable}{where}.")
    return CaptureError(
        f"{problem} {why}{where}. Write the decision with torch.where or outside of forward, or use tensor_parallel, "
        "which needs no graph."
    )


def _find_cause(error: BaseException | None, kind: type[BaseException]) -> Any:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _check_outputs(model: nn.Module, outputs: Any) -> None:
    odd = [
        type(leaf).__name__
        for _, leaf in leaves(outputs)
        if not isinstance(leaf, (_Place, *_PLAIN, type(None)))
    ]
    if odd:
        raise CaptureError(
            f"{type(model).__name__} returns {odd[0]}, a container that cannot be opened. Return tensors in tuples, lists, "
            "dictionaries or dataclasses; if it is a key/value cache, set use_cache=False."
        )


_PLAIN = (bool, int, float, str, torch.dtype, torch.device)


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in parameters}


def _one_for_each_parameter(
    graph: fx.Graph, origins: dict[fx.Node, Origin], first_names: Mapping[str, str]
) -> None:
    alike: dict[str, list[fx.Node]] = {}
    # Export makes a placeholder for each name of a tied parameter, and reads any of them.
    for node, origin in origins.items():
        if origin.kind == "parameter":
            alike.setdefault(first_names.get(origin.name, origin.name), []).append(node)
    for name, (first, *others) in alike.items():
        origins[first] = Origin("parameter", name)
        for node in others:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            del origins[node]


def _clean_program(
    program: ExportedProgram,
    structure: Any,
    outputs: Any,
    tensors: Sequence[torch.Tensor],
    *,
    first_names: Mapping[str, str],
) -> Captured:
    graph = fx.Graph()
    module = program.graph_module
    nodes: dict[fx.Node, Any] = {}
    origins: dict[fx.Node, Origin] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            clone = graph.node_copy(node)
            origins[clone] = _origin_of(
                specs[node.name], sum(entry.kind == "input" for entry in origins.values())
            )
            nodes[node] = clone
        elif node.op == "output":
            graph.output(tuple(nodes[value] for value in node.args[0]))
        else:
            _copy_node(module, node, graph, nodes, modes=())
    whole = _functionalize_graph(graph, {node for node, origin in origins.items() if origin.kind == "input"})
    _one_item_each(graph)
    graph.eliminate_dead_code()  # fx keeps operators that write in place
    _one_for_each_parameter(graph, origins, first_names)
    constants = {name.removeprefix("inner."): value for name, value in program.tensor_constants.items()}
    inputs = [node for node, origin in origins.items() if origin.kind == "input"]
    guards = tuple(
        (tuple(s if isinstance(s, int) else str(s) for s in node.meta["val"].shape), tensor.dtype)
        for node, tensor in zip(inputs, tensors, strict=True)
    )
    alive = set(graph.nodes)
    return Captured(graph, origins, constants, frozenset(whole & alive), guards, structure, outputs)


def _origin_of(spec: Any, num_inputs: int) -> Origin:
    kind = spec.kind.name
    if kind == "USER_INPUT":
        return Origin("input", str(num_inputs))
    name = str(spec.target).removeprefix("inner.")
    return Origin({"PARAMETER": "parameter", "BUFFER": "buffer"}.get(kind, "constant"), name)


_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_assert_async")


def _copy_node(
    module: fx.GraphModule, node: fx.Node, graph: fx.Graph, nodes: dict[fx.Node, Any], *, modes: Modes
) -> None:
    if node.op == "get_attr":
        nodes[node] = getattr(module, str(node.target))  # the body of a region
        return
    name = getattr(node.target, "__name__", "")
    if any(check in str(node.target) for check in _CHECKS):
        return
    if "batch_dim" in name or name.startswith("_vmap"):
        raise CaptureError(
            "the operators cannot be captured: the model's code transforms functions, as torch.vmap does."
        )
    # The nodes of a region with its own modes, such as no_grad, take the place of the call.
    region = _match_mode_region(node, name)
    if region is not None:
        mode, body, inputs = region
        nodes[node] = _inline_region(nodes[body], [nodes[value] for value in inputs], graph, (*modes, mode))
        return
    # The results of an inlined region are a tuple of nodes, and the item is one of them.
    if node.target is operator.getitem and not isinstance(nodes.get(node.args[0]), fx.Node):  # type: ignore[arg-type]
        nodes[node] = nodes[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    new_node = graph.node_copy(node, lambda value: nodes[value])
    new_node.meta["modes"] = modes
    nodes[node] = new_node


def _match_mode_region(node: fx.Node, name: str) -> tuple[tuple[Any, ...], Any, Sequence[Any]] | None:
    if name == "wrap_with_set_grad_enabled":
        is_enabled, body, *inputs = node.args
        return ("grad", is_enabled), body, inputs
    if name == "wrap_with_autocast":
        device, dtype, is_enabled, cache, body, *inputs = node.args
        return ("autocast", device, dtype, is_enabled, cache), body, inputs
    return None


def _inline_region(body: fx.GraphModule, inputs: Sequence[Any], graph: fx.Graph, modes: Modes) -> Any:
    nodes: dict[fx.Node, Any] = {}
    values = iter(inputs)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            nodes[node] = next(values)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda value: nodes[value])
        else:
            _copy_node(body, node, graph, nodes, modes=modes)
    raise AssertionError("a graph without an output")


def _functionalize_graph(graph: fx.Graph, inputs: set[fx.Node]) -> set[fx.Node]:
    """Replaces in-place operators by functional ones. Returns nodes that share memory with other writes."""
    shares = _Shares()
    write_targets: list[fx.Node] = []
    for node in list(graph.nodes):
        targets = list(_written_inputs(node))
        # Nothing else can see the write where the graph has made the target and nothing shares its memory.
        plain = _functional_variant(node) if len(targets) == 1 and shares.alone(targets[0]) else None
        if plain is not None:
            later = [user for user in targets[0].users if node < user]  # these must read the new value
            node.target = plain
            for user in later:
                user.replace_input_with(targets[0], node)
            continue
        if any(not inputs.isdisjoint(shares.group(target)) for target in targets):  # the caller would see it
            frames = re.findall(
                r'File "(.+?)", line (\d+), in .+\n\s*(.*)', node.meta.get("stack_trace") or ""
            )
            where = f" at {frames[-1][0]}, line {frames[-1][1]}: {frames[-1][2]}" if frames else ""
            raise CaptureError(
                f"the operators cannot be captured: the forward pass writes to an argument{where}."
            )
        write_targets += targets
        for source in _shared_with(node):
            shares.join(node, source)
    whole = {node for value in write_targets for node in shares.group(value)}
    return whole | {user for value in write_targets for user in value.users if value in _written_inputs(user)}


class _Shares:
    """Groups of nodes whose values may share memory."""

    def __init__(self) -> None:
        self._groups: dict[fx.Node, set[fx.Node]] = {}

    def group(self, node: fx.Node) -> set[fx.Node]:
        return self._groups.setdefault(node, {node})

    def join(self, first: fx.Node, other: fx.Node) -> None:
        together = self.group(first) | self.group(other)
        for node in together:
            self._groups[node] = together

    def alone(self, value: fx.Node) -> bool:
        """Whether no other node so far shares memory with a value that the graph itself has made."""
        return value.op == "call_function" and len(self.group(value)) == 1


def _shared_with(node: fx.Node) -> Iterator[fx.Node]:
    if node.op != "call_function":
        return
    if node.target is operator.getitem:
        yield from (source for source in node.all_input_nodes if _returns_alias(source))
    schema = getattr(node.target, "_schema", None)
    if schema is None or not _returns_alias(node):
        return
    for parameter, argument in zip(schema.arguments, node.args, strict=False):
        if parameter.alias_info is not None:  # the result may be a view of it
            yield from (value for value in iter_items(argument) if isinstance(value, fx.Node))


def _returns_alias(node: Any) -> bool:
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(value.alias_info is not None for value in returns)


def _written_inputs(node: fx.Node) -> Iterator[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if node.op == "call_function" and schema is not None and schema.is_mutable:
        for parameter, argument in itertools.zip_longest(schema.arguments, node.args):
            if parameter is not None and parameter.alias_info is not None and parameter.alias_info.is_write:
                yield from (value for value in iter_items(argument) if isinstance(value, fx.Node))


def _functional_variant(node: fx.Node) -> Callable[..., Any] | None:
    # "aten.add_.Tensor" has the variant aten.add.Tensor.
    namespace, _, rest = str(node.target).partition(".")
    name, _, overload = rest.partition(".")
    if not name.endswith("_") or name.endswith("__") or name == "copy_" or not hasattr(torch.ops, namespace):
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, overload, None) if packet is not None else None


def _one_item_each(graph: fx.Graph) -> None:
    first_items: dict[tuple[Any, Any], fx.Node] = {}  # by operator and number of the result
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            first = first_items.setdefault((node.args[0], node.args[1]), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
