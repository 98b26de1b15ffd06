"""Training on several processes from a notebook's cell.

::

    from atorch_ns import notebook
    loss = notebook.run(train, args=(10,), nproc=2)
"""

from __future__ import annotations

from atorch_ns.notebook._run import run

__all__ = ["run"]
