"""Tests of opt_lib.

fsdp, ddp, zero1, zero2 and half have no file of their own here: tests/opt_lib/test_conformance.py gives each to the suite
for third parties, and tests/parity compares each, alone and combined with the others, with one process.
"""
