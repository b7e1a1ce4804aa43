"""Job process of NVFLARE's server: the hub, and the clients' connections to it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.tie.applet import Applet
from nvflare.app_common.tie.connector import Connector
from nvflare.app_common.tie.controller import TieController
from nvflare.app_common.tie.defs import Constant
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply as make_cell_reply
from nvflare.fuel.f3.message import Message

from outergrad.core.addresses import Address, loopback
from outergrad.integrations.nvflare.tunnel import CHANNEL, OPEN, Tunnels, name_in
from outergrad.star.authority import Kit
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer

KIT, HUB_CELL = "kit", "outergrad.hub"
GRACE_S = 5.0
_BEGINS_S = 300
"""Seconds that a client may take to begin; TIE's 10 are few where it imports PyTorch."""


class HubApplet(Applet):
    """A hub for the clients of a job, with a certificate authority that lives as long as the job.

    Args:
        folder: folder to create; it keeps the hub's certificate and log.
        names: names of the clients, in the order of their ranks.
        grace_s: seconds for which a site may be away before the others are told that it is lost.
    """

    def __init__(self, folder: Path, names: list[str], grace_s: float) -> None:
        super().__init__()
        self._folder, self._names, self._grace_s = HubFolder(folder), names, grace_s
        self._server: HubServer | None = None
        self._here = loopback()
        self.kits: dict[str, Kit] = {}

    def start(self, app_ctx: dict[str, Any]) -> None:
        """Makes a kit for every client, and listens on the loopback interface only."""
        # Each client calls a loopback of its own machine, which may be of the other family.
        self._folder.create("127.0.0.1:0", ["::1"])
        self.kits = {name: self._folder.invite(name) for name in self._names}
        listen = str(Address(self._here, 0))
        self._server = HubServer(self._folder, listen, self._names, self._grace_s)
        self._server.start()

    def dial(self) -> socket.socket:
        """Connects to the hub.

        Raises:
            OSError: the hub is not there.
        """
        if self._server is None:
            raise OSError("the hub is not there")
        return socket.create_connection((self._here, self._server.port))

    def stop(self, timeout: float = 0.0) -> int:
        """Stops the hub, and removes the keys that it signs with."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            self._folder.forget_keys()
        return 0

    def is_stopped(self) -> tuple[bool, int]:
        """Returns False: the hub never stops by itself."""
        return False, 0


class HubConnector(Connector):
    """Gives each client its kit, and opens connections to the hub.

    A client is identified by the cell that its message comes from: NVFLARE's server lets no message
    through whose signed token is another client's.

    Args:
        clients: names of the clients, by the cells of their job processes.
    """

    def __init__(self, clients: dict[str, str]) -> None:
        super().__init__()
        self._clients = clients
        self._tunnels: Tunnels | None = None

    def configure(self, config: dict[str, Any], fl_ctx: FLContext) -> None:
        """Does nothing: there are no settings."""

    def start(self, fl_ctx: FLContext) -> None:
        """Starts the hub, then answers the clients."""
        self.start_applet({}, fl_ctx)
        self._tunnels = Tunnels(self.engine.get_cell())
        self._tunnels.cell.register_request_cb(CHANNEL, KIT, self._give_kit)
        self._tunnels.cell.register_request_cb(CHANNEL, OPEN, self._open)

    def stop(self, fl_ctx: FLContext) -> None:
        """Closes all connections, and stops the hub."""
        if self._tunnels is not None:
            self._tunnels.close()
        self.stop_applet()

    def process_app_request(
        self, op: str, req: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Acknowledges a sign of life, which the controller has noted."""
        return make_reply(ReturnCode.OK)

    @property
    def _hub(self) -> HubApplet:
        return cast(HubApplet, self.applet)

    def _give_kit(self, message: Message) -> Message:
        name = self._clients.get(_origin(message))
        if name is None:
            return _refused("it is none of the clients of this job")
        kit = json.dumps(vars(self._hub.kits[name]))
        return make_cell_reply(ReturnCode.OK, body=kit.encode())

    def _open(self, message: Message) -> Message:
        if _origin(message) not in self._clients or self._tunnels is None:
            return _refused("it is none of the clients of this job")
        try:
            self._tunnels.carry(name_in(message), _origin(message), self._hub.dial())
        except OSError as error:
            return _refused(str(error))
        return make_cell_reply(ReturnCode.OK)


def _origin(message: Message) -> str:
    return str(message.get_header(MessageHeaderKey.ORIGIN))


def _refused(why: str) -> Message:
    return make_cell_reply(ReturnCode.INVALID_REQUEST, error=why)


class StarController(TieController):
    """Runs the hub of a job, and ends the job when too many of its scripts have failed.

    Args:
        grace_s: seconds for which a site may be away before the others are told that it is lost.
        min_sites: number of scripts that must end without an error; all if None.
    """

    def __init__(self, grace_s: float = GRACE_S, min_sites: int | None = None) -> None:
        super().__init__(configure_task_timeout=_BEGINS_S, start_task_timeout=_BEGINS_S)
        self.grace_s, self.min_sites = grace_s, min_sites
        self._failed: dict[str, int] = {}

    def get_client_config_params(self, fl_ctx: FLContext) -> dict[str, Any]:
        """Returns the name of the hub's cell, for the clients."""
        return {HUB_CELL: fl_ctx.get_engine().get_cell().get_fqcn()}

    def get_connector_config_params(self, fl_ctx: FLContext) -> dict[str, Any]:
        """Returns no parameters."""
        return {}

    def get_connector(self, fl_ctx: FLContext) -> Connector:
        """Returns the connector of the hub."""
        job, clients = fl_ctx.get_job_id(), fl_ctx.get_engine().get_clients()
        return HubConnector({FQCN.join([one.get_fqcn(), job]): one.name for one in clients})

    def get_applet(self, fl_ctx: FLContext) -> Applet:
        """Returns the hub."""
        run_dir = fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())
        names = sorted(one.name for one in fl_ctx.get_engine().get_clients())
        return HubApplet(Path(run_dir, "outergrad"), names, self.grace_s)

    def _process_client_done(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Fails the job if fewer scripts are left than it needs; called when a script ends."""
        reply = super()._process_client_done(topic, request, fl_ctx)
        code = request.get(Constant.MSG_KEY_EXIT_CODE)
        if code:
            self._failed[fl_ctx.get_peer_context().get_identity_name()] = code
            self._check_enough_are_left(fl_ctx)
        return reply

    def _check_enough_are_left(self, fl_ctx: FLContext) -> None:
        clients = self.participating_clients
        needed = len(clients) if self.min_sites is None else self.min_sites
        if len(clients) - len(self._failed) < needed:
            told = ", ".join(f"{name} (exit code {code})" for name, code in self._failed.items())
            self.system_panic(f"the script failed at {told}: its output is in its log", fl_ctx)
