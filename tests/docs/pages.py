"""Pages as scripts: their Python blocks, files and commands, in the order of the page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

SHELL = ("console", "bash", "shell", "sh")

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]*?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"^# ([\w.-]+\.\w+)\n")
_ENDS_WITH = re.compile(r"\s+# exit code (\d+)$")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: as the page names it.
        text: without the fences.
        reason: why it is not run; empty if it is.
        file: the name of the file that the block shows, by its first line ``# name.py``.
    """

    language: str
    text: str
    reason: str
    file: str

    @property
    def commands(self) -> list[tuple[str, int]]:
        """Of a shell's block: each command with the exit code that the page says, after the prompt if it has one."""
        joined = self.text.replace("\\\n", " ")
        lines = joined.splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found = []
        for line in lines:
            code = _ENDS_WITH.search(line)
            found.append((_ENDS_WITH.sub("", line), int(code[1]) if code else 0))
        return found


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, with a language, in their order."""
    found = []
    for match in _BLOCK.finditer((ROOT / page).read_text()):
        file = _FILE.match(match["text"])
        found.append(
            Block(match["language"], match["text"], (match["reason"] or "").strip(), file[1] if file else "")
        )
    return found


def as_script(page: str) -> str:
    """One Python script that writes the page's files, runs its commands and its Python, from top to bottom."""
    parts = ["import pathlib as _pathlib", "import subprocess as _subprocess", ""]
    for block in blocks_of(page):
        if block.reason:
            continue
        if block.file:
            text = block.text if block.file.endswith(".py") else block.text.split("\n", 1)[1]
            parts.append(f"_pathlib.Path({block.file!r}).write_text({text!r})")
        elif block.language == "python":
            parts.append(block.text)
        elif block.language in SHELL:
            for command, code in block.commands:
                parts.append(f"_code = _subprocess.run({command!r}, shell=True).returncode")
                parts.append(f"assert _code == {code}, ({command!r}, _code)")
    return "\n".join(parts)
