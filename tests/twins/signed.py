"""The differences between the twins that are wanted, each with its reason; empty until the redraw changes something.

A line is (pattern of cells, pattern of what differs, reason); both are regular expressions, searched for anywhere.
``compare.py`` prints the text that the second one is searched in: ``rank 0 ledger step 1 line 3 ...``.
"""

SIGNED: list[tuple[str, str, str]] = [
    (
        "pipe",
        r"(send|recv) pipe \d+ \d+ setup stage",
        "the form of a message names the tensors alone, no longer the return values of modules",
    ),
    (
        r"tensor=.*recompute=full.*frozen.*sequence_parallel",
        r"order, line \d+: all_gather tensor .* tensor forward .* -> all_gather tensor .* tensor backward",
        "a frozen row saves no weight: its gradient is gathered before its block runs again",
    ),
    ("", r"all_gather \S+ .* report", "a report no longer has a digest of what forwards have written to modules"),
    ("", r"all_gather \S+ .* evaluate", "a report has one digest of the position in the run, not three numbers"),
    ("pipe", r"all_gather pipe \d+ \d+ setup", "batches are compared by the digest in every step's counts alone"),
    ("tensor=", r"all_gather \S+ \d+ \d+ (setup|sanitize)", "a sanitizer compares whole gradients, not the engine"),
    ("save_and_load", r"ledger save .* check ", "ranks ask whether files are written: it depends on time"),
    ("clip_in_two_ways", "only the frozen side raises", "engine.reduce(clip=...) overrides Engine(clip=...)"),
]
