"""What messages book on layers."""

import pickle

from outergrad.record.stats import Booking, LayerBook, LayerStats


def test_a_book_adds_up_what_several_messages_do_for_a_layer() -> None:
    book = LayerBook()
    book.book([Booking("a", "dense", sent=8, share=0.0)])
    lines = [Booking("a", "factors", sent=4, rows=3, share=0.25), Booking("b", "factors", rows=1)]
    book.book(lines, compress_s=2.0)
    assert dict(book) == {
        "a": LayerStats("factors", sent_bytes=12, kept_rows=3, compress_s=0.5),
        "b": LayerStats("factors", kept_rows=1, compress_s=2.0),
    }
    book.book([Booking("a", "dense", received=5)], replay_s=1.0)  # behind a look
    assert book["a"] == LayerStats("factors", 12, 5, 3, 0.5, 1.0)
    assert (book.compress_s, book.replay_s, len(book)) == (2.0, 1.0, 2)


def test_a_book_forgets_a_step_that_starts_again() -> None:
    book = LayerBook()
    book.book([Booking("a", "dense", sent=8)], compress_s=1.0)
    assert len(book) == 1
    book.forget()
    assert (dict(book), book.compress_s) == ({}, 0.0)


def test_a_book_can_be_pickled_and_shown() -> None:
    book = LayerBook()
    book.book([Booking("a", "dense", sent=8)])
    assert pickle.loads(pickle.dumps(book)) == book
    assert repr(book) == repr({"a": LayerStats("dense", sent_bytes=8)})
