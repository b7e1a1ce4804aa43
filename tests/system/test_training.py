"""What users do around backward: accumulation, clipping, copies, autocast, errors."""

from __future__ import annotations

import copy
import io
import pickle
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import METHODS, Boom, Events, mlp, relative_error
from covering import LONG, covering, rest_slow
from outergrad.messages.vote import WORDS
from ranks import run_on_lasting_groups, run_ranks, try_ranks

BATCHES = [torch.randn(4 + s, 6, generator=torch.Generator().manual_seed(s)) for s in range(4)]
SITES = 2
VOTE = 8 * WORDS
"""Bytes to one other site; of the first step, and of one in sixteen."""


def build_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(mlp(6, 24, 24, inplace=True), nn.LayerNorm(24), nn.Linear(24, 5))


MODELS = [build_model(seed) for seed in range(SITES + 2)]
LAYER = nn.Linear(30, 40)
LAYER_SQUARE, LAYER_SQUARE_TOO = nn.Linear(40, 40), nn.Linear(40, 40)


def model_of(seed: int = 0) -> nn.Sequential:
    """A model of its own for a rank: threads share one random stream, so none is drawn there."""
    return copy.deepcopy(MODELS[seed])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def pooled(steps: int = 1, sites: int = SITES) -> dict[str, torch.Tensor]:
    """`steps` backward passes of every site, averaged over the sites, in float64."""
    return {name: g.clone() for name, g in _pooled(steps, sites).items()}


@cache
def _pooled(steps: int, sites: int) -> dict[str, torch.Tensor]:
    model = model_of().double()
    for x in BATCHES[:sites]:
        for k in range(steps):
            (loss_of(model, (k + 1) * x.double()) / sites).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(model: nn.Module, expected: dict[str, torch.Tensor], limit: float = 5e-6) -> None:
    for name, p in model.named_parameters():
        assert relative_error(p.grad, expected[name]) < limit, name


QUICK = ["dense", "dad forced", "edad raw forced", "rank-dad, full rank", "powersgd, full rank"]
"""One of each kind; the others are variants of them."""
OFTEN = METHODS if LONG else [*QUICK, "dad", "sparse, all entries"]


@pytest.fixture(params=rest_slow(OFTEN, QUICK))
def method(request):
    return METHODS[request.param]


by_sites = pytest.mark.parametrize(
    ("method", "sites"), covering(METHODS, [1, 2, 3, 4], quick=4, every=4)
)


@by_sites
def test_accumulation_without_no_sync(method, sites):
    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        for k in range(3):
            loss_of(model, (k + 1) * BATCHES[rank]).backward()
        assert_equal(model, pooled(3, sites))

    run_on_lasting_groups(sites, body)


@by_sites
def test_accumulation_with_no_sync(method, sites):
    def body(rank, group):
        model = model_of()
        session = og.distribute(model, method, group=group)
        for _ in range(2):
            model.zero_grad()
            with session.no_sync():
                for k in range(2):
                    before = session.stats().total_sent_bytes
                    loss_of(model, (k + 1) * BATCHES[rank]).backward()
                    assert session.stats().total_sent_bytes == before
            loss_of(model, 3 * BATCHES[rank]).backward()
            assert_equal(model, pooled(3, sites))
        model.zero_grad()  # and back to sharing step by step
        loss_of(model, BATCHES[rank]).backward()
        loss_of(model, BATCHES[rank]).backward()
        single = {name: 2 * g for name, g in pooled(1, sites).items()}
        assert_equal(model, single)

    run_on_lasting_groups(sites, body)


def test_no_sync_leaves_the_local_gradient(method):
    def body(rank, group):
        model, alone = model_of(), model_of()
        session = og.distribute(model, method, group=group)
        forward_outside = loss_of(model, BATCHES[rank])
        with session.no_sync():
            forward_outside.backward()
            loss_of(model, BATCHES[rank]).backward()
        (2 * loss_of(alone, BATCHES[rank])).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)

    run_on_lasting_groups(SITES, body)


@by_sites
def test_zero_grad_in_place(method, sites):
    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            kept = [p.grad for p in model.parameters()]
            loss_of(model, BATCHES[rank]).backward()
            assert_equal(model, pooled(sites=sites))
        assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))

    run_on_lasting_groups(sites, body)


