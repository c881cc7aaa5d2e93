// SPDX-License-Identifier: Apache-2.0
// The page of the cluster. It shows what the operator says and can change nothing.
"use strict";
const PAUSE_MS = 2000;
const HIDDEN_PAUSE_MS = 15000;
const PATIENCE_MS = 20000;
// More than a reader looks through; the others are found by the filter.
const MAX_CARDS = 150;
// Layers and moments of the picture of all workers.
const MAX_LAYERS = 40;
const MAX_MOMENTS = 400;
const ENDED = ["Succeeded", "Failed"];
const model = { all: null, tag: "", series: new Map(), cards: new Map() };

// ---- talking to the operator ----
let wake = () => {};
const rest = (ms) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, ms); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) wake(); });
const look = async () => {
  // The operator says when nothing is new; the browser then has the old answer ready.
  const answer = await fetch("api/cluster", { cache: "no-cache", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  const tag = answer.headers.get("etag");
  if (tag && tag === model.tag) return;
  const all = await answer.json();
  model.tag = tag;
  model.all = all;
  model.series = seriesOf(all);
  drawSoon();
};
// One question after the other: a page that cannot keep up asks less often.
const follow = async () => {
  for (;;) {
    try {
      await look();
      $("link").textContent = "";
    } catch {
      $("link").textContent = "the operator is not responding; retrying";
    }
    await rest(document.hidden ? HIDDEN_PAUSE_MS : PAUSE_MS);
  }
};

// ---- sizes over time ----
/// Steps [second, wanted, running] of every job, from the beginning of the picture to now.
const seriesOf = ({ cluster, history }) => {
  const series = new Map();
  const from = history.from_secs;
  for (const id of Object.keys(history.names)) series.set(Number(id), [[from, 0, 0]]);
  for (const [id, wanted, running] of history.first) series.set(id, [[from, wanted, running]]);
  for (const [at, id, wanted, running] of history.changes) series.get(id)?.push([at, wanted, running]);
  const now = cluster ? cluster.at_secs : from;
  for (const steps of series.values()) {
    const [, wanted, running] = steps[steps.length - 1];
    steps.push([now, wanted, running]);
  }
  return series;
};
const times = () => {
  const now = model.all.cluster.at_secs;
  return [Math.min(model.all.history.from_secs, now - 60), now];
};
const colorOf = (id) => `hsl(${(168 + id * 47) % 360} 55% ${46 + (id * 13) % 3 * 8}%)`;
const ago = (secs) => secs < 1 ? "now" : `${span(secs).replace(/ 0 s$/, "")} ago`;
/// A step line through [x, y]: each value counts until the next.
const stepPath = (points) => points.map(([x, y], n) => n ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// ---- drawing ----
const drawSoon = throttled(() => draw());
const draw = () => {
  const { leads, cluster, history } = model.all;
  const state = $("state");
  notice(cluster && cluster.trouble ? cluster.trouble : !leads ? "This operator is on standby. The active operator's page shows the cluster." : "");
  if (!cluster) {
    state.textContent = leads ? "loading" : "standby";
    return;
  }
  const live = cluster.jobs.filter((job) => !ENDED.includes(job.state));
  const waiting = live.filter((job) => job.planned === 0).length;
  const description = leads ? `${live.length} active, ${waiting} waiting` : "standby";
  if (state.textContent !== description) state.textContent = description;
  state.className = leads ? "pill good" : "pill";
  document.title = `${description} – elasticdl cluster`;
  drawTiles(cluster, live, waiting);
  drawStacked(cluster);
  drawLoads(cluster, history);
  drawJobs(cluster);
  drawQueues(cluster);
  drawServices(cluster);
  const since = clock(history.since_secs);
  const [from, now] = times();
  $("since").textContent = history.from_secs > history.since_secs
    ? `The last ${span(now - from)}. This operator has been running since ${since}.`
    : `Since ${since}, when this operator started. Earlier history is not available.`;
  $("foot").textContent = `policy ${cluster.policy} · jobs scale up to ${(cluster.max_load * 100).toFixed(0)} % cluster load · as of ${clock(cluster.at_secs)}`;
};
const KINDS = [
  ["CPU", "cpu_milli", (n) => `${short(n / 1000)} cores`],
  ["Memory", "memory_mib", (n) => n >= 1024 ? `${short(n / 1024)} GiB` : `${n} MiB`],
  ["GPU", "gpu", (n) => `${whole(n)}`],
];
const percent = (part, all) => all > 0 ? `${Math.round(part * 100 / all)} %` : "–";
const drawTiles = (cluster, live, waiting) => {
  const sum = (pick) => live.reduce((all, job) => all + pick(job), 0);
  const { ready, cordoned, leaving } = cluster.nodes;
  const apart = [cordoned ? `${cordoned} cordoned` : "", leaving ? `${leaving} being removed` : ""].filter(Boolean).join(", ");
  const tiles = [
    ["Jobs", String(live.length - waiting), waiting ? `${waiting} waiting` : "none waiting"],
    ["Workers", `${sum((job) => job.running)} of ${sum((job) => job.planned)}`, "running of planned"],
    ["Nodes", String(ready), apart || "all ready"],
  ].map(([name, value, more]) => {
    const tile = el("div", { className: "tile" }, el("span", {}, name), el("b", {}, value), el("small", {}, more));
    tile.dataset.tile = name;
    return tile;
  });
  for (const [name, kind, amount] of KINDS) {
    const total = cluster.total[kind], jobs = cluster.of_jobs[kind], others = cluster.of_others[kind];
    if (!total) continue;
    const bar = el("div", { className: "stack" });
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${name}: ${percent(jobs, total)} training jobs, ${percent(others, total)} other pods`);
    for (const [part, color] of [[jobs, "var(--compute)"], [others, "var(--idle)"]]) {
      const piece = el("i");
      piece.style.width = `${part * 100 / total}%`;
      piece.style.background = color;
      bar.append(piece);
    }
    const tile = el("div", { className: "tile" }, el("span", {}, name), el("b", {}, percent(jobs + others, total)), bar,
      el("small", {}, `jobs ${amount(jobs)}, other ${amount(others)}, of ${amount(total)}`));
    tile.dataset.tile = name;
    tiles.push(tile);
  }
  $("tiles").replaceChildren(...tiles);
};
const place = (width, height, top, bottom, left) => {
  const [from, now] = times();
  return { X: (at) => left + (Math.max(from, at) - from) / (now - from) * (width - left - BOX.right), Y: (high) => (y) => height - bottom - y / (high || 1) * (height - top - bottom) };
};
const axes = (box, label, high, name) => {
  const { height, left, right, top, bottom } = BOX, width = widthOf(box), { X, Y } = place(width, height, top, bottom, left);
  const [from, now] = times();
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.append(make("text", { x: left, y: height - 5 }, ago(now - from)), make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, "now"));
  for (const y of ticks(0, high, 4, 1)) {
    svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: Y(high)(y), y2: Y(high)(y) }));
    svg.append(make("text", { x: left - 5, y: Y(high)(y) + 4, "text-anchor": "end" }, name(y)));
  }
  return { svg, X, Y: Y(high) };
};
/// A job's running workers at these moments.
const sampled = (steps, moments) => {
  let n = 0;
  return moments.map((at) => {
    while (n + 1 < steps.length && steps[n + 1][0] <= at) n += 1;
    return steps[n][2];
  });
};
/// Who had workers: [color, name, workers at these moments]. The smaller ones of many are one.
const layersOf = (moments) => {
  const peak = ([, steps]) => Math.max(...steps.map(([, , running]) => running));
  const alive = [...model.series].filter((entry) => peak(entry) > 0);
  const kept = new Set([...alive].sort((a, b) => peak(b) - peak(a)).slice(0, MAX_LAYERS).map(([id]) => id));
  const layers = alive.filter(([id]) => kept.has(id)).map(([id, steps]) => [colorOf(id), model.all.history.names[id] || "", sampled(steps, moments)]);
  const rest = alive.filter(([id]) => !kept.has(id)).map(([, steps]) => sampled(steps, moments));
  if (rest.length) layers.push(["var(--idle)", `${rest.length} smaller jobs`, moments.map((_, m) => rest.reduce((sum, values) => sum + values[m], 0))]);
  return layers;
};
/// Running workers of all jobs, one on top of the other.
const drawStacked = (cluster) => {
  const [from, now] = times();
  let moments = [...new Set([...model.series.values()].flatMap((steps) => steps.map(([at]) => at)))].sort((a, b) => a - b);
  // More than a screen shows would only take time.
  if (moments.length > MAX_MOMENTS) moments = Array.from({ length: MAX_MOMENTS + 1 }, (_, n) => from + (now - from) * n / MAX_MOMENTS);
  const layers = layersOf(moments);
  const sums = moments.map((_, m) => layers.reduce((sum, [, , values]) => sum + values[m], 0));
  const last = sums.length ? sums[sums.length - 1] : 0;
  $("n-workers").textContent = whole(last);
  const description = cluster.jobs.filter((job) => job.running).slice(0, 12).map((job) => `${job.namespace}/${job.name} ${job.running}`).join(", ");
  const { svg, X, Y } = axes($("stacked"), `Running workers by job; now ${whole(last)}${description ? ": " + description : ""}`, Math.max(1, ...sums), short);
  let lower = moments.map(() => 0);
  for (const [color, name, values] of layers) {
    const upper = lower.map((below, m) => below + values[m]);
    const line = (heights) => moments.map((at, m) => [X(at), Y(heights[m])]);
    let path = stepPath(line(upper));
    // Back along the lower edge, where a value counts to its left.
    line(lower).reverse().forEach(([x, y], n) => { path += n ? `V${y.toFixed(1)}H${x.toFixed(1)}` : `V${y.toFixed(1)}`; });
    svg.append(make("path", { d: `${path}Z`, fill: color }, make("title", {}, name)));
    lower = upper;
  }
  $("stacked").replaceChildren(svg);
  $("stacked").dataset.layers = layers.length;
};
const drawLoads = (cluster, history) => {
  const colors = ["var(--compute)", "var(--communicate)", "var(--redo)"];
  const now = KINDS.map(([name, kind]) => cluster.total[kind] ? `${name} ${percent(cluster.of_jobs[kind] + cluster.of_others[kind], cluster.total[kind])}` : "").filter(Boolean);
  const { svg, X, Y } = axes($("loads"), `Share of the cluster requested by pods; now ${now.join(", ")}`, 100, (y) => `${y} %`);
  const limit = Y(cluster.max_load * 100);
  svg.append(make("line", { class: "limit", x1: BOX.left, x2: X(cluster.at_secs), y1: limit, y2: limit }));
  KINDS.forEach(([name, kind], n) => {
    const points = history.loads.filter((row) => row[n + 1] !== null).map((row) => [X(row[0]), Y(Math.min(100, row[n + 1] / 10))]);
    if (!points.length || !cluster.total[kind]) return;
    points.push([X(cluster.at_secs), points[points.length - 1][1]]);
    svg.append(make("path", { class: "curve", stroke: colors[n], d: stepPath(points) }, make("title", {}, name)));
  });
  const legend = el("ul", { className: "legend" }, ...KINDS.flatMap(([name, kind], n) => {
    if (!cluster.total[kind]) return [];
    const dot = el("i");
    dot.style.background = colors[n];
    return [el("li", {}, dot, name)];
  }));
  $("loads").replaceChildren(svg, legend);
};

// ---- jobs ----
const rank = (job) => ENDED.includes(job.state) ? 2 : job.planned === 0 ? 1 : 0;
const drawJobs = (cluster) => {
  const wanted = $("filter").value.trim().toLowerCase();
  const found = cluster.jobs.filter((job) => `${job.namespace}/${job.name} ${job.queue || ""} ${job.state}`.toLowerCase().includes(wanted));
  found.sort((a, b) => rank(a) - rank(b) || a.submitted_secs - b.submitted_secs || a.id - b.id);
  const shown = found.slice(0, MAX_CARDS);
  const list = $("jobs");
  const ids = new Set(shown.map((job) => job.id));
  for (const [id, card] of model.cards) if (!ids.has(id)) { card.remove(); model.cards.delete(id); }
  // Cards that stay keep their element, and so the focus.
  shown.forEach((job, n) => {
    let card = model.cards.get(job.id);
    if (!card) model.cards.set(job.id, card = newCard(job));
    if (list.children[n] !== card) list.insertBefore(card, list.children[n] || null);
  });
  // All bands are equally wide; to ask for each would lay out the page as often.
  const width = shown.length ? widthOf(model.cards.get(shown[0].id).querySelector(".band")) : 0;
  shown.forEach((job) => fillCard(model.cards.get(job.id), job, width));
  const rest = found.length - shown.length;
  $("more-jobs").hidden = rest === 0 && found.length > 0;
  $("more-jobs").textContent = rest ? `and ${whole(rest)} more; use the filter to find them` : cluster.jobs.length ? "no matching jobs" : "no TrainingJobs found";
};
const part = (tag, name) => el(tag, { className: name });
const newCard = (job) => {
  const dot = el("i");
  dot.style.background = colorOf(job.id);
  const track = el("span", { className: "track" }, el("i"));
  track.setAttribute("role", "progressbar");
  track.setAttribute("aria-label", `Progress of ${job.namespace}/${job.name}`);
  track.setAttribute("aria-valuemin", 0);
  track.setAttribute("aria-valuemax", 100);
  const card = el("li", { className: "card job" },
    el("div", { className: "title" }, dot, el("b", {}, `${job.namespace}/${job.name}`), part("span", "meta")),
    el("div", { className: "size" }, el("b"), part("span", "pill")),
    part("div", "band"),
    el("div", { className: "far" }, part("span", "progress"), track),
    part("p", "why"),
    el("details", {}, el("summary", {}, "Job page"), "Run ", el("code"), ", then open http://localhost:8080/"));
  card.dataset.job = `${job.namespace}/${job.name}`;
  return card;
};
const put = (card, name, text) => {
  const node = card.querySelector(name);
  if (node.textContent !== text) node.textContent = text;
  return node;
};
const fillCard = (card, job, width) => {
  const meta = [job.queue ? `queue ${job.queue}` : "", job.priority ? `priority ${job.priority}` : "", job.servers ? `${job.servers} ${job.servers === 1 ? "server" : "servers"}` : ""];
  put(card, ".meta", meta.filter(Boolean).join(" · "));
  put(card, ".size b", job.granted === job.planned ? `${job.running} of ${job.planned}` : `${job.granted} → ${job.planned}`);
  const pill = put(card, ".pill", job.state || "new");
  pill.className = "pill " + (["Running", "Succeeded"].includes(job.state) ? "good" : job.state === "Failed" ? "bad" : "");
  const far = [job.progress, job.eta && !ENDED.includes(job.state) ? `${job.eta} left` : "", job.records_per_second ? `${short(job.records_per_second)}/s` : ""];
  put(card, ".progress", far.filter(Boolean).join(" · "));
  const track = card.querySelector(".track");
  track.hidden = job.share === null;
  track.setAttribute("aria-valuenow", Math.round((job.share || 0) * 100));
  track.firstElementChild.style.width = `${(job.share || 0) * 100}%`;
  const sentences = [job.why, ENDED.includes(job.state) ? "" : job.not_more].filter(Boolean);
  put(card, ".why", sentences.map((text) => text.charAt(0).toUpperCase() + text.slice(1)).join(". "));
  const details = card.querySelector("details");
  details.hidden = !job.page;
  put(card, "code", job.page || "");
  drawBand(card.querySelector(".band"), job, width);
};
/// Running workers as an area, wanted ones as a line, and the limits between which they may be.
const drawBand = (box, job, width) => {
  const steps = model.series.get(job.id) || [], height = 56, top = 6, bottom = 6, left = 46;
  const high = Math.max(1, job.max || 0, ...steps.map(([, wanted, running]) => Math.max(wanted, running)));
  const { X, Y } = place(width, height, top, bottom, left);
  const y = Y(high), sizes = steps.map(([, , running]) => running);
  const label = `${job.namespace}/${job.name}: workers: ${job.running} running, ${job.planned} planned${job.max ? `, between ${job.min} and ${job.max}` : ""}; range shown ${Math.min(...sizes, job.running)} to ${Math.max(...sizes, job.running)}`;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const limits = job.max === null ? [] : job.min === job.max ? [[job.max, `${job.max}`]] : [[job.min, `min ${job.min}`], [job.max, `max ${job.max}`]];
  for (const [n, name] of limits) {
    svg.append(make("line", { class: "limit", x1: left, x2: width - BOX.right, y1: y(n), y2: y(n) }));
    svg.append(make("text", { x: left - 5, y: Math.min(height - 2, y(n) + 4), "text-anchor": "end" }, name));
  }
  if (steps.length) {
    const running = stepPath(steps.map(([at, , n]) => [X(at), y(n)]));
    const wanted = stepPath(steps.map(([at, n]) => [X(at), y(n)]));
    svg.append(make("path", { d: `${running}V${y(0)}H${X(steps[0][0]).toFixed(1)}Z`, fill: colorOf(job.id), opacity: .55 }));
    svg.append(make("path", { class: "wanted", d: wanted, stroke: colorOf(job.id) }));
  }
  box.replaceChildren(svg);
  box.dataset.steps = steps.length;
};

// ---- queues and services ----
const amounts = (bound) => !bound ? "–" : KINDS.filter(([, kind]) => bound[kind]).map(([name, kind, amount]) => name === "CPU" ? amount(bound[kind]) : `${amount(bound[kind])}${name === "GPU" ? " GPU" : ""}`).join(", ") || "none";
const drawQueues = (cluster) => {
  $("queues").tBodies[0].replaceChildren(...cluster.queues.map((queue) => {
    const cells = [queue.weight, amounts(queue.used), queue.quota ? amounts(queue.quota) : "no limit", queue.quota ? queue.borrow ? amounts(queue.borrow) : "no limit" : "–", queue.n_served, queue.n_waiting];
    const row = el("tr", {}, el("th", { scope: "row" }, queue.name), ...cells.map((text) => el("td", {}, String(text))));
    row.dataset.queue = queue.name;
    return row;
  }));
};
const drawServices = (cluster) => {
  $("services").hidden = cluster.services.length === 0;
  $("services").querySelector("ul").replaceChildren(...cluster.services.map(({ name, pods }) => el("li", {}, `${name}: ${pods} ${pods === 1 ? "pod" : "pods"}`)));
};

// ---- start ----
$("filter").oninput = () => { if (model.all && model.all.cluster) drawJobs(model.all.cluster); };
addEventListener("resize", () => { if (model.all) drawSoon(); });
follow();
