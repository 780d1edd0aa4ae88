"""What is wrong, and where: the words of a judgement.

values.py          numbers of every dtype, made comparable; how much two honest computations may differ
difference.py      the shape of a difference: a factor, a region, a permutation, noise
contributions.py   which samples a gradient holds, and how often
tape.py            what happens in a model while it trains
wrong.py           the first wrong tensor, and likely causes

sanitize/          what a program does wrong, looked for in some steps
verify/            the proof that a layout is the run of a single process
witness/           any engine, judged
prove/             the proof of a layout that has not run; pure
"""
