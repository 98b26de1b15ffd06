"""Tables as cells and as plain text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atorch_ns.report import candidates_info, memory_info, waterfall_info
from atorch_ns.report.text.tables import (
    Table,
    as_text,
    candidates_table,
    memory_table,
    parts_table,
    waterfall_table,
)
from atorch_ns.text import UNKNOWN
from tests.report.outcomes import MIB, estimated, searched


def _table(*rows: tuple[str, ...]) -> Table:
    return Table(("name", "time", "why"), rows, frozenset({0, 2}), ends_in_sentences=True)


def test_columns_of_which_nothing_is_known_are_left_out() -> None:
    kept = _table(("a", UNKNOWN, "slow"), ("b", UNKNOWN, "fast")).without_unknown()
    assert kept.columns == ("name", "why")
    assert kept.rows == (("a", "slow"), ("b", "fast"))
    assert kept.words == {0, 1}
    assert _table(("a", UNKNOWN, "slow"), ("b", "1 s", "fast")).without_unknown().columns[1] == "time"
    assert _table().without_unknown().columns == ("name", "time", "why")


def test_columns_of_short_text_need_no_break() -> None:
    assert _table(("a", "1 s", "a reason of many characters")).short == {0}


def test_sentences_stand_below_the_names() -> None:
    lines = as_text(_table(("ddp", "1 s", "it is slower"), ("fsdp", "2 s", ""))).splitlines()
    assert lines[0].split() == ["name,", "and", "why", "time"]
    cells = [line.split() for line in lines[2:]]
    assert cells == [["ddp", "1", "s"], ["it", "is", "slower"], ["fsdp", "2", "s"]]


@pytest.mark.parametrize("width", [40, 80])
def test_long_cells_are_folded_and_never_cut(width: int) -> None:
    sentence = "a reason that is far longer than the line that it is to be written on, with every word kept"
    text = as_text(_table(("strategy", "1.25 ms", sentence)), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(sentence.split()) in " ".join(text.split())


def test_words_are_not_broken_however_little_room_there_is() -> None:
    columns = ("strategy", "vs. baseline", "peak predicted", "fate", "why")
    row = (
        "one + another(with_a_long_setting=4)",
        "10.1× as fast",
        "62.2 GiB,\n55.1 GiB allocated",
        "· not chosen",
        "",
    )
    text = as_text(Table(columns, (row,), frozenset({0, 3, 4}), ends_in_sentences=True), width=20)
    for whole in ("baseline", "predicted", "chosen", "allocated"):
        assert any(whole in line for line in text.splitlines()), text


def test_candidates_of_equal_predictions_are_one_line() -> None:
    info = candidates_info(searched())
    first = info.lines[0]
    untried = first._replace(
        fate="untried", is_best=False, is_baseline=False, trial_number=0, reason="it is slower"
    )
    alike = [
        untried._replace(number=number, key=label, label=label, predicted_seconds=2.0, predicted_bytes=3.0)
        for number, label in enumerate(
            ("ddp + compile", "module_replace + ddp + compile", "ddp + half", "ddp"), start=100
        )
    ]
    tried = untried._replace(
        number=150, key="tried", trial_number=3, predicted_seconds=2.0, predicted_bytes=3.0
    )
    unknown = [untried._replace(number=n, key=str(n), predicted_bytes=None) for n in (200, 201)]
    shown = info._replace(lines=(*info.lines, *alike, tried, *unknown)).without_twins().lines
    assert [line.number for line in shown] == [*(line.number for line in info.lines), 100, 150, 200, 201]
    assert shown[-4].reason == (
        "it is slower; predicted the same: with module_replace; with half in place of compile; without compile"
    )


def test_candidates_have_the_heads_of_their_cells() -> None:
    table = candidates_table(candidates_info(searched()))
    base = dict(zip(table.columns, table.rows[2], strict=True))
    assert base["strategy"] == "ddp (baseline)"
    assert base["step predicted"] == "30.0 ms"
    assert base["step measured"] == "40.0 ms ±0.3 ms, n=5"
    assert base["vs. baseline"] == ""
    assert base["peak measured"] == "800 MiB"
    assert dict(zip(table.columns, table.rows[3], strict=True))["peak measured"] == UNKNOWN
    assert {table.columns[at] for at in table.words} == {"strategy", "fate", "why"}


def test_memory_is_compared_with_the_limit_if_there_is_one() -> None:
    table = memory_table(memory_info(searched()))
    at = table.columns.index("of the limit")
    assert (table.rows[0][at], table.rows[-1][at]) == ("590 MiB free", "200 MiB over")
    assert "offload" not in "".join(table.columns)  # a part that no candidate has
    unknown = replace(searched(), setting=replace(searched().setting, memory_limit_bytes=0))
    assert {row[at] for row in memory_table(memory_info(unknown)).rows} == {UNKNOWN}


def test_memory_of_a_gpu_is_allocated_and_reserved() -> None:
    plain = estimated(20, 400)
    on_gpu = replace(plain, memory=plain.memory._replace(reserve=50.0 * MIB, outside=100.0 * MIB))
    rows = tuple(
        replace(row, trial=None, candidate=replace(row.candidate, estimate=on_gpu)) for row in searched().rows
    )
    search = replace(searched(), rows=rows)
    table = memory_table(memory_info(search))
    base = dict(zip(table.columns, table.rows[0], strict=True))
    assert (base["allocated"], base["reserved"], base["predicted"]) == ("400 MiB", "450 MiB", "550 MiB")
    table = candidates_table(candidates_info(search))
    assert table.rows[0][table.columns.index("peak predicted")] == "550 MiB,\n400 MiB allocated"


def test_changes_have_their_sign() -> None:
    info = waterfall_info(searched())
    assert info is not None
    assert [row[3] for row in waterfall_table(info).rows] == ["-10.0 ms", "-5.00 ms"]


def test_parts_add_up_to_peak_and_step() -> None:
    rows = parts_table(estimated(20, 400)).rows
    assert ("memory", "peak", "400 MiB", "") in rows
    assert ("time", "step", "20.0 ms", "") in rows
    assert ("time", "compute", "16.0 ms", "80%") in rows
    assert not [row for row in rows if row[1] == "recompute"]
