"""Reads plain files of a bounded size from outside.  Writes plait's files whole, or raises an error.

reading.py   reads a plain file of a bounded size; never a pipe, a device or a loop of links
writing.py   tries places before a run; writes files and lines whole, or raises an error with sizes
"""
