"""Tests of the views of a running search."""
