"""Tests of parallelize and what goes with it."""
