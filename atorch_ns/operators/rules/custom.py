"""Custom operators: functions that a captured graph holds as single operators, with rules from an annotation.

A registered function becomes a composite operator of ``torch.library``: autograd, autocast and recomputation
see the operators inside, and only a capture sees it whole. Its schema follows from the arguments of its first
call; arguments of other types add overloads. Modules that have imported the function get the operator in its
place. Where a capture cannot look into a function because its code depends on values, the annotation gives
the shapes of the results, and the first float argument their dtype.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch.distributed.tensor import Partial
from torch.library import Library
from torch.multiprocessing.reductions import StorageWeakRef

from atorch_ns.capture.graph.call import Call, TensorSpec
from atorch_ns.capture.graph.operator_graph import spec_of
from atorch_ns.capture.nests import map_tensors, tensors_of
from atorch_ns.errors import InputError
from atorch_ns.operators.rules.annotation import Annotation, Shape
from atorch_ns.operators.rules.rule import WHOLE, Placement, Rule
from atorch_ns.text import count_noun, error_line, with_article
from atorch_ns.torch_compat import fake_tensor_mode, fake_tensor_type, quiet_fake_kernels, sample_size

Annotating = str | Callable[..., str]
"""An annotation, or a function that returns one for the arguments of a call."""


@dataclass(frozen=True, eq=False)
class RegisteredOperator:
    """An operator, its annotation, and the function that it runs (``None`` for an operator of torch)."""

    name: str
    annotation: Annotating
    function: Callable[..., Any] | None = None

    @functools.cached_property
    def parameters(self) -> Sequence[inspect.Parameter]:
        """The function's parameters."""
        assert self.function is not None
        return tuple(signature_of(self.function).parameters.values())

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """The values of the function's parameters, by name."""
        return dict(zip((param.name for param in self.parameters), values, strict=True))

    def annotation_of(self, values: Mapping[str, Any]) -> Annotation:
        """The annotation of a call with these arguments.

        An annotation function gets meta tensors, by name for arguments with a default, else by position.

        Raises:
            InputError: if the text is not an annotation.
        """
        if isinstance(self.annotation, str):
            return Annotation.read(self.annotation)
        keyword_names = (  # parameters with a default are given by name
            {parameter.name for parameter in self.parameters if parameter.default is not parameter.empty}
            if self.function
            else set()
        )
        text = self.annotation(
            *(_on_meta(value) for name, value in values.items() if name not in keyword_names),
            **{name: _on_meta(value) for name, value in values.items() if name in keyword_names},
        )
        if not isinstance(text, str):
            raise InputError(f"the annotation's function returned {with_article(text)} instead of a string.")
        return Annotation.read(text)

    def call(self, values: Sequence[Any]) -> Any:
        """Calls the function with the values of its parameters."""
        assert self.function is not None
        pairs = list(zip(self.parameters, values, strict=True))
        by_name = {
            parameter.name: value for parameter, value in pairs if parameter.kind == parameter.KEYWORD_ONLY
        }
        return self.function(
            *(value for parameter, value in pairs if parameter.kind != parameter.KEYWORD_ONLY), **by_name
        )


def _on_meta(value: Any) -> Any:
    if isinstance(value, (TensorSpec, torch.Tensor)):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return [_on_meta(item) for item in value] if isinstance(value, (tuple, list)) else value


def is_autograd(target: object) -> bool:
    """Whether a value is a class of ``torch.autograd.Function``."""
    return isinstance(target, type) and issubclass(target, torch.autograd.Function)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters by which a function's operator is called."""
    owner = getattr(function, "__self__", None)
    if is_autograd(owner):  # `apply` itself takes *args; the first parameter of forward is ctx
        _, *rest = inspect.signature(owner.forward).parameters.values()  # type: ignore[union-attr]
        return inspect.Signature(rest)
    return inspect.signature(function)


def shape_of(value: object) -> Shape | None:
    """The shape of a tensor; ``None`` for other values."""
    return tuple(value.shape) if isinstance(value, (TensorSpec, torch.Tensor)) else None


