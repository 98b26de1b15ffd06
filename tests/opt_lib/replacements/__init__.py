"""Tests of opt_lib._replacements."""
