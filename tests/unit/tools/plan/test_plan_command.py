"""``outergrad plan`` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import outergrad as og
from covering import LONG
from forked import forked_processes
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.record.stats import Stats
from outergrad.tools.commands.app import app
from outergrad.tools.commands.plan import COMPARED
from outergrad.tools.plan.layers import LayerBytes, LayerPlan
from outergrad.tools.plan.measure import PAIRS, WARM_UP, Planned, Turn, method_of
from outergrad.tools.plan.network import network_of
from outergrad.tools.plan.table import shortened, why_equal_layers_differ
from ranks import run_on_lasting_groups

MISSING = what_is_missing(ShapedLink(rate_bit_per_s=1e8), 3)
shaped = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

MINE = textwrap.dedent("""
    import torch
    from torch import nn

    number = 3
    hidden = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 60), nn.Linear(60, 9))

    def small(rows):
        return hidden, torch.randn(rows, 50)

    def named(rows):
        return nn.Bilinear(5, 6, 7), {"input1": torch.randn(rows, 5), "input2": torch.ones(rows, 6)}

    def recurrent(rows):
        return nn.GRU(5, 6), (torch.randn(3, rows, 5),)

    def model_only(rows):
        return nn.Linear(2, 2)

    def list_of_both(rows):
        return [nn.Linear(2, 2), torch.ones(rows, 2)]

    def no_model(rows):
        return torch.ones(rows, 2), nn.Linear(2, 2)

    def inputs_of_words(rows):
        return nn.Linear(2, 2), "words"

    def wrong_inputs(rows):
        return nn.Linear(2, 2), torch.ones(rows, 3)

    def raises(rows):
        raise KeyError("no data")

    def no_gradient(rows):
        return nn.Flatten(), torch.ones(rows, 3)

    def normed(rows):
        model = nn.Sequential(nn.Linear(50, 64), nn.BatchNorm1d(64), nn.Linear(64, 9))
        return model, torch.randn(rows, 50)

    def frozen(rows):
        return nn.Linear(2, 2).requires_grad_(False), torch.ones(rows, 2)
