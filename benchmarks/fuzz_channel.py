"""A fuzzer of the channel between hosts: frames, proofs and streams of bytes that nobody meant.

python benchmarks/fuzz_channel.py --seconds 3600 --seed 7

Each case is a connection by a stranger or by somebody with the key who sends a changed, cut, repeated or random
stream.  Behind every few hundred cases a known peer must still be heard, and nothing else may have been: a message
counts as heard only where an honest, whole prefix of frames led to it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import socket
import sys
import time
from contextlib import suppress

from plait.run.watch import channel
from plait.run.watch.channel import HEADER, HELLO, MOST_BYTES, NONCE, Listener, Message, Sender, _mac
from plait.run.watch.key import ChannelKey

KEY = ChannelKey(b"sixteen bytes or more")
CHECK_EVERY = 200


def body(rng: random.Random) -> bytes:
    """Sometimes an object of JSON."""
    kinds = [
        lambda: json.dumps({"n": rng.getrandbits(64), "text": chr(rng.randrange(1, 0xD7FF)) * 9}).encode(),
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: b"[" * rng.randrange(20_000),
        lambda: b'{"a":' * rng.randrange(2_000),
        lambda: rng.choice([b"null", b"1e999", b'"x"', b"{}", b"NaN", b"\xff\xfe", b""]),
    ]
    return rng.choice(kinds)()


def is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def stream(rng: random.Random, session: bytes) -> tuple[bytes, int]:
    """Frames of somebody with the key, perhaps spoiled somewhere; how many messages of them may be heard."""
    sent = meant = b""
    ends = []
    for number in range(rng.randrange(1, 6)):
        data = body(rng)
        frame = len(data).to_bytes(4, "big") + _mac(session, number.to_bytes(8, "big"), data) + data
        meant += frame
        if len(ends) == number and is_object(data):
            ends.append(len(meant))
        if rng.random() < 0.3:
            place = rng.randrange(len(frame))
            frame = rng.choice(
                [
                    frame[:place] + bytes([frame[place] ^ (1 << rng.randrange(8))]) + frame[place + 1 :],
                    frame[:place],
                    frame[:place] + rng.randbytes(3) + frame[place:],
                    rng.randrange(MOST_BYTES, 2**32).to_bytes(4, "big") + frame[4:],
                ]
            )
        sent += frame
    return sent, sum(sent.startswith(meant[:end]) for end in ends)


def case(rng: random.Random, address: channel.Address) -> int:
    """One connection; how many messages may be heard of it."""
    with socket.create_connection(address, timeout=10) as peer:
        peer.settimeout(10)
        if rng.random() < 0.4:  # a stranger
            with suppress(OSError):
                for _ in range(rng.randrange(4)):
                    peer.sendall(rng.randbytes(rng.randrange(1, 200)))
            return 0
        nonce = peer.recv(len(HELLO) + NONCE, socket.MSG_WAITALL)[len(HELLO) :]
        mine = rng.randbytes(NONCE)
        proof = _mac(KEY.secret, b"sender", nonce, mine)
        if rng.random() < 0.2:
            place = rng.randrange(32)
            proof = proof[:place] + bytes([proof[place] ^ (1 << rng.randrange(8))]) + proof[place + 1 :]
            peer.sendall(mine + proof)
            return 0
        frames, good = stream(rng, _mac(KEY.secret, b"session", nonce, mine))
        with suppress(OSError):
            data, sent = mine + proof + frames, 0
            while sent < len(data):
                size = rng.choice([1, HEADER, 1000, 10**6]) if len(data) - sent < 2000 else 10**6
                sent += peer.send(data[sent : sent + size])
        # It is read to its end: of what the listener has not read when the connection is reset, it hears nothing.
        with suppress(OSError):
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass
        return good


def main() -> int:
    """Runs for a time and says how much was tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**12)
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rng, heard = random.Random(asked.seed), list[Message]()
    cases = allowed = total = 0
    end = time.monotonic() + asked.seconds
    with Listener(("127.0.0.1", 0), KEY, heard.append) as listener:
        while time.monotonic() < end and cases < asked.cases:
            allowed += case(rng, listener.address)
            cases += 1
            if cases % CHECK_EVERY and cases < asked.cases:
                continue
            with Sender(listener.address, KEY, patience=30) as known:
                known.send({"known": cases})
                patience = time.monotonic() + 30
                while {"known": cases} not in heard and time.monotonic() < patience:
                    time.sleep(0.001)
            heard.remove({"known": cases})  # a ValueError here: a known peer was not heard
            if len(heard) > allowed:
                sys.stderr.write(f"seed {asked.seed}, case {cases}: {len(heard)} messages were heard of {allowed}\n")
                return 1
            total, allowed = total + len(heard), 0
            heard.clear()
        dropped = sum(listener.strangers.values())
    sys.stdout.write(f"{cases} cases, {total} honest messages heard, {dropped} connections dropped, nothing else\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
