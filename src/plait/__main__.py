"""``python -m plait`` is the ``plait`` command."""

from plait.commands.main import program

if __name__ == "__main__":
    program()
