"""The order of the samples, as a function: no list to shuffle, no state to save.

``sample_at(seed, epoch, index, n)`` is the index-th entry of a permutation of 0 .. n-1 chosen by (seed, epoch), in
O(1) memory.  The permutation is a Feistel network on the bits of the index: each half in turn is xored with a hash of
the other:

    left  |  right          every round can be undone (xor the same hash again), so the whole is a
      ^------ hash          permutation of 0 .. 2^bits - 1
    hash ------^

If it leaves 0 .. n-1, it is applied again until it comes back ("cycle walking"), which walks the cycles of a
permutation and so is one itself.  2^bits < 2n: on average fewer than two applications.

Sources: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002); the hash is SplitMix64's finaliser (Steele,
Lea, Flood 2014).
"""

NUM_ROUNDS = 8
MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: SplitMix64's step
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def scramble(word: int) -> int:
    """A bijection of 64-bit words; every input bit affects every output bit (SplitMix64's last step)."""
    word &= MASK_64
    word = ((word ^ (word >> 30)) * MULTIPLIERS[0]) & MASK_64
    word = ((word ^ (word >> 27)) * MULTIPLIERS[1]) & MASK_64
    return word ^ (word >> 31)


def mix(*words: int) -> int:
    """A 64-bit hash of whole numbers, each taken modulo 2^64; their order matters."""
    state = 0
    for word in words:
        state = scramble(state + GOLDEN + scramble(word + GOLDEN))
    return state


def sample_at(seed: int, epoch: int, index: int, num_samples: int) -> int:
    """The number of the index-th sample in this epoch: a permutation of 0 .. num_samples - 1 in ``index``."""
    key = mix(seed, epoch)
    bits = (num_samples - 1).bit_length()
    index = permute(key, index, bits)
    while index >= num_samples:
        index = permute(key, index, bits)
    return index


def permute(key: int, word: int, bits: int) -> int:
    """The Feistel network chosen by ``key``: a permutation of 0 .. 2^bits - 1."""
    right_bits = bits - bits // 2
    left_mask, right_mask = (1 << bits // 2) - 1, (1 << right_bits) - 1
    left, right = word >> right_bits, word & right_mask
    for number in range(NUM_ROUNDS):
        round_key = key + number * GOLDEN
        if number % 2 == 0:
            left ^= scramble(scramble(round_key) ^ right) & left_mask
        else:
            right ^= scramble(scramble(round_key) ^ left) & right_mask
    return left << right_bits | right
