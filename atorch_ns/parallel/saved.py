"""Saved plans: the folder of an earlier ``parallelize``, and whether its plan still fits."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atorch_ns.capture.blocks import fingerprint
from atorch_ns.capture.nests import leaves
from atorch_ns.errors import InputError
from atorch_ns.parallel.config import ComputeConfig, ReuseType
from atorch_ns.parallel.planning import Planned
from atorch_ns.parallel.policies import is_strategy_file
from atorch_ns.text import first_few, with_article

_FILE = "plan.json"


@dataclass(frozen=True)
class Made:
    """Inputs of a plan by name, as text. A plan fits as long as they are the same."""

    facts: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        dummies: Mapping[str, Any],
        policy: str | Callable[..., Any],
        config: ComputeConfig,
    ) -> Made:
        """Records the arguments of ``parallelize``."""
        policy_text = (
            policy
            if isinstance(policy, str)
            else f"{_qualified_name(policy)} {_source_digest(policy)} {_bound_values(policy)}"
        )
        return cls(
            {
                "policy": policy_text,
                "compute_config": json.loads(json.dumps(config.as_json(), sort_keys=True, default=str)),
                "structure of the module": _structure_digests(module),
                "source of the module": _source_digests(module),
                "dummy_forward_args": _describe_arguments(dummies),
                "files of pas_config": {
                    key: _file_digest(value) for key, value in config.pas_config.items() if key in _READ
                },
                **({"strategy file": _file_digest(policy)} if is_strategy_file(policy) else {}),
            }
        )

    def differences(self, other: Made) -> list[str]:
        """The differences from ``other``, as text."""
        diffs = []
        for name, value in self.facts.items():
            theirs = other.facts.get(name)
            if value == theirs:
                continue
            if isinstance(value, dict) and isinstance(theirs, dict):
                keys = [key for key in {**value, **theirs} if value.get(key) != theirs.get(key)]
                # A changed part changes the digests of all enclosing parts, so only the innermost are named.
                if name in _DIGESTS:
                    inmost = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
                    diffs.append(f"{name}: {first_few(inmost, 4)} changed")
                    continue
                diffs += [f"{name}: {key} is {value.get(key)!r}, and was {theirs.get(key)!r}" for key in keys]
            elif len(str(value)) < 40:
                diffs.append(f"{name}: {value!r}, and was {theirs!r}")
            else:
                diffs.append(f"{name} has changed")
        return diffs


@dataclass(frozen=True)
class PlanFolder:
    """The folder of one module: ``{gen_savedir}/_parallel_modules/{module}/{class}/{instance}``."""

    path: Path

    @classmethod
    def of(cls, savedir: str | os.PathLike[str], kind: type, instance: str | None) -> PlanFolder:
        """The folder of a module class. ``instance`` distinguishes several modules of one class."""
        name = instance if instance is not None else "_"
        if not isinstance(savedir, (str, os.PathLike)):
            raise InputError(f"gen_savedir must be a path; it is {with_article(savedir)}.")
        if not isinstance(name, str) or not name.replace("_", "a").isalnum():  # underscores are allowed
            raise InputError(
                f"instance_name is part of a path, so it must be a plain name; it is {instance!r}."
            )
        return cls(
            Path(savedir) / "_parallel_modules" / Path(*kind.__module__.split(".")) / kind.__qualname__ / name
        )

    def reused(self, origin: Made, reuse: ReuseType) -> Planned | None:
        """The saved plan, or ``None`` if one must be created.

        Raises:
            InputError: with :attr:`ReuseType.MATCH`, if an existing plan does not fit.
        """
        file = self.path / _FILE
        if reuse in (ReuseType.OVERRIDE, ReuseType.GRAPH) or not file.exists():
            return None
        problem = ""
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            differences = origin.differences(Made(document["made"]))
            steps = [(name, config) for name, config in document["strategy"]]
            plan = Planned(steps, tuple(document["notes"]))
            if not (any(name == "parallel_mode" for name, _ in steps) or "strategy file" in origin.facts):
                raise ValueError("its strategy has no parallel_mode")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            differences, plan, problem = [], Planned([], ()), f"it cannot be read ({error})"
        if not (problem or differences):
            return plan
        if reuse is ReuseType.MATCH:
            raise InputError(
                f"the plan in {file} does not fit: {problem or '; '.join(differences)}. Make a new one with reuse='override' or "
                "'moo', or give instance_name to keep both."
            )
        return None

    def keep_resolved(self, strategy: list[Any]) -> None:
        """Replaces the requested strategy by the one resolved when the plan was applied."""
        file = self.path / _FILE
        document = json.loads(file.read_text(encoding="utf-8"))
        self.write(Made(document["made"]), Planned(strategy, tuple(document["notes"])))

    def write(self, origin: Made, plan: Planned) -> None:
        """Writes a plan. A crash leaves the previous one."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"gen_savedir: the folder {self.path} cannot be made: {error}.") from error
        content = {"made": origin.facts, "notes": plan.notes, "strategy": plan.steps}
        text = json.dumps(content, indent=2, default=str)
        draft = self.path / f"{_FILE}.{os.getpid()}"  # not shared by processes that plan at once
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(self.path / _FILE)


def _qualified_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _source_digest(value: Any) -> str:
    try:
        return hashlib.sha256(inspect.getsource(value).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # of a console, or of C
        functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
        codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
        facts = [  # without nested code, whose text has addresses
            (code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")])
            for code in codes
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


_READ = ("load_plan_path", "partition_constraints_path")  # settings that name files


def _file_digest(path: Any) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return "no file"


def _bound_values(policy: Any) -> str:
    if isinstance(policy, functools.partial):
        return f"{_source_digest(policy.func)} {_bound_values(policy.func)} {policy.args!r} {sorted(policy.keywords.items())!r}"
    if inspect.ismethod(policy):
        return f"{_bound_values(policy.__func__)} {_bound_values(policy.__self__)}"
    cells = [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]  # captured values
    has_own = not (inspect.isroutine(policy) or isinstance(policy, type))
    attributes = getattr(policy, "__dict__", {}) if has_own else {}
    source = "" if inspect.isroutine(policy) else _source_digest(type(policy))
    text = f"{source} {cells!r} {getattr(policy, '__defaults__', None)!r} {sorted(attributes.items())!r}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # another in each process


_DIGESTS = ("structure of the module", "source of the module")  # facts with a digest for each part


def _structure_digests(module: nn.Module) -> dict[str, str]:
    return {
        path or _qualified_name(type(module)): fingerprint(part)
        for path, part in module.named_modules(remove_duplicate=False)
        if path.count(".") < 3  # three levels deep
    }


def _source_digests(module: nn.Module) -> dict[str, str]:
    kinds = {_qualified_name(type(child)): type(child) for child in module.modules()}
    return {name: _source_digest(kinds[name]) for name in sorted(kinds)}


def _describe_arguments(dummies: Mapping[str, Any]) -> str:
    def text(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)

    return "; ".join(f"{'.'.join(map(str, path))}: {text(leaf)}" for path, leaf in leaves(dict(dummies)))
