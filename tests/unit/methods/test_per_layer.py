"""A method per part of the model, and parts that are not shared."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Boom, mlp, relative_error
from covering import covering
from ranks import run_on_lasting_groups, try_ranks

FULL = og.RankDAD(rank=1000)
MIXTURES = {
    "two methods": {"0.*": og.DAD(always=True), "*": og.Dense()},
    "three methods": {"0.*": og.DAD(always=True), "2.*": FULL, "*": og.Dense()},
    "one, twice": {"0.*": og.DAD(always=True), "2.*": og.Dense(), "*": og.DAD(always=True)},
    "two of one kind": {"0.*": og.DAD(), "*": og.DAD(always=True, reveal="activations")},
    "entries, gathered and added up": {
        "0.*": og.Sparse(density=1.0, always=True),
        "2.*": og.DAD(always=True),
        "*": og.Sparse(density=1.0, always=True, select="random"),
    },
    "gathered, merged and reduced": {
        "0.*": FULL,
        "2.*": og.RankDAD(rank=1000, reduce="two_way"),
        "*": og.RankDAD(rank=1000, reduce="all_reduce"),
    },
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(6, 9, 8, 7, 5)


def batches(sites, width=6):
    return [torch.randn(4 + rank, width) for rank in range(sites)]


def loss(y):
    return (y * y).mean() + y.sin().mean()


def pooled(original, inputs):
    whole = copy.deepcopy(original).double()
    for x in inputs:
        (loss(whole(x.double())) / len(inputs)).backward()
    return {name: p.grad for name, p in whole.named_parameters()}


@pytest.mark.parametrize(("name", "sites"), covering(list(MIXTURES), [2, 3], quick=2))
def test_every_mixture_of_exact_methods_is_exact(name, sites):
    original, inputs = model(), batches(sites)

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, og.PerLayer(MIXTURES[name]), group=group)
        for _ in range(4):
            replica.zero_grad()
            loss(replica(inputs[rank])).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    expected = pooled(original, inputs)
    for gradients in run_on_lasting_groups(sites, body):
        for parameter, gradient in gradients.items():
            assert relative_error(gradient, expected[parameter]) < 2e-6, parameter


def test_the_first_pattern_wins():
    def body(rank, group):
        method = og.PerLayer({"0.*": og.Dense(), "?.weight": og.DAD(always=True), "*": og.DAD()})
        with pytest.raises(ValueError, match="travel together"):
            og.distribute(model(), method, group=group)
        method = og.PerLayer({"0.*": og.Dense(), "[0-6].*": og.DAD(always=True)})
        session = og.distribute(model(), method, group=group)
        lines = {line.parameter: line.why for line in session.coverage()}
        session.detach()
        return lines

    for lines in run_on_lasting_groups(2, body):
        assert lines["0.weight"] == "the method is dense"
        assert lines["2.weight"] == "always=True"


class Parts(nn.Module):
    """An encoder of any input width and a head."""

    def __init__(self, inputs: int, hidden: int = 8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.Tanh())
        self.head = mlp(hidden, 7, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


ENCODERS = og.PerLayer({"encoder.*": og.Local(), "*": og.DAD(always=True)})


def train_parts(rank, group, method=ENCODERS, widths=(6, 9, 5), steps=1):
    """Encoders of another width on every site."""
    torch.manual_seed(rank)
    replica = Parts(widths[rank])
    before = copy.deepcopy(replica)
    session = og.distribute(replica, method, group=group)
    x = torch.randn(4 + rank, widths[rank])
    for _ in range(steps):
        replica.zero_grad()
        loss(replica(x)).backward()
    return replica, before, x, session


@pytest.mark.parametrize("sites", [2, 3])
def test_local_parts_keep_their_own(sites):
    results = run_on_lasting_groups(sites, train_parts)
    own = []
    for replica, before, x, session in results:
        alone = copy.deepcopy(before).double()
        alone.head.load_state_dict(results[0][1].head.double().state_dict())
        loss(alone(x.double())).backward()
        own.append(alone)
        for name, p in replica.encoder.named_parameters():
            assert p.equal(before.encoder.get_parameter(name)), "the start is the site's own"
            expected = alone.encoder.get_parameter(name).grad
            assert (p.grad - expected).norm() < 5e-6 * (1 + expected.norm())
        assert session.state_dict()["local"] == [
            f"encoder.{name}" for name, _ in replica.encoder.named_parameters()
        ]
        assert {v.travels for v in session.coverage()} == {"local", "factors"}
        session.detach()
    for name, p in results[0][0].head.named_parameters():
        mean = sum(alone.head.get_parameter(name).grad for alone in own) / sites
        assert all(
            relative_error(replica.head.get_parameter(name).grad, mean) < 2e-6
            for replica, *_ in results
        )
        assert all(replica.head.get_parameter(name).equal(p) for replica, *_ in results)


def test_nothing_of_a_local_part_is_sent():
    def body(rank, group):
        *_, session = train_parts(rank, group)
        session.detach()
        return session.stats().layers

    for layers in run_on_lasting_groups(2, body):
        assert layers
        assert all(name.startswith("head") for name in layers)


REFUSED = {
    "unmatched": ({"0.*": og.DAD()}, "no pattern matches '2.weight'"),
    "useless": ({"encodr.*": og.Local(), "*": og.DAD()}, "'encodr.\\*' matches no parameter"),
    "all local": ({"*": og.Local()}, "every parameter is og.Local"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused_on_all_sites(name):
    methods, message = REFUSED[name]

    def body(rank, group):
        og.distribute(model(), og.PerLayer(methods), group=group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


def test_settings_are_checked():
    with pytest.raises(ValueError, match="give a method per pattern"):
        og.PerLayer({})
    with pytest.raises(TypeError, match=r"'\*': 'dad' is no method of a part"):
        og.PerLayer({"*": "dad"})
    with pytest.raises(TypeError, match="is no method"):
        og.PerLayer({"*": og.PerLayer({"*": og.DAD()})})
    with pytest.raises(ValueError, match=r"joint=True; give some pattern the method og.Local"):
        og.PerLayer({"*": og.DAD()}, joint=True)


def test_a_parameter_tied_over_two_methods_is_refused():
    def body(rank, group):
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        net[2].weight = net[0].weight
        with pytest.raises(ValueError, match="travel together"):
            og.distribute(net, og.PerLayer({"0.*": og.DAD(), "*": og.Dense()}), group=group)

    run_on_lasting_groups(2, body)


def test_states_of_several_methods_go_on_to_the_bit():
    method = og.PerLayer({"0.*": og.RankDAD(rank=1), "*": og.RankDAD(rank=2)})
    original = model()

    def steps(replica, rank, which):
        found = []
        for step in which:
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(5, 6, generator=generator)
            replica.zero_grad()
            loss(replica(x)).backward()
            found.append([p.grad.clone() for p in replica.parameters()])
        return found[-1]

    original = model()

    def body(rank, group):
        whole = copy.deepcopy(original)
        session = og.distribute(whole, method, group=group)
        steps(whole, rank, range(3))
        state = copy.deepcopy(session.state_dict())
        expected = steps(whole, rank, range(3, 5))
        session.detach()
        again = copy.deepcopy(original)
        session = og.distribute(again, method, group=group)
        session.load_state_dict(state)
        found = steps(again, rank, range(3, 5))
        session.detach()
        return [a.equal(b) for a, b in zip(found, expected, strict=True)]

    assert all(all(same) for same in run_on_lasting_groups(2, body))


# -- joint backpropagation --------------------------------------------------------------------


def joint(inputs: int = 6):
    return og.PerLayer({"encoder.*": og.Local(), "*": og.DAD(always=True)}, joint=True)


@pytest.mark.parametrize("sites", [2, 3])
def test_the_mean_delta_flows_back_into_local_parts(sites):
    """Against the formula: every encoder goes on with (1 / S) sum of the deltas at its output."""
    batch = 5

    def body(rank, group):
        torch.manual_seed(rank)
        replica = Parts(6 + rank)
        before = copy.deepcopy(replica)
        session = og.distribute(replica, joint(), group=group)
        x = torch.randn(batch, 6 + rank)
        for _ in range(3):
            replica.zero_grad()
            loss(replica(x)).backward()
        session.detach()
        return replica, before, x

    results = run_on_lasting_groups(sites, body)
    head = results[0][1].head.double()
    encoders = [before.encoder.double() for _, before, _ in results]
    outputs = [e(x.double()) for e, (_, _, x) in zip(encoders, results, strict=True)]
    leaves = [y.detach().requires_grad_() for y in outputs]
    sum(loss(head(leaf)) for leaf in leaves).backward()
    mean = sum(leaf.grad for leaf in leaves) / sites
    for (replica, *_), encoder, y in zip(results, encoders, outputs, strict=True):
        y.backward(mean)
        for name, p in encoder.named_parameters():
            found = replica.encoder.get_parameter(name).grad
            assert (found - p.grad).norm() < 5e-6 * (1 + p.grad.norm()), name
        for name, p in head.named_parameters():
            found = replica.head.get_parameter(name).grad
            assert relative_error(found, p.grad / sites) < 2e-6, name


def test_joint_parts_must_return_the_same_shapes():
    def body(rank, group):
        torch.manual_seed(0)
        replica = Parts(6)
        session = og.distribute(replica, joint(), group=group)
        with pytest.raises(RuntimeError, match="returned other shapes on site 1 than on site 0"):
            loss(replica(torch.randn(4 + rank, 6))).backward()
        replica.zero_grad()
        loss(replica(torch.randn(4, 6))).backward()  # and training goes on
        session.detach()

    run_on_lasting_groups(2, body)


def outcomes(replica, session, forward, steps):
    """What every step came to: that it was good, or the error; then the session ends."""
    found = []
    for step in range(steps):
        replica.zero_grad()
        try:
            loss(forward(step)).backward()
            found.append("good")
        except (ArithmeticError, og.StepDiscardedError) as error:
            found.append(type(error).__name__)
    session.detach()
    return found


@pytest.mark.parametrize("where", ["between", "below"])
def test_a_backward_that_raises_leaves_the_others_in_step(where):
    def body(rank, group):
        torch.manual_seed(0)
        replica = Parts(6)
        session = og.distribute(replica, joint(), group=group)
        x = torch.randn(4, 6)

        def forward(step):
            fails = step == 2 and rank == 0
            if where == "between":
                return replica.head(Boom.apply(replica.encoder(x), fails))
            return replica.head(replica.encoder(Boom.apply(x.clone().requires_grad_(), fails)))

        return outcomes(replica, session, forward, 4)

    first, second = run_on_lasting_groups(2, body)
    assert first == ["good", "good", "ArithmeticError", "good"]
    assert second == ["good", "good", "StepDiscardedError", "good"]


def test_a_local_head_is_not_joined():
    def body(rank, group):
        method = og.PerLayer({"head.*": og.Local(), "*": og.DAD()}, joint=True)
        og.distribute(Parts(6), method, group=group)

    for error in try_ranks(2, body):
        with pytest.raises(ValueError, match="no module that is all"):
            raise error


class TwoEncoders(nn.Module):
    """Outputs of two widths go to one head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 50)
        self.head = nn.Linear(58, 3)

    def forward(self, x, fails=False):
        y = torch.cat([self.first(x), self.second(x)], dim=1)
        return self.head(Boom.apply(y, fails))


