"""Tests of `atorch_ns.search.history`."""
