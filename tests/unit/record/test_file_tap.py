"""A file of what a site sent has whole steps, for its owner's eyes, and reads as it was heard."""

from __future__ import annotations

import copy
import stat
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import Boom
from outergrad.core.sent import Sent, TappedRun, Way, copied
from outergrad.record.file_tap import SentFile
from outergrad.tools.audit.view import view_of
from ranks import run_on_lasting_groups

torch.manual_seed(0)
MODEL = nn.Sequential(
    nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)
)
METHODS = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad": og.RankDAD(rank=2, reduce="all_reduce"),
    "two-way": og.RankDAD(rank=2, reduce="two_way"),
    "sparse": og.Sparse(density=0.2, always=True),
    "edad": og.EDAD(always=True),
}


class Both:
    """A file, and a list of the same beside it."""

    def __init__(self, file: og.FileTap) -> None:
        self.file, self.heard = file, list[Sent]()
        self.attached, self.begun, self.ended = file.attached, file.begun, file.ended

    def sent(self, sent: Sent) -> None:
        self.heard.append(copied(sent))
        self.file.sent(sent)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(9, (4, 2), generator=drawn), torch.randint(5, (4,), generator=drawn)


def trained(path, method, steps=3, told=True, keeps=1, **settings):
    """The first site's tap after some steps, its weights at the begin of each, and all it heard."""

    def body(rank, group):
        model, before = copy.deepcopy(MODEL), []
        own = path if rank == 0 else path.with_name("other")
        tap = Both(og.FileTap(own, steps=keeps, **settings))
        session = og.distribute(model, method, group=group, tap=tap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            x, y = batch(rank, step)
            if told:
                tap.file.truth(x, y)
            before.append(copy.deepcopy({n: p.detach() for n, p in model.named_parameters()}))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.detach()
        return before, tap.heard

    return run_on_lasting_groups(2, body)[0]


def assert_same(found: object, wanted: object) -> None:
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(found, wanted)
    elif isinstance(wanted, list | tuple):
        assert type(found) in (type(wanted), list, tuple)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize("name", METHODS)
def test_it_reads_as_it_was_heard(name, tmp_path):
    before, heard = trained(tmp_path / "sent.pt", METHODS[name], steps=3, told=True)
    file = SentFile(tmp_path / "sent.pt")
    assert (file.method, file.site, file.sites) == (repr(METHODS[name]), 0, 2)
    (step,) = file.steps
    assert step.step == 0
    first = [one for one in heard if one.step == 0]
    assert len(step.sent) == len(first) > 0
    for found, wanted in zip(step.sent, first, strict=True):
        for field in fields(Sent):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    for param, weight in before[0].items():
        assert torch.equal(step.weights[param], weight)
    ((x, y),) = step.truth
    assert torch.equal(x, batch(0, 0)[0])
    assert torch.equal(y, batch(0, 0)[1])


def test_chosen_steps_are_kept_with_their_own_weights_and_rows(tmp_path):
    before, _ = trained(tmp_path / "sent.pt", og.Dense(), steps=4, keeps=[1, 3])
    file = SentFile(tmp_path / "sent.pt")
    assert [step.step for step in file.steps] == [1, 3]
    for step in file.steps:
        assert torch.equal(step.weights["2.weight"], before[step.step]["2.weight"])
        assert torch.equal(step.truth[0][0], batch(0, step.step)[0])


def test_local_steps_keep_the_shared_weights_and_all_batches(tmp_path):
    before, _ = trained(tmp_path / "sent.pt", og.LocalSteps(2), steps=4)
    file = SentFile(tmp_path / "sent.pt")
    (step,) = file.steps
    assert file.local_steps == 2
    assert torch.equal(step.weights["2.weight"], before[0]["2.weight"])
    assert [torch.equal(x, batch(0, k)[0]) for k, (x, _) in enumerate(step.truth)] == [True, True]


def test_without_the_truth_no_rows_are_in_it(tmp_path):
    trained(tmp_path / "sent.pt", og.Dense(), told=False)
    assert SentFile(tmp_path / "sent.pt").steps[0].truth == []


def test_its_owner_alone_may_read_it(tmp_path):
    path = tmp_path / "sent.pt"
    path.write_text("an older one")
    path.chmod(0o644)
    trained(path, og.Dense())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {one.name for one in tmp_path.iterdir()} == {"sent.pt", "other"}


def test_a_step_that_would_be_too_large_is_left_out_with_a_warning(tmp_path):
    trained(tmp_path / "one", og.Dense())
    most = sum(p.nbytes for p in MODEL.parameters()) * 3
    with pytest.warns(UserWarning, match="most_bytes"):
        trained(tmp_path / "sent.pt", og.Dense(), keeps=3, most_bytes=most)
    assert len(SentFile(tmp_path / "sent.pt").steps) == 1


def test_a_step_that_is_too_large_is_dropped_before_all_of_it_is_copied(tmp_path):
    tap, model = og.FileTap(tmp_path / "sent.pt", most_bytes=100), nn.Linear(3, 2)
    about = {"method": "", "local_steps": None, "site": 0, "sites": 2}
    tap.attached(TappedRun(model=model, weights={}, **about))
    tap.begun(0)
    told = Sent(name="weight", content=torch.ones(2, 3), way=Way.SUMMED, step=0)
    for _ in range(2):
        tap.sent(told)  # 32 bytes of weights, and 24 each
    with pytest.warns(UserWarning, match="step 0 is not kept.*most_bytes=100"):
        tap.sent(told)
    tap.sent(told)
    tap.ended(0)
    assert not tap.path.exists()


def test_the_rows_of_a_step_that_did_not_count_are_not_told_of_the_next(tmp_path):
    """At the site that has not raised: one that raised in the loss begins that step late."""

    def body(rank, group):
        model, x, y = nn.Linear(3, 2), torch.ones(2, 3), torch.zeros(2)
        tap = og.FileTap(tmp_path / f"{rank}.pt")
        session = og.distribute(model, og.Dense(), group=group, tap=tap)
        tap.truth(x, y)
        with pytest.raises((ArithmeticError, og.StepDiscardedError)):
            Boom.apply(model(x).sum(), rank == 0).backward()
        model.zero_grad()
        tap.truth(3 * x, y)
        model(3 * x).sum().backward()
        session.detach()
        return [x for x, _ in SentFile(tap.path).steps[0].truth]

    (found,) = run_on_lasting_groups(2, body)[1]
    assert torch.equal(found, torch.full((2, 3), 3.0))


def test_a_step_that_starts_again_is_kept_once_with_its_rows(tmp_path):
    """The first site has more rows in the last step, which changes the plan of both."""

    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 20))
        tap = Both(og.FileTap(tmp_path / f"{rank}.pt", steps=[3]))
        session = og.distribute(model, og.DAD(), group=group, tap=tap)
        for step in range(4):
            x = torch.randn(200 if rank == 0 and step == 3 else 2, 30)
            tap.file.truth(x, torch.zeros(len(x)))
            model.zero_grad()
            model(x).sum().backward()
        own = [p.detach().clone() for p in model.parameters()]
        session.detach()
        alone = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 20))
        alone.load_state_dict(dict(zip(alone.state_dict(), own, strict=True)))
        alone(x).sum().backward()
        (step,) = SentFile(tap.file.path).steps
        assert [len(x) for x, _ in step.truth] == [len(x)]
        found = view_of(step.sent, dict(alone.named_parameters())).gradients
        for name, p in alone.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-4)
        return len([one for one in tap.heard if one.step == 3]), len(step.sent)

    (_, kept), (heard, other) = run_on_lasting_groups(2, body)
    assert heard > other == kept  # the second site had sent of its first plan, too


