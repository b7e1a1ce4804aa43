"""Headers and messages come back as they were sent, and foreign ones are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outergrad import Slot
from outergrad.core.blocks import Block
from outergrad.core.errors import ExchangeError, RefusedError
from outergrad.core.payload import BYTES
from outergrad.core.sites import Site
from outergrad.messages.header import DTYPES, BlockUse, Header, Join, SlotUse
from outergrad.messages.layout import Layout
from outergrad.messages.vote import WORDS, Vote
from outergrad.messages.wire import Piece, Preamble, State

uses = st.one_of(
    st.builds(SlotUse, st.integers(0, 2**40), st.booleans(), st.sampled_from(DTYPES)),
    st.builds(BlockUse, st.integers(0, 2**40), st.booleans()),
)
headers = st.builds(
    Header,
    st.integers(0, 2**62 - 1),
    st.integers(0, 2**50),
    st.integers(0, 999),
    st.lists(st.booleans(), max_size=200).map(tuple),
    st.lists(uses, max_size=90).map(tuple),
    st.booleans(),
    weight=st.integers(0, 2**50),
    join=st.sampled_from(Join),
    buffers=st.lists(st.booleans(), max_size=130).map(tuple),
)


@given(headers)
def test_headers_come_back(header):
    words = header.words()
    assert torch.tensor(words, dtype=torch.int64).tolist() == words
    assert Header.parse(words, header, Site(header.rank)) == header


@given(headers)
def test_headers_of_another_step_session_or_rank_are_refused(header):
    words = header.words()
    for changed in (
        Header(header.fingerprint, header.step + 1, header.rank, header.used, header.uses),
        Header(header.fingerprint ^ 1, header.step, header.rank, header.used, header.uses),
    ):
        with pytest.raises(ExchangeError):
            Header.parse(words, changed, Site(header.rank))
    with pytest.raises(ExchangeError):
        Header.parse(words, header, Site(header.rank + 1))
    with pytest.raises(ExchangeError, match="something else"):
        Header.parse([0] * len(words), header, Site(header.rank))


@given(headers, st.data())
def test_a_flipped_bit_of_a_header_is_seen(header, data):
    """It would be another plan, and messages of other lengths end gloo's process."""
    words = header.words()
    at, bit = data.draw(st.integers(4, len(words) - 1)), data.draw(st.integers(0, 62))
    words[at] ^= 1 << bit
    with pytest.raises(ExchangeError, match="checksum of the header of site"):
        Header.parse(words, header, Site(header.rank))


@given(st.integers(4, WORDS - 1), st.integers(0, 62))
def test_a_flipped_bit_of_a_vote_is_seen(at, bit):
    vote = Vote(5, 6, 7, digest=8)
    words = vote.words()
    assert Vote.parse(words, vote, Site(7)) == vote
    words[at] ^= 1 << bit
    with pytest.raises(ExchangeError, match="checksum of the vote of site 7"):
        Vote.parse(words, vote, Site(7))


def test_headers_of_small_models_have_one_length():
    """So that a mix-up of models is read and refused instead of aborting the process."""
    use = SlotUse(3, True, torch.float32)
    assert len({len(Header(1, 1, 0, (True,) * n, (use,) * n).words()) for n in range(50)}) == 1


@given(
    st.lists(st.booleans(), max_size=130).map(tuple),
    st.lists(st.integers(0, 2**40), max_size=9).map(tuple),
    st.sampled_from(State),
)
def test_preambles_come_back(flags, wanted_rows, state):
    preamble = Preamble(12345, 7, 2, 1, state, flags, wanted_rows)
    size = Preamble.nbytes(len(flags), len(wanted_rows))
    message = torch.zeros(size + 16, dtype=torch.uint8)
    preamble.write(message)
    assert Preamble.read(message, preamble, 1) == preamble
    with pytest.raises(RefusedError, match="not bucket"):
        Preamble.read(message, Preamble(12345, 7, 3, 1, state, flags), 1)


@given(st.integers(0, 40), st.integers(0, 2**30), st.integers(0, 7), st.sampled_from(State))
def test_a_message_with_another_bit_is_refused(blocks, place, bit, state):
    preamble = Preamble(12345, 7, 2, 1, state, (True,) * 5, (3, 4))
    message = torch.randint(0, 256, (128 + 16 * blocks,), dtype=torch.uint8)
    preamble.write(message)
    message[place % len(message)] ^= 1 << bit
    with pytest.raises(RefusedError) as caught:
        Preamble.read(message, preamble, 1)
    assert caught.value.site == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [torch.float64, torch.float32, None])
@pytest.mark.parametrize("lookup", [True, False])
def test_messages_hold_their_tensors_apart(dtype, bias, lookup):
    slot = Slot("l", "l.w", 5, 7, bias="l.b", groups=1 if lookup else 3, lookup=lookup)
    piece = Piece(slot, 9, dtype, None if lookup else bias)
    nothing = Piece(slot, 0, dtype, bias)
    of_block = Piece(Block("b", ("b.w",)), 77, torch.uint8, None, form=BYTES)
    extras = {
        "a": nn.Parameter(torch.zeros(3, 2)),
        "b": nn.Parameter(torch.zeros(5, dtype=torch.float64)),
        "c": nn.Parameter(torch.zeros(7)),
    }
    start = Preamble.nbytes(3, 3)
    layout = Layout(start, extras, [piece, nothing, piece, of_block])
    message = torch.zeros(layout.nbytes, dtype=torch.uint8)

    def views():
        rows, none, more, content = layout.gradients(message)
        assert none is None
        assert content.shape == (77,)
        named = layout.by_name(layout.flats(message))
        return [*rows, *more, content, *named.values()], named

    found = [view for view in views()[0] if view is not None]
    for i, view in enumerate(found):
        view.fill_(i + 1)
    for i, view in enumerate(view for view in views()[0] if view is not None):
        assert bool((view == i + 1).all())
    assert found[0].shape == (slot.groups, 9, 5)
    assert len(found) == 2 * (2 + (bias is not None and not lookup)) + 1 + len(extras)
    named = views()[1]
    assert {n: (v.shape, v.dtype) for n, v in named.items()} == {
        n: (p.shape, p.dtype) for n, p in extras.items()
    }
    assert not message[:start].any()


def test_no_rows_no_bytes():
    assert Piece(Slot("l", "l.w", 5, 7, bias="l.b"), 0, torch.float32, None).nbytes == 0
    assert Piece(Block("b", ("b.w",)), 0, torch.uint8, None, form=BYTES).nbytes == 0
