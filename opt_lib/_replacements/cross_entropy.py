"""Last layer and loss of a causal language model of transformers as one, without all logits at once.

A model's forward pass stays as it is. In training with labels its last layer returns :class:`DeferredLogits`,
and a loss function that takes them, without the [N, V] logits in memory, replaces transformers' own. Any
other use of the logits, such as capping them, makes them a tensor first, of which the model's own loss is
computed.

Legend: B samples, T tokens, N tokens of all samples, D features, V classes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from opt_lib._replacements import kernels
from opt_lib._replacements.attention import is_pretrained
from opt_lib._replacements.base import (
    Replacement,
    ReplacementOutcome,
    Requirements,
    replace_modules,
    why_untouchable,
)
from opt_lib._replacements.making import Derived, Forward, derive

CHUNK_BYTES: Final = 64 * 2**20
"""Bytes of the fp32 logits that are computed at once."""

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, int, str], torch.Tensor]
"""``(x [N, D], weight [V, D], bias [V], target [N], ignore_index, reduction "mean" or "sum") -> scalar``."""


class DeferredLogits:
    """Logits [B, T, V] that are not computed yet. Any use but that of :class:`DeferredLoss` computes them.

    Args:
        head: the last layer.
        x: input of the last layer, [B, T, D].
    """

    calls_module_again = True  # see atorch_ns.job.census.refuse_hidden_outputs

    def __init__(self, head: Any, x: torch.Tensor) -> None:
        self._head = head
        self._x = x
        self._logits: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The logits."""
        if self._logits is None:
            # The head is called as the model calls it, with its hooks.
            deferring, self._head._deferring = self._head._deferring, False
            try:
                self._logits = cast(torch.Tensor, self._head(self._x))
            finally:
                self._head._deferring = deferring
        return self._logits

    @property
    def if_computed(self) -> torch.Tensor | None:
        """The logits, where something has asked for them."""
        return self._logits

    def operands(self, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """x [N, D], weight and bias; ``None`` where the logits exist, or the weight is in parts or flat."""
        weight = self._head.weight
        whole = not isinstance(weight, DTensor) and weight.shape == (vocab_size, self._x.shape[-1])
        if self._logits is not None or not whole:
            return None
        return self._x.reshape(-1, self._x.shape[-1]), weight, self._head.bias

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(
            *map(compute_logits, args),
            **{key: compute_logits(value) for key, value in (kwargs or {}).items()},
        )

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for such names: that must not compute the logits.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def __mul__(self, other: Any) -> Any:
        return self.tensor() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.tensor() / other

    def __add__(self, other: Any) -> Any:
        return self.tensor() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.tensor() - other

    def __neg__(self) -> Any:
        return -self.tensor()


def compute_logits(value: Any) -> Any:
    """Logits as a tensor; anything else as it is."""
    return value.tensor() if isinstance(value, DeferredLogits) else value


class DeferredLoss:
    """The loss of a causal language model from :class:`DeferredLogits`, or from a tensor by the model's own.

    Args:
        function: the model's own loss function.
        kernel: ``torch`` or ``liger``.
    """

    def __init__(self, function: Callable[..., torch.Tensor], kernel: str) -> None:
        self._function = function
        self._kernel = kernel

    def __call__(
        self,
        logits: DeferredLogits | torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """transformers' ``ForCausalLMLoss``: label ``t + 1`` against the logits of token ``t``."""
        operands = logits.operands(vocab_size) if isinstance(logits, DeferredLogits) else None
        if operands is None:
            return self._function(
                compute_logits(logits),
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        x, weight, bias = operands
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # the last token has none
        target = shift_labels.reshape(-1).to(x.device)
        # num_items_in_batch counts all micro-batches of a step; transformers divides the sum by it.
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = self._select_loss_function(x, weight, bias)(x, weight, bias, target, ignore_index, reduction)
        if num_items_in_batch is None:
            return loss
        count = num_items_in_batch
        return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)

    def _select_loss_function(self, *tensors: torch.Tensor | None) -> Loss:
        if self._kernel == "liger" and kernels.runs_kernels(*tensors):
            return kernels.linear_cross_entropy
        return chunked_cross_entropy


def chunked_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Cross-entropy of ``F.linear(x, weight, bias)`` in fp32; a chunk's logits are computed twice.

    Args:
        x: [N, D].
        weight: [V, D].
        bias: [V], or ``None``.
        target: [N], classes.
        ignore_index: the target of tokens that do not count.
        reduction: ``mean`` over the tokens that count, or ``sum``.
        chunk_bytes: bytes of a chunk's logits; a chunk has at least one token.
    """
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))  # tokens; 4 bytes for each logit in fp32
    total = x.new_zeros((), dtype=torch.float32)
    for part, labels in zip(x.split(rows), target.split(rows), strict=True):
        # Nothing in a chunk is random, so no random state is kept for its recomputation.
        total = total + checkpoint(
            _loss_sum, part, weight, bias, labels, ignore_index, use_reentrant=False, preserve_rng_state=False
        )
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _loss_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    logits = F.linear(x, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")


NOT_OVER: Final = frozenset({"tensor", "sequence", "pipeline"})
"""Axes that leave the last layer or the tokens in parts when they divide the model."""

_WHOLE_HEAD: Final = Requirements(not_over=NOT_OVER)


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(Replacement):
    """Last layer and loss of transformers' causal language models, in chunks of tokens.

    Attributes:
        kernel: ``torch``, which recomputes a chunk's logits in the backward pass, or ``liger``.
    """

    name: str = "chunked_linear_cross_entropy"
    kernel: str = "torch"
    requirements: Requirements = _WHOLE_HEAD

    only_by_name = True

    looks_for = "causal language models of transformers"

    def concerns(self, model: nn.Module) -> bool:
        """Returns whether a model computes a loss."""
        return any(map(_computes_a_loss, model.modules()))

    def replace(self, model: nn.Module, earlier: Set[nn.Module] = frozenset()) -> ReplacementOutcome:
        """Replaces the last layer, and the classes of the models that compute a loss with it."""
        outcome = ReplacementOutcome(model=model)
        for part in [each for each in model.modules() if _computes_a_loss(each) and each not in earlier]:
            reason = _why_not(part)
            if reason is None:
                model = self._fuse_head_and_loss(model, part)
                outcome.replaced[f"last layer and loss of {type(part).__name__}"] += 1
            else:
                outcome.kept[f"{type(part).__name__}: {reason}"] += 1
        return dataclasses.replace(outcome, model=model)

    def _fuse_head_and_loss(self, model: nn.Module, part: Any) -> nn.Module:
        old = part.get_output_embeddings()
        head: Any = derive(old, "Deferring", _head_forward)
        head._deferring = False  # on only in a training pass with labels
        replace_modules(part, lambda module: module is old, lambda module: head)
        new: Any = derive(part, "Chunked" if self.kernel == "torch" else "Liger", _model_forward)
        # Not a module of it: it stands in its place already, under its own name.
        object.__setattr__(new, "_deferring_head", _Reference(head))
        new._loss_function = DeferredLoss(part.loss_function, self.kernel)
        return _swap_module(model, part, new)


def _swap_module(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    if model is old:
        return new
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:  # it may stand in several places
                setattr(parent, name, new)
    return model


def _computes_a_loss(module: nn.Module) -> bool:
    if not is_pretrained(module) or isinstance(module, Derived):
        return False
    return "labels" in inspect.signature(type(module).forward).parameters


def _why_not(model: Any) -> str | None:
    """Why the loss of a model of transformers cannot be joined with its last layer; ``None`` if it can."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its last layer is {'no module' if head is None else type(head).__name__}, not a Linear"
    if (reason := why_untouchable(head)) is not None:
        return f"its last layer stays, {reason}"
    if "forward" in vars(model):
        return "its forward is set on the object"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss is not transformers' loss of causal language models"
    return None


class _Reference:
    """Holds a module without being one, so that it is not found twice in a model."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def _head_forward(source: Any) -> Forward:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor | DeferredLogits:  # as Linear names it
        return DeferredLogits(self, input) if self._deferring else source.forward(self, input)

    return forward


def _model_forward(source: Any) -> Forward:
    position = list(inspect.signature(source.forward).parameters).index("labels") - 1  # without self

    @functools.wraps(source.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        head = self._deferring_head.module
        trains = labels is not None and self.training and torch.is_grad_enabled()
        # By checkpoint, whose forward pass takes tensors alone.
        is_wrapped = self.get_output_embeddings() is not head
        if not trains or is_wrapped or torch.compiler.is_compiling():
            return source.forward(self, *args, **kwargs)
        # For this pass alone: a call of the head by itself gives a tensor.
        head._deferring = True
        try:
            output = source.forward(self, *args, **kwargs)
        finally:
            head._deferring = False
        return _without_logits(output)

    return forward


def _without_logits(output: Any) -> Any:
    """A model's output with ``None`` for logits that were never computed."""
    if isinstance(output, tuple):
        return tuple(compute_logits(value) for value in output)  # callers read it by position
    if isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, DeferredLogits):
                output[name] = value.if_computed  # type: ignore[index]  # transformers' ModelOutput
    return output
