"use strict";

// Figures of single sites: how well the model does on the rows that each of them has held out.

const EVALUATED = [...new Set(RUNS.flatMap((run) => Object.keys(run.evaluations)))];
const FIGURE_NAMES = [
  ...new Set(
    RUNS.flatMap((run) =>
      Object.values(run.evaluations).flatMap(({ figures }) => Object.keys(figures)),
    ),
  ),
];

/** Name of a site of the run in detail. */
const siteName = (site) => detail().names[site] ?? `site ${site}`;

function siteFigureMenu(figure) {
  const options = FIGURE_NAMES.map((name) => [name, name === "auc" ? "AUC" : name]);
  return [
    menu("Figure", options, siteFigure(), (name) => {
      state.siteFigure = name;
      drawFigure(figure);
    }),
  ];
}

const siteFigure = () => state.siteFigure ?? FIGURE_NAMES.find((n) => n === "auc") ?? FIGURE_NAMES[0];

/** A small figure of every site, with a line per run over training. */
function siteLines() {
  const name = siteFigure();
  const of = (i, site) => RUNS[i].evaluations[site]?.figures[name];
  const sites = EVALUATED.filter((site) => shown().some((i) => of(i, site)));
  const most = Math.max(
    0,
    ...sites.flatMap((site) => shown().map((i) => RUNS[i].evaluations[site]?.step.length ?? 0)),
  );
  if (most < 2) return null;
  const titles = sites.map((site) => [site, "", colours().text]);
  const columns = Math.min(sites.length, isNarrow() ? 2 : 3);
  const axes = { xaxis: stepAxis(), yaxis: axis("") };
  const found = panels(titles, { columns, height: 170, ...axes });
  const data = sites.flatMap((site, k) =>
    shown().flatMap((i) =>
      of(i, site)
        ? figureTraces(i, RUNS[i].evaluations[site].step, of(i, site)).map((trace) => ({
            ...trace,
            ...found.ref(k),
          }))
        : [],
    ),
  );
  return { data, ...found };
}

function figureTraces(i, step, values) {
  const at = range(step.length).filter((k) => values[k]?.length === 3);
  const band = {
    x: [...at.map((k) => step[k]), ...at.map((k) => step[k]).reverse()],
    y: [...at.map((k) => values[k][1]), ...at.map((k) => values[k][2]).reverse()],
    fill: "toself",
    fillcolor: faint(runColour(i), 0.14),
    line: { width: 0 },
    mode: "lines",
    hoverinfo: "skip",
  };
  const told = runLine(i, step, values.map((v) => v?.[0] ?? null), "step %{x}: %{y:.3f}");
  const line = { ...told, mode: "lines+markers", marker: { ...told.marker, size: 5 } };
  return at.length > 1 ? [band, line] : [line];
}

/** A small figure of every site: predicted probabilities and what was observed. */
function calibrationPanels() {
  const run = detail();
  const sites = EVALUATED.filter((site) => run.evaluations[site]?.calibration.length);
  if (!sites.length) return null;
  const titles = sites.map((site) => {
    const error = run.evaluations[site].figures["calibration error"]?.at(-1);
    return [site, error ? `off by ${digits(error[0], 2)}` : "", colours().text];
  });
  const unit = { range: [-0.02, 1.02], tickvals: [0, 0.5, 1], ticktext: ["0", "0.5", "1"] };
  const columns = Math.min(Math.max(sites.length, 2), isNarrow() ? 2 : 4);
  const found = panels(titles, {
    columns,
    height: isNarrow() ? 130 : 190,
    xaxis: axis("Predicted", unit),
    yaxis: axis(isNarrow() ? "" : "Observed", unit),
    matched: false,
  });
  const data = sites.flatMap((site, k) =>
    [diagonal(), calibrationDots(run.evaluations[site].calibration)].map((trace) => ({
      ...trace,
      ...found.ref(k),
    })),
  );
  return { data, ...found };
}

const diagonal = () => backgroundLine([0, 1], [0, 1]);

function calibrationDots(bins) {
  const colour = runColour(state.detail);
  return {
    x: bins.map((bin) => bin[1]),
    y: bins.map((bin) => bin[2]),
    error_y: {
      type: "data",
      symmetric: false,
      array: bins.map((bin) => bin[4] - bin[2]),
      arrayminus: bins.map((bin) => bin[2] - bin[3]),
      color: faint(colour, 0.45),
      thickness: 1.5,
      width: 0,
    },
    mode: "markers",
    marker: { color: colour, size: 6 },
    text: bins.map((bin) => `${bin[0]} rows`),
    hovertemplate: "predicted %{x:.2f}, observed %{y:.2f}<br>%{text}<extra></extra>",
  };
}
