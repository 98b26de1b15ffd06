"""Modules to be replaced, modules to replace them, and the method called by hand."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.job import Inputs, Job
from atorch_ns.strategy import Plan
from opt_lib.module_replace import ModuleReplace, ModuleReplaceConfig


class Old(nn.Module):
    """[..., size] to [..., size], by a loop that somebody wrote."""

    def __init__(self, size: int, bias: bool = True) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.randn(size))
        self.bias = nn.Parameter(torch.randn(size)) if bias else None
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight * self.scale
        return y if self.bias is None else y + self.bias


class Child(Old):
    """A subclass of what is replaced."""


class FastSubclass(Old):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class FastBuilt(nn.Module):
    """Made from ``size`` and whether there is a bias."""

    def __init__(self, size: int, bias: bool = True, unrelated: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.register_buffer("scale", torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.mul(x, self.weight * self.scale)
        return y if self.bias is None else y.add(self.bias)


class FastFromModule(FastBuilt):
    @classmethod
    def from_module(cls, module: Old) -> FastFromModule:
        return cls(module.size, module.bias is not None, unrelated=7)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Old(4)
        self.plain = Old(4, bias=False)
        self.second = Child(4)
        self.again = self.first
        self.layers = nn.ModuleList([Old(4), nn.Sequential(Old(4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.plain, self.second, self.again, *self.layers):
            x = layer(x)
        return x


class FastLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


GPU = Cluster(
    device_type="cuda",
    device_name="GPU",
    capability=(9, 0),
    packages={"flash_attn": "2.8.3", "liger_kernel": "0.8.5", "apex": "0.1"},
)
"""A machine with everything, to be pretended."""


def job_of(model: nn.Module, cluster: Cluster | None = None, **plan: Any) -> Job:
    return Job.start(Inputs(model=model), cluster or Cluster(), Plan().changed(**plan), seed=0)


def apply(model: nn.Module, include: Any = None, **plan: Any) -> tuple[Job, list[str], list[str]]:
    """The job after the method, its explanations but for what this machine has not, and the warnings."""
    job, explained, warned = apply_to(job_of(model, **plan), include)
    return job, [text for text in explained if "not used: it runs on cuda" not in text], warned


def apply_to(job: Job, include: Any = None) -> tuple[Job, list[str], list[str]]:
    """The job after the method, its explanations, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ModuleReplace().apply(job, ModuleReplaceConfig.model_validate(include))
    return job, job.explained("module_replace"), [str(warning.message) for warning in caught]


def output_and_gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output.float().square().sum(), [x, *parameters], allow_unused=True)
    return [output.detach(), *(g if g is not None else torch.zeros(()) for g in gradients)]
