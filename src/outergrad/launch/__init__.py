"""Sites as processes or threads, supervised, behind shaped links."""

from importlib.util import find_spec

_missing = [name for name in ("psutil", "rich", "sklearn", "typer") if not find_spec(name)]
if _missing:
    raise ImportError(f"{', '.join(_missing)} not found: pip install 'outergrad[cli]'")
