"""Partition constraints: files, the rules that are left, and warnings."""

from __future__ import annotations

from pathlib import Path

import pytest

from atorch_ns.errors import InputError
from atorch_ns.operators.rules.constraints import Constraint, allowed_rules, read_constraints, unused_warnings
from atorch_ns.operators.rules.rule import Rule

RULES = tuple(
    map(Rule.read, ["R <- R,R,R", "0 <- 0,R,R", "1 <- 1,R,R", "2 <- R,0,0", "P <- 2,1,P", "P <- P,R,P"])
)
MODULES = ("model.layers.0.mlp", "Model.Layer.FeedForward")


def left(*constraints: Constraint, operator: str = "aten.linear.default") -> list[str]:
    return [str(rule) for rule in allowed_rules(RULES, operator, MODULES, constraints)]


def on(name: str, *dims: tuple[int, int], parent: str = "", whole: bool = False) -> Constraint:
    return Constraint(name=name, parent_module=parent, allowed_partition_dims=dims, replica_allowed=whole)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "constraints.yaml"
    path.write_text(
        "- allowed_partition_dims:\n  - 0,0\n  - [1, 0]\n  name: torch.nn.functional.linear\n"
        "  parent_module: FeedForward\n  replica_allowed: false\n"
        "- name: torch.matmul\n  allowed_partition_dims: []\n"
    )
    assert read_constraints(path) == (
        on("torch.nn.functional.linear", (0, 0), (1, 0), parent="FeedForward"),
        on("torch.matmul", whole=True),
    )


def test_all_problems_of_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "constraints.yaml"
    path.write_text(
        "- linear\n"
        "- {name: linear, allowed_partition_dims: ['0,0', '0', 'a,b', '1,2,3'], replica_allowed: 2}\n"
        "- {nam: linear}\n"
        "- {name: add, allowed_partition_dims: []}\n"
        "- {name: torch.add, allowed_partition_dims: []}\n"
    )
    with pytest.raises(InputError) as raised:
        read_constraints(path)
    head, *lines = str(raised.value).split("\n")
    assert head == f"9 problems in the partition constraints {path}:"
    assert [line.split(":")[0].strip() for line in lines] == [
        f"entry {n}" for n in (1, 2, 2, 2, 2, 3, 3, 3, 5)
    ]
    assert "Did you mean 'name'" in lines[5]
    assert "constrained twice" in lines[8]


@pytest.mark.parametrize("content", ["{a: 1}", "- [", ""])
def test_what_is_no_list_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "constraints.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=r"constraints\.yaml"):
        read_constraints(path)
    with pytest.raises(InputError, match="No such file"):
        read_constraints(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "name", ["torch.nn.functional.linear", "linear", "aten.linear.default", "aten.linear"]
)
def test_a_constraint_leaves_rules_that_divide_an_allowed_dimension(name: str) -> None:
    assert left(on(name, (0, 0), (1, 1))) == ["0 <- 0,R,R", "P <- 2,1,P"]
    assert left(on(name, (0, 1), whole=True)) == ["R <- R,R,R", "1 <- 1,R,R"]
    assert left(on(name, whole=True)) == ["R <- R,R,R"]


def test_others_are_left_alone() -> None:
    assert left(on("torch.matmul", (0, 0))) == [str(rule) for rule in RULES]
    assert left(on("linear", (0, 0), parent="Attention")) == [str(rule) for rule in RULES]
    assert left(
        on("torch.nn.functional.cross_entropy", (0, 0)), operator="aten.cross_entropy_loss.default"
    ) == ["0 <- 0,R,R"]
    assert left(on("my_package.norm", (0, 0)), operator="atorch_ns.norm.default") == ["0 <- 0,R,R"]


@pytest.mark.parametrize("parent", ["Layer.FeedForward", "layers.0.mlp"])
def test_the_longest_parent_holds(parent: str) -> None:
    outer, inner = on("linear", (0, 0), parent="Layer"), on("linear", (0, 1), parent=parent)
    assert left(outer, inner) == left(inner, outer) == ["1 <- 1,R,R"]


def test_a_constraint_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"aten\.linear\.default in model\.layers\.0\.mlp has no rule.*replica_allowed"
    ):
        left(on("linear", (5, 0)))


def test_unused_constraints_are_told_with_what_is_near() -> None:
    calls = [("aten.linear.default", MODULES), ("aten.matmul.default", MODULES)]
    used = on("linear", parent="FeedForward")
    texts = unused_warnings(calls, [used, on("torch.linea"), on("matmul", parent="FeedForwrd"), on("linear")])
    assert len(texts) == 3
    assert "the model calls no operator 'linea'. Did you mean 'linear'?" in texts[0]
    assert "no module of that name calls 'matmul'. Did you mean 'FeedForward'?" in texts[1]
    assert "longer parent_module" in texts[2]
