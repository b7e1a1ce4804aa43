"""Chains and blocks that every site computes again."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import outergrad as og
from cases import relative_error
from outergrad.replay import streams
from ranks import run_on_lasting_groups, try_ranks

STEPS = 4


def loss(y):
    y = y[0] if isinstance(y, tuple) else y
    y = y.data if isinstance(y, PackedSequence) else y
    return (y * y).mean() + y.sin().mean()


def train(original, method, inputs, rank, group, steps=STEPS):
    replica = copy.deepcopy(original)
    session = og.distribute(replica, method, group=group)
    for _ in range(steps):
        replica.zero_grad()
        loss(replica(*inputs[rank])).backward()
    session.detach()
    return {name: p.grad for name, p in replica.named_parameters()}, session


def pooled(original, inputs):
    model = copy.deepcopy(original).double()
    for batch in inputs:
        doubled = [_double(t) for t in batch]
        (loss(model(*doubled)) / len(inputs)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _double(t):
    if isinstance(t, PackedSequence):
        return t.double()
    return t.double() if t.is_floating_point() else t


def by_ddp(original, inputs):
    """What DistributedDataParallel leaves: the mean of what each site computes in float32."""
    model = copy.deepcopy(original)
    for batch in inputs:
        (loss(model(*batch)) / len(inputs)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def whole_error(found, expected):
    """Of all gradients as one vector."""
    names = [name for name, gradient in expected.items() if gradient is not None]
    flat = [torch.cat([g[name].double().flatten() for name in names]) for g in (found, expected)]
    return relative_error(*flat)


def check(original, method, inputs, travels=None):
    """Exact on all sites, the same to the bit."""
    expected = pooled(original, inputs)
    peer = whole_error(by_ddp(original, inputs), expected)

    def body(rank, group):
        return train(original, method, inputs, rank, group)

    results = run_on_lasting_groups(len(inputs), body)
    for gradients, session in results:
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 5e-6, name
            assert gradient is None or gradient.equal(results[0][0][name]), name
        error = whole_error(gradients, expected)
        assert error <= 2 * peer, f"{error:.1e}, DDP {peer:.1e}"
        for name in travels or ():
            lines = {line.parameter: line.travels for line in session.coverage()}
            assert lines[name] == "replayed", lines
    return results


def rows(sites, *shape):
    return [(torch.randn(4 + 3 * rank, *shape),) for rank in range(sites)]


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "leaky": nn.LeakyReLU(0.2),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.3, 0.7),
    "hardsigmoid": nn.Hardsigmoid(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "softplus": nn.Softplus(2.0),
    "elu": nn.ELU(0.7),
    "celu": nn.CELU(0.8),
    "selu": nn.SELU(),
    "logsigmoid": nn.LogSigmoid(),
    "softsign": nn.Softsign(),
    "identity": nn.Identity(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "prelu": nn.PReLU(),
    "layer norm": nn.LayerNorm(12),
    "norm and function": nn.Sequential(nn.LayerNorm(12), nn.Tanh()),
    "two functions": nn.Sequential(nn.Tanh(), nn.ReLU()),
    "none": nn.Sequential(),
}


def deep(activation, layers=6, width=12):
    parts = [nn.Linear(10, width)]
    for _ in range(layers - 2):
        parts += [copy.deepcopy(activation), nn.Linear(width, width)]
    return nn.Sequential(*parts, copy.deepcopy(activation), nn.Linear(width, 7), nn.Tanh())


@pytest.mark.parametrize("inputs", ["canonical", "raw"])
@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_chain_is_exact_with_every_function_between(name, sites, inputs):
    torch.manual_seed(1)
    model = deep(ACTIVATIONS[name])
    whole = [n for n, _ in model.named_parameters()]
    inside = [n for n in whole if not n.startswith(("0.", "1."))]
    travels = inside if inputs == "canonical" else whole
    check(model, og.EDAD(always=True, inputs=inputs), rows(sites, 10), travels)


CONVOLUTIONS = {
    "1d": lambda: nn.Sequential(
        nn.Conv1d(3, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 2, stride=2), nn.Tanh(), nn.Conv1d(4, 5, 3)
    ),
    "2d, pooled, flattened": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 8, 3, groups=2, bias=False), nn.GroupNorm(2, 8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 5, 3, dilation=2, padding=2), nn.Sigmoid(), nn.Flatten()),
        nn.Sequential(nn.Linear(45, 9), nn.ELU(), nn.Linear(9, 4)),
    ),
    "3d": lambda: nn.Sequential(
        *(nn.Conv3d(3, 4, 2), nn.ReLU(), nn.Conv3d(4, 3, 2), nn.Softplus(), nn.Conv3d(3, 3, 1))
    ),
}


@pytest.mark.parametrize("inputs", ["canonical", "raw"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_chain_of_convolutions_is_exact(name, inputs):
    torch.manual_seed(1)
    model = CONVOLUTIONS[name]()
    sizes = {"1d": (3, 16), "3d": (3, 5, 5, 5)}.get(name, (3, 10, 10))
    inside = [n for n, p in model.named_parameters() if n not in ("0.weight", "0.bias")][2:]
    check(model, og.EDAD(always=True, inputs=inputs), rows(2, *sizes), inside)


class Stack(nn.Module):
    """Pre-norm transformer blocks over embedded ids."""

    def __init__(self, blocks=3, width=16, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(self.norm(x))


def ids(sites, length=5):
    return [(torch.randint(0, 20, (3 + rank, length)),) for rank in range(sites)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sites", [2, 3])
def test_a_stack_of_transformer_blocks_is_exact(sites, masked):
    torch.manual_seed(1)
    model, inputs = Stack(), ids(sites)
    if masked:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        inputs = [(*batch, mask) for batch in inputs]
    travels = [name for name, _ in model.layers.named_parameters(prefix="layers")]
    check(model, og.EDAD(blocks=["layers.*"], always=True), inputs, travels)


class Seeds:
    """A seed for every use of a block, known beforehand: by thread, in the order of forward."""

    def __init__(self):
        self.local = threading.local()

    def __call__(self, device):
        self.local.count = getattr(self.local, "count", -1) + 1
        return 100 * self.local.rank + self.local.count


@pytest.mark.parametrize("sites", [2, 3])
def test_dropout_is_drawn_again(sites, monkeypatch):
    """Every site draws the masks of all sites: the gradient is that of those masks."""
    torch.manual_seed(1)
    model, inputs = Stack(dropout=0.2), ids(sites)
    seeds = Seeds()
    monkeypatch.setattr(streams, "next_seed", seeds)

    def body(rank, group):
        seeds.local.rank = rank
        return train(model, og.EDAD(blocks=["layers.*"], always=True), inputs, rank, group, 3)[0]

    found = run_on_lasting_groups(sites, body)
    whole = copy.deepcopy(model).double()
    for rank, (batch,) in enumerate(inputs):
        (loss(seeded(whole, batch, range(100 * rank + 6, 100 * rank + 9))) / sites).backward()
    for gradients in found:
        for name, p in whole.named_parameters():
            assert relative_error(gradients[name], p.grad) < 5e-6, name
            assert gradients[name].equal(found[0][name])


def seeded(model, batch, seeds):
    """The forward of a stack with a seed per block."""
    handles = [
        layer.register_forward_pre_hook(lambda *_, seed=seed: torch.manual_seed(seed) and None)
        for layer, seed in zip(model.layers, seeds, strict=True)
    ]
    y = model(batch)
    for handle in handles:
        handle.remove()
    return y


def test_dropout_in_a_chain_is_drawn_again(monkeypatch):
    torch.manual_seed(1)
    parts = [nn.Linear(10, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 11), nn.Dropout(0.3)]
    model = nn.Sequential(*parts, nn.Tanh(), nn.Linear(11, 5))
    inputs, seeds = rows(2, 10), Seeds()
    monkeypatch.setattr(streams, "next_seed", seeds)

    def body(rank, group):
        seeds.local.rank = rank
        return train(model, og.EDAD(always=True, inputs="raw"), inputs, rank, group, 1)[0]

    found = run_on_lasting_groups(2, body)
    whole = copy.deepcopy(model).double()
    for rank, (x,) in enumerate(inputs):
        y = x.double()
        for k, part in enumerate(whole):
            if k in (1, 4):  # what follows a layer is drawn from one seed
                torch.manual_seed(100 * rank + (k == 4))
            y = part(y)
        (loss(y) / 2).backward()
    for gradients in found:
        for name, p in whole.named_parameters():
            assert relative_error(gradients[name], p.grad) < 5e-6, name


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers_is_drawn_again(kind, monkeypatch):
    torch.manual_seed(1)
    model, seeds = kind(6, 5, 3, dropout=0.3, bidirectional=True), Seeds()
    inputs = [(torch.randn(4, 3 + rank, 6),) for rank in range(2)]
    monkeypatch.setattr(streams, "next_seed", seeds)

    def body(rank, group):
        seeds.local.rank = rank
        return train(model, og.EDAD(always=True, inputs="raw"), inputs, rank, group, 1)[0]

    found = run_on_lasting_groups(2, body)
    whole = copy.deepcopy(model).double()
    for rank, (x,) in enumerate(inputs):
        torch.manual_seed(100 * rank)
        (loss(whole(x.double())) / 2).backward()
    for gradients in found:
        for name, p in whole.named_parameters():
            assert relative_error(gradients[name], p.grad) < 5e-6, name


def test_a_block_without_dropout_changes_no_random_number():
    before = torch.get_rng_state()
    with streams.recorded(torch.device("cpu")) as draws:
        pass
    assert draws.seed is None
    assert torch.get_rng_state().equal(before)
    with streams.recorded(torch.device("cpu")) as draws:
        first = torch.rand(3)
    assert not torch.get_rng_state().equal(before)
    with streams.replayed(draws.seed, torch.device("cpu")):
        assert torch.rand(3).equal(first)


def test_blocks_that_follow_each_other_send_one_delta():
    torch.manual_seed(1)
    model, inputs = Stack(), ids(2)

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(blocks=["layers.*"], always=True), group=group)
        sent = []
        for _ in range(3):
            replica.zero_grad()
            loss(replica(*inputs[rank])).backward()
            sent.append(session.stats().layers["layers.0 ... layers.2"].sent_bytes)
        session.detach()
        return sent

    for rank, sent in enumerate(run_on_lasting_groups(2, body)):
        tensor = 4 * inputs[rank][0].numel() * 16
        assert 6 * tensor < sent[0] < 6 * tensor + 2000  # not known yet who reads what
        assert sent[1] == sent[2]
        assert 2 * tensor < sent[1] < 2 * tensor + 2000


class Forked(nn.Module):
    """The output of the first block goes to the second and, if asked, past it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.stem = nn.Linear(6, 8)

    def forward(self, x, past):
        a = self.first(torch.tanh(self.stem(x)))
        b = self.second(a)
        return b + a if bool(past) else b


