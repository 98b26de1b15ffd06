"""Search for a tensor-parallel plan of a model that brings none along."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from atorch_ns.capture.nests import unique_tensors_of
from atorch_ns.sharding.tensor.divisibility import heads_reason, misfits
from atorch_ns.sharding.tensor.narrow_inputs import narrowable
from atorch_ns.sharding.tensor.plan import (
    LayerStyle,
    Layout,
    RegionSpec,
    TensorPlan,
    argument_paths,
    common_parent,
    integer_paths,
    kind_of,
    layer_sizes,
    relative,
    with_wildcards,
)
from atorch_ns.sharding.tensor.regions import candidate_layouts, candidate_regions, layout_of, signature
from atorch_ns.sharding.tensor.selftest import SelfTest, Verdict
from atorch_ns.sharding.tensor.trace import LayerGraph
from atorch_ns.sharding.tensor.unit import unit_for

# torch's error for a view of the wrong size.
_SHAPE = re.compile(r"shape '?\[([\d, -]+)\]'? is invalid for input of size (\d+)")

_MOST_ENDS = 4  # the most layers that a message names

_MOST_TRIES = 24  # the most layouts of one region that are compared with the whole


@dataclass
class _Found:
    layout: Layout = field(default_factory=lambda: Layout({}))
    left: dict[str, str] = field(default_factory=dict)


def find_tensor_plan(model: nn.Module, degree: int, graph: LayerGraph, test: SelfTest) -> TensorPlan:
    """A plan for ``model``, from how its layers are connected.

    Regions are found in the graph, the smallest first and low-rank ones last; each gets the first layout that
    passes the test. Then the vocabulary's embedding and head are divided where possible.

    Args:
        model: the whole model; not changed.
        degree: the number of ranks that layers are divided over.
        graph: the connections, from :func:`trace_layers`.
        test: decides between layouts.
    """
    draft = _Found()
    results: dict[object, tuple[Layout | None, str]] = {}  # regions with one signature are tried once
    for spec in sorted(candidate_regions(graph), key=partial(_is_low_rank, model)):
        if any(path in draft.layout.layers for path in spec.layers):  # a smaller region has them
            continue
        key = signature(model, spec)
        parent = common_parent(spec.layers)
        if key not in results:
            layout, why = _divide_region(model, degree, graph, spec, test=test)
            results[key] = (None if layout is None else layout.within(parent), why)
        inner, why = results[key]
        if inner is None:
            draft.left = {**dict.fromkeys(spec.layers, why), **draft.left}
        else:
            draft.layout = draft.layout.joined(inner.placed(parent))
    _divide_attention(model, degree, graph, draft, test=test)
    draft.layout = with_vocabulary(model, draft.layout, degree, graph)
    draft.left = {p: why for p, why in draft.left.items() if p not in draft.layout.layers}
    _name_the_rest(model, graph, draft, degree)
    return plan_from(model, draft.layout, left=draft.left)


def _is_low_rank(model: nn.Module, spec: RegionSpec) -> bool:
    # The factors of an adapter (LoRA) narrow their input. They are divided after the layers beside them.
    sizes = {
        path: kind.sizes(layer)
        for path in spec.layers
        if (kind := kind_of(layer := model.get_submodule(path)))
    }
    inside = sum(sizes[path][0] for path in spec.columns if path in sizes)
    around = [sizes[path][1] for path in spec.columns if path in sizes]
    around += [sizes[path][0] for path in spec.rows if path in sizes]
    return 2 * inside < min(around, default=0)


def _divide_region(
    model: nn.Module, degree: int, graph: LayerGraph, spec: RegionSpec, *, test: SelfTest
) -> tuple[Layout | None, str]:
    unfit = misfits(model, layout_of(spec), degree)
    if unfit:
        path, why = next(iter(unfit.items()))
        return None, why if path in spec.columns else f"{path}: {why}"
    home = unit_for(model, graph, common_parent(spec.layers)).path
    refusals: list[str] = []
    wrong: list[Layout] = []
    attempts: list[tuple[Layout, Verdict]] = []
    inputs = narrowable(model, graph, home, spec.columns, degree=degree)
    for layout in candidate_layouts(model, spec, degree, inputs):
        if misfits(model, layout, degree) or any(_does_as(layout, *earlier) for earlier in attempts):
            continue
        verdict = test.unit(home, layout, [spec], training=bool(layout.narrow_inputs))
        if verdict.passed:
            return layout, ""
        if not verdict.whole_runs:  # it fails undivided too: no layout can be tested
            return None, verdict.reason
        attempts.append((layout, verdict))
        if verdict.runs:
            wrong.append(layout)  # shapes fit, numbers do not
        refusals.append("no layout tried gives the results of the whole" if verdict.runs else verdict.reason)
        if len(wrong) >= _MOST_TRIES:
            break
    # Layouts whose shapes fit tell more than those that failed to run.
    if wrong:
        return None, narrow_reason(wrong) or refusals[0]
    widths = [size for path in spec.layers for size in layer_sizes(model.get_submodule(path))]
    why = reshape_reason(refusals, widths, degree) or heads_reason(model, spec, degree)
    return None, why or next(iter(refusals), "")


def _does_as(layout: Layout, other: Layout, verdict: Verdict) -> bool:
    # It fails as the other one if it differs only in numbers that the code has not read.
    differ = {*layout.attributes} ^ {*other.attributes}
    if layout.narrow_inputs != other.narrow_inputs or differ & verdict.reads:
        return False
    # Parts of fused layers change the order of elements, never a shape: they matter only if shapes fit.
    if verdict.runs:
        return layout.layers == other.layers
    return _layer_styles(layout) == _layer_styles(other)


def _layer_styles(layout: Layout) -> dict[str, str]:
    return {path: layer.style for path, layer in layout.layers.items()}


def _divide_attention(
    model: nn.Module, degree: int, graph: LayerGraph, result: _Found, *, test: SelfTest
) -> None:
    reasons: dict[object, str] = {}  # the reason against it by kind; empty: it is divided
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or path not in graph.calls:
            continue
        layout = Layout({path: LayerStyle("heads")})
        unit = unit_for(model, graph, path.rpartition(".")[0])
        key = (type(unit.module), relative(path, unit.path), module.num_heads, module.embed_dim)
        if key not in reasons:
            reasons[key] = misfits(model, layout, degree).get(path, "")
            if not reasons[key]:
                verdict = test.unit(unit.path, layout, [])
                wrong = "divided by heads it does not give the results of the whole"
                reasons[key] = verdict.reason and (wrong if verdict.runs else verdict.reason)
        if reasons[key]:
            result.left[path] = reasons[key]
        else:
            result.layout = result.layout.joined(layout)


def with_vocabulary(model: nn.Module, layout: Layout, degree: int, graph: LayerGraph) -> Layout:
    """The layout that also divides the embedding of the vocabulary and the heads that end the model."""
    ends = _end_styles(model, layout, graph)
    full = layout.joined(Layout(ends))
    # An end that is tied to one that does not fit no longer fits either.
    while unfit := misfits(model, full, degree).keys() & ends.keys():
        full = replace(full, layers={p: s for p, s in full.layers.items() if p not in unfit})
    return full


def _end_styles(model: nn.Module, layout: Layout, graph: LayerGraph) -> dict[str, LayerStyle]:
    heads = {
        path: LayerStyle("colwise_gather_output")
        for path in graph.nodes
        if path in graph.outputs and _is_head(model, path, graph)
    }
    tables = {path: LayerStyle("embedding_rowwise") for path in _find_vocabularies(model, graph)}
    return {path: style for path, style in {**heads, **tables}.items() if path not in layout.layers}


def _is_head(model: nn.Module, path: str, graph: LayerGraph) -> bool:
    module = model.get_submodule(path)
    kind = kind_of(module)
    if kind is None or isinstance(module, nn.Embedding) or graph.nodes[path].used_elsewhere:
        return False
    # A head ends the model: no layer reads it, and it widens its input to the vocabulary.
    read = any(path in node.sources for node in graph.nodes.values())
    outputs, inputs = kind.sizes(module)
    return not read and outputs >= inputs


def _find_vocabularies(model: nn.Module, graph: LayerGraph) -> Iterable[str]:
    rows = {
        path: module.num_embeddings
        for path, node in graph.nodes.items()
        if isinstance(module := model.get_submodule(path), nn.Embedding) and not node.used_elsewhere
        # A class made from it may take a weight for each row instead.
        if not any(tensor.is_floating_point() for tensor in unique_tensors_of(graph.calls[path].args))
    }
    # Tables of positions may be as large. Their names say "pos", and GPT-2's is wpe.
    words = {
        path: n
        for path, n in rows.items()
        if "pos" not in path.rpartition(".")[2].lower() and "wpe" not in path
    }
    return [path for path, n in words.items() if 2 * n >= max(words.values())]  # so no token types


def _name_the_rest(model: nn.Module, graph: LayerGraph, result: _Found, degree: int) -> None:
    ends = _end_styles(model, result.layout, graph)
    uneven = {
        path: f"its size {size} is not divisible by {degree}"
        for path in ends
        if (kind := kind_of(module := model.get_submodule(path))) and (size := kind.sizes(module)[0]) % degree
    }
    for path in graph.nodes:
        if path not in result.layout.layers and path not in result.left:
            elsewhere = graph.nodes[path].used_elsewhere
            result.left[path] = uneven.get(
                path, "its weight is used outside it too" if elsewhere else "no pair of layers to divide"
            )


def plan_from(model: nn.Module, layout: Layout, *, left: dict[str, str] | None = None) -> TensorPlan:
    """A plan of patterns that resolves to ``layout``."""
    paths = [path for path, _ in model.named_modules()]
    styles: dict[str, str] = {}
    parts: dict[str, tuple[int, ...]] = {}
    for layer in dict.fromkeys(layout.layers.values()):
        same = [path for path, other in layout.layers.items() if other == layer]
        for pattern in with_wildcards(same, paths):
            styles[pattern] = layer.style
            if layer.parts is not None:
                parts[pattern] = layer.parts
    numbers = tuple(with_wildcards(layout.attributes, integer_paths(model)))
    inputs = tuple(with_wildcards(layout.narrow_inputs, argument_paths(model)))
    return TensorPlan(
        styles=styles, attributes=numbers, parts=parts, narrow_inputs=inputs, where="found", left=left or {}
    )


def reshape_reason(refusals: Iterable[str], widths: Iterable[int], degree: int) -> str | None:
    """The reason why code cannot reshape divided results, from torch's errors; ``None`` if it is another.

    Args:
        refusals: error messages of views, one for each tested layout.
        widths: numbers of features of the undivided layers.
    """
    cause: str | None = None
    whole = set(widths)
    for text in refusals:
        match = _SHAPE.search(text)
        if match is None:
            continue
        shape = [int(size) for size in match[1].split(",")]
        if math.prod(shape) != degree * int(match[2]):  # it is wrong for another reason
            continue
        heads, size = shape[-2:] if len(shape) > 1 else (0, 0)
        if shape[-1] in whole:
            cause = cause or (
                f"its code reshapes to {shape}, with the {shape[-1]} features of all ranks: use -1 there"
            )
        elif heads * size in whole and size % degree == 0:
            # With the number of heads left as it is the view has the right size of a head, with it divided it
            # is as many times too large.
            cause = (
                f"the head size is computed from the number of heads ({heads * size} // {heads} = {size} where a "
                f"head has {size // degree}): use -1 or a head_dim attribute there"
            )
    return cause


def narrow_reason(wrong: Sequence[Layout]) -> str:
    """The reason why attention that runs only with narrow inputs is wrong; empty if it runs without them.

    ``wrong``: the layouts with which it runs, at least one.
    """
    if not all(layout.narrow_inputs for layout in wrong):
        return ""
    names = ", ".join(path.rpartition(".")[2] for path in wrong[0].narrow_inputs)
    return (
        f"its code takes the width of its input for that of its results, and uses the width or the values of {names} "
        "for something else too"
    )


def group_reasons(left: Mapping[str, str]) -> dict[str, str]:
    """Reasons by pattern rather than by path: ``blocks.*.attn.{q,k,v,o}``."""
    # Names of layers by parent pattern and reason; and for each the numbers of the blocks in which it occurs.
    patterns: dict[tuple[str, str], dict[str, None]] = {}
    numbers: dict[tuple[str, str, str], set[str]] = {}
    for path, why in left.items():
        *parents, name = path.split(".")
        digits = ".".join(part for part in parents if part.isdigit())
        pattern = ".".join("*" if part.isdigit() else part for part in parents)
        reason = _without_path(why, path)
        patterns.setdefault((pattern, reason), {}).setdefault(name)
        numbers.setdefault((pattern, reason, name), set()).add(digits)
    reasons: dict[str, str] = {}
    for (parent, reason), names in patterns.items():
        # Names with the same block numbers share one pair of braces.
        alike: dict[frozenset[str], list[str]] = {}
        for name in names:
            alike.setdefault(frozenset(numbers[parent, reason, name]), []).append(name)
        for places, members in alike.items():
            where = parent
            if len(places) == 1:  # in one block only: its number stays
                indices = iter(next(iter(places)).split("."))
                where = ".".join(next(indices) if part == "*" else part for part in parent.split("."))
            last = members[0] if len(members) == 1 else "{" + ",".join(members) + "}"
            key = ".".join(filter(None, (where, last)))
            reasons[key] = f"{reasons[key]}; {reason}" if key in reasons else reason
    return reasons


def _without_path(why: str, path: str) -> str:
    numbers = [part for part in path.split(".") if part.isdigit()]  # of blocks: equal layers, equal reasons
    for number in dict.fromkeys(numbers):
        why = re.sub(rf"(?<=\.){number}(?=\.)", "*", why)
    return why


def open_ends(layout: Layout, graph: LayerGraph) -> str:
    """Advice for column- and row-parallel layers that lack their counterpart; empty if there are none."""
    styles = {path: layer.style for path, layer in layout.layers.items()}
    lines: list[str] = []
    swaps: set[str] = set()
    for path, style in styles.items():
        node = graph.nodes.get(path)
        after = [other for other, there in graph.nodes.items() if path in there.sources]
        # Columns that read the residual stream have rows of all blocks before them: those are right.
        pair = len(after) == 1 and graph.nodes[after[0]].sources == {path}
        if style == "rowwise" and pair and styles.get(after[0]) == "colwise":
            lines.append(
                f"{path} is rowwise and {after[0]}, which takes its results, colwise: exchange the two"
            )
            swaps |= {path, after[0]}
        if node is None or path in swaps:
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
    advice = list({re.sub(r"\.\d+\.", ".*.", line): line for line in reversed(lines)}.values())[::-1]
    return "; ".join(advice[:_MOST_ENDS])
