"""Tests of opt_lib._sharded."""
