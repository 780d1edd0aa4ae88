"""A wing: ranks of one host move tensors through memory that they share, with no sockets and few copies.

.. code-block:: text

    several_hosts.py     makes the transport of a world; sockets between hosts      start here
    transport.py         messages and exchanges, made of the parts below
    mailbox_registry.py  makes, publishes and opens the mailboxes of all ranks
    mailbox.py           rings of records: where a message is, and which blocks were read
    alarm.py             wakes a rank that sleeps
    arena.py             a rank's own memory: blocks under way, and tensors that others read in place
    outgoing.py          a tensor on its way, chunk by chunk
    arrivals.py          copies and adds what comes in, chunk by chunk
    common.py            memory of a group: one copy for all its ranks
    segment.py           memory that several processes map
    semaphore.py         the C library's semaphores, between processes
"""
