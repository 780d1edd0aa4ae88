"""Sanitizers: they only detect, and a run without them is the same run.

collectives.py   ranks that mean different operations, before any of them runs
"""
