"use strict";

// Small figures side by side, and names at the ends of lines, so that no colour has to be looked up.

const PANEL_HEIGHT = 132;
const TITLE_HEIGHT = 30;

/** Places of so many small figures: their axes, their titles, and which axes are whose. */
function panels(titles, { columns, height = PANEL_HEIGHT, xaxis, yaxis, matched = true }) {
  const rows = Math.ceil(titles.length / columns);
  const row = height + TITLE_HEIGHT;
  const gap = columns > 1 ? (isNarrow() ? 0.06 : 0.035) : 0;
  const width = (1 - gap * (columns - 1)) / columns;
  const found = { annotations: [] };
  titles.forEach(([title, quiet, colour], k) => {
    const [at, down] = [k % columns, Math.floor(k / columns)];
    const left = at * (width + gap);
    const top = 1 - (down * row + TITLE_HEIGHT) / (rows * row);
    const number = k ? k + 1 : "";
    const shared = (name) => (k && matched ? { matches: name } : {});
    const isLast = k + columns >= titles.length;
    found[`xaxis${number}`] = {
      ...xaxis,
      ...shared("x"),
      title: isLast ? xaxis.title : undefined,
      domain: [left, left + width],
      anchor: `y${number}`,
      showticklabels: isLast,
      nticks: isNarrow() ? 3 : 4,
    };
    found[`yaxis${number}`] = {
      ...yaxis,
      ...shared("y"),
      domain: [top - height / (rows * row), top],
      anchor: `x${number}`,
      showticklabels: at === 0,
      nticks: 4,
    };
    found.annotations.push(panelTitle(title, quiet, colour, left, top));
  });
  const ref = (k) => ({ xaxis: `x${k ? k + 1 : ""}`, yaxis: `y${k ? k + 1 : ""}` });
  return { layout: found, ref, height: rows * row + 50 };
}

function panelTitle(title, quiet, colour, x, y) {
  const name = plain(shortened(title, isNarrow() ? 15 : 30));
  const more = quiet ? `  <span style="color:${colours().quiet}">${plain(quiet)}</span>` : "";
  return {
    text: `<b>${name}</b>${more}`,
    ...{ x, y, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom" },
    ...{ showarrow: false, align: "left", xshift: -1, yshift: 3 },
    font: { color: colour, size: 12 },
  };
}

/** Whether runs are drawn side by side. */
const isApart = (count) => (state.apart ?? RUNS.length > 4) && count > 1;

/** A small figure of every run, with the lines of the others behind its own. */
function runPanels(chosen, curves, x) {
  const titles = chosen.map((i, k) => {
    const last = present(curves[k].mean).at(-1);
    return [RUNS[i].name, last === undefined ? "" : digits(last), runColour(i)];
  });
  const columns = isNarrow() ? 2 : 3;
  const found = panels(titles, { columns, xaxis: x.axis, yaxis: axis("") });
  const xs = curves.map((curve) => progressOf(curve, x.size));
  const data = chosen.flatMap((i, k) => {
    const others = chosen.flatMap((_, other) =>
      other === k ? [] : [backgroundLine(xs[other], curves[other].mean)],
    );
    const own = scalarTraces(i, curves[k], x.size);
    return [...others, ...own].map((trace) => ({ ...trace, ...found.ref(k) }));
  });
  return { data, ...found };
}

function backgroundLine(x, y) {
  const line = { color: colours().axis, width: 1 };
  return { x, y, mode: "lines", line, hoverinfo: "skip" };
}

// Names at the ends of lines.

const LABEL_SIZE = 11;
const LABEL_GAP = 13;
const measure = document.createElement("canvas").getContext("2d");

const endOf = (name, colour, y) => ({ name, colour, y: present(y).at(-1) });
const labelText = (name) => shortened(name, isNarrow() ? 13 : 24);

/** Room to the right of a figure for the names at the ends of its lines. */
function roomFor(ends) {
  measure.font = `${LABEL_SIZE}px ${getComputedStyle(document.body).fontFamily}`;
  const widths = ends.map(({ name }) => measure.measureText(labelText(name)).width);
  return Math.ceil(Math.max(...widths)) + 14;
}

/** Writes names beside the ends of lines, apart from each other. */
function labelEnds(plot, ends, annotations = []) {
  const yaxis = plot._fullLayout.yaxis;
  const placed = ends
    .filter(({ y }) => y !== undefined && (yaxis.type !== "log" || y > 0))
    .map((end) => ({ ...end, pixel: yaxis.d2p(end.y) }))
    .sort((a, b) => a.pixel - b.pixel);
  const tops = placed.map(({ pixel }) => pixel);
  for (let k = 1; k < tops.length; k++) tops[k] = Math.max(tops[k], tops[k - 1] + LABEL_GAP);
  for (let k = tops.length - 1, most = yaxis._length; k >= 0; k--, most -= LABEL_GAP)
    tops[k] = Math.min(tops[k], most);
  const added = placed.map(({ name, colour, y, pixel }, k) => ({
    text: plain(labelText(name)),
    ...{ x: 1, xref: "paper", xanchor: "left", xshift: 5 },
    ...{ y: yaxis.type === "log" ? Math.log10(y) : y, yanchor: "middle", yshift: pixel - tops[k] },
    ...{ showarrow: false, align: "left", font: { size: LABEL_SIZE, color: colour } },
  }));
  Plotly.relayout(plot, { annotations: [...annotations, ...added] });
}
