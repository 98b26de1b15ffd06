"""Partition constraints: nnScaler's file of how operators may be divided, by name and calling module.

::

    - name: torch.nn.functional.linear   # or linear, or aten.linear.default
      parent_module: FeedForward          # part of the dotted classes or path of the modules that call it
      allowed_partition_dims: ["0,0"]     # argument, dimension; [] for none
      replica_allowed: false              # whether it may be whole

Of several constraints on one call that with the longest ``parent_module`` holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import yaml
from torch.distributed.tensor import Shard

from atorch_ns.errors import InputError
from atorch_ns.operators.rules.rule import Rule
from atorch_ns.text import count_noun, did_you_mean, with_article

_FIELDS: Final = ("name", "parent_module", "allowed_partition_dims", "replica_allowed")

_NAMESPACES: Final = ("aten", "atorch_ns")  # of operators; functions have others

_ALIASES: Final = {"cross_entropy": "cross_entropy_loss", "nll_loss": "nll_loss_nd"}  # function: operator


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A constraint on the calls of one operator.

    Attributes:
        name: the operator's name, with or without the module of its function.
        parent_module: part of the path or classes of the calling modules; empty for any.
        allowed_partition_dims: pairs of a tensor argument's number and a dimension that may be divided.
        replica_allowed: whether the operator may be whole.
    """

    name: str
    parent_module: str = ""
    allowed_partition_dims: tuple[tuple[int, int], ...]
    replica_allowed: bool = True

    def allows(self, rule: Rule) -> bool:
        """Whether a call may follow a rule."""
        if not rule.divides:
            return self.replica_allowed
        return any(
            number < len(rule.inputs) and rule.inputs[number] == Shard(dim)  # a bias may be absent
            for number, dim in self.allowed_partition_dims
        )


def read_constraints(path: str | PathLike[str]) -> tuple[Constraint, ...]:
    """The constraints in a YAML file.

    Raises:
        InputError: if the file cannot be read; it names every problem.
    """
    try:
        entries = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise InputError(f"the partition constraints {path} cannot be read: {reason}.") from error
    if not isinstance(entries, list):
        raise InputError(
            f"the partition constraints {path} hold {with_article(entries)}. Write a list of mappings with the keys "
            f"{', '.join(_FIELDS)}."
        )
    problems: list[str] = []  # one error names all of them
    constraints: dict[tuple[str, str], Constraint] = {}
    for number, entry in enumerate(entries, 1):
        errors: list[str] = []
        constraint = _read_constraint(entry, errors)
        if constraint is not None:
            key = (_short_name(constraint.name), constraint.parent_module)  # linear is aten.linear.default
            if key in constraints:
                errors.append(
                    f"{constraint.name} in {constraint.parent_module or 'any module'} is constrained twice"
                )
            constraints[key] = constraint
        problems += [f"entry {number}: {problem}." for problem in errors]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise InputError(
            f"{count_noun(len(problems), 'problem')} in the partition constraints {path}:\n{lines}"
        )
    return tuple(constraints.values())


def allowed_rules(
    rules: Iterable[Rule], operator: str, modules: Sequence[str], constraints: Sequence[Constraint]
) -> tuple[Rule, ...]:
    """The rules of an operator that the constraints allow; all rules if no constraint applies.

    Args:
        rules: all rules of the operator, including the one that divides nothing.
        operator: its name, as ``aten.linear.default`` or ``linear``.
        modules: path and classes of the modules that call it, each joined by dots, the outermost first.

    Raises:
        InputError: if no rule is left.
    """
    rules = tuple(rules)
    constraint = _find_constraint(operator, modules, constraints)
    if constraint is None:
        return rules
    legal = tuple(rule for rule in rules if constraint.allows(rule))
    if not legal:
        raise InputError(
            f"{operator} in {modules[0] or 'the model'} has no rule that its partition constraint allows (name {constraint.name}, "
            f"parent_module {constraint.parent_module!r}). Set replica_allowed, or allow dimensions of its rules: "
            f"{'; '.join(map(str, rules)) or 'none'}."
        )
    return legal


