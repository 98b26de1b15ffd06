"""Selection of the linear layers that compute in fp8."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

from torch import nn

from atorch_ns.text import near_matches
from atorch_ns.torch_compat import plain_name
from opt_lib._replacements.making import Derived

HEAD_NAMES = ("lm_head", "output_embedding", "embed_out", "output_projection")
"""Last name parts that only layers for logits have, at any place in the model."""

LIKELY_HEAD_NAMES = frozenset(
    (
        "head", "output", "logits", "classifier", "unembed", "proj_out", "decoder", "fc_out", "score",
        "to_logits",
    )
)  # fmt: skip
"""Last parts of names of heads, and of other layers: :class:`Heads` also checks place or output size."""


class Heads:
    """Linear layers that compute the logits, found by the model's own accessors, tied weights and names."""

    def __init__(self, model: nn.Module) -> None:
        self._tied_ids = _weights_of_others(model)
        self._output_ids = {id(module) for module in _output_embeddings(model)}  # by the model itself
        # A head has an output for each row of the vocabulary's embedding, the largest.
        rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        self._rows = max(rows, default=None)

    def is_head(self, name: str, module: nn.Linear) -> bool:
        """Returns whether the linear layer computes the logits."""
        if id(module.weight) in self._tied_ids or id(module) in self._output_ids:
            return True
        parent, _, last = name.rpartition(".")
        if last in HEAD_NAMES:
            return True
        return last in LIKELY_HEAD_NAMES and (not parent or module.out_features == self._rows)


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Results of transformers' ``get_output_embeddings()`` on the model and its submodules."""
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            layer = ask()
        except Exception:  # some models have no such layer and raise any exception
            continue
        if isinstance(layer, nn.Module):
            yield layer


def _weights_of_others(model: nn.Module) -> set[int]:
    """Parameters of modules other than linears, such as an embedding whose weight the head may share."""
    others = [module for module in model.modules() if not isinstance(module, nn.Linear)]
    return {id(parameter) for module in others for parameter in module.parameters(recurse=False)}


DIM_MULTIPLE = 16
"""Divisor of both dims of a weight: fp8 kernels read 16 elements along inputs, backward along outputs."""

_MARKS = frozenset({"_is_hf_initialized"})
"""Attributes that transformers leaves on every module; nothing reads them after the model is built."""

EXCLUDED = "left out by exclude"
NOT_INCLUDED = "not in include"
SUBCLASS = "a subclass of nn.Linear, which computes in its own way"
REPLACED = "module_replace gave it a forward pass of its own, which fp8 would lose; exclude that replacement to have it"
FP8_ALREADY = "in fp8 before"
CONV1D = "a Conv1D of transformers, which is not an nn.Linear"
HOOKED = "it has hooks or parametrizations, which another module would lose"
TIED = "its weight is shared, and one of its names would not be gathered in fp8"
SIZES = f"dims that are not multiples of {DIM_MULTIPLE}"
HEAD = "it makes the logits, which fp8 harms; name it in include to have it"


@dataclass(frozen=True)
class Selection:
    """Linear layers by their paths in the model.

    Attributes:
        replaced: the layers that are to compute in fp8.
        kept: skipped layers, keyed by reason.
    """

    replaced: tuple[str, ...]
    kept: Mapping[str, tuple[str, ...]]

    @property
    def heads(self) -> tuple[str, ...]:
        """Layers that make the logits and that nobody has excluded."""
        return self.kept.get(HEAD, ())

    def refused(self, include: Iterable[str]) -> dict[str, str]:
        """Entries of ``include`` that match no replaced layer, with the reasons."""
        refusals = {}
        for part in include:
            reasons = [reason for reason, names in self.kept.items() if any(part in name for name in names)]
            if reasons and not any(part in name for name in self.replaced):
                refusals[part] = "; ".join(reasons)
        return refusals

    def listed(self) -> str:
        """All layers; skipped ones with the reasons."""
        rest = "; ".join(
            f"{', '.join(map(_display_name, names))}: {reason}" for reason, names in self.kept.items()
        )
        layers = ", ".join(map(_display_name, self.replaced))
        return f"replaced {layers or 'nothing'}; not replaced: {rest or 'nothing'}"

    def why_nothing(self) -> str:
        """Why nothing is replaced."""
        return self.describe_kept() or "the model has no nn.Linear"

    def describe_kept(self) -> str:
        """Skipped layers with the reasons; empty if there are none."""
        return "; ".join(f"{fold_names(names)}: {reason}" for reason, names in self.kept.items())


