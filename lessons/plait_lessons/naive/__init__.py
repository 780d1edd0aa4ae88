"""The pieces of pipelining, written so that every line can be read: slow, in one process, and right to the bit.

    hand_off.py       a model in parts: the activation handed on, its gradient handed back, by hand
    microbatcher.py   a batch in microbatches, and gradients that add up to the batch's
    clock.py          who works in which tick: a schedule as a table, carried out tick by tick

The engine does the same with messages between ranks, with waits and overlap; these show what it must come to.
Functions called ``without_...`` and ``mean_of_means`` are wrong on purpose, as people write them, and named for what is
lost.  ``lessons/17_pipelines.py`` goes through all of it.
"""
