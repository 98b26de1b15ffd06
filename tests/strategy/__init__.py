"""Tests of atorch_ns.strategy."""
