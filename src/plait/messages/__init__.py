"""Text for people, for all packages of plait.

escape.py    makes text from outside harmless where it is shown
wording.py   sizes with units, hints for names that are nearly right
ended.py     reports a program that user code ended too early
progress.py  reports the progress of long loops
"""
