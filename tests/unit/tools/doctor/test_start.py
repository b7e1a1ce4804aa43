from __future__ import annotations

import os

from outergrad.tools.doctor.course import quiet_libraries


def test_libraries_are_not_heard_and_this_program_is(capfd):
    with quiet_libraries() as terminal:
        os.write(2, b"frame #0")
        terminal.write("waiting")
    os.write(2, b" done")
    assert capfd.readouterr().err == "waiting done"
