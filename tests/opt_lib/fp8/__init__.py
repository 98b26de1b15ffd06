"""Tests of ``opt_lib._fp8``, file by file."""
