"""Views of everybody who sees something of a step, from all that all sites have sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from outergrad.core.sent import Sent
from outergrad.tools.audit.view import View, merged, reaching, summed, view_of, without


class Observers:
    """Views of a step, one for each kind of observer.

    Args:
        sent_S: What each site has sent.
        params: Parameters of the model by name.
        changed_by: As for `view_of`.
    """

    def __init__(
        self,
        sent_S: Sequence[Sequence[Sent]],
        params: Mapping[str, Tensor],
        changed_by: float | None = None,
    ) -> None:
        self._sent_S, self._params, self._changed_by = sent_S, params, changed_by

    def part(self, site: int) -> View:
        """Returns the view of who reads all that a site sends: a listener, or a hub."""
        return self._view(self._sent_S[site])

    def by(self, reader: int, site: int) -> View:
        """Returns what one site has of another as it was sent: of a layer that it owns, too."""
        return self._view(reaching(self._sent_S[site], reader))

    def sum_of_others(self, reader: int) -> View:
        """Returns the sum over the other sites, as a site has it.

        Of a layer that another site owns it is what that site has merged, less the reader's part.
        """
        others = [n for n in range(len(self._sent_S)) if n != reader]
        total = summed([self.part(site) for site in others])
        by_owners = without(merged(self._sent_S, self._params), self.part(reader))
        mine = {one.name for one in self._sent_S[reader] if one.owner == reader}
        found = {n: t for n, t in by_owners.gradients.items() if n not in mine}
        rounding = max(total.rounding, by_owners.rounding)
        gradients = {**total.gradients, **found}
        return View(gradients=gradients, sites=len(others), rounding=rounding)

    def _view(self, sent: Sequence[Sent]) -> View:
        return view_of(sent, self._params, changed_by=self._changed_by)
