// SPDX-License-Identifier: Apache-2.0
// Plots that a reader can examine with a mouse, a finger or the keyboard: exact values, zoom,
// smoothing, step or time, CSV. What the reader chooses survives a reload.
"use strict";
/// A point is [seconds, step, value].
const AXES = {
  time: { of: 0, text: span, title: (secs) => span(secs) },
  step: { of: 1, text: (step) => whole(step), title: (step) => `step ${whole(step)}` },
};
const DRAG = 6; // Pixels; less is a click.
const view = { axis: "time", smoothing: 0, zoom: null, charts: new Map() };
const recall = (key, isGood) => {
  try {
    const value = localStorage.getItem(key);
    return isGood(value) ? value : null;
  } catch { return null; /* Without a store, choices last as long as the page. */ }
};
const keep = (key, value) => { try { localStorage.setItem(key, value); } catch { /* The same. */ } };
/// All that is known of a number that a plot rounds.
const exact = (value, unit = "") => {
  if (unit === "%") return `${value.toFixed(1)} %`;
  const number = Number(value.toPrecision(7));
  const text = number !== 0 && Math.abs(number) < 1e-4 ? String(number) : number.toLocaleString("en-US", { maximumSignificantDigits: 7 });
  return unit ? `${text} ${unit}` : text;
};
/// The exponential moving average, without the pull of its first value.
const smoothed = (points, weight) => {
  let [sum, total] = [0, 0];
  return points.map(([secs, step, value]) => {
    sum = sum * weight + value * (1 - weight);
    total = total * weight + 1 - weight;
    return [secs, step, sum / total];
  });
};
const x = (point) => point[AXES[view.axis].of];
const isShown = (point) => !view.zoom || (x(point) >= view.zoom[0] && x(point) <= view.zoom[1]);

// ---- choices ----
const zoomTo = (range) => {
  view.zoom = range;
  $("unzoom").disabled = !range;
  const hash = range ? `#zoom=${view.axis},${range.map((end) => Number(end.toPrecision(9))).join(",")}` : "";
  try { history.replaceState(null, "", location.pathname + location.search + hash); } catch { /* A file keeps its address. */ }
  fetchDetail();
  drawSoon();
};
const readZoom = () => {
  const [axis, ...range] = (new URLSearchParams(location.hash.slice(1)).get("zoom") || "").split(",");
  const [from, to] = range.map(Number);
  if (axis in AXES && from < to) [view.axis, view.zoom] = [axis, [from, to]];
};
const readChoices = () => {
  view.axis = recall("axis", (axis) => axis in AXES) || view.axis;
  view.smoothing = Number(recall("smoothing", (text) => text >= 0 && text < 1)) || 0;
  readZoom();
  $("axis").value = view.axis;
  $("smoothing").value = view.smoothing;
  $("smoothing-value").textContent = view.smoothing.toFixed(2);
  $("unzoom").disabled = !view.zoom;
};
$("axis").onchange = () => {
  keep("axis", view.axis = $("axis").value);
  // Steps are no seconds.
  zoomTo(null);
};
$("smoothing").oninput = () => {
  keep("smoothing", view.smoothing = Number($("smoothing").value));
  $("smoothing-value").textContent = view.smoothing.toFixed(2);
  drawSoon();
};
$("unzoom").onclick = () => zoomTo(null);

