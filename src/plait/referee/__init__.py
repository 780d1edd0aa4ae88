"""Judges a run: finds what is wrong and where, and puts it into words.

values.py          comparable numbers for every dtype; how much two honest computations may differ
difference.py      the shape of a difference: a factor, a region, a permutation, noise
contributions.py   which samples a gradient holds, and how often
tape.py            records what happens in a model while it trains
wrong.py           the first wrong tensor, and likely causes

sanitize/          looks in some steps for mistakes of the program
verify/            shows that a layout is the run of a single process
witness/           judges any engine
prove/             proves a layout that has not run; pure
"""
