"""What becomes of the errors of torch.distributed."""

from __future__ import annotations

import pytest

from outergrad.comm.work import transport
from outergrad.core.errors import ExchangeError, Failure

TOLD = {
    "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1ms": Failure.TIMEOUT,
    "[pair.cc:547] Connection closed by peer [127.0.0.1]:1234": Failure.CLOSED,
    "Read error [127.0.0.1]:1234: Connection reset by peer": Failure.CLOSED,
    "Application timeout caused pair closure": Failure.CLOSED,
    "writev [::1]:80: Broken pipe": Failure.CLOSED,
    "NCCL error: unhandled system error": Failure.TRANSPORT,
}


@pytest.mark.parametrize("told", TOLD)
def test_they_have_a_kind_and_the_sites(told):
    with pytest.raises(ExchangeError) as caught, transport((2,)):
        raise RuntimeError(told)
    kind = TOLD[told]
    assert (caught.value.kind, caught.value.sites) == (kind, (2,))
    assert str(caught.value) == (told if kind == Failure.TRANSPORT else kind.value)
