"""``atorch-ns methods``: what is registered."""

from __future__ import annotations

import json
from typing import Any

import typer

__all__ = ["methods"]


def methods(
    name: str | None = typer.Argument(None, help="One method, with its config."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the methods that a strategy may name, or the config of one.

    Example: atorch-ns methods fsdp
    """
    from atorch_ns.method import load_registry

    registry = load_registry()
    chosen = [registry.get(name)] if name else list(registry)
    rows: list[dict[str, Any]] = [
        {
            "name": method.name,
            "aliases": list(method.aliases),
            "package": registry.origin(method.name),
            "summary": method.summary,
            "config": method.Config.model_json_schema()["properties"] if method.Config.model_fields else {},
        }
        for method in chosen
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        also = f" (also {', '.join(row['aliases'])})" if row["aliases"] else ""
        typer.echo(f"{row['name']:<{width}}  {row['summary']}{also}  [{row['package']}]")
        if name:
            for key, schema in row["config"].items():
                typer.echo(f"  {key} = {json.dumps(schema.get('default'))}")
                typer.echo(f"      {schema.get('description', '')}")
