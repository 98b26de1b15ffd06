"""Notebooks in a real kernel: the example, errors in the cell, and the Stop button."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "auto_accelerate" / "notebook.ipynb"

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A kernel of this interpreter, whose settings are not the user's."""
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
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
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
