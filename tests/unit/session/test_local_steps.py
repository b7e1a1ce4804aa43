"""Local steps: every site trains by itself, and the changes of the weights are what is shared."""

from __future__ import annotations

import copy
import gc
import io
from datetime import timedelta
from math import inf

import pytest
import torch
from torch import nn
from torch.optim import SGD

import outergrad as og
from cases import Events, mlp, relative_error
from covering import covering
from outergrad.capture.optimizer_steps import StepCounter
from ranks import run_on_lasting_groups, try_ranks
from sites_apart import FULL_RANK, INNER, LOW_RANK, Site, batch, loss, model, nesterov, plain, train


def reference(sites, k, steps, inner="sgd", outer=nesterov):
    """DiLoCo as it is written, in float64: where the sites are after the last exchange."""
    start = model().double()
    replicas = [copy.deepcopy(start) for _ in range(sites)]
    optimizers = [INNER[inner](replica.parameters()) for replica in replicas]
    outer_optimizer = outer(start.parameters())
    for first in range(0, steps, k):
        numbers = range(first, min(first + k, steps))
        for rank, replica in enumerate(replicas):
            train(replica, [optimizers[rank]], rank, numbers)
        for p, *now in zip(start.parameters(), *(r.parameters() for r in replicas), strict=True):
            p.grad = sum(p.detach() - q.detach() for q in now) / sites
        outer_optimizer.step()
        for replica in replicas:
            replica.load_state_dict(start.state_dict())
    return start


def assert_close(net, expected, limit=1e-5):
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert relative_error(p.detach(), q.detach()) < limit, name


def assert_bit_equal(one, other):
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert p.equal(q), name


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", FULL_RANK)
def test_one_plain_step_is_dense_training(name, sites):
    """The mean of the sites' steps is the step of their mean gradient."""
    whole = model().double()
    optimizer = SGD(whole.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        sum(loss(whole(batch(r, number, torch.float64))) / sites for r in range(sites)).backward()
        optimizer.step()

    def body(rank, group):
        site = Site(og.LocalSteps(1, outer=plain, method=FULL_RANK[name]), rank, group)
        site.steps(0, 6).session.detach()
        return site.model

    for net in run_on_lasting_groups(sites, body):
        assert_close(net, whole)


@pytest.mark.parametrize(("sites", "k"), [(1, 3), (2, 1), (2, 3), (3, 4)])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("settings", [{}, {"outer": og.nesterov}], ids=["mean", "diloco"])
def test_it_is_the_mean_of_the_weights_or_diloco(settings, inner, sites, k):
    """Eleven steps, with a flush for the rest; the inner optimizer goes on with its own state."""
    expected = reference(sites, k, 11, inner, nesterov if settings else plain)

    def body(rank, group):
        site = Site(og.LocalSteps(k, **settings), rank, group, inner).steps(0, 11)
        site.session.flush()
        site.session.detach()
        return site.model

    for net in run_on_lasting_groups(sites, body):
        assert_close(net, expected, 1e-5)


@pytest.mark.parametrize("name", FULL_RANK)
def test_every_method_of_full_rank_brings_the_whole_change(name):
    expected = reference(2, 3, 9, "momentum")

    def body(rank, group):
        site = Site(
            og.LocalSteps(3, outer=og.nesterov, method=FULL_RANK[name]), rank, group, "momentum"
        )
        site.steps(0, 9).session.detach()
        return site.model

    for net in run_on_lasting_groups(2, body):
        assert_close(net, expected)


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", LOW_RANK)
def test_replicas_are_equal_to_the_bit_after_every_exchange_and_differ_between(name, sites):
    def body(rank, group):
        site = Site(og.LocalSteps(3, method=LOW_RANK[name]), rank, group)
        weights = [site.steps(number, number + 1).weights() for number in range(9)]
        site.session.detach()
        return weights

    first, *others = run_on_lasting_groups(sites, body)
    for other in others:
        for number, (ours, theirs) in enumerate(zip(first, other, strict=True)):
            same = [a.equal(b) for a, b in zip(ours, theirs, strict=True)]
            assert all(same) if number % 3 == 2 else not any(same)


def test_what_low_rank_leaves_out_is_owed():
    """With a dense memory, the sum of what was applied lags by no more than what is in it."""
    method = og.LocalSteps(2, outer=plain, method=og.RankDAD(rank=1, error_feedback="dense"))

    def body(rank, group):
        site, moved = Site(method, rank, group), []
        for number in range(0, 8, 2):
            before = site.weights()[0]
            alone = copy.deepcopy(site.model)
            train(alone, [INNER["sgd"](alone.parameters())], rank, range(number, number + 2))
            site.steps(number, number + 2)
            moved.append((before - alone[0].weight.detach(), before - site.weights()[0]))
        owed = site.session.state_dict()["exchanges"][0]["own"]["memories"]["0.weight"]["unsent"]
        site.session.detach()
        return sum(own for own, _ in moved), sum(shared for _, shared in moved), owed.view(9, 6)

    results = run_on_lasting_groups(2, body)
    wanted = sum(own - owed for own, _, owed in results) / 2
    for _, shared, owed in results:
        assert owed.norm() > 1e-3
        torch.testing.assert_close(shared, wanted, rtol=1e-4, atol=1e-6)


def test_gradients_stay_the_site_s_own():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group).steps(0, 1)
        alone = copy.deepcopy(site.model)
        loss(alone(batch(rank, 1))).backward()
        site.steps(1, 2)
        site.session.detach()
        pairs = zip(parameters(site.model), parameters(alone), strict=True)
        return [p.grad.equal(q.grad) for p, q in pairs]

    assert all(all(same) for same in run_on_lasting_groups(2, body))


