"""Tests of ``atorch_ns.operators``."""
