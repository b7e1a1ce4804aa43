"""What was saved is what is gone on from, to the bit, whenever the sites are killed."""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import covering
from outergrad.checkpoint import cast
from outergrad.checkpoint import folder as files
from ranks import run_on_lasting_groups
from sites_that_save import METHODS, Killed, Site, writing_that_dies

STEPS = 7
SHARED_OUT = ("rank-dad", "own", "every", "sparse")


def trained(method, sites, folder_of, *, stop=STEPS, every=STEPS + 1, kill_at=None) -> list[dict]:
    """Losses of every site, before it was killed."""

    def kill(step: int) -> None:
        if step == kill_at:
            raise Killed

    def body(rank, group):
        site = Site(method, rank, group, folder_of(rank))
        losses = {}
        with suppress(Killed):
            site.run(stop, every, kill, losses)
        return losses

    return run_on_lasting_groups(sites, body)


def shared(folder):
    return lambda rank: folder


def apart(folder):
    return lambda rank: folder / str(rank)


PLACES = {"shared": shared, "apart": apart}
CASES = [
    *(pytest.param(name, "shared", marks=pytest.mark.slow) for name in METHODS),
    *(("rank-dad", "apart"), ("own", "apart")),
]


@pytest.mark.parametrize(("name", "where"), CASES)
def test_kills_at_any_step_do_not_change_a_bit(name, where, tmp_path):
    method, place = METHODS[name], PLACES[where]
    whole = trained(method, 2, shared(tmp_path / "whole"))

    @settings(max_examples=2, deadline=None, derandomize=True)
    @given(st.lists(st.integers(0, STEPS - 1), min_size=1, max_size=2), st.integers(1, 4))
    def check(kills, every):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            found: list[dict] = [{}, {}]
            for kill_at in [*sorted(kills), None]:
                parts = trained(method, 2, place(Path(folder)), every=every, kill_at=kill_at)
                found = [old | new for old, new in zip(found, parts, strict=True)]
                for site, losses in enumerate(parts):
                    assert losses == {step: whole[site][step] for step in losses}
            assert found == whole

    check()


PHASES = ["before", "within", "after"]


@pytest.mark.parametrize("place", [shared, apart])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.integers(0, 5), st.sampled_from(PHASES), st.sampled_from(PHASES))
def test_kills_while_a_checkpoint_is_written_do_not_either(place, kill_at, first, second):
    """It counts if it was written everywhere; else that before it does."""
    method = METHODS["rank-dad"]
    with tempfile.TemporaryDirectory() as name:
        folder = place(Path(name))
        whole = trained(method, 2, shared(Path(name) / "whole"))
        with pytest.MonkeyPatch.context() as patch:
            phases = {"rank 0": first, "rank 1": second}
            patch.setattr(files, "write", writing_that_dies(kill_at + 1, phases))
            killed = trained(method, 2, folder, every=1)
        assert [max(losses) for losses in killed] == [kill_at, kill_at]
        again = trained(method, 2, folder, every=1)
        for site, losses in enumerate(again):
            assert min(losses) == kill_at + (first == second == "after")
            assert losses == {step: whole[site][step] for step in losses}


def saved(method, sites, folder_of, steps=4, **options) -> list[dict]:
    """Trains and saves once; what every site then has."""

    def body(rank, group):
        site = Site(method, rank, group, folder_of(rank), **options)
        site.run(steps, every=steps)
        states = {name: p.detach().clone() for name, p in site.model.named_parameters()}
        return {"model": states, "session": site.session.state_dict()}

    return run_on_lasting_groups(sites, body)


def restored(method, sites, folder_of, numbers=None, **options) -> list[tuple]:
    """What every site then goes on from, and three further losses."""

    def body(rank, group):
        number = None if numbers is None else numbers[rank]
        site = Site(method, rank, group, folder_of(rank), number=number)
        fresh = site.model[0].weight.detach().clone()
        found = site.checkpoints.restore(**options)
        if found is None:
            return (None,)
        states = {name: p.detach().clone() for name, p in site.model.named_parameters()}
        session = site.session.state_dict()
        losses = [site.step(step) for step in range(4, 7)]
        assert all(map(math.isfinite, losses))
        site.checkpoints.save(7)
        return found, states, session, fresh, site.model

    return run_on_lasting_groups(sites, body)


def alike(models, skip="0."):
    """Whether the shared parameters of sites are the same to the bit."""
    first, *others = (dict(model.named_parameters()) for model in models)
    return all(
        p.equal(other[name]) for other in others for name, p in first.items() if skip not in name
    )


@pytest.mark.parametrize(
    ("name", "numbers", "place"),
    covering(SHARED_OUT, [(2, 3), (3, 2), (3, 1), (1, 2)], PLACES, quick=4, every=2),
)
def test_at_another_number_of_sites_nothing_owed_is_lost(name, numbers, place, tmp_path, caplog):
    before, after = numbers
    method, folder_of = METHODS[name], place(tmp_path)
    states = saved(method, before, folder_of)
    if place is apart and after < before:  # the folders of the lost sites are not there
        with pytest.raises(ValueError, match=r"restore\(allow_lost=True\)"):
            restored(method, after, folder_of)
        results = restored(method, after, folder_of, allow_lost=True)
    else:
        results = restored(method, after, folder_of)
    for rank, (found, model, session, fresh, _) in enumerate(results):
        assert (found.step, found.saved_sites, found.sites) == (4, before, after)
        assert found.new == tuple(range(before, after))
        assert not found.exact
        assert session["step"] == states[0]["session"]["step"]
        source = states[min(rank, before - 1)] if rank < before else states[0]
        for parameter, value in model.items():
            kept_to_itself = name == "own" and parameter.startswith("0.") and rank >= before
            expected = source["model"][parameter]
            assert value.equal(expected) != kept_to_itself, parameter
        if name == "own" and rank >= before:
            assert model["0.weight"].equal(fresh)
    if not found.lost and name != "every":
        expected, shared_out = owed([s["session"] for s in states]), owed([r[2] for r in results])
        assert expected.keys() == shared_out.keys()
        for where, total in expected.items():
            torch.testing.assert_close(shared_out[where], total, rtol=1e-5, atol=1e-8)
    assert alike([model for *_, model in results])
    assert "at " + str(after) in caplog.text


@pytest.mark.parametrize("name", METHODS)
def test_no_site_is_shown_what_another_owes(name, tmp_path):
    """Of what a method remembers, the start of an iteration alone goes to other sites."""
    for site in saved(METHODS[name], 2, shared(tmp_path)):
        shown = cast._without_debts(site["session"], start=True)
        kept, left = (memories(session) for session in (site["session"], shown))
        assert left == {key for key in kept if key == "start"}


def memories(session) -> set[str]:
    """What is remembered of any place."""
    own = [compressor.get("own", {}).get("memories", {}) for compressor in session["exchanges"]]
    return {key for found in own for memory in found.values() for key in memory}


def owed(states) -> dict[str, torch.Tensor]:
    """What the mean gradient still lacks, per place."""
    total = {}
    for state in states:
        for compressor in state["exchanges"]:
            for name, memory in compressor.get("own", {}).get("memories", {}).items():
                if "unsent_deltas" in memory:
                    residual = memory["unsent_deltas"].mT @ memory["unsent_activations"]
                else:
                    residual = memory.get("unsent", torch.zeros(()))
                total[name] = total.get(name, 0) + residual.double() / len(states)
                if "unsent_velocity" in memory:
                    name = f"velocity of {name}"
                    share = memory["unsent_velocity"].double() / len(states)
                    total[name] = total.get(name, 0) + share
    return total