TWO = og.PerLayer({"head.*": og.DAD(always=True), "*": og.Local()}, joint=True)


def test_a_site_that_raised_gives_up_in_the_order_of_the_others():
    """Its messages have the lengths that they wait for: another ends gloo's process."""
    torch.manual_seed(0)
    original = TwoEncoders()

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, TWO, group=group)

        def forward(step):
            return replica(torch.randn(4, 4), fails=step == 1 and rank == 0)

        return outcomes(replica, session, forward, 3)

    first, second = run_on_lasting_groups(2, body)
    assert first == ["good", "ArithmeticError", "good"]
    assert second == ["good", "StepDiscardedError", "good"]


def test_a_part_that_one_site_uses_for_the_first_time_is_not_waited_for():
    """After steps without it, in which headers could have been left out."""

    def body(rank, group):
        replica = Parts(6)
        session = og.distribute(replica, joint(), group=group)
        made = torch.randn(4, 8)
        for _ in range(4):
            loss(replica.head(made)).backward()
        y = replica(torch.randn(4, 6)) if rank == 0 else replica.head(made)
        with pytest.raises(RuntimeError, match="returned other shapes on site 1 than on site 0"):
            loss(y).backward()
        session.detach()

    run_on_lasting_groups(2, body)


def test_a_part_inside_a_sequential_with_chains_is_joined():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    original = nn.Sequential(encoder, *(nn.Linear(6, 6) for _ in range(4)))
    inputs = [torch.randn(4, 6) for _ in range(2)]
    method = og.PerLayer({"0.*": og.Local(), "*": og.EDAD(always=True)}, joint=True)

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        for _ in range(2):
            replica.zero_grad()
            loss(replica(inputs[rank])).backward()
        session.detach()
        return replica[0][0].weight.grad

    outputs = [encoder(x) for x in inputs]
    leaves = [y.detach().requires_grad_() for y in outputs]
    sum(loss(original[1:](leaf)) for leaf in leaves).backward()
    mean = sum(leaf.grad for leaf in leaves) / 2
    for y, found in zip(outputs, run_on_lasting_groups(2, body), strict=True):
        encoder.zero_grad()
        y.backward(mean)
        assert relative_error(found, encoder[0].weight.grad) < 5e-6


def test_copies_and_pickles_of_joint_parts_are_plain():
    original = Parts(6)

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, joint(), group=group)
        copies = [copy.deepcopy(replica), pickle.loads(pickle.dumps(replica))]
        for plain in copies[: 1 + rank]:  # of which the other site knows nothing
            loss(plain(torch.randn(4, 6))).backward()
        session.detach()
        return [type(m) for m in replica.modules()]

    assert run_on_lasting_groups(2, body) == [[type(m) for m in original.modules()]] * 2


def test_joint_is_deprecated_and_says_what_to_use():
    with pytest.warns(FutureWarning, match=r"deprecated.*leave it out.*share that part"):
        og.PerLayer({"encoder.*": og.Local(), "*": og.DAD()}, joint=True)