@pytest.mark.parametrize(
    ("method", "before"),
    covering(METHODS, {"optimizer before": True, "optimizer after": False}, quick=2),
)
def test_training_keeps_the_sites_equal_and_follows_the_pooled_model(method, before):
    """Ten steps with clipping and Adam: bit-equal between sites, close to pooled training."""
    pooled_model = model_of()
    optimizer = torch.optim.Adam(pooled_model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        sum(loss_of(pooled_model, x) / SITES for x in BATCHES[:SITES]).backward()
        nn.utils.clip_grad_norm_(pooled_model.parameters(), 0.05)
        optimizer.step()

    def body(rank, group):
        model = model_of(seed=rank)  # made equal to rank 0's
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01) if before else None
        og.distribute(model, method, group=group)
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(model, BATCHES[rank]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_on_lasting_groups(SITES, body)
    for p, q, reference in zip(first, second, pooled_model.parameters(), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, reference.detach(), rtol=1e-3, atol=1e-4)


def test_parameters_and_buffers_start_as_those_of_rank_0(method):
    models = [
        nn.ModuleList([nn.BatchNorm1d(5), nn.Linear(5, 3).double(), nn.Embedding(4, 2).bfloat16()])
        for _ in range(3)
    ]
    for rank, model in enumerate(models):
        for t in [*model.parameters(), *model.buffers()]:
            t.data.fill_(rank + 1)
        model.register_buffer("mask", torch.tensor([rank == 0, True, False]))
        model.register_buffer("scalar", torch.tensor(rank, dtype=torch.int16))

    def body(rank, group):
        og.distribute(models[rank], method, group=group)

    run_on_lasting_groups(3, body)
    for model in models:
        assert all(bool((p == 1).all()) for p in model.parameters())
        assert model[0].num_batches_tracked == 1
        assert bool((model[0].running_mean == 1).all())
        assert model.mask.tolist() == [True, True, False]
        assert model.scalar == 0


def test_bf16_autocast(method):
    """As exact as what autograd itself makes of bf16 products."""
    expected = pooled()

    def train(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x)
        loss.backward()

    def body(rank, group):
        model, alone = model_of(), [model_of() for _ in range(SITES)]
        session = og.distribute(model, method, group=group)
        for _ in range(2):
            model.zero_grad()
            train(model, BATCHES[rank])
        for k, replica in enumerate(alone):
            train(replica, BATCHES[k])
        for name, p in model.named_parameters():
            local = [dict(replica.named_parameters())[name].grad for replica in alone]
            by_autograd = relative_error(sum(local) / SITES, expected[name])
            assert p.grad.dtype == torch.float32
            assert relative_error(p.grad, expected[name]) < 1.5 * by_autograd + 2e-3, name
        return session.stats().layers

    layers = run_on_lasting_groups(SITES, body)[0]
    if method == og.DAD(always=True, reveal="activations"):
        rows = len(BATCHES[0])
        assert layers["0.2.weight"].sent_bytes <= rows * (24 + 24) * 2 + 64, "bf16 halves the bytes"


def test_copies_and_pickles_are_plain(method):
    def body(rank, group):
        model = model_of()
        kinds = [type(m) for m in model.modules()]
        names, keys = [t.__name__ for t in kinds], list(model.state_dict())
        session = og.distribute(model, method, group=group)
        loss_of(model, BATCHES[rank]).backward()
        assert [type(m).__name__ for m in model.modules()] == names
        assert list(model.state_dict()) == keys
        assert all(isinstance(m, kind) for m, kind in zip(model.modules(), kinds, strict=True))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(model),
            torch.load(buffer, weights_only=False),
            pickle.loads(pickle.dumps(model)),
        ]
        sent = session.stats().total_sent_bytes
        for twin in copies:
            assert [type(m) for m in twin.modules()] == kinds
            twin.zero_grad()
            loss_of(twin, BATCHES[rank]).backward()  # on one site at a time: nothing is shared
            alone = model_of()
            loss_of(alone, BATCHES[rank]).backward()
            for p, q in zip(twin.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        assert session.stats().total_sent_bytes == sent
        restored = model_of(seed=3)
        restored.load_state_dict(model.state_dict())

    run_on_lasting_groups(SITES, body)


def test_detach_and_back(method):
    def body(rank, group):
        model = model_of()
        kinds = [type(m) for m in model.modules()]
        og.distribute(model, method, group=group).detach()
        assert [type(m) for m in model.modules()] == kinds
        loss_of(model, BATCHES[rank]).backward()
        alone = model_of()
        loss_of(alone, BATCHES[rank]).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        model.zero_grad()
        session = og.distribute(model, method, group=group)
        loss_of(model, BATCHES[rank]).backward()
        assert_equal(model, pooled())
        session.detach()
        session.detach()  # twice does no harm

    run_on_lasting_groups(SITES, body)


def boom_step(model, x, armed):
    hidden = Boom.apply(model[0](x), armed)
    (model[2](model[1](hidden)) ** 2).mean().backward()


def test_exception_in_backward_on_all_sites_then_a_good_step(method):
    def body(rank, group):
        model = model_of()
        session = og.distribute(model, method, group=group)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                boom_step(model, BATCHES[rank], armed=True)
            model.zero_grad()
            boom_step(model, BATCHES[rank], armed=False)
            assert_equal(model, pooled())
            model.zero_grad()
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_exception_in_backward_on_one_site_discards_the_step_everywhere(method):
    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        with pytest.raises(ArithmeticError if rank == 0 else og.StepDiscardedError):
            boom_step(model, BATCHES[rank], armed=rank == 0)
        model.zero_grad()
        boom_step(model, BATCHES[rank], armed=False)
        assert_equal(model, pooled())

    # Site 0 ends the failed step when it begins the next: site 1 waits in its backward until then.
    run_on_lasting_groups(SITES, body)


def test_two_models_in_one_process(method):
    def body(rank, group):
        first, second = model_of(), model_of()
        og.distribute(first, method, group=group)
        og.distribute(second, og.DAD(always=True), group=group)
        loss_of(first, BATCHES[rank]).backward()
        loss_of(second, BATCHES[rank]).backward()
        assert_equal(first, pooled())
        assert_equal(second, pooled())
        first.zero_grad()
        second.zero_grad()
        (loss_of(first, BATCHES[rank]) + loss_of(second, BATCHES[rank])).backward()
        assert_equal(first, pooled())
        assert_equal(second, pooled())

    run_on_lasting_groups(SITES, body)


def test_two_losses_of_one_forward_each(method):
    """As in a GAN: two forwards, then two backwards."""

    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        for _ in range(2):
            model.zero_grad()
            losses = [loss_of(model, (k + 1) * BATCHES[rank]) for k in range(2)]
            for loss in losses:
                loss.backward()
            assert_equal(model, pooled(2))

    run_on_lasting_groups(SITES, body)


def test_backward_twice_through_one_graph(method):
    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        loss = loss_of(model, BATCHES[rank])
        loss.backward(retain_graph=True)
        loss.backward()
        assert_equal(model, {name: 2 * g for name, g in pooled().items()})

    run_on_lasting_groups(SITES, body)


def test_gradients_of_inputs_need_no_other_site(method):
    def body(rank, group):
        model, alone = model_of(), model_of()
        session = og.distribute(model, method, group=group)
        sent = session.stats().total_sent_bytes
        x = BATCHES[rank].clone().requires_grad_()
        if rank == 0:  # not a collective
            (found,) = torch.autograd.grad(loss_of(model, x), x)
            (expected,) = torch.autograd.grad(loss_of(alone, x), x)
            torch.testing.assert_close(found, expected)
            assert all(p.grad is None for p in model.parameters())
        assert session.stats().total_sent_bytes == sent
        loss_of(model, BATCHES[rank]).backward()
        assert_equal(model, pooled())

    run_on_lasting_groups(SITES, body)


def test_hooks_of_users_see_the_local_gradient(method):
    """A mask on a weight's gradient, as pruning does."""

    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        for _ in range(2):
            model.zero_grad()
            handle = model[2].weight.register_hook(lambda g: g * 0.5)
            loss_of(model, BATCHES[rank]).backward()
            handle.remove()
            expected = pooled()
            expected["2.weight"] = expected["2.weight"] * 0.5
            assert_equal(model, expected)

    run_on_lasting_groups(SITES, body)


def test_evaluation_between_steps_changes_nothing(method):
    def body(rank, group):
        model = model_of()
        session = og.distribute(model, method, group=group)
        loss_of(model, BATCHES[rank]).backward()
        travels = [line.travels for line in session.coverage()]
        for _ in range(3):
            with torch.no_grad():
                model.eval()(torch.randn(500, 6))
            model.train()(torch.randn(500, 6))  # a forward whose graph is thrown away
            model.zero_grad()
            loss_of(model, BATCHES[rank]).backward()
            assert_equal(model, pooled())
        assert [line.travels for line in session.coverage()] == travels

    run_on_lasting_groups(SITES, body)


def test_rows_that_change_between_steps():
    """Factors while they are small, dense when they are not, and back."""
    widths = [4, 200, 4, 4]

    def body(rank, group):
        model = copy.deepcopy(LAYER)
        session = og.distribute(model, group=group)
        seen = []
        for rows in widths:
            x = torch.randn(rows, 30)
            model.zero_grad()
            F.mse_loss(model(x), torch.zeros(rows, 40)).backward()
            seen.append(session.coverage()[0].travels)
        return seen

    # Whether to tap is decided before the rows are known: dense once more after the large batch.
    assert run_on_lasting_groups(SITES, body) == [["factors", "dense", "dense", "factors"]] * SITES


def pooled_over(batches) -> dict[str, torch.Tensor]:
    model = model_of().double()
    for x in batches:
        (loss_of(model, x.double()) / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("method", "who", "sites"),
    covering(METHODS, ["one site", "all sites"], [2, 3], quick=4, every=2),
)
def test_a_batch_that_the_plan_was_not_made_for(method, who, sites):
    """Steps without headers, then other rows on some sites: more, fewer, none; and back."""
    counts = [4] * 5 + [9, 4, 4, 4, 4, 40, 40, 40, 40, 4, 4, 1, 0, 4]
    data = torch.randn(sites, 40, 6)

    def batch(rank, step):
        changes = rank == 1 or who == "all sites"
        rows = data[rank, : counts[step] if changes else 4]
        return rows if len(rows) else torch.zeros(1, 6)

    expected = [pooled_over([batch(r, i) for r in range(sites)]) for i in range(len(counts))]

    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        for step, reference in enumerate(expected):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            assert_equal(model, reference)

    run_on_lasting_groups(sites, body)


def test_steady_steps_send_no_headers():
    def body(rank, group):
        model = model_of()
        session = og.distribute(model, og.DAD(always=True), group=group)
        sent = []
        for _ in range(4):
            model.zero_grad()
            loss_of(model, BATCHES[rank]).backward()
            sent.append(session.stats().sent_bytes)
        return sent

    first, second, third, fourth = run_ranks(SITES, body)[0]
    assert first == second + VOTE
    assert third == fourth == second - 512


def test_rows_that_change_nothing_surprise_nobody():
    """A tied embedding travels dense, whatever ids a batch has; low rank has the same length."""
    embedding, head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
    head.weight = embedding.weight
    ids = torch.randint(0, 40, (SITES, 12, 30))

    def body(rank, group):
        model = copy.deepcopy(nn.Sequential(embedding, head))
        session = og.distribute(model, og.RankDAD(rank=1), group=group)
        sent = []
        for step in range(12):
            model.zero_grad()
            model(ids[rank, step, : 10 + step]).square().mean().backward()
            sent.append(session.stats().sent_bytes)
        return sent

    first, *_, last = (sent := run_ranks(SITES, body)[0])
    assert last == first - 512 - VOTE, "no header"
    assert max(sent) == first, "no step was sent twice"


def test_batches_that_all_become_smaller_travel_as_factors():
    """No site's batch by itself would change how the layer travels."""
    layer = nn.Linear(64, 64)
    x = torch.randn(SITES, 100, 64)

    def body(rank, group):
        model = copy.deepcopy(layer)
        session = og.distribute(model, og.DAD(), group=group)
        travels = []
        for rows in (100, 100, 100, 100, 2, 2, 2):
            model.zero_grad()
            model(x[rank, :rows]).square().mean().backward()
            travels.append(session.coverage()[0].travels)
        session.detach()
        return travels

    travels = run_on_lasting_groups(SITES, body)[0]
    assert travels[3] == "dense"
    assert travels[-1] == "factors"


def test_batches_that_differ_now_and_then_are_soon_expected_to():
    """Each surprise, a step that is sent twice, makes the next less likely."""
    counts = [4, 4, 4, 9] * 12

    def body(rank, group):
        model = model_of()
        session = og.distribute(model, og.DAD(always=True), group=group)
        twice, x = 0, BATCHES[rank].repeat(3, 1)
        for step, count in enumerate(counts):
            model.zero_grad()
            loss_of(model, x[:count]).backward()
            usual = sum(layer.sent_bytes for layer in session.stats().layers.values())
            twice += session.stats().sent_bytes > 1.5 * usual + 1024 and step > 2
        return twice

    assert 1 <= run_ranks(SITES, body)[0] <= 2


@pytest.mark.parametrize(("method", "boom"), covering(METHODS, [0, 1], quick=2))
def test_surprise_and_exception_in_one_step(method, boom):
    """One site has another batch than expected, and one site's backward raises."""

    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        for _ in range(4):
            model.zero_grad()
            boom_step(model, BATCHES[rank], armed=False)
        x = torch.cat([BATCHES[rank]] * 2) if rank == 1 else BATCHES[rank]
        with pytest.raises(ArithmeticError if rank == boom else og.StepDiscardedError):
            boom_step(model, x, armed=rank == boom)
        for _ in range(2):
            model.zero_grad()
            boom_step(model, BATCHES[rank], armed=False)
            assert_equal(model, pooled())

    run_on_lasting_groups(SITES, body)


def test_a_parameter_that_is_used_now_and_then(method):
    """On one site, in some steps; gradients that nobody has are left alone."""
    use = [0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0]
    first, second = build_model(0)[2], mlp(24, 5)
    x = torch.randn(4, 24)

    def loss(layers, step, rank):
        y = layers[0](x + rank)
        return (y + layers[1](x) if use[step] and rank == 1 else y).square().mean()

    def body(rank, group):
        layers = copy.deepcopy(nn.ModuleList([first, second]))
        og.distribute(layers, method, group=group)
        for step in range(len(use)):
            layers.zero_grad()
            loss(layers, step, rank).backward()
            alone = copy.deepcopy(nn.ModuleList([first, second])).double()
            for r in range(SITES):
                (loss(alone.float(), step, r) / SITES).backward()
            for p, q in zip(layers.parameters(), alone.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), step
                if p.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad)

    run_ranks(SITES, body)