""")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a module of the user's."""
    (tmp_path / "my_models.py").write_text(MINE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_models", "my_broken"):
        sys.modules.pop(name, None)


def invoke(*args: str):
    return CliRunner().invoke(app, ["plan", "--seconds", "0", *args])


def planned(path, *args: str):
    """What the command said, and its JSON."""
    result = invoke("--json", str(path / "plan.json"), *args)
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    return result.stdout, json.loads((path / "plan.json").read_text())


MISTAKES = {
    "model": (["--model", "resnet"], "--model must be one of mlp, deep-mlp, wide-mlp"),
    "module": (["--model", "nowhere:f", "--rows", "2"], "cannot import 'nowhere': ModuleNotFound"),
    "broken module": (["--model", "my_broken:f", "--rows", "2"], "ZeroDivisionError: division"),
    "attribute": (["--model", "my_models:f", "--rows", "2"], "no attribute 'f'"),
    "number": (
        ["--model", "my_models:number", "--rows", "2"],
        "of type int, which cannot be called",
    ),
    "no rows": (["--model", "my_models:small"], "my_models:small needs --rows"),
    "model only": (["--model", "my_models:model_only", "--rows", "2"], "returned only a module"),
    "list": (["--model", "my_models:list_of_both", "--rows", "2"], "returned a list: return"),
    "no model": (["--model", "my_models:no_model", "--rows", "2"], "a Tensor as its model"),
    "words": (["--model", "my_models:inputs_of_words", "--rows", "2"], "a str as inputs: return"),
    "inputs": (["--model", "my_models:wrong_inputs", "--rows", "2"], "raised RuntimeError: mat1"),
    "raises": (["--model", "my_models:raises", "--rows", "2"], "raised KeyError: 'no data'"),
    "no gradient": (["--model", "my_models:no_gradient", "--rows", "2"], "no tensor with a grad"),
    "frozen": (["--model", "my_models:frozen", "--rows", "2"], "no tensor with a gradient"),
    "rows": (["--rows", "0"], "--rows must be 1 or more, not 0"),
    "sites": (["--sites", "1"], "--sites must be 2 or more, not 1"),
    "link": (["--link", "fast"], "--link 'fast' cannot be read"),
    "loopback": (["--link", "loopback"], "--link loopback has no rate"),
    "latency": (["--latency", "20"], "--latency '20' cannot be read"),
    "long latency": (["--latency", "20s"], "20 s cannot be had"),
    "unknown method": (["--methods", "magic"], "--methods must be one of"),
    "not ours": (["--methods", "ddp"], "--methods ddp cannot be planned: use dense, dad,"),
    "twice": (["--methods", "dad,dad"], "--methods must name each method once"),
    "setting": (["--methods", "rank-dad:rank=0"], "rank"),
    "every": (["--methods", "dad:every=2"], "--methods dad:every=2: leave out every"),
    "method on model": (
        ["--methods", "edad:blocks=nothing"],
        "--methods edad:blocks=nothing: EDAD: blocks='nothing' matches no module",
    ),
    "transport": (["--transport", "hub"], "--transport must be torch, star or module:factory"),
    "hub": (["--hub-link", "1gbit"], "--hub-link: torch.distributed has no hub"),
    "rate of a hub": (["--transport", "star", "--hub-link", "fast"], "--hub-link 'fast' cannot be"),
    "json": (["--rows", "1", "--methods", "dad", "--json", "nowhere/a.json"], "--json nowhere/a"),
}


@pytest.mark.parametrize(("args", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(args, said, mine):
    result = invoke(*args)
    assert result.exit_code == 2, result.stdout
    line = result.stderr.splitlines()[-1]
    assert line.startswith("outergrad: ")
    assert said in line
    assert "Traceback" not in result.stderr


def test_a_recipe_is_planned(tmp_path):
    said, found = planned(tmp_path, "--rows", "4", "--methods", "dad,rank-dad-1")
    said = " ".join(said.split())
    dense, dad, low = found["methods"].values()
    assert dense["exact"]
    assert dad["exact"]
    assert not low["exact"]
    (first, *_) = found["layers"]
    assert (first["name"], first["shape"], first["rows"]) == ("0", [1024, 784], 4)
    assert first["sent"]["dad"]["marks"] == "f"
    assert 440 < first["break_even"][0] == first["break_even"][1] < 450
    assert dad["wire_bytes"] == pytest.approx(1.07 * dad["sent_bytes"], rel=0.01)
    assert dad["step_s"][0] > 8 * dad["wire_bytes"] / 1e8
    assert "Of the exact methods dad is the fastest" in said
    assert "Of the approximate methods rank-dad-1 is the fastest" in said
    assert dad["others_learn"] == "this site's gradient"
    assert "The other sites learn this site's gradient, its largest parts" in said
    assert "Exact factors are fewer bytes in 3 of 3 layers" in said


def test_entries_are_planned(tmp_path):
    said, found = planned(
        tmp_path, "--rows", "4", "--methods", "dad,sparse:density=0.02", "--layers"
    )
    said = " ".join(said.split())
    sparse, first = found["methods"]["sparse:density=0.02"], found["layers"][0]
    assert not sparse["exact"]
    assert first["sent"]["sparse:density=0.02"]["marks"] == "s"
    assert first["sent"]["sparse:density=0.02"]["sent_bytes"] == pytest.approx(
        5 * 0.02 * 1024 * 784 + 4 * 1024, rel=0.03
    )
    assert "Of the approximate methods sparse:density=0.02 is the fastest" in said
    assert "s: sparse" in said


def test_bytes_of_layers_add_up_to_those_of_the_step(tmp_path):
    _, found = planned(tmp_path, "--model", "deep-mlp", "--rows", "4", "--sites", "3")
    assert set(found["methods"]) > {"dense", "dad", "edad"}
    for name, method in found["methods"].items():
        cells = [layer["sent"].get(name) for layer in found["layers"]]
        total = sum(cell["sent_bytes"] or 0 for cell in cells if cell)
        assert total <= method["sent_bytes"] <= total + 1000
    (chain,) = (layer for layer in found["layers"] if "..." in layer["name"])
    assert list(chain["sent"]) == ["edad"]
    inside = [layer["sent"]["edad"] for layer in found["layers"][1:3]]
    assert inside == [{"sent_bytes": None, "marks": "r"}] * 2


FACTORIES = {
    "small": (["0", "2", "3"], [[60, 50], [60, 60], [9, 60]], [3, 3, 3]),
    "named": (["weight", "bias"], [[7, 5, 6], [7]], [None, None]),
}


@pytest.mark.parametrize(("name", "layers"), FACTORIES.items(), ids=FACTORIES)
def test_a_model_of_the_users_own_is_planned(mine, name, layers):
    args = ["--model", f"my_models:{name}", "--rows", "3", "--methods", "dense,dad,rank-dad-1"]
    _, found = planned(mine, *args)
    lines = found["layers"]
    assert [line["name"] for line in lines] == layers[0]
    assert [line["shape"] for line in lines] == layers[1]
    assert [line["rows"] for line in lines] == layers[2]
    assert (found["model"], found["rows"]) == (f"my_models:{name}", 3)


def test_a_model_that_is_one_layer_is_planned(mine):
    args = ["--model", "my_models:recurrent", "--rows", "3", "--methods", "dense,edad"]
    _, found = planned(mine, *args)
    assert found["methods"]["dense"]["sent_bytes"] > 0


def test_many_methods_make_several_tables(tmp_path):
    ranks = ",".join(f"rank-dad:rank={rank}:reduce=two_way" for rank in range(1, 9))
    said, found = planned(tmp_path, "--rows", "2", "--methods", ranks, "--layers")
    assert said.count("with TCP/IP") > 1
    assert said.count("reduce=") >= len(found["methods"]) - 1 == 8
    assert "…" not in said
    assert "Of the exact" not in said


def test_the_verdict_comes_first_and_then_a_row_per_method(tmp_path):
    methods = "dad,rank-dad-1,og-powersgd:rank=4"
    said, found = planned(tmp_path, "--rows", "4", "--methods", methods)
    assert said.startswith("Of the exact methods dad is the fastest")
    table = said[said.index("mlp, 4 rows a batch") :]
    lines = table.splitlines()
    for name, method in found["methods"].items():
        (row,) = (line for line in lines if line.split()[:1] == [name])
        assert row.split()[1] == ("yes" if method["exact"] else "no")
        assert f"{method['sent_bytes'] / 1e3:,.1f}"[:3] in row
    assert list(found["methods"]) == ["dense", *methods.split(",")]
    assert found["verdict"][0].startswith("Of the exact methods dad is the fastest")
    exact = {"methods": ["dad"], "told": True, "beside_dense": "faster than dense"}
    assert found["fastest"]["exact"] == exact
    assert "f: factors" not in said
    assert COMPARED.split(",")[3] in methods


def layer_of(sent_bytes: int, *, marks: str = "l", rows: int = 4) -> LayerPlan:
    sent = {"rank-dad-1": LayerBytes(sent_bytes, marks), "dad": LayerBytes(7, "f")}
    return LayerPlan("name", (8, 8), rows, (4.0, 4.0), sent)


@pytest.mark.parametrize(
    ("layers", "differ"),
    [
        ([layer_of(10), layer_of(20)], True),
        ([layer_of(10), layer_of(10)], False),
        ([layer_of(10), layer_of(20, rows=5)], False),
        ([layer_of(10), layer_of(20, marks="f")], False),
    ],
)
def test_equal_layers_that_differ_are_explained(layers, differ):
    said = why_equal_layers_differ(SimpleNamespace(layers=layers))
    assert said.startswith("Equal layers differ by rank-dad-1: ") == differ
    assert bool(said) == differ


def test_layers_are_shown_where_they_are_asked_for(tmp_path):
    said, found = planned(tmp_path, "--rows", "2", "--layers", "--methods", "dad")
    assert "f: factors" in said
    for layer in found["layers"]:
        assert f"{layer['shape'][0]}x{layer['shape'][1]}" in said


def test_without_a_limit_only_computing_is_left(tmp_path):
    said, found = planned(tmp_path, "--rows", "2", "--link", "none", "--methods", "dense,dad")
    for method in found["methods"].values():
        assert method["step_s"] == pytest.approx(method["compute_s"], abs=2e-3)
        assert method["dense_slower_to_bit_per_s"] is None
    assert "Up to" not in said


def test_a_rate_up_to_which_dense_is_slower(tmp_path):
    args = ["--model", "mlp", "--rows", "32", "--methods", "dad", "--link"]
    said, slow = planned(tmp_path, *args, "10mbit")
    dense, dad = (slow["methods"][name] for name in ("dense", "dad"))
    assert dad["dense_slower_to_bit_per_s"] > 1e7
    faster_from = dad["dense_faster_from_bit_per_s"]
    assert faster_from is None or faster_from > dad["dense_slower_to_bit_per_s"]
    assert "bit dense is slower" in " ".join(said.split())
    assert dense["dense_slower_to_bit_per_s"] is dense["dense_faster_from_bit_per_s"] is None


NORMED = 64
"""Features of a batch norm: so many running means and variances, and a counter."""


@pytest.mark.parametrize("method", ["dense", "dad", "rank-dad-1"])
def test_buffers_that_travel_in_each_step_are_counted(mine, method):
    """As many bytes as `og.distribute` sends between two real sites, by its defaults."""
    args = ["--model", "my_models:normed", "--rows", "4", "--methods", method, "--layers"]
    said, found = planned(mine, *args)

    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(50, NORMED), nn.BatchNorm1d(NORMED), nn.Linear(NORMED, 9))
        session = og.distribute(model, method_of(method), group=group)
        for _ in range(WARM_UP + 2 * PAIRS):
            model.zero_grad()
            model(torch.randn(4, 50)).square().mean().backward()
        sent_bytes = session.stats().sent_bytes
        session.detach()
        return sent_bytes

    assert found["methods"][method]["sent_bytes"] == run_on_lasting_groups(2, body)[0]
    (line,) = (line for line in said.splitlines() if "buffers, headers" in line)
    assert float(line.split()[-1]) * 1e3 >= 2 * 4 * NORMED + 8


def test_a_bar_is_on_the_error_stream_alone():
    result = invoke("--rows", "2", "--methods", "dad")
    assert "mlp: " in result.stderr
    assert "━" not in result.stdout


def test_long_names_lose_their_middle():
    assert shortened("layer", 5) == "layer"
    assert shortened("encoder.blocks.0.attention.project_out", 18) == "encoder.…oject_out"


def test_help_says_which_latency():
    text = " ".join(CliRunner().invoke(app, ["plan", "--help"]).stdout.split())
    assert "there and back" in text


def test_what_a_plan_calls_sent_is_the_sessions_own_count():
    turns = [Turn([], 1, Stats(sent_bytes=7))]
    assert Planned("dad", True, network_of("torch", 2), None, turns).sent_bytes == 7
    assert og.__version__


@pytest.mark.slow
def test_an_interrupt_is_one_line():
    words = [sys.executable, "-m", "outergrad", "plan", "--model", "gpt"]
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TTY_COMPATIBLE": "1"}
    with subprocess.Popen(words, preexec_fn=heed, env=env, **pipes) as process:
        assert process.stderr is not None
        assert process.stderr.read(3)  # the bar: it is at work
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1].endswith("outergrad: interrupted")
    assert "Traceback" not in errors
    assert not said


@shaped
@pytest.mark.slow
@pytest.mark.parametrize("sites", [2, 3] if LONG else [3])
def test_bench_counts_the_bytes_that_were_planned(tmp_path, sites):
    ways = ("gather", "all_reduce", "two_way")
    methods = ",".join(["dense,dad,edad", *(f"rank-dad:rank=4:reduce={way}" for way in ways)])
    args = ["--methods", methods, "--sites", str(sites), "--link", "100mbit"]
    _, found = planned(tmp_path, "--model", "mlp", *args)
    run = ["bench", "--workload", "mlp", *args, "--steps", "3", "--rounds", "1"]
    run += ["--data-dir", "none", "--out", str(tmp_path / "bench.json")]
    with forked_processes():
        result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.stderr
    (on_link,) = json.loads((tmp_path / "bench.json").read_text())["links"]
    for timing in on_link["timings"]:
        plan = found["methods"][timing["method"]]
        assert plan["wire_bytes"] == pytest.approx(timing["sent_bytes"], rel=0.03), timing["method"]
        if "two_way" not in timing["method"]:  # of which each site sends its own share
            assert plan["sent_bytes"] == timing["claimed_bytes"]
