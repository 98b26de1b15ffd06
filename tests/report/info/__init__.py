"""Tests of the data of reports."""
