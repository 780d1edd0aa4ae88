"""Files: those from outside are plain files of a bounded size, and what is written is there as a whole, or an error.

reading.py   one reader: a plain file, no longer than it may be; never a pipe, a device or a loop of links
writing.py   places, tried before a run; files and lines that are written whole, or not and with the numbers
"""