def sizes_of(annotation: Annotation, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that give sizes of names in the annotation."""
    marks = annotation.marks
    return {
        name: value
        for name, value in arguments.items()
        if name in marks and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    }


_TYPES: Final[tuple[tuple[Any, str], ...]] = (
    (torch.Tensor, "Tensor"),
    (bool, "bool"),  # before int, of which it is a subclass
    ((int, torch.SymInt), "SymInt"),
    (float, "float"),
    (str, "str"),
    (torch.dtype, "ScalarType"),
    (torch.device, "Device"),
)


def schema_type(operator: str, parameter: str, value: object) -> str:
    """The type of an argument in a schema.

    Raises:
        InputError: if no schema has a type for the value.
    """
    if value is None:
        return "Tensor?"
    if isinstance(value, (tuple, list)):
        kinds = {schema_type(operator, parameter, item) for item in value} or {"SymInt"}
        if len(kinds) == 1 and not (kind := kinds.pop()).endswith(("?", "]")):
            return f"{kind}[]"
    type_name = next((name for kind, name in _TYPES if isinstance(value, kind)), None)
    if type_name is None:
        raise InputError(
            f"{parameter} of {operator} is {with_article(value)}, which operators cannot take. Pass tensors, numbers, strings, "
            "None, or lists of one of them."
        )
    return type_name


def run(entry: RegisteredOperator, values: Sequence[Any], num_results: int) -> Any:
    """Runs a registered function and returns its results as new tensors.

    Raises:
        InputError: if it returns anything else, or writes to its arguments during a capture.
    """
    tensors = tensors_of(values)
    is_capture = any(isinstance(tensor, fake_tensor_type()) for tensor in tensors)
    error = _needs_values(entry, values) if is_capture else None  # runs the function once more
    if error is not None:
        return _by_annotation(entry, values, error)
    versions = [tensor._version for tensor in tensors] if is_capture else []  # in-place writes raise them
    results = entry.call(values)
    if versions != [tensor._version for tensor in tensors if is_capture]:
        raise InputError(f"{entry.name} writes to its arguments. Make it return new tensors instead.")
    outputs = [results] if num_results == 1 else results
    if (
        not isinstance(outputs, (tuple, list))
        or [isinstance(output, torch.Tensor) for output in outputs] != [True] * num_results
    ):
        raise InputError(
            f"{entry.name} returns {with_article(results)}, but its annotation says it returns {count_noun(num_results, 'tensor')}. "
            "Correct the annotation, and return only tensors."
        )
    memory = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}  # the schema promises others
    copies = [
        output.clone() if StorageWeakRef(output.untyped_storage()) in memory else output for output in outputs
    ]
    return copies[0] if num_results == 1 else tuple(copies)


def _needs_values(entry: RegisteredOperator, values: Sequence[Any]) -> Exception | None:
    plain = [sample_size(value, 1) if isinstance(value, torch.SymInt) else value for value in values]
    with fake_tensor_mode(), quiet_fake_kernels():  # a mode of its own leaves no guards in the capture
        tensors = map_tensors(
            lambda tensor: torch.empty(spec_of(tensor).shape, dtype=tensor.dtype, device=tensor.device), plain
        )
        try:
            entry.call(tensors)
        except Exception as error:
            return error  # such as that of .item(), or of a branch by a value
    return None


def _by_annotation(entry: RegisteredOperator, values: Sequence[Any], error: Exception) -> Any:
    arguments = entry.named(values)
    annotation = entry.annotation_of(arguments)
    input_shapes = [shape_of(value) for value in arguments.values()][: len(annotation.inputs)]
    shapes = annotation.shapes(input_shapes, **sizes_of(annotation, arguments))
    tensors = tensors_of(values)
    if None in shapes:
        raise InputError(
            f"{entry.name} cannot be captured ({error_line(error)}), and its annotation {annotation.text!r} leaves the shape of a "
            "result open. Write the dimensions of all results."
        ) from error
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
    learnt = (  # a capture needs no values, but sees where gradients flow
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and like.is_floating_point()
    )
    results = [like.detach().new_empty(shape).requires_grad_(learnt) for shape in shapes if shape is not None]
    return results[0] if len(results) == 1 else tuple(results)


Overload = Callable[..., Any]
"""An operator of ``torch.ops`` with its overload, as ``torch.ops.aten.add.Tensor``."""

_OVERLOAD: Final = type(torch.ops.aten.add.Tensor)
_PACKET: Final = type(torch.ops.aten.add)

F = TypeVar("F", bound=Callable[..., Any])


class OperatorRegistry:
    """The registered operators of a namespace of ``torch.ops``. The registry keeps them alive."""

    def __init__(self, namespace: str) -> None:
        self.entries: dict[str, RegisteredOperator] = {}
        self._overloads: dict[tuple[str, str], Overload] = {}
        self.namespace = namespace
        self._library = Library(namespace, "FRAGMENT")

    def find(self, call: Call) -> RegisteredOperator | None:
        """The entry of a call's operator; ``None`` if it is not registered."""
        namespace, name, *_ = f"{call.name}.".split(".")  # control flow has no dot: cond
        return self.entries.get(name if namespace == self.namespace else call.name)  # ours: every overload

    def add(self, key: str, entry: RegisteredOperator) -> None:
        """Registers an entry.

        Raises:
            InputError: if the key belongs to another function, or has another annotation.
        """
        rival = self.entries.get(key)
        if rival is not None and (
            rival.annotation != entry.annotation or not _is_same_function(rival.function, entry.function)
        ):
            raise InputError(
                f"an operator {key!r} is registered already, with {rival.annotation!r}. Give this one another name: "
                "register_op(annotation, name=…)."
            )
        self.entries[key] = entry

    def operator(self, name: str, values: Sequence[Any]) -> Overload:
        """The overload for arguments with the types of ``values``, created on first use."""
        entry = self.entries[name]
        parameters = ", ".join(
            f"{schema_type(name, key, value)} {key}" for key, value in entry.named(values).items()
        )
        overload = self._overloads.get((name, parameters))
        if overload is None:
            packet = (  # form1, form2 … are overloads for other types of arguments
                f"{name}.form{num}" if (num := sum(other == name for other, _ in self._overloads)) else name
            )
            results = len(entry.annotation_of(entry.named(values)).outputs)
            returns = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
            self._library.define(f"{packet}({parameters}) -> {returns}")
            # The entry is looked up in each call: a notebook's cell that runs again replaces it.
            self._library.impl(
                packet, lambda *args: run(self.entries[name], args, results), "CompositeImplicitAutograd"
            )
            packets = getattr(getattr(torch.ops, self.namespace), name)
            overload = cast("Overload", getattr(packets, f"form{num}" if num else "default"))
            self._overloads[name, parameters] = overload
        return overload


REGISTERED: Final = OperatorRegistry("atorch_ns")
"""The operators that this process has registered."""


_ORIGINAL: Final = "_registered_function"  # attribute of a replacement that holds the function


def register_op(
    annotation: Annotating,
    name: str | None = None,
    *,
    code_impl_pattern: str = "import",
    emit_fn: object = None,
    transform_rules: object = None,
    input_gen_fn: object = None,
    registry: OperatorRegistry = REGISTERED,
) -> Callable[[F], F]:
    """Registers a function, or an operator of torch, with the ways in which it may be divided.

    ::

        @register_op("m k+, k+ n -> m n")
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...

    The function must not write to its arguments, nor draw random numbers unless all its dimensions are
    frozen. It returns as many tensors as the annotation has results, copied if they share an argument's
    memory. Parameters beyond those of the annotation stay whole. ``register_op(…)(function)`` also replaces
    it in all modules that hold it. An ``autograd.Function`` is registered as a class. For an operator of
    torch, as ``torch.ops.aten.roll.default`` or ``torch.roll``, the annotation's rules replace its own.

    Args:
        annotation: :mod:`~atorch_ns.operators.rules.annotation`, or a function that returns one. It takes
            meta tensors, arguments without a default by place, and others by name.
        name: the operator's name; that of the function by default.
        code_impl_pattern: ``import`` or ``source``, which mean the same here: no code is copied.
        emit_fn, transform_rules: not supported, as only the annotation decides what runs on pieces.
        input_gen_fn: unused, as operators are not timed on generated inputs.
        registry: where to register.

    Raises:
        InputError: if the annotation cannot be read, the name is missing or taken, or parameters vary.
    """
    if code_impl_pattern not in ("import", "source"):
        raise InputError(f"code_impl_pattern={code_impl_pattern!r} is unknown. Write 'import' or 'source'.")
    for option, value in (("emit_fn", emit_fn), ("transform_rules", transform_rules)):
        if value is not None:
            raise InputError(
                f"{option} is not supported: no code is generated for an operator; what it computes on pieces follows "
                "from its annotation. Leave it out, and mark with ^ what the function cannot compute on pieces."
            )
    if isinstance(annotation, str):
        Annotation.read(annotation)

    def register(target: F) -> F:
        operators = _of_torch(target)
        for op in operators:
            registry.add(str(op), RegisteredOperator(str(op), annotation))
        if operators:
            return target
        if getattr(target, "__name__", "") == "apply" and is_autograd(getattr(target, "__self__", None)):
            return cast("F", _register_function(annotation, name, target.__self__, registry).apply)  # type: ignore[attr-defined]
        return cast("F", _register_function(annotation, name, target, registry))

    return register


def registered_rules(
    call: Call, degree: int, registry: OperatorRegistry = REGISTERED
) -> tuple[Rule, ...] | None:
    """The rules of a registered operator's call; ``None`` for other operators.

    Raises:
        InputError: if the annotation does not fit the call, naming the operator and the shapes.
    """
    entry = registry.find(call)
    if entry is None:
        return None
    try:
        return _entry_rules(entry, call, degree)
    except InputError as error:
        shapes = " × ".join(str(list(spec.shape)) for spec in call.tensors) or "nothing"
        raise InputError(f"{call.name} on {shapes} is registered wrongly: {error}") from error


def _entry_rules(entry: RegisteredOperator, call: Call, degree: int) -> tuple[Rule, ...]:
    names = call.argument_names
    arguments = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    annotation = entry.annotation_of(arguments)
    input_shapes = {key: shape_of(arguments.get(key)) for key in names[: len(annotation.inputs)]}
    shapes, sizes = list(input_shapes.values()), sizes_of(annotation, arguments)
    outputs, actual = annotation.shapes(shapes, **sizes), [spec.shape for spec in call.outputs]
    if len(outputs) != len(actual) or any(
        shape is not None and shape != actual_shape and (*shape, *actual_shape) != (1,)  # () is like (1,)
        for shape, actual_shape in zip(outputs, actual, strict=False)
    ):
        raise InputError(f"its annotation {annotation.text!r} gives {list(outputs)}, but it gave {actual}.")
    tensors = [key for key, shape in input_shapes.items() if shape is not None]
    return tuple(
        Rule(
            rule.outputs,
            tuple(_tensor_placements(arguments, dict(zip(tensors, rule.inputs, strict=True)))),
            rule.source,
        )
        for rule in annotation.rules(shapes, degree, **sizes)
        if all(
            spec.is_float or not isinstance(element, Partial)  # no partial sums of integers or masks
            for element, spec in zip(rule.outputs, call.outputs, strict=True)
        )
    )


def _tensor_placements(arguments: dict[str, Any], placements: dict[str, Placement]) -> Iterator[Placement]:
    for name, value in arguments.items():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, TensorSpec):
                yield placements.get(name, WHOLE)  # whole in lists, and beyond the annotation


