"""Planted faults: small changes of the packages that the tests must find."""