def parameters(net):
    return list(net.parameters())


@pytest.mark.parametrize(
    "method", [og.Dense(), og.PowerSGD(rank=1, min_ratio=1)], ids=["dense", "powersgd"]
)
def test_k_steps_cost_the_bytes_of_one_step_of_the_method(method):
    def body(rank, group):
        every = Site(method, rank, group).steps(0, 4)
        expected = every.session.stats()
        every.session.detach()
        site = Site(og.LocalSteps(5, method=method), rank, group).steps(0, 15)
        before = site.session._at.comm.sent_bytes
        between = [site.steps(n, n + 1).session._at.comm.sent_bytes for n in range(15, 19)]
        assert between == [before] * 4
        stats = site.steps(19, 20).session.stats()
        site.session.detach()
        assert stats.sent_bytes == expected.sent_bytes > 0
        assert stats.total_sent_bytes == before + stats.sent_bytes
        assert stats.step == 4
        ours, theirs = (sorted(v.sent_bytes for v in s.layers.values()) for s in (stats, expected))
        assert ours == theirs

    run_on_lasting_groups(2, body)


def test_the_rest_is_flushed_once():
    def body(rank, group):
        site = Site(og.LocalSteps(4), rank, group)
        site.session.flush()
        assert site.session.stats().step == 0, "nothing has changed"
        site.steps(0, 5).session.flush()
        weights = site.weights()
        assert site.session.stats().step == 2
        site.session.flush()
        assert all(a.equal(b) for a, b in zip(weights, site.weights(), strict=True))
        site.session.detach()
        return weights

    ours, theirs = run_on_lasting_groups(2, body)
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("name", "saved_after"), covering([*LOW_RANK, "dense"], [6, 7, 8], quick=3)
)
def test_training_goes_on_to_the_bit(name, saved_after):
    """Also from between two exchanges: the weights of the last one are saved, too."""
    method = og.LocalSteps(3, method=LOW_RANK.get(name, og.Dense()))

    def body(rank, group):
        whole = Site(method, rank, group, "momentum").steps(0, saved_after)
        parts = (whole.model, whole.optimizer, whole.session)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        whole.steps(saved_after, 13).session.flush()
        again = Site(method, rank, group, "momentum")
        file.seek(0)
        states = torch.load(file, weights_only=True)
        for part, state in zip((again.model, again.optimizer, again.session), states, strict=True):
            part.load_state_dict(state)
        again.steps(saved_after, 13).session.flush()
        assert again.session.stats().step == whole.session.stats().step
        assert_bit_equal(again.model, whole.model)

    run_on_lasting_groups(2, body)


