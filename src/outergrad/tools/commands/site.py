"""Command ``outergrad site``: makes a site's key, and trains as a site of a star."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outergrad._printable import printable
from outergrad.launch.console import errors_in_one_line
from outergrad.launch.errors import RecipeError, SiteError
from outergrad.session.farewell import leave_all, tell_all
from outergrad.star.transport import KIT_VARIABLE, NoRunError
from outergrad.tools.commands.hub import star_errors

_RUN = "run"


class _OrAScript(TyperGroup):
    """Command group whose default command runs a script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts the default command if the first argument is a script or an option."""
        is_known = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if is_known else [_RUN, *args])


site_app = typer.Typer(
    help="A site of a star. `outergrad site --kit a.kit train.py` is short for `outergrad site "
    "run --kit a.kit train.py`.",
    no_args_is_help=True,
    cls=_OrAScript,
)


@site_app.command()
def request(
    name: Annotated[str, typer.Option(help="Of the site, as hospital-a.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="To send.", show_default="NAME.csr")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="To keep.", show_default="NAME.key")] = None,
) -> None:
    """Make a key for this site, and a request that whoever runs the hub signs.

    The key stays on this machine. Nothing in the request is secret.
    """
    with star_errors():
        from outergrad._whole_files import write_whole
        from outergrad.star.authority import new_request, write_secret

        secret, asked = new_request(name)
        own, sent = key or Path(f"{name}.key"), out or Path(f"{name}.csr")
        for path in (own, sent):
            if path.exists():
                raise RecipeError(f"{path} is there: move it away, or name another file")
        write_secret(own, secret)
        write_whole(sent, asked.pem)
        print(f"{sent}: for whoever runs the hub; {own} stays here")
        print(f"this key has the fingerprint {asked.fingerprint}")


@site_app.command()
def join(
    signed: Annotated[Path, typer.Argument(help="File that `outergrad hub sign` has written.")],
    key: Annotated[
        Path | None,
        typer.Option(help="That `outergrad site request` has written.", show_default="SITE.key"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The kit.", show_default="SITE.kit")
    ] = None,
) -> None:
    """Combine this site's key with the file that the hub has signed, into the site's kit."""
    with star_errors():
        from outergrad.star.authority import read_signed, refuse_open_to_others, site_name

        found = read_signed(signed)
        own, path = key or Path(f"{site_name(found.site)}.key"), out or Path(f"{found.site}.kit")
        if path.exists():
            raise RecipeError(f"{path} is there: move it away, or name another file by --out")
        refuse_open_to_others(own, "the key")
        found.joined(own.read_text()).write(path)
        print(f"{path}: of {found.site}, for the hub at {printable(found.hub)}")
        print(f"that hub's authority has the fingerprint {found.authority_fingerprint}")


@site_app.command(_RUN, context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="Of the training, as train.py.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.")] = None,
    kit: Annotated[Path, typer.Option(help="File that `outergrad hub invite` has written.")] = Path(
        "site.kit"
    ),
) -> None:
    """Run a training script as a site of a star: og.Star() in it takes this kit.

    Options of the command come before the script: outergrad site --kit a.kit train.py --epochs 3
    """
    with errors_in_one_line():
        for file in (script, kit):
            if not file.is_file():
                raise RecipeError(f"there is no file {file}")
    os.environ[KIT_VARIABLE] = str(kit.resolve())
    sys.argv = [str(script), *(arguments or [])]
    sys.path[0] = str(script.resolve().parent)
    _speak()
    with errors_in_one_line():
        try:
            runpy.run_path(str(script), run_name="__main__")
        except NoRunError as error:
            raise SiteError(str(error)) from None
        except SystemExit:
            leave_all()
            raise
        except KeyboardInterrupt as error:
            tell_all(error)
            leave_all()
            raise
    leave_all()  # the command exits without running Python's atexit handlers


def _speak() -> None:
    """Prints what happens to this site's line and to other sites, unless the script logs itself."""
    printing, log = logging.StreamHandler(), logging.getLogger("outergrad")
    printing.setFormatter(logging.Formatter("outergrad: %(asctime)s %(message)s", "%H:%M:%S"))
    printing.addFilter(lambda _: not logging.getLogger().handlers)
    log.addHandler(printing)
    log.setLevel(logging.INFO)
