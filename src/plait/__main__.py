"""``python -m plait`` is the ``plait`` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder: its modules are not ours to run
    from plait.commands.main import program

    program()
