"""The pure core: data in, data out, no torch.  Start with ``cells.py``: the table that explains ZeRO."""
