"""Choice of the package that computes in fp8, and the reasons where none does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Literal

from atorch_ns.cluster import Cluster
from atorch_ns.errors import MissingPackageError
from atorch_ns.strategy import Plan
from opt_lib._fp8 import torchao, transformer_engine
from opt_lib._fp8.config import TE_KEYS, TORCHAO_KEYS, Fp8Config

Backend = Literal["te", "torchao"]

MIN_CAPABILITY = (8, 9)
"""The first compute capability with fp8 matrix units: Ada. Hopper has 9.0."""

_PACKAGES = {"te": "transformer_engine", "torchao": "torchao"}
_INSTALL = {"te": transformer_engine.INSTALL, "torchao": torchao.INSTALL}
_CALLED = {"te": "Transformer Engine", "torchao": "torchao"}


def choose(config: Fp8Config, cluster: Cluster, plan: Plan | None = None) -> Backend | None:
    """The package to use, ``None`` for none; a plan that divides the model excludes Transformer Engine."""
    names = (name for name in _in_order(config, plan) if why_unavailable(name, config, cluster) is None)
    return next(names, None)


def why_unavailable(backend: Backend | None, config: Fp8Config, cluster: Cluster) -> str | None:
    """Why a package can do nothing here; for ``None``, why none of those that the config allows can."""
    if backend is None:
        reasons = {name: why_unavailable(name, config, cluster) for name in _in_order(config, None)}
        if None in reasons.values():
            return None
        return "; ".join(dict.fromkeys(reason for reason in reasons.values() if reason))
    return _why_not_this_device(config, cluster) or _why_not_this_package(backend, cluster)


def notices(config: Fp8Config, cluster: Cluster) -> Iterator[str]:
    """Settings that the chosen package ignores."""
    backend = choose(config, cluster)
    if backend is None:
        return
    unread = TORCHAO_KEYS if backend == "te" else TE_KEYS
    keys = [key for key in unread if key in config.as_json()]
    if keys:
        yield f"fp8: {_CALLED[backend]} does not read {', '.join(keys)}"
    if backend == "te" and "interval" in config.as_json() and not transformer_engine.reads_interval():
        yield "fp8: this version of Transformer Engine finds new scales in every step and does not read interval"


def _in_order(config: Fp8Config, plan: Plan | None) -> tuple[Backend, ...]:
    if config.backend != "auto":
        return (config.backend,)
    # Transformer Engine does not emulate, and takes no divided model.
    if config.emulate or (plan is not None and transformer_engine.why_not(plan) is not None):
        return ("torchao",)
    keys = set(config.as_json())
    if keys.intersection(TORCHAO_KEYS) and not keys.intersection(TE_KEYS):  # only its settings are given
        return ("torchao", "te")
    return ("te", "torchao")


def _why_not_this_device(config: Fp8Config, cluster: Cluster) -> str | None:
    if config.emulate and config.backend != "te":
        return None
    if cluster.device_type != "cuda":
        why = f"the device is a {cluster.device_type.upper()}, which has no fp8 matrix units"
        if config.backend == "te":
            return (
                f"{why}, and Transformer Engine emulates none{' (it does not read emulate)' if config.emulate else ''}; "
                "{'backend': 'torchao', 'emulate': True} computes on it, slowly, with torchao's scales"
            )
        return f"{why}; {{'backend': 'torchao', 'emulate': True}} computes the same numbers on it, slowly"
    if cluster.capability is not None and cluster.capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (cluster.capability, MIN_CAPABILITY))
        capability = f"compute capability {have}, and fp8 needs {need} (Ada, Hopper, later)"
        return f"{cluster.device_name} has {capability}"
    return None


def _why_not_this_package(backend: Backend, cluster: Cluster) -> str | None:
    package = _PACKAGES[backend]
    if package not in cluster.packages:
        return f"{_CALLED[backend]} is not installed: {_INSTALL[backend]}"
    if importlib.util.find_spec(package) is None:  # planning for another machine
        return None
    try:
        torchao.load() if backend == "torchao" else transformer_engine.load()
    except MissingPackageError as error:
        return str(error)
    return None
