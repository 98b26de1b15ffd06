"""Workers started from a notebook in a real kernel, or from any process: results, output, errors and ends."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from atorch_ns import notebook
from atorch_ns.errors import InputError, RankError
from atorch_ns.processes import RankEnd, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("cold_python")]


def test_rank_0_returns_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    factor = 3  # sent with the function that uses it

    def rank_times(number: int) -> tuple[int, int]:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        print(f"rank {rank} says größer")  # noqa: T201
        return factor * number + rank, world

    assert notebook.run(rank_times, (5,), nproc=2) == (15, 2)
    assert capsys.readouterr().out == "rank 0 says größer\n"


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    def fails() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("no such column")
        time.sleep(2)
        raise ConnectionError("the other one has gone")

    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        notebook.run(fails)
    assert "in fails" in str(caught.value)
    assert "KeyError: 'no such column'" in str(caught.value)
    assert "the other one has gone" not in str(caught.value)
    assert "the other one has gone" in caught.value.failures[0]


def test_a_killed_rank_is_named() -> None:
    def dies() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="rank 1 of 2 failed:\nit was ended by SIGKILL"):
        notebook.run(dies)


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    def waits(folder: Path) -> None:
        (folder / os.environ["RANK"]).write_text(str(os.getpid()))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that does not listen
        time.sleep(600)

    def interrupt() -> None:
        while not all((tmp_path / rank).is_file() and (tmp_path / rank).read_text() for rank in "01"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        notebook.run(waits, (tmp_path,))
    thread.join()
    for rank in "01":
        assert not psutil.pid_exists(int((tmp_path / rank).read_text()))


def test_a_time_limit() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] were still running after timeout_s=0.5"):
        notebook.run(time.sleep, (600,), nproc=1, timeout_s=0.5)


@pytest.mark.parametrize("nproc", [0, -1, 1.5, True])
def test_no_processes(nproc: int) -> None:
    with pytest.raises(InputError, match="at least one process"):
        notebook.run(print, nproc=nproc)


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def locked() -> None:
        lock.acquire()

    with pytest.raises(InputError, match=r"locked cannot be sent to the workers: .*lock"):
        notebook.run(locked)


@pytest.mark.parametrize("timeout_s", ["x", 0, -1.0, float("nan"), float("inf"), True])
def test_a_time_limit_that_is_none(timeout_s: Any) -> None:
    with pytest.raises(InputError, match=r"timeout_s=.* is not a time"):
        notebook.run(print, nproc=1, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (4, (), r"fn is 4, which is not callable"),
        (print, 4, r"args is '4', of type int\. .*args=\(value,\)"),
        (print, "abc", r"args is 'abc', of type str"),
    ],
)
def test_arguments_are_checked_before_workers_start(
    fn: Any, args: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atorch_ns.notebook.Ranks", None)
    with pytest.raises(InputError, match=said):
        notebook.run(fn, args, nproc=1)


def test_a_wait_that_fails_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Ranks, **_: Any) -> list[RankEnd]:
        raise OSError("no more processes")

    monkeypatch.setattr(Ranks, "wait", broken)
    with pytest.raises(OSError, match="no more processes"):
        notebook.run(print, nproc=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_without_a_result_failed(rank: int) -> None:
    def leaves() -> int:
        if os.environ["RANK"] == str(rank):
            os._exit(0)
        return 5

    with pytest.raises(
        RankError, match=rf"rank {rank} of 2 failed:\nit left with exit code 0 before"
    ) as caught:
        notebook.run(leaves)
    assert list(caught.value.failures) == [rank]


def test_a_result_that_cannot_be_sent_is_named() -> None:
    def returns_a_lock() -> object:
        return threading.Lock()

    with pytest.raises(RankError, match=r"rank 0 of 1 failed") as caught:
        notebook.run(returns_a_lock, nproc=1)
    assert "the function returned a _thread.lock on rank 0, which cannot be sent back" in str(caught.value)
    assert "Return plain values and CPU tensors" in str(caught.value)


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_a_result_that_cannot_be_read_is_named() -> None:
    with pytest.raises(
        RankError, match=r"what rank 0 returned cannot be read here: ValueError: .*Return plain"
    ):
        notebook.run(Unreadable, nproc=1)


ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "auto_accelerate" / "notebook.ipynb"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A kernel of this interpreter, whose settings are not the user's."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(*sources: str, path: Path | None = None) -> Any:
        if path is not None:
            notebook = nbformat.read(path, as_version=4)
        else:
            notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in sources])
        return nbclient.NotebookClient(
            notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
        )

    return make


def text_of(cell: Any) -> str:
    """What a cell shows."""
    return "".join(output.get("text", "") for output in cell.get("outputs", ()))


@pytest.mark.slow
@pytest.mark.timeout(260)  # of which the search takes a few seconds where nobody else computes
def test_the_example_trains_with_a_strategy_and_without(client: Callable[..., Any]) -> None:
    given, searched = (
        text_of(cell) for cell in client(path=EXAMPLE).execute().cells if "notebook.run(" in cell.source
        and cell.cell_type == "code"
    )  # fmt: skip
    for text in (given, searched):
        found = re.search(r"^\[(.*)\] on 2 processes: loss (\S+) to (\S+)$", text, re.MULTILINE)
        assert found, text
        assert float(found[3]) < 0.9 * float(found[2])
        assert "step 8/16" in text  # rank 0's output, in the cell
    assert "'fsdp'" in given
    assert "Chosen:" in searched


ERROR = """
from atorch_ns import notebook
def fails():
    import os
    if os.environ["RANK"] == "1":
        raise KeyError("no such column")
notebook.run(fails)
"""


def test_an_error_of_a_rank_is_raised_in_the_cell(client: Callable[..., Any]) -> None:
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError) as caught:
        client(ERROR).execute()
    assert "rank 1 of 2 failed" in str(caught.value)
    assert "no such column" in str(caught.value)


STOPPED = """
from atorch_ns import notebook
def waits():
    import os, pathlib, time
    pathlib.Path(f"rank-{os.environ['RANK']}.txt").write_text(str(os.getpid()))
    time.sleep(600)
try:
    notebook.run(waits)
except KeyboardInterrupt:
    print("stopped")
"""


def test_the_stop_button_ends_the_workers(client: Callable[..., Any], tmp_path: Path) -> None:
    files = [tmp_path / f"rank-{rank}.txt" for rank in range(2)]
    made = client(STOPPED)

    def stop() -> None:
        while not all(file.is_file() and file.read_text() for file in files):
            time.sleep(0.05)
        os.kill(made.km.provisioner.pid, 2)  # what the button does

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    assert "stopped" in text_of(made.execute().cells[0])
    assert not any(psutil.pid_exists(int(file.read_text())) for file in files)
