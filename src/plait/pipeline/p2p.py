"""Moves activations and their gradients from stage to stage.

    stage 0        put F ──► SEND_F ─────────► RECV_F ──► get F          stage 1, another rank
                   get B ◄── RECV_B ◄───────── SEND_B ◄── put B
    stage 0        put F ────────────────────────────────► get F          stage 1, the same rank

A pass puts its outputs and gets its inputs.  Messages are started where the schedule says so, and only ``get`` waits
for them.  The form of a hand-over depends only on the shapes of the batch (its signature), and a gradient has the form
of its activation.  So the form is sent before the first activation of a signature, as text after a header with its
length, on the same channel.  From then on both sides know it:

    sender     header  form  F0  F1  F2 ...  the first send of the signature is three messages
    receiver   RECV_F0, RECV_F1              noted: no waiting here, and without a shape nothing can be posted
               get F0                        waits for the header, posts F0 and then F1, waits for F0
               RECV_F2                       posted at once

Transports match the messages of a channel by their order, so receives are posted in order.  That cannot deadlock: a
``get`` waits for the headers of its own message and of those ahead of it on the channel, and for no others.  A stage
that hands over another shape for a known signature is refused before it sends.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm import Comm, Work
from plait.comm.header import empty_header, header_of, shape_in
from plait.forward.batch import batch_tensors
from plait.pipeline.message import Handed, MessageForm, pack, unpack
from plait.schedule.actions import ACTIVATION, GRADIENT, Action, Kind, ends
from plait.schedule.pipeline import Key
from plait.table.collectives import Note

Signature = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors."""

Boundary = tuple[int, Signature]
"""A stage's hand-over to the next one, for batches of a signature."""


def signature_of(batch: Any) -> Signature:
    return tuple(tuple(tensor.shape) for tensor in batch_tensors(batch))


class _Message(NamedTuple):
    """A hand-over between two ranks, as seen by either of them."""

    key: Key
    boundary: Boundary
    peer: int
    note: Note