def find_linears(
    model: nn.Module,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    *,
    degree: int = 1,
    keep_tied: bool = False,
) -> Selection:
    """The linears of ``model`` that compute in fp8.

    Args:
        model: the model.
        include: parts of names, one of which a linear's name must contain; ``None`` for all.
        exclude: parts of names that it may not contain.
        degree: number of ranks over which tensor parallelism divides one dim of each weight.
        keep_tied: whether linears with tied weights stay as they are, even if ``include`` names them.
    """
    heads = Heads(model)
    shared = _shared_weights(model) if keep_tied else frozenset()
    linear_names: list[str] = []
    names_by_reason: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        name = plain_name(path)
        if _is_conv1d(module):
            names_by_reason.setdefault(_why_not_named(name, include, exclude) or CONV1D, []).append(name)
        if not isinstance(module, nn.Linear):
            continue
        reason = _why_not_named(name, include, exclude) or _why_not_exact(module)
        if reason is None and _is_odd(module, DIM_MULTIPLE * degree):
            reason = (
                SIZES
                if degree == 1 or _is_odd(module, DIM_MULTIPLE)
                else f"{SIZES} on each of {degree} tensor ranks"
            )
        if reason is None and include is None and heads.is_head(name, module):  # include may name it
            reason = HEAD
        if reason is None and id(module.weight) in shared:
            reason = TIED
        if reason is None:
            linear_names.append(name)
        else:
            names_by_reason.setdefault(reason, []).append(name)
    return Selection(tuple(linear_names), {reason: tuple(names) for reason, names in names_by_reason.items()})


def is_named(name: str, include: Sequence[str] | None, exclude: Sequence[str]) -> bool:
    """Returns whether include and exclude select a layer of this name."""
    if any(part in name for part in exclude):
        return False
    return include is None or any(part in name for part in include)


def lora_layers(
    module_classes: Mapping[str, Iterable[str]], include: Sequence[str] | None, exclude: Sequence[str]
) -> list[str]:
    """Paths of peft's LoRA layers that include and exclude admit; ``module_classes`` has classes by path."""
    return [
        path
        for path, classes in module_classes.items()
        if f"{path}.lora_A" in module_classes
        and any(name.startswith("peft.") for name in classes)
        and is_named(path, include, exclude)
    ]


def unmatched_parts(model: nn.Module, parts: Iterable[str]) -> dict[str, list[str]]:
    """Entries of ``parts`` that no linear's name contains, each with the parts of names nearest to it."""
    names = [
        plain_name(path)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) or _is_conv1d(module)
    ]
    return {
        part: near_matches(part, _dotted_segments(names, part.count(".") + 1))
        for part in parts
        if not any(part in name for name in names)
    }


def _dotted_segments(names: Iterable[str], length: int) -> list[str]:
    segments: dict[str, None] = {}  # in order, each once
    for name in names:
        parts = name.split(".")
        for start in range(len(parts) - length + 1):
            segments[".".join(parts[start : start + length])] = None
    return list(segments)


def fold_names(names: Iterable[str]) -> str:
    """Names with their numbers replaced by ``*``, equal ones counted: ``"layers.*.up (24), stem"``."""
    counts: dict[str, list[str]] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
        counts.setdefault(pattern, []).append(_display_name(name))
    return ", ".join(
        group[0] if len(group) == 1 else f"{pattern} ({len(group)})" for pattern, group in counts.items()
    )


def _display_name(name: str) -> str:
    return name or "the model itself"


def _why_not_named(name: str, include: Sequence[str] | None, exclude: Sequence[str]) -> str | None:
    if is_named(name, include, exclude):
        return None
    return EXCLUDED if any(part in name for part in exclude) else NOT_INCLUDED


def _why_not_exact(module: nn.Linear) -> str | None:
    if any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__):
        return FP8_ALREADY
    if isinstance(module, Derived):
        return REPLACED
    if type(module) is not nn.Linear:
        return SUBCLASS
    if _is_hooked(module):
        return HOOKED
    more = _more_than_a_linear(module)
    if more:
        return f"it holds {', '.join(more)} besides what an nn.Linear has, which another module would lose"
    return None


def _is_odd(module: nn.Linear, multiple: int) -> bool:
    return bool(module.in_features % multiple or module.out_features % multiple)


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


_TENSORS_AND_MODULES = ("_parameters", "_buffers", "_modules")


def _is_hooked(module: nn.Module) -> bool:
    # Hooks of all kinds are in containers, which are empty in a new module.
    containers = (
        value
        for name, value in vars(module).items()
        if name.startswith("_") and name.endswith("hooks") and isinstance(value, Sized)
    )
    return any(len(each) for each in containers) or "forward" in vars(module)


def _more_than_a_linear(module: nn.Linear) -> list[str]:
    new = nn.Linear(1, 1, device="meta")
    names = set(vars(module)).difference(_MARKS, vars(new))
    for name in _TENSORS_AND_MODULES:
        names.update(set(vars(module)[name]).difference(vars(new)[name]))
    return sorted(names)


def _shared_weights(model: nn.Module) -> frozenset[int]:
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return frozenset(key for key, count in counts.items() if count > 1)
