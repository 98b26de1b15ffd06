"""``python -m tests.surface`` writes the files of this folder anew, after a change that is meant."""

from __future__ import annotations

from tests.surface._write import FOLDER, surfaces

for name, text in surfaces().items():
    (FOLDER / name).write_text(text)
