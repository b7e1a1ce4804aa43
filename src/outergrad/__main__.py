"""Entry point of ``python -m outergrad``: runs the ``outergrad`` command."""

from outergrad.cli import main

if __name__ == "__main__":
    main()
