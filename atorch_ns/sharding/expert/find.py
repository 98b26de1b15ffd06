"""Search for the modules of a model that hold the experts of a mixture-of-experts layer.

A module holds experts that can be divided if it follows this protocol, as the mixture-of-experts models of
transformers do:

* its ``forward`` takes tokens ``[N, D]``, the indices of each token's experts ``[N, K]``, and the weights of
  these choices ``[N, K]``; the second argument is named after indices and the third after weights
  (``top_k_index``, ``top_k_weights``; ``selected_experts``, ``routing_weights``; …);
* it returns ``[N, D]``: for each token the sum over its choices of weight times the expert's output;
* its parameters hold all experts at once, one along the first dimension: at least one is ``[E, …, …]``;
* if it needs the number of experts, it reads an attribute of its own whose name ends in ``experts``
  (``num_experts``, ``n_routed_experts``, …).

A list of expert modules, alike and without buffers, can be divided too, whatever code calls them on its rows.

Legend: N tokens, D model, K choices a token, E experts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from atorch_ns.capture.blocks import select_modules

_COUNT = re.compile(r"experts$")  # num_experts, n_routed_experts
_INDEX = re.compile(r"ind(ex|ices)|selected|expert_ids|topk_ids")  # top_k_index, selected_experts
_WEIGHT = re.compile(r"weight|score|prob|gate")  # top_k_weights, routing_weights


@dataclass(frozen=True)
class FoundExperts:
    """A module whose experts can be divided.

    Attributes:
        name: path of the module in the model.
        divided: names of parameters that hold one expert at each index of the first dimension.
        whole: names of the other parameters, relative to the module.
        counts: names of attributes that hold the number of experts.
        arguments: names of ``forward``'s arguments for tokens, indices and weights.
    """

    name: str
    module: nn.Module = field(repr=False)
    num_experts: int
    divided: tuple[str, ...]
    whole: tuple[str, ...]
    counts: tuple[str, ...]
    arguments: tuple[str, str, str]

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"


@dataclass(frozen=True)
class ListedExperts:
    """Experts that are modules of their own, and the layer that calls them.

    Attributes:
        name: the path of their list in the model.
        layer: the module whose code calls them.
        experts: the modules, in order.
    """

    name: str
    layer: nn.Module = field(repr=False)
    experts: tuple[nn.Module, ...] = field(repr=False)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(self.experts)

    def dim_of(self, name: str, ranks: int) -> int | None:
        """The dimension along which a parameter of every expert is divided; ``None`` if none divides."""
        shape = self.experts[0].get_parameter(name).shape
        return next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), None)

    def whole(self, ranks: int) -> list[str]:
        """Names in the model of the parameters that are not divided."""
        return [
            f"{self.name}.{number}.{name}"
            for number, expert in enumerate(self.experts)
            for name, _ in expert.named_parameters()
            if self.dim_of(name, ranks) is None
        ]

    def __str__(self) -> str:
        return f"{self.name} ({len(self.experts)} {type(self.experts[0]).__name__})"


@dataclass(frozen=True)
class UnfitExperts:
    """A module that seems to hold experts, or was named as such, and the reason why they stay undivided."""

    name: str
    module: nn.Module = field(repr=False)
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__}): {self.reason}"


def find_experts(
    model: nn.Module, selectors: Iterable[str] | None = None
) -> tuple[list[FoundExperts | ListedExperts], list[UnfitExperts]]:
    """The modules that hold experts, and those that cannot be divided.

    ``selectors``: classes or names of the modules; ``None`` for those that look like experts.
    """
    if selectors is None:
        candidates = [
            (name, module) for name, module in model.named_modules() if _looks_like_experts(name, module)
        ]
    else:
        candidates = [(experts.name, experts.module) for experts in select_modules(model, selectors)]
    experts: list[FoundExperts | ListedExperts] = []
    unfit: list[UnfitExperts] = []
    for name, module in candidates:
        is_list = _is_list_of_experts(module)
        outcome = _examine_list(model, name, module) if is_list else _examine_module(name, module)
        if isinstance(outcome, UnfitExperts):
            unfit.append(outcome)
        else:
            experts.append(outcome)
    return experts, unfit


def _looks_like_experts(name: str, module: nn.Module) -> bool:
    if _argument_names(module) is not None and any(True for _ in module.parameters()):
        return True
    # Lists of blocks look like lists of experts: only the name tells.
    return _is_list_of_experts(module) and "expert" in name.rpartition(".")[2].lower()


def _is_list_of_experts(module: nn.Module) -> bool:
    children = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return is_list and len(children) > 1 and len({type(child) for child in children}) == 1


def _examine_module(name: str, module: nn.Module) -> FoundExperts | UnfitExperts:
    arguments = _argument_names(module)
    if arguments is None:
        return UnfitExperts(
            name,
            module,
            "its forward does not take (tokens, indices of experts, weights of the choices); arguments named "
            "hidden_states, top_k_index and top_k_weights would do",
        )
    parameters = dict(module.named_parameters(recurse=False))
    # Matrices of all experts are [E, …, …]; biases [E, …] and shared matrices have fewer dimensions.
    sizes = {parameter.shape[0] for parameter in parameters.values() if parameter.dim() >= 3}
    if len(sizes) != 1:
        return UnfitExperts(
            name,
            module,
            "it has no parameters of its own with three dimensions whose first one is the number of experts; the "
            f"shapes are {sorted({tuple(parameter.shape) for parameter in module.parameters()})}",
        )
    count = sizes.pop()
    per_expert = tuple(name for name, parameter in parameters.items() if parameter.shape[:1] == (count,))
    whole = tuple(name for name, _ in module.named_parameters() if name not in per_expert)
    counts = tuple(
        key
        for key, value in vars(module).items()
        if type(value) is int and value == count and _COUNT.search(key)
    )
    return FoundExperts(name, module, count, per_expert, whole, counts, arguments)


def _examine_list(model: nn.Module, name: str, module: nn.Module) -> ListedExperts | UnfitExperts:
    layer = model.get_submodule(name.rpartition(".")[0])
    experts = tuple(module.children())
    reason = (
        _why_not_listed(layer, experts) if isinstance(module, nn.ModuleList) else "it is not an nn.ModuleList"
    )
    if reason is None:
        return ListedExperts(name, layer, experts)
    return UnfitExperts(
        name,
        module,
        f"its experts are modules of their own, and {reason}. Stack their parameters into tensors whose first "
        "dimension is the expert, in one module with forward(hidden_states, top_k_index, top_k_weights)",
    )


def _why_not_listed(layer: nn.Module, experts: tuple[nn.Module, ...]) -> str | None:
    if type(layer).forward is nn.Module.forward or isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
        return f"{type(layer).__name__}, which holds their list, has no forward that calls them"
    shapes = [[(key, p.shape, p.dtype, p.requires_grad) for key, p in e.named_parameters()] for e in experts]
    if any(shape != shapes[0] for shape in shapes) or not shapes[0]:
        return "their parameters are not alike"
    if len({id(p) for expert in experts for p in expert.parameters()}) != len(experts) * len(shapes[0]):
        return "they share parameters"
    if any(True for expert in experts for _ in expert.buffers()):
        return "they have buffers, which would differ between ranks"
    return None


def _argument_names(module: nn.Module) -> tuple[str, str, str] | None:
    parameters = list(inspect.signature(module.forward).parameters.values())
    if len(parameters) < 3 or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters[:3]):
        return None
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters[3:]):
        return None
    # Further arguments have defaults, since the test calls the module with three.
    tokens, index, weights = (parameter.name for parameter in parameters[:3])
    if _INDEX.search(index) and _WEIGHT.search(weights):
        return tokens, index, weights
    return None
