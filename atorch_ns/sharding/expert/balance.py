"""Balance of a router: its auxiliary loss, computed over the tokens of all ranks.

The loss of the Switch Transformer (https://arxiv.org/abs/2101.03961, equations 4 to 6) and of the models of
transformers is, over the tokens of a batch,

    E * sum over experts e of  f_e * P_e

``f_e`` is the share of choices that fall on expert ``e``, and ``P_e`` its mean probability from the router.
As a product of two means, its mean over ranks is not the value of one process. But only ``P`` has a gradient.
With ``f`` taken over all ranks, each rank's ``E * sum of f_e * P_e`` is linear in its tokens, and the mean
over ranks, value and gradient, is the loss of the whole batch.

Measured on a Qwen-MoE of two layers and six experts, on two ranks of four samples, five steps with a
coefficient of 0.5: balanced over each rank's tokens, the loss is off from one process by 4e-2 and the router
by its whole update; balanced over all ranks, by 1e-6 and 1e-5 of the update.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.errors import StepError

# Names under which configs hold K, the number of experts chosen for a token.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_top_k", "moe_k")
_COEFFICIENT = "router_aux_loss_coef"
_TOLERANCE = 1e-3  # relative: sums in another order differ by less


class GlobalBalance:
    """Replaces a model's ``aux_loss``, and its part in ``loss``, by this rank's part of the global loss.

    The output must also hold ``router_logits``. The model's own loss must equal the loss above, which is
    computed for comparison. Otherwise each rank keeps the loss of its own tokens.

    Args:
        model: the model; all ranks of the group run the same forward passes.
        group: the ranks that see different data.
        demanded: whether a loss that cannot be computed over all ranks is an error; else it is a warning.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, *, demanded: bool) -> None:
        self._model = model
        self._group = group
        self._is_strict = demanded
        self._signature = inspect.signature(model.forward)
        self._given_up = False

    def attach(self) -> None:
        """Adds the hook."""
        self._model.register_forward_hook(torch.compiler.disable(self._replace_aux_loss), with_kwargs=True)

    def _replace_aux_loss(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        loss, logits = getattr(output, "aux_loss", None), getattr(output, "router_logits", None)
        if self._given_up or not isinstance(loss, torch.Tensor) or not isinstance(output, Mapping):
            return None
        mask = self._signature.bind(*args, **kwargs).arguments.get("attention_mask")
        coefficient = _model_setting(model, (_COEFFICIENT,))
        terms = _Seen.of(logits, _model_setting(model, _TOP_K), mask)
        counts = None if terms is None or coefficient is None else self._over_ranks(terms, loss)
        if terms is None or counts is None:
            self._give_up(model)
            return None
        total = counts[-1]  # rows of all ranks
        # E * sum of f_e * P_e: f of all ranks and P of this rank, both divided by the rows of all ranks.
        # Times the number of ranks, so that the mean over ranks is the loss of the whole batch.
        aux = (counts[:-1] * terms.probabilities).sum() / total**2 * len(terms.counts) * self._group.size()
        fields = {**output, "aux_loss": aux.to(loss)}
        if output.get("loss") is not None:
            fields["loss"] = output["loss"] + coefficient * (aux - loss)  # the model has added its own
        return type(output)(**fields)

    @torch.no_grad()
    def _over_ranks(self, terms: _Seen, loss: torch.Tensor) -> torch.Tensor | None:
        unknown = terms.rows.new_full((1,), float(not terms.explains(loss)))  # 1 if this loss is another one
        sums = torch.cat([terms.counts, terms.rows.reshape(1), unknown])  # [E + 2]
        dist.all_reduce(sums, group=self._group)
        return None if bool(sums[-1]) else sums[:-1]  # [E + 1]; all ranks decide alike

    def _give_up(self, model: nn.Module) -> None:
        self._given_up = True
        reason = (
            f"the auxiliary loss of {type(model).__name__} is not the one that can be computed over all ranks "
            "(the Switch Transformer's, from router_logits in the output), so each rank balances its own tokens"
        )
        if self._is_strict:
            raise StepError(f"{reason}, but balance='global' needs all ranks. Use balance='auto'.")
        warnings.warn(f"expert_parallel: {reason}.", stacklevel=2)


class _Seen(NamedTuple):
    """The terms of the loss, over this rank's tokens and all layers."""

    counts: torch.Tensor  # [E], choices by expert
    probabilities: torch.Tensor  # [E], sums of the router's probabilities; has a gradient
    rows: torch.Tensor  # 0-d, tokens times layers

    @classmethod
    def of(cls, logits: Any, top_k: Any, mask: Any) -> _Seen | None:
        """Terms from each layer's logits ``[tokens, E]`` and a mask ``[B, T]``; ``None`` for other shapes."""
        if not isinstance(logits, (tuple, list)) or not logits or not isinstance(top_k, int):
            return None
        if any(not isinstance(tensor, torch.Tensor) or tensor.dim() != 2 for tensor in logits):
            return None
        weight = logits[0].new_ones(len(logits[0]), dtype=torch.float32)  # [tokens]; 0 for padding
        if isinstance(mask, torch.Tensor):
            # A mask of another shape explains no loss. All ranks learn that in the exchange.
            fits = mask.numel() == len(weight)
            weight = mask.reshape(-1).to(weight) if fits else torch.full_like(weight, torch.nan)
        counts = probabilities = weight.new_zeros(logits[0].size(-1))
        for layer in logits:
            shares = layer.softmax(-1)  # [tokens, E]
            choices = shares.topk(top_k, dim=-1).indices  # [tokens, K]
            counts = counts.scatter_add(0, choices.reshape(-1), weight.repeat_interleave(top_k))
            probabilities = probabilities + (shares.float() * weight[:, None]).sum(0)
        return cls(counts, probabilities, weight.sum() * len(logits))

    def explains(self, loss: torch.Tensor) -> bool:
        """Returns whether the model has computed its loss from these terms."""
        mine = (self.counts * self.probabilities).sum() / self.rows**2 * len(self.counts)
        return bool((mine - loss).abs() <= _TOLERANCE * loss.abs())


def _model_setting(model: nn.Module, names: tuple[str, ...]) -> Any:
    config = getattr(model, "config", None)
    # A model of images and text has the settings of its language model in `text_config`.
    for holder in (model, config, getattr(config, "text_config", None)):
        for name in names:
            if isinstance(getattr(holder, name, None), (int, float)):
                return getattr(holder, name)
    return None
