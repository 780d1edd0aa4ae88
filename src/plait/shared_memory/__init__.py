"""Ranks of one host over memory that they share: no sockets, and few copies.

.. code-block:: text

    transport.py   messages and exchanges, made of the parts below      start here
    alarm.py       wakes a rank that sleeps
    c10d.py        the same as a back end of torch.distributed
    arena.py       a rank's own memory: blocks for what is under way, tensors that others read where they lie
    arrivals.py    what is done with what comes in, chunk by chunk
    common.py      memory that a group has in common: one copy of it
    mailbox.py     rings of records: what lies where, and what has been read
    office.py      every rank's mailboxes, made, published and opened
    outgoing.py    a tensor on its way, chunk by chunk
    segment.py     memory that several processes map
    semaphore.py   the C library's semaphores, between processes
"""
