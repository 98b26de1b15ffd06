"""Tests of ``atorch_ns.pipeline.schedule``."""
