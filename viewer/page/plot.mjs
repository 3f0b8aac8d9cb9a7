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

const axisText = (value) =>
  Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 1e-3)
    ? Math.abs(value) >= 1000
      ? value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 })
      : value.toExponential(0)
    : String(Number(value.toPrecision(4)));

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
  const right = 14,
    top = 12,
    bottom = 36;
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
  if (low === high) {
    const room = (Math.abs(low) || 1) * 0.1;
    if (options.log) [low, high] = [low / 2, high * 2];
    else if (options.low !== undefined) high += 1;
    else [low, high] = [low - room, high + room];
  }
  if (!options.log) {
    const room = (high - low) * 0.04;
    if (options.low === undefined) low -= room;
    if (options.high === undefined) high += room;
  }
  return [low, high];
}

/** Draw the numbers of both axes, the threshold and the marks. */
function drawAxes(root, area, options) {
  const { width, height, xLow, xHigh, yTicks, left, right, top, bottom, toX, toY } = area;
  for (const value of yTicks) {
    root.append(
      svg("line", { x1: left, x2: width - right, y1: toY(value), y2: toY(value), stroke: colours.line }),
      svg("text", { x: left - 7, y: toY(value) + 4, "text-anchor": "end" }, axisText(value)),
    );
  }
  for (const value of ticks(xLow, xHigh, width / 90, true)) {
    root.append(svg("text", { x: toX(value), y: height - bottom + 17, "text-anchor": "middle" }, axisText(value)));
  }
  root.append(svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, options.x));
  if (options.threshold !== undefined) {
    const y = toY(options.threshold);
    root.append(
      svg("line", { x1: left, x2: width - right, y1: y, y2: y, stroke: colours.quiet, "stroke-dasharray": "2 4" }),
    );
  }
  for (const mark of options.marks ?? []) {
    const x = toX(mark.x);
    const look = mark.strong
      ? { stroke: colours.accent, "stroke-width": 2 }
      : { stroke: colours.quiet, "stroke-dasharray": "5 4" };
    root.append(svg("line", { x1: x, x2: x, y1: top, y2: height - bottom, ...look }));
  }
}

function drawSeries(root, { toX, toY }, one) {
  if (one.band?.length) {
    const edge = (place) => one.band.map((point) => [point[0], point[place]]);
    const d = pathOf([...edge(1), ...edge(2).reverse()], toX, toY);
    root.append(svg("path", { d: `${d}Z`, fill: one.colour, opacity: 0.18 }));
  }
  root.append(
    svg("path", {
      d: pathOf(one.points, toX, toY),
      fill: "none",
      stroke: one.colour,
      "stroke-width": one.faint ? 1 : 2,
      "stroke-linejoin": "round",
      opacity: one.faint ? 0.4 : 1,
      "stroke-dasharray": one.dash ?? "none",
    }),
  );
  if (one.dots || one.points.length === 1) {
    for (const [x, y] of one.points) root.append(svg("circle", { cx: toX(x), cy: toY(y), r: 3, fill: one.colour }));
  }
}

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

  let place = -1;
  const show = (index) => {
    place = index;
    const x = xs[index];
    hair.setAttribute("x1", toX(x));
    hair.setAttribute("x2", toX(x));
    hair.setAttribute("visibility", "visible");
    tip.replaceChildren(make("b", {}, `${options.x} ${x.toLocaleString("en")}`));
    for (const one of shown) {
      if (one.faint || one.points.length === 0) continue;
      const near = nearest(one.points, x);
      // A series without a point near x has no value to show.
      if (Math.abs(near[0] - x) > (xHigh - xLow) * 0.02) continue;
      tip.append(make("br"), `${one.name} ${numberText(near[1])}`);
    }
    tip.hidden = false;
    tip.style.left = `${clamp(toX(x) + 12, 0, Math.max(0, width - tip.offsetWidth))}px`;
    if (toX(x) + 12 + tip.offsetWidth > width) tip.style.left = `${Math.max(0, toX(x) - 12 - tip.offsetWidth)}px`;
    tip.style.top = `${top}px`;
  };
  const hide = () => {
    place = -1;
    hair.setAttribute("visibility", "hidden");
    tip.hidden = true;
  };
  const indexAt = (event) => {
    const x =
      xLow + ((event.clientX - root.getBoundingClientRect().left - left) / (width - left - right)) * (xHigh - xLow);
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
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
    else show(clamp(place < 0 ? (by > 0 ? 0 : xs.length - 1) : place + by, 0, xs.length - 1));
  };
}

/** Return the line through points as the data of an SVG path. */
export const pathOf = (points, toX, toY) =>
  points.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");

/** Return the point whose x is nearest. The points are in ascending order. */
function nearest(points, x) {
  let low = 0,
    high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}

/** Make the legend of a plot. */
export function plotKeys(series) {
  const list = make("ul", { class: "keys" });
  for (const one of series.filter((each) => !each.faint)) {
    const sample = svg(
      "svg",
      { "aria-hidden": "true", viewBox: "0 0 26 10" },
      svg("line", {
        x1: 0,
        x2: 26,
        y1: 5,
        y2: 5,
        stroke: one.colour,
        "stroke-width": 2,
        "stroke-dasharray": one.dash ?? "none",
      }),
    );
    list.append(make("li", {}, sample, one.name));
  }
  return list;
}

/** Return the running mean over `reach` points to either side. */
export function smoothed(points, reach) {
  const sums = [0];
  const kept = points.filter(([, y]) => y !== null);
  for (const [, y] of kept) sums.push(sums.at(-1) + y);
  return kept.map(([x], i) => {
    const first = Math.max(0, i - reach),
      end = Math.min(kept.length, i + reach + 1);
    return [x, (sums[end] - sums[first]) / (end - first)];
  });
}