def test_an_output_that_is_read_elsewhere_too_keeps_its_own_delta():
    torch.manual_seed(1)
    inputs = [(torch.randn(4, 6), torch.tensor(True)) for _ in range(2)]
    check(Forked(), og.EDAD(blocks=["first", "second"], always=True), inputs)


def test_what_was_read_once_and_is_read_twice_voids_one_step():
    torch.manual_seed(1)
    model = Forked()
    batches = [torch.randn(4, 6) for _ in range(2)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        method = og.EDAD(blocks=["first", "second"], always=True)
        session = og.distribute(replica, method, group=group)
        for step in range(5):
            replica.zero_grad()
            past = torch.tensor(step >= 3 and rank == 0)
            y = loss(replica(batches[rank], past))
            if step != 3:
                y.backward()
            elif rank == 0:
                with pytest.raises(RuntimeError, match=r"'first' was read by 'second' alone"):
                    y.backward()
            else:
                with pytest.raises(og.StepDiscardedError):
                    y.backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    inputs = [(batches[rank], torch.tensor(rank == 0)) for rank in range(2)]
    expected = pooled(model, inputs)
    for gradients in run_on_lasting_groups(2, body):
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 5e-6, name


RECURRENT = {
    "rnn": lambda: nn.RNN(6, 5, nonlinearity="relu"),
    "gru, 2 layers, bidirectional": lambda: nn.GRU(6, 5, 2, bidirectional=True),
    "lstm, 2 layers, bidirectional": lambda: nn.LSTM(6, 5, 2, bidirectional=True),
    "lstm, projections": lambda: nn.LSTM(6, 5, batch_first=True, proj_size=3),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_are_replayed_by_raw_dad(name, sites, packed):
    torch.manual_seed(1)
    model = RECURRENT[name]()
    inputs = [torch.randn(4 + rank, 3 + rank, 6) for rank in range(sites)]
    if packed:
        lengths = [torch.randint(1, x.shape[0 - model.batch_first] + 1, ()) for x in inputs]
        inputs = [pack(x, n, model.batch_first) for x, n in zip(inputs, lengths, strict=True)]
    names = [n for n, _ in model.named_parameters()]
    check(model, og.DAD(reveal="activations", always=True), [(x,) for x in inputs], names)


def pack(x, shortest, batch_first):
    batch, time = x.shape[not batch_first], x.shape[batch_first]
    lengths = torch.linspace(time, min(int(shortest), time), batch).long().clamp(min=1).flip(0)
    return pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)


class Cross(nn.Module):
    """A block that is given tuples, keywords and plain values, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, pair, *, scale, how, extra=None):
        a, b = pair
        y = (a @ self.weight) * scale
        y = y.tanh() if how == "tanh" else y
        return {"y": y + b @ self.weight, "shape": y.shape, "ids": extra}


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.cross = nn.Linear(5, 6), Cross()

    def forward(self, x, scale):
        a, b = self.stem(x), torch.relu(self.stem(-x))
        out = self.cross((a, b), scale=scale, how="tanh", extra=torch.arange(3))
        assert out["shape"] == a.shape
        assert out["ids"].equal(torch.arange(3))
        return out["y"]


def test_tuples_keywords_and_plain_values_travel_too():
    torch.manual_seed(1)
    inputs = [(x, torch.rand(6)) for (x,) in rows(2, 5)]
    check(Around(), og.EDAD(blocks=["cross"], always=True), inputs, ["cross.weight"])


def test_what_cannot_be_sent_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x, helper):
            return self.inner(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.odd = nn.Linear(4, 4), Odd()

        def forward(self, x):
            return self.odd(self.stem(x), object())

    def body(rank, group):
        model = Outer()
        og.distribute(model, og.EDAD(blocks=["odd"], always=True), group=group)
        with pytest.raises(TypeError, match=r"block 'odd': it was called with a object"):
            model(torch.randn(3, 4))

    run_on_lasting_groups(2, body)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.stem(x))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        return self.inner(self.stem(x))


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


REFUSED = {
    "no such module": (lambda: nn.Sequential(nn.Linear(4, 4)), "7", "matches no module"),
    "running statistics": (Norm, "norm", "keeps running statistics"),
    "tied": (tied, "2", "is tied to a parameter outside"),
    "no parameters": (tied, "1", "no trained parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_again_is_refused_by_name(name):
    build, pattern, message = REFUSED[name]

    def body(rank, group):
        og.distribute(build(), og.EDAD(blocks=[pattern]), group=group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


def test_a_block_that_changes_a_buffer_is_refused_by_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 4), Block())
        og.distribute(model, og.EDAD(blocks=["1"], always=True), group=group)
        with pytest.raises(RuntimeError, match=r"block '1': its forward changes the buffer"):
            model(torch.randn(3, 4))

    run_on_lasting_groups(2, body)


def test_what_enters_the_model_is_not_sent_unasked():
    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))
        og.distribute(model, og.EDAD(blocks=["0"], always=True), group=group)
        with pytest.raises(ValueError, match="block '0' reads what enters the model"):
            model(torch.randn(3, 4))

    run_on_lasting_groups(2, body)


class HeadFirst(nn.Module):
    """Registers its layers in another order than it calls them in."""

    def __init__(self):
        super().__init__()
        self.head, self.lstm = nn.Linear(5, 4), nn.LSTM(6, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize("first", ["lstm", "head"])
def test_a_recurrent_layer_on_the_data_is_not_replayed_unasked(first):
    torch.manual_seed(1)
    model = nn.LSTM(6, 5) if first == "lstm" else HeadFirst()
    inputs = [(torch.randn(4, 3, 6),) for _ in range(2)]
    names = [n for n, _ in model.named_parameters() if "_l0" in n]
    for _, session in check(model, og.EDAD(always=True), inputs):
        lines = {line.parameter: line for line in session.coverage()}
        assert {lines[n].travels for n in names} == {"factors" if first == "lstm" else "dense"}
        if first == "head":
            assert "reads what enters the model" in lines["lstm.weight_ih_l0"].why
    check(model, og.EDAD(always=True, inputs="raw"), inputs, names)


BYTES = {
    "edad": (og.EDAD(always=True), og.DAD(always=True), 0.62),
    "edad raw": (
        *(og.EDAD(always=True, inputs="raw"), og.DAD(always=True, reveal="activations")),
        0.56,
    ),
}


def sent(model, method, inputs):
    def body(rank, group):
        return train(model, method, inputs, rank, group, 3)[1].stats().sent_bytes

    return run_on_lasting_groups(len(inputs), body)[0]


@pytest.mark.parametrize("name", BYTES)
def test_a_deep_chain_takes_little_more_than_half_of_the_bytes(name):
    ours, other, most = BYTES[name]
    layers = [m for _ in range(10) for m in (nn.Linear(256, 256), nn.ReLU())]
    model, inputs = nn.Sequential(*layers[:-1]), [(torch.randn(32, 256),) for _ in range(2)]
    assert sent(model, ours, inputs) <= most * sent(model, other, inputs)


def test_a_stack_of_blocks_takes_a_fifth_of_the_bytes():
    model, inputs = Stack(4, 64), [(torch.randint(0, 20, (8, 16)),) for _ in range(2)]
    ours = sent(model, og.EDAD(blocks=["layers.*"], always=True), inputs)
    assert ours <= 0.2 * sent(model, og.DAD(always=True, reveal="activations"), inputs)


WIRES = {
    "bf16": (og.wire.BF16(), 0.02, 0.52),
    "int8": (og.wire.Int8(), 0.03, 0.28),
    "all that there is": (og.wire.TopK(1.0), 5e-6, 1.6),
}


@pytest.mark.parametrize("name", WIRES)
def test_activations_and_deltas_may_be_encoded(name):
    """Alike on all sites, with the codec's error and bytes."""
    codec, most_error, most_bytes = WIRES[name]
    torch.manual_seed(1)
    model, inputs = Stack(2, 64), ids(2, 16)
    expected = pooled(model, inputs)

    def body(rank, group):
        found = {}
        for wire in ((), codec):
            method = og.EDAD(blocks=["layers.*"], always=True, wire=wire)
            gradients, session = train(model, method, inputs, rank, group)
            found[wire] = gradients, session.stats().layers["layers.0 ... layers.1"].sent_bytes
        return found

    results = run_on_lasting_groups(2, body)
    gradients, sent = results[0][codec]
    assert 0 < whole_error(gradients, expected) < most_error
    assert sent < most_bytes * results[0][()][1]
    for name, gradient in results[1][codec][0].items():
        assert gradient.equal(gradients[name]), name


def test_no_more_is_sent_than_dense_would_be():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))

    def body(rank, group):
        _, session = train(model, og.EDAD(), [(torch.randn(50, 6),)] * 2, rank, group)
        return {line.travels for line in session.coverage()}

    assert run_on_lasting_groups(2, body) == [{"dense"}] * 2


