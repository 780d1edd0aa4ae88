"""Lesson 8: streams.

The idea.  A GPU has several engines: one multiplies, others copy.  A *stream* is a queue of work for them.  Work in
one stream runs in order; two streams run side by side; an *event* is a mark in one stream that another may wait for.
So the next layer's parameters can travel while this layer multiplies, and the time of the copy disappears.  This is
the whole trick of FSDP's prefetch and of every "overlapped" system.  A call that puts work into a stream returns at
once, so a clock around it measures nothing, unless you synchronise first.

    reported: on one H100 (torch 2.11, November 2026) plait doctor saw 97 % of a copy hidden by products.

A CPU has no streams, but a queue and a thread are one.  Below, a "product" and a "copy" are units of time (a sleep:
it needs no core, exactly like a copy engine), so the arithmetic of overlap is visible on any machine.  With a GPU,
the last part measures the real thing.

Predict before you run it:
  1. Six copies of 20 ms and six products of 20 ms, each product needing its own copy.  How long in one stream?  In two?
  2. The product does not wait for the event of its copy.  What does it read?
  3. You time ``y = a @ b`` on a GPU without synchronising.  What have you measured?

    plait lesson run 8
"""

import queue
import threading
import time
from collections.abc import Callable

import torch

UNIT, LAYERS = 0.02, 6
RANKS, WHY = (1,), "streams belong to one process"


# 1. Streams and events from nothing.


class Event:
    """A mark in a stream: ``record`` puts it there, ``wait`` makes another stream stop until it has been reached."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def record(self, stream: "Stream") -> None:
        stream.put(self._reached.set)

    def wait(self, stream: "Stream") -> None:
        stream.put(self._reached.wait)


class Stream:
    """A queue whose work one thread does in order.  ``put`` returns at once."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def synchronise(self) -> None:
        self._work.join()

    def _run(self) -> None:
        while True:
            self._work.get()()
            self._work.task_done()


# 2. Layer by layer: a copy brings the weight, a product uses it.


def forward(compute: Stream, copies: Stream, waits: bool = True) -> tuple[list[str], list[int | None], float, float]:
    """Returns the log of the order, each product's reading, the seconds until the calls returned, and in all."""
    log: list[str] = []
    here: dict[int, int] = {}  # the weights that have arrived
    read: list[int | None] = []

    def copy(layer: int) -> None:
        time.sleep(UNIT)
        here[layer] = layer
        log.append(f"copy {layer}")

    def product(layer: int) -> None:
        read.append(here.get(layer))
        time.sleep(UNIT)
        log.append(f"product {layer}")

    start = time.perf_counter()
    busy = Event()
    if not waits:  # another program has the link until the first product has read
        busy.wait(copies)
    for layer in range(LAYERS):
        arrived = Event()
        copies.put(lambda layer=layer: copy(layer))
        arrived.record(copies)
        if waits:
            arrived.wait(compute)
        compute.put(lambda layer=layer: product(layer))
        if layer == 0:
            busy.record(compute)
    issued = time.perf_counter() - start
    copies.synchronise()
    compute.synchronise()
    return log, read, issued, time.perf_counter() - start


# 3. The real thing: products in one stream, a copy from pinned memory of the host in another.


def on_a_gpu() -> tuple[float, float, float]:
    """Milliseconds of ten products, of one copy, and of both at once."""
    a, here = torch.randn(4096, 4096, device="cuda"), torch.empty(64 << 20).pin_memory()
    there, copies = torch.empty_like(here, device="cuda"), torch.cuda.Stream()

    def milliseconds(products: int, bring: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        if bring:
            with torch.cuda.stream(copies):
                there.copy_(here, non_blocking=True)
        for _ in range(products):
            a @ a
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    milliseconds(10, True)  # warms up
    return milliseconds(10, False), milliseconds(0, True), milliseconds(10, True)


def main(ranks: int = 1) -> None:
    # Prediction 1: 12 units in one stream.  In two: the first copy, then six products, under which the others hide.
    one = Stream()
    log, read, _, serial = forward(one, one)
    assert read == list(range(LAYERS)) and log[:4] == ["copy 0", "product 0", "copy 1", "product 1"]
    runs = [forward(Stream(), Stream()) for _ in range(3)]  # other programs take the processor now and then
    (log, read, _, _), issued, both = runs[0], min(run[2] for run in runs), min(run[3] for run in runs)
    print(f"measured here, one stream:  {serial / UNIT:4.1f} units of {1e3 * UNIT:.0f} ms; by the formula {2 * LAYERS}")
    print(f"measured here, two streams: {both / UNIT:4.1f} units; by the formula {LAYERS + 1}")
    print("in two streams: " + ", ".join(log))
    assert serial > 2 * LAYERS * UNIT and both < serial, "the copies are hidden under the products"
    assert read == list(range(LAYERS)) and log.index("copy 1") < log.index("product 1")

    # Prediction 2: the memory's old contents.  On a GPU: old bytes, no error, and another number in each run.
    _, read, _, _ = forward(Stream(), Stream(), waits=False)
    print("find the fault: without the event the products read", read)
    assert read != list(range(LAYERS)) and read[0] is None

    # Prediction 3: the time to put work into a queue.
    print(f"measured here: the calls returned after {1e3 * issued:.2f} ms, the work took {1e3 * both:.0f} ms")
    assert issued < both / 2

    # The same with the streams of a GPU, if there is one.
    if torch.cuda.is_available():
        product, copy, together = on_a_gpu()
        print(f"measured on this GPU: products {product:.1f} ms, a copy {copy:.1f} ms, both at once {together:.1f} ms")
    else:
        print("no GPU here; reported by plait doctor on one H100, torch 2.11, November 2026: 97 % of a copy was hidden")


if __name__ == "__main__":
    main()
