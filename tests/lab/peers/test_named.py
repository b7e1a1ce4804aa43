"""Peers by their names: at the command line, in trainings, in the bench."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.optim import SGD
from typer.testing import CliRunner

from outergrad.launch.errors import RecipeError
from outergrad.tools.commands.app import app
from outergrad_lab.peers.named import PEERS, attach_of, is_peer, sites_differ
from ranks import run_on_lasting_groups

SMALL = ["--epochs", "1", "--widths", "8", "--sites", "2", "--simulate"]

SELDOM = ["sparseloco", "muloco", "lordo"]
"""Those that exchange every so many steps."""


@pytest.mark.parametrize("name", PEERS)
def test_a_replica_counts_what_a_peer_sends(name):
    def body(rank, group):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        replica = attach_of(f"{name}:every=2" if name in SELDOM else name)(model, group)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        replica.finish()
        replica.close()
        assert replica.peer is not None
        assert replica.total_sent_bytes(4) == replica.peer.sent_bytes > 0
        assert replica.sent_bytes == round(replica.peer.sent_bytes / 4)
        optimizer.step()
        assert replica.peer.steps == 4

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize("name", PEERS)
def test_a_training_says_its_bytes(name, tmp_path):
    log = tmp_path / "log"
    method = f"{name}:every=4" if name in SELDOM else name
    done = CliRunner().invoke(app, ["train", *SMALL, "--method", method, "--log", str(log)])
    assert done.exit_code == 0, done.output
    last = json.loads(log.read_text().splitlines()[-1])
    assert 0 < last["sent_bytes"] < 10_000
    assert last["loss"] < 2.4


def test_a_training_goes_on_from_a_checkpoint_to_the_bit(tmp_path):
    log = tmp_path / "log"

    def losses(epochs: int, *options: str) -> list[tuple[float, int]]:
        how = ["train", *SMALL[2:], "--epochs", str(epochs), "--method", "acp-sgd", *options]
        done = CliRunner().invoke(app, [*how, "--log", str(log)])
        assert done.exit_code == 0, done.output
        lines = map(json.loads, log.read_text().splitlines()[1:])
        return [(line["loss"], line["sent_bytes"]) for line in lines]

    saved = "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "15"
    losses(1, *saved)
    assert losses(2, *saved)[-1] == losses(2)[-1]


REFUSED = {
    "near": ("dmo", r"not 'dmo' \(did you mean demo\?\)"),
    "setting": ("dion:rnk=2", r"there is no setting 'rnk' \(did you mean rank\?\)"),
    "value": ("dion:rank=0", "Dion: rank=0; use 1 or more"),
}


@pytest.mark.parametrize(("name", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_name(name, said):
    with pytest.raises(RecipeError, match=said):
        attach_of(name)


def test_parts_of_a_site_alone_are_refused():
    with pytest.raises(RecipeError, match="--local and --joint do not go with --method demo"):
        attach_of("demo", local=["0.*"])


def test_going_on_with_fewer_sites_is_refused():
    options = ["--method", "dion", "--min-sites", "1", "--checkpoint", "x"]
    done = CliRunner().invoke(app, ["train", *options])
    assert done.exit_code == 2
    assert "--min-sites does not go with --method dion" in done.stderr


def test_planning_knows_no_peers():
    options = ["--model", "mlp", "--link", "1gbit", "--methods", "demo"]
    done = CliRunner().invoke(app, ["plan", *options])
    assert done.exit_code == 2
    assert "not 'demo'" in done.stderr


@pytest.mark.parametrize(
    ("name", "peer", "differ"),
    [
        ("demo:bucket=True", True, False),
        ("sparseloco:every=5", True, True),
        ("muloco:every=5", True, True),
        ("lordo", True, True),
        ("dion2", True, False),
        ("ef21-muon", True, False),
        ("sparta", True, True),
        ("local-steps:k=5", False, True),
        ("dad", False, False),
    ],
)
def test_families(name, peer, differ):
    assert is_peer(name) is peer
    assert sites_differ(name) is differ
