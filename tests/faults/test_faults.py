"""The list of planted faults still fits the packages; ``make test-faults`` plants them."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.faults.__main__ import Run, verdict
from tests.faults.faults import FAULTS, Fault

ROOT: Final = Path(__file__).parents[2]

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))


@each_fault
def test_a_fault_is_a_change_of_one_line_that_compiles(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    planted = fault.planted_in(text)
    pairs = zip(text.splitlines(), planted.splitlines(), strict=True)
    assert sum(line != other for line, other in pairs) == 1
    compile(planted, fault.file, "exec")
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


@each_fault
def test_its_tests_are_there(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, *names = test.partition("[")[0].split("::")
        assert (ROOT / file).is_file()
        defined = {one.name for one in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(one, "name")}
        assert set(names) <= defined


def test_what_occurs_twice_or_never_is_refused() -> None:
    fault = Fault("one for two", "numbers.py", "1", "2", ("tests/test_text.py",))
    assert fault.planted_in("a = 1\n") == "a = 2\n"
    for text in ("a = b = 3\n", "a = 1\nb = 1\n"):
        with pytest.raises(ValueError, match=r"numbers\.py has . times what the fault 'one for two' changes"):
            fault.planted_in(text)


def test_there_are_forty_in_all_rooms_with_names_of_their_own() -> None:
    assert len(FAULTS) >= 40
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    rooms = {f"atorch_ns/{place.parent.name}" for place in (ROOT / "atorch_ns").glob("*/__init__.py")}
    found = {str(Path(fault.file).parent) for fault in FAULTS}
    missing = [
        room for room in (*rooms, "opt_lib") if not any(f"{one}/".startswith(f"{room}/") for one in found)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("code", "is_found", "words"),
    [
        (1, True, "in 2.5 s: one for two: tests/test_text.py::test_counts[1 - 2]"),
        (None, True, "in 2.5 s: one for two: the tests hung until the limit of 120 s"),
        (0, False, "NOT FOUND: one for two: all of tests/test_text.py pass with it"),
        (2, False, "ERROR: one for two: pytest ended with code 2"),
        (4, False, "ERROR: one for two: pytest ended with code 4"),
    ],
)
def test_only_tests_that_fail_or_hang_have_found_a_fault(
    code: int | None, is_found: bool, words: str
) -> None:
    output = "FAILED tests/test_text.py::test_counts[1 - 2] - assert 1 == 2\nERROR tests/test_text.py\n"
    found = verdict(
        Fault("one for two", "numbers.py", "1", "2", ("tests/test_text.py",)), Run(code, output, 2.5)
    )
    assert (found[0], found[1].splitlines()[0]) == (is_found, words)
