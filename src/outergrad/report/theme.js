"use strict";

// Colours, and what all figures have in common. They follow the page: light, dark or printed.
// A hue is a run, in every figure. Its shades are what a figure has several of within one run:
// layers, sites, parts of a step. Grey is DDP, or what lies behind.

const darkQuery = matchMedia("(prefers-color-scheme: dark)");
const printQuery = matchMedia("print");
let beingPrinted = false;

const isPrinted = () => beingPrinted || printQuery.matches;
const isDark = () => darkQuery.matches && !isPrinted();
const isNarrow = () => !isPrinted() && innerWidth < 740;

/** How wide a figure is; on paper, where nothing can be measured before, one page or half of it. */
function widthOf(plot) {
  if (!isPrinted()) return plot.clientWidth;
  return plot.closest(".grid:not(.wide)") ? 332 : 680;
}

const COLOURS = {
  light: {
    text: "#1d2530",
    quiet: "#66707c",
    line: "#e6e8ea",
    axis: "#c9ced3",
    raised: "#ffffff",
    dense: "#8b949e",
    runs: ["#2f6db3", "#d07a1f", "#2f8f6b", "#b0447f", "#7a5cc0", "#8a7322", "#1f8fa3", "#c0504d"],
  },
  dark: {
    text: "#e3e7ec",
    quiet: "#95a0ac",
    line: "#252c35",
    axis: "#3a434e",
    raised: "#181d24",
    dense: "#828d99",
    runs: ["#6ba6e6", "#f0a354", "#5cc49c", "#e27fb4", "#a98fee", "#ccb45a", "#55bfd1", "#ec837f"],
  },
};
const DASHES = ["solid", "dash", "dot", "dashdot"];

const colours = () => COLOURS[isDark() ? "dark" : "light"];
const runColour = (i) => colours().runs[i % colours().runs.length];
const runDash = (i) => DASHES[Math.floor(i / colours().runs.length) % DASHES.length];

/** A shade of a colour: 0 is that of the page, 0.5 the colour, 1 near that of text. */
function shade(colour, at) {
  const c = colours();
  return at < 0.5 ? blend(c.raised, colour, 2 * at) : blend(colour, c.text, 1.5 * (at - 0.5));
}

/** The shade of one of many things in an order, layers or sites, of the run in detail. */
function depthColour(i, count) {
  const at = count > 1 ? i / (count - 1) : 0.4;
  return shade(runColour(state.detail), 0.34 + 0.62 * at);
}

const TIME_SHADES = { compress_s: 0.72, replay_s: 0.5, wait_s: 0.29, rest_s: 0.11 };

/** The shade of a part of a step's time; without a run that of the legend. */
const timeColour = (part, i) =>
  shade(i === undefined ? colours().dense : runColour(i), TIME_SHADES[part]);

function blend(from, to, share) {
  const part = (colour, k) => parseInt(colour.slice(1 + 2 * k, 3 + 2 * k), 16);
  const mixed = (k) => Math.round(part(from, k) * (1 - share) + part(to, k) * share);
  return `#${[0, 1, 2].map((k) => mixed(k).toString(16).padStart(2, "0")).join("")}`;
}

/** A colour that lets through what is below. */
function faint(colour, alpha) {
  const part = (k) => parseInt(colour.slice(1 + 2 * k, 3 + 2 * k), 16);
  return `rgba(${part(0)}, ${part(1)}, ${part(2)}, ${alpha})`;
}

const heatScale = () =>
  [0, 0.2, 0.4, 0.6, 0.8, 1].map((at) => [at, shade(runColour(state.detail), 0.05 + 0.95 * at)]);

/** An axis; `more` has the last word. */
function axis(title, more = {}) {
  const c = colours();
  return {
    title: { text: title, font: { size: 12, color: c.quiet }, standoff: 8 },
    tickfont: { size: 11, color: c.quiet },
    gridcolor: c.line,
    linecolor: c.axis,
    zeroline: false,
    automargin: true,
    ...more,
  };
}

const stepAxis = (more = {}) => axis("Step", { rangemode: "tozero", ...more });

/** A logarithmic axis whose ticks carry units. */
function logAxis(title, values, format, more = {}) {
  const positive = values.filter((v) => v > 0);
  const low = Math.log10(Math.min(...positive)),
    high = Math.log10(Math.max(...positive));
  const pad = Math.max(0.06 * (high - low), 0.12);
  const range = [low - pad, high + pad];
  const every = Math.ceil((range[1] - range[0]) / 7);
  const digits = range[1] - range[0] > 2.2 ? [1] : [1, 2, 5];
  const tickvals = [];
  for (let k = Math.floor(range[0]); k <= range[1]; k += every)
    for (const digit of digits) tickvals.push(digit * 10 ** k);
  const ticktext = tickvals.map(format);
  return axis(title, { type: "log", range, tickmode: "array", tickvals, ticktext, ...more });
}

function layout(more) {
  const c = colours();
  const family = getComputedStyle(document.body).fontFamily;
  return {
    paper_bgcolor: "rgba(0, 0, 0, 0)",
    plot_bgcolor: "rgba(0, 0, 0, 0)",
    font: { family, size: 12, color: c.text },
    margin: { l: 8, r: isNarrow() ? 6 : 12, t: 10, b: 8 },
    showlegend: false,
    hovermode: "closest",
    hoverlabel: {
      bgcolor: c.raised,
      bordercolor: c.axis,
      font: { family, color: c.text, size: 12 },
      namelength: -1,
      align: "left",
    },
    // A finger that moves over a figure scrolls the page.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...more,
  };
}

const CONFIG = { displayModeBar: false, responsive: false, showTips: false };