def test_penalised_weights_travel_dense_from_the_second_step_on():
    def body(rank, group):
        model = copy.deepcopy(LAYER)
        session = og.distribute(model, group=group)
        seen = []
        for _ in range(3):
            model.zero_grad()
            (
                model(BATCHES[rank] @ torch.ones(6, 30)).mean() + model.weight.square().sum()
            ).backward()
            seen.append((session.coverage()[0].travels, session.stats().sent_bytes))
        return seen

    (first, first_bytes), (second, second_bytes), _ = run_on_lasting_groups(SITES, body)[0]
    assert (first, second) == ("factors", "dense")
    assert second_bytes < first_bytes


def test_a_site_that_leaves_is_an_error_not_a_hang():
    def body(rank, group):
        model = model_of()
        og.distribute(model, group=group)
        loss_of(model, BATCHES[rank]).backward()
        if rank == 1:
            return  # its group is closed when this thread ends
        model.zero_grad()
        with pytest.raises(RuntimeError, match="site 0 lost site 1 in step 1"):
            loss_of(model, BATCHES[rank]).backward()
        with pytest.raises(RuntimeError, match="cannot be used any more"):
            loss_of(model, BATCHES[rank]).backward()

    run_ranks(SITES, body, timeout=timedelta(seconds=2))


