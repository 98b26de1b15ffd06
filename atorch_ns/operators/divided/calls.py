"""Calls of operators on one rank's pieces: kernels, random numbers of each rank, and modes of the calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from atorch_ns.capture.graph.operator_graph import Operator
from atorch_ns.operators.divided import kernels
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.operators.rules.table import RUN_AS
from atorch_ns.sharding.rank_context import RankRandomness

Target = Callable[..., Any]


def runnable(op: Operator, rule: Rule) -> tuple[Target, bool]:
    """The callable that runs an operator under a rule, and whether its first argument is the group."""
    target: Target = op.call.operator
    needs_group = False
    like: tuple[Any, ...] = (target,)  # equal for equal computations, whose graphs share one body
    if rule.divides:
        target = RUN_AS.get(target, target)
        if rule.kernel:
            target, needs_group = _bind_kernel(rule, target), True
        elif is_random(op):
            target, needs_group = _own_randomness(target, rule), True
        like = (target if not needs_group else op.call.operator, str(rule), rule.kernel)
    if op.modes:
        target = _in_modes(target, op.modes)
        like = (*like, op.modes)
    if target is not op.call.operator and target not in RUN_AS.values():  # not one of torch's own
        target.__name__ = op.name  # as generated code shows it
        target.__module__ = __name__
        target.like = like  # type: ignore[attr-defined]
    return target, needs_group


def is_random(op: Operator) -> bool:
    """Whether a call draws random numbers."""
    tags = getattr(op.call.operator, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    names = set(op.call.argument_names)
    if "dropout_p" in names:  # attention, whose rate may be 0
        return bool(op.call.argument("dropout_p"))
    for rate in ("p", "dropout"):
        if names >= {rate, "train"}:  # dropout, and recurrent layers
            return bool(op.call.argument(rate)) and bool(op.call.argument("train"))
    return True  # rand, bernoulli and the like


def _bind_kernel(rule: Rule, target: Target) -> Target:
    kernel = getattr(kernels, rule.kernel)

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(group, rule, target, *args, **kwargs)

    return call


def _own_randomness(target: Target, rule: Rule) -> Target:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return with_own_randomness(target, rule, group, *args, **kwargs)  # looked up here: tests replace it

    return call


def with_own_randomness(target: Target, rule: Rule, group: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a divided operator on this rank's own random numbers, then advances the shared ones by one."""
    device = next((value.device for value in args if isinstance(value, torch.Tensor)), torch.device("cpu"))
    randomness = RankRandomness(group.rank(), device)
    randomness.enter()
    try:
        return target(*args, **kwargs)
    finally:
        randomness.leave()


def _in_modes(target: Target, modes: tuple[tuple[Any, ...], ...]) -> Target:
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind, *settings in modes:
                if kind == "grad":  # never on where the caller has it off
                    stack.enter_context(torch.set_grad_enabled(settings[0] and torch.is_grad_enabled()))
                else:
                    device, dtype, is_on, cache = settings  # an autocast region
                    stack.enter_context(torch.autocast(device, dtype, enabled=is_on, cache_enabled=cache))
            return target(*args, **kwargs)

    grad_modes = tuple(mode for mode in modes if mode[0] == "grad")
    if grad_modes != modes:  # for the check of a division, which runs in full precision
        call.without_autocast = _in_modes(target, grad_modes)  # type: ignore[attr-defined]
    return call


def without_autocast(target: Any) -> Any:
    """The callable that runs an operator without the autocast regions around its call."""
    return getattr(target, "without_autocast", target)
