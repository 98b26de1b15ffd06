"""Calls in a process of their own."""

from __future__ import annotations

import os
import time

import pytest

from atorch_ns.doctor.base import call_isolated


@pytest.mark.processes
def test_isolation() -> None:
    assert call_isolated(len, [1, 2], timeout_s=60).value == 2
    assert "TypeError" in call_isolated(len, 1, timeout_s=60).problem
    assert "code 7" in call_isolated(os._exit, 7, timeout_s=60).problem
    assert "no answer" in call_isolated(time.sleep, 60, timeout_s=0.1).problem
