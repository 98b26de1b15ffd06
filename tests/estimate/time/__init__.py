"""Tests of atorch_ns.estimate.time."""
