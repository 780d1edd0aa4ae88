"""``python -m plait`` is the ``plait`` command."""

import sys

from plait.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