def test_models_in_another_order_are_noticed():
    def body(rank, group):
        models = [model_of(), mlp(6, 5)]
        for model in models:
            og.distribute(model, group=group)
        for model in models if rank == 0 else reversed(models):
            loss_of(model, BATCHES[rank]).backward()

    for error in try_ranks(SITES, body):
        assert isinstance(error, RuntimeError)
        assert "something else than the header of this session" in str(error)


@pytest.mark.parametrize(
    ("method", "raising", "next_is_the_same"),
    covering(METHODS, [0, 1], [True, False], quick=4, every=2),
)
def test_exception_in_one_of_two_models(method, raising, next_is_the_same):
    """The step of the model that raised is ended before another model's begins."""

    def body(rank, group):
        models = [model_of(0), model_of(1)]
        for model in models:
            og.distribute(model, method, group=group)
        for _ in range(3):
            for model in models:
                model.zero_grad()
                boom_step(model, BATCHES[rank], armed=False)
        with pytest.raises(ArithmeticError if rank == raising else og.StepDiscardedError):
            boom_step(models[0], BATCHES[rank], armed=rank == raising)
        for model in models if next_is_the_same else models[::-1]:
            model.zero_grad()
            boom_step(model, BATCHES[rank], armed=False)
        assert_equal(models[0], pooled())

    run_on_lasting_groups(SITES, body)


