"""The checks in a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from atorch_ns.doctor import CHECKS, Finding, Place, checks, examine, machine

HERE = Place(num_ranks=2)


@pytest.mark.parametrize("name", ["versions", "backends", "ports", "shared memory", "limits", "disk"])
def test_the_quick_checks_run_here(name: str, tmp_path: Path) -> None:
    found = CHECKS[name](Place(num_ranks=1, folder=tmp_path))
    assert found
    assert "fail" not in [finding.verdict for finding in found]
    for finding in found:
        assert finding.text
        assert bool(finding.fix) == (finding.verdict != "pass")


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(place: Place) -> list[Finding]:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(checks, "CHECKS", {"broken": breaks, "disk": machine.check_disk})
    found = list(examine(HERE))
    assert [one.check for one in found] == ["broken", "disk"]
    assert found[0].verdict == "fail"
    assert "ZeroDivisionError: oh" in found[0].text