// ---- one plot ----
/// The plot with this name, in its box; created the first time.
const chartOf = (name, parent) => {
  let chart = view.charts.get(name);
  if (chart) return chart;
  const box = el("div", { className: "chart", tabIndex: 0 });
  const csv = el("button", { type: "button", className: "link", onclick: () => download(chart) }, "CSV");
  csv.setAttribute("aria-label", `Download ${name} as CSV`);
  const last = el("span", { className: "last" });
  const tip = el("output", { className: "tip", hidden: true });
  const figure = el("figure", { className: "card plot" }, el("figcaption", {}, el("b", {}, name), last, csv), el("div", { className: "held" }, box, tip));
  figure.dataset.plot = name;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `${name}: arrow keys show values, plus and minus zoom, 0 shows everything`);
  chart = { name, box, tip, last, figure, lines: [], place: null, cursor: null, drag: null };
  listen(chart);
  view.charts.set(name, chart);
  parent.append(figure);
  return chart;
};
const shownPoints = (chart) => chart.lines.flatMap(({ points }) => points.filter(isShown)).sort((a, b) => x(a) - x(b));
/// The range of x that all plots show.
const rangeOf = (charts) => {
  if (view.zoom) return view.zoom;
  let [from, to] = [Infinity, -Infinity];
  for (const { lines } of charts) for (const { points } of lines) for (const point of points) {
    from = Math.min(from, x(point));
    to = Math.max(to, x(point));
  }
  return from <= to ? [from, Math.max(to, from + 1e-3)] : [0, 1];
};
/// Measures plots all at once, and says which of them a reader can see or has never seen.
const visible = (charts) => charts.filter((chart) => {
  const { width, top, bottom } = chart.box.getBoundingClientRect();
  chart.box.measured = width;
  return !chart.place || (bottom > -innerHeight && top < 2 * innerHeight);
});
addEventListener("scroll", () => drawSoon(), { passive: true });
const finite = ({ points, ...line }) => ({ ...line, points: points.filter(([, , value]) => Number.isFinite(value)) });
/// Draws lines of points into a plot.
const drawChart = (chart, range) => {
  const flat = (points) => points.filter(isShown).map((point) => [x(point), point[2]]);
  const drawn = chart.lines.flatMap((line) => {
    if (!view.smoothing || line.dots || chart.plain) return [{ ...line, points: flat(line.points) }];
    line.smooth = smoothed(line.points, view.smoothing);
    return [{ ...line, points: flat(line.points), faint: true }, { ...line, points: flat(line.smooth) }];
  });
  chart.figure.dataset.points = Math.max(0, ...chart.lines.map(({ points }) => points.length));
  chart.last.replaceChildren(...chart.lines.filter(({ points }) => points.length).map(({ name, colour, points }) => {
    const key = el("i");
    key.style.background = colour;
    const value = `${short(points[points.length - 1][2])}${chart.unit ? ` ${chart.unit}` : ""}`;
    return chart.lines.length > 1 ? el("span", {}, key, `${name} ${value}`) : el("span", {}, value);
  }));
  chart.place = curve(chart.box, chart.name, drawn, range, { ...chart.options, text: AXES[view.axis].text });
  mark(chart);
};
/// Shows the values at the cursor.
const mark = (chart) => {
  const { place, tip, cursor } = chart;
  tip.hidden = !place || !cursor || !isShown(cursor);
  if (tip.hidden) return;
  const near = place.X(x(cursor)), { top, bottom, height } = BOX;
  place.svg.querySelector(".cursor")?.remove();
  const group = make("g", { class: "cursor" }, make("line", { x1: near, x2: near, y1: top, y2: height - bottom }));
  const rows = [el("b", {}, `${AXES.step.title(cursor[1])} · ${AXES.time.title(cursor[0])}`)];
  for (const line of chart.lines) {
    const point = nearest(line.points.filter(isShown), x(cursor));
    if (!point) continue;
    if (place.Y) group.append(make("circle", { cx: place.X(x(point)), cy: place.Y(point[2]), r: 4, fill: line.colour }));
    const key = el("i");
    key.style.background = line.colour;
    const row = el("span", {}, key, `${line.name} ${exact(point[2], chart.unit)}`);
    if (line.smooth && view.smoothing) row.append(`, smoothed ${exact(line.smooth[line.points.indexOf(point)][2])}`);
    if (x(point) !== x(cursor)) row.append(` at ${AXES[view.axis].title(x(point))}`);
    rows.push(row);
  }
  place.svg.append(group);
  tip.replaceChildren(...rows);
  const isRight = near > place.width / 2;
  tip.style.left = isRight ? "auto" : `${near + 10}px`;
  tip.style.right = isRight ? `${place.width - near + 10}px` : "auto";
};
const nearest = (points, at) => points.reduce((best, point) => !best || Math.abs(x(point) - at) < Math.abs(x(best) - at) ? point : best, null);
const show = (chart, cursor) => {
  chart.cursor = cursor;
  chart.place?.svg.querySelector(".cursor")?.remove();
  mark(chart);
};
const zoomAround = (chart, factor) => {
  const points = shownPoints(chart);
  if (!points.length) return;
  const [from, to] = view.zoom || [x(points[0]), x(points[points.length - 1])];
  const middle = chart.cursor ? x(chart.cursor) : (from + to) / 2;
  zoomTo([middle - (middle - from) * factor, middle + (to - middle) * factor]);
};
const listen = (chart) => {
  const { box } = chart;
  const placeOf = (event) => event.clientX - box.getBoundingClientRect().left;
  const select = (from, to) => {
    box.querySelector(".selection")?.remove();
    const [left, right] = [Math.min(from, to), Math.max(from, to)];
    chart.place?.svg.append(make("rect", { class: "selection", x: left, width: right - left, y: BOX.top, height: BOX.height - BOX.top - BOX.bottom }));
  };
  box.onpointerdown = (event) => { if (event.button === 0 && chart.place) chart.drag = placeOf(event); };
  box.onpointermove = (event) => {
    if (!chart.place) return;
    const px = placeOf(event);
    show(chart, nearest(shownPoints(chart), chart.place.at(px)));
    if (chart.drag === null || Math.abs(px - chart.drag) < DRAG) return;
    if (!box.hasPointerCapture(event.pointerId)) box.setPointerCapture(event.pointerId);
    select(chart.drag, px);
  };
  box.onpointerup = (event) => {
    const [from, to] = [chart.drag, placeOf(event)];
    chart.drag = null;
    box.querySelector(".selection")?.remove();
    if (from === null || !chart.place) return;
    const ends = [from, to].map(chart.place.at).sort((a, b) => a - b);
    if (Math.abs(to - from) >= DRAG) zoomTo(ends);
    else show(chart, nearest(shownPoints(chart), chart.place.at(to)));
  };
  box.onpointercancel = () => { chart.drag = null; box.querySelector(".selection")?.remove(); };
  box.onpointerleave = (event) => { if (event.pointerType === "mouse" && document.activeElement !== box) show(chart, null); };
  box.ondblclick = () => zoomTo(null);
  box.onblur = () => show(chart, null);
  box.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const points = shownPoints(chart), step = event.shiftKey ? 10 : 1;
    const place = points.indexOf(chart.cursor && nearest(points, x(chart.cursor)));
    const go = (to) => show(chart, points[Math.max(0, Math.min(points.length - 1, to))] || null);
    const actions = {
      ArrowLeft: () => go(place < 0 ? points.length - 1 : place - step),
      ArrowRight: () => go(place < 0 ? 0 : place + step),
      Home: () => go(0), End: () => go(points.length - 1),
      "+": () => zoomAround(chart, .5), "=": () => zoomAround(chart, .5), "-": () => zoomAround(chart, 2),
      0: () => zoomTo(null), Escape: () => show(chart, null),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  };
};

// ---- CSV ----
const csvOf = (chart) => {
  const rows = new Map();
  chart.lines.forEach(({ points }, n) => points.filter(isShown).forEach(([secs, step, value]) => {
    const key = `${secs}/${step}`;
    if (!rows.has(key)) rows.set(key, [step, secs, ...chart.lines.map(() => "")]);
    rows.get(key)[n + 2] = value;
  }));
  const quoted = (text) => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const title = ({ name }) => quoted(chart.unit ? `${name} (${chart.unit})` : name);
  const body = [...rows.values()].sort((a, b) => a[1] - b[1]);
  return [["step", "seconds", ...chart.lines.map(title)], ...body].map((row) => row.join(",")).join("\n") + "\n";
};
const download = (chart) => {
  const href = URL.createObjectURL(new Blob([csvOf(chart)], { type: "text/csv" }));
  const name = `${model.status.job}-${chart.name}.csv`.replace(/[^\w.-]+/g, "-");
  el("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
};