def test_twin_models_in_another_order_are_noticed():
    def body(rank, group):
        models = [model_of(0), model_of(1)]
        for model in models:
            og.distribute(model, og.Dense(), group=group)
        for model in models if rank == 0 else reversed(models):
            loss_of(model, BATCHES[rank]).backward()

    for error in try_ranks(SITES, body):
        assert isinstance(error, RuntimeError)
        assert "something else than the header of this session" in str(error)


def test_exception_after_everything_was_ready(method):
    """A hook on the input raises on one site, after all its parameters had their gradients."""

    def fail(_):
        raise ArithmeticError("late")

    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        for _ in range(4):
            model.zero_grad()
            loss_of(model, BATCHES[rank].clone().requires_grad_()).backward()
        x = BATCHES[rank].clone().requires_grad_()
        if rank == 0:
            x.register_hook(fail)
        with pytest.raises(ArithmeticError if rank == 0 else og.StepDiscardedError):
            loss_of(model, x).backward()
        model.zero_grad()
        loss_of(model, BATCHES[rank]).backward()
        assert_equal(model, pooled())

    run_on_lasting_groups(SITES, body)


def test_detached_between_forward_and_backward_is_refused():
    def body(rank, group):
        model = model_of()
        session = og.distribute(model, og.DAD(always=True), group=group)
        loss = loss_of(model, BATCHES[rank])
        session.detach()
        with pytest.raises(RuntimeError, match=r"before session\.detach"):
            loss.backward()

    run_on_lasting_groups(SITES, body)


