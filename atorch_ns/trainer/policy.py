"""Policy of a Trainer: what ``pas_policy`` means, and a module divided by one of parallelize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.parallel import ComputeConfig, ParallelModule, parallelize
from atorch_ns.parallel.policies import POLICIES, is_strategy_file
from atorch_ns.text import did_you_mean
from atorch_ns.trainer.args import ModuleParallelizeConfig, TrainerArgs
from atorch_ns.trainer.components import resolve_component

AUTO = "auto"
"""The policy that searches for a strategy."""


@dataclass(frozen=True)
class Policy:
    """The policy or strategy that determines how the model is trained.

    Attributes:
        rule: a policy of ``parallelize``, by name or as a function; ``None`` for a strategy.
        strategy: a strategy file; ``None`` to search for one, if there is no rule.
    """

    rule: str | Callable[..., Any] | None = None
    strategy: Path | None = None

    @classmethod
    def of(cls, policy: Any) -> Policy:
        """Interprets ``pas_policy``.

        Raises:
            InputError: if it is invalid.
        """
        if isinstance(policy, PathLike) or is_strategy_file(policy):
            path = Path(policy)
            if not path.is_file():
                raise InputError(f"pas_policy: there is no strategy file {path}.")
            return cls(strategy=path)
        if policy == AUTO:
            return cls()
        if isinstance(policy, str) and policy not in POLICIES and "." not in policy:  # functions have dots
            names = [*POLICIES, AUTO]
            raise InputError(
                f"pas_policy: unknown policy {policy!r}.{did_you_mean(policy, names)} Use one of {', '.join(names)}, a "
                "function, or a strategy file."
            )
        return cls(rule=policy if policy in POLICIES else resolve_component(policy, what="pas_policy"))


def divide_module(
    args: TrainerArgs,
    settings: TrainerArgs | ModuleParallelizeConfig,
    module: nn.Module,
    dummies: Mapping[str, Any],
    *,
    config: ComputeConfig,
    cluster: Cluster,
) -> ParallelModule | None:
    """Divides a module by its policy. ``None`` if only plans are created. Collective.

    Args:
        settings: the settings of the module. ``None`` values default to the trainer's.
        dummies: arguments of its ``forward``.

    Raises:
        InputError: if a strategy is used instead of a policy, or the module cannot be divided as requested.
    """

    def setting(name: str) -> Any:
        value = getattr(settings, name)
        return getattr(args, name) if value is None else value

    rule = Policy.of(setting("pas_policy")).rule
    if rule is None:
        raise InputError(
            "pas_policy: model.parallel_modules and runs that only plan need a policy of parallelize; a strategy is for "
            "the whole model."
        )
    runs, reuse = args.run_mode == "run", setting("gen_reuse")
    result = parallelize(
        module,
        dummies,
        rule,
        config,
        gen_savedir=setting("gen_savedir"),
        reuse="moo" if reuse == "auto" else reuse,  # moo: a plan that does not match is replaced
        instance_name=setting("instance_name"),
        load_module=runs,
        broadcast_strategy=setting("broadcast_strategy") if runs and cluster.distributed else "none",
    )
    return result if isinstance(result, ParallelModule) else None
