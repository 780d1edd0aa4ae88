"""The channel between hosts: those with the key are heard, nobody else is, and nobody else can do harm."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import os
import pickle
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from plait.run.watch import channel
from plait.run.watch.channel import HELLO, MOST_BYTES, NONCE, Listener, Message, Sender
from plait.run.watch.key import ChannelKey, read_key

KEY = ChannelKey(b"sixteen bytes or more")
PATIENT = 30.0
LOOPBACK = ("127.0.0.1", 0)


class Heard:
    """A listener and what it was told."""

    def __init__(self, patience: float = PATIENT) -> None:
        self.messages: list[Message] = []
        self.listener = Listener(LOOPBACK, KEY, self.messages.append, patience=patience)
        self.address = self.listener.address

    def waits_for(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENT
        while not what():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.005)

    def hears(self, **message: Any) -> None:
        """A known peer is heard, now."""
        with Sender(self.address, KEY, patience=PATIENT) as sender:
            sender.send(message)
            self.waits_for(lambda: self.messages)
        assert self.messages.pop() == message and not self.messages

    def dropped(self, count: int = 1) -> None:
        self.waits_for(lambda: sum(self.listener.strangers.values()) >= count)


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.listener.close()


def mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(len(p).to_bytes(4, "big") + p for p in parts), hashlib.sha256).digest()


def proved(address: tuple[str, int]) -> tuple[socket.socket, bytes]:
    """A connection of somebody with the key who then does as he likes, and its session key."""
    peer = socket.create_connection(address, timeout=PATIENT)
    nonce = peer.recv(len(HELLO) + NONCE, socket.MSG_WAITALL)[len(HELLO) :]
    mine = os.urandom(NONCE)
    peer.sendall(mine + mac(KEY.secret, b"sender", nonce, mine))
    assert peer.recv(32, socket.MSG_WAITALL) == mac(KEY.secret, b"listener", nonce, mine)
    return peer, mac(KEY.secret, b"session", nonce, mine)


def frame(session: bytes, number: int, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + mac(session, number.to_bytes(8, "big"), body) + body


def test_messages_come_whole_and_in_order(heard: Heard) -> None:
    sent = [{"n": n, "text": "\x1b[31m" * n} for n in range(50)] + [{"long": "x" * (MOST_BYTES - 20)}]
    with Sender(heard.address, KEY, patience=PATIENT) as sender:
        for message in sent:
            sender.send(message)
        heard.waits_for(lambda: len(heard.messages) == len(sent))
        with pytest.raises(ValueError, match=f"{MOST_BYTES} are the most"):
            sender.send({"long": "x" * MOST_BYTES})
    assert heard.messages == sent and not heard.listener.strangers


def test_another_key_is_heard_by_nobody(heard: Heard) -> None:
    with (
        Sender(heard.address, ChannelKey(b"another key of plait"), patience=PATIENT) as sender,
        pytest.raises(ConnectionError, match="another key"),
    ):
        sender.send({"a": 1})
    heard.dropped()
    assert not heard.messages
    heard.hears(a=2)


def test_a_listener_without_the_key_gets_no_message() -> None:
    with socket.create_server(LOOPBACK) as false, Sender(false.getsockname(), KEY, patience=0.5) as sender:
        with pytest.raises(TimeoutError, match="timed out"):
            sender.send({"secret": 1})
        connection, _ = false.accept()
        connection.close()


@pytest.mark.parametrize(
    ("answer", "says"), [(b"", "timed out"), (bytes(32), "its acknowledgement is of another message")]
)
def test_who_sends_knows_that_it_has_arrived(answer: bytes, says: str) -> None:
    """A listener behind a cut link takes nothing, though the socket does."""

    def listen() -> None:
        connection, _ = false.accept()
        nonce = os.urandom(NONCE)
        connection.sendall(HELLO + nonce)
        theirs = connection.recv(NONCE + 32, socket.MSG_WAITALL)[:NONCE]
        connection.sendall(mac(KEY.secret, b"listener", nonce, theirs) + answer)
        ended.wait(PATIENT)
        connection.close()

    ended = threading.Event()
    with (
        socket.create_server(LOOPBACK) as false,
        Sender(false.getsockname(), KEY, patience=PATIENT if answer else 1.0) as sender,
    ):
        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(OSError, match=says):
            sender.send({"a": 1})
        ended.set()
        thread.join()


class Harm:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def as_tls(address: tuple[str, int]) -> None:
    context = ssl.create_default_context()
    with suppress(OSError), socket.create_connection(address, timeout=PATIENT) as plain:
        context.wrap_socket(plain, server_hostname="localhost").close()


def as_torch(address: tuple[str, int]) -> None:
    with suppress(RuntimeError):
        store = dist.TCPStore(*address, 1, False, timedelta(seconds=0.2), wait_for_workers=False)  # type: ignore[attr-defined]
        store.set("plait/world 0.0/here/1", "x")


STRANGERS: dict[str, Callable[[Path], bytes]] = {
    "http": lambda _: b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: \x1b[2J" + b"a" * 50 + b"\r\n\r\n",
    "garbage": lambda _: os.urandom(5000),
    "zeros": lambda _: bytes(200_000),
    "pickle": lambda path: pickle.dumps(Harm(path)) + bytes(200),
    "json": lambda _: json.dumps({"host": "a", "ranks": []}).encode() * 10,
    "playback": lambda _: os.urandom(NONCE) + mac(KEY.secret, b"sender", bytes(NONCE), bytes(NONCE)),
    "closes": lambda _: b"",
}


@pytest.mark.parametrize("kind", [*STRANGERS, "tls", "torch"])
def test_strangers_change_nothing_and_are_logged_escaped(
    heard: Heard, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    if kind in STRANGERS:
        with socket.create_connection(heard.address, timeout=PATIENT) as stranger, suppress(OSError):
            stranger.sendall(STRANGERS[kind](tmp_path / "harm"))
    else:
        {"tls": as_tls, "torch": as_torch}[kind](heard.address)
    heard.dropped()
    assert "dropped a connection of 127.0.0.1" in caplog.text and "\x1b" not in caplog.text
    assert not list(tmp_path.iterdir())
    heard.hears(still="here")


@pytest.mark.parametrize(
    "body",
    [b"[" * 60_000, b"[]", b"\xff", b"", b'"x"', b"NaN"],
)
def test_even_with_the_key_only_objects_of_json_pass(heard: Heard, body: bytes) -> None:
    peer, session = proved(heard.address)
    with peer:
        peer.sendall(frame(session, 0, b'{"a": 1}') + frame(session, 1, body))
        heard.waits_for(lambda: heard.listener.strangers)
        assert heard.messages == [{"a": 1}]


def test_a_frame_that_was_altered_repeated_or_is_too_long_ends_the_connection(heard: Heard) -> None:
    body, taken = b'{"a": 1}', list[Message]()
    for number, harm in enumerate(
        [
            lambda session: frame(session, 0, body)[:-1] + b"]",
            lambda session: frame(session, 1, body),
            lambda session: frame(session, 0, body) * 2,
            lambda session: (MOST_BYTES + 1).to_bytes(4, "big") + bytes(100),
        ],
        start=1,
    ):
        peer, session = proved(heard.address)
        with peer:
            peer.sendall(harm(session))
            heard.dropped(number)
            taken += heard.messages
            heard.messages.clear()
    assert taken == [{"a": 1}]


def test_a_peer_that_sends_without_end_is_dropped(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_PER_SECOND", 2)
    peer, session = proved(heard.address)
    with peer, suppress(OSError):
        peer.sendall(b"".join(frame(session, n, b"{}") for n in range(10_000)))
        heard.waits_for(lambda: heard.listener.strangers)
    assert len(heard.messages) < 1000


def test_who_connects_and_says_nothing_is_dropped() -> None:
    heard = Heard(patience=0.2)
    with heard.listener, socket.create_connection(heard.address, timeout=PATIENT) as silent:
        assert silent.recv(len(HELLO) + NONCE, socket.MSG_WAITALL).startswith(HELLO)
        with suppress(ConnectionError):  # the process may have slept for longer than that
            silent.sendall(b"x")
            assert silent.recv(1) == b""
        heard.dropped()


def test_a_thousand_connections_do_not_keep_out_a_known_one(heard: Heard) -> None:
    with Sender(heard.address, KEY, patience=PATIENT) as before, ExitStack() as held:
        before.send({"before": 0})
        heard.waits_for(lambda: heard.messages)
        for _ in range(1000):
            stranger = held.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(heard.address)
        heard.messages.clear()
        heard.hears(through="the crowd")
        before.send({"before": 1})
        heard.waits_for(lambda: heard.messages)
        assert heard.messages.pop() == {"before": 1}


def test_without_descriptors_it_waits_and_does_not_spin(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, accept = list[float](), socket.socket.accept

    def full(listening: socket.socket) -> Any:
        tries.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", full)
    with socket.create_connection(heard.address, timeout=PATIENT):
        heard.waits_for(lambda: len(tries) > 5)
        assert all(later - earlier > 0.02 for earlier, later in pairwise(tries))
    monkeypatch.setattr(socket.socket, "accept", accept)
    heard.hears(there_is="room again")


def test_a_message_that_is_not_understood_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(message: Message) -> None:
        raise KeyError("\x1b[31m")

    with Listener(LOOPBACK, KEY, refuse) as listener, Sender(listener.address, KEY, patience=PATIENT) as sender:
        end = time.monotonic() + PATIENT
        while listener.failures < 2 and time.monotonic() < end:
            sender.send({})
            time.sleep(0.02)
    assert listener.failures >= 2 and caplog.text.count("was not understood") == 1 and "\x1b" not in caplog.text


def test_a_listener_that_is_gone_is_said_and_found_again(heard: Heard) -> None:
    with Sender(heard.address, KEY, patience=PATIENT) as sender:
        sender.send({"n": 0})
        heard.waits_for(lambda: heard.messages)
        heard.listener.close()
        with pytest.raises(ConnectionError, match="was not reached"):
            for _ in range(100):
                sender.send({"n": 1})
                time.sleep(0.01)
        again = Listener(heard.address, KEY, heard.messages.append)
        with again:
            sender.send({"n": 2})
            heard.waits_for(lambda: {"n": 2} in heard.messages)


def test_the_key_comes_from_a_file_of_ones_own_and_never_shows(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("a secret of thirty bytes or so\n")
    path.chmod(0o600)
    key = read_key({"PLAIT_KEY_FILE": str(path)})
    assert key == ChannelKey(b"a secret of thirty bytes or so") and "secret of" not in repr(key) + str(key)
    assert read_key({"PLAIT_KEY": "a secret of thirty bytes or so"}) == key
    assert read_key({}) is None
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"mode 0640 .*: others can read it; chmod 600"):
        read_key({"PLAIT_KEY_FILE": str(path)})
    os.mkfifo(tmp_path / "fifo", 0o600)
    for wrong in ("", "fifo", "nowhere", "x\x1b[2J", "x\0"):
        with pytest.raises(ValueError, match="PLAIT_KEY_FILE=") as refused:
            read_key({"PLAIT_KEY_FILE": str(tmp_path / wrong)})
        assert "\x1b" not in str(refused.value)
    with pytest.raises(ValueError, match="the key has 5 bytes") as short:
        read_key({"PLAIT_KEY": "short"})
    assert "short" not in str(short.value)
