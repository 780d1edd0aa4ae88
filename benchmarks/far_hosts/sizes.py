"""The layouts and the model that are measured, for ranks and prediction."""

MESH = "replica=2 shard=2"
"""Two hosts of two ranks each: groups over ``replica`` cross the link."""
ROWS = ("zero3", "hsdp", "psdp")
EVERY = 8
"""Steps of the islands (zero3 inside, DiLoCo between them) from one meeting to the next."""
MICROBATCHES, LENGTH = 2, 32
GPT_SIZES = {"num_layers": 4, "width": 192, "num_heads": 4, "num_kv_heads": 4, "max_length": LENGTH}
LINKS: tuple[tuple[int | None, int], ...] = ((None, 5), (1000, 5), (300, 3), (100, 3), (30, 2))
"""Mbit/s of the link in each direction (None: not shaped), and the rounds that are timed."""
