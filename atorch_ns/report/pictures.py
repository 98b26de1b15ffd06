"""Pictures of a report as files, for a document or a talk.

``python -m atorch_ns.report.pictures report.json folder`` writes them.
"""

from __future__ import annotations

import re
import sys
from os import PathLike
from pathlib import Path

from atorch_ns.report.html.page import SVG_STYLE, report_figures
from atorch_ns.report.report import TrainingReport, write_text

_MARGIN = 12  # units of the picture
_SCALE = 1.5  # pixels to a unit of the picture, where nothing else gives its size


def save_pictures(report: TrainingReport, folder: str | PathLike[str]) -> list[Path]:
    """Writes each picture of the report's page as ``folder/name.svg``; the folder is made if it is not there.

    A picture follows the reader's light or dark setting, and needs no other file.

    Returns:
        The files, in the order of the page; none for a report without a search and without a pipeline.

    Raises:
        InputError: if a file cannot be written.
    """
    directory = Path(folder)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in report_figures(report.search, report.timeline_info):
        path = directory / f"{figure.name}.svg"
        write_text(path, _standalone_picture(str(figure.picture)))
        paths.append(path)
    return paths


def _standalone_picture(picture: str) -> str:
    # Outside of the page a picture needs the page's style, its ground and a margin.
    first, _, rest = picture.partition("\n")
    width, height = (int(size) for size in re.findall(r'(?<= )(?:width|height)="(\d+)"', first))
    wide, high = width + 2 * _MARGIN, height + 2 * _MARGIN
    frame = f'viewBox="{-_MARGIN} {-_MARGIN} {wide} {high}" width="{_SCALE * wide:.0f}" height="{_SCALE * high:.0f}"'
    first = first.replace(f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"', frame)
    ground = f'<rect x="{-_MARGIN}" y="{-_MARGIN}" width="100%" height="100%" class="ground"/>'
    return f"{first}\n<style>{SVG_STYLE}</style>\n{ground}\n{rest}\n"


if __name__ == "__main__":
    source, target = sys.argv[1:]
    save_pictures(TrainingReport.load(source), target)
