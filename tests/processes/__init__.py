"""Tests of starting ranks."""
