"""What each rank of a verb that trains does; started as a module, with the work's name and a folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Does the work that ``request.json`` of the folder asks for, and leaves an answer there.

    A process that holds a mesh may abort while Python finalises, so this one leaves without.
    """
    work, folder = sys.argv[1], Path(sys.argv[2])
    request = json.loads((folder / "request.json").read_text())
    if request.get("debug"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code, answer = _attempt(_WORKS[work], request)
    draft = folder / f"answer_{os.environ['RANK']}.tmp"
    draft.write_text(json.dumps(answer))
    draft.replace(draft.with_suffix(".json"))
    _leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _attempt(
    work: Callable[[Mapping[str, Any]], dict[str, Any]], request: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    from atorch_ns.cli import described, exit_code
    from atorch_ns.cli._words import told

    try:
        return 0, {"value": work(request)}
    except KeyboardInterrupt:
        if request.get("debug"):
            traceback.print_exc()
        return 130, {"error": "interrupted.", "code": 130}
    except SystemExit as error:
        return 2, {"error": f"the model or the loss ended the process: {told(error)}.", "code": 2}
    except Exception as error:
        if request.get("debug"):
            traceback.print_exc()
        code = exit_code(error)
        answer = {"error": described(error), "code": code, "kind": type(error).__name__}
        return code, answer


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception:  # another rank is gone already; this one is about to be
            return


def _search(request: Mapping[str, Any]) -> dict[str, Any]:
    from atorch_ns.cli._search_work import search_on_rank

    return search_on_rank(request)


def _verify(request: Mapping[str, Any]) -> dict[str, Any]:
    from atorch_ns.cli._verify_work import verify_on_rank

    return verify_on_rank(request)


_WORKS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "search": _search,
    "verify": _verify,
}

if __name__ == "__main__":
    main()
