"""What a detector of `og.OnDrift` has heard is of its site's data, and for that site alone."""

from __future__ import annotations

import pytest

import outergrad as og
from jumping import JUMP, STEADY, Jumps
from outergrad.checkpoint import resume
from outergrad.checkpoint.messaging import unpacked
from ranks import run_on_lasting_groups
from sites_that_save import Site

METHOD = og.LocalSteps(og.OnDrift(Jumps(), of="observed"))


def observed(site, values):
    for step, value in enumerate(values):
        site.session.observe(value)
        site.step(step)
    return site


@pytest.mark.parametrize("sites", [2, 3])
def test_no_other_site_is_given_it(sites, tmp_path, monkeypatch):
    """Each site goes on with its own; a new one begins anew."""
    sent = []

    def save(rank, group):
        site = observed(Site(METHOD, rank, group, tmp_path / str(rank)), [JUMP / 3, STEADY])
        site.checkpoints.save(2)

    def noting(comm, letters):
        sent.extend(letter for some in letters if some for letter in unpacked(some))
        return swapped(comm, letters)

    def go_on(rank, group):
        site = Site(METHOD, rank, group, tmp_path / str(rank))
        assert site.checkpoints.restore().step == 2
        observed(site, [JUMP / 3 if rank == sites - 1 else STEADY])
        return site.session.stats().drifted

    run_on_lasting_groups(2, save)
    swapped = resume.swapped
    monkeypatch.setattr(resume, "swapped", noting)
    hears = (f"site {sites - 1}",) if sites < 3 else ()
    assert run_on_lasting_groups(sites, go_on) == [hears] * sites
    assert [letter["session"]["drift"]["heard"] for letter in sent] == [None] * len(sent)
    assert bool(sent) == (sites == 3)
