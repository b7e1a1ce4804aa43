"""Every option of `outergrad train` can be given under torchrun, which abbreviates its own."""

from __future__ import annotations

from torch.distributed.run import get_args_parser
from typer.main import get_command

from outergrad.tools.commands.app import app

TORCHRUNS_TO_DO = {"--max-restarts"}
"""It is refused under torchrun."""


def test_each_option_has_a_name_that_torchrun_does_not_take_for_its_own():
    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    for option in get_command(app).commands["train"].params:
        if clashing := [o for o in option.opts if any(t.startswith(o) for t in theirs)]:
            free = {*option.opts} - {*clashing}
            assert free or {*clashing} <= TORCHRUNS_TO_DO
            assert all(f"{name} under torchrun" in option.help for name in free)
