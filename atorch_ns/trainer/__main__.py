"""``torchrun … -m atorch_ns.trainer -f config.yaml [--path.to.field value …]``."""

from __future__ import annotations

import sys

from atorch_ns.errors import InputError
from atorch_ns.trainer.trainer import train

if __name__ == "__main__":
    try:
        train(sys.argv[1:])
    except InputError as error:  # the rest has a traceback, which says where
        sys.exit(f"atorch_ns.trainer: {error}")
