"""Why layers stay whole or a plan fails, in words that say what to change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from atorch_ns.sharding._tensor_plan import Layout
from atorch_ns.sharding._tensor_trace import LayerGraph

__all__ = ["grouped", "narrow_reason", "open_ends", "reshape_reason"]

_SHAPE = re.compile(r"shape '?\[([\d, -]+)\]'? is invalid for input of size (\d+)")
"""How torch refuses a view."""

_MOST_ENDS = 4
"""Layers that a message names, at most."""


def reshape_reason(refusals: Iterable[str], widths: Iterable[int], degree: int) -> str | None:
    """What keeps code from reshaping divided results, from what torch said to layouts that were tried.

    Args:
        refusals: errors of views, one for each layout.
        widths: features of the undivided layers.
        degree: ranks.

    Returns:
        A clause; ``None`` if the errors say something else.
    """
    found: str | None = None
    whole = set(widths)
    for text in refusals:
        match = _SHAPE.search(text)
        if match is None:
            continue
        shape = [int(size) for size in match[1].split(",")]
        if math.prod(shape) != degree * int(match[2]):
            continue
        heads, size = shape[-2:] if len(shape) > 1 else (0, 0)
        if shape[-1] in whole:
            found = found or (
                f"its code reshapes to {shape}, with the {shape[-1]} features of all ranks: use -1 there"
            )
        elif heads * size in whole and size % degree == 0:
            # With the number of heads left as it is the view has the right size of a head, with it divided it
            # is as many times too large.
            found = (
                f"the head size is computed from the number of heads ({heads * size} // {heads} = {size} where a "
                f"head has {size // degree}): use -1 or a head_dim attribute there"
            )
    return found


def narrow_reason(wrong: Sequence[Layout]) -> str:
    """Why attention that runs with narrow inputs alone gives other results; empty if it runs with others too.

    Args:
        wrong: the layouts with which it runs, one at least.
    """
    if not all(layout.narrow_inputs for layout in wrong):
        return ""
    names = ", ".join(path.rpartition(".")[2] for path in wrong[0].narrow_inputs)
    return (
        f"its code takes the width of its input for that of its results, and uses the width or the values of {names} "
        "for something else too"
    )


def grouped(left: Mapping[str, str]) -> dict[str, str]:
    """Reasons by pattern of the paths that they hold for: ``blocks.*.attn.{q,k,v,o}`` rather than each path."""
    patterns: dict[tuple[str, str], dict[str, None]] = {}
    numbers: dict[tuple[str, str, str], set[str]] = {}
    for path, why in left.items():
        *parents, name = path.split(".")
        digits = ".".join(part for part in parents if part.isdigit())
        starred = ".".join("*" if part.isdigit() else part for part in parents)
        reason = _without_path(why, path)
        patterns.setdefault((starred, reason), {}).setdefault(name)
        numbers.setdefault((starred, reason, name), set()).add(digits)
    found: dict[str, str] = {}
    for (parent, reason), names in patterns.items():
        alike: dict[frozenset[str], list[str]] = {}
        for name in names:
            alike.setdefault(frozenset(numbers[parent, reason, name]), []).append(name)
        for places, members in alike.items():
            where = parent
            if len(places) == 1:
                where = _placed(parent, next(iter(places)))
            last = members[0] if len(members) == 1 else "{" + ",".join(members) + "}"
            key = ".".join(filter(None, (where, last)))
            found[key] = f"{found[key]}; {reason}" if key in found else reason
    return found


def _placed(starred: str, digits: str) -> str:
    """The path with its own numbers again."""
    numbers = iter(digits.split("."))
    return ".".join(next(numbers) if part == "*" else part for part in starred.split("."))


def _without_path(why: str, path: str) -> str:
    """The reason without the numbers of blocks, so that those of equal layers are equal."""
    numbers = [part for part in path.split(".") if part.isdigit()]
    for number in dict.fromkeys(numbers):
        why = re.sub(rf"(?<=\.){number}(?=\.)", "*", why)
    return why


def open_ends(layout: Layout, graph: LayerGraph) -> str:
    """Columns and rows that have no other end in the layout, as sentences; empty if there are none."""
    styles = {path: layer.style for path, layer in layout.layers.items()}
    lines: list[str] = []
    swapped: set[str] = set()
    for path, style in styles.items():
        node = graph.nodes.get(path)
        after = [other for other, there in graph.nodes.items() if path in there.sources]
        # Columns that read the residual stream have rows of all blocks before them: those are right.
        pair = len(after) == 1 and graph.nodes[after[0]].sources == {path}
        if style == "rowwise" and pair and styles.get(after[0]) == "colwise":
            lines.append(
                f"{path} is rowwise and {after[0]}, which takes its results, colwise: exchange the two"
            )
            swapped |= {path, after[0]}
        if node is None or path in swapped:
            continue
        if style == "rowwise" and not any(styles.get(source) == "colwise" for source in node.sources):
            before = ", ".join(sorted(node.sources))
            lines.append(
                f"{path} is rowwise and nothing before it is colwise"
                + (f": make {before} colwise" if before else "")
            )
        elif style == "colwise" and path in graph.outputs:
            lines.append(
                f"{path} is colwise and its results leave the model: use colwise_gather_output for it"
            )
        elif style == "colwise" and not any(styles.get(other) == "rowwise" for other in after):
            lines.append(
                f"{path} is colwise and nothing after it is rowwise: make {', '.join(after)} rowwise"
            )
    # Blocks are alike: one line for each kind of layer.
    shown = list({re.sub(r"\.\d+\.", ".*.", line): line for line in reversed(lines)}.values())[::-1]
    return "; ".join(shown[:_MOST_ENDS])
