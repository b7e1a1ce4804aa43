"""Figures: what is drawn is what the results say."""

from __future__ import annotations

import math

import pytest
from made_up_results import a_test, iterations, of_sites, plausible, timing, training

pytest.importorskip("pandas")
pytest.importorskip("seaborn")

from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image
from matplotlib.collections import PolyCollection
from PIL import Image

from outergrad_lab.experiments.asked import ask, styles
from outergrad_lab.experiments.figures import draw, write_figures
from outergrad_lab.labels import Method

COURSE = {"name": "found", "title": "Title", "x": "step", "y": "loss", "lines": "method"}
OUTCOME = {"name": "found", "title": "Title", "x": "rank", "y": "accuracy", "lines": "family"}
SEEDS = [training([4.0, 2.0], seed=0), training([2.0, 1.0], seed=1)]


def trained(accuracy, **settings):
    return training([1.0], tests=[a_test(1, 1000, accuracy=accuracy)], **settings)


def drawn(wanted, results):
    """The figure, with everything where it will be."""
    figure = draw(ask(wanted, results), results)
    figure.draw_without_rendering()
    return figure


def legend(figure):
    return [text.get_text() for found in figure.legends for text in found.get_texts()]


def named_lines(axes):
    """Lines of the legend: label to points."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def panels(figure):
    return {axes.get_title(): axes for axes in figure.axes}


def test_a_curve_is_the_mean_of_the_seeds_in_a_band():
    (axes,) = drawn(COURSE, SEEDS).axes
    assert named_lines(axes) == {"dAD": ([1, 2], [3, 1.5])}
    (band,) = [found for found in axes.collections if isinstance(found, PolyCollection)]
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners >= {(1, 2), (1, 4), (2, 1), (2, 2)}


def test_the_training_loss_is_smooth_with_the_raw_one_behind():
    losses = [float(step % 2) for step in range(120)]  # windows of three steps
    raw, smooth = drawn(COURSE, [training(losses)]).axes[0].lines
    assert list(raw.get_ydata()) == losses
    assert list(smooth.get_ydata()[1:4]) == pytest.approx([1 / 3, 2 / 3, 1 / 3])
    assert raw.get_alpha() < 0.5 < smooth.get_linewidth()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=200))
def test_a_smooth_curve_stays_within_the_raw_one(losses):
    (axes,) = drawn(COURSE, [training(losses)]).axes
    (_, smooth) = named_lines(axes)["dAD"]
    assert len(smooth) == len(losses)
    assert min(losses) - 1e-9 <= min(smooth)
    assert max(smooth) <= max(losses) + 1e-9


def test_what_is_tested_is_drawn_where_it_was():
    tests = [a_test(2, 200, accuracy=0.5), a_test(4, 400, accuracy=0.75)]
    result = training([1.0] * 4, tests=tests)
    (axes,) = drawn(COURSE | {"y": "accuracy"}, [result]).axes
    assert named_lines(axes) == {"dAD": ([2, 4], [0.5, 0.75])}
    (axes,) = drawn(COURSE | {"y": "accuracy", "x": "sent_bytes"}, [result]).axes
    assert named_lines(axes) == {"dAD": ([200, 400], [0.5, 0.75])}
    assert axes.get_xlabel() == "sent by a site so far"
    assert axes.get_ylabel() == "test accuracy"


def test_over_seconds_only_what_was_timed():
    results = [training(method=m) for m in ("dad", "edad")] + [timing({"dad": (0.5, 1)})]
    (axes,) = drawn(COURSE | {"x": "seconds", "y": "loss"}, results).axes
    assert named_lines(axes) == {"dAD": ([0.5, 1.0], [2.0, 1.0])}


def test_a_panel_for_each_value_with_one_legend():
    results = [training(method=m, sites=n) for n in (3, 2) for m in ("pooled", "dad")]
    figure = drawn(COURSE | {"panels": "sites"}, results)
    assert list(panels(figure)) == ["2 sites", "3 sites"]
    assert legend(figure) == ["pooled", "dAD"]


def test_outcomes_over_ranks():
    made = {("rank-dad:rank=8", 0): 0.8, ("rank-dad:rank=2", 0): 0.5, ("rank-dad:rank=2", 1): 0.7}
    made |= {("first-rows:rank=4", 0): 0.4, ("pooled", 0): 0.9}
    results = [trained(a, method=m, seed=s) for (m, s), a in made.items()]
    (axes,) = drawn(OUTCOME | {"log": ["x"], "references": ["pooled"]}, results).axes
    lines = named_lines(axes)
    assert lines["rank-dAD"] == ([2, 8], [pytest.approx(0.6), 0.8])
    assert lines["first rows"] == ([4], [0.4])
    assert lines["pooled"][1] == [0.9, 0.9]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "4", "8"]


def test_a_family_over_bytes_is_a_line_through_its_methods():
    results = [
        training(
            [1.0], tests=[a_test(1, 100 * r, accuracy=r / 10)], method=f"rank-dad:rank={r}", seed=s
        )
        for r in (4, 2)
        for s in (0, 1)
    ]
    (axes,) = drawn(OUTCOME | {"x": "sent_bytes"}, results).axes
    assert named_lines(axes) == {"rank-dAD": ([200, 400], [0.2, 0.4])}
    assert axes.get_xlabel() == "sent per step and site"


def test_a_reference_is_of_its_panel():
    results = [trained(n / 10, method=m, sites=n) for n in (2, 3) for m in ("pooled", "dad")]
    figure = drawn(COURSE | {"y": "accuracy", "panels": "sites", "references": ["pooled"]}, results)
    for title, level in (("2 sites", 0.2), ("3 sites", 0.3)):
        lines = named_lines(panels(figure)[title])
        assert list(lines) == ["dAD", "pooled"]
        assert lines["pooled"][1] == [level, level]


def test_numbers_of_sites():
    results = [of_sites("dad", n, 1000 * n, 0.1) for n in (4, 2)]
    (axes,) = drawn({**COURSE, "x": "sites", "y": "sent_bytes"}, results).axes
    assert named_lines(axes) == {"dAD": ([2, 4], [2000, 4000])}


def test_power_iterations():
    results = [iterations(("a", 2, 1, 0.5), ("a", 2, 2, 0.25), ("b", 8, 1, 0.3))]
    wanted = {**COURSE, "x": "iterations", "y": "error", "lines": "layer", "panels": "rank"}
    figure = drawn(wanted, results)
    assert named_lines(panels(figure)["rank 2"]) == {"a": ([1, 2], [0.5, 0.25])}
    assert named_lines(panels(figure)["rank 8"]) == {"b": ([1], [0.3])}


LAYERS = {"mlp": ["a"], "gru": ["b", "c"]}
RANKS = {**COURSE, "y": "effective_rank", "lines": "layer", "panels": ["model", "activation"]}


def with_layers(**more):
    points = [{"step": 0, "effective_rank": 9.0}, {"step": 2, "effective_rank": 5.0}]
    return [
        training(
            [1.0] * 4, model=model, activation=act, layers=dict.fromkeys(names, points), **more
        )
        for model, names in LAYERS.items()
        for act in ("relu", "tanh")
        if (model, act) != ("mlp", "tanh")
    ]


def test_two_names_make_a_grid_with_a_legend_for_each_row():
    figure = drawn(RANKS, with_layers())
    assert set(panels(figure)) == {"mlp, relu", "gru, relu", "gru, tanh"}
    assert named_lines(panels(figure)["gru, tanh"]) == {
        "b": ([0, 2], [9, 5]),
        "c": ([0, 2], [9, 5]),
    }
    assert not figure.legends
    beside = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [[text.get_text() for text in found.get_texts()] for found in beside] == [
        ["a"],
        ["b", "c"],
    ]


def test_one_legend_where_most_lines_are_in_every_row():
    methods = {2: ["ddp", "dad", "edad", "demo"], 3: ["ddp", "dad", "edad"]}
    results = [
        training(method=m, sites=n, model="mlp") for n, some in methods.items() for m in some
    ]
    figure = drawn(COURSE | {"panels": ["sites", "model"]}, results)
    assert legend(figure) == ["PyTorch DDP", "dAD", "edAD", "DeMo"]
    assert not [axes for axes in figure.axes if axes.get_legend()]


def looks_of(axes):
    dashes = {line: line._dash_pattern for line in axes.lines}  # matplotlib says "--" of all others
    return {line.get_label(): (line.get_color(), str(at)) for line, at in dashes.items()}


@pytest.mark.parametrize("others", [[], ["dad", "edad"], ["dad", "edad", "pooled", "dense"]])
def test_a_line_looks_the_same_wherever_one_legend_names_it(others):
    steps = [f"local-steps:k={k}" for k in (2, 3, 4)]
    of_model = {"mlp": [*steps, *others], "gru": [*steps[1:], *others]}
    results = [training(method=m, model=o) for o, some in of_model.items() for m in some]
    mlp, gru = drawn(COURSE | {"panels": "model", "y": "test_loss"}, results).axes
    assert looks_of(gru).items() <= looks_of(mlp).items()
    assert len(looks_of(mlp)) == len(of_model["mlp"]) == len(set(looks_of(mlp).values()))


def test_only_methods_with_names_are_drawn_in_their_order():
    results = [training(method=m, sites=n) for n, m in ((2, "dad"), (2, "edad"), (3, "demo"))]
    results += [training(method=m, sites=n) for n in (2, 3) for m in ("ddp", "pooled")]
    names = {"ddp": "whole", "edad": "part", "demo": "part"}
    figure = drawn(COURSE | {"panels": "sites", "names": names, "y": "test_loss"}, results)
    assert legend(figure) == ["whole", "part"]
    assert [list(looks_of(axes)) for axes in figure.axes] == [["whole", "part"]] * 2
    assert looks_of(figure.axes[0]) == looks_of(figure.axes[1])


def test_the_lowest_panel_of_each_column_says_what_is_across():
    results = [training(sites=s, model=m) for s, m in ((2, "mlp"), (2, "gru"), (3, "mlp"))]
    figure = drawn(COURSE | {"panels": ["sites", "model"]}, results)
    said = [axes.get_title() for axes in figure.axes if axes.xaxis.label.get_visible()]
    assert sorted(said) == ["2 sites, gru", "3 sites, mlp"]


@pytest.mark.parametrize(("more", "name"), [({"epochs": 2}, "epoch"), ({}, "step")])
def test_epochs_where_they_were_counted(more, name):
    figure = drawn(RANKS | {"x": "epoch"}, with_layers(**more))
    assert {axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()} == {name}


def test_nothing_without_bytes_on_a_logarithmic_axis():
    results = [trained(0.5), training(tests=[a_test(1, 0)], method="pooled")]
    figure = drawn(COURSE | {"x": "sent_bytes", "y": "accuracy", "log": ["x"]}, results)
    assert legend(figure) == ["dAD"]


def test_a_method_has_its_colour_whatever_is_beside_it():
    methods = ["pooled", "alone", "dad", "rank-dad:rank=8"]
    for some in (methods, methods[::-2]):
        (axes,) = drawn(COURSE, [training(method=m) for m in some]).axes
        looks = {Method.parse(m).label: Method.parse(m).look["color"] for m in some}
        assert {line.get_label(): line.get_color() for line in axes.lines[1::2]} == looks


def test_members_of_a_family_can_be_told_apart():
    found = styles(["method"], [(f"local-steps:k={k}",) for k in (1, 10, 50)])
    assert len({str(style["linestyle"]) for style in found}) == 3


def test_the_legend_lies_below_the_axes():
    methods = ["pooled", "alone", "dense", "ddp", "dad", "edad", "rank-dad:rank=10"]
    results = [plausible(m, 0.1, sites=n, steps=60) for m in methods for n in (2, 3)]
    figure = drawn(COURSE | {"panels": "sites"}, results)
    (found,) = figure.legends
    box = found.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert all(axes.get_tightbbox().y0 >= box.y1 for axes in figure.axes)


def test_legends_of_long_names_beside_the_rows_fit_into_the_figure():
    long = "local-steps:k=15:lr=1:momentum=0:method=rank-dad:budget={}:wire=int4:vectors=int4"
    methods = {2: ["ddp", long.format("1/20")], 3: ["ddp", long.format("1/64")]}
    results = [plausible(m, 0.1, sites=n, steps=60) for n, some in methods.items() for m in some]
    figure = drawn(COURSE | {"panels": ["sites", "model"]}, results)
    beside = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert len(beside) == 2
    for found in beside:
        box = found.get_window_extent()
        assert box.x1 <= figure.bbox.x1
        assert box.width < figure.bbox.width / 2


def test_legends_of_many_lines_beside_the_rows_stay_apart():
    methods = {n: [f"local-steps:k={n}:rate={at}:method=dad" for at in range(20)] for n in (2, 3)}
    results = [
        training(method=m, sites=n, model="mlp") for n, some in methods.items() for m in some
    ]
    figure = drawn(COURSE | {"panels": ["sites", "model"]}, results)
    upper, lower = (axes.get_legend().get_window_extent() for axes in figure.axes)
    assert upper.y0 >= lower.y1
    assert upper.y1 <= figure.bbox.y1
    assert lower.y0 >= 0


def test_a_legend_of_long_names_fits_into_the_figure():
    inner = "rank-dad:budget=1/20:wire=int4:vectors=int4:error_feedback=auto"
    methods = ["ddp", inner, f"local-steps:k=15:lr=1:momentum=0:method={inner}"]
    figure = drawn(COURSE, [plausible(m, 0.1, sites=2, steps=60) for m in methods])
    (found,) = figure.legends
    box = found.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert " ".join(legend(figure)[-1].split()).endswith("error_feedback = auto")


def test_pictures_are_written_with_their_titles(tmp_path):
    (path,) = write_figures([COURSE], SEEDS, tmp_path)
    assert path == tmp_path / "found.png"
    assert image.imread(path).shape[1] == 1200
    with Image.open(path) as made:
        assert made.info["Title"] == "Title"


@pytest.mark.parametrize("results", [[], [training(tests=[a_test(2, None)])]])
def test_a_figure_without_anything_is_left_out(tmp_path, results):
    wanted = {**COURSE, "x": "seconds"}
    assert write_figures([wanted], results, tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_in_a_figure_is_told(tmp_path):
    with pytest.raises(ValueError, match="figure found: there is no 'colour' in the results"):
        write_figures([COURSE | {"lines": "colour"}], SEEDS, tmp_path)


def test_a_loss_that_is_no_number_is_a_gap(tmp_path):
    write_figures([COURSE | {"log": ["y"]}], [training([2.0, math.nan, math.inf])], tmp_path)
    assert (tmp_path / "found.png").exists()
