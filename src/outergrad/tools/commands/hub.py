"""Command ``outergrad hub``: the relay through which the sites of a star communicate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outergrad._printable import printable
from outergrad.core.packages import missing
from outergrad.launch.console import errors_in_one_line, say
from outergrad.launch.errors import CheckError, RecipeError
from outergrad.launch.processes import exit_on_signals
from outergrad.launch.speaker import Speaker

if TYPE_CHECKING:
    from outergrad.star.folder import HubFolder

hub_app = typer.Typer(
    help="A hub, through which the sites of a star reach each other.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Option(help="Folder that `outergrad hub init` has made.")]
FOLDER = Path("hub")
Site = Annotated[str, typer.Argument(help="Name of the site, as hospital-a.")]
_MOST_REQUEST_BYTES = 1 << 14
Days = Annotated[int, typer.Option(min=1, help="How long the certificate holds.")]


@contextmanager
def star_errors() -> Iterator[None]:
    """Context that prints an error that the user can mend in one line."""
    with errors_in_one_line():
        if told := missing("grpc", "cryptography"):
            raise RecipeError(told)
        try:
            yield
        except OSError as error:
            told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise RecipeError(told) from None
        except RecipeError:
            raise
        except ValueError as error:
            raise RecipeError(str(error)) from None


def _folder(path: Path) -> HubFolder:
    from outergrad.star.folder import HubFolder

    return HubFolder(path)


@hub_app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="To make, as hub.")],
    address: Annotated[str, typer.Option(help="That sites dial, as hub.example.org:8443.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Another name or address of it; may be repeated.")
    ] = None,
) -> None:
    """Make a certificate authority for the hub, and the hub's own certificate.

    Whoever can read the folder can invite sites: keep it as you would keep a password.
    """
    with star_errors():
        _folder(folder).create(address, host or ())
        print(f"{folder}: invite sites by `outergrad hub invite SITE --folder {folder}`")


@hub_app.command()
def invite(
    site: Site,
    folder: Folder = FOLDER,
    days: Days = 365,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The kit.", show_default="SITE.kit")
    ] = None,
) -> None:
    """Write a kit for a site: its key and certificate, and the address of the hub.

    Hand it over as you would a password. An earlier kit of the site is invalid from then on.
    """
    with star_errors():
        path = out or Path(f"{site}.kit")
        if path.exists():
            raise RecipeError(f"{path} is there: move it away, or name another file by --out")
        _folder(folder).invite(site, days).write(path)
        print(f"{path}: for {site} alone")


@hub_app.command()
def sign(
    request: Annotated[Path, typer.Argument(help="That `outergrad site request` has written.")],
    folder: Folder = FOLDER,
    days: Days = 365,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="A kit that the site has, or had, is to count no more."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="To write.", show_default="SITE.signed")
    ] = None,
) -> None:
    """Sign the key of a site that has made it itself. Nothing in what it writes is secret.

    Compare the fingerprint with the one that the site was shown, by telephone, to make sure that
    nobody has changed the request on its way.
    """
    with star_errors():
        from outergrad.star.authority import read_request

        if request.stat().st_size > _MOST_REQUEST_BYTES:
            raise RecipeError(f"{request} is no request: it is too long")
        asked = read_request(request.read_text(errors="replace"))
        path = out or Path(f"{asked.site}.signed")
        if path.exists():
            raise RecipeError(f"{path} is there: move it away, or name another file by --out")
        signed = _folder(folder).sign(asked, days, replace)
        signed.write(path)
        print(f"{path}: for {asked.site}, whose key has the fingerprint {asked.fingerprint}")
        print(f"this hub's authority has {signed.authority_fingerprint}")


@hub_app.command()
def revoke(site: Site, folder: Folder = FOLDER) -> None:
    """Exclude a site; a running hub ends its connection within a second."""
    with star_errors():
        _folder(folder).revoke(site)
        print(f"{site} is revoked")


@hub_app.command()
def serve(
    folder: Folder = FOLDER,
    listen: Annotated[
        str, typer.Option(help="Address and port of this machine; [::] for all, of IPv4, too.")
    ] = "[::]:8443",
    sites: Annotated[
        str | None,
        typer.Option(
            help="Those that take part, with commas, in the order of their ranks.",
            show_default="all that are invited",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a site may be away before it is lost.")
    ] = 0.8,
) -> None:
    """Relay between the sites until Ctrl-C. It holds no model and no data, and needs no GPU."""
    with star_errors(), exit_on_signals():
        from outergrad.star.connections import raise_file_limit
        from outergrad.star.server import HubServer

        raise_file_limit()
        names = None if sites is None else [name.strip() for name in sites.split(",")]
        speaker = Speaker()
        server = HubServer(_folder(folder), listen, names, grace, speaker.say)
        server.start()
        say(f"the hub listens on port {server.port} for {', '.join(server.names)}")
        try:
            server.wait()
        finally:
            server.stop()
            speaker.say("the hub has stopped: its sites are cut off")
            speaker.close()


@hub_app.command()
def verify(
    folder: Folder = FOLDER,
    log: Annotated[
        Path | None, typer.Option(help="Another file.", show_default="the hub's own")
    ] = None,
) -> None:
    """Check the signatures of the log, and say which sites took part in how many steps."""
    with star_errors():
        from outergrad.star.journal import TamperedError, verified

        hub, starts, count = _folder(folder), [_Start()], 0
        try:
            for line in verified(log or hub.log_file, hub.certificate_file.read_text()):
                count += 1
                if line["what"] == "started":
                    starts.append(_Start(line["time"]))
                else:
                    starts[-1].add(line)
        except TamperedError as error:
            raise CheckError(str(error)) from None
        print(f"{count} lines, all signed by the hub, none changed or missing before the last")
        for start in starts:
            print(*map(printable, start.told()), sep="\n", end="\n" if start.told() else "")


class _Start:
    """Part of the log from one start of the hub to the next; each start counts its runs anew.

    Args:
        at: Unix time of the start in seconds, if the log has it.
    """

    def __init__(self, at: float | None = None) -> None:
        self._at, self._parts = at, defaultdict[str, _Parts](_Parts)
        self._notes: list[str] = []

    def add(self, line: dict[str, Any]) -> None:
        if line["what"] == "step":
            by = line.get("told by")
            who = ", ".join(line["sites"]) + (f", by the word of {', '.join(by)}" if by else "")
            self._parts[f"run {line['run']}: {who}"].add(line)
        elif line["what"] == "incomplete":
            self._notes.append(f"{line['lines']} lines could not be written: {line['why']}")
        elif line["what"] == "recovered":
            self._notes.append(
                f"{line['cut_bytes']} bytes were cut off, of a line that was not whole"
            )

    def told(self) -> list[str]:
        """Lines for the user; empty if nothing relevant happened."""
        found = [f"{who}: {part.count} steps" for who, part in self._parts.items()]
        found += self._notes
        if found and self._at is not None:
            began = datetime.fromtimestamp(self._at, timezone.utc)
            found.insert(0, f"hub started {began:%Y-%m-%d %H:%M:%S} UTC")
        return found


class _Parts:
    """Steps in which the same sites took part.

    A line of the log covers all steps since the last vote, even if a session has settled some
    since.
    """

    def __init__(self) -> None:
        self.count, self._last = 0, dict[int, int]()

    def add(self, line: dict[str, Any]) -> None:
        session, first, last = line["session"], line["first"], line["step"]
        known = self._last.get(session, -1)
        is_longer = first <= known < last
        self.count += last - (known if is_longer else first - 1)
        self._last[session] = last
