"""Every result can be drawn."""

from __future__ import annotations

from math import inf, nan

import pytest
from made_up import arrival, arrived_links, link, results, timed_links

from outergrad_lab.bench.plan import COMPARED

pytest.importorskip("seaborn")

from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba

from outergrad_lab.bench.plot import byte_ratios, draw, gain, plot

DIVERGED = [arrival("ddp", [2.0, inf], reached=False), arrival("dad", [nan], reached=False)]
MANY = ("10mbit", "100mbit", "1gbit", "none")
CASES = {
    "one rate": timed_links("100mbit"),
    "two rates": timed_links("10mbit", "100mbit"),
    "rates and none": timed_links("10mbit", "100mbit", "1gbit", "none"),
    "none": timed_links("none"),
    "loopback": timed_links("loopback"),
    "one method": timed_links("10mbit", "1gbit", methods=["dad"]),
    "alone": timed_links("10mbit", "1gbit", methods=["alone"]),
    "without ddp": timed_links("10mbit", "1gbit", methods=["dense", "dad"]),
    "to a loss": arrived_links("100mbit"),
    "to a loss on several links": arrived_links("10mbit", "none", "loopback"),
    "to a loss alone": arrived_links("100mbit", methods=["alone"]),
    "to a loss that none reached": [link(arrivals=DIVERGED)],
}


def figure(*names):
    """The figure of some links, with everything where it will be."""
    made = draw(results(*timed_links(*names)))
    made.draw_without_rendering()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("links", CASES.values(), ids=CASES)
def test_the_picture_opens_and_is_not_empty(tmp_path, links):
    plot(results(*links, until_loss=0.6 if links[0].arrivals else None), tmp_path / "found.png")
    picture = plt.imread(tmp_path / "found.png")
    assert min(picture.shape[:2]) > 100
    assert picture.std() > 0.01
    assert not plt.get_fignums()


def test_over_several_rates_each_method_is_a_line():
    seconds, sent_bytes = figure("none", "10mbit", "100mbit", "1gbit").axes
    names = [tick.get_text() for tick in seconds.get_xticklabels()]
    assert names == ["10mbit", "100mbit", "1gbit", "unshaped"]
    assert [line.get_label() for line in seconds.lines] == list(COMPARED)
    assert [line.get_label() for line in sent_bytes.lines] == list(COMPARED)
    for line in (*seconds.lines, *sent_bytes.lines):
        assert line.get_xdata().tolist() == [0, 1, 2, 3]
    ddp = seconds.lines[COMPARED.index("ddp")]
    assert (
        ddp.get_ydata().tolist()
        == [timed_links("none")[0].timings[COMPARED.index("ddp")].median_s] * 4
    )


@pytest.mark.parametrize("names", [["none"], ["loopback"], ["10mbit", "100mbit", "1gbit"]])
def test_on_few_links_each_method_is_a_bar(names):
    drawn = figure(*names).axes
    assert len(drawn) == 2 * len(names)
    for axes in drawn:
        assert [tick.get_text() for tick in axes.get_yticklabels()] == list(COMPARED)


def test_bars_say_how_many_times_less_they_are_than_ddp():
    (found,) = timed_links("100mbit")
    for axes in figure("100mbit").axes:
        told = dict(zip(COMPARED, [text.get_text() for text in axes.texts], strict=True))
        for one in found.timings:
            assert float(told[one.method].split()[0]) == pytest.approx(
                1 / one.ratio_to_ddp, rel=0.1
            )


def test_without_ddp_bars_compare_nothing():
    (found,) = timed_links("100mbit", methods=["dense", "alone"])
    assert byte_ratios(found) == [None, None]
    assert [gain(ratio) for ratio in (None, 0.0, 0.1)] == ["", "", "10 \N{MULTIPLICATION SIGN}"]


def test_no_two_methods_look_alike():
    seconds, _ = figure(*MANY).axes
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in seconds.lines}
    assert len(looks) == len(COMPARED)


@pytest.mark.slow
@pytest.mark.parametrize("method", COMPARED)
def test_a_method_has_its_colour_whatever_is_beside_it(method):
    (alone, _), (beside, _) = (
        draw(results(*timed_links(*MANY, methods=methods))).axes for methods in ([method], COMPARED)
    )
    colours = {line.get_label(): line.get_color() for line in beside.lines}
    assert alone.lines[0].get_color() == colours[method]


def test_bars_have_the_colours_of_lines():
    bars, _ = figure("none").axes
    lines, _ = figure(*MANY).axes
    drawn = [bar.get_facecolor() for container in bars.containers for bar in container]
    assert drawn == [to_rgba(line.get_color()) for line in lines.lines]
