"""Divided tensors, which look whole while each rank holds a part, and a record of operations on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from atorch_ns.capture.nests import map_tensors
from atorch_ns.capture.operators import METADATA
from atorch_ns.errors import StepError
from atorch_ns.sharding.collectives import Group

# Functions that return the same for this rank's part as for the whole tensor.
_AUTOGRAD: frozenset[Any] = frozenset(
    {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")}
    | {Tensor.register_hook}
)


@dataclass(frozen=True)
class LossCall:
    """A cross-entropy of divided logits.

    Attributes:
        shape: the shape of the whole logits.
        dim: the dimension of the vocabulary.
        ignore_index: the target that is left out.
        reduction: none, mean or sum.
        weighted: whether classes have weights.
        smoothing: the share of the target that is spread over all classes.
    """

    shape: tuple[int, ...]
    dim: int
    ignore_index: int
    reduction: str
    weighted: bool
    smoothing: float = 0.0


@dataclass
class LogitUses:
    """A record of the operations on divided tensors.

    Attributes:
        losses: the cross-entropies computed on the parts.
        gathered: descriptions of the uses that needed whole tensors, by function name.
        changed: names of functions that would have changed the tensors in place.
        parameters: trainable tensors that functions on the parts read.
    """

    losses: list[LossCall] = field(default_factory=list)
    gathered: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


class DividedTensor(torch.Tensor):
    """A tensor that appears whole but holds only this rank's part.

    Functions that a subclass supports run on the part. All others gather the whole tensor first, which all
    ranks of the group must do together. In-place changes are refused.
    """

    part_name: ClassVar[str]
    """The part that a rank holds, for messages: "a part of the vocabulary"."""
    method: ClassVar[str]
    """The method whose config has parallel_loss."""

    _part: torch.Tensor
    _uses: LogitUses | None
    _wholes: dict[bool, torch.Tensor]

    def whole(self) -> torch.Tensor:
        """The whole tensor as a plain tensor. Collective on first use."""
        graph = torch.is_grad_enabled()  # one gathered without a graph has no gradient for later uses
        if graph not in self._wholes:
            self._wholes[graph] = self._gather_whole()
        return self._wholes[graph]

    def _gather_whole(self) -> torch.Tensor:
        raise NotImplementedError

    def of_rank(
        self, whole: torch.Tensor, group: Group, uses: LogitUses
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
        """Returns a rank's part of other values divided like these, a function that takes its share of the
        whole gradient, and a function that presents the part as the whole."""
        raise NotImplementedError

    @classmethod
    def _on_parts(
        cls, tensor: Self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of ``func`` on parts, or ``NotImplemented``; ``tensor``: the first divided argument."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in METADATA:  # shape, dtype and the like: the tensor itself has those of the whole
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        tensor = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, cls)), None)
        if tensor is not None:  # None: it stands in a list, as for torch.cat
            if func in _AUTOGRAD:
                return func(tensor._part, *args[1:], **kwargs)
            result = cls._on_parts(tensor, func, args, kwargs)
            # Parts on another device could not be gathered there later: its ranks have no group for them.
            if result is not NotImplemented and getattr(result, "device", tensor.device) == tensor.device:
                return result
        if func is torch.autograd.grad:
            _refuse_gradient(kwargs.get("inputs", args[1] if len(args) > 1 else ()))
        return on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Reached only from C++ code, where gathering is not possible."""
        raise StepError(
            f"{func} was given a tensor of which each rank holds {cls.part_name}, from code that torch does not "
            f"let us intercept. Set parallel_loss=False in the config of {cls.method}."
        )


def whole_logits(data: Any) -> Any:
    """Replaces divided tensors in ``data`` by whole ones. Collective if there are any."""
    tensors: list[DividedTensor] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DividedTensor):
            tensors.append(tensor)
            return tensor.whole()
        return tensor

    result = map_tensors(gather, data)
    return result if tensors else data  # unchanged: the same object


def changes_in_place(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether ``func`` writes to one of its arguments."""
    name = getattr(func, "__name__", "")
    if (
        name in ("__setitem__", "__set__", "__delitem__")
        or kwargs.get("out") is not None
        or kwargs.get("inplace")
    ):
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__index__", "__int__")  # __iadd__ and its like write
    return name.endswith("_") and not name.endswith("__")  # add_, but not __add__


def on_whole(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str = ""
) -> Any:
    """Calls ``func`` with whole tensors.

    Raises:
        StepError: if it would change them in place.
    """
    name = getattr(func, "__name__", str(func))
    out = kwargs.get("out")
    is_written = any(isinstance(tensor, DividedTensor) for tensor in tree_leaves(out))
    changes = changes_in_place(func, args, kwargs) and (out is None or is_written)

    def gather(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DividedTensor):
            return value
        if value._uses is not None:
            value._uses.gathered.setdefault(name, why or name)
            if changes:
                value._uses.changed.append(name)
        if changes:
            raise StepError(
                f"{name} would change, in place, a tensor of which each rank holds {value.part_name}. Use the form "
                f"that returns a new tensor, or set parallel_loss=False in the config of {value.method}."
            )
        return value.whole()

    return func(*map_tensors(gather, args), **map_tensors(gather, dict(kwargs)))


def _refuse_gradient(inputs: Any) -> None:
    for tensor in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        # The loss is computed on the parts, so the whole tensor is not in its graph.
        if not isinstance(tensor, DividedTensor):
            continue
        if tensor._uses is not None:
            tensor._uses.gathered.setdefault("grad", "torch.autograd.grad with regard to the logits")
        raise StepError(
            f"torch.autograd.grad cannot give the gradient of a tensor of which each rank holds {tensor.part_name}. "
            f"Set parallel_loss=False in the config of {tensor.method}."
        )