def test_batches_that_change_need_no_special_case():
    """Few rows, many, few again, none on a site: replayed, dense, replayed."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    counts = [(3, 4), (3, 4), (90, 4), (90, 4), (3, 2), (3, 2), (0, 5), (2, 2)]
    batches = [[torch.randn(n, 12) for n in pair] for pair in counts]

    def sum_loss(y):
        return (y * y).sum() / 10

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(), group=group)
        found, ways = [], []
        for batch in batches:
            replica.zero_grad()
            sum_loss(replica(batch[rank])).backward()
            found.append({n: p.grad.clone() for n, p in replica.named_parameters()})
            ways.append(session.coverage()[2].travels)
        session.detach()
        return found, ways

    for found, ways in run_on_lasting_groups(2, body):
        assert ways[0] == ways[1] == ways[-1] == "replayed"
        assert ways[2] == ways[3] == "dense"
        for batch, gradients in zip(batches, found, strict=True):
            whole = copy.deepcopy(model).double()
            for x in batch:
                (sum_loss(whole(x.double())) / 2).backward()
            for name, p in whole.named_parameters():
                assert relative_error(gradients[name], p.grad) < 5e-6, name


def test_accumulated_gradients_count():
    torch.manual_seed(1)
    model = Stack(2)
    batches = [[b[0] for b in ids(2)] for _ in range(3)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        method = og.EDAD(blocks=["layers.*"], always=True)
        session = og.distribute(replica, method, group=group)
        loss(replica(batches[0][rank])).backward()
        replica.zero_grad()
        with session.no_sync():
            loss(replica(batches[1][rank])).backward()
        loss(replica(batches[2][rank])).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    whole = copy.deepcopy(model).double()
    for batch in batches[1:]:
        for x in batch:
            (loss(whole(x)) / 2).backward()
    for gradients in run_on_lasting_groups(2, body):
        for name, p in whole.named_parameters():
            assert relative_error(gradients[name], p.grad) < 5e-6, name


def test_a_penalty_on_a_weight_of_a_block_is_shared_too():
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    inputs = rows(2, 6)

    def value(m, x):
        return loss(m(x)) + m[2].weight.square().sum() * x.mean()

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(always=True), group=group)
        for _ in range(3):
            replica.zero_grad()
            value(replica, inputs[rank][0]).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    whole = copy.deepcopy(model).double()
    for (x,) in inputs:
        (value(whole, x.double()) / 2).backward()
    for gradients in run_on_lasting_groups(2, body):
        for name, p in whole.named_parameters():
            assert relative_error(gradients[name], p.grad) < 5e-6, name


def test_a_hook_on_a_layer_of_a_chain_is_called():
    def body(rank, group):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        session = og.distribute(model, og.EDAD(always=True), group=group)
        seen = []
        model[2].register_forward_hook(lambda *_: seen.append(1))
        for _ in range(2):
            loss(model(torch.randn(3, 6))).backward()
        session.detach()
        return len(seen)

    assert run_on_lasting_groups(2, body) == [2, 2]


def test_nothing_of_a_step_is_kept():
    """Activations and deltas of blocks are let go of when backward has returned."""

    def body(rank, group):
        model = Stack()
        session = og.distribute(model, og.EDAD(blocks=["layers.*"], always=True), group=group)
        kept = []
        model.layers[0].register_forward_hook(lambda _, args, out: kept.append(weakref.ref(out)))
        for _ in range(3):
            loss(model(torch.randint(0, 20, (3, 5)))).backward()
        session.detach()
        gc.collect()
        return [tensor() is None for tensor in kept]

    assert all(all(gone) for gone in run_on_lasting_groups(2, body))


def test_detach_leaves_the_model_plain():
    def body(rank, group):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), Stack())
        before = [type(m) for m in model.modules()]
        session = og.distribute(model, og.EDAD(blocks=["4.layers.*"]), group=group)
        assert [type(m) for m in model.modules()] != before
        session.detach()
        assert [type(m) for m in model.modules()] == before

    run_on_lasting_groups(2, body)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="blocks='layers'"):
        og.EDAD(blocks="layers")
    with pytest.raises(ValueError, match="inputs='none'"):
        og.EDAD(inputs="none")
    with pytest.raises(ValueError, match="every=2; use 1 with blocks="):
        og.EDAD(blocks=["a"], every=2)
    assert og.EDAD(blocks=["a"]) == og.EDAD(blocks=("a",))


def test_a_sequential_that_is_iterated_travels_otherwise():
    """Its chain never runs: right all the same, and together with the rest from the second step."""
    torch.manual_seed(1)
    model, inputs = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), rows(2, 6)

    def forward(replica, x):
        for layer in replica:
            x = layer(x)
        return x

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(always=True), group=group)
        for _ in range(3):
            replica.zero_grad()
            loss(forward(replica, inputs[rank][0])).backward()
        session.detach()
        lines = {line.parameter: line for line in session.coverage()}
        return {n: p.grad for n, p in replica.named_parameters()}, lines["2.weight"]

    expected = pooled(model, inputs)
    for gradients, line in run_on_lasting_groups(2, body):
        assert line.travels == "dense"
        assert line.why == "a parameter is also used outside the block"
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 5e-6, name
