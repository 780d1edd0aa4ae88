"""What is wrong, and where: the words of a judgement.

difference.py      the shape of a difference: a factor, a region, a permutation, noise
contributions.py   which samples a gradient holds, and how often
"""
