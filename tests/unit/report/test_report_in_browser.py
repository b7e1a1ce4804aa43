"""The page in a browser: it opens by itself, shows everything and follows its controls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from pages import RUNS, page_of

from made_up_run import write_hospitals, write_run
from outergrad.report import write_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", *QUIET]
FIGURES = {
    "scalar-0",
    "scalar-1",
    "bytes-total",
    "bytes-layers",
    "time-runs",
    "time-steps",
    "rank-map",
    "rank-lines",
    "spectra",
    "group-lines",
    "cosine-lines",
    "cosine-map",
    "error-lines",
    "residual-lines",
    "duplicate-lines",
    "sample-lines",
}
DATA = """name => document.querySelector(`[data-figure="${name}"] .plot`).data
    .map(({x, y, z}) => ({x: x && [...x], y: y && [...y], z: z && z.map(row => [...row])}))"""
COLOURS = """() => [...document.querySelectorAll('.plot')].map(({layout, data}) => JSON.stringify(
    [layout.xaxis.tickfont.color, data.map(t => t.line?.color ?? t.colorscale ?? t.marker?.color)]
))"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> Path:
    """A page of two runs of different length."""
    folder = tmp_path_factory.mktemp("two")
    runs = [write_run(folder / "first", sites=3), write_run(folder / "second", steps=120)]
    write_page(runs, folder / "page.html")
    return folder / "page.html"


