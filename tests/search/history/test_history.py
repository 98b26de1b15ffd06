from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from atorch_ns.errors import InputError
from atorch_ns.search import Candidate, History, Search, SearchSettings, TrialOutcome, read_history
from atorch_ns.search.history.journal import HEADER, Journal, OptunaJournalError
from tests.search.fakes import World, candidate, setting

CANDIDATES = [
    candidate("plain", "ddp", seconds=0.030, is_baseline=True),
    *(candidate(f"c{n}", ("fsdp", {"level": n}), seconds=0.029 - 0.002 * n) for n in range(8)),
]
TRUTH = {one.key: one.estimate.step_seconds for one in CANDIDATES if one.estimate}


def begin(world: World, history: History, *, candidates: list[Candidate] = CANDIDATES) -> Search:
    known = history.known(setting().fingerprint)
    search = Search(setting(), SearchSettings(), candidates, clock=world.clock, known=known, recorder=history)
    if known is None:
        history.replay(search)
    return search


def some_trials(world: World, search: Search, number: int) -> None:
    for _ in range(number):
        task = search.ask()
        assert task is not None
        search.tell(task.id, world.run(task))


def test_a_killed_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.journal"
    world = World(TRUTH, jitter=0.02)
    some_trials(world, begin(world, History(path)), 2)

    search = begin(world, History(path))
    outcome = world.search(CANDIDATES, search=search)
    assert outcome.resumed == 2
    trials = [task.key for task in world.tasks if task.kind == "trial"]
    assert trials[:2] == ["plain", "c7"]
    assert "plain" not in trials[2:]
    assert outcome.best == "c7"


def test_what_an_ended_search_found_is_known(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    world = World(TRUTH, jitter=0.01)
    history = History(path)
    assert history.known("f1") is None
    history.conclude(world.search(CANDIDATES, search=begin(world, history)))

    later = History(path)
    assert later.known("another") is None
    (study,) = read_history(path)
    assert study.name == "f1"
    assert study.best is not None
    assert study.best["steps"] == [["fsdp", {"level": 7}]]
    again = World(TRUTH, jitter=0.01, seed=1)
    outcome = again.search(CANDIDATES, search=begin(again, later))
    assert outcome.best == "c7"
    assert outcome.num_trials == 1
    assert outcome.resumed == 0


def test_a_killed_search_that_had_a_known_strategy_resumes_its_trials(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    world = World(TRUTH, jitter=0.01)
    history = History(path)
    search, num_resumed = history.begin(setting(), SearchSettings(), CANDIDATES)
    assert num_resumed == 0
    history.conclude(world.search(CANDIDATES, search=search))

    slower = World({key: 2 * seconds for key, seconds in TRUTH.items()}, jitter=0.01)
    search, num_resumed = History(path).begin(setting(), SearchSettings(), CANDIDATES)
    assert num_resumed == 1, "what the ended search found"
    some_trials(slower, search, 3)  # none confirms it
    search, num_resumed = History(path).begin(setting(), SearchSettings(), CANDIDATES)
    assert num_resumed == search.outcome().resumed == 3
    task = search.ask()
    assert task is not None
    assert task.key not in [one.key for one in slower.tasks]


def test_trials_of_an_ended_search_are_not_replayed(tmp_path: Path) -> None:
    history = History(tmp_path / "history.journal")
    world = World(TRUTH)
    history.conclude(world.search(CANDIDATES, search=begin(world, history)))
    assert history.replay(Search(setting(), SearchSettings(), CANDIDATES)) == 0


def test_candidates_that_are_gone_are_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    world = World(TRUTH)
    some_trials(world, begin(world, History(path)), 2)
    search = begin(world, History(path), candidates=CANDIDATES[:-1])
    assert search.outcome().resumed == 1


def test_every_line_is_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    world = World(TRUTH, ends={"c7": TrialOutcome(status="raised", reason="no", loss=float("nan"))})
    some_trials(world, begin(world, History(path)), 3)
    header, first, *trials = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["version"] == 1
    assert first["setting"]["fingerprint"] == "f1"
    assert [one["trial"]["outcome"]["status"] for one in trials] == ["ok", "raised", "ok"]
    (study,) = read_history(path)
    assert [trial.outcome.status for trial in study.trials] == ["ok", "raised", "ok"]
    assert study.fastest is not None
    assert study.fastest.parameters == {"fsdp": "on", "fsdp.level=6": "on"}
    assert study.fastest.seconds == pytest.approx(0.017)


def test_a_half_written_entry_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    world = World(TRUTH)
    some_trials(world, begin(world, History(path)), 2)
    with path.open("ab") as file:
        file.write(b'{"study": "f1", "tri')
    notes: list[str] = []
    search = begin(world, History(path, on_note=notes.append))
    assert search.outcome().resumed == 2
    assert len(notes) == 1
    assert "incomplete" in notes[0]
    some_trials(world, search, 1)
    assert begin(world, History(path)).outcome().resumed == 3


@pytest.mark.parametrize(
    "content", [b"garbage\n", HEADER + b'{"study": 3}\n', b"\x00\xff\xfe\n{}\n", HEADER + b"\xff\n"]
)
def test_a_corrupt_file_is_told_once_and_the_search_goes_on(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "history.journal"
    path.write_bytes(content)
    notes: list[str] = []
    history = History(path, on_note=notes.append)
    world = World(TRUTH)
    outcome = world.search(CANDIDATES, search=begin(world, history))
    history.conclude(outcome)
    assert outcome.best == "c7"
    assert len(notes) == 1
    assert str(path) in notes[0]
    assert path.read_bytes() == content
    with pytest.raises(InputError, match="is not a history"):
        read_history(path)


def test_a_journal_of_optuna_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    path.write_bytes(b'{"op_code":0,"worker_id":"w","study_name":"f1","directions":[1]}\n')
    before = path.read_bytes()
    with pytest.raises(OptunaJournalError, match="Name a new file"):
        History(path)
    with pytest.raises(InputError, match="Name a new file"):
        read_history(path)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    notes: list[str] = []
    history = History(tmp_path / "file" / "history.journal", on_note=notes.append)
    world = World(TRUTH)
    assert world.search(CANDIDATES, search=begin(world, history)).best == "c7"
    assert len(notes) == 1
    assert "the search goes on without it" in notes[0]


def test_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    history = History(tmp_path / "history.journal", on_note=notes.append)
    world = World(TRUTH)
    search = begin(world, history)
    some_trials(world, search, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    outcome = world.search(CANDIDATES, search=search)
    history.conclude(outcome)
    assert outcome.best == "c7"
    assert len(notes) == 1
    assert "No space left" in notes[0]


def _record_ten(path: Path, name: str) -> None:
    world = World(TRUTH)
    history = History(path)
    search = Search(setting(fingerprint=name), SearchSettings(), CANDIDATES, recorder=history)
    for _ in range(5):
        task = search.ask()
        if task is None:
            break
        search.tell(task.id, world.run(task))


def test_several_searches_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "history.journal"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_record_ten, args=(path, f"job{n}")) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    history = History(path)
    studies = read_history(path)
    assert [study.name for study in studies] == ["job0", "job1", "job2"]
    for name in ("job0", "job1", "job2"):
        search = Search(setting(fingerprint=name), SearchSettings(), CANDIDATES)
        assert history.replay(search) >= 2, name
