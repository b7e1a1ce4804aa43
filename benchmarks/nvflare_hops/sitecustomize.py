"""Stamps of what a star sends through NVFLARE, of every process that has this folder in its path.

`star_nvflare.py --where` puts it there. Each process writes a line of JSON per message: the cell,
the message (its sender, connection and number), and when what happened.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.sfm.conn_manager import ConnManager

NUMBER, CONNECTION = "outergrad.number", "outergrad.connection"
_file = Path(os.environ["OUTERGRAD_HOPS"], str(os.getpid()))
_stamps = _file.open("w", buffering=1)
_read = threading.local()
_process_frame, _process_frame_task = ConnManager.process_frame, ConnManager.process_frame_task
_process_message, _fire_and_forget = CoreCell.process_message, CoreCell.fire_and_forget


def _stamp(cell: Any, message: Any, **times: float) -> None:
    """Of a message that a tunnel sends."""
    number = message.get_header(NUMBER)
    if number is not None:
        sender = message.get_header(MessageHeaderKey.ORIGIN) or cell.get_fqcn()
        about = [sender, message.get_header(CONNECTION), number]
        print(json.dumps([cell.get_fqcn(), about, times]), file=_stamps)


def _sent(cell: Any, channel: str, topic: str, targets: Any, message: Any, **settings: Any) -> Any:
    began = time.time()
    found = _fire_and_forget(cell, channel, topic, targets, message, **settings)
    _stamp(cell, message, sends=began, sent=time.time())
    return found


def _frame_read(manager: Any, connection: Any, frame: Any) -> None:
    _process_frame(manager, connection, (time.time(), frame))


def _frame_processed(manager: Any, connection: Any, timed: tuple[float, Any]) -> None:
    _read.at, frame = timed
    _read.begun = time.time()
    _process_frame_task(manager, connection, frame)


def _processed(cell: Any, endpoint: Any, connection: Any, app_id: int, message: Any) -> None:
    _process_message(cell, endpoint, connection, app_id, message)
    _stamp(cell, message, read=_read.at, begun=_read.begun, done=time.time())


ConnManager.process_frame, ConnManager.process_frame_task = _frame_read, _frame_processed
CoreCell.process_message, CoreCell.fire_and_forget = _processed, _sent
