"""Components by name: what ``type`` and ``args`` of a configuration stand for."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from atorch_ns.capture.user_code import load_object
from atorch_ns.errors import AtorchError, InputError
from atorch_ns.text import error_text, with_article


def resolve_component(value: Any, *, what: str) -> Callable[..., Any]:
    """The class or function of a field, which may be its name.

    Raises:
        InputError: if there is none.
    """
    target = load_object(value, option=what) if isinstance(value, str) else value
    if not callable(target):
        raise InputError(f"{what} must be a class or a function; it is {with_article(target)}.")
    result: Callable[..., Any] = target
    return result


def check_names(args: Any, *, aliases: Container[str] = ()) -> None:
    """Looks up the ``type`` of every component of a configuration, and every ``__type`` in their arguments.

    Args:
        aliases: names that need no module prefix.

    Raises:
        InputError: with all that name nothing, a line each.
    """
    names = [(what, name) for what, name in _find_names(args, "") if name not in aliases]
    problems = [problem for what, name in names if (problem := _name_problem(name, what))]
    if problems:
        raise InputError("\n".join(problems))


def _find_names(value: Any, what: str) -> Iterator[tuple[str, str]]:
    inside = [(str(index), item) for index, item in enumerate(value)] if isinstance(value, list) else []
    key = "__type"  # in arguments; the fields of a configuration have type
    if isinstance(value, Mapping):
        inside = [(str(name), item) for name, item in value.items()]
    elif is_dataclass(value) and not isinstance(value, type):
        inside, key = list(vars(value).items()), "type"
    for name, item in inside:
        where = f"{what}.{name}" if what else name
        if name == key and isinstance(item, str):
            yield where, item
        yield from _find_names(item, where)


def _name_problem(name: str, what: str) -> str:
    try:
        resolve_component(name, what=what)
    except InputError as error:
        return str(error)
    return ""


def arguments(options: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """Arguments with objects created from ``{"__type": …}`` and ``{"__value_type": …, "value": …}``.

    Raises:
        InputError: naming the argument that cannot be made.
    """
    return {key: _build_value(value, f"{what}.{key}") for key, value in options.items()}


def make(kind: Any, *args: Any, options: Mapping[str, Any], what: str, **automatic: Any) -> Any:
    """Calls ``kind(*args, **options, **automatic)``. Automatic arguments override duplicates.

    Args:
        kind: a class, a function, or its name.
        what: the field that holds ``type`` and ``args``, for messages.

    Raises:
        InputError: if the arguments do not fit it, or it fails.
    """
    factory = resolve_component(kind, what=f"{what}.type")
    keywords = {**arguments(options, what=f"{what}.args"), **automatic}
    try:
        return factory(*args, **keywords)
    except AtorchError:
        raise  # its message says what is wrong
    except Exception as error:
        names = ", ".join(f"{key}=" for key in keywords)
        raise InputError(f"{what}: {_callable_name(factory)}({names}) failed: {error_text(error)}") from error


def _build_value(value: Any, what: str) -> Any:
    if isinstance(value, list):
        return [_build_value(item, f"{what}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "__type" in value:
        rest = {key: item for key, item in value.items() if key != "__type"}
        return make(value["__type"], options=rest, what=what)
    if "__value_type" in value:
        return _convert_value(value, what)
    return arguments(value, what=what)


def _convert_value(value: Mapping[str, Any], what: str) -> Any:
    if set(value) != {"__value_type", "value"}:
        raise InputError(
            f"{what} has __value_type, so its only other key must be value; it has {', '.join(value)}."
        )
    kind, argument = value["__value_type"], value["value"]
    if kind == "function":
        return resolve_component(argument, what=what)
    convert = getattr(builtins, kind, None) if isinstance(kind, str) else kind  # such as int or tuple
    if convert is None:
        convert = resolve_component(kind, what=f"{what}.__value_type")
    try:
        return convert(argument)
    except Exception as error:
        raise InputError(f"{what}: cannot convert {argument!r} to {kind}: {error_text(error)}") from error


def _callable_name(kind: Any) -> str:
    return getattr(kind, "__qualname__", None) or type(kind).__qualname__
