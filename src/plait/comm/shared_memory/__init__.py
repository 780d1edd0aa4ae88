"""Ranks of one host over memory that they share: no sockets, no copies beyond one in and one out.

.. code-block:: text

    transport.py   messages and exchanges, made of the parts below      start here
    arena.py       blocks of a rank's own memory, for what is under way
    mailbox.py     rings of records: what lies where, and what has been read
    office.py      every rank's mailboxes, made, published and opened
    segment.py     memory that several processes map
    semaphore.py   the C library's semaphores, between processes
"""
