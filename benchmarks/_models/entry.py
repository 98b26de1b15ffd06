"""Entry of the sweep: a model as its users have it, one batch of it, its loss, and what makes it comparable."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from atorch_ns.capture.nests import tensors_of
from atorch_ns.capture.random_states import BatchNorm
from atorch_ns.testing import Case

__all__ = [
    "Entry",
    "Unfit",
    "case_of",
    "first_floating",
    "make_comparable",
    "num_batch_norms",
    "num_parameters",
]

_BIAS: Final = 0.05
_LARGEST: Final = 1e3


class Unfit(Exception):
    """The entry cannot be trained in one process here, or two runs of it cannot be compared; says why."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the sweep.

    Attributes:
        source: where it comes from: ``"transformers"``, ``"timm"``, ``"torchvision"`` or ``"by hand"``.
        name: its name there.
        kind: what it does: ``"causal"``, ``"image"`` …
        make: builds the case, whose ``build`` returns the one model that it was made with: ranks are forked and each
            changes its own copy. Raises what the model's code raises.
    """

    source: str
    name: str
    kind: str
    make: Callable[[], Case]

    @property
    def key(self) -> str:
        """``source/name``."""
        return f"{self.source}/{self.name}"

    @property
    def place(self) -> int:
        """Number by which entries are ordered and sampled: all sources mixed, and the same in every sweep."""
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16)

    def case(self) -> Case:
        """The case, with its model seeded and made comparable."""
        torch.manual_seed(20)
        case = self.make()
        model = make_comparable(case.build())
        return dataclasses.replace(case, name=self.key, build=lambda: model)


def case_of(
    model: nn.Module,
    make_batch: Callable[[int, int], Any],
    loss_func: Callable[[Any, Any], Tensor],
    model_input_format: str | None = None,
) -> Case:
    """The case of one model, which an entry names."""
    return Case(
        name="",
        build=lambda: model,
        make_batch=make_batch,
        loss_func=loss_func,
        model_input_format=model_input_format,
        block="",
    )


def make_comparable(model: nn.Module) -> nn.Module:
    """The model in training mode without chance, and with weights that show an error.

    Dropout is off: every rank draws masks of its own, as one process draws others, so two runs with it can never be
    compared. Biases are moved away from zero: one that is added twice changes the output then. What a constructor
    leaves uninitialised is drawn.
    """
    model.train()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and re.search(r"drop|^p$|jitter", name):
                setattr(module, name, 0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if not bool(torch.isfinite(parameter).all()) or float(parameter.abs().max()) > _LARGEST:
                parameter.normal_(std=_BIAS)
            if name.endswith("bias"):
                parameter.add_(_BIAS * torch.randn_like(parameter))
    return model


def num_parameters(make: Callable[[], nn.Module]) -> int:
    """Of a model, without its weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def has_experts(model: nn.Module) -> bool:
    """Whether it is a mixture of experts, by the names of its parameters."""
    return any("expert" in name for name, _ in model.named_parameters())


def num_batch_norms(model: nn.Module) -> int:
    """How many layers normalise by statistics of the batch."""
    return sum(isinstance(module, BatchNorm) for module in model.modules())


def first_floating(output: Any, batch_size: int) -> Tensor:
    """The first tensor of an output that has a row for each sample, which no other sample changes.

    Similarities of all samples with all others are left out: ranks that have different samples cannot compute them.

    Raises:
        Unfit: if there is none.
    """
    for leaf in tensors_of(output):
        if not leaf.is_floating_point() or leaf.dim() < 2:
            continue
        if leaf.shape[0] == batch_size and leaf.shape != (batch_size, batch_size):
            return leaf
    raise Unfit("its output has no floating tensor with a row for each sample")


def distance_to_waves(values: Tensor) -> Tensor:
    """Mean square of the difference to a fixed pattern, the same for every sample.

    Not of the values themselves: those of a normalised output are constant.
    """
    pattern = torch.arange(values[0].numel(), device=values.device, dtype=torch.float32).mul(1.7).cos()
    return (values - pattern.view_as(values[0])).square().mean()
