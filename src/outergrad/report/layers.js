"use strict";

// Figures of layers: ranks, spectra, disagreement and errors.

const MEASURES = {
  "rank-lines": ["effective_rank", "Effective rank"],
  "error-lines": ["relative_error", "Relative error"],
  "residual-lines": ["residual_norm", "Norm"],
  "duplicate-lines": ["duplicates", "Share"],
  "sample-lines": ["sample_norm", "Norm"],
};

/** A colour per layer and step. */
function heatMap(everything, allNames, step, title, more = {}) {
  const measured = range(allNames.length).filter((row) => present(everything[row]).length);
  const [names, grid] = [allNames, everything].map((rows) => measured.map((row) => rows[row]));
  const c = colours();
  const narrow = isNarrow();
  const bar = narrow
    ? {
        orientation: "h",
        x: 0,
        xanchor: "left",
        y: 1,
        yanchor: "bottom",
        thickness: 8,
        ypad: 4,
        xpad: 0,
      }
    : { thickness: 10, x: 1, xpad: 14, len: 1, y: 0.5, ypad: 0 };
  const data = [
    {
      type: "heatmap",
      z: grid,
      x: step,
      y: range(names.length),
      customdata: names.map((name) => step.map(() => plain(name))),
      colorscale: heatScale(),
      colorbar: {
        ...bar,
        outlinewidth: 0,
        tickfont: { size: 11, color: c.quiet },
        title: { text: title, side: narrow ? "top" : "right", font: { size: 11, color: c.quiet } },
        nticks: 6,
      },
      hovertemplate: "%{customdata}<br>step %{x}: %{z:.3g}<extra></extra>",
      ...more,
    },
  ];
  const xaxis = axis("Step", { showgrid: false });
  const yaxis = layerAxis(names);
  return { data, layout: { xaxis, yaxis }, height: layerHeight(names.length) + (narrow ? 40 : 0) };
}

function rankMap() {
  const { names, step, effective_rank: grid } = detail().layers;
  return grid ? heatMap(grid, names, step, "Effective rank") : null;
}

/** Lines of all layers of one run, or of one layer in all runs that are shown. */
function layerLines(figure) {
  const [measure, title] = MEASURES[figure];
  const layer = state.layer[figure];
  const drawn = layer ? oneLayer(layer, measure) : allLayers(figure, measure);
  if (!drawn) return null;
  if (measure === "effective_rank") drawn.data.unshift(...rankBounds(figure, layer));
  const yaxis = axis(title, { rangemode: "tozero" });
  return { ...drawn, layout: { xaxis: stepAxis(), yaxis }, height: 340 };
}

/** Dotted lines: what the rank of a gradient cannot exceed, where so few values show it. */
function rankBounds(figure, layer) {
  const hidden = state.hidden[figure] ?? new Set();
  const runs = layer ? shown() : [state.detail];
  return runs.flatMap((i) => {
    const { names, step, effective_rank: ranks, rank_bound: bounds } = RUNS[i].layers;
    return range(bounds && ranks ? names.length : 0)
      .filter((k) => (layer ? names[k] === layer : !hidden.has(names[k])))
      .filter((k) => present(ranks[k]).length && present(bounds[k]).some((v) => v <= MOST_VALUES))
      .map((k) => ({
        x: step,
        y: bounds[k],
        mode: step.length > 1 ? "lines" : "markers",
        line: { color: layer ? runColour(i) : depthColour(k, names.length), width: 1, dash: "dot" },
        marker: { color: layer ? runColour(i) : depthColour(k, names.length), symbol: "line-ew-open" },
        hovertemplate: `step %{x}: at most %{y:.3g}<extra>${plain(names[k])}</extra>`,
      }));
  });
}

function oneLayer(layer, measure) {
  const found = shown().flatMap((i) => {
    const row = RUNS[i].layers.names.indexOf(layer);
    const grid = RUNS[i].layers[measure];
    return row >= 0 && grid
      ? [{ ...runLine(i, RUNS[i].layers.step, grid[row], "step %{x}: %{y:.4g}"), run: RUNS[i].name }]
      : [];
  });
  const ends = found.map(({ line, y }, k) => endOf(found[k].run, line.color, y));
  return found.length ? { data: found, ends: ends.length > 1 ? ends : [] } : null;
}

function allLayers(figure, measure) {
  const { names, step, [measure]: grid } = detail().layers;
  return grid && colouredLines(figure, names, () => step, grid, "step %{x}: %{y:.4g}");
}

const MOST_LABELLED = 8;
const MOST_VALUES = 16;

