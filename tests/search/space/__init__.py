"""Tests of `atorch_ns.search.space`."""
