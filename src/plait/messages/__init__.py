"""Text for people, as every package of plait writes it.

escape.py    makes text from outside harmless where it is shown
wording.py   sizes with units, hints for names that are nearly right
ended.py     names a program that user code ended before it was done
progress.py  reports the progress of long loops
"""
