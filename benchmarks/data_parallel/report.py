"""Memory as a Markdown table."""

from __future__ import annotations


def print_memory(memory: dict[str, dict[str, float]]) -> None:
    """MiB above the bare process group, the larger rank's."""
    print("\n| contestant | peak PSS, MiB | peak RSS (kernel), MiB | between steps, PSS |\n|---|---|---|---|")
    for name, row in memory.items():
        print(f"| {name} | {row['peak_pss']:.0f} | {row['peak_rss']:.0f} | {row['resting_pss']:.0f} |")
    if "plait-zero3" in memory and "fsdp2" in memory:
        ours, theirs = memory["plait-zero3"]["peak_pss"], memory["fsdp2"]["peak_pss"]
        verdict = "met" if ours <= theirs else "MISSED"
        print(f"\npeak of plait-zero3 / fsdp2: {ours / theirs:.2f} (goal <= 1: {verdict})")
