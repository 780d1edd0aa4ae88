"""Jobs of the tests of pipelines: a chain that nothing divides, a decoder with tied embeddings."""

from dataclasses import replace

from verify_cases import GPT, TINY

CHAIN = replace(TINY, layers=11, steps=2)
"""11 links: uneven on any number of stages up to 8; 5 elements wide, 13 samples."""
DECODER = replace(GPT, layers=6, steps=2)
"""Embedding, 6 blocks, norm and head: 9 links, of which the first and the last share their weight."""
HEADS = replace(GPT, heads=6, kv_heads=6, length=9, steps=2, dtype="fp64")
"""Six heads for 2 and 3 ranks; 64 hidden features and 256 classes, which 3 ranks share unevenly."""
