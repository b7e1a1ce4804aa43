"use strict";

// What a page is made of besides figures: text, numbers with units, legends and controls.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function swatch(colour) {
  const made = element("span", { class: "swatch" });
  made.style.background = colour;
  return made;
}

/** Text of a run, where Plotly would take a part of it for markup. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

/** Names of layers as labels: without what all have in common, and the middle of long ones. */
function labels(names, longest) {
  const parts = names.map((name) => name.replace(/\.weight$/, "").split("."));
  let common = 0;
  while (
    parts.length > 1 &&
    parts.every((p) => p.length > common + 1 && p[common] === parts[0][common])
  )
    common++;
  return parts.map((part) => shortened(part.slice(common).join("."), longest));
}

function shortened(text, longest) {
  if (text.length <= longest) return text;
  const head = Math.floor((longest - 1) * 0.4);
  return `${text.slice(0, head)}…${text.slice(text.length - (longest - 1 - head))}`;
}

const digits = (value, count = 3) => String(Number(value.toPrecision(count)));

function bytes(value) {
  if (value === null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${digits(value)} ${units[unit]}`;
}

/** A number of any size, as 0.02 or 3e-7. */
function power(value) {
  return value >= 0.001 && value < 10000 ? digits(value) : value.toExponential(0).replace("+", "");
}

/** The unit in which so many seconds are easily read. */
function timeUnit(seconds) {
  if (seconds < 1) return { name: "ms", size: 1e-3 };
  if (seconds < 300) return { name: "s", size: 1 };
  return seconds < 3 * 3600 ? { name: "min", size: 60 } : { name: "h", size: 3600 };
}

const scaled = (values, size) => values.map((v) => (v === null ? null : v / size));
const present = (values) => values.filter((v) => v !== null && v !== undefined);
const range = (count) => Array.from({ length: count }, (_, i) => i);

/** A button that is on or off. */
function toggle(text, on, act, colour = null, label = text) {
  const name = element("span", { class: "name", title: text }, label);
  const made = element("button", { type: "button", "aria-pressed": String(on) });
  made.append(...(colour ? [swatch(colour), name] : [name]));
  made.addEventListener("click", act);
  return made;
}

/** Buttons of which one is on. */
function choice(options, chosen, act) {
  return options.map(([value, text]) => toggle(text, value === chosen, () => act(value)));
}

/** A menu: `options` are pairs of a value and its text. */
function menu(label, options, chosen, act) {
  const select = element("select", { "aria-label": label });
  for (const [value, text] of options) {
    const option = element("option", { value }, text);
    option.selected = String(value) === String(chosen);
    select.append(option);
  }
  select.addEventListener("change", () => act(select.value));
  return select;
}

/** Puts new parts in the place of old ones; the keyboard stays where it was. */
function replaceParts(place, parts) {
  const at = [...place.children].indexOf(document.activeElement);
  place.replaceChildren(...parts);
  if (at >= 0) place.children[at]?.focus({ preventScroll: true });
}

/** What the colours of a figure mean; without `act` it cannot be clicked. */
function showLegend(place, entries, hidden, act) {
  place.classList.toggle("long", entries.length > 30);
  const texts = labels(
    entries.map(([name]) => name),
    40,
  );
  const parts = entries.map(([name, colour], k) => {
    if (act) return toggle(name, !hidden.has(name), () => act(name), colour, texts[k]);
    return element(
      "span",
      { class: "entry" },
      swatch(colour),
      element("span", { class: "name" }, name),
    );
  });
  replaceParts(place, parts);
}
