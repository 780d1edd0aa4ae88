"""The ``plait`` command's first moments, and ``python -m plait``."""

import sys


def program() -> None:
    """Runs the program ``plait``."""
    from plait.run.commands import main

    main.program()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder: its modules are not ours to run
    program()
