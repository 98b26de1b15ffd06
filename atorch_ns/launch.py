"""Start of processes that train together: the names of :mod:`atorch_ns.processes` for users."""

from atorch_ns.processes import *  # noqa: F403
from atorch_ns.processes import __all__ as __all__
