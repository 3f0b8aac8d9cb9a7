/** Draw series into a .plot element, whose values the pointer and the arrow keys show. */

import { colours } from "./boards.mjs";
import { clamp, make, numberText, svg } from "./dom.mjs";

/** Return about `count` round numbers from low to high. */
export function ticks(low, high, count, whole) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.7);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

/** Return the powers of ten from low to high, and their multiples by 2 and 5 if there is room. */
export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of high / low > 1e3 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
  }
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

function axisText(value) {
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
  if (size > 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

/**
 * Draw series into a .plot element. The pointer and the arrow keys show the values.
 *
 * The options are:
 *
 *   series       [{name, colour, points: [[x, y]], band?: [[x, low, high]], dash?, faint?, dots?}]
 *   height       in CSS pixels
 *   x, label     the name of the x axis, and the name of the plot for screen readers
 *   low?, high?  the ends of the y axis, unless the data determines them
 *   log?         true for a logarithmic y axis
 *   whole?       true if all y are whole numbers
 *   marks?       [{x, strong?}], vertical lines
 *   threshold?   the y of a horizontal line
 *   pick?        the function that takes a clicked x
 */
export function plot(container, options) {
  const width = container.clientWidth;
  if (!width) return;
  const shown = options.series.map((one) => ({
    ...one,
    points: one.points.filter(([, y]) => y !== null && (!options.log || y > 0)),
    band: one.band?.filter(([, low, high]) => low !== null && high !== null),
  }));
  container.replaceChildren();
  if (shown.every((one) => one.points.length === 0)) {
    const reason = options.log ? "No value is above zero." : "No value is finite.";
    container.append(make("p", { class: "quiet small" }, reason));
    return;
  }
  const area = plotArea(shown, options, width);
  const root = svg("svg", { height: options.height, viewBox: `0 0 ${width} ${options.height}`, "aria-hidden": "true" });
  drawAxes(root, area, options);
  for (const one of shown) drawSeries(root, area, one);
  container.append(root);
  showValues(container, root, area, shown, options);
}

/**
 * Return the x values in order, the ticks, the margins (left, right, top, bottom) and the functions
 * toX and toY, which turn values into pixels.
 */
function plotArea(shown, options, width) {
  const { height } = options;
  const all = shown.flatMap((one) => one.points);
  const edges = shown.flatMap((one) => (one.band ?? []).flatMap(([x, low, high]) => [[x, low], [x, high]]));
  const xs = [...new Set(all.map(([x]) => x))].sort((a, b) => a - b);
  let [xLow, xHigh] = [xs[0], xs.at(-1)];
  if (xLow === xHigh) [xLow, xHigh] = [xLow - 0.5, xHigh + 0.5];
  const [low, high] = plotRange([...all, ...edges.filter(([, y]) => !options.log || y > 0)], options);
  const yTicks = options.log ? logTicks(low, high) : ticks(low, high, height < 160 ? 3 : 5, options.whole);
  const left = 10 + 6.8 * Math.max(3, ...yTicks.map((value) => axisText(value).length));
  const [right, top, bottom] = [14, 12, 36];
  // The edge of a band may be zero, which has no logarithm: it lies at the bottom of the plot.
  const scale = options.log ? (value) => Math.log(Math.max(value, low)) : (value) => value;
  const toX = (x) => left + ((x - xLow) / (xHigh - xLow)) * (width - left - right);
  const toY = (y) => top + (1 - (scale(y) - scale(low)) / (scale(high) - scale(low))) * (height - top - bottom);
  return { width, height, xs, xLow, xHigh, yTicks, left, right, top, bottom, toX, toY };
}

/** Return the ends of the y axis, which always differ. */
function plotRange(points, options) {
  let low = options.low ?? Infinity,
    high = options.high ?? -Infinity;
  for (const [, y] of points) [low, high] = [Math.min(low, y), Math.max(high, y)];
  if (options.log) return low === high ? [low / 2, high * 2] : [low, high];
  const room = (high - low) * 0.04 || (Math.abs(low) || 1) * 0.1;
  return [options.low === undefined ? low - room : low, options.high === undefined ? high + room : high];
}

/** Draw the numbers of both axes, the threshold and the marks. */
function drawAxes(root, area, options) {
  const { width, height, xLow, xHigh, yTicks, left, right, top, bottom, toX, toY } = area;
  const across = (y, look) => svg("line", { x1: left, x2: width - right, y1: y, y2: y, ...look });
  const write = (x, y, anchor, text) => root.append(svg("text", { x, y, "text-anchor": anchor }, text));
  for (const value of yTicks) {
    root.append(across(toY(value), { stroke: colours.line }));
    write(left - 7, toY(value) + 4, "end", axisText(value));
  }
  for (const value of ticks(xLow, xHigh, width / 90, true))
    write(toX(value), height - bottom + 17, "middle", axisText(value));
  write(width - right, height - 3, "end", options.x);
  const dotted = { stroke: colours.quiet, "stroke-dasharray": "2 4" };
  if (options.threshold !== undefined) root.append(across(toY(options.threshold), dotted));
  for (const { x, strong } of options.marks ?? []) {
    const look = strong ? { stroke: colours.accent, "stroke-width": 2 } : { ...dotted, "stroke-dasharray": "5 4" };
    root.append(svg("line", { x1: toX(x), x2: toX(x), y1: top, y2: height - bottom, ...look }));
  }
}

function drawSeries(root, { toX, toY }, { points, band, colour, dash, dots, faint }) {
  if (band?.length) {
    const edges = [...band.map(([x, low]) => [x, low]), ...band.map(([x, , high]) => [x, high]).reverse()];
    root.append(svg("path", { d: `${pathOf(edges, toX, toY)}Z`, fill: colour, opacity: 0.18 }));
  }
  const look = { "stroke-width": faint ? 1 : 2, opacity: faint ? 0.4 : 1, "stroke-dasharray": dash ?? "none" };
  const d = pathOf(points, toX, toY);
  root.append(svg("path", { d, fill: "none", stroke: colour, "stroke-linejoin": "round", ...look }));
  if (!dots && points.length > 1) return;
  for (const [x, y] of points) root.append(svg("circle", { cx: toX(x), cy: toY(y), r: 3, fill: colour }));
}

/** Return the line through points as the data of an SVG path. */
const pathOf = (points, toX, toY) =>
  points.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");

/** Show the values under the pointer. In a focused plot, the arrow keys choose the values. */
function showValues(container, root, area, shown, options) {
  const { width, height, xs, xLow, xHigh, left, right, top, bottom, toX } = area;
  const hair = svg("line", { y1: top, y2: height - bottom, stroke: colours.quiet, visibility: "hidden" });
  root.append(hair);
  const tip = make("div", { class: "tip", role: "status", hidden: true });
  container.append(tip);
  container.tabIndex = 0;
  container.setAttribute("role", "group");
  container.setAttribute("aria-label", `${options.label}; arrow keys read the values`);

  let current = -1;
  const show = (index) => {
    current = index;
    const x = xs[index];
    const place = { x1: toX(x), x2: toX(x), visibility: "visible" };
    for (const [name, value] of Object.entries(place)) hair.setAttribute(name, value);
    tip.replaceChildren(make("b", {}, `${options.x} ${x.toLocaleString("en")}`));
    for (const { name, points, faint } of shown) {
      if (faint || points.length === 0) continue;
      const [at, value] = points[nearest(points.map((point) => point[0]), x)];
      // A series without a point near x has no value to show.
      if (Math.abs(at - x) <= (xHigh - xLow) * 0.02) tip.append(make("br"), `${name} ${numberText(value)}`);
    }
    tip.hidden = false;
    const fits = toX(x) + 12 + tip.offsetWidth <= width;
    tip.style.left = `${Math.max(0, fits ? toX(x) + 12 : toX(x) - 12 - tip.offsetWidth)}px`;
    tip.style.top = `${top}px`;
  };
  const hide = () => {
    current = -1;
    hair.setAttribute("visibility", "hidden");
    tip.hidden = true;
  };
  const indexAt = (event) => {
    const share = (event.clientX - root.getBoundingClientRect().left - left) / (width - left - right);
    return nearest(xs, xLow + share * (xHigh - xLow));
  };
  // The container outlives a drawing. The next drawing replaces these properties, but would add
  // another listener.
  root.onpointermove = (event) => show(indexAt(event));
  root.onpointerdown = (event) => (options.pick ? options.pick(xs[indexAt(event)]) : show(indexAt(event)));
  root.onpointerleave = hide;
  container.onblur = hide;
  container.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (options.pick) options.pick(clamp((options.marks?.[0]?.x ?? xLow) + by, xLow, xHigh));
    else show(clamp(current < 0 && by < 0 ? xs.length : current + by, 0, xs.length - 1));
  };
}

/** Return the index of the value that is nearest to x. */
const nearest = (values, x) =>
  values.reduce((best, value, i) => (Math.abs(value - x) < Math.abs(values[best] - x) ? i : best), 0);

/** Make the legend of a plot. */
export function plotKeys(series) {
  const items = series
    .filter(({ faint }) => !faint)
    .map(({ name, colour, dash }) => {
      const look = { stroke: colour, "stroke-width": 2, "stroke-dasharray": dash ?? "none" };
      const sample = svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, ...look });
      return make("li", {}, svg("svg", { "aria-hidden": "true", viewBox: "0 0 26 10" }, sample), name);
    });
  return make("ul", { class: "keys" }, ...items);
}

/** Return the running mean over `reach` points to either side. */
export function smoothed(points, reach) {
  const kept = points.filter(([, y]) => y !== null);
  const sums = [0];
  for (const [, y] of kept) sums.push(sums.at(-1) + y);
  return kept.map(([x], i) => {
    const [first, end] = [Math.max(0, i - reach), Math.min(kept.length, i + reach + 1)];
    return [x, (sums[end] - sums[first]) / (end - first)];
  });
}
