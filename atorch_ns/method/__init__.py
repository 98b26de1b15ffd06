"""Methods: their contract, the order they are applied in, and the registry."""

from atorch_ns.method.chosen import Chosen, Note, fold_plan, ordered
from atorch_ns.method.method import (
    CarriesState,
    Conflict,
    Expands,
    Expansion,
    FitsCluster,
    Flag,
    FollowsPlan,
    Method,
    MethodConfig,
    ModuleSelectors,
    Need,
    ReplacesModules,
    dtype_name,
)
from atorch_ns.method.phase import ORDER, Phase
from atorch_ns.method.registry import ENTRY_POINT_GROUP, Registry, load_registry
from atorch_ns.method.resolve import Composition, Pairing, Resolved, clash, composition, resolve

__all__ = [
    "ENTRY_POINT_GROUP", "ORDER", "CarriesState", "Chosen", "Composition", "Conflict", "Expands", "Expansion",
    "FitsCluster", "Flag", "FollowsPlan", "Method", "MethodConfig", "ModuleSelectors", "Need", "Note", "Pairing",
    "Phase", "Registry", "ReplacesModules", "Resolved", "clash", "composition", "dtype_name", "fold_plan",
    "load_registry", "ordered", "resolve",
]  # fmt: skip
