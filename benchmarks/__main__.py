"""``python -m benchmarks``: measures, and writes JSON and Markdown into ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path

NAMES = (
    "cutting",
    "estimate_memory",
    "estimate_time",
    "imports",
    "materialise",
    "memory",
    "model_axes",
    "overhead",
    "planning",
    "search_quality",
    "speed",
)


def main() -> int:
    """Runs what the arguments say."""
    # Ranks are forked, which is safe only if no operator ever ran on several threads; and each rank has
    # one core. torch reads this when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    arguments = _arguments()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

    from benchmarks._context import Context
    from benchmarks._results import write

    for name in arguments.only:
        module = importlib.import_module(f"benchmarks.{name}")
        context = Context()
        findings = module.run(quick=arguments.quick, report=_say)
        paths = write(findings, arguments.out, context.facts())
        print(paths[-1].read_text(encoding="utf-8"))
    return 0


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
        default=Path(__file__).parent / "results",
        metavar="FOLDER",
        help="where the results go; benchmarks/results unless given",
    )
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(NAMES))
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}; choose from {', '.join(NAMES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