def unused_warnings(
    calls: Iterable[tuple[str, Sequence[str]]], constraints: Sequence[Constraint]
) -> tuple[str, ...]:
    """A warning for each constraint that matches no call.

    Args:
        calls: the operator and the modules of each call, as for :func:`allowed`.
    """
    calls = list(calls)
    ids = {id(_find_constraint(operator, modules, constraints)) for operator, modules in calls}
    return tuple(_unused_text(constraint, calls) for constraint in constraints if id(constraint) not in ids)


def _unused_text(constraint: Constraint, calls: Sequence[tuple[str, Sequence[str]]]) -> str:
    name = _short_name(constraint.name)
    head = f"the partition constraint on {constraint.name} in {constraint.parent_module or 'any module'} is not used:"
    parents = {part for operator, modules in calls if _operator_name(operator) == name for part in modules}
    if not parents:
        operators = {_operator_name(operator) for operator, _ in calls}
        return f"{head} the model calls no operator {name!r}.{did_you_mean(name, operators)}"
    if any(constraint.parent_module in parent for parent in parents):
        return f"{head} constraints with a longer parent_module hold for all its calls."
    names = {part for parent in parents for part in parent.split(".")}
    return f"{head} no module of that name calls {name!r}.{did_you_mean(constraint.parent_module, names)}"


def _find_constraint(
    operator: str, modules: Sequence[str], constraints: Sequence[Constraint]
) -> Constraint | None:
    name = _operator_name(operator)
    candidates = [
        constraint
        for constraint in constraints
        if _short_name(constraint.name) == name
        and any(constraint.parent_module in module for module in modules)  # an empty one is in all of them
    ]
    return max(candidates, key=lambda constraint: len(constraint.parent_module), default=None)


def _operator_name(operator: str) -> str:
    parts = operator.split(".")
    return parts[1] if len(parts) == 3 else parts[-1]  # aten.linear.default, or linear


def _short_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] in _NAMESPACES and len(parts) > 1:
        return parts[1]  # aten.linear.default
    return _ALIASES.get(parts[-1], parts[-1])  # torch.nn.functional.linear


def _read_constraint(entry: Any, problems: list[str]) -> Constraint | None:
    if not isinstance(entry, Mapping):
        problems.append(f"{with_article(entry)} in place of a mapping")
        return None
    problems += [
        f"unknown key {key!r}.{did_you_mean(str(key), _FIELDS)}".rstrip(".?")  # the caller adds a dot
        for key in entry
        if key not in _FIELDS
    ]
    name, parent = entry.get("name"), entry.get("parent_module", "")
    if not isinstance(name, str) or not name:
        problems.append("name is missing; write the operator's, as torch.nn.functional.linear")
    if not isinstance(parent, str):
        problems.append(f"parent_module={parent!r} is not text")
    whole = entry.get("replica_allowed", True)
    if not isinstance(whole, bool):
        problems.append(f"replica_allowed={whole!r} is neither true nor false")
    dims = entry.get("allowed_partition_dims")
    if not isinstance(dims, list):
        problems.append("allowed_partition_dims is not a list; write [] where nothing may be divided")
        dims = []  # the other keys are checked all the same
    pairs = [_read_pair(item, problems) for item in dims]
    if problems or not isinstance(name, str):
        return None
    numbers = tuple(pair for pair in pairs if pair is not None)
    return Constraint(name=name, parent_module=parent, allowed_partition_dims=numbers, replica_allowed=whole)


def _read_pair(item: object, problems: list[str]) -> tuple[int, int] | None:
    texts = item if isinstance(item, list) else str(item).split(",")  # nnScaler writes "0,1", others [0, 1]
    numbers = [int(text) for text in map(str, texts) if text.strip().isdecimal()]
    if len(numbers) == len(texts) == 2:
        return numbers[0], numbers[1]
    problems.append(f"{item!r} in allowed_partition_dims is not a pair of argument and dimension, as '0,1'")
    return None
