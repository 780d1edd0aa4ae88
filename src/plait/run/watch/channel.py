"""Messages between the hosts of a run, from those who have the key only.

    sender                                   listener
      ├── connects ───────────────────────────►│
      │◄──────────── HELLO, nonce L ───────────┤   a fresh nonce from both: nothing can be played back
      ├── nonce S, MAC(key, "sender" L S) ────►│   no proof in time, or a wrong one: dropped and counted
      │◄──────────── MAC(key, "listener" L S) ─┤   the sender says nothing before it has seen this
      ├── length, MAC(session, n, body), body ►│   body n = 0, 1, ... is JSON, of at most 64 KiB
      │◄──────────── MAC(session, "taken" n) ──┤   an acknowledgement: who sends knows that it arrived

A cut link shows nowhere else: what is written to a socket is taken by the kernel of this host.

MAC is HMAC-SHA256, and the session's key is MAC(key, "session" L S).  Until a peer has proved itself it is 64 bytes
of a fixed form, which are compared and never parsed; afterwards a frame whose MAC is wrong ends the connection.  JSON
is the only form, and nothing in it is ever called.

One thread serves all peers without waiting for any.  Strangers are bounded in number, bytes and seconds: where too many
wait, the oldest of them is dropped, so they cannot keep out a known peer, whose proof is there in milliseconds.
Messages are authenticated, not encrypted: they carry no secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from plait.comm.deadline import clock
from plait.comm.peer import shown
from plait.messages.escape import one_line
from plait.run.watch.key import ChannelKey

Address: TypeAlias = tuple[str, int]
Message: TypeAlias = dict[str, Any]

HELLO = b"plait 2\n"
NONCE, MAC = 32, 32
PROOF = NONCE + MAC
HEADER = 4 + MAC
MOST_BYTES = 64 * 1024
"""Of a message's JSON."""
MOST_STRANGERS = 256
"""Connections without a proof; one more drops the oldest."""
MOST_KNOWN = 1024
PROOF_SECONDS = 2.0
"""From a connection to its proof."""
SILENT_SECONDS = 30.0
"""After which a known peer that says nothing is dropped."""
MOST_PER_SECOND = 100
"""Messages of one peer, over the time since it came."""
MOST_ADDRESSES = 1024
"""That are remembered, for one line of log each."""
SEND_SECONDS = 2.0
"""For each of connecting, proving, and sending until it is acknowledged."""
PAUSE_SECONDS = 0.05
"""Between two tries to accept where nothing makes room."""
NO_PROOF = ": it has another key, or is no listener of plait"

log = logging.getLogger("plait.run.watch.channel")


@dataclass(eq=False)
class Peering:
    """One connection, as the listener keeps it."""

    socket: socket.socket
    address: str
    nonce: bytes
    since: float
    heard: float
    data: bytearray = field(default_factory=bytearray)
    session: bytes = b""
    """Empty until it has proved itself."""
    count: int = 0


