"""A wing: ranks of one host move tensors through shared memory, with no sockets and few copies.

.. code-block:: text

    several_hosts.py     makes the transport of a world; sockets between hosts      start here
    transport.py         messages and waits, built from the parts below
    mailbox_registry.py  makes, publishes and opens the mailboxes of all ranks
    mailbox.py           rings of records: the places of messages, and the blocks that were read
    alarm.py             wakes a sleeping rank
    arena.py             a rank's own memory: blocks in use, and tensors that others read in place
    meeting.py           the collectives of a group: each reads the others' tensors in place
    bells.py             reports of ranks to each other, by number
    common.py            memory of a group: one copy for all its ranks
    segment.py           memory that several processes map
    semaphore.py         the C library's semaphores, between processes
"""
