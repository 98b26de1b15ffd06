"""Tests of the report's text and tables."""
