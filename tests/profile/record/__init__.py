"""Tests of atorch_ns.profile.record."""
