"""Ranks of one host over memory that they share: no sockets, no copies beyond one in and one out.

semaphore.py   the C library's semaphores, between processes
segment.py     memory that several processes map
arena.py       blocks of a rank's own memory, for what is under way
mailbox.py     rings of records: what lies where, and what has been read
transport.py   messages and exchanges, made of these
"""
