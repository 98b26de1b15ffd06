"""Measurements of speed, overhead, memory and import time, each against plain torch on the same machine.

``python -m benchmarks`` runs them and writes ``benchmarks/results/``. Where something is timed, both sides
run in one process, in turns, and what is reported is the median of the ratios of neighbouring runs.
"""
