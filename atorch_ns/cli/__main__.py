"""``python -m atorch_ns.cli``, as torchrun starts the command on every rank."""

from __future__ import annotations

from atorch_ns.cli import main

if __name__ == "__main__":
    main()
