"""Following a forward pass from outside its units: the calls, and the tensors that flow between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from atorch_ns.capture.blocks import NamedModule, call_hooks
from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.pipeline.cut.graph import CallGraph, TensorSignature, UnitCall, Value
from atorch_ns.torch_compat import without_transforms

_LOOKS_INTO = frozenset(
    {
        "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "argwhere",
        "masked_select", "unique", "unique_consecutive", "bincount", "__bool__", "__int__", "__float__",
        "__index__", "__complex__", "__contains__", "__array__",
    }
)  # fmt: skip
"""Functions that return values of a tensor to Python, or a result whose shape depends on values."""


class Follower(TorchFunctionMode):
    """Records the calls of units in one forward pass, and the tensor computations between them.

    It sees the torch functions and tensor methods that the code between units calls, on the actual tensors
    of that code. Computations inside units are not recorded.

    Args:
        model: the model whose forward pass is followed, on fake or real tensors.
        units: units of the model, none inside another.
    """

    def __init__(self, model: nn.Module, units: Iterable[NamedModule]) -> None:
        super().__init__()
        self._units = tuple(units)
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._buffers = {
            id(buffer): (f"{unit.name}.{name}", buffer)
            for unit in self._units
            for name, buffer in unit.module.named_buffers()
        }
        self._busy = False  # whether functions that are called now are not the code between units
        self._depth = 0  # units that run; the outermost one is the call
        self._versions: list[tuple[torch.Tensor, int]] = []  # of the arguments of the call that runs
        self._calls: list[_OpenCall] = []
        self._made_inside = WeakTensorKeyDictionary()  # the call that made a tensor inside a unit
        self._values: list[Value] = []
        self._numbers: dict[int, int] = {}  # by id of a tensor, its latest value
        self._by_storage: dict[int, list[torch.Tensor]] = {}  # tensors that share memory
        self._references: list[torch.Tensor] = []  # an id is unique only while the tensor is alive
        self._nodes: list[tuple[Any, ...]] = []  # where the gradient of each value arrives
        self._unreached_values: frozenset[int] = frozenset()
        self._results: list[int] = []
        self._shown_values: list[int] = []
        self._reads: list[tuple[int, int]] = []  # (calls before it, value)
        self._mutates = False
        self._taken_apart: set[str] = set()
        self._without_grad: list[int] = []  # calls made without gradients, as an autograd function makes them
        self._gradless: set[int] = set()  # values made so
        self._sealed_positions: set[int] = set()
        self.on_call: Callable[[int, bool], None] | None = None

    @property
    def last_read(self) -> str:
        """The unit that computed the last value that the code read; empty if it read none."""
        return self._calls[self._values[self._reads[-1][1]].last_call].path if self._reads else ""

    @contextmanager
    def watching(self) -> Iterator[Follower]:
        """Follows the code inside the block."""
        units = [(unit, unit.module) for unit in self._units]
        whole = {id(module) for _, module in units}
        # A part that runs while its unit does not is called from outside. Such a unit must be split.
        parts = [(unit, part) for unit, module in units for part in module.modules() if id(part) not in whole]
        with (
            call_hooks(units, self._enter_unit, self._leave_unit, prepend=True),
            call_hooks(parts, self._entering_part, lambda *_: None),
            self,
        ):
            yield self

    def conclude(self, result: Any, outputs: Any = ()) -> None:
        """Records the result of the pass (a loss or the model's output) and outputs wanted besides a loss."""
        self._busy = True
        self._results = [self._value_id(tensor) for tensor in tensors_of(result)]
        ancestors = _nodes_behind(tensor.grad_fn for tensor in tensors_of(result))
        if ancestors:  # empty where nothing trains
            self._unreached_values = frozenset(
                number for number, nodes in enumerate(self._nodes) if nodes and ancestors.isdisjoint(nodes)
            )
        self._shown_values = [self._value_id(tensor) for tensor in tensors_of(outputs)]

    def graph(self) -> CallGraph:
        """The graph of the pass."""
        return CallGraph(
            calls=tuple(call.to_call() for call in self._calls),
            values=tuple(self._values),
            results=tuple(self._results),
            shown=tuple(self._shown_values),
            reads=tuple(self._reads),
            mutates=self._mutates,
            taken_apart=frozenset(self._taken_apart),
            sealed=frozenset(self._sealed_positions),
            unreached=self._unreached_values,
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._busy:
            result = func(*args, **kwargs)
            if self._depth and isinstance(result, (torch.Tensor, tuple, list)):  # made inside of a unit
                self._made_inside.update(dict.fromkeys(tensors_of(result), len(self._calls) - 1))
            return result
        tensors = tensors_of((args, tuple(kwargs.values())))
        versions = [tensor._version for tensor in tensors]  # a change in place raises it
        if tensors and _looks_into(func, tensors):  # before the call, which raises on fake tensors
            self._note_read(tensors)
        result = func(*args, **kwargs)
        if tensors or isinstance(result, (torch.Tensor, tuple, list)):
            self._record_results(tensors, versions, result)
        return result

    def _note_read(self, tensors: list[torch.Tensor]) -> None:
        numbers = [self._value_id(tensor) for tensor in tensors]
        self._reads += [(len(self._calls), n) for n in numbers if self._values[n].last_call >= 0]

    def _record_results(self, tensors: list[torch.Tensor], versions: list[int], result: Any) -> None:
        # A function that works in place returns its argument, which is not a new tensor.
        outputs = [tensor for tensor in tensors_of(result) if id(tensor) not in {id(arg) for arg in tensors}]
        changed_tensors = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        if not outputs and not changed_tensors:
            return
        inputs = [self._value_id(tensor) for tensor in tensors]
        for tensor in changed_tensors:
            self._record_mutation(tensor, inputs)
        for tensor in outputs:
            self._derive_value(tensor, inputs)

    def _record_mutation(self, tensor: torch.Tensor, inputs: list[int], *, followable: bool = True) -> None:
        # A write shows in every tensor on the same memory: the base and all of its views.
        for sharer in self._by_storage.get(_storage_id(tensor), [tensor]):
            number = self._derive_value(sharer, [self._value_id(sharer), *inputs], followable=followable)
            self._mutates |= self._values[number].last_call >= 0

    def _derive_value(self, tensor: torch.Tensor, inputs: Iterable[int], *, followable: bool = True) -> int:
        sources = tuple(dict.fromkeys(inputs))
        return self._add_value(
            tensor,
            inputs=sources,
            last_call=max((self._values[source].last_call for source in sources), default=-1),
            followable=followable,
        )

    def _add_value(self, tensor: torch.Tensor, *, position: int | None = None, **fields: Any) -> int:
        number = len(self._values)
        spec = TensorSignature(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        index = len(self._calls) if position is None else position
        self._values.append(Value(spec=spec, position=index, **fields))
        if not torch.is_grad_enabled():
            self._gradless.add(number)
        self._numbers[id(tensor)] = number
        self._references.append(tensor)
        self._nodes.append(self._nodes_of(tensor))
        sharers = self._by_storage.setdefault(_storage_id(tensor), [])
        if not any(tensor is sharer for sharer in sharers):
            sharers.append(tensor)
        return number

    def _nodes_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        is_busy, self._busy = self._busy, True  # reading an attribute calls __torch_function__ too
        try:
            # A view that is changed in place continues the history of its base, where the gradient arrives.
            base = tensor._base
            return tuple(t.grad_fn for t in (tensor, base) if t is not None and t.grad_fn is not None)
        finally:
            self._busy = is_busy

    def _value_id(self, tensor: torch.Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is not None and not self._gains_grad(tensor, number):
            return number
        name, parameter = self._parameters.get(id(tensor), ("", None))
        if parameter is not None:
            return self._add_value(tensor, parameters=(name,))
        hidden = self._hidden_value(tensor)
        if hidden is not None:
            return hidden
        sharers = [self._numbers[id(sharer)] for sharer in self._by_storage.get(_storage_id(tensor), [])]
        if sharers and not self._gains_grad(tensor, sharers[-1]):  # a view whose creation was not seen
            return self._derive_value(tensor, [sharers[-1]])
        if tensor.grad_fn is None:  # of the batch, a buffer, a constant
            return self._add_value(tensor)
        # The result has a gradient, its calls have none: the model's own autograd function made these calls.
        if self._without_grad:
            # The model may be cut before the first of these calls or after the last one, but not between.
            self._sealed_positions.update(range(self._without_grad[0] + 1, len(self._calls)))
            self._without_grad = []
        inputs = tuple(sharers[-1:]) if number is None else (number,)
        return self._add_value(tensor, inputs=inputs, last_call=len(self._calls) - 1, followable=False)

    def _gains_grad(self, tensor: torch.Tensor, number: int) -> bool:
        return number in self._gradless and tensor.grad_fn is not None  # autograd functions attach it late

    def _hidden_value(self, tensor: torch.Tensor) -> int | None:
        # A unit's buffer counts as made by the first call: stages that do not have the unit cannot read it.
        name, buffer = self._buffers.get(id(tensor), ("", None))
        if buffer is not None:
            return self._add_value(tensor, position=0, last_call=0, followable=False, hidden=name)
        call = self._made_inside.get(tensor)  # such as an auxiliary loss of a block
        if call is None:
            return None
        return self._add_value(
            tensor,
            position=call + 1,
            last_call=call,
            followable=False,
            hidden=f"a tensor of shape {list(tensor.shape)} that {self._calls[call].path} makes",
        )

    def _note_attributes(self, number: int) -> None:
        call = self._calls[number]
        for path, attributes, name, tensor in _attribute_tensors(call.unit):
            if tensor is call.attributes.get(path):  # it was there before the call
                continue
            # It may also be an argument or an output. An alias replaces it to tell the two uses apart.
            alias = tensor.view_as(tensor)
            attributes[name] = alias
            self._add_value(alias, last_call=number, followable=False, hidden=path)

    def _enter_unit(self, unit: NamedModule, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._busy = True
        if self._depth == 0:
            tensors = tensors_of((args, kwargs))
            call = _OpenCall(unit, [self._value_id(tensor) for tensor in tensors])
            self._versions = [(tensor, tensor._version) for tensor in tensors]
            call.attributes = {path: tensor for path, _, _, tensor in _attribute_tensors(unit)}
            if not torch.is_grad_enabled():
                self._without_grad.append(len(self._calls))
            self._calls.append(call)
            if self.on_call is not None:
                self.on_call(len(self._calls) - 1, True)
        self._depth += 1

    def _entering_part(self, unit: NamedModule, *_: Any) -> None:
        if self._depth == 0:
            self._taken_apart.add(unit.name)

    def _leave_unit(self, _: NamedModule, __: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:  # a unit that another one called
            return
        number = len(self._calls) - 1
        call = self._calls[number]
        # Before the outputs are numbered: an argument that was changed in place may be one of them.
        for tensor, version in self._versions:
            if tensor._version != version:
                self._record_mutation(tensor, call.arguments, followable=False)
        self._versions = []
        self._note_attributes(number)
        for leaf, tensor in enumerate(tensors_of(output)):
            value = self._add_value(tensor, last_call=number, call=number, leaf=leaf)
            call.outputs.append(value)
        call.set_output(output, self._values)
        if self.on_call is not None:
            self.on_call(number, False)
        self._busy = False


@dataclass
class _OpenCall:
    """A call during the pass."""

    unit: NamedModule
    arguments: list[int]
    outputs: list[int] = field(default_factory=list)
    attributes: dict[str, torch.Tensor] = field(default_factory=dict)
    output: Any = None

    @property
    def path(self) -> str:
        return self.unit.name

    def set_output(self, output: Any, values: list[Value]) -> None:
        specs = iter([values[number].spec for number in self.outputs])
        self.output = map_tensors(lambda _: next(specs), output)

    def to_call(self) -> UnitCall:
        arguments, outputs = tuple(self.arguments), tuple(self.outputs)
        return UnitCall(path=self.path, arguments=arguments, outputs=outputs, output=self.output)


def _attribute_tensors(unit: NamedModule) -> list[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """The tensors in attributes of a unit's modules: ``(path, dictionary, name in it, tensor)``."""
    return [
        (f"{path}.{name}", attributes, name, value)
        for path, module in unit.module.named_modules(prefix=unit.name)
        for attributes in (module.__dict__, module._buffers)
        for name, value in attributes.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    ]


def _nodes_behind(nodes: Iterable[Any]) -> set[Any]:
    ancestors: set[Any] = set()  # nodes of autograd that a backward pass would run
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in ancestors:
            ancestors.add(node)
            waiting += [further for further, _ in node.next_functions if further is not None]
    return ancestors


def _storage_id(tensor: torch.Tensor) -> int:
    return int(without_transforms(tensor).untyped_storage()._cdata)  # torch.vmap's wrappers have none


def _looks_into(func: Any, tensors: list[torch.Tensor]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__getitem__", "index_put_"):  # with a mask
        return any(tensor.dtype == torch.bool for tensor in tensors[1:])
    return name in _LOOKS_INTO or (name == "where" and len(tensors) == 1)  # where(mask) is nonzero(mask)
