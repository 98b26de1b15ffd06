"""``atorch-ns methods``: the registered methods."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atorch_ns.cli._options import AsJson

if TYPE_CHECKING:
    from atorch_ns.method import Composition, Registry


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Method to describe: its config, and the methods it combines with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods of a strategy, or describe one: its config, and the methods it combines with.

    Example: atorch-ns methods fsdp
    """
    from atorch_ns.method import composition, load_registry

    registry = load_registry()
    selection = [registry.get(name)] if name else list(registry)
    pairs = composition(registry) if name or as_json else None  # computed only where they are shown
    rows = [_method_row(registry, method, pairs) for method in selection]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        also = f" (also {', '.join(row['aliases'])})" if row["aliases"] else ""
        typer.echo(f"{row['name']:<{width}}  {row['summary']}{also}  [{row['package']}]")
    if name:
        typer.echo("\n".join(_detail_lines(rows[0])))


def _method_row(registry: Registry, method: Any, pairs: Composition | None) -> dict[str, Any]:
    row = {
        "name": method.name,
        "aliases": list(method.aliases),
        "package": registry.origin(method.name),
        "summary": method.summary,
        "config": method.Config.model_json_schema()["properties"] if method.Config.model_fields else {},
    }
    return row if pairs is None else row | _composition_columns(method.name, pairs)


def _composition_columns(name: str, pairs: Composition) -> dict[str, Any]:
    # [(other method, reason against the pair, or None)], in default configs.
    others = [
        (second if first == name else first, reason)
        for first, second, reason in pairs.pairings
        if name in (first, second)
    ]
    return {
        "composes_with": [other for other, reason in others if reason is None],
        "conflicts": {other: reason for other, reason in others if reason is not None},
    }


def _detail_lines(row: dict[str, Any]) -> list[str]:
    defaults = {key: json.dumps(schema.get("default")) for key, schema in row["config"].items()}
    widths = [max(map(len, column), default=0) for column in (defaults.keys(), defaults.values())]
    lines = ["", "config, with its defaults:"] if defaults else ["", "no config"]
    lines += [
        f"  {key:<{widths[0]}}  {default:<{widths[1]}}  {row['config'][key].get('description', '')}"
        for key, default in defaults.items()
    ]
    lines += ["", f"combines with: {', '.join(row['composes_with']) or 'nothing else'}"]
    if row["conflicts"]:
        lines += ["", "cannot be combined with:"]
        lines += [f"  {other}: {reason}" for other, reason in row["conflicts"].items()]
    return lines
