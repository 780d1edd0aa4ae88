"""When hosts are far: layouts on two network namespaces of this machine, as the link between them slows.

sudo python benchmarks/far_hosts/main.py          # measures (4 minutes), then writes the page and its picture
sudo python benchmarks/far_hosts/main.py --add    # more rounds, added to earlier ones
python benchmarks/far_hosts/main.py --page-only

Each namespace is a host with two ranks.  A pair of virtual cards joins them, and ``tc``'s tbf limits each one's rate.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from page import write

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
NAMES = ("plait-far-a", "plait-far-b")
ADDRESSES = ("10.231.7.1", "10.231.7.2")
CARD = "far0"
PORT = 29417


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"far_hosts: {' '.join(words)}: {done.stderr.strip()}: this needs root, ip and tc")


def begin() -> None:
    """Makes the two hosts."""
    end()
    for name in NAMES:
        sh("ip", "netns", "add", name)
    sh("ip", "link", "add", CARD, "netns", NAMES[0], "type", "veth", "peer", "name", CARD, "netns", NAMES[1])
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", CARD)
        for card in ("lo", CARD):
            sh("ip", "-n", name, "link", "set", card, "up")


def end() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def shape(mbit: int | None) -> None:
    """Limits each host's sending rate."""
    for name in NAMES:
        on = ["ip", "netns", "exec", name, "tc", "qdisc"]
        subprocess.run([*on, "del", "dev", CARD, "root"], capture_output=True)
        if mbit is not None:
            sh(*on, "add", "dev", CARD, "root", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms")


def start(folder: Path) -> list["subprocess.Popen[str]"]:
    """Starts four ranks, two on each host."""
    ranks = []
    for rank in range(4):
        host = NAMES[rank // 2]
        (folder / host).mkdir(exist_ok=True)
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": CARD}
        env |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / host)}  # hosts share no folder
        words = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
        words += [sys.executable, str(HERE / "rank.py")]
        ranks.append(subprocess.Popen(words, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    return ranks


def measure() -> list[dict[str, Any]]:
    """The seconds of each layout, link by link."""
    rows: list[dict[str, Any]] = []
    begin()
    with tempfile.TemporaryDirectory(prefix="plait-far-") as folder:
        ranks = start(Path(folder))
        try:
            first = ranks[0]
            assert first.stdin and first.stdout
            for line in first.stdout:
                if line[0] != "{":
                    shape(int(line) or None)
                    print(f"{line.strip()} Mbit/s", flush=True)
                    first.stdin.write("shaped\n")
                    first.stdin.flush()
                else:
                    rows.append({**json.loads(line), "load": os.getloadavg()[0]})
            for rank in ranks:
                rank.wait(60)
        finally:
            for rank in ranks:
                rank.kill()
            end()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"far_hosts: ranks ended with {[rank.returncode for rank in ranks]}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--add", action="store_true", help="add the rounds to the results that are there")
    parser.add_argument("--page-only", action="store_true", help="write the page of the results that are there")
    given = parser.parse_args()
    if not given.page_only:
        rows = measure()
        for row, old in zip(rows, json.loads(RESULTS.read_text())["rows"] if given.add else (), strict=False):
            row["seconds"] = {name: old["seconds"].get(name, []) + found for name, found in row["seconds"].items()}
            best = {name: max if name in ("inside", "between") else min for name in row["links"]}
            row["links"] = {name: best[name](old["links"][name], found) for name, found in row["links"].items()}
        machine = f"{os.cpu_count()} cores, Linux {platform.release()}"
        RESULTS.write_text(
            json.dumps({"machine": machine, "date": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n"
        )
    write(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