def test_converted_or_replaced_parameters_are_refused():
    def body(rank, group):
        for change in (
            lambda m: m.double(),
            lambda m: m.load_state_dict(model_of(1).state_dict(), assign=True),
        ):
            model = model_of()
            session = og.distribute(model, og.DAD(always=True), group=group)
            change(model)
            with pytest.raises(RuntimeError, match="replaced or converted"):
                loss_of(model, BATCHES[rank].to(model[2].weight.dtype))
            session.detach()

    run_on_lasting_groups(SITES, body)


def test_functional_call_computes_with_the_weights_it_is_given():
    def body(rank, group):
        model = model_of()
        og.distribute(model, og.DAD(always=True), group=group)
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model, weights, (BATCHES[rank],)).sum().backward()
        assert all(w.grad is not None for w in weights.values())
        assert all(p.grad is None for p in model.parameters())

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("when", ["no_sync around backward", "another backward between"])
def test_checkpoints_are_recomputed_as_they_were_computed(method, when):
    def forward(model, x):
        return (checkpoint(model, x, use_reentrant=False) ** 2).mean()

    def body(rank, group):
        model = model_of()
        session = og.distribute(model, method, group=group)
        losses = [forward(model, BATCHES[rank]), forward(model, 2 * BATCHES[rank])]
        if when.startswith("no_sync"):
            with session.no_sync():
                losses[0].backward()
        else:
            losses[0].backward()
        losses[1].backward()
        assert_equal(model, pooled(2))

    run_on_lasting_groups(SITES, body)


def test_float32_rows_are_not_rounded_because_of_another_forward():
    def body(rank, group):
        model = model_of()
        og.distribute(model, og.DAD(always=True, reveal="activations"), group=group)
        loss = loss_of(model, BATCHES[rank])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss_of(model, BATCHES[rank])
        loss.backward()
        assert_equal(model, pooled())

    run_on_lasting_groups(SITES, body)


def test_backward_to_some_parameters_only(method):
    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        expected = pooled()
        for _ in range(2):
            model.zero_grad()
            loss_of(model, BATCHES[rank]).backward(inputs=[model[2].weight])
            for name, p in model.named_parameters():
                assert (p.grad is None) == (name != "2.weight"), name
            assert relative_error(model[2].weight.grad, expected["2.weight"]) < 5e-6

    run_on_lasting_groups(SITES, body)


def test_a_failing_recorder_does_not_part_the_sites():
    class Full:
        def record(self, event):
            raise OSError("disk full")

    def body(rank, group):
        model = model_of()
        og.distribute(model, group=group, recorder=Full() if rank == 0 else None)
        for _ in range(2):
            model.zero_grad()
            loss_of(model, BATCHES[rank]).backward()
        assert_equal(model, pooled())

    with pytest.warns(UserWarning, match="disk full"):
        run_on_lasting_groups(SITES, body)


