"use strict";

// The page: which figure stands where, what steers it, and when it is drawn again.

const FIGURES = {
  "site-lines": { draw: siteLines, controls: siteFigureMenu },
  calibration: { draw: calibrationPanels, oneRun: true },
  "bytes-total": { draw: bytesTotal },
  "bytes-layers": { draw: bytesLayers },
  "time-runs": { draw: timeRuns },
  "time-steps": { draw: timeSteps, oneRun: true },
  "rank-map": { draw: rankMap, oneRun: true },
  "rank-lines": { draw: layerLines, controls: layerMenu },
  spectra: { draw: spectra, controls: spectrumControls },
  "group-lines": { draw: groupLines, oneRun: true, controls: groupControls },
  "cosine-lines": { draw: cosineLines, oneRun: true, controls: cosineMenu },
  "cosine-map": { draw: cosineMap, oneRun: true, controls: siteMenu },
  "error-lines": { draw: layerLines, controls: layerMenu },
  "residual-lines": { draw: layerLines, controls: layerMenu },
  "duplicate-lines": { draw: layerLines, controls: layerMenu },
  "sample-lines": { draw: layerLines, controls: layerMenu },
};
const SCALARS = [...new Set(RUNS.flatMap((run) => Object.keys(run.scalars)))];

function layerMenu(figure) {
  const names = layersWith((run) => run.layers[MEASURES[figure][0]]);
  return [layerSelect(figure, names, `Every layer${ofDetail()}`)];
}

const ofDetail = () => (RUNS.length > 1 ? ` of ${detail().name}` : "");

function layersWith(has) {
  return [...new Set(RUNS.filter(has).flatMap((run) => run.layers.names))];
}

function layerSelect(figure, names, all) {
  const options = [["", all], ...names.map((name) => [name, name])];
  return menu("Layer", options, state.layer[figure] ?? "", (name) => {
    state.layer[figure] = name;
    drawFigure(figure);
  });
}

function cosineMenu(figure) {
  return [layerSelect(figure, detail().layers.names, "Mean over layers")];
}

function siteMenu(figure) {
  const sites = Object.keys(detail().layers.cosine_by_site);
  const options = [["mean", "Mean over sites"], ...sites.map((site) => [site, siteName(site)])];
  return [
    menu("Site", options, state.site, (site) => {
      state.site = site;
      drawFigure(figure);
    }),
  ];
}

function spectrumControls(figure) {
  const steps = detail().spectra.step;
  const input = element("input", {
    type: "range",
    min: 0,
    max: Math.max(steps.length - 1, 0),
    "aria-label": "Step",
  });
  input.value = Math.round(state.at * (steps.length - 1));
  const output = element("output", {}, steps.length ? `step ${spectrumStep()}` : "");
  input.addEventListener("input", () => {
    state.at = steps.length > 1 ? input.value / (steps.length - 1) : 0;
    output.textContent = `step ${spectrumStep()}`;
    drawFigure(figure);
  });
  const names = layersWith((run) => run.spectra.step.length);
  const slider = element("label", { class: "slider" }, input, output);
  return [layerSelect(figure, names, `Every layer${ofDetail()}`), slider];
}

function groupControls(figure) {
  const { layers } = detail().groups;
  const kinds = Object.entries(KINDS);
  return [
    menu("Layer", layers.map((name) => [name, name]), groupLayer(figure), (name) => {
      state.layer[figure] = name;
      drawFigure(figure);
    }),
    menu("Of", kinds.map(([kind, title]) => [kind, title]), state.kind, (kind) => {
      state.kind = kind;
      drawFigure(figure);
    }),
  ];
}

const place = (figure) => document.querySelector(`[data-figure="${figure}"]`);

/** Draws a figure anew, with its controls. */
function renderFigure(figure) {
  const { controls, oneRun } = FIGURES[figure];
  if (controls)
    place(figure)
      .querySelector(".controls")
      .replaceChildren(...controls(figure));
  const which = place(figure).querySelector(".which");
  if (which) which.textContent = oneRun && RUNS.length > 1 ? detail().name : "";
  drawFigure(figure);
}

