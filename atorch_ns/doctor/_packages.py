"""Check: optional packages that are installed can be imported."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from atorch_ns.cluster import OPTIONAL_PACKAGES, installed_packages
from atorch_ns.doctor._base import Finding, Place
from atorch_ns.doctor._isolated import Isolated, isolated

__all__ = ["check_packages"]

_NAME: Final = "packages"
_AT_ONCE: Final = 2
_SHORTEST_S: Final = 60.0


def check_packages(place: Place) -> list[Finding]:
    """Each installed optional package is imported in a process of its own: a broken one may end its interpreter."""
    versions = installed_packages()
    limit = max(place.timeout_s, _SHORTEST_S)

    def attempt(package: str) -> Isolated:
        return isolated(_import, package, timeout_s=limit)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        tried = dict(zip(versions, pool.map(attempt, versions), strict=True))
    found = [
        Finding(
            check=_NAME,
            verdict="warn",
            text=f"{package} {versions[package]} is installed and cannot be imported: {_short(outcome.problem)}",
            fix=f"pip install --force-reinstall {OPTIONAL_PACKAGES[package]}"
            f"   # or: pip uninstall {OPTIONAL_PACKAGES[package]}",
        )
        for package, outcome in tried.items()
        if outcome.problem
    ]
    usable = [f"{package} {versions[package]}" for package, outcome in tried.items() if not outcome.problem]
    absent = [package for package in OPTIONAL_PACKAGES if package not in versions]
    text = f"usable: {', '.join(usable) or 'none'}" + (
        f"; not installed: {', '.join(absent)}" if absent else ""
    )
    return [*found, Finding(check=_NAME, verdict="pass", text=text, figures={"versions": dict(versions)})]


def _import(package: str) -> None:
    importlib.import_module(package)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."
