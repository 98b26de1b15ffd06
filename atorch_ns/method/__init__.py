"""Methods: their contract, the order they are applied in, and the registry."""

from __future__ import annotations

from atorch_ns.method._chosen import Chosen, Note, fold_plan, ordered
from atorch_ns.method._composition import Composition, Pairing, composition
from atorch_ns.method._config import Flag, MethodConfig, ModuleSelectors, dtype_name
from atorch_ns.method._method import Conflict, Expansion, Method, Need
from atorch_ns.method._phase import ORDER, Phase
from atorch_ns.method._registry import ENTRY_POINT_GROUP, Registry, load_registry
from atorch_ns.method._resolve import Resolved, clash, resolve

__all__ = [
    "ENTRY_POINT_GROUP",
    "ORDER",
    "Chosen",
    "Composition",
    "Conflict",
    "Expansion",
    "Flag",
    "Method",
    "MethodConfig",
    "ModuleSelectors",
    "Need",
    "Note",
    "Pairing",
    "Phase",
    "Registry",
    "Resolved",
    "clash",
    "composition",
    "dtype_name",
    "fold_plan",
    "load_registry",
    "ordered",
    "resolve",
]
