"""Frame shared by outergrad's pages: one file that opens anywhere, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from outergrad._version import __version__


def whole_page(
    *,
    command: str,
    title: str,
    lead: str,
    head: str,
    body: str,
    about: str = "",
    style: str = "",
    scripts: Sequence[str] = (),
    reload_s: int | None = None,
) -> str:
    """Returns a page in one file.

    Args:
        command: command that made it.
        title: text of the heading.
        lead: text below the heading.
        head: HTML between the lead and the body.
        body: HTML.
        about: text behind the command.
        style: CSS in addition to the common style.
        scripts: elements at the end; without any, the page forbids scripts.
        reload_s: seconds after which a browser reloads it; None for never.
    """
    script, pictures = ("script-src 'unsafe-inline'; ", "data: blob:") if scripts else ("", "data:")
    return Template(asset("skeleton.html")).substitute(
        reload="" if reload_s is None else f'\n<meta http-equiv="refresh" content="{reload_s}">',
        allowed=f"{script}style-src 'unsafe-inline'; img-src {pictures}",
        command=escape(command),
        title=escape(title),
        about=escape(about),
        lead=escape(lead),
        head=head,
        body=body.rstrip("\n"),
        style=asset("style.css") + style,
        scripts="".join(f"\n{script}" for script in scripts),
        version=escape(__version__),
    )


def asset(name: str, package: str = "outergrad.report") -> str:
    """Returns the text of a file in a package's folder."""
    return files(package).joinpath(name).read_text("utf-8")