def test_another_number_of_sites_goes_on_from_an_exchange():
    method = og.LocalSteps(2, method=og.RankDAD(rank=1))

    def save(rank, group):
        site = Site(method, rank, group).steps(0, 4)
        return site.session.state_dict(), site.model.state_dict()

    states, models = zip(*run_on_lasting_groups(2, save), strict=True)

    def go_on(rank, group):
        site = Site(method, rank, group)
        site.model.load_state_dict(models[0])
        site.session.load_state_dict(list(states))
        site.steps(4, 8).session.detach()
        return site.model

    first, *others = run_on_lasting_groups(3, go_on)
    for other in others:
        assert_bit_equal(other, first)


def test_weights_loaded_after_distribute_are_where_training_starts():
    torch.manual_seed(5)
    loaded = mlp(6, 9, 8, 5).state_dict()

    def body(rank, group, late):
        site = Site(og.LocalSteps(2), rank, group)
        if not late:
            site.session.detach()
            site.model.load_state_dict(loaded)
            site.session = og.distribute(site.model, og.LocalSteps(2), group=group)
        site.model.load_state_dict(loaded)
        site.steps(0, 4).session.detach()
        return site.model

    early = run_on_lasting_groups(2, lambda rank, group: body(rank, group, late=False))
    for net, expected in zip(
        run_on_lasting_groups(2, lambda rank, group: body(rank, group, late=True)),
        early,
        strict=True,
    ):
        assert_bit_equal(net, expected)


# -- whose steps count ---------------------------------------------------------------------------


def test_several_optimizers_step_together():
    """Each has some parameters; an exchange waits for the k-th step of the last."""
    expected = reference(2, 3, 9)

    def body(rank, group):
        site = Site(og.LocalSteps(3, outer=og.nesterov), rank, group)
        parts = [INNER["sgd"](layer.parameters()) for layer in site.model if parameters(layer)]
        train(site.model, parts, rank, range(9))
        assert site.session.stats().step == 3
        site.session.detach()
        return site.model

    for net in run_on_lasting_groups(2, body):
        assert_close(net, expected)