def test_buffers_do_not_pile_up():
    """Plans that change from step to step must not leave their buffers behind."""

    def body(rank, group):
        model = copy.deepcopy(nn.Sequential(LAYER_SQUARE, LAYER_SQUARE_TOO))
        session = og.distribute(model, og.DAD(), group=group)
        for step in range(30):
            model.zero_grad()
            model(torch.ones(1 + 7 * (step * 5 % 9), 40)).square().mean().backward()
        buckets = session._exchange.planner.packer._dense.values()
        held = sum(one.room.tensor.nbytes for b in buckets for one in b._buffers)
        return held, sum(p.nbytes for p in model.parameters())

    for held, size in run_on_lasting_groups(SITES, body):
        assert held <= 2 * 1.1 * size  # of two steps: the one before may be asked for


def test_unfreezing_later_is_refused():
    def body(rank, group):
        model = model_of()
        model[2].weight.requires_grad_(False)
        session = og.distribute(model, group=group)
        loss_of(model, BATCHES[rank]).backward()
        model[2].weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"'2.weight' was frozen"):
            loss_of(model, BATCHES[rank]).backward()
        session.detach()
        model.zero_grad()
        og.distribute(model, group=group)
        loss_of(model, BATCHES[rank]).backward()
        assert_equal(model, pooled())

    run_on_lasting_groups(SITES, body)


def test_freezing_later_leaves_the_gradient_alone(method):
    def body(rank, group):
        model = model_of()
        og.distribute(model, method, group=group)
        loss_of(model, BATCHES[rank]).backward()
        model[2].weight.requires_grad_(False)
        model.zero_grad()
        loss_of(model, BATCHES[rank]).backward()
        assert model[2].weight.grad is None
        expected = pooled()
        expected["2.weight"] = None
        assert_equal(model, expected)

    run_on_lasting_groups(SITES, body)


def test_recorder_sees_every_layer_and_step():
    def body(rank, group):
        model, recorder = model_of(), Events()
        session = og.distribute(model, og.DAD(always=True), group=group, recorder=recorder)
        for _ in range(2):
            loss_of(model, BATCHES[rank]).backward()
        layers = {event.layer: event for event in recorder.layers if event.step == 1}
        assert set(layers) == {"0.0.weight", "0.2.weight", "2.weight", "1.weight", "1.bias"}
        assert layers["0.2.weight"].rows == len(BATCHES[rank])
        assert layers["1.weight"].travels == "dense"
        payload = sum(event.sent_bytes for event in layers.values())
        assert payload < session.stats().sent_bytes < payload + 2000

    run_on_lasting_groups(SITES, body)


def test_a_delta_that_was_not_announced_is_an_error():
    """Rows that the others have not heard of would be missing from the mean without a word."""

    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        session = og.distribute(model, og.DAD(always=True), group=group)
        loss = model(torch.ones(3, 4)).sum()
        for layer in session._exchange.next_forward.layers:
            if rank == 0:
                layer._live[0] = type(layer._live[0])()
        error = RuntimeError if rank == 0 else og.StepDiscardedError
        said = "more deltas than it had announced" if rank == 0 else "the backward of site 0 raised"
        with pytest.raises(error, match=said):
            loss.backward()
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        session.detach()
        return model[0].weight.grad

    first, second = run_on_lasting_groups(2, body)
    assert first.equal(second)


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 3), nn.Embedding(20, 6)])
def test_a_backward_may_start_at_a_layer(layer):
    """Where nothing comes after a tap, autograd does not count it to what the backward reaches."""
    embeds = isinstance(layer, nn.Embedding)
    batches = [torch.randint(0, 20, (3, 8)) if embeds else torch.randn(2, 4, 8) for _ in range(2)]
    deltas = [torch.randn_like(layer(x)) for x in batches]

    def body(rank, group):
        model = copy.deepcopy(layer)
        session = og.distribute(model, og.DAD(always=True), group=group)
        model(batches[rank]).backward(deltas[rank])
        session.detach()
        return model.weight.grad

    expected = copy.deepcopy(layer)
    for x, delta in zip(batches, deltas, strict=True):
        expected(x).backward(delta / 2)
    for found in run_on_lasting_groups(2, body):
        torch.testing.assert_close(found, expected.weight.grad)
