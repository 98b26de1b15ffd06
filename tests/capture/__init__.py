"""Tests of ``atorch_ns.capture``."""
