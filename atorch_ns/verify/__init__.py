"""Does a strategy train the user's own model as one process does?"""

from __future__ import annotations

from atorch_ns.verify._judge import ParameterVerdict, Verification
from atorch_ns.verify._verify import verify

__all__ = ["ParameterVerdict", "Verification", "verify"]
