// SPDX-License-Identifier: Apache-2.0
// Small plots as SVG: one curve with a grid, or shares stacked over time.
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
  if (secs < 3600) return Math.floor(secs / 60) + " min " + Math.round(secs % 60) + " s";
  return Math.floor(secs / 3600) + " h " + Math.round((secs % 3600) / 60) + " min";
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
const widthOf = (box) => Math.max(200, box.clientWidth || 400);
const frame = (label, width, from, to) => {
  const { height, left, right } = BOX;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.append(make("text", { x: left, y: height - 5 }, span(from)), make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, span(to)));
  return svg;
};
/// A curve of [x, y] pairs; x are seconds.
const curve = (box, label, points, colour, options = {}) => {
  const { height, left, right, top, bottom } = BOX, width = widthOf(box);
  const good = points.filter(([, y]) => Number.isFinite(y));
  if (good.length === 0) {
    const empty = frame(label + ": no data yet", width, 0, 0);
    empty.replaceChildren(make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no data yet"));
    box.replaceChildren(empty);
    return;
  }
  const xs = good.map(([x]) => x), ys = good.map(([, y]) => y);
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1e-3);
  let y0 = options.zero ? Math.min(0, ...ys) : Math.min(...ys), y1 = Math.max(...ys);
  if (y1 - y0 < 1e-12) { const pad = Math.abs(y1) * .1 || 1; y0 -= options.zero ? 0 : pad; y1 += pad; }
  const X = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom);
  const last = ys[ys.length - 1];
  const svg = frame(`${label}: from ${short(ys[0])} to ${short(last)}, lowest ${short(Math.min(...ys))}, highest ${short(Math.max(...ys))}`, width, x0, x1);
  for (const y of ticks(y0, y1, 4, options.whole ? 1 : 0)) {
    svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }));
    svg.append(make("text", { x: left - 5, y: Y(y) + 4, "text-anchor": "end" }, short(y)));
  }
  const path = good.map(([x, y], n) => `${n ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  svg.append(make("path", { class: "under", fill: colour, d: `${path}L${X(x1)} ${height - bottom}L${X(x0)} ${height - bottom}Z` }));
  svg.append(make("path", { class: "curve", stroke: colour, d: path }));
  if (good.length === 1 || options.dots) for (const [x, y] of good) svg.append(make("circle", { cx: X(x), cy: Y(y), r: 3, fill: colour }));
  box.replaceChildren(svg);
};
/// Shares over time: each column adds up to one.
const shares = (box, label, columns, colours) => {
  const { height, left, right, top, bottom } = BOX, width = widthOf(box);
  if (columns.length < 2) return curve(box, label, [], "");
  const x0 = columns[0].x, x1 = columns[columns.length - 1].x;
  const X = (x) => left + (x - x0) / (x1 - x0 || 1) * (width - left - right);
  const Y = (y) => height - bottom - y * (height - top - bottom);
  const svg = frame(label, width, x0, x1);
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
};
