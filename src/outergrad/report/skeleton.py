"""What the pages of outergrad have in common: one file that opens anywhere, without a network."""

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
    """A page in one file.

    Args:
        command: that made it.
        title: text of the heading.
        lead: text below it.
        head: HTML that stands before the body, behind the lead.
        body: HTML.
        about: text behind the command.
        style: CSS beyond that of all pages.
        scripts: elements at the end; where there are none, the page forbids them.
        reload_s: seconds until a browser opens it anew; None for never.
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
    """The text of a file that lies beside the modules of a package."""
    return files(package).joinpath(name).read_text("utf-8")