def test_a_step_that_does_not_count_is_not_kept(tmp_path):
    def body(rank, group):
        model, x = nn.Linear(3, 2), torch.ones(2, 3)
        tap = og.FileTap(tmp_path / f"{rank}.pt")
        session = og.distribute(model, og.Dense(), group=group, tap=tap)
        with pytest.raises((ArithmeticError, og.StepDiscardedError)):
            Boom.apply(model(x).sum(), rank == 0).backward()
        assert not tap.path.exists()
        model.zero_grad()
        model(3 * x).sum().backward()
        session.detach()
        return SentFile(tap.path)

    for file in run_on_lasting_groups(2, body):
        (step,) = file.steps
        found = {one.name: one for one in step.sent}["weight"]
        torch.testing.assert_close(found.content * found.scale, torch.full((2, 3), 6.0))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": "3"}, "steps='3'"),
        ({"steps": [-1]}, "steps="),
        ({"steps": []}, "steps="),
        ({"most_bytes": 0}, "most_bytes=0"),
    ],
)
def test_wrong_settings_are_told(tmp_path, settings, told):
    with pytest.raises(ValueError, match=f"FileTap: {told}"):
        og.FileTap(tmp_path / "sent.pt", **settings)


def test_wrong_places_and_rows_are_told(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        og.FileTap(tmp_path / "nowhere" / "sent.pt")
    with pytest.raises(ValueError, match="is a folder"):
        og.FileTap(tmp_path)
    with pytest.raises(ValueError, match="3 inputs and 2 labels"):
        og.FileTap(tmp_path / "sent.pt").truth(torch.ones(3, 1), torch.ones(2))


def test_other_files_are_refused(tmp_path):
    torch.save({"model": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"no file of og\.FileTap"):
        SentFile(tmp_path / "other.pt")


@pytest.mark.parametrize("damage", [{"steps": [{"step": 0}]}, {"steps": None}, {"method": None}])
def test_damaged_files_are_refused(tmp_path, damage):
    trained(tmp_path / "sent.pt", og.Dense())
    found = torch.load(tmp_path / "sent.pt", weights_only=True)
    broken = {name: value for name, value in (found | damage).items() if value is not None}
    torch.save(broken, tmp_path / "sent.pt")
    with pytest.raises(ValueError, match="it is damaged"):
        SentFile(tmp_path / "sent.pt")
