"""Tests of the checks of machines and nodes."""