class Listener:
    """Takes messages from all who have the key, in a thread of its own.

    ``Listener(("10.0.0.5", 0), key, print).address`` is where it listens.  Nothing but loopback is listened on unless
    it is asked for.
    """

    def __init__(
        self,
        address: Address,
        key: ChannelKey,
        on_message: Callable[[Message], object],
        *,
        patience: float = PROOF_SECONDS,
    ) -> None:
        self.strangers: dict[str, int] = {}
        """How many connections of each address were dropped."""
        self.failures = 0
        """Messages that ``on_message`` could not take."""
        self._key, self._on_message, self._patience = key.secret, on_message, patience
        self._strangers: deque[Peering] = deque()
        self._known: set[Peering] = set()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=MOST_STRANGERS)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="plait-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections."""
        if not self._closing:
            self._closing = True
            with contextlib.suppress(OSError):  # the thread has seen it already, and closed this
                self._wake.send(b"x")
            self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while not self._closing:
            ready = self._selector.select(0.25)
            now = clock()
            for key, _ in ready:
                if key.fileobj is self._socket:
                    self._accept(now)
                elif isinstance(key.data, Peering):
                    self._read(key.data, now)
            while self._strangers and now - self._strangers[0].since > self._patience:
                self._drop(self._strangers[0], "sent no proof")
            for peer in [peer for peer in self._known if now - peer.heard > SILENT_SECONDS]:
                self._drop(peer, "")
        for peer in (*self._strangers, *self._known):
            peer.socket.close()
        for each in (self._socket, self._wake, self._woken, self._selector):
            each.close()

    def _accept(self, now: float) -> None:
        try:
            connection, address = self._socket.accept()
        except OSError:  # it is gone again, or this process has no descriptor left: the oldest stranger makes room
            if self._strangers:
                self._drop(self._strangers[0], "held a connection that others need")
            else:
                time.sleep(PAUSE_SECONDS)
            return
        connection.setblocking(False)
        peer = Peering(connection, str(address[0]), secrets.token_bytes(NONCE), now, now)
        self._strangers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._send(peer, HELLO + peer.nonce)
        if len(self._strangers) > MOST_STRANGERS:
            self._drop(self._strangers[0], "sent no proof while many others came")

    def _read(self, peer: Peering, now: float) -> None:
        if peer.socket.fileno() < 0:  # dropped since the selector told of it
            return
        try:
            data = peer.socket.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer, "" if peer.session else "left without a proof")
            return
        peer.data += data
        peer.heard = now
        if not peer.session and len(peer.data) >= PROOF:
            self._prove(peer)
        while peer.session and self._take(peer, now):
            pass

    def _prove(self, peer: Peering) -> None:
        theirs, proof = bytes(peer.data[:NONCE]), bytes(peer.data[NONCE:PROOF])
        if not hmac.compare_digest(proof, _mac(self._key, b"sender", peer.nonce, theirs)):
            self._drop(peer, f"has another key: '{shown(bytes(peer.data))}'")
        elif len(self._known) >= MOST_KNOWN:
            self._drop(peer, f"is one more than {MOST_KNOWN}")
        else:
            del peer.data[:PROOF]
            self._strangers.remove(peer)
            self._known.add(peer)
            peer.session = _mac(self._key, b"session", peer.nonce, theirs)
            self._send(peer, _mac(self._key, b"listener", peer.nonce, theirs))

    def _take(self, peer: Peering, now: float) -> bool:
        """Takes one message, if it is there; whether there may be another."""
        if len(peer.data) < HEADER:
            return False
        size = int.from_bytes(peer.data[:4], "big")
        if size > MOST_BYTES:
            self._drop(peer, f"sent a message of {size} bytes")
            return False
        if len(peer.data) < HEADER + size:
            return False
        mac, body = bytes(peer.data[4:HEADER]), bytes(peer.data[HEADER : HEADER + size])
        del peer.data[: HEADER + size]
        number, peer.count = peer.count, peer.count + 1
        if not hmac.compare_digest(mac, _mac(peer.session, number.to_bytes(8, "big"), body)):
            self._drop(peer, "sent a message that was altered")
        elif peer.count > MOST_PER_SECOND * (1 + now - peer.since):
            self._drop(peer, f"sent more than {MOST_PER_SECOND} messages a second")
        elif (message := _parsed(body)) is None:
            self._drop(peer, "sent what is no JSON object")
        else:
            self._send(peer, _acknowledgement(peer.session, number))
            try:
                self._on_message(message)
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    log.warning("a message of %s was not understood: %s", peer.address, one_line(repr(error), 200))
            return True
        return False

    def _send(self, peer: Peering, data: bytes) -> None:
        """A few bytes, for which there is room in any connection that is read."""
        try:
            whole = peer.socket.send(data) == len(data)
        except OSError:
            whole = False
        if not whole:
            self._drop(peer, "" if peer.session else "left without a proof")

    def _drop(self, peer: Peering, why: str) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        self._known.discard(peer)
        with contextlib.suppress(ValueError):
            self._strangers.remove(peer)
        if not why:
            return
        if peer.address not in self.strangers and len(self.strangers) < MOST_ADDRESSES:
            log.warning("dropped a connection of %s, which %s", one_line(peer.address), why)
            self.strangers[peer.address] = 0
        if peer.address in self.strangers:
            self.strangers[peer.address] += 1


class Sender:
    """Sends messages to a listener, over one connection that is made when it is needed."""

    def __init__(self, address: Address, key: ChannelKey, *, patience: float = SEND_SECONDS) -> None:
        self.address, self._key, self._patience = address, key.secret, patience
        self._socket: socket.socket | None = None
        self._session, self._count = b"", 0

    def send(self, message: Message) -> None:
        """Sends one message.

        Raises:
            ConnectionError, TimeoutError: the listener cannot be reached, acknowledges nothing, or has another
                key; the next call tries anew.
            ValueError: more than 64 KiB of JSON.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MOST_BYTES:
            raise ValueError(f"a message has {len(body)} bytes, {MOST_BYTES} are the most")
        try:
            if self._socket is None:
                self._socket = self._connected()
            mac = _mac(self._session, self._count.to_bytes(8, "big"), body)
            end = time.monotonic() + self._patience
            self._socket.settimeout(self._patience)
            self._socket.sendall(len(body).to_bytes(4, "big") + mac + body)
            if not hmac.compare_digest(_exactly(self._socket, MAC, end), _acknowledgement(self._session, self._count)):
                raise ConnectionError("its acknowledgement is of another message")
            self._count += 1
        except OSError as error:
            self.close()
            where = one_line(f"{self.address[0]}:{self.address[1]}", 200)
            kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
            raise kind(f"the listener at {where} was not reached: {one_line(str(error), 200)}") from error

    def _connected(self) -> socket.socket:
        end = time.monotonic() + self._patience
        connection = socket.create_connection(self.address, timeout=self._patience)
        try:
            hello = _exactly(connection, len(HELLO) + NONCE, end, NO_PROOF)
            if not hello.startswith(HELLO):
                raise ConnectionError(f"it answers '{shown(hello)}', as no listener of plait does")
            theirs, mine = hello[len(HELLO) :], secrets.token_bytes(NONCE)
            connection.sendall(mine + _mac(self._key, b"sender", theirs, mine))
            answer = _exactly(connection, MAC, end, NO_PROOF)
            if not hmac.compare_digest(answer, _mac(self._key, b"listener", theirs, mine)):
                raise ConnectionError("it has another key")
        except BaseException:
            connection.close()
            raise
        self._session, self._count = _mac(self._key, b"session", theirs, mine), 0
        return connection

    def close(self) -> None:
        """Ends the connection; the next message makes another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exactly(connection: socket.socket, size: int, end: float, why: str = "") -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.01, end - time.monotonic()))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError(f"it closed the connection{why}")
        data += part
    return data


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Of parts whose lengths are part of what is proved."""
    whole = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, whole, hashlib.sha256).digest()


def _acknowledgement(session: bytes, number: int) -> bytes:
    """That message ``number`` has been taken."""
    return _mac(session, b"taken", number.to_bytes(8, "big"))


def _parsed(body: bytes) -> Message | None:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
