"""Clusters: the table, TOML files, and errors with file, line and field."""

from __future__ import annotations

import re

import pytest

from plait.predict.cluster import PRESETS, parse_cluster, preset

WHOLE = """
memory_gb = 80
memory_gbs = 2000
units = 108
[tflops]
bf16 = 312
[inside]
gbs = 300
latency_us = 3
[between]
gbs = 100
latency_us = 10
"""


def test_a_preset_and_the_same_with_other_figures() -> None:
    assert preset("4xh100", 3).size == 12 and preset("gb200").devices == 72
    found = parse_cluster('preset = "h100"\nhosts = 2\n[between]\ngbs = 50\n[reached]\nproduct = 0.6', "my.toml")
    assert found.size == 16 and found.between.bandwidth == 50e9 and found.reached.product == 0.6
    assert found.inside == PRESETS["h100"].inside and found.peak("bf16") == 989.4e12


def test_a_cluster_without_a_preset() -> None:
    found = parse_cluster(WHOLE, "my.toml")
    assert found.device.memory == 80e9 and found.inside.latency == 3e-6 and found.peak("bf16") == 312e12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "my.toml: no TOML: Invalid value (at end of document)"),
        ("memory_gb = 3", "my.toml, memory_gbs: missing"),
        ('\npreset = "h1000"', "my.toml, line 2, preset: 'h1000': choose one of rtx4090"),
        ('preset = "h100"\nhosts = 1.5', "my.toml, line 2, hosts: 1.5: give a whole number above 0"),
        ('preset = "h100"\n[inside]\ngbps = 5', "my.toml, line 3, gbps: unknown: did you mean gbs?"),
        ('preset = "h100"\nmemory = 5', "my.toml, line 2, memory: unknown: did you mean memory_gb"),
        (WHOLE.replace("gbs = 100", "gbs = -1"), "my.toml, line 11, gbs: -1: give a number above 0"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_field(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_cluster(text, "my.toml")


@pytest.mark.parametrize("text", ["h1000", "x", "0xh100", "8x", "8 h100"])
def test_an_unknown_accelerator(text: str) -> None:
    with pytest.raises(ValueError, match=r"gpus .* the names are rtx4090, a100-40"):
        preset(text)
