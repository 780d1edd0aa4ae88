"""Data whose samples are functions of (seed, place in the run), so that any layout reads the same run.

order.py         the order of the samples, as a function                  start here
batches.py       a rank's microbatches of a step, from its place in the run
corpus.py        a finite set of samples, and the ends of the steps in an epoch
text.py          text as bytes, and its held-out part
tokens.py        files of token numbers, mapped into memory
windows.py       a text as windows of equal length
packing.py       documents of different lengths in rows of one length
regression.py    regression data from a hash
rank_batches.py  a rank's part of each batch, for a stock DataLoader
workers.py       makes the batches of the next steps ahead, in worker processes
"""