def _of_torch(target: object) -> list[Overload]:
    packet: Any = target
    if isinstance(target, _OVERLOAD):
        return [target]
    if not isinstance(target, _PACKET):
        home = f"{getattr(target, '__module__', '')}."  # with a dot: torch, not torchvision
        if not (home.startswith("torch.") or inspect.isbuiltin(target)) or is_autograd(target):
            return []
        packet = getattr(torch.ops.aten, getattr(target, "__name__", ""), None)
        if not isinstance(packet, _PACKET):
            raise InputError(
                f"{target!r} is not a single torch operator. Register the operators that it calls, such as "
                "torch.ops.aten.roll.default, or your own function that calls it."
            )
    return [getattr(packet, overload) for overload in packet.overloads()]


def _is_same_function(function: Callable[..., Any] | None, other: Callable[..., Any] | None) -> bool:
    # A notebook's cell that runs again makes the same function anew.
    definition = _function_definition(function)
    return function is other or (definition is not None and definition == _function_definition(other))


def _function_definition(function: object) -> tuple[object, ...] | None:
    if not isinstance(function, types.FunctionType) or function.__closure__:  # closures differ by values
        return None
    return function.__module__, function.__qualname__, function.__code__


def _register_function(
    annotation: Annotating, name: str | None, target: Any, registry: OperatorRegistry
) -> Any:
    op_name = str(name or getattr(target, "__name__", ""))
    if not op_name.isidentifier():
        raise InputError(
            f"{target!r} has no valid name for an operator. Give one: register_op(annotation, name=…)."
        )
    target = getattr(target, _ORIGINAL, target)  # of one that is registered again
    function = target.apply if is_autograd(target) else target
    try:
        signature = signature_of(function)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the parameters of {op_name} are not known: {error}. Register a function in Python."
        ) from error
    star_args = [
        str(parameter)
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if star_args:
        raise InputError(
            f"{op_name} takes {' and '.join(star_args)}, but an operator has fixed parameters. Name them."
        )
    registry.add(op_name, RegisteredOperator(op_name, annotation, function))

    @functools.wraps(function)
    def call_operator(*args: Any, **kwargs: Any) -> Any:
        binding = signature.bind(*args, **kwargs)
        binding.apply_defaults()
        values = list(binding.arguments.values())  # all by place: their types choose the overload
        return registry.operator(op_name, values)(*values)

    setattr(call_operator, _ORIGINAL, target)
    if is_autograd(target):
        target.apply = call_operator
        return target
    home = sys.modules.get(getattr(target, "__module__", None) or "")
    # It was defined before: others may have imported it.
    if getattr(home, getattr(target, "__name__", op_name), None) is target:
        for module in list(sys.modules.values()):
            for attribute in [key for key, value in list(vars(module).items()) if value is target]:
                setattr(module, attribute, call_operator)
    return call_operator