function drawFigure(figure) {
  const root = place(figure);
  const plot = root.querySelector(".plot");
  const drawn = FIGURES[figure].draw(figure);
  plot.hidden = !drawn;
  root.querySelector(".empty").hidden = Boolean(drawn);
  const hidden = (state.hidden[figure] ??= new Set());
  showLegend(root.querySelector(".legend"), drawn?.legend ?? [], hidden, (name) => {
    if (!hidden.delete(name)) hidden.add(name);
    drawFigure(figure);
  });
  if (!drawn) return;
  const size = { width: widthOf(plot), height: drawn.height * (isPrinted() ? 0.85 : 1) };
  plot.style.height = `${size.height}px`;
  const made = layout({ ...drawn.layout, ...size });
  const ends = drawn.ends ?? [];
  if (ends.length) made.margin.r = roomFor(ends);
  Plotly.react(plot, drawn.data, made, CONFIG);
  if (ends.length) labelEnds(plot, ends, drawn.layout.annotations);
}

/** The places of a figure: a plot, what is said instead of one, and a legend. */
function furnish(figure) {
  const root = place(figure);
  const empty = element("p", { class: "empty" }, "Not recorded in this run.");
  root.append(element("div", { class: "plot" }), empty, element("div", { class: "legend" }));
  if (FIGURES[figure].controls)
    root.querySelector("figcaption").append(element("div", { class: "controls" }));
}

/** Takes away the figures of which no run has anything; shows in detail the run that has most. */
function prune() {
  const drawn = RUNS.map((_, i) => {
    state.detail = i;
    return new Set(Object.keys(FIGURES).filter((figure) => FIGURES[figure].draw(figure)));
  });
  for (const figure of Object.keys(FIGURES)) {
    if (drawn.some((figures) => figures.has(figure))) continue;
    place(figure)?.remove();
    delete FIGURES[figure];
  }
  const counts = drawn.map((figures) => figures.size);
  state.detail = counts.indexOf(Math.max(...counts));
  for (const section of document.querySelectorAll("main section"))
    section.hidden = !section.querySelector("figure, table");
}

function renderAll() {
  renderRuns();
  showLegend(
    document.getElementById("times"),
    TIMES.map(([key, label]) => [label, timeColour(key)]),
    new Set(),
  );
  renderAxis();
  Object.keys(FIGURES).forEach(renderFigure);
}

function renderAxis() {
  const axes = [
    ["step", "by step"],
    ["bytes", "by bytes sent"],
    ["time", "by time"],
  ];
  const buttons = choice(axes, state.axis, (chosen) => {
    state.axis = chosen;
    renderAll();
  });
  replaceParts(document.getElementById("axis"), buttons);
  const apart = isApart(state.shown.size);
  const ways = choice([[false, "together"], [true, "side by side"]], apart, (chosen) => {
    state.apart = chosen;
    renderAll();
  });
  replaceParts(document.getElementById("apart"), RUNS.length > 1 ? ways : []);
  document.getElementById("scalars").classList.toggle("wide", apart);
}

/** Which runs are shown, and which one in the figures that have room for one. */
function renderRuns() {
  for (const row of document.querySelectorAll("[data-run]"))
    row.style.setProperty("--run", runColour(Number(row.dataset.run)));
  const nav = document.getElementById("runs");
  nav.hidden = RUNS.length < 2;
  const chips = RUNS.map((run, i) =>
    toggle(run.name, state.shown.has(i), () => flip(i), runColour(i)),
  );
  replaceParts(nav.querySelector(".chips"), chips);
  const select = menu(
    "Run in detail",
    RUNS.map((run, i) => [i, run.name]),
    state.detail,
    (i) => {
      state.detail = Number(i);
      state.shown.add(state.detail);
      renderAll();
    },
  );
  replaceParts(document.getElementById("detail"), [select]);
}

/** Shows a run or hides it; one is always shown. */
function flip(i) {
  if (!state.shown.delete(i)) state.shown.add(i);
  if (!state.shown.size) state.shown.add(i);
  if (!state.shown.has(state.detail)) state.detail = shown()[0];
  renderAll();
}

function begin() {
  SCALARS.forEach((name, k) => {
    const figure = `scalar-${k}`;
    FIGURES[figure] = { draw: () => scalar(name) };
    document
      .getElementById("scalars")
      .append(element("figure", { "data-figure": figure }, element("figcaption", {}, name)));
  });
  prune();
  Object.keys(FIGURES).forEach(furnish);
  renderAll();
  document.documentElement.dataset.ready = "yes";
}

let resizing;
let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return; // a phone's address bar comes and goes
  lastWidth = innerWidth;
  clearTimeout(resizing);
  resizing = setTimeout(renderAll, 120);
});
darkQuery.addEventListener("change", renderAll);
printQuery.addEventListener("change", renderAll);
addEventListener("beforeprint", () => {
  beingPrinted = true;
  renderAll();
});
addEventListener("afterprint", () => {
  beingPrinted = false;
  renderAll();
});
begin();
