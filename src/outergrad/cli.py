"""The ``outergrad`` command."""

import sys


def main() -> None:
    """Runs the command line, or exits with what must be installed for it."""
    try:
        import outergrad.launch  # noqa: F401  (says what is missing)
        from outergrad.launch.console import leave_at_once
        from outergrad.launch.interrupts import not_lost
        from outergrad.tools.commands.app import app
    except ImportError as error:
        sys.exit(f"outergrad: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    not_lost()
    try:
        app()
    except SystemExit as end:
        leave_at_once(end.code if isinstance(end.code, int) else 0)
