"""Job process of NVFLARE's client: the training script, and its connections to the hub."""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.tie.applet import Applet
from nvflare.app_common.tie.cli_applet import CLIApplet
from nvflare.app_common.tie.connector import Connector
from nvflare.app_common.tie.executor import TieExecutor
from nvflare.app_common.tie.process_mgr import CommandDescriptor

from outergrad.core.addresses import Address, listen_at, loopback
from outergrad.integrations.nvflare.server import HUB_CELL, KIT
from outergrad.integrations.nvflare.tunnel import OPEN, Tunnels
from outergrad.star.authority import Kit
from outergrad.star.transport import KIT_VARIABLE

_ALIVE_S = 10.0
_KIT_PATH = "outergrad.kit"


class ScriptApplet(CLIApplet):
    """The training script, in a process of its own in which `og.Star()` finds its kit.

    Args:
        script: file of the script.
        args: arguments of the script, as in a shell.
    """

    def __init__(self, script: Path, args: str) -> None:
        super().__init__()
        self._script, self._args = script, args

    def get_command(self, app_ctx: dict[str, Any]) -> CommandDescriptor:
        """Returns the command that runs the script; its output goes to the job's folder."""
        command = [sys.executable, "-u", str(self._script), *shlex.split(self._args)]
        return CommandDescriptor(
            cmd=shlex.join(command),
            env={KIT_VARIABLE: app_ctx[_KIT_PATH]},
            log_file_name=f"{self._script.stem}.log",
            stdout_msg_prefix=self._script.stem,
        )


class SiteConnector(Connector):
    """Listens for connections of the script, and tunnels them to the hub."""

    def __init__(self) -> None:
        super().__init__()
        self._hub, self._ended = "", threading.Event()
        self._listener: socket.socket | None = None
        self._tunnels: Tunnels | None = None
        self._kit_file: Path | None = None

    def configure(self, config: dict[str, Any], fl_ctx: FLContext) -> None:
        """Stores the name of the hub's cell."""
        self._hub = config[HUB_CELL]

    def start(self, fl_ctx: FLContext) -> None:
        """Fetches the kit, listens, and starts the script."""
        self._tunnels = tunnels = Tunnels(self.engine.get_cell())
        self._listener = listener = listen_at(loopback())
        kit = Kit(**json.loads(tunnels.ask(self._hub, KIT)))
        address = str(Address(*listener.getsockname()[:2]))
        run_dir = fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())
        self._kit_file = Path(run_dir, f"{kit.site}.kit")
        self._kit_file.unlink(missing_ok=True)
        replace(kit, hub=address).write(self._kit_file)
        _in_background(lambda: self._accept(listener, tunnels))
        _in_background(self._say_alive)
        self.start_applet({_KIT_PATH: str(self._kit_file.resolve())}, fl_ctx)

    def stop(self, fl_ctx: FLContext) -> None:
        """Stops the script if it still runs, and closes what was opened for it."""
        self._ended.set()
        self.stop_applet()
        if self._listener is not None:
            self._listener.close()
        if self._tunnels is not None:
            self._tunnels.close()
        if self._kit_file is not None:
            self._kit_file.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket, tunnels: Tunnels) -> None:
        """Tunnels each connection of the script, or closes it: the script dials again."""
        while not self._ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            name = secrets.token_hex(8)
            try:
                tunnels.ask(self._hub, OPEN, name)
                tunnels.carry(name, self._hub, connection)
            except OSError as error:
                self.logger.warning(f"no way to the hub: {error}")
                connection.close()

    def _say_alive(self) -> None:
        """Sends signs of life: TIE considers a client without requests gone."""
        while not self._ended.wait(_ALIVE_S):
            self.send_request(None, "alive", Shareable(), 5.0, _ALIVE_S, None)


def _in_background(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="outergrad site", daemon=True).start()


class StarExecutor(TieExecutor):
    """Runs a training script as a site of the job's star.

    Args:
        script: file in the custom code of the job, or full path of a file that the site has.
        script_args: arguments, as in a shell; `%site%` stands for the name of the client.
    """

    def __init__(self, script: str, script_args: str = "") -> None:
        super().__init__()
        self.script, self.script_args = script, script_args
        self._config: dict[str, Any] = {}

    def configure(self, config: dict[str, Any], fl_ctx: FLContext) -> None:
        """Stores the configuration from the server."""
        self._config = config

    def get_connector_config(self, fl_ctx: FLContext) -> dict[str, Any]:
        """Returns the configuration from the server."""
        return self._config

    def get_connector(self, fl_ctx: FLContext) -> Connector:
        """Returns the script's connector to the hub."""
        return SiteConnector()

    def get_applet(self, fl_ctx: FLContext) -> Applet:
        """Returns the script."""
        custom = fl_ctx.get_workspace().get_app_custom_dir(fl_ctx.get_job_id())
        args = self.script_args.replace("%site%", fl_ctx.get_identity_name())
        return ScriptApplet(_found(Path(custom), self.script), args)


def _found(custom: Path, script: str) -> Path:
    """Returns the script's path, below subfolders if NVFLARE sent it from importable folders."""
    if Path(script).is_absolute():
        return Path(script)
    return next(iter(sorted(custom.rglob(script))), custom / script)
