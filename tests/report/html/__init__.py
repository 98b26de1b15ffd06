"""Tests of the page and its pictures."""
