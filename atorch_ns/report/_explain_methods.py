"""What each method of a strategy does there, read off the methods themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator

from atorch_ns.cluster import Cluster
from atorch_ns.errors import MethodNotFoundError
from atorch_ns.method import Chosen, Registry, clash, resolve
from atorch_ns.report._units import counted, sentence
from atorch_ns.strategy import Strategy

__all__ = ["explain_method", "explain_strategy"]


def explain_strategy(strategy: Strategy, cluster: Cluster, registry: Registry) -> tuple[str, ...]:
    """Each method in order of application and why it is there; then where the strategy came from.

    Raises:
        StrategyError: if it cannot be used on the cluster.
    """
    resolved = resolve(strategy, cluster, registry)
    # A device that the strategy does not record is not claimed.
    device = f", {strategy.requires.device}" if strategy.requires.device else ""
    lines = [f"{strategy}, on {counted(cluster.world_size, 'process', 'processes')}{device}"]
    for item in resolved.chosen:
        settings = item.config.as_json()
        shown = f" [{json.dumps(settings, ensure_ascii=False)}]" if settings else ""
        lines.append(f"  {item.method.name}: {item.method.explain(item.config, cluster)}{shown}")
    lines += [f"  {note.text}" for note in resolved.notes]
    lines += [
        f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in strategy.provenance.items()
    ]
    return tuple(lines)


def explain_method(strategy: Strategy, name: str, cluster: Cluster, registry: Registry) -> tuple[str, ...]:
    """Why a method is in a strategy, or whether it could be.

    Raises:
        MethodNotFoundError: if no installed method has this name.
    """
    if name not in registry:
        raise MethodNotFoundError([registry.unknown(name)])
    return tuple(_of_method(strategy, registry.get(name).name, cluster, registry))


def _of_method(strategy: Strategy, name: str, cluster: Cluster, registry: Registry) -> Iterator[str]:
    method = registry.get(name)
    chosen = resolve(strategy, cluster, registry).chosen
    mine = next((item for item in chosen if item.method.name == name), None)
    if mine is not None:
        yield sentence(f"{name} is in the strategy: {method.explain(mine.config, cluster)}")
        return
    yield f"{name} is not in the strategy. {method.summary}"
    config = method.Config()
    absent = method.unavailable(config, cluster)
    if absent is not None:
        yield sentence(f"  Here it would be left out: {absent}")
    reasons = [(item, clash(Chosen(method, config), item)) for item in chosen]
    for item, reason in reasons:
        if reason is not None:
            yield f"  It cannot stand together with {item.method.name}: {reason}"
    if absent is None and not any(reason for _, reason in reasons):
        yield "  It could be added; a report of a search (report.json) would say what it costs."
