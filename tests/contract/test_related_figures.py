"""Figures on docs/related.md are those of experiments' results and of benchmarks/poseidon.py."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from places import REPOSITORY
from published import (
    assert_each_task_has_a_result,
    assert_tables_are_those_of_the_results,
    body,
    cells,
    mean_of,
)

sys.path.append(str(REPOSITORY / "benchmarks"))
import poseidon

PAGE = (REPOSITORY / "docs" / "related.md").read_text()
EXPERIMENTS = [
    *("forward", "correction", "autospec", "rank-bounds", "cogd", "on-drift", "sparse-push"),
]
NONE = "\N{EN DASH}"  # in a table, a setting that a way does not have


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_are_those_of_the_results(name, tmp_path):
    assert_each_task_has_a_result(name)
    assert_tables_are_those_of_the_results(name, tmp_path)


@pytest.mark.parametrize("table", ["ways", "changes"])
def test_tables_of_drift_are_on_the_page(table):
    assert body("on-drift", table) in PAGE


@pytest.mark.parametrize("sites", poseidon.SITES)
def test_lines_of_poseidons_rule_are_on_the_page(sites):
    for line in poseidon.lines(sites, poseidon.ROWS):
        assert f"| {' | '.join(line)} |\n" in PAGE


def percent(cell: str) -> float:
    return float(cell.partition(" %")[0])


def from_to(cell: str) -> str:
    """The range of a cell: "24 to 28" of "26 [24, 28]", and "4" of "4"."""
    return cell.partition("[")[2].strip("]").replace(", ", " to ") or cell


def forward(data: str, way: str, sent: str) -> list[str]:
    return [cells("forward", "ways", data, way)["test accuracy"], sent]


def correction(data: str, case: str) -> list[str]:
    kept = [cells("correction", "accuracy", data, one) for one in (case, "none")]
    found, whole = (list(row.values())[2:] for row in kept)
    trained, *mended = map(percent, found)
    lost = percent(whole[0]) - trained
    shares = [f"{100 * (one - trained) / lost:.0f} %" for one in mended] if lost else []
    return [*found, ", ".join(shares)]


def spread(data: str, layer: str, *, loss: bool) -> list[str]:
    ways = [(layer, way) for way in ("gradient", "deltas", "activations")]
    rows = [cells("autospec", "spread", data, *key) for key in [*ways, ("all", "loss")]]
    found = [f"{row['class']}, {mean_of(row['class, drawn'])}" for row in rows]
    return found if loss else [*found[:3], "as above"]


def errors(data: str, first: str, last: str) -> list[str]:
    row = partial(cells, "autospec", "errors", data)
    return [row(first)["gradient"], row(last)["gradient"], row("all")["loss"]]


def ranks(slope: str) -> list[str]:
    rows = [
        cells("rank-bounds", "bounds", "bottleneck", slope, k) for k in ("0.weight", "6.weight")
    ]
    return [f"{from_to(row['rank'])}, {mean_of(row['effective rank'])}" for row in rows]


def coding(*key: str) -> list[str]:
    whole, part = (cells("cogd", "coding", known, *key) for known in ("1", "0.75"))
    in_db = [row["PSNR in dB"].replace(" [", " dB [") for row in (whole, part)]
    share = mean_of(whole["codes that are not 0"])
    return [whole["objective"], in_db[0], share, part["objective"], in_db[1]]


def pruning(way: str) -> list[str]:
    return list(cells("cogd", "pruning", way).values())[1:]


MNIST, CIFAR = "222.7 kB, dense", "92.4 kB, dense"
DIGITS = "spoken-digits"
ROWS = [
    ("scalars (perturbed weights, local losses)", forward, "mnist", "scalars", "968 bytes"),
    ("perturbed activities, local losses", forward, "mnist", "perturbed activities", MNIST),
    ("local losses, backward", forward, "mnist", "local losses, backward", MNIST),
    ("one loss, backward", forward, "mnist", "backward", MNIST),
    ("scalars", forward, "cifar10", "scalars", "968 bytes"),
    ("perturbed activities, local losses", forward, "cifar10", "perturbed activities", CIFAR),
    ("local losses, backward", forward, "cifar10", "local losses, backward", CIFAR),
    ("one loss, backward", forward, "cifar10", "backward", CIFAR),
    *(
        (label, correction, data, case)
        for data in ("mnist", "cifar10")
        for label, case in (
            ("none", "none"),
            ("contrast, to 15 %", "contrast"),
            ("brightness, two deviations", "brightness"),
            ("noise, one deviation", "noise"),
            ("scanner: a curve of greys, and softer", "scanner"),
        )
    ),
    ("MNIST, first layer", partial(spread, loss=True), "mnist", "0.weight"),
    ("MNIST, last layer", partial(spread, loss=False), "mnist", "4.weight"),
    (
        "spoken digits, GRU, recurrent weights",
        *(partial(spread, loss=True), DIGITS, "gru.weight_hh_l0"),
    ),
    ("spoken digits, last layer", partial(spread, loss=False), DIGITS, "head.weight"),
    ("MNIST", errors, "mnist", "0.weight", "4.weight"),
    ("spoken digits", errors, DIGITS, "gru.weight_ih_l0", "head.weight"),
    ("1 (bound: 4)", ranks, "1"),
    *((slope, ranks, slope) for slope in ("0.99", "0.9", "0.5", "0.1")),
    ("CoGD", coding, "CoGD", "1", "0.1"),
    ("without coupling", coding, "joint Adam", NONE, "0.1"),
    ("by turns", coding, "alternating Adam", NONE, "0.1"),
    ("ADMM", coding, "ADMM", NONE, NONE),
    ("CoGD", pruning, "CoGD"),
    ("without coupling", pruning, "joint Adam"),
    ("by turns", pruning, "alternating Adam"),
    ("ADMM", pruning, "ADMM"),
]


@pytest.mark.parametrize(("label", "made", "of"), [(label, f, of) for label, f, *of in ROWS])
def test_rows_of_tables_are_measured(label, made, of):
    line = " | ".join([label, *made(*of)])
    assert f"| {line} |".replace("|  |", "| |") in PAGE


def gossip(split: str, way: str) -> str:
    """The accuracy of the mean model."""
    optimizer = "sgd" if "momentum" in way else "nesterov"
    cell = cells("gossip", "accuracy", split, way, optimizer)["test accuracy"]
    return mean_of(cell).removesuffix(" %")


def both(way: str) -> list[str]:
    """That of even data, and of split classes."""
    return [gossip("even", way), gossip("sorted", way)]


def gpt(way: str) -> str:
    return mean_of(cells("gossip", "loss", way)["test loss"])


def push(way: str, table: str = "ways") -> str:
    return mean_of(cells("sparse-push", table, way)["test accuracy"])


def accuracies(data: str, *ways: str) -> list[str]:
    return [mean_of(cells("forward", "ways", data, way)["test accuracy"]) for way in ways]


def wrong(layer: str, column: str = "gradient") -> str:
    return cells("autospec", "wrong", "20", layer)[column]


def objective(*key: str) -> str:
    return mean_of(cells("cogd", "coding", "1", *key)["objective"])


def drift(way: str, column: str) -> float:
    return float(mean_of(cells("on-drift", "ways", way)[column]).split()[0])


DELAY, SENT = "steps from a change to an exchange", "sent by a site in all"
WAYS = ("scalars", "perturbed activities", "backward")
SENTENCES = {
    "MNIST on a ring of 8, even data: {} % with 4.4 kB per step, all-reduce {} % with 356 kB. "
    "Split classes: {} % beside {} %, and {} % by whole weights": lambda: [
        gossip("even", "ring, power, rank 1"),
        gossip("even", "all-reduce"),
        *(gossip("sorted", way) for way in ("ring, power, rank 1", "all-reduce", "ring")),
    ],
    "at rank 4, 15.5 kB, split classes come to {} %": lambda: [
        gossip("sorted", "ring, power, rank 4")
    ],
    "The same ring: signs {} % even, {} % split, with 13.6 kB; the largest 1 % {} % and {} %": (
        lambda: [*both("ring, choco, signs"), *both("ring, choco, largest 1 %")]
    ),
    "split classes come to {} % instead of {} %, by all-reduce to {} %": lambda: [
        gossip("sorted", way) for way in ("ring, momentum=0.9", "ring", "all-reduce")
    ],
    "loss {}, local steps {}; behind five steps {}, behind all fifteen {}": lambda: [
        gpt(f"{way}, every=15{more}")
        for way, more in (
            *(("ring", ""), ("local steps", "")),
            *(("ring", ", overlap=5"), ("ring", ", overlap=15")),
        )
    ],
    "Whole weights on a directed ring {} beside {} by all-reduce": lambda: [
        push("push-sum, ring"),
        push("all-reduce"),
    ],
    "fewer bytes than whole weights, {}, on an exponential graph {} beside {}. "
    "The largest 10 % with a fifth of the bytes: {} on the ring": lambda: [
        push("Sparse-Push, ring"),
        push("Sparse-Push, exponential"),
        push("push-sum, exponential"),
        push("Sparse-Push, ring", "tenth"),
    ],
    "MNIST: {} with 968 bytes per step. Perturbed activities {}, backward {}": lambda: accuracies(
        "mnist", *WAYS
    ),
    "CIFAR-10 after 600 steps: {}, {} and {} %": lambda: [
        one.removesuffix(" %") for one in accuracies("cifar10", *WAYS)
    ],
    "is {} times as large in the last layer and {} in the first, that of its activations {}; "
    "its loss is {} times as large": lambda: [
        wrong("4.weight"),
        wrong("0.weight"),
        mean_of(wrong("0.weight", "activations")),
        wrong("all", "loss"),
    ],
    "Sparse codes of CIFAR-10: objective {}, without coupling {}, by turns {}, ADMM {}": lambda: [
        objective("CoGD", "1", "0.1"),
        objective("joint Adam", NONE, "0.1"),
        objective("alternating Adam", NONE, "0.1"),
        objective("ADMM", NONE, NONE),
    ],
    "taken out and tuned: {}, without {}": lambda: [
        mean_of(cells("cogd", "pruning", way)["tuned"]) for way in ("CoGD", "joint Adam")
    ],
    "with {:.0f} times fewer bytes than every 20 steps; a mild one is missed": lambda: [
        drift("every 20 steps", SENT) / drift("lower confidences", SENT)
    ],
    "Every 10 steps took {:.0f} and more times the bytes": lambda: [
        drift("every 10 steps", SENT) / drift("lower confidences", SENT)
    ],
    "ADWIN missed none and was late: {:.0f} steps in the mean": lambda: [drift("ADWIN", DELAY)],
    "came {:.0f} steps late, with {:.1f} MB": lambda: [
        drift("confidences, as FLARE", DELAY),
        drift("confidences, as FLARE", SENT),
    ],
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_figures_in_sentences_are_measured(sentence):
    assert sentence.format(*SENTENCES[sentence]()) in PAGE
