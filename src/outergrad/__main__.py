"""Lets ``python -m outergrad`` stand for ``outergrad``."""

from outergrad.cli import main

if __name__ == "__main__":
    main()
