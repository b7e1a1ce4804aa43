"use strict";

// Figures of whole runs: what was logged, bytes and time. A figure is a function that returns what
// Plotly draws, or null where there is nothing to draw.

const RUNS = JSON.parse(document.getElementById("data").textContent);
const state = {
  shown: new Set(RUNS.keys()),
  detail: 0,
  axis: "step",
  apart: null,
  siteFigure: null,
  layer: {},
  kind: "gradient",
  site: "mean",
  at: 1,
  hidden: {},
};
const shown = () => [...state.shown].sort((a, b) => a - b);
const detail = () => RUNS[state.detail];

/** The x axis of what was logged: steps, bytes or time. */
function progress(curves) {
  if (state.axis === "step") return { size: 1, axis: stepAxis() };
  if (state.axis === "bytes")
    return { size: 1, axis: bytesAxis(curves.map((curve) => curve.bytes)) };
  const longest = Math.max(...curves.flatMap((curve) => present(curve.seconds)), 1);
  const unit = timeUnit(longest);
  return { size: unit.size, axis: axis(`Time since the start (${unit.name})`) };
}

/** Logarithmic where one run sent many times more than another. */
function bytesAxis(curves) {
  const title = "Bytes that a site had sent";
  const ends = curves.map((curve) => Math.max(...present(curve), 0)).filter((end) => end > 0);
  if (Math.max(...ends) > 20 * Math.min(...ends))
    return logAxis(title, present(curves.flat()), bytes);
  return axis(title, { tickformat: "~s", ticksuffix: "B" });
}

function scalar(name) {
  const chosen = shown().filter((i) => name in RUNS[i].scalars);
  const curves = chosen.map((i) => RUNS[i].scalars[name]);
  if (!chosen.length) return null;
  const x = progress(curves);
  if (isApart(chosen.length)) return runPanels(chosen, curves, x);
  const data = chosen.flatMap((i, k) => scalarTraces(i, curves[k], x.size));
  const ends = endsOf(chosen, (i) => RUNS[i].scalars[name].mean);
  return { data, layout: { xaxis: x.axis, yaxis: axis("") }, height: 280, ends };
}

/** Names for the ends of lines of runs; none where there is one line. */
function endsOf(chosen, ys) {
  if (chosen.length < 2) return [];
  return chosen.map((i) => endOf(RUNS[i].name, runColour(i), ys(i)));
}

const progressOf = (curve, size) =>
  scaled(curve[state.axis === "time" ? "seconds" : state.axis], size);

function scalarTraces(i, curve, size) {
  const x = progressOf(curve, size);
  const at = range(x.length).filter((k) => curve.low[k] !== null && curve.high[k] !== null);
  const band = {
    x: [...at.map((k) => x[k]), ...at.map((k) => x[k]).reverse()],
    y: [...at.map((k) => curve.low[k]), ...at.map((k) => curve.high[k]).reverse()],
    fill: "toself",
    fillcolor: faint(runColour(i), 0.16),
    line: { width: 0 },
    mode: "lines",
    hoverinfo: "skip",
  };
  const line = runLine(i, x, curve.mean, "%{x}: %{y:.4g}");
  return at.some((k) => curve.low[k] < curve.high[k]) ? [band, line] : [line];
}

function runLine(i, x, y, template) {
  return {
    x,
    y,
    name: plain(RUNS[i].name),
    mode: x.length > 1 ? "lines" : "markers",
    line: { color: runColour(i), dash: runDash(i), width: 2 },
    marker: { color: runColour(i), size: 7 },
    hovertemplate: `${template}<extra>${plain(RUNS[i].name)}</extra>`,
  };
}

function bytesTotal() {
  const chosen = shown().filter((i) => RUNS[i].bytes.step.length);
  if (!chosen.length) return null;
  const data = chosen.map((i) => {
    const { step, sent_bytes } = RUNS[i].bytes;
    return { ...runLine(i, step, sent_bytes, "step %{x}: %{text}"), text: sent_bytes.map(bytes) };
  });
  const denses = [...new Set(chosen.map((i) => RUNS[i].dense_bytes).filter((dense) => dense))];
  const first = Math.min(...data.map((line) => line.x[0]));
  const last = Math.max(...data.map((line) => line.x.at(-1)), first + 1);
  const c = colours();
  for (const dense of denses)
    data.push({
      x: [first, last],
      y: [dense, dense],
      mode: "lines",
      line: { color: c.dense, dash: "dash", width: 1.5 },
      hovertemplate: `${bytes(dense)}<extra>DDP</extra>`,
    });
  const annotations = denses.map((dense) => ({
    x: first,
    y: Math.log10(dense),
    text: `DDP ${bytes(dense)}`,
    xanchor: "left",
    yanchor: "bottom",
    showarrow: false,
    font: { color: c.quiet, size: 11 },
  }));
  const all = data.flatMap((line) => present(line.y)).flatMap((v) => [v, v * 1.25]);
  const yaxis = logAxis("Bytes per step", all, bytes);
  const ends = endsOf(chosen, (i) => RUNS[i].bytes.sent_bytes);
  return { data, layout: { xaxis: stepAxis(), yaxis, annotations }, height: 320, ends };
}

