"""Tests of opt_lib._deepspeed."""
