"""The decision on a step that follows from the votes, and its errors for users."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.core.errors import DriftError, StepDiscardedError
from outergrad.messages.header import Header
from outergrad.messages.vote import NOTHING, Subjects, Verdict, Vote
from outergrad.replay.block_message import Blocks


@dataclass(frozen=True)
class Decision:
    """Decision on a step; the same on every site.

    Attributes:
        verdict: the worst one; also REFUSED if what the sites received contradicts itself.
        vote: vote of the first site with this verdict.
        apart: sites that received something else than the majority; all if there is no majority.
        contradicted: whether a site's messages said that it failed, and its vote did not.
        first: first step of the vote, if it is about several.
    """

    verdict: Verdict
    vote: Vote
    apart: tuple[int, ...] = ()
    contradicted: bool = False
    first: int | None = None

    @staticmethod
    def all_good(header: Header) -> Decision:
        """Returns the decision that a step counts."""
        return Decision(Verdict.GOOD, Vote(header.fingerprint, header.step, header.rank))

    @property
    def good(self) -> bool:
        """True if the step counts."""
        return self.verdict == Verdict.GOOD

    @property
    def sites(self) -> tuple[int, ...]:
        """Sites where the reason for the decision arose, as far as the votes tell."""
        if self.apart or self.contradicted:
            return self.apart
        return (self.vote.rank if self.vote.site == NOTHING else self.vote.site,)

    def error(self, subjects: Subjects, blocks: Blocks) -> RuntimeError:
        """Returns the step's error; a StepDiscardedError if training can go on with the next step.

        Args:
            subjects: parameters and buffers that votes can name.
            blocks: blocks of the model.
        """
        unrepeated = self._unrepeated(subjects, blocks)
        if unrepeated is not None:
            return RuntimeError(f"step {self.vote.step} was not applied on any site. {unrepeated}")
        if self.verdict == Verdict.CHANGED:
            about = "" if self.vote.param == NOTHING else repr(subjects.names[self.vote.param])
            return _changed(self.vote.rank, self.vote.step, about)
        if self.verdict == Verdict.OVERWRITTEN:
            return _overwritten(self.vote.rank, self.vote.step, subjects.names[self.vote.param])
        return StepDiscardedError(
            f"{self._why(subjects)}: it was not applied on any site; call optimizer.zero_grad() "
            f"and go on with the next"
        )

    def drift(self, now: int | None = None) -> DriftError:
        """Returns the error for different results that sites applied in an optimistic commit.

        Args:
            now: step in which this was found, which counts nowhere; None between steps.
        """
        step, sites = self.vote.step, self.sites
        void = "" if now is None else f" Step {now} was not applied on any site."
        return DriftError(
            f"{self._why(Subjects(()))}, which sites have applied: their replicas may differ since."
            f"{void} Call session.make_equal(optimizer) on every site, or start again from the "
            f"last checkpoint",
            sites,
            step + 1,
            "",
        )

    def _unrepeated(self, subjects: Subjects, blocks: Blocks) -> str | None:
        """Describes a block whose replay was not like its forward; None for other verdicts."""
        vote = self.vote
        if self.verdict != Verdict.UNREPEATED or vote.param == NOTHING:
            return None
        told = f"site {vote.rank} computed again what site {vote.site} sent of it and"
        return blocks.unrepeated(subjects.names[vote.param], told)

    @property
    def _steps(self) -> str:
        last = self.vote.step
        return f"step {last}" if self.first is None else f"one of the steps {self.first} to {last}"

    def _why(self, subjects: Subjects) -> str:
        vote = self.vote
        if self.verdict == Verdict.FAILED:
            return f"the backward of site {vote.rank} raised in step {vote.step}"
        if self.contradicted:
            return f"a site said that it failed in step {vote.step}, and voted for it"
        if len(self.apart) > 1:
            sites = ", ".join(map(str, self.apart))
            return f"the sites {sites} received different messages or sums in {self._steps}"
        if self.apart:
            what = "received other messages or sums than the others in"
            return f"site {vote.rank} {what} {self._steps}"
        if vote.site == NOTHING:
            return f"site {vote.rank} did not apply step {vote.step}"
        return (
            f"site {vote.rank} refused a message of site {vote.site}{subjects.words(vote.param)} "
            f"in step {vote.step}: it is not what should have been sent"
        )


def _overwritten(site: int, step: int, param: str) -> StepDiscardedError:
    return StepDiscardedError(
        f"{param!r}: the activations or deltas that make its gradient on site {site} were written "
        f"to or freed after the layer's own backward, before its message started: step {step} was "
        f"not applied on any site. From now on site {site} keeps copies where somebody does so: "
        f"call optimizer.zero_grad() and go on, or pass og.Dense() for this parameter"
    )


def _changed(site: int, step: int, param: str) -> StepDiscardedError:
    what = f"{param} of the model of site {site}" if param else f"the model of site {site}"
    return StepDiscardedError(
        f"{what} was changed after og.distribute(), or somebody else changed its gradient: the "
        f"error of site {site} says which, and what to do there. Step {step} was not applied on "
        f"any site. If the model was changed, call session.detach(), change it alike, and call "
        f"og.distribute(model, ...) again on every site"
    )
