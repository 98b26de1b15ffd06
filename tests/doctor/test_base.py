"""Calls in a process of their own."""

from __future__ import annotations

import os
import time

import pytest

from atorch_ns.doctor.base import isolated


@pytest.mark.processes
def test_isolation() -> None:
    assert isolated(len, [1, 2], timeout_s=60).value == 2
    assert "TypeError" in isolated(len, 1, timeout_s=60).problem
    assert "code 7" in isolated(os._exit, 7, timeout_s=60).problem
    assert "no answer" in isolated(time.sleep, 60, timeout_s=0.1).problem
