"""Small versions of fast code, to learn from and to measure against, and the judge of the puzzles.

ring.py       the ring algorithms of the collectives, written with ``send`` and ``recv``
tree.py       the same as binomial trees
judge.py      the error of an answer to a puzzle
witnessed.py  plait's verdict on a training loop
script.py     ranks on a line and tensors that go from one to another, for short scripts
"""