@pytest.fixture
def open_page(browser) -> Iterator:
    """Opens a page, and fails if it complained or asked for anything else."""
    contexts, complaints = [], []

    def opened(path: Path, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: complaints.append(asked.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [c for c in complaints if not c.startswith(("file:", "data:"))] == []


def figures(page) -> set[str]:
    seen = (
        "all => all.filter(f => f.querySelector('.plot').data?.length).map(f => f.dataset.figure)"
    )
    return set(page.eval_on_selector_all("figure", seen))


def width_of(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth")


def data(page, figure: str) -> list[dict]:
    return page.evaluate(DATA, figure)


def choose(page, figure: str, label: str, value: str) -> None:
    page.select_option(f'[data-figure="{figure}"] select[aria-label="{label}"]', value)


def test_every_figure_has_data(open_page, two_runs):
    page = open_page(two_runs)
    assert figures(page) == FIGURES
    for figure in FIGURES:
        assert any(trace["z"] or trace["y"] for trace in data(page, figure)), figure


@pytest.mark.parametrize("name", RUNS)
def test_every_run_can_be_looked_at_on_a_phone(open_page, tmp_path, name):
    page = open_page(page_of(tmp_path, name), viewport={"width": 375, "height": 800})
    assert (figures(page) == FIGURES) == (name in ("whole", "one site"))
    assert figures(page) or name == "run alone"
    assert page.locator("#runs").is_hidden()
    assert width_of(page) == 375


def test_the_slider_moves_through_the_spectra(open_page, two_runs):
    page = open_page(two_runs)
    last = data(page, "spectra")
    page.locator('input[type="range"]').press("Home")
    first = data(page, "spectra")
    assert page.locator("output").inner_text() == "step 0"
    assert first[0]["y"][8] > last[0]["y"][8] > 0
    page.locator('input[type="range"]').press("ArrowRight")
    assert page.locator("output").inner_text() == "step 10"
    assert data(page, "spectra") not in (first, last)


def test_runs_are_shown_and_hidden(open_page, two_runs):
    page = open_page(two_runs)
    both = {figure: data(page, figure) for figure in ("scalar-1", "bytes-layers", "time-runs")}
    page.click("#runs button:has-text('second')")
    assert page.locator("#runs button:focus").get_attribute("aria-pressed") == "false"
    for figure, before in both.items():
        assert data(page, figure) != before, figure
    page.click("#runs button:has-text('second')")
    assert {figure: data(page, figure) for figure in both} == both


def test_hiding_every_run_leaves_one(open_page, two_runs):
    page = open_page(two_runs)
    page.click("#runs button:has-text('second')")
    page.click("#runs button:has-text('first')")
    assert page.locator("#runs [aria-pressed=true]").count() == 1


def test_one_run_is_chosen_for_figures_that_show_one(open_page, two_runs):
    page = open_page(two_runs)
    assert len(data(page, "rank-map")[0]["x"]) == 20
    page.select_option("#detail select", label="second")
    assert len(data(page, "rank-map")[0]["x"]) == 12
    assert len(data(page, "cosine-lines")) == 2
    assert "second" in page.locator('[data-figure="rank-map"] figcaption').inner_text()


def test_one_layer_is_compared_over_runs(open_page, two_runs):
    page = open_page(two_runs)
    assert len(data(page, "rank-lines")) == 3 + 1  # of three, one has a bound that is drawn
    choose(page, "rank-lines", "Layer", "head.weight")
    bounds, lines = data(page, "rank-lines")[:2], data(page, "rank-lines")[2:]
    assert [len(trace["x"]) for trace in lines] == [20, 12]
    assert [set(trace["y"]) for trace in bounds] == [{10}, {10}]
    assert all(max(trace["y"]) <= 10 for trace in lines)
    choose(page, "spectra", "Layer", "head.weight")
    assert len(data(page, "spectra")) == 2


def test_groups_are_compared_in_one_layer_and_kind(open_page, two_runs):
    page = open_page(two_runs)
    ill, well = data(page, "group-lines")
    assert ill["y"] == pytest.approx([3 * v for v in well["y"]], rel=1e-3)
    choose(page, "group-lines", "Of", "Deltas")
    choose(page, "group-lines", "Layer", "encoder.2.weight")
    assert len(data(page, "group-lines")) == 2
    page.click('[data-figure="group-lines"] .legend button:has-text("ill")')
    assert len(data(page, "group-lines")) == 1


def test_one_site_is_chosen_in_the_map_of_disagreement(open_page, two_runs):
    page = open_page(two_runs)
    mean = data(page, "cosine-map")[0]["z"]
    choose(page, "cosine-map", "Site", "2")
    assert data(page, "cosine-map")[0]["z"][0][0] < mean[0][0]


def test_a_click_on_a_legend_hides_a_layer(open_page, two_runs):
    page = open_page(two_runs)
    page.click('[data-figure="rank-lines"] .legend button:has-text("head")')
    assert len(data(page, "rank-lines")) == 2


def test_what_was_logged_is_drawn_over_steps_bytes_or_time(open_page, two_runs):
    page = open_page(two_runs)
    ends = []
    for axis in ("by step", "by bytes sent", "by time"):
        page.click(f"#axis button:has-text('{axis}')")
        ends.append(data(page, "scalar-1")[-1]["x"][-1])
    assert len(set(ends)) == 3


def test_colours_follow_the_machine_and_the_printer(open_page, two_runs):
    page = open_page(two_runs, color_scheme="light")
    light = page.evaluate(COLOURS)
    background = "() => getComputedStyle(document.body).backgroundColor"
    bright = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"before => ({COLOURS})()[0] !== before[0]", arg=light)
    dark = page.evaluate(COLOURS)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert page.evaluate(background) != bright
    page.emulate_media(color_scheme="dark", media="print")
    page.wait_for_function(f"before => ({COLOURS})()[0] === before[0]", arg=light)


def test_a_printed_page_is_light_and_no_wider_than_paper(open_page, two_runs):
    page = open_page(two_runs, color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    widths = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.layout.width)")
    assert set(widths) == {332, 680}
    assert "#1d2530" in page.evaluate("document.querySelector('.plot').layout.font.color")


def test_figures_follow_the_width_of_the_window(open_page, two_runs):
    page = open_page(two_runs)
    for width in (1400, 768, 375, 320):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function(f"() => document.querySelector('.plot').layout.width < {width}")
        page.wait_for_timeout(300)  # the last of a row of resizes counts
        assert width_of(page) == width


@pytest.fixture(scope="module")
def six_runs(tmp_path_factory) -> Path:
    """A page of six runs, of which two have evaluated the model at three sites."""
    folder = tmp_path_factory.mktemp("six")
    runs = [write_run(folder / f"run-{k}", steps=40 + 40 * k) for k in range(4)]
    runs += [write_hospitals(folder / f"hospitals-{k}", better=0.4 * k) for k in range(2)]
    write_page(runs, folder / "page.html")
    return folder / "page.html"


TITLES = """name => document.querySelector(`[data-figure="${name}"] .plot`).layout.annotations
    .map(({text, font}) => [text.replace(/<[^>]*>/g, ''), font.color])"""


def test_six_runs_stand_side_by_side_each_with_its_name_and_colour(open_page, six_runs):
    page = open_page(six_runs)
    titles = page.evaluate(TITLES, "scalar-0")
    assert [title.split()[0] for title, _ in titles[:4]] == [f"run-{k}" for k in range(4)]
    assert len({colour for _, colour in titles}) == 6
    page.click("#apart button:has-text('together')")
    labels = page.evaluate(TITLES, "scalar-0")
    assert dict(labels).keys() == {title.split()[0] for title, _ in titles}
    assert {colour for _, colour in labels} == {colour for _, colour in titles}


BOXES = """() => [...document.querySelectorAll('[data-figure="scalar-0"] .annotation-text')]
    .map(e => e.getBoundingClientRect()).map(({top, bottom}) => [top, bottom])"""


def test_names_at_the_ends_of_lines_do_not_cover_each_other(open_page, six_runs):
    page = open_page(six_runs)
    page.click("#apart button:has-text('together')")
    boxes = sorted(page.evaluate(BOXES))
    assert len(boxes) == 6
    assert all(above[0] + 11 <= below[0] for above, below in pairwise(boxes))


HUES = """() => {
  const hue = c => {
    const [r, g, b] = [1, 3, 5].map(k => parseInt(c.slice(k, k + 2), 16) / 255);
    const [low, high] = [Math.min(r, g, b), Math.max(r, g, b)];
    if (high - low < 0.12) return null;
    const at = high === r ? (g - b) / (high - low)
      : high === g ? 2 + (b - r) / (high - low) : 4 + (r - g) / (high - low);
    return (60 * at + 360) % 360;
  };
  const runs = new Map(), wrong = [];
  RUNS.forEach((run, i) => runs.set(run.name, hue(runColour(i))));
  const near = (a, b) => Math.abs((a - b + 540) % 360 - 180) < 25;
  for (const plot of document.querySelectorAll('.plot'))
    for (const t of plot.data ?? []) {
      const found = [t.line?.color, t.fillcolor, t.marker?.color].flat()
        .filter(c => typeof c === 'string' && c.startsWith('#')).map(hue).filter(h => h !== null);
      const name = plot.closest('figure').dataset.figure;
      const allowed = [...runs.values()];
      if (!found.every(h => allowed.some(a => near(a, h)))) wrong.push(name);
      if (FIGURES[name]?.oneRun && !found.every(h => near(h, runs.get(detail().name))))
        wrong.push(name);
    }
  return wrong;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_hue_is_a_run_in_every_figure(open_page, six_runs, scheme):
    page = open_page(six_runs, color_scheme=scheme)
    assert page.evaluate(HUES) == []
    page.select_option("#detail select", label="hospitals-1")
    assert page.evaluate(HUES) == []


def test_sites_have_figures_of_their_own_by_name(open_page, six_runs):
    page = open_page(six_runs, viewport={"width": 390, "height": 800})
    for figure in ("site-lines", "calibration"):
        titles = page.evaluate(TITLES, figure)
        assert [title.split()[0] for title, _ in titles] == [
            "hospital-a",
            "hospital-b",
            "hospital-c",
        ]
    before = data(page, "site-lines")
    choose(page, "site-lines", "Figure", "accuracy")
    assert data(page, "site-lines") != before
    assert page.locator("#sites tbody tr").count() == 6
    assert width_of(page) == 390
