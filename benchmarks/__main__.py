"""``python -m benchmarks``: measures, and writes JSON and Markdown into ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

NAMES = (
    "cutting",
    "estimate_memory",
    "estimate_peers",
    "estimate_time",
    "expert_plans",
    "gpu",
    "imports",
    "materialise",
    "memory",
    "model_axes",
    "models",
    "operator_planning",
    "operator_predictions",
    "overhead",
    "peers",
    "planning",
    "published",
    "schedules",
    "search_quality",
    "search_time",
    "side_by_side",
    "speed",
    "watch",
)


def main() -> int:
    """Runs what the arguments say; 1 if a benchmark failed."""
    # Ranks are forked, which is safe only if no operator ever ran on several threads; and each rank has
    # one core. torch reads this when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    arguments = _arguments()
    if len(arguments.only) > 1:
        return _one_by_one(arguments)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

    from benchmarks._context import Context
    from benchmarks._results import write

    module = importlib.import_module(f"benchmarks.{arguments.only[0]}")
    context = Context()
    options = {"rows": arguments.rows} if arguments.rows else {}
    findings = module.run(quick=arguments.quick, report=_say, **options)
    if findings is not None:  # otherwise it has said what is missing here
        paths = write(findings, arguments.out, context.facts())
        print(paths[-1].read_text(encoding="utf-8"))
    return 0


def _one_by_one(arguments: argparse.Namespace) -> int:
    """Runs every benchmark in a process of its own, so that none meets what another left or fails with it."""
    started, failed = time.perf_counter(), []
    for name in arguments.only:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks", "--only", name, "--out", str(arguments.out)]
        code = subprocess.call(command + ["--quick"] * arguments.quick)
        seconds = time.perf_counter() - begun
        _say(f"benchmarks: {name}: {seconds:.0f} s" + (f", failed with exit code {code}" if code else ""))
        if code:
            failed.append(name)
    _say(f"benchmarks: {len(arguments.only)} in {(time.perf_counter() - started) / 60:.1f} minutes")
    if failed:
        _say(f"benchmarks: failed, their old results stand: {', '.join(failed)}")
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", type=_names, default=NAMES, metavar="NAME,...", help=f"some of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few repetitions: to see that it works"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where the results go; benchmarks/results unless given, build/benchmarks with --quick",
    )
    parser.add_argument(
        "--rows",
        default="",
        metavar="PATTERN,...",
        help="of models alone: run only these once more, as its run() says",
    )
    arguments = parser.parse_args()
    if arguments.rows and list(arguments.only) != ["models"]:
        parser.error("--rows goes with --only models")
    if arguments.out is None:
        root = Path(__file__).parent
        arguments.out = root.parent / "build" / "benchmarks" if arguments.quick else root / "results"
    return arguments


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(NAMES))
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}; choose from {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