/** A line per name, coloured in their order, of which a legend hides some; `xs` is of each. */
function colouredLines(figure, names, xs, ys, template, mode = "lines") {
  const hidden = (state.hidden[figure] ??= new Set());
  const kept = range(names.length).filter((k) => ys[k] && present(ys[k]).length);
  const colour = (k) => depthColour(k, names.length);
  const data = kept
    .filter((k) => !hidden.has(names[k]))
    .map((k) => ({
      x: xs(k),
      y: ys[k],
      mode: xs(k).length > 1 ? mode : "markers",
      line: { color: colour(k), width: 1.6 },
      marker: { color: colour(k), size: 4.5 },
      hovertemplate: `${template}<extra>${plain(names[k])}</extra>`,
    }));
  if (!kept.length) return null;
  const drawn = kept.filter((k) => !hidden.has(names[k]));
  const texts = labels(names, 40);
  const ends = drawn.map((k) => endOf(texts[k], colour(k), ys[k]));
  return {
    data,
    legend: kept.map((k) => [names[k], colour(k)]),
    ends: mode === "lines" && drawn.length > 1 && drawn.length <= MOST_LABELLED ? ends : [],
  };
}

/** The step of the slider, among those of which the run has spectra. */
function spectrumStep() {
  const steps = detail().spectra.step;
  return steps[Math.round(state.at * (steps.length - 1))];
}

function spectra(figure) {
  const layer = state.layer[figure];
  const run = detail();
  if (!run.spectra.step.length) return null;
  const at = spectrumStep();
  const drawn = layer ? oneSpectrum(layer, at) : allSpectra(figure, at);
  if (!drawn) return null;
  const all = layer
    ? shown().flatMap((i) => spectraOf(RUNS[i], layer))
    : run.layers.names.flatMap((name) => spectraOf(run, name));
  const most = Math.max(...all.map((values) => values.length));
  const xaxis = axis("Singular value, from the largest", {
    range: [0.5, most + 0.5],
    dtick: dtick(most),
  });
  const yaxis = logAxis("Singular value", floored(all.flat()), power);
  return { ...drawn, layout: { xaxis, yaxis }, height: 380 };
}

const dtick = (most) =>
  [1, 2, 4, 8, 16, 32].find((every) => most / every <= (isNarrow() ? 8 : 16)) ?? 64;

/** What is rounding beside the largest does not stretch the axis. */
function floored(values) {
  const most = Math.max(...present(values));
  return values.filter((v) => v > most * 1e-8);
}

function spectraOf(run, layer) {
  const row = run.layers.names.indexOf(layer);
  return row < 0 ? [] : present(run.spectra.values[row]);
}

const drawable = (values) => values.map((v) => (v > 0 ? v : null));
const places = (values) => values.map((_, k) => k + 1);
const SPECTRUM = "no. %{x}: %{y:.3g}";

function allSpectra(figure, at) {
  const { names } = detail().layers;
  const k = detail().spectra.step.indexOf(at);
  const ys = detail().spectra.values.map((row) => (row[k] ? drawable(row[k]) : null));
  return colouredLines(figure, names, (k) => places(ys[k]), ys, SPECTRUM, "lines+markers");
}

function oneSpectrum(layer, at) {
  const data = shown().flatMap((i) => {
    const { step, values } = RUNS[i].spectra;
    const row = RUNS[i].layers.names.indexOf(layer);
    const near = range(step.length).reduce(
      (a, b) => (Math.abs(step[b] - at) < Math.abs(step[a] - at) ? b : a),
      0,
    );
    const found = row >= 0 && values[row][near];
    if (!found) return [];
    const line = runLine(i, places(found), drawable(found), SPECTRUM);
    return [{ ...line, mode: "lines+markers", marker: { color: runColour(i), size: 5 } }];
  });
  return data.length ? { data } : null;
}

const KINDS = { gradient: "Gradient", activations: "Activations", deltas: "Deltas" };

function groupLayer(figure) {
  const { layers } = detail().groups;
  return layers.includes(state.layer[figure]) ? state.layer[figure] : layers.at(-1);
}

/** The largest singular value of each group of samples, in one layer of one run. */
function groupLines(figure) {
  const { names, layers, step, [state.kind]: grids } = detail().groups;
  if (!layers.length) return null;
  const ys = grids[layers.indexOf(groupLayer(figure))];
  const drawn = colouredLines(figure, names, () => step, ys, "step %{x}: %{y:.4g}");
  if (!drawn) return null;
  const yaxis = axis("Largest singular value", { rangemode: "tozero" });
  return { ...drawn, layout: { xaxis: stepAxis(), yaxis }, height: 340 };
}

function cosineLines(figure) {
  const { names, step, cosine_by_site: grids } = detail().layers;
  const sites = Object.keys(grids);
  if (!sites.length) return null;
  const row = names.indexOf(state.layer[figure]);
  const ys = sites.map((site) => (row < 0 ? columnMeans(grids[site]) : grids[site][row]));
  const entries = sites.map(siteName);
  const drawn = colouredLines(figure, entries, () => step, ys, "step %{x}: %{y:.3f}");
  if (!drawn) return null;
  return { ...drawn, layout: { xaxis: stepAxis(), yaxis: axis("Cosine") }, height: 300 };
}

function columnMeans(grid) {
  return grid[0].map((_, k) => {
    const column = present(grid.map((row) => row[k]));
    return column.length ? column.reduce((a, b) => a + b) / column.length : null;
  });
}

function cosineMap() {
  const { names, step, cosine, cosine_by_site: grids } = detail().layers;
  const grid = grids[state.site] ?? cosine;
  return grid ? heatMap(grid, names, step, "Cosine", { reversescale: true }) : null;
}
