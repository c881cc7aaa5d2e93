// SPDX-License-Identifier: Apache-2.0
// Small plots as SVG: curves with a grid, or shares stacked over time.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const make = (tag, attributes, ...children) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const short = (number) => {
  const size = Math.abs(number);
  if (!Number.isFinite(number)) return "–";
  if (size >= 1e9) return (number / 1e9).toFixed(1) + "G";
  if (size >= 1e6) return (number / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (number / 1e3).toFixed(size >= 1e5 ? 0 : 1) + "k";
  if (size >= 100 || Number.isInteger(number)) return String(Math.round(number));
  if (size >= 1) return number.toFixed(2);
  return size === 0 ? "0" : String(Number(number.toPrecision(3)));
};
const span = (secs) => {
  if (!(secs >= 0)) return "–";
  if (secs < 60) return (secs < 10 ? secs.toFixed(1) : Math.round(secs)) + " s";
  const whole = Math.round(secs), mins = Math.round(secs / 60);
  if (whole < 3600) return Math.floor(whole / 60) + " min " + whole % 60 + " s";
  return Math.floor(mins / 60) + " h " + mins % 60 + " min";
};
/// Round numbers between two, about `n` of them.
const ticks = (low, high, n, least = 0) => {
  const rough = Math.max(least, (high - low) / n) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const all = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9 && all.length < 20; at += step) all.push(at);
  return all;
};
const BOX = { height: 168, left: 40, right: 6, top: 8, bottom: 20 };
/// One unit is one pixel, so that text is never stretched.
const widthOf = (box) => Math.max(200, box.measured || box.clientWidth || 400);
const frame = (label, width, [from, to], text = span) => {
  const { height, left, right } = BOX;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.append(make("text", { x: left, y: height - 5 }, text(from)), make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, text(to)));
  return svg;
};
const nothing = (box, label, text) => {
  const svg = frame(`${label}: ${text}`, widthOf(box), [0, 0]);
  svg.replaceChildren(make("text", { x: widthOf(box) / 2, y: BOX.height / 2, "text-anchor": "middle" }, text));
  box.replaceChildren(svg);
};
/// Where an x belongs, and which x is at a place.
const across = (box, [from, to]) => {
  const width = widthOf(box), length = width - BOX.left - BOX.right;
  return { width, X: (x) => BOX.left + (x - from) / (to - from || 1) * length, at: (px) => from + (px - BOX.left) / length * (to - from) };
};
/// Lines of [x, y] pairs, all finite. Returns where they are, or nothing if there are no points.
const curve = (box, label, lines, range, { text = span, zero, whole } = {}) => {
  const ys = lines.flatMap(({ points }) => points.map(([, y]) => y));
  if (!ys.length) return nothing(box, label, "no data yet");
  const { height, left, right, top, bottom } = BOX, { width, X, at } = across(box, range);
  const lowest = Math.min(...ys), highest = Math.max(...ys);
  let y0 = zero ? Math.min(0, lowest) : lowest, y1 = highest;
  if (y1 - y0 < 1e-12) { const pad = Math.abs(y1) * .1 || 1; y0 -= zero ? 0 : pad; y1 += pad; }
  const Y = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
  const told = lines.filter(({ points, faint }) => points.length && !faint).map(({ name, points }) => `${name} from ${short(points[0][1])} to ${short(points[points.length - 1][1])}`);
  const svg = frame(`${label}: ${told.join(", ")}; lowest ${short(lowest)}, highest ${short(highest)}`, width, range, text);
  for (const y of ticks(y0, y1, 4, whole ? 1 : 0)) {
    svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }));
    svg.append(make("text", { x: left - 5, y: Y(y) + 4, "text-anchor": "end" }, short(y)));
  }
  for (const { points, colour, dots, faint } of lines) {
    if (!points.length) continue;
    const path = points.map(([x, y], n) => `${n ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
    if (lines.length === 1) svg.append(make("path", { class: "under", fill: colour, d: `${path}L${X(points[points.length - 1][0])} ${height - bottom}L${X(points[0][0])} ${height - bottom}Z` }));
    svg.append(make("path", { class: faint ? "curve raw" : "curve", stroke: colour, d: path }));
    if (points.length === 1 || dots) for (const [x, y] of points) svg.append(make("circle", { cx: X(x), cy: Y(y), r: 3, fill: colour }));
  }
  box.replaceChildren(svg);
  return { svg, X, Y, at, width };
};
/// Shares over time: each column adds up to one.
const shares = (box, label, columns, colours, range, { text = span } = {}) => {
  if (columns.length < 2) return nothing(box, label, "no data yet");
  const { height, left, top, bottom } = BOX, { width, X, at } = across(box, range);
  const Y = (y) => height - bottom - y * (height - top - bottom);
  const svg = frame(label, width, range, text);
  for (const y of [0, .5, 1]) svg.append(make("text", { x: left - 5, y: Y(y) + 4, "text-anchor": "end" }, `${y * 100} %`));
  const sums = columns.map(() => 0);
  colours.forEach((colour, kind) => {
    const lower = columns.map(({ x }, n) => [X(x), Y(sums[n])]);
    columns.forEach(({ parts }, n) => { sums[n] += parts[kind]; });
    const upper = columns.map(({ x }, n) => [X(x), Y(sums[n])]);
    const line = (points) => points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
    svg.append(make("path", { fill: colour, d: `M${line(upper)}L${line(lower.reverse())}Z` }));
  });
  box.replaceChildren(svg);
  return { svg, X, at, width };
};
