"""``python -m tests.release [EXTRA ...]``: wheel and sdist of the last commit, checked, and used as users install them.

Into ``dist/``, from a clean folder of what is committed. The wheel is then installed into an empty environment, and into
one for each extra named (``all`` for each that can be had without a GPU), where ``pip check`` and the commands of
``tests/release/commands.py`` run.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

from tests.release.commands import EXTRAS, FILES, NO_ISOLATION, PLANNING, TRAINING

ROOT = Path(__file__).parents[2]
DIST, WORK = ROOT / "dist", ROOT / "build" / "release"
CONSTRAINTS = ROOT / "constraints.txt"
log = logging.getLogger("release")


def run(*command: object, folder: Path = WORK) -> None:
    """Runs a command whose failure ends the release; programs of the environment ``folder`` lies in come first."""
    log.info("%s", " ".join(map(str, command)).splitlines()[0])
    path = f"{folder.parent / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\nended with code {done.returncode}")


def build() -> Path:
    """The wheel, made from the sdist and equal to that of the tree."""
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    tree = WORK / "tree"
    tree.mkdir(parents=True)
    run("git", "-C", ROOT, "archive", "--output", WORK / "tree.tar", "HEAD")
    run("tar", "-xf", WORK / "tree.tar", "-C", tree)
    python = environment("tools", "build", "twine")
    run(python, "-m", "build", "--outdir", DIST, tree)
    run(python, "-m", "build", "--wheel", "--outdir", WORK, tree)
    run(python, "-m", "twine", "check", "--strict", *DIST.iterdir())
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    check(wheel, sdist, tree)
    return wheel


def check(wheel: Path, sdist: Path, tree: Path) -> None:
    """What the files hold: the packages whole, the licence, the methods' entry points, and nothing else."""
    of_wheel = contents(wheel)
    assert of_wheel == contents(WORK / wheel.name), "the wheel of the sdist differs from that of the tree"
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    packaged = {
        str(path.relative_to(tree))
        for package in ("atorch_ns", "opt_lib")
        for path in (tree / package).rglob("*")
        if path.is_file()
    }
    info = next(name.partition("/")[0] for name in of_wheel if name.endswith("/METADATA"))
    about = {
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")
    }
    whole = packaged | about | {f"{info}/licenses/LICENSE"}
    assert set(of_wheel) == whole, set(of_wheel) ^ whole
    needed = packaged | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"}
    assert needed <= in_sdist, needed - in_sdist
    assert not [name for name in in_sdist if re.match(r"tests|docs|benchmarks|build|\.", name)], in_sdist
    methods = {path.stem for path in (tree / "opt_lib").glob("*.py") if not path.name.startswith("_")}
    entries = set(
        re.findall(r"^(\w+) = opt_lib", of_wheel[f"{info}/entry_points.txt"].decode(), re.MULTILINE)
    )
    assert entries == methods, entries ^ methods


def contents(wheel: Path) -> dict[str, bytes]:
    """Each file of a wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def environment(name: str, *packages: str) -> Path:
    """The Python of a fresh environment with ``packages``."""
    folder = WORK / name
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    for package in packages:
        isolation = ["--no-build-isolation"] if name in NO_ISOLATION else []
        run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *isolation, package)
    return python


def use(wheel: Path, extra: str) -> None:
    """Installs the wheel with ``extra``, none if it is empty, and runs what belongs to it."""
    first = ("torch==2.13.0", "setuptools>=77.0.3", "wheel") if extra in NO_ISOLATION else ("torch==2.13.0",)
    python = environment(extra or "core", *first, f"{wheel}[{extra}]" if extra else str(wheel))
    run(python, "-m", "pip", "check")
    clean = WORK / (extra or "core") / "clean"
    clean.mkdir()
    for name, text in FILES.items():
        (clean / name).write_text(text)
    if extra:
        run(python, "-c", EXTRAS[extra], folder=clean)
        return
    for line in PLANNING + TRAINING:
        run("atorch-ns", *line.split(), folder=clean)
    block, *_ = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    run(python, "-c", block, folder=clean)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d ms  %(message)s")
    made = build()
    named = sys.argv[1:]
    for each in ["", *(EXTRAS if named == ["all"] else named)]:
        use(made, each)
    log.info("made %s", ", ".join(map(str, DIST.iterdir())))
