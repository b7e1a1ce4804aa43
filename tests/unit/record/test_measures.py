"""What is recorded of gradients is so."""

import copy
import math
from functools import cache

import pytest
import torch
from torch import nn

import outergrad as og
from cases import METHODS, Events
from covering import rest_slow
from outergrad.linalg.leading import effective_rank
from ranks import run_on_lasting_groups, try_ranks

SITES, STEPS = 2, 3
ALL = METHODS | {
    "two way": og.RankDAD(rank=2, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=2, reduce="all_reduce"),
    "all_reduce to a tolerance": og.RankDAD(rank=4, reduce="all_reduce", tolerance=0.3),
    "alternate": og.RankDAD(rank=2, reduce="alternate"),
    "alternate to a tolerance": og.RankDAD(rank=4, reduce="alternate", tolerance=0.3),
    "blocks": og.EDAD(blocks=["attention", "first"], always=True),
    "bf16": og.RankDAD(rank=2, wire=og.wire.BF16()),
    "sparse": og.Sparse(density=0.1, always=True),
    "sparse random": og.Sparse(density=0.1, select="random", always=True),
}
SOME = rest_slow(
    ALL, ["dense", "dad forced", "two way", "all_reduce", "blocks", "powersgd, full rank", "sparse"]
)
UNITS = {"conv.weight": 2}
"""Weights that are several matrices, as many as groups of rows."""


class Net(nn.Module):
    """A layer of each kind that has a rule, and a weight without one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.conv = nn.Conv1d(12, 8, 3, groups=2)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.first, self.last = nn.Linear(6, 30), nn.Linear(30, 7)
        self.own = nn.Parameter(torch.randn(7, 5))

    def forward(self, ids):
        x = self.table(ids)
        x = self.attention(x, x, x, need_weights=False)[0]
        x, _ = self.lstm(self.conv(x.mT).relu().mT)
        return self.last(self.first(x).tanh()) @ self.own


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(20, (3, 6 + rank), generator=generator) for _ in range(STEPS)]


def loss_of(net, ids):
    y = net(ids)
    return y.square().mean() + y.sum(dim=(0, 1))[0] / 10


def recorded(method, *, recorder=Events, weight=(1.0,) * SITES, steps=STEPS):
    """Per site: the recorder, and per step the shared gradients and the site's own."""
    torch.manual_seed(1)
    original = Net()

    def body(rank, group):
        net, events, found = copy.deepcopy(original), recorder(), []
        session = og.distribute(net, method, group=group, recorder=events)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for ids in batches(rank)[:steps]:
            alone = copy.deepcopy(net)
            for model in (net, alone):
                model.zero_grad()
                (weight[rank] * loss_of(model, ids)).backward()
            found.append((grads_of(net), grads_of(alone)))
            optimizer.step()
        session.detach()
        return events, found

    return run_on_lasting_groups(SITES, body)


