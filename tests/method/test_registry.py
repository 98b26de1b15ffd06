"""The registry refuses what would confuse and survives what is broken."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from atorch_ns.errors import MethodNotFoundError, RegistrationError
from atorch_ns.method import ORDER, Method, MethodConfig, Phase, Registry, load_registry

BUILT_IN = {
    "parallel_mode", "ddp", "module_replace", "checkpoint", "half", "compile", "zero1", "zero2", "fsdp", "amp_native",
}  # fmt: skip


def _make(**attributes: Any) -> type[Method[Any]]:
    body = {
        "name": "sample",
        "phase": Phase.STEP,
        "apply": lambda self, job, config: None,
        "__doc__": "Does nothing.",
        **attributes,
    }
    return type("Sample", (Method,), body)


def test_built_in_methods_are_found() -> None:
    registry = load_registry()
    assert {method.name for method in registry} >= BUILT_IN
    assert all(registry.origin(name) == "atorch-ns" for name in BUILT_IN)
    assert registry.get("auto_ddp").name == "ddp"
    assert registry.get("native_dynamo").name == "compile"


def test_suggestion_on_a_miss() -> None:
    with pytest.raises(MethodNotFoundError, match=r"unknown method 'fsdpp'\. Did you mean 'fsdp'\?"):
        load_registry().get("fsdpp")
    with pytest.raises(MethodNotFoundError, match=r"Known: .*amp_native"):
        load_registry().get("qqqqqq")


def test_duplicates_are_refused() -> None:
    registry = Registry([_make()])
    with pytest.raises(RegistrationError, match="'sample' is taken"):
        registry.add(_make(), origin="somebody")
    with pytest.raises(RegistrationError, match="'sample' is taken"):
        registry.add(_make(name="other", aliases=("sample",)))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"name": "Bad Name"}, "lower case"),
        ({"name": ""}, "lower case"),
        ({"phase": "STEP"}, "phase"),
        ({"Config": dict}, "MethodConfig"),
        ({"__doc__": ""}, "docstring"),
        ({"refuses_by": ("nosuch",)}, "Plan has no field nosuch"),
        ({"refuses_by": ("compiled", "sharding.nosuch")}, "Plan has no field sharding.nosuch"),
    ],
)
def test_conventions_are_enforced_when_the_class_is_made(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(RegistrationError, match=words):
        _make(**attributes)


def test_methods_are_final() -> None:
    base = _make()
    with pytest.raises(RegistrationError, match="methods are final"):
        type("Child", (base,), {"__doc__": "A child."})


def test_only_methods_are_registered() -> None:
    with pytest.raises(RegistrationError, match="not a subclass"):
        Registry([int])  # type: ignore[list-item]

    class Unfinished(Method[MethodConfig]):
        """Lacks apply."""

        name: ClassVar[str] = "unfinished"
        phase: ClassVar[Phase] = Phase.STEP

    with pytest.raises(RegistrationError, match="cannot be made"):
        Registry([Unfinished])


def test_every_phase_has_its_place() -> None:
    assert set(ORDER) == set(Phase)
    assert len(ORDER) == len(Phase)


def test_every_field_of_every_config_is_described() -> None:
    for method in load_registry():
        for name, field in method.Config.model_fields.items():
            assert field.description, f"{method.name}.{name}"


def test_sources_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(RegistrationError, match=r"imported from .* is not installed.*pip install -e"):
        load_registry()
