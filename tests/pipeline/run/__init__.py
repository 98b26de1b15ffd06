"""Tests of ``atorch_ns.pipeline.run``."""
