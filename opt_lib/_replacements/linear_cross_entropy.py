"""The last layer and the loss of a causal language model of transformers as one, without all logits at once.

Legend: B samples, T tokens, N tokens of all samples, D features, V classes.

A model's forward pass stays as it is. In training with labels its last layer gives :class:`DeferredLogits` in the
place of a tensor, and its loss function, transformers' own, is exchanged for one that takes them and never holds
the [N, V] logits. Whatever else a model does to its logits before the loss, such as capping them, makes them a
tensor first, and then its own loss is computed: the result is right in any case.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opt_lib._replacements._base import Outcome, Replacement, Requirements, why_untouchable
from opt_lib._replacements._deferred import DeferredLogits, DeferredLoss, computed
from opt_lib._replacements._derived import Derived, Forward, derive
from opt_lib._replacements._pair import replace_modules
from opt_lib._replacements.attention import is_pretrained

__all__ = ["LinearCrossEntropy"]

NOT_OVER: Final = frozenset({"tensor", "sequence", "pipeline"})
"""Where these divide the model, its last layer or its tokens are in parts."""

_WHOLE_HEAD: Final = Requirements(not_over=NOT_OVER)


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(Replacement):
    """Last layer and loss of transformers' causal language models, in chunks of tokens.

    Attributes:
        name: as written in ``include`` and ``exclude``.
        kernel: ``torch``, which recomputes a chunk's logits in the backward pass, or ``liger``.
        requirements: what the kernel needs of a job.
    """

    name: str = "chunked_linear_cross_entropy"
    kernel: str = "torch"
    requirements: Requirements = _WHOLE_HEAD

    only_by_name = True

    @property
    def looks_for(self) -> str:
        """Models that compute their loss."""
        return "causal language models of transformers"

    def concerns(self, model: nn.Module) -> bool:
        """Whether a model computes a loss."""
        return any(map(_computes_a_loss, model.modules()))

    def replace(self, model: nn.Module, spared: Set[nn.Module] = frozenset()) -> Outcome:
        """Replaces the last layer, and the classes of the models that compute a loss with it."""
        kept: dict[str, int] = {}
        outcome = Outcome(model=model)
        for part in [each for each in model.modules() if _computes_a_loss(each) and each not in spared]:
            reason = _why_not(part)
            if reason is not None:
                kept[f"{type(part).__name__}: {reason}"] = 1
                continue
            outcome = self._join(outcome, part)
        outcome.kept.update(kept)
        return outcome

    def _join(self, outcome: Outcome, part: Any) -> Outcome:
        old = part.get_output_embeddings()
        head: Any = derive(old, "Deferring", _head_forward)
        head._deferring = False
        replace_modules(part, lambda module: module is old, lambda module: head)
        joined: Any = derive(part, "Chunked" if self.kernel == "torch" else "Liger", _model_forward)
        # Not a module of it: it stands in its place already, under its own name.
        object.__setattr__(joined, "_deferring_head", _Reference(head))
        joined._loss_function = DeferredLoss(part.loss_function, self.kernel)
        done = _put(outcome.model, part, joined)
        outcome.replaced[f"last layer and loss of {type(part).__name__}"] += 1
        return Outcome(model=done, replaced=outcome.replaced, kept=outcome.kept)


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with ``new`` wherever ``old`` stood."""
    if model is old:
        return new
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
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
    place = list(inspect.signature(source.forward).parameters).index("labels") - 1

    @functools.wraps(source.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[place] if len(args) > place else kwargs.get("labels")
        head = self._deferring_head.module
        if (
            labels is None
            or not self.training
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or _is_gathered_alone(self, head)
        ):
            return source.forward(self, *args, **kwargs)
        head._deferring = True
        try:
            output = source.forward(self, *args, **kwargs)
        finally:
            head._deferring = False
        return _without_logits(output)

    return forward


def _is_gathered_alone(model: Any, head: Any) -> bool:
    """Whether a wrapper such as FSDP1's brings the weight for a forward pass of the layer, and takes it away again.

    It hides inside the wrapper, or its weight is flat before that pass. FSDP2 gives a DTensor, and hooks to the layer.
    """
    if model.get_output_embeddings() is not head:
        return True
    flat = head.weight.shape != (head.out_features, head.in_features)
    return flat and not isinstance(head.weight, DTensor)


def _without_logits(output: Any) -> Any:
    """A model's output with ``None`` for logits that were never computed."""
    if isinstance(output, tuple):
        return tuple(computed(value) for value in output)
    if isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, DeferredLogits):
                output[name] = value.if_computed  # type: ignore[index]  # transformers' ModelOutput
    return output
