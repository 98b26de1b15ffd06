"""Operator plans: files, differences, and what does not fit a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from atorch_ns.errors import InputError
from atorch_ns.operators.plan import OperatorPlan
from atorch_ns.operators.rules.rule import Rule

PLACEMENTS = st.one_of(st.just(Replicate()), st.just(Partial()), st.builds(Shard, st.integers(0, 5)))
SIDES = st.lists(PLACEMENTS, max_size=3).map(tuple)
PLANS = st.builds(
    OperatorPlan,
    operators=st.dictionaries(st.text(max_size=8), st.builds(Rule, SIDES, SIDES), max_size=4),
    parameters=st.dictionaries(st.text(max_size=8), st.builds(Shard, st.integers(0, 5)), max_size=4),
    degree=st.none() | st.integers(1, 64),
    note=st.text(max_size=8),
)

UP, DOWN, NORM = (f"layers.*.mlp.{name}#0" for name in ("up/linear", "down/linear", "norm/rms_norm"))
PLAN = OperatorPlan(
    operators={UP: Rule.read("2 <- R,0"), DOWN: Rule.read("P <- 2,1"), NORM: Rule.read("R <- R,R")},
    parameters={"layers.*.mlp.up.weight": Shard(0), "layers.*.mlp.norm.weight": Replicate()},
    degree=4,
    note="by hand",
)
LEGAL = {UP: [Rule.read("2 <- R,0"), Rule.read("0 <- 0,R")], DOWN: [Rule.read("P <- 2,1")]}


@given(PLANS)
def test_a_plan_is_read_as_it_was_written(plan: OperatorPlan) -> None:
    assert OperatorPlan.from_text(plan.text) == plan
    assert OperatorPlan.from_json(plan.as_json()) == plan


@given(PLANS, st.randoms())
def test_equal_plans_have_equal_texts(plan: OperatorPlan, chance: object) -> None:
    items = list(plan.operators.items())
    chance.shuffle(items)  # type: ignore[attr-defined]
    other = OperatorPlan(
        operators=dict(items), parameters=plan.parameters, degree=plan.degree, note=plan.note
    )
    assert other.text == plan.text
    assert plan.diff(other) == ""


def test_the_file_has_one_entry_on_a_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.write(path)
    assert path.read_text() == (
        '{\n  "schema": 1,\n  "degree": 4,\n  "note": "by hand",\n  "operators": {\n'
        '    "layers.*.mlp.down/linear#0": "P <- 2,1",\n'
        '    "layers.*.mlp.norm/rms_norm#0": "R <- R,R",\n'
        '    "layers.*.mlp.up/linear#0": "2 <- R,0"\n  },\n  "parameters": {\n'
        '    "layers.*.mlp.norm.weight": "R",\n    "layers.*.mlp.up.weight": "0"\n  }\n}\n'
    )
    assert OperatorPlan.read(path) == PLAN


def test_most_of_a_file_may_be_left_out() -> None:
    assert OperatorPlan.from_text('{"schema": 1}') == OperatorPlan()


def test_all_problems_of_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(
        '{"schema": 1, "degree": 0, "notes": "", "note": 3,'
        ' "operators": {"a/b#0": "1 < 2", "a/b#1": 3, "c/d#0": "x <- R", "e/f#0": "R <- R", "e/f#0": "0 <- 0"},'
        ' "parameters": {"w": "P", "v": 1, "u": "2"}}'
    )
    with pytest.raises(InputError) as raised:
        OperatorPlan.read(path)
    text = str(raised.value)
    assert text.startswith(f"9 problems in the operator plan {path}:\n")
    expected = ["e/f#0 stands there twice", "'notes'. Did you mean 'note'", "degree=0", "note is an int"]
    expected += ["a/b#0: '1 < 2'", "a/b#1: an int", "c/d#0: 'x", "w: 'P'", "v: 1"]
    assert all(part in line for part, line in zip(expected, text.splitlines()[1:], strict=True))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"schema": 1,\n "degree" 2}', "not readable as JSON.*line 2"),
        ("[]", "holds a list"),
        ('{"schema": 2}', "holds schema 2. This version reads"),
        ('{"schema": 1, "operators": []}', "operators is a list"),
        ('{"schema": 1, "degree": true}', "degree=True"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match=f"(?s)plan.json.*{problem}|{problem}"):
        OperatorPlan.read(path)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json cannot be read: No such file"):
        OperatorPlan.read(tmp_path / "absent.json")
    with pytest.raises(InputError, match="cannot be written"):
        PLAN.write(tmp_path / "no_folder" / "plan.json")


def test_a_difference_is_shown_by_entry() -> None:
    document = json.loads(PLAN.text)
    document["operators"][UP] = "0 <- 0,R"
    del document["parameters"]["layers.*.mlp.norm.weight"]
    other = OperatorPlan.from_json(document)
    assert PLAN.diff(other).splitlines() == [
        '- "layers.*.mlp.norm.weight": "R"',
        '- "layers.*.mlp.up/linear#0": "2 <- R,0"',
        '+ "layers.*.mlp.up/linear#0": "0 <- 0,R"',
    ]


def test_a_plan_that_fits_has_no_misfit() -> None:
    keys = [*PLAN.operators, *PLAN.parameters, "lm_head/linear#0"]
    assert PLAN.misfit(keys, LEGAL) == ""  # what it lacks is whole


def test_a_misfit_names_keys_and_rules() -> None:
    keys = [UP, NORM, "layers.*.mlp.down_proj/linear#0", *PLAN.parameters]
    text = PLAN.misfit(keys, {UP: [Rule.read("R <- R,R"), Rule.read("0 <- 0,R")]})
    assert text.splitlines() == [
        f"{DOWN}: the model has no such key. Did you mean 'layers.*.mlp.down_proj/linear#0'?",
        f"{UP}: 2 <- R,0 is not a legal rule of this call. Legal are 0 <- 0,R.",
        "Not in the plan, so whole: layers.*.mlp.down_proj/linear#0.",
    ]
    assert "It can only be whole." in PLAN.misfit([*PLAN.operators, *PLAN.parameters], {DOWN: LEGAL[DOWN]})


def test_the_table_groups_what_is_divided_alike() -> None:
    gate = OperatorPlan(operators={**PLAN.operators, "layers.*.mlp.gate/linear#0": Rule.read("2 <- R,0")})
    head, *rows = PLAN.describe().splitlines()
    assert head == "2 operators and 1 parameter divided over 4 ranks"
    assert [row.split()[:4] for row in rows] == [
        ["linear", "2", "<-", "R,0"],
        ["linear", "P", "<-", "2,1"],
        ["parameter", "0", "1×", "layers.*.mlp.up.weight"],
    ]
    assert "2×  layers.*.mlp.gate/linear#0, layers.*.mlp.up/linear#0" in gate.describe()
    assert OperatorPlan().describe() == "0 operators and 0 parameters divided"