STEPS = {
    "one": (3, "aaaaaa", "001001"),
    "in turns": (2, "abababab", "00010001"),
    "every step, in turns": (1, "ababab", "101010"),
    "one is dropped": (2, "ababaaaaaa", "0001001010"),
    "one comes later": (2, "aaababab", "01000100"),
    "one half as often": (2, "aabaabaab", "010001000"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_counted(name):
    k, steps, expected = STEPS[name]
    holders = {letter: SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for letter in "abx"}
    params = {letter: holders[letter].param_groups[0]["params"][0] for letter in "ab"}
    counter = StepCounter(params, k)
    assert counter.holder(holders["x"]) is None
    found = ""
    for letter in steps:
        counter.count(counter.holder(holders[letter]))
        found += str(int(counter.due))
        if counter.due:
            counter.restart()
    assert found == expected


class Twice(SGD):
    """Makes its step by another one's."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def test_a_step_inside_a_step_is_not_counted():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group)
        SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        train(site.model, [Twice(site.model.parameters(), lr=0.1)], rank, range(5))
        assert site.session.stats().step == 2
        site.session.detach()

    run_on_lasting_groups(2, body)


def test_other_models_do_not_count():
    def body(rank, group):
        site, other = Site(og.LocalSteps(2), rank, group), model()
        train(other, [INNER["sgd"](other.parameters())], rank, range(5))
        assert not site.session._updates.outer.counter.any_made
        site.session.detach()

    run_on_lasting_groups(2, body)


def test_a_session_lives_as_long_as_its_model():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group)
        site.session = None
        gc.collect()
        return site.steps(0, 2).model

    ours, theirs = run_on_lasting_groups(2, body)
    assert_bit_equal(ours, theirs)


def test_a_detached_model_trains_alone():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group).steps(0, 3)
        site.session.detach()
        alone = copy.deepcopy(site.model)
        train(alone, [INNER["sgd"](alone.parameters())], rank, range(3, 6))
        assert_bit_equal(site.steps(3, 6).model, alone)
        site.session.flush()
        og.distribute(site.model, og.DAD(), group=group).detach()

    run_on_lasting_groups(2, body)


def test_backward_is_the_user_s_own():
    """What sharing gradients has to refuse is nobody's business here."""

    def body(rank, group):
        site = Site(og.LocalSteps(1), rank, group)
        x = batch(rank, 0)
        (gradient,) = torch.autograd.grad(
            loss(site.model(x)), [site.model[0].weight], create_graph=True
        )
        with site.session.no_sync():
            gradient.square().sum().backward()
        site.optimizer.step()
        site.session.detach()
        return site.model

    ours, theirs = run_on_lasting_groups(2, body)
    assert_bit_equal(ours, theirs)


# -- what is said and refused --------------------------------------------------------------------


def test_coverage_says_what_travels():
    method = og.PerLayer({"0.*": og.Local(), "2.*": og.RankDAD(rank=1), "*": og.Dense()})

    def body(rank, group):
        site = Site(og.LocalSteps(4, method=method), rank, group).steps(0, 4)
        lines = {line.parameter: line for line in site.session.coverage()}
        site.session.detach()
        return lines, site.weights()

    results = run_on_lasting_groups(2, body)
    for lines, _ in results:
        assert lines["0.weight"].travels == "local"
        assert lines["2.weight"].travels == "low rank"
        assert lines["4.bias"].travels == "dense"
        for name in ("2.weight", "2.bias", "4.weight"):
            assert lines[name].why.startswith("change of the weights, every 4 steps; ")
        assert lines["2.weight"].reveals == "this site's change, its largest parts"
    (_, ours), (_, theirs) = results
    assert [a.equal(b) for a, b in zip(ours, theirs, strict=True)] == [False] * 2 + [True] * 4


def test_a_recorder_hears_of_exchanges():
    def body(rank, group):
        events, net = Events(), model()
        session = og.distribute(net, og.LocalSteps(2), group=group, recorder=events)
        train(net, [INNER["sgd"](net.parameters())], rank, range(5))
        session.detach()
        return [(event.step, event.layer, event.travels) for event in events.layers]

    for events in run_on_lasting_groups(2, body):
        assert sorted(events) == sorted(
            (step, name, "dense") for step in range(2) for name, _ in model().named_parameters()
        )


def not_an_optimizer(params):
    return params


REFUSED = {
    "no step": (lambda: og.LocalSteps(0), ValueError, "k=0; use a whole number, 1 or more"),
    "no outer": (lambda: og.LocalSteps(2, outer=0.7), TypeError, "outer=0.7; use a function"),
    "no optimizer": (
        lambda: og.LocalSteps(2, outer=not_an_optimizer),
        TypeError,
        "returns an optimizer",
    ),
    "no method": (lambda: og.LocalSteps(2, method="dense"), TypeError, "method='dense'; use"),
    "nested": (lambda: og.LocalSteps(2, method=og.LocalSteps(2)), TypeError, "use og.Dense"),
    "factors": (lambda: og.LocalSteps(2, method=og.DAD()), ValueError, "has no factors"),
    "factors of a part": (
        lambda: og.LocalSteps(2, method=og.PerLayer({"0.*": og.DAD(), "*": og.Dense()})),
        ValueError,
        "has no factors",
    ),
    "joint": (
        lambda: og.LocalSteps(
            2, method=og.PerLayer({"0.*": og.Local(), "*": og.Dense()}, joint=True)
        ),
        ValueError,
        "joint=True",
    ),
    "nothing owed": (lambda: og.LocalSteps(2, error_reset=True), ValueError, "owes nothing"),
    "nothing kept": (
        lambda: og.LocalSteps(2, method=og.RankDAD(error_feedback=None), error_reset=True),
        ValueError,
        "owes nothing",
    ),
    "no bool": (lambda: og.LocalSteps(2, error_reset=1), ValueError, "error_reset=1; use True or"),
    "no quorum": (lambda: og.LocalSteps(2, quorum=0, grace=1), ValueError, "a number of sites, 1"),
    "more than all": (
        lambda: og.LocalSteps(2, quorum=1.5, grace=1),
        ValueError,
        "quorum=1.5; use a number of sites, 1 or more, or their share",
    ),
    "yes": (lambda: og.LocalSteps(2, quorum=True, grace=1), ValueError, "quorum=True; use a"),
    "no grace": (lambda: og.LocalSteps(2, quorum=2), ValueError, "grace=None; use the seconds"),
    "no time": (lambda: og.LocalSteps(2, quorum=2, grace=-1), ValueError, "grace=-1; use the"),
    "for ever": (lambda: og.LocalSteps(2, quorum=2, grace=inf), ValueError, "grace=inf; use the"),
    "grace alone": (lambda: og.LocalSteps(2, grace=1), ValueError, "grace=1; use it with quorum"),
    "quorum in turns": (
        lambda: og.LocalSteps(2, quorum=2, grace=1, stream=2),
        ValueError,
        "quorum=2 does not go with stream=2: .* leave stream out",
    ),
    "quorum meanwhile": (
        lambda: og.LocalSteps(2, quorum=2, grace=1, overlap=1),
        ValueError,
        "does not go with overlap=1",
    ),
    "quorum and alpha": (
        lambda: og.LocalSteps(2, quorum=2, grace=1, alpha=0.5),
        ValueError,
        "does not go with alpha=0.5",
    ),
    "quorum and what is owed": (
        lambda: og.LocalSteps(2, quorum=2, grace=1, error_reset=True, method=og.RankDAD(rank=1)),
        ValueError,
        "does not go with error_reset=True",
    ),
    "of a part": (lambda: og.PerLayer({"*": og.LocalSteps(2)}), TypeError, "around the whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_checked(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("quorum", "sites", "least"),
    [(None, 3, 3), (2, 3, 2), (1, 5, 1), (0.5, 3, 2), (0.5, 4, 2), (1.0, 3, 3), (0.01, 3, 1)],
)
def test_a_quorum_is_a_number_of_sites_or_their_share(quorum, sites, least):
    grace = None if quorum is None else 1
    assert og.LocalSteps(2, quorum=quorum, grace=grace).least(sites) == least


def test_sites_with_other_outer_optimizers_do_not_begin():
    def body(rank, group):
        Site(og.LocalSteps(2, outer=lambda params: SGD(params, lr=1.0 + rank)), rank, group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        assert "outer=SGD(lr=1.0)" in str(error)
        assert "outer=SGD(lr=2.0)" in str(error)


def test_a_model_belongs_to_one_session():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group)
        for method in (og.DAD(), og.LocalSteps(3)):
            with pytest.raises(ValueError, match="distributed already"):
                og.distribute(site.model, method, group=group)
        site.session.detach()

    run_on_lasting_groups(2, body)


def test_a_converted_model_is_refused():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group).steps(0, 1)
        site.model.double()
        with pytest.raises(RuntimeError, match=r"'0\.weight' was torch.float32"):
            train(site.model, [site.optimizer], rank, range(1, 2))
        site.session.detach()

    run_on_lasting_groups(2, body)


def test_a_parameter_that_is_trained_later_is_refused():
    def body(rank, group):
        net = model()
        net[0].requires_grad_(False)
        session = og.distribute(net, og.LocalSteps(1), group=group)
        net[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="was frozen when the model was distributed"):
            train(net, [INNER["sgd"](net.parameters())], rank, range(1))
        session.detach()

    run_on_lasting_groups(2, body)


def test_a_lost_site_is_noticed_at_the_exchange():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group).steps(0, 2)
        if rank == 0:
            with pytest.raises(RuntimeError, match="lost site 1"):
                site.steps(2, 4)
            with pytest.raises(RuntimeError, match="lost site 1"):
                site.session.state_dict()

    assert try_ranks(2, body, timedelta(seconds=2)) == [None, None]