class PipelineP2P:
    """The hand-overs of one rank; ``owner`` is the pipe coordinate of each stage."""

    def __init__(self, comm: Comm, owner: Mapping[int, int]) -> None:
        self.comm, self.owner = comm, owner
        here = comm.mesh.coordinates(comm.rank)
        self.rank_of = {stage: comm.mesh.rank(**{**here, "pipe": place}) for stage, place in owner.items()}
        self.signatures: list[Signature] = []
        """The signatures of the current step's microbatches."""
        self._forms: dict[Boundary, MessageForm] = {}
        self._announced: set[Boundary] = set()  # this rank has sent the header
        self._acks: Mapping[Key, tuple[Key, ...]] = {}
        self._made: dict[Key, Handed] = {}  # put by a pass of this rank, and not yet sent or got
        self._unposted: dict[int, deque[_Message]] = defaultdict(deque)
        """Receives that wait for a shape, or for one ahead of them, by the rank that sends."""
        self._coming: dict[Key, tuple[Tensor, Work]] = {}
        self._going: dict[Key, list[Work]] = {}

    def begin(self, batches: Sequence[Any], acks: Mapping[Key, tuple[Key, ...]]) -> None:
        """Begins a step; ``acks`` maps each incoming message to those of this rank that have arrived by then."""
        self._acks = acks
        self.signatures = [signature_of(batch) for batch in batches]
        for of_last_step in (self._made, self._unposted, self._coming, self._going):
            of_last_step.clear()

    def learns_from(self, batches: Sequence[Any]) -> bool:
        """True if a step on these microbatches brings this rank's boundaries shapes that they have not had before."""
        ranks, here = self.rank_of, self.comm.rank
        mine = [s for s in ranks if s + 1 in ranks and ranks[s] != ranks[s + 1] and here in (ranks[s], ranks[s + 1])]
        return any((s, signature_of(batch)) not in self._forms for s in mine for batch in batches)

    def bytes_handed(self, stage: int, batch: Any) -> int:
        """The bytes that a stage hands to the next for a batch of known shapes; 0 for unknown ones."""
        if (known := self._forms.get((stage, signature_of(batch)))) is None:
            return 0
        shape, dtype = known.packed
        return math.prod(shape) * dtype.itemsize

    def put(self, way: str, stage: int, microbatch: int, handed: Handed) -> None:
        """Takes a stage's tensors for its neighbour: activations (F) for the next, gradients (B) for the one before.
        Raises ValueError if their form differs from that of earlier batches of the same shapes."""
        target = stage + (1 if way == "F" else -1)
        boundary = min(stage, target), self.signatures[microbatch]
        if handed.form != (known := self._forms.setdefault(boundary, handed.form)):
            what = "hands over" if way == "F" else "gives back a gradient"
            raise ValueError(
                f"stage {stage} {what} {handed.form} for microbatch {microbatch}, but for an earlier batch of the same "
                f"shapes it was {known}, for which stage {target} made room: let what a link returns depend on the "
                f"shapes of the batch only, or pad it"
            )
        self._made[way, target, microbatch] = handed

    def start(self, action: Action) -> None:
        """Starts a message."""
        (source, target), m = ends(action), action.microbatch
        way, sends = ("F" if source < target else "B"), action.kind in (Kind.SEND_F, Kind.SEND_B)
        message = _Message(
            (way, target, m),
            (min(source, target), self.signatures[m]),
            self.rank_of[target if sends else source],
            Note(ACTIVATION if way == "F" else GRADIENT, f"stage {source}", m),
        )
        if sends:
            self._send(message)
        else:
            self._unposted[message.peer].append(message)
            self._post(message.peer)

    def _send(self, message: _Message) -> None:
        tensor, works = pack(self._made.pop(message.key).tensors), []
        if message.key[0] == "F" and message.boundary not in self._announced:
            note = replace(message.note, phase="setup")  # no step's prediction has it
            text = torch.tensor(list(self._forms[message.boundary].text.encode()), dtype=torch.uint8)
            for ahead in (header_of(text, self.comm.device), text.to(self.comm.device)):
                works.append(self.comm.send(ahead, message.peer, note))
            self._announced.add(message.boundary)
        works.append(self.comm.send(tensor, message.peer, message.note))
        self._going[message.key] = works

    def _post(self, peer: int) -> None:
        """Posts the receives from a rank, in order, as far as shapes are known."""
        messages = self._unposted[peer]
        while messages and messages[0].boundary in self._forms:
            message = messages.popleft()
            shape, dtype = self._forms[message.boundary].packed
            tensor = torch.empty(shape, dtype=dtype, device=self.comm.device)
            self._coming[message.key] = tensor, self.comm.recv(tensor, peer, message.note)

    def get(self, way: str, stage: int, microbatch: int) -> Handed:
        """Waits for the tensors that a stage needs from its neighbour."""
        key = (way, stage, microbatch)
        if key in self._made:
            return self._made.pop(key)
        peer = self.rank_of[stage - 1 if way == "F" else stage + 1]
        while key not in self._coming:
            first = self._unposted[peer][0]
            if first.boundary not in self._forms:  # and no pass of this rank has shown the shape in between
                note, header = replace(first.note, phase="setup"), empty_header(self.comm.device)
                self.comm.recv(header, peer, note).wait()
                (length,), dtype = shape_in(header)
                text = torch.empty(length, dtype=dtype, device=self.comm.device)
                self.comm.recv(text, peer, note).wait()
                self._forms[first.boundary] = MessageForm.read(bytes(text.tolist()).decode())
            self._post(peer)
        tensor, work = self._coming.pop(key)
        work.wait()
        for acknowledged in self._acks.get(key, ()):
            self._arrived(acknowledged)
        form = self._forms[stage - (way == "F"), self.signatures[microbatch]]
        return Handed(unpack(tensor, form), form)

    def wait_all(self) -> None:
        """Waits, after a step, until all messages of this rank have arrived."""
        for key in list(self._going):
            self._arrived(key)

    def _arrived(self, key: Key) -> None:
        for work in self._going.pop(key):
            work.wait()
