"""Tests of ``atorch_ns.sharding``."""