/** Of every layer, a dot per run and a stroke for DDP, on one line. */
function bytesLayers() {
  const chosen = shown().filter((i) => RUNS[i].layers.names.length);
  const names = [...new Set(chosen.flatMap((i) => RUNS[i].layers.names))];
  const rows = new Map(names.map((name, row) => [name, row]));
  const c = colours();
  const dense = new Map();
  for (const i of chosen)
    RUNS[i].layers.names.forEach((name, k) => dense.set(name, RUNS[i].layers.dense_bytes[k]));
  const dots = chosen.map((i) => layerDots(i, rows));
  const values = [...dots.flatMap((dot) => dot.x), ...dense.values()];
  if (!values.some((v) => v > 0)) return null;
  const ends = names.map((name, row) => {
    const xs = [
      dense.get(name),
      ...dots.flatMap((dot) => dot.x.filter((_, k) => dot.y[k] === row)),
    ];
    const positive = xs.filter((v) => v > 0);
    return positive.length ? [Math.min(...positive), Math.max(...positive)] : [null, null];
  });
  const lines = {
    x: ends.flatMap(([low, high]) => [low, high, null]),
    y: range(names.length).flatMap((row) => [row, row, null]),
    mode: "lines",
    line: { color: c.axis, width: 1 },
    hoverinfo: "skip",
  };
  const strokes = {
    x: names.map((name) => dense.get(name)),
    y: range(names.length),
    mode: "markers",
    marker: {
      symbol: "line-ns-open",
      size: 11,
      color: c.dense,
      line: { width: 2, color: c.dense },
    },
    text: names.map((name) => `${plain(name)}<br>${bytes(dense.get(name) ?? null)}`),
    hovertemplate: "%{text}<extra>DDP</extra>",
  };
  return {
    data: [lines, strokes, ...dots],
    layout: { xaxis: logAxis("Bytes per step", values, bytes), yaxis: layerAxis(names) },
    height: layerHeight(names.length),
  };
}

function layerDots(i, rows) {
  const { names, sent_bytes, dense_bytes, travels } = RUNS[i].layers;
  const told = (k) => {
    const ratio = dense_bytes[k] / sent_bytes[k];
    const fewer =
      ratio > 1.05 && Number.isFinite(ratio) ? `, ${digits(ratio, 2)}× fewer than DDP` : "";
    return `${plain(names[k])}<br>${bytes(sent_bytes[k])}${fewer}<br>${plain(travels[k])}`;
  };
  return {
    x: sent_bytes.map((sent) => (sent > 0 ? sent : null)),
    y: names.map((name) => rows.get(name)),
    mode: "markers",
    marker: { size: 9, color: runColour(i) },
    text: names.map((_, k) => told(k)),
    hovertemplate: `%{text}<extra>${plain(RUNS[i].name)}</extra>`,
  };
}

/** Names of layers from top to bottom; as many as there is room for. */
function layerAxis(names) {
  const every = Math.ceil(names.length / 70);
  const at = range(names.length).filter((row) => row % every === 0);
  const texts = labels(names, isNarrow() ? 14 : 26);
  return axis("", {
    tickmode: "array",
    tickvals: at,
    ticktext: at.map((row) => plain(texts[row])),
    range: [names.length - 0.5, -0.5],
    showgrid: false,
    ticks: "",
    ticklabelstandoff: 6,
  });
}

const layerHeight = (count) => 70 + Math.max(150, Math.min(count, 70) * (count > 40 ? 13 : 19));

const TIMES = [
  ["compress_s", "compress"],
  ["replay_s", "replay"],
  ["wait_s", "wait for other sites"],
  ["rest_s", "rest of the step"],
];

function timeRuns() {
  const chosen = shown().filter((i) => RUNS[i].time.step.length);
  if (!chosen.length) return null;
  const totals = chosen.map((i) => TIMES.reduce((sum, [key]) => sum + RUNS[i].time.mean[key], 0));
  const unit = timeUnit(Math.max(...totals));
  const texts = chosen.map((i) => plain(shortened(RUNS[i].name, isNarrow() ? 14 : 24)));
  const data = TIMES.map(([key, label]) => ({
    type: "bar",
    orientation: "h",
    x: chosen.map((i) => RUNS[i].time.mean[key] / unit.size),
    y: range(chosen.length),
    width: 0.62,
    marker: { color: chosen.map((i) => timeColour(key, i)), line: { width: 0 } },
    hovertemplate: `%{x:.3g} ${unit.name}<extra>${label}</extra>`,
  }));
  const yaxis = axis("", {
    tickmode: "array",
    tickvals: range(chosen.length),
    ticktext: chosen.length > 1 || RUNS.length > 1 ? texts : [""],
    range: [chosen.length - 0.4, -0.6],
    showgrid: false,
    ticklabelstandoff: 6,
  });
  const xaxis = axis(`Time per step (${unit.name})`);
  return {
    data,
    layout: { barmode: "stack", xaxis, yaxis },
    height: 75 + 46 * Math.max(2, chosen.length),
  };
}

function timeSteps() {
  const { step, ...parts } = detail().time;
  if (!step.length) return null;
  const sums = step.map((_, k) => TIMES.reduce((sum, [key]) => sum + parts[key][k], 0));
  const unit = timeUnit(Math.max(...sums));
  const data = [...TIMES].reverse().map(([key, label]) => ({
    x: step,
    y: scaled(parts[key], unit.size),
    stackgroup: "all",
    mode: step.length > 1 ? "lines" : "markers",
    line: { width: 0, color: timeColour(key, state.detail) },
    fillcolor: timeColour(key, state.detail),
    hovertemplate: `step %{x}: %{y:.3g} ${unit.name}<extra>${label}</extra>`,
  }));
  const yaxis = axis(`Time per step (${unit.name})`, { rangemode: "tozero" });
  return { data, layout: { xaxis: stepAxis(), yaxis }, height: 300 };
}
