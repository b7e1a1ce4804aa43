"""The receiving side of a step: from its messages to `param.grad`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import TypeVar

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Gathered, Pending, Result, StepContext
from outergrad.commit.ballot import Ballot
from outergrad.core.errors import ExchangeError, Failure, RefusedError
from outergrad.linalg.gradients import scaled
from outergrad.messages.checksum import combined
from outergrad.messages.header import bit_words, bits, sum_of_words
from outergrad.messages.raw import as_tensor
from outergrad.messages.wire import State
from outergrad.planning.plan import Planner
from outergrad.record.gauge import Reading
from outergrad.step import param_grad
from outergrad.step.bucket_view import BucketView
from outergrad.step.buffer_message import BufferMessage

T = TypeVar("T")
Sent = Sequence[tuple[Bucket, Pending]]
"""Messages under way, in the order in which all sites started them."""
Last = tuple[int, Bucket, Result]
"""Place, bucket and result of the last message."""
Gradients = dict[str, Tensor]
AskAgain = Callable[[int, int, int], bytes]
"""Requests a message once more: of a site, at a place in the step, of a size in bytes."""
BUFFERS_PLACE = -1
"""Place of the buffer message; other places are indices of buckets."""
_ASKS = 3
"""Number of times that a damaged message is requested again."""


class Receiver:
    """Receives the messages of one step, in order, and writes the mean gradients.

    Args:
        planner: learns which units have gradients besides their factors.
        context: context of the step.

    Attributes:
        error: exception on this site.
        wait_s: seconds that this site waited.
        written: parameters of messages that were written.
        context: context of the step.
        waits_since: when the current wait of this site began; None outside of waits.
        longest_s: seconds of its longest wait before that.
        ask_again: requests damaged messages again, in a step that nobody may refuse.
        state: worst state that messages reported.
        views: for each message, what makes its sums gradients; empty where they are copied.
    """

    # As attributes of the class: what few steps change costs none of them an assignment.
    wait_s, longest_s = 0.0, 0.0
    waits_since: float | None = None
    error: Exception | None = None
    ask_again: AskAgain | None = None
    state, _lacks = State.GOOD, False
    views: Sequence[BucketView | None] = ()
    _awaited: Bucket | str = "the headers"

    def __init__(self, planner: Planner, context: StepContext) -> None:
        self._planner, self.context = planner, context
        self._has_autograd_grad: dict[str, Tensor] = {}
        self.written: set[str] = set()

    @property
    def may_count(self) -> bool:
        """True if nothing was said or found against the step, and it needs no more messages."""
        good = self.state == State.GOOD and self.context.state == State.GOOD
        return good and not (self._has_autograd_grad or self._lacks)

    @property
    def place(self) -> str:
        """Description of what this site waits for."""
        if isinstance(self._awaited, str):
            return self._awaited
        others = len(self._awaited.params) - 1
        return f"the gradients of {self._first(self._awaited)!r}" + f" and {others} others" * (
            others > 0
        )

    @place.setter
    def place(self, place: str) -> None:
        self._awaited = place

    def _first(self, bucket: Bucket) -> str:
        return next(name for name in self.context.params if name in bucket.params)

    def fail(self, error: Exception) -> None:
        """Records an exception on this site, which goes through all messages nonetheless."""
        self.error, self.context.state = error, State.FAILED

    @property
    def waits_s(self) -> float:
        """Seconds of this site's longest wait in the step, the current one included."""
        since = self.waits_since
        return max(self.longest_s, 0.0 if since is None else time.perf_counter() - since)

    def waiting(self) -> _Wait:
        """Context in which this site waits."""
        return _Wait(self)

    def start_further_rounds(self, sent: Sent) -> None:
        """Starts the further rounds of messages that have some, each in the order of messages."""
        started = 1
        while sent := [one for one in sent if one[1].rounds > started]:
            self._start_round(sent)
            started += 1

    def _start_round(self, sent: Sent) -> None:
        for bucket, pending in sent:
            with _Wait(self, bucket):
                try:
                    pending.advance()
                except ExchangeError:
                    raise
                except Exception as error:  # the others wait for a message that can't be made
                    raise ExchangeError(str(error), kind=Failure.LOCAL) from error

    def receive(self, sent: Sent, ballot: Ballot) -> Last | None:
        """Receives all messages; writes all but the last one, if all are good.

        Returns:
            The last message, to be written after the vote is cast; None if nothing is left to
            write.
        """
        state, last = self.context.state, None
        for place, (bucket, pending) in enumerate(sent):
            result = self._result(bucket, pending, ballot, place)
            if last is not None and state == State.GOOD:
                self.write(*last)
            state, last = max(state, result.state), (place, bucket, result)
            self._lacks = self._lacks or result.lacks
        ballot.hear(state)
        self.state = state
        if state != State.GOOD:
            return None
        more = self._has_autograd_grad or self._lacks
        if last is not None and (more or last[2].has_autograd_grad):
            self.write(*last)
            self.lend(copies=True)
            self._share_autograd_grad()
            if self._lacks:
                self._leave_out(self._lacked_by_all(ballot))
            return None
        return last

    # -- parameters that no site has a gradient for, though some had announced one ----------------

    def _lacked_by_all(self, ballot: Ballot) -> list[str]:
        """Exchanges lacking parameters; returns those that each site lacks or did not announce."""
        context = self.context
        own, lacking = list(context.params), context.lacking()
        words = bit_words([name in lacking for name in own])
        sent = context.comm.control([*words, sum_of_words(words)])
        self.place = "which parameters have no gradient"
        with self.waiting():
            parts = context.comm.all_gather(sent, [len(sent)] * len(context.headers)).wait()
        told = [part.tolist() for part in parts]
        ballot.note_sums(combined(total for *_, total in told))
        found = [n for n in own if n in context.used]
        for site, (header, (*flags, total)) in enumerate(zip(context.headers, told, strict=True)):
            if total != sum_of_words(flags):
                ballot.refuse(RefusedError("what it lacks has a wrong checksum", site), own[0])
                return []
            lacks = dict(zip(own, bits(flags, len(own)), strict=True))
            used = dict(zip(own, header.used, strict=True))
            found = [name for name in found if lacks[name] or not used[name]]
        return found

    @torch.no_grad()
    def _leave_out(self, names: Sequence[str]) -> None:
        """Drops these gradients, as autograd would leave none; residuals that were sent stay."""
        params = self.context.params
        nothing = [n for n in names if (g := params[n].grad) is None or not bool(g.any())]
        param_grad.drop(params[name] for name in nothing)
        self.context.used -= frozenset(nothing)

    # -- messages, one by one --------------------------------------------------------------------

    def receive_buffers(self, buffers: BufferMessage, ballot: Ballot) -> None:
        """Receives running statistics, which are written once the step counts."""
        self.place = "the buffers"
        try:
            gathered, receive = buffers.gathered, buffers.receive
            ballot.note_sums(self._sound(receive, gathered, BUFFERS_PLACE))
        except RefusedError as error:
            ballot.refuse(error, buffers.first)

    def _sound(self, read: Callable[[], T], gathered: Gathered | None, place: int) -> T:
        """Reads messages; requests a damaged one again if the others may go on without this site.

        Raises:
            RefusedError: it is damaged, and the step counts nowhere.
            ExchangeError: it stays damaged, and the step may count elsewhere.
        """
        for _ in range(_ASKS if gathered is not None and self.ask_again is not None else 0):
            try:
                return read()
            except RefusedError as error:
                assert gathered is not None
                assert self.ask_again is not None
                damaged = gathered.wait()[error.site]
                content = self.ask_again(error.site, place, damaged.nbytes)
                gathered.replace(error.site, as_tensor(content).to(damaged.device))
        try:
            return read()
        except RefusedError as error:
            if self.ask_again is None:
                raise
            raise ExchangeError(str(error), (error.site,)) from error

    def _result(self, bucket: Bucket, pending: Pending, ballot: Ballot, place: int) -> Result:
        result = None
        with _Wait(self, bucket):
            try:
                result = self._sound(pending.wait, pending.gathered, place)
            except RefusedError as error:
                ballot.refuse(error, self._first(bucket))
            except ExchangeError:
                raise
            except Exception as error:
                if self.ask_again is not None:  # the others may go on
                    raise ExchangeError(str(error), kind=Failure.LOCAL) from error
                self.fail(error)
        if result is None:
            return Result(state=State.FAILED)
        if result.digest is not None:
            ballot.note_sums(result.digest)
        return result

    # -- into `param.grad` ----------------------------------------------------------------------

    def write(self, place: int, bucket: Bucket, result: Result) -> None:
        """Writes the result of one message; sums that may become gradients wait for `lend`."""
        params = self.context.params
        if self.views and (view := self.views[place]) is not None:
            self.written.update(view.write(params))
            return
        means, additions = self.effects(bucket, result)
        if self.context.reading is not None:
            self._measure(self.context.reading, means)
        param_grad.overwrite(params, means)
        not_yet = {n: additions.pop(n) for n in result.has_autograd_grad if n in additions}
        if self.context.reading is not None:
            self._measure(self.context.reading, additions, formed=False, not_yet=not_yet)
        self._has_autograd_grad.update(not_yet)
        param_grad.add(params, additions)
        self.written |= bucket.params

    def lend(self, *, copies: bool = False) -> None:
        """Makes sums the gradients, once the step counts.

        Args:
            copies: True to copy them instead, because it is not known yet whether it counts.
        """
        for view in self.views:
            if view is not None:
                self.written.update(view.lend(self.context.params, copies=copies))

    def effects(self, bucket: Bucket, result: Result) -> tuple[Mapping[str, Tensor], Gradients]:
        """Returns the gradients that replace `param.grad`, and those that are added to it."""
        used, params = self.context.used, self.context.params
        means = only(result.means, used)
        additions = dict(only(result.additions, used))
        for name in (bucket.params & used) - set(additions) - set(means):
            additions[name] = torch.zeros_like(params[name], requires_grad=False)
        return means, additions

    @torch.no_grad()
    def _measure(
        self,
        reading: Reading,
        means: Mapping[str, Tensor],
        *,
        formed: bool = True,
        not_yet: Collection[str] = (),
    ) -> None:
        """Records gradients before `param.grad`, this site's own if `formed`, is overwritten."""
        for name in not_yet:
            reading.leave_out(name)
        for name, mean in means.items():
            own = self.context.params[name].grad if formed else None
            own = None if own is None else scaled(own, self.context.scale)
            reading.mean(name, own, mean)

    def _share_autograd_grad(self) -> None:
        """All-reduces autograd's gradients of parameters whose factors were also sent."""
        if not self._has_autograd_grad:
            return
        self._planner.note_autograd_grad(list(self._has_autograd_grad), self.context.headers)
        for name in self._has_autograd_grad:
            bucket = self._planner.packer.dense_bucket([name])
            means = bucket.start(self.context).wait().means
            param_grad.overwrite(self.context.params, means)
        param_grad.add(self.context.params, self._has_autograd_grad)


class _Wait:
    """A wait of this site, maybe for one message, less the seconds of what is computed meanwhile.

    Args:
        receiver: counts the seconds.
        bucket: the message; None if it is no gradient's.
    """

    def __init__(self, receiver: Receiver, bucket: Bucket | None = None) -> None:
        self._receiver, self._bucket = receiver, bucket

    def __enter__(self) -> None:
        receiver, context = self._receiver, self._receiver.context
        if self._bucket is not None:
            receiver._awaited = self._bucket
        self._computed_s = context.layers.compress_s + context.layers.replay_s
        self._began = receiver.waits_since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        receiver, context = self._receiver, self._receiver.context
        receiver.waits_since = None
        waited_s = time.perf_counter() - self._began
        receiver.longest_s = max(receiver.longest_s, waited_s)
        if self._bucket is not None:
            waited_s -= context.layers.compress_s + context.layers.replay_s - self._computed_s
            context.waits.append((self._bucket.params, waited_s))
        receiver.wait_s += waited_s


def only(gradients: Mapping[str, Tensor], used: Set[str]) -> Mapping[str, Tensor]:
    """Returns the gradients of the used parameters."""
    if gradients.keys() <= used:
        return gradients
    return {name: g for name, g in gradients.items() if name in used}
