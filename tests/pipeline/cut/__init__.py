"""Tests of ``atorch_ns.pipeline.cut``."""
