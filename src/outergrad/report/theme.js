"use strict";

// Colours, and what all figures have in common. They follow the page: light, dark or printed.

const darkQuery = matchMedia("(prefers-color-scheme: dark)");
const printQuery = matchMedia("print");
let beingPrinted = false;

const isPrinted = () => beingPrinted || printQuery.matches;
const isDark = () => darkQuery.matches && !isPrinted();
const isNarrow = () => !isPrinted() && innerWidth < 740;

/** How wide a figure is; on paper, where nothing can be measured before, one page or half of it. */
function widthOf(plot) {
  if (!isPrinted()) return plot.clientWidth;
  return plot.closest(".grid") ? 332 : 680;
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
    depth: ["#1f9e9a", "#2f7fc1", "#5b5bc4", "#9a4fb3", "#cc4f86", "#d9713c"],
    heat: ["#f4f7fa", "#cfe0ee", "#93bbdc", "#4e8dc0", "#265f96", "#123a63"],
    times: { compress_s: "#4f7fb5", replay_s: "#9a86c9", wait_s: "#e0a58c", rest_s: "#d5dbe1" },
  },
  dark: {
    text: "#e3e7ec",
    quiet: "#95a0ac",
    line: "#252c35",
    axis: "#3a434e",
    raised: "#181d24",
    dense: "#828d99",
    runs: ["#6ba6e6", "#f0a354", "#5cc49c", "#e27fb4", "#a98fee", "#ccb45a", "#55bfd1", "#ec837f"],
    depth: ["#45c9c4", "#5fa9ea", "#8a8cf0", "#c380dd", "#ee7fb0", "#f29d6b"],
    heat: ["#171d25", "#1c3a56", "#265f8c", "#3f8bbf", "#7dbbe0", "#d9eefb"],
    times: { compress_s: "#6ba6e6", replay_s: "#a593dc", wait_s: "#b9765c", rest_s: "#3c4652" },
  },
};
const DASHES = ["solid", "dash", "dot", "dashdot"];

const colours = () => COLOURS[isDark() ? "dark" : "light"];
const runColour = (i) => colours().runs[i % colours().runs.length];
const runDash = (i) => DASHES[Math.floor(i / colours().runs.length) % DASHES.length];

/** The colour of one of many things in an order, layers or sites: from the first to the last. */
function depthColour(i, count) {
  const stops = colours().depth;
  const at = count > 1 ? (i / (count - 1)) * (stops.length - 1) : 0;
  return blend(stops[Math.floor(at)], stops[Math.ceil(at)], at % 1);
}

function blend(from, to, share) {
  const part = (colour, k) => parseInt(colour.slice(1 + 2 * k, 3 + 2 * k), 16);
  const mixed = [0, 1, 2].map((k) => Math.round(part(from, k) * (1 - share) + part(to, k) * share));
  return `rgb(${mixed.join(", ")})`;
}

/** A colour that lets through what is below. */
function faint(colour, alpha) {
  const part = (k) => parseInt(colour.slice(1 + 2 * k, 3 + 2 * k), 16);
  return `rgba(${part(0)}, ${part(1)}, ${part(2)}, ${alpha})`;
}

const heatScale = () => colours().heat.map((colour, i, all) => [i / (all.length - 1), colour]);

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
