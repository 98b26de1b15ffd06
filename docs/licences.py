"""Licences of everything that the package and each of its extras bring, as a page.

``python -m docs.licences FOLDER ...`` writes it from the metadata in these folders (``site-packages`` of environments with
the extras), or of its own environment.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).parent / "licences.md"
COPYLEFT = re.compile(r"\b(A?GPL|LGPL|MPL|EPL|EUPL|CDDL)|Mozilla|General Public", re.IGNORECASE)
_HEAD = """# Licences of dependencies

<!-- Written by `python -m docs.licences`: do not edit. -->

atorch_ns is under the Apache License 2.0. What `pip` installs with it comes under the licences below, as each package's
own metadata states them; the last column names the extras that bring it, none where it comes without any. `dev` is for
work on atorch_ns itself.

- PyPI's torch for Linux brings NVIDIA's CUDA libraries too (`nvidia-*`), under NVIDIA's proprietary licences, and Triton
  (MIT). The torch of `constraints.txt` for CPUs has neither.
- The wheels of numpy, scipy and torch contain libraries of GCC: GPL-3.0 with GCC's runtime exception, which lets any
  program use them, and in those of numpy and scipy libquadmath, LGPL-2.1.
- MPL-2.0 asks for the source of a package's own files where they are changed and passed on, and nothing of what uses them.
  Of docutils, GPL-3.0 concerns an Emacs mode that its wheel does not hold.
- `apex` installs nothing. By their sources, flash-attn is under BSD-3-Clause and Transformer Engine, for `fp8` and no
  extra, under Apache-2.0; both need NVIDIA's libraries."""


def licence_of(found: Distribution) -> str:
    """The licence's expression, else what classifiers say, else the field for free text, else its text."""
    data = found.metadata
    classified = [
        each.rpartition(" :: ")[2]
        for each in data.get_all("Classifier") or ()
        if each.startswith("License ::")
    ]
    free = (data.get("License") or "").strip().splitlines()
    expression = data.get("License-Expression") or " and ".join(
        each for each in classified if each not in ("OSI Approved", "Other/Proprietary License")
    )
    if expression or (free and len(free[0]) < 60):
        return expression or free[0]
    texts = [
        found.read_text(f"{place}{name}") or ""
        for name in data.get_all("License-File") or ()
        for place in ("licenses/", "")
    ]
    return "BSD-3-Clause" if any("Neither the name" in text for text in texts) else "not stated"


def needed(
    name: str, extras: frozenset[str], known: dict[str, Distribution], seen: set[str]
) -> Iterator[str]:
    """The packages that ``name`` with ``extras`` brings here, itself first; those that are not installed too."""
    if name in seen:
        return
    seen.add(name)
    yield name
    for line in (known[name].requires or ()) if name in known else ():
        need = Requirement(line)
        if need.marker is None or any(need.marker.evaluate({"extra": each}) for each in extras | {""}):
            yield from needed(canonicalize_name(need.name), frozenset(need.extras), known, seen)


def licences_page(folders: list[str]) -> str:
    """The table, what in it is copyleft, and what could not be looked at, in Markdown."""
    known: dict[str, Distribution] = {}
    for found in distributions(path=folders):
        known.setdefault(canonicalize_name(found.metadata["Name"]), found)
    ours = known["atorch-ns"]
    core = set(needed("atorch-ns", frozenset(), known, set()))
    brings: dict[str, list[str]] = {name: [] for name in core - {"atorch-ns"}}
    for extra in ours.metadata.get_all("Provides-Extra") or ():
        for name in set(needed("atorch-ns", frozenset({extra}), known, set())) - core:
            brings.setdefault(name, []).append(extra)
    rows = {name: licence_of(known[name]) for name in sorted(brings) if name in known}
    absent = [f"`{name}` (`{', '.join(brings[name])}`)" for name in sorted(brings) if name not in known]
    copyleft = [
        f"{name} ({', '.join(brings[name]) or 'always'})" for name in rows if COPYLEFT.search(rows[name])
    ]
    lines = [
        _HEAD,
        f"- Copyleft, in whole or in part: {', '.join(copyleft) or 'none'}.",
        f"- Not installed where this page was written: {', '.join(absent) or 'nothing'}.",
        "",
        "| package | version | licence | extra |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {known[name].version} | {text} | {', '.join(brings[name])} |"
        for name, text in rows.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(licences_page(sys.argv[1:] or sys.path))