@cache
def usual(label):
    """The same for several tests, which look at it only."""
    return recorded(ALL[label])


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def matrices(name, gradient, *, dense):
    """(G, O, I); what has no rule, or is not looked at by one, is one matrix."""
    if dense or name not in UNITS:
        return gradient.reshape(1, gradient.shape[0] if gradient.dim() > 1 else 1, -1)
    return gradient.reshape(UNITS[name], gradient.shape[0] // UNITS[name], -1)


def norm(t):
    return torch.linalg.vector_norm(t.double()).item()


@pytest.mark.parametrize("label", SOME)
def test_norms_angles_and_ranks_are_those_of_the_gradients(label):
    for events, found in usual(label):
        layers = [e for e in events.layers if e.mean_norm is not None]
        assert {e.layer for e in layers} >= {"table.weight", "first.weight", "own", "conv.weight"}
        for event in layers:
            mean, own = (grads[event.layer] for grads in found[event.step])
            assert event.mean_norm == pytest.approx(norm(mean), rel=1e-4, abs=1e-9)
            if event.gradient_norm is not None:
                assert event.gradient_norm == pytest.approx(norm(own), rel=1e-4, abs=1e-9)
            if event.cosine is not None:
                cosine = (mean * own).sum().item() / (norm(mean) * norm(own))
                assert event.cosine == pytest.approx(cosine, abs=1e-4)
            if mean.dim() > 1:
                check_spectrum(event, matrices(event.layer, mean, dense=label == "dense"))


def check_spectrum(event, mean_GOI):
    sigma_GK = torch.linalg.svdvals(mean_GOI.double())[:, :16]
    expected = sigma_GK.flatten().sort(descending=True).values[:16]
    expected = expected[: len(event.singular_values)]
    assert torch.tensor(event.singular_values).double() == pytest.approx(
        expected, rel=0.03, abs=3e-3 * expected[0].item() + 1e-9
    )
    rank = effective_rank(sigma_GK).mean().item()
    assert event.effective_rank == pytest.approx(rank, rel=0.03, abs=0.1)


@pytest.mark.parametrize("label", SOME)
def test_a_recorder_changes_nothing(label):
    def plain():
        return None

    for (_, ours), (_, theirs) in zip(
        usual(label), recorded(ALL[label], recorder=plain), strict=True
    ):
        for (shared, _), (expected, _) in zip(ours, theirs, strict=True):
            assert all(shared[name].equal(expected[name]) for name in expected)


GATHERING = {
    "rank-dad": og.RankDAD(rank=2),
    "without feedback": og.RankDAD(rank=2, error_feedback=None),
    "small core": og.RankDAD(rank=3, solver="small_core"),
    "int8": og.RankDAD(rank=2, wire=og.wire.Int8()),
    "dad bf16": og.DAD(always=True, wire=og.wire.BF16()),
    "raw topk": og.DAD(always=True, reveal="activations", wire=og.wire.TopK(0.5)),
    "powersgd": og.PowerSGD(rank=2),
    "alternate": og.RankDAD(rank=2, reduce="alternate", error_feedback="dense"),
    "sparse": og.Sparse(density=0.2, always=True),
    "sparse int8": og.Sparse(density=0.2, always=True, wire=og.wire.Int8()),
    "sparse blocks": og.Sparse(density=0.2, always=True, select="blocks", block=8),
    "sparse random": og.Sparse(density=0.2, always=True, select="random"),
}


@pytest.mark.parametrize("label", GATHERING)
def test_the_error_is_what_arrives_less_than_what_there_was(label):
    """Where the other site has nothing to send, all that arrives is this one's."""
    events, found = recorded(GATHERING[label], weight=(1.0, 0.0), steps=1)[0]
    layers = [e for e in events.layers if e.relative_error is not None]
    assert any(e.relative_error > 0.002 for e in layers)
    for event in layers:
        mean, own = (grads[event.layer] for grads in found[0])
        lost = norm(SITES * mean - own) / norm(own)
        assert event.relative_error == pytest.approx(lost, rel=0.02, abs=2e-3), event.layer
        assert event.discarded_energy == event.relative_error**2


KEEPING = {
    "gather": og.RankDAD(rank=2, reduce="gather", error_feedback="dense"),
    "all_reduce": og.RankDAD(rank=2, reduce="all_reduce", error_feedback="dense"),
    "sparse": og.Sparse(density=0.2, always=True),
    "sparse random": og.Sparse(density=0.2, always=True, select="random"),
}


@pytest.mark.parametrize("method", KEEPING.values(), ids=KEEPING)
def test_what_is_not_sent_is_kept(method):
    for events, _ in recorded(method, steps=1):
        kept = [e for e in events.layers if e.residual_norm is not None]
        assert {e.layer for e in kept} >= {"first.weight", "own"}
        for event in kept:
            lost = event.relative_error * event.gradient_norm
            assert event.residual_norm == pytest.approx(lost, rel=0.01, abs=2e-3)


def test_norms_of_rows():
    (events, _), _ = recorded(og.DAD(always=True))
    (event,) = (e for e in events.layers if e.layer == "last.weight" and e.step == 0)
    assert event.activation_norm > event.delta_norm > 0
    assert event.activation_norm * event.delta_norm >= event.gradient_norm
    assert (event.rows, event.kept_rows) == (3 * 4, 7)
    assert event.relative_error == 0


@pytest.mark.parametrize("label", SOME)
def test_what_one_site_sends_the_other_receives(label):
    (ours, _), (theirs, _) = usual(label)
    steps = [[e for e in events if isinstance(e, og.events.Step)] for events in (ours, theirs)]
    for one, other in zip(*steps, strict=True):
        assert (one.sent_bytes, one.received_bytes) == (other.received_bytes, other.sent_bytes)
    by_place = [{(e.step, e.layer): e for e in events.layers} for events in (ours, theirs)]
    for place, one in by_place[0].items():
        assert one.sent_bytes == by_place[1][place].received_bytes


class Thinned(Events):
    """Is told of every so many-th step."""

    every = 2


class Hurried(Events):
    """Has no time for measuring."""

    budget = 1e-9


def test_steps_are_thinned_and_begin_with_the_run():
    for events, _ in recorded(og.DAD(), recorder=Thinned):
        run = events[0]
        assert isinstance(run, og.events.Run)
        assert (run.sites, run.step) == (SITES, 0)
        assert run.dense_bytes == 4 * sum(math.prod(shape) for shape in run.shapes.values())
        steps = [e for e in events if isinstance(e, og.events.Step)]
        assert [e.step for e in steps] == [0, 2]
        assert steps[0].seconds is None
        assert steps[1].seconds > 0


def test_layers_that_do_not_fit_are_measured_in_turn():
    for events, _ in recorded(og.DAD(), recorder=Hurried):
        measured = [[e.layer for e in events.layers if e.step == k and e.mean_norm] for k in (0, 2)]
        assert len(measured[0]) > 8
        assert len(measured[1]) == 1


def test_several_recorders_of_which_one_fails():
    class Full:
        def record(self, event):
            raise OSError("disk full")

    class Closed(Events):
        closed = False

        def close(self):
            self.closed = True

    def body(rank, group):
        net, every, thinned = nn.Linear(3, 2), Closed(), Thinned()
        session = og.distribute(net, group=group, recorder=[Full(), every, thinned])
        for _ in range(4):
            net(torch.ones(1, 3)).sum().backward()
        session.log(loss=torch.tensor(0.5), accuracy=1)
        session.detach()
        return every, thinned

    with pytest.warns(UserWarning, match="disk full"):
        found = run_on_lasting_groups(SITES, body)
    for every, thinned in found:
        assert every.closed
        assert {e.step for e in every.layers} == {0, 1, 2, 3}
        assert {e.step for e in thinned.layers} == {0, 2}
        for events in (every, thinned):
            assert events[-2].values == {"loss": 0.5, "accuracy": 1.0}
            assert events[-2].step == 4
            assert (events[-1].step, events[-1].error) == (4, "")
            assert isinstance(events[-1], og.events.End)


def test_a_value_that_is_no_number_is_named():
    def body(rank, group):
        session = og.distribute(nn.Linear(3, 2), group=group, recorder=Events())
        with pytest.raises(TypeError, match="loss='low'"):
            session.log(loss="low")

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize(
    ("recorder", "message"),
    [
        (3, "recorder=3 has no method record"),
        ([Events(), "run.jsonl"], "recorder='run.jsonl' has no method record"),
    ],
)
def test_what_is_no_recorder_is_refused_on_all_sites(recorder, message):
    def body(rank, group):
        og.distribute(nn.Linear(3, 2), group=group, recorder=recorder if rank else None)

    for error in try_ranks(SITES, body):
        assert message in str(error)


def test_a_single_site_hears_of_its_own_gradients():
    def body(rank, group):
        net, events = nn.Linear(3, 2), Events()
        session = og.distribute(net, group=group, recorder=events)
        for _ in range(2):
            net.zero_grad()
            net(torch.ones(1, 3)).sum().backward()
        session.log(loss=1.0)
        session.detach()
        return events, norm(net.weight.grad), session.stats()

    ((events, expected, stats),) = run_on_lasting_groups(1, body)
    step = ["Layer", "Layer", "Step"]
    assert [type(event).__name__ for event in events] == [
        "Run",
        *step,
        "Disclosure",
        *step,
        "Scalars",
        "End",
    ]
    last = [event for event in events.layers if event.layer == "weight"][-1]
    assert (last.step, last.sent_bytes, last.cosine) == (1, 0, pytest.approx(1.0))
    assert last.mean_norm == pytest.approx(expected)
    assert last.effective_rank == pytest.approx(1.0, abs=0.01)
    assert stats.step == events[-1].step == 2


@pytest.mark.parametrize("label", ["dense", "dad forced", "rank-dad, full rank", "all_reduce"])
def test_a_gradient_that_is_no_number_is_told(label):
    for events, _ in recorded(ALL[label], weight=(math.nan, 1.0), steps=1):
        layers = {event.layer: event for event in events.layers}
        assert math.isnan(layers["first.weight"].mean_norm)
        assert math.isnan(layers["first.weight"].effective_rank)
