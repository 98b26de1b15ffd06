"""Strategies from the config files of other systems."""
