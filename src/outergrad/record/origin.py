"""Origin of a model: its class, and the commit that is checked out where its source lies."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from pathlib import Path

from torch import nn

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def origin_of(model: nn.Module) -> dict[str, str]:
    """Returns the class of a model and its commit, "" for what is not known.

    The commit is that of the file with the class, or of the program where the class is PyTorch's
    own. Git is not run, so it is not known whether files were changed since.
    """
    kind = type(model)
    source = ""
    with suppress(TypeError, OSError):
        source = inspect.getsourcefile(kind) or ""
    if kind.__module__.partition(".")[0] == "torch":
        source = _program()
    name = f"{kind.__module__}.{kind.__qualname__}"
    return {"model": name, "commit": commit_at(Path(source).resolve()) if source else ""}


def _program() -> str:
    import __main__

    return getattr(__main__, "__file__", None) or ""


def commit_at(path: Path) -> str:
    """Returns the commit that is checked out at a path; "" if that is not known."""
    with suppress(OSError, UnicodeDecodeError):
        for folder in path.parents:
            if (folder / ".git").exists():
                return _head(_git_folder(folder / ".git"))
    return ""


def _git_folder(place: Path) -> Path:
    """Folder of Git; of a further work tree there is a file that names it."""
    if place.is_dir():
        return place
    return place.parent / place.read_text().partition("gitdir:")[2].strip()


def _head(git: Path) -> str:
    told = (git / "HEAD").read_text().strip()
    if not told.startswith("ref:"):
        return told if _COMMIT.fullmatch(told) else ""
    name = told.partition(":")[2].strip()
    places = [git]
    if (git / "commondir").is_file():
        places.append(git / (git / "commondir").read_text().strip())
    for place in places:
        if (place / name).is_file():
            return (place / name).read_text().strip()
        if (place / "packed-refs").is_file():
            for line in (place / "packed-refs").read_text().splitlines():
                if line.endswith(f" {name}"):
                    return line.partition(" ")[0]
    return ""
