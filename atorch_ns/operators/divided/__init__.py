"""Divided models: conversions between placements, calls on pieces, generated code, and its check."""
