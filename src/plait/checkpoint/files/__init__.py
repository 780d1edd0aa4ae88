"""Files from outside are plain files of a bounded size.  Files of plait are written whole, or an error says why not.

reading.py   one reader: a plain file of a bounded size; never a pipe, a device or a loop of links
writing.py   places that are tried before a run; files and lines that are written whole, or an error with sizes
"""
