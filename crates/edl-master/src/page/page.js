// SPDX-License-Identifier: Apache-2.0
// The page of one job. It shows what the master says and asks it for what buttons mean; it
// decides nothing.
"use strict";
const KINDS = ["compute", "communicate", "data_wait", "redo", "heal", "checkpoint", "idle", "down"];
const MEANING = {
  compute: "training and evaluating", communicate: "waiting for parameters or other workers",
  data_wait: "waiting for records", redo: "retraining lost work", heal: "recovering after a failure",
  checkpoint: "copying state for a checkpoint", idle: "nothing to do", down: "process not running",
};
const BAD = /crashed|killed|lost|silent|failed|bad|chaos|refused|not_/;
const GOOD = /joined|succeeded|restored|formed|resumed/;
const FINAL = ["succeeded", "failed", "stopped"];
const MAX_NEW = 1200; // Points, after which the page asks for fewer of them.
const EDGE = 30; // Seconds.
const CPU_SECS = 5;
const css = (kind) => `var(--${kind})`;
const bytes = (number) => number >= 2 ** 30 ? `${(number / 2 ** 30).toFixed(1)} GiB` : `${Math.round(number / 2 ** 20)} MiB`;
const words = (kind) => kind.replaceAll("_", " ");
// The master gives worlds numbers of its term: 3.17 is the seventeenth of the third.
const TERM = 2 ** 40;
const world = (number) => `${Math.floor(number / TERM)}.${number % TERM}`;
const model = { status: null, samples: [], points: [], n_fetched: 0, detail: null, lives: [], events: new Map(), logged: {}, known: -1, usage: new Map(), token: "", isFrozen: false };

// ---- talking to the master ----
const readToken = () => {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem("token") || "";
};
const ask = async (path, body) => {
  const headers = { Authorization: `Bearer ${model.token}`, "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body || {}) });
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer;
};
const wish = async (path, body) => {
  try {
    await ask(path, body);
    notice("");
  } catch (error) {
    notice(`Request failed: ${error.message}`);
  }
};
const remember = (events) => {
  for (const event of events || []) model.events.set(`${event.at_secs}/${event.number}`, event);
  if (model.events.size > 600) for (const key of [...model.events.keys()].slice(0, model.events.size - 500)) model.events.delete(key);
};
const takeAll = ({ status, history, lives, points }) => {
  model.points = points;
  drawAbout(history.about);
  model.samples = history.samples;
  model.lives = history.lives;
  model.known = lives;
  model.logged = history.logged || {};
  model.events.clear();
  remember(history.events);
  takeStatus(status);
};
const takeStatus = (status) => {
  model.status = status;
  for (const { name, step, value } of status.logged || []) {
    const points = model.logged[name] ||= [];
    if (!points.length || points[points.length - 1][0] < step) points.push([step, value]);
  }
  remember(status.events);
  drawSoon();
};
/// CPU time becomes cores in use, over the last seconds.
const takeUsage = (usage, at) => {
  for (const name of model.usage.keys()) if (!(name in usage)) model.usage.delete(name);
  for (const [name, { cpu_secs, memory_bytes }] of Object.entries(usage)) {
    let times = model.usage.get(name)?.times || [];
    // Another process with this name begins at zero.
    if (times.length && times[times.length - 1].cpu_secs > cpu_secs) times = [];
    times = [...times.filter((time) => at - time.at < CPU_SECS), { at, cpu_secs }];
    const secs = at - times[0].at;
    model.usage.set(name, { times, memory: memory_bytes, cores: secs > 0 ? (cpu_secs - times[0].cpu_secs) / secs : null });
  }
};
const get = async (path) => {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
};
const refresh = oneAtATime(async () => {
  // Curves that cannot be read do not take the rest with them.
  const curves = get("api/curves").catch(() => model.points);
  const [all, points] = await Promise.all([get("api/all"), curves]);
  takeAll({ ...all, points });
  model.n_fetched = points.length;
  fetchDetail();
});
/// A range of time has more points than the same part of all time.
const fetchDetail = oneAtATime(async () => {
  const zoom = view.zoom;
  if (!zoom || model.isFrozen || !model.points.length) return;
  const t0 = start(), isTime = view.axis === "time", steps = model.points.filter((p) => p[1] >= zoom[0] && p[1] <= zoom[1]);
  if (!isTime && !steps.length) return;
  const [from, to] = isTime ? zoom.map((secs) => t0 + secs) : [steps[0][0] - EDGE, steps[steps.length - 1][0] + EDGE];
  const points = await get(`api/curves?from=${from}&to=${to}`);
  model.detail = { zoom, points };
  if (view.zoom !== zoom) setTimeout(fetchDetail);
  drawSoon();
});
/// The points of what the plots show, as near to each other as they are known.
const pointsShown = () => {
  const { detail, points } = model;
  if (!view.zoom || detail?.zoom !== view.zoom || !detail.points.length) return points;
  const [from, to] = [detail.points[0][0], detail.points[detail.points.length - 1][0]];
  return [...points.filter((p) => p[0] < from), ...detail.points, ...points.filter((p) => p[0] > to)];
};
const follow = () => {
  const source = new EventSource("api/news");
  source.onopen = () => { $("link").textContent = ""; refresh(); };
  source.onerror = () => {
    const isOver = model.status && FINAL.includes(model.status.state);
    $("link").textContent = isOver ? "the job has ended" : "the master is not responding; retrying";
    if (isOver) source.close();
  };
  source.onmessage = ({ data }) => {
    // Without the history, the plots would show a moment.
    if (model.known < 0) return refresh();
    const news = JSON.parse(data);
    const last = model.samples[model.samples.length - 1];
    const sample = news.sample;
    if (sample && (!last || sample.at_secs > last.at_secs)) {
      model.samples.push(sample);
      model.points.push([sample.at_secs, sample.step, sample.loss, sample.learning_rate, sample.records_per_second, sample.workers]);
    }
    if (model.points.length > model.n_fetched + MAX_NEW || news.lives !== model.known) refresh();
    takeUsage(news.usage, sample.at_secs);
    takeStatus(news.status);
  };
};

// ---- drawing ----
const drawSoon = throttled(() => draw());
const draw = () => {
  const status = model.status;
  if (!status) return;
  document.title = `${status.job} – ${status.state}`;
  $("job").textContent = status.job;
  const state = $("state");
  const shown = status.reason ? `${status.state}: ${status.reason}` : status.state;
  if (state.textContent !== shown) state.textContent = shown;
  state.className = "pill " + (["running", "succeeded", "evaluating"].includes(status.state) ? "good" : ["failed"].includes(status.state) ? "bad" : "");
  drawCourse(status);
  drawTools(status);
  drawTiles(status);
  drawCurves(status);
  drawGoodput(status);
  drawLives();
  drawProcesses(status);
  drawEvents();
  $("foot").textContent = `${status.model_def} · ${status.distribution_strategy} · ${status.job_dir}`;
};
const drawCourse = (status) => {
  const share = status.records_total ? Math.min(100, status.records_done * 100 / status.records_total) : 0;
  const track = $("course").firstElementChild;
  track.setAttribute("aria-valuenow", share.toFixed(1));
  track.firstElementChild.style.width = `${share}%`;
  const epoch = status.job_type === "train" ? `epoch ${Math.min(status.epoch + 1, status.num_epochs || Infinity)}${status.num_epochs ? " of " + status.num_epochs : ""} (${whole(status.batches_done)} of ${whole(status.batches_per_epoch)} batches) · ` : "";
  const left = status.eta_secs >= 0 && !FINAL.includes(status.state) ? ` · ${span(status.eta_secs)} left` : "";
  $("course-text").textContent = `${epoch}${whole(status.records_done)}${status.records_total ? " of " + whole(status.records_total) : ""} records · ${span(status.elapsed_secs)}${left}`;
};
const drawTools = (status) => {
  const isLive = !model.isFrozen && !FINAL.includes(status.state);
  const canChange = isLive && model.token !== "";
  $("scale").hidden = $("stop").hidden = !canChange;
  $("read-only").hidden = !isLive || canChange;
  $("wanted").textContent = status.workers_wanted;
  $("fewer").disabled = status.workers_wanted <= 1;
};
const drawTiles = (status) => {
  const works = status.instances.filter((i) => i.role === "worker" && i.state === "working").length;
  const spares = status.instances.filter((i) => i.state === "spare").length;
  const inWorld = status.lanes ? `world ${world(status.world)}, ${status.lanes} lanes` : "";
  const rows = status.instances.reduce((sum, i) => sum + (i.load ? i.load.rows : 0), 0);
  const total = (what) => [...model.usage.values()].reduce((sum, usage) => sum + (usage[what] || 0), 0);
  const all = [
    ["Step", whole(status.step), status.generation > 1 ? `generation ${status.generation}` : ""],
    ["Loss", status.loss === null ? "nan" : status.loss ? status.loss.toFixed(4) : "–", ""],
    ["Records/s", whole(status.records_per_second), ""],
    ["Learning rate", short(status.learning_rate), ""],
    ["Workers", FINAL.includes(status.state) ? whole(status.workers_wanted) : `${works} of ${status.workers_wanted}`, [inWorld, spares ? (spares === 1 ? "1 spare" : `${spares} spares`) : ""].filter(Boolean).join(", ")],
    ["Goodput", status.goodput ? `${(status.goodput.share * 100).toFixed(1)} %` : "–", status.goodput && status.goodput.repeated ? `batches trained again: ${whole(status.goodput.repeated)}` : "of the workers' time"],
    ...(rows ? [["Embedding rows", whole(rows), "on the servers"]] : []),
    ...(model.usage.size ? [["CPU", `${total("cores").toFixed(1)} cores`, `${bytes(total("memory"))} of memory`]] : []),
  ];
  $("tiles").replaceChildren(...all.map(([name, value, more]) => {
    const tile = el("div", { className: "tile" }, el("span", {}, name), el("b", {}, value), el("small", {}, more));
    tile.dataset.tile = name;
    return tile;
  }));
};
const start = () => model.points.length ? model.points[0][0] : 0;
/// Seconds after the start at which the model had this version.
const secsAt = (version) => {
  const points = model.points;
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][1] < version) low = middle + 1;
    else high = middle;
  }
  return points.length ? points[low][0] - start() : 0;
};
const COLOURS = ["redo", "communicate", "compute", "heal", "checkpoint"].map(css);
/// The name of a metric without the data that it was measured on: `loss` of `val_loss`.
const base = (name) => name.replace(/^(train|training|val|valid|validation|eval|test)[_/.]/, "");
const drawCurves = (status) => {
  const t0 = start(), all = pointsShown(), trained = all.filter((p) => p[1] > 0);
  const over = (n, points = trained) => points.map((p) => [p[0] - t0, p[1], p[n] ?? NaN]);
  const plots = new Map();
  const add = (title, line, options = {}) => {
    if (!plots.has(title)) plots.set(title, { lines: [], ...options });
    plots.get(title).lines.push(line);
  };
  add("Loss", { name: "training", colour: css("compute"), points: over(2) });
  add("Speed", { name: "all workers", colour: css("communicate"), points: over(4) }, { unit: "records/s", zero: true });
  add("Learning rate", { name: "learning rate", colour: css("checkpoint"), points: over(3) }, { zero: true, plain: true });
  add("Active workers", { name: "workers", colour: css("heal"), points: over(5, all) }, { zero: true, whole: true, plain: true });
  const names = [...new Set(status.evaluations.flatMap((e) => Object.keys(e.metrics)))].sort();
  for (const name of names) {
    const points = status.evaluations.filter((e) => name in e.metrics).map((e) => [secsAt(e.version), e.version, e.metrics[name]]);
    add(name === "loss" ? "Loss" : `Evaluation: ${name}`, { name: "validation", colour: css("redo"), dots: true, points });
  }
  for (const [name, logged] of Object.entries(model.logged).sort()) {
    const title = `Logged: ${base(name)}`, colour = COLOURS[(plots.get(title)?.lines.length || 0) % COLOURS.length];
    add(title, { name, colour, dots: logged.length < 60, points: logged.map(([step, value]) => [secsAt(step), step, value]) });
  }
  // All boxes first: they share the width.
  const charts = [...plots].map(([title, { lines, unit, plain, ...options }]) =>
    Object.assign(chartOf(title, $("plots")), { lines: lines.map(finite), unit, plain, options }));
  const range = rangeOf(charts);
  for (const chart of visible(charts)) drawChart(chart, range);
};
const stack = (spent, label) => {
  const total = KINDS.reduce((sum, kind) => sum + spent[kind], 0) || 1;
  const parts = KINDS.filter((kind) => spent[kind] > 0);
  const description = parts.map((kind) => `${(spent[kind] * 100 / total).toFixed(1)} % ${words(kind)}`).join(", ");
  const bar = el("div", { className: "stack", title: description });
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${label}: ${description || "no data yet"}`);
  for (const kind of parts) {
    const part = el("i");
    part.style.width = `${spent[kind] * 100 / total}%`;
    part.style.background = css(kind);
    bar.append(part);
  }
  return bar;
};
const drawGoodput = (status) => {
  const goodput = status.goodput;
  if (!goodput) return;
  const total = KINDS.reduce((sum, kind) => sum + goodput.workers[kind], 0) || 1;
  $("legend").replaceChildren(...KINDS.map((kind) => {
    const dot = el("i");
    dot.style.background = css(kind);
    return el("li", { title: MEANING[kind] }, dot, `${words(kind)} ${(goodput.workers[kind] * 100 / total).toFixed(1)} %`);
  }));
  const columns = [];
  const few = Math.max(1, Math.ceil(model.samples.length / 120));
  for (let n = few; n < model.samples.length; n += few) {
    const [before, after] = [model.samples[n - few], model.samples[n]];
    const parts = after.spent.map((secs, kind) => Math.max(0, secs - before.spent[kind]));
    const sum = parts.reduce((a, b) => a + b, 0);
    if (sum > 0) columns.push({ at: [after.at_secs - start(), after.step], parts: parts.map((part) => part / sum) });
  }
  const chart = Object.assign(chartOf("All workers over time", $("mix")), { unit: "%" });
  chart.lines = KINDS.map((kind, n) => ({ name: words(kind), colour: css(kind), points: columns.map(({ at, parts }) => [...at, parts[n] * 100]) }));
  const label = `Shares of the workers' time: ${KINDS.map((k) => `${words(k)} ${(goodput.workers[k] * 100 / total).toFixed(1)} %`).join(", ")}`;
  const shown = columns.map(({ at, parts }) => ({ x: at[AXES[view.axis].of], parts, at })).filter(({ at }) => isShown(at));
  chart.place = shares(chart.box, label, shown, KINDS.map(css), rangeOf([chart]), { text: AXES[view.axis].text });
  mark(chart);
  const sum = (spent) => KINDS.reduce((all, kind) => all + spent[kind], 0);
  const rows = [["all workers", goodput.workers], ["all servers", goodput.servers]];
  for (const i of status.instances) if (i.spent && sum(i.spent) > 0) rows.push([`${i.role}-${i.id}`, i.spent]);
  $("bars").tBodies[0].replaceChildren(...rows.filter(([, spent]) => sum(spent) > 0).slice(0, 40).map(([name, spent]) => {
    const head = el("th", { scope: "row" }, name);
    return el("tr", {}, head, el("td", {}, stack(spent, name)), el("td", {}, span(sum(spent))));
  }));
};
const shade = (part) => {
  if (part.world) return `hsl(${168 + (part.world % TERM * 47) % 120} 52% ${58 + (part.world % 2) * 8}%)`;
  return { working: css("compute"), serving: css("compute"), running: css("communicate"), leaving: css("idle"), spare: css("idle") }[part.state] || css("data_wait");
};
const drawLives = () => {
  const lives = model.lives.slice(-60), now = model.samples.length ? model.samples[model.samples.length - 1].at_secs : 0;
  const from = Math.min(now, ...lives.map((life) => life.from)), length = Math.max(1, now - from);
  const place = (at) => `${Math.max(0, (at - from) * 100 / length)}%`;
  const rows = lives.map((life) => {
    const lane = el("div", { className: "lane" });
    const end = life.to ?? now;
    life.spans.forEach((part, n) => {
      const until = n + 1 < life.spans.length ? life.spans[n + 1].from : end;
      const piece = el("i", { title: `${part.state}${part.world ? ", world " + world(part.world) : ""} for ${span(until - part.from)}` });
      piece.style.left = place(part.from);
      piece.style.width = `${Math.max(0, (until - part.from) * 100 / length)}%`;
      piece.style.background = shade(part);
      lane.append(piece);
    });
    if (life.to && /kill|crash|silent|heartbeat|signal|lost|chaos/.test(life.why)) {
      const mark = el("u");
      mark.style.left = place(life.to);
      lane.append(mark);
    }
    const row = el("div", { className: life.to ? "life over" : "life" }, el("b", {}, life.name), lane, el("span", { className: "why", title: life.why }, life.to ? (life.why || "exited") : ""));
    row.setAttribute("role", "listitem");
    row.setAttribute("aria-label", `${life.name}, ${span(life.from - from)} to ${life.to ? span(life.to - from) : "now"}${life.to ? ": " + (life.why || "exited") : ""}`);
    return row;
  });
  const scale = el("div", { className: "life" }, el("b"), el("div", { className: "ticks" }, el("span", {}, "0 s"), el("span", {}, span(length / 2)), el("span", {}, span(length))), el("span"));
  scale.setAttribute("aria-hidden", "true");
  $("lives").replaceChildren(...rows, scale);
};
const doing = (i) => {
  if (i.lanes.length) return i.lanes.length === 1 ? `lane ${i.lanes[0]}` : `lanes ${i.lanes[0]}–${i.lanes[i.lanes.length - 1]}`;
  if (i.load) return `${whole(i.load.pulls)} pulls, ${whole(i.load.pushes)} pushes${i.load.rows ? `, ${whole(i.load.rows)} rows` : ""}`;
  return i.address;
};
const drawProcesses = (status) => {
  const canHarm = !model.isFrozen && status.allow_chaos && model.token !== "" && !FINAL.includes(status.state);
  $("processes").querySelector("thead .act").hidden = !canHarm;
  for (const head of $("processes").querySelectorAll("thead .used")) head.hidden = !model.usage.size;
  const body = $("processes").tBodies[0];
  const kept = new Map([...body.rows].map((row) => [row.dataset.name, row]));
  const rows = status.instances.map((i) => {
    const name = i.role === "master" ? "master" : `${i.role}-${i.id}`;
    let row = kept.get(name);
    if (!row) {
      row = el("tr", {}, el("th", { scope: "row" }, name), el("td"), el("td"), el("td"), el("td"), el("td"), el("td"), el("td", { className: "act" }));
      row.dataset.name = name;
      if (i.role !== "master") for (const [how, label] of [["kill", "Kill"], ["pause", "Pause"], ["resume", "Resume"], ["partition", "Disconnect"], ["slow", "Slow down"]]) {
        const button = el("button", { type: "button", className: "small", onclick: () => wish("api/chaos", { role: i.role, id: i.id, how }) }, label);
        button.setAttribute("aria-label", `${label} ${name}`);
        row.lastElementChild.append(button);
      }
    }
    const cells = row.cells;
    cells[1].textContent = i.state;
    cells[2].textContent = i.restarts;
    cells[3].textContent = doing(i);
    cells[4].replaceChildren(...(i.spent ? [stack(i.spent, name)] : []));
    const usage = model.usage.get(name);
    cells[5].textContent = usage && usage.cores !== null ? `${usage.cores.toFixed(2)} cores` : "";
    cells[6].textContent = usage ? bytes(usage.memory) : "";
    cells[5].hidden = cells[6].hidden = !model.usage.size;
    cells[7].hidden = !canHarm;
    return row;
  });
  // Rows that stay are not removed, so that a focused button keeps the focus.
  for (const row of [...body.rows]) if (!rows.includes(row)) row.remove();
  rows.forEach((row, place) => { if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] || null); });
};
const drawAbout = (about) => {
  $("about").hidden = !about || !about.version;
  if ($("about").hidden) return;
  const { command, fields, version, commit, data, machine } = about;
  const has = [machine.cpu, machine.cores === 1 ? "1 core" : `${machine.cores} cores`, machine.memory_bytes && `${bytes(machine.memory_bytes)} of memory`, machine.instruction_set];
  const facts = [
    ["Command", command && el("code", {}, command)],
    ["Version", [version, commit && `commit ${commit}`].filter(Boolean).join(", ")],
    ...data.map(({ name, path, records }) => [`${name[0].toUpperCase()}${name.slice(1)} data`, `${path} (${whole(records)} records)`]),
    ["Machine of the master", has.filter(Boolean).join(", ")],
  ];
  $("facts").replaceChildren(...facts.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  $("fields").tBodies[0].replaceChildren(...fields.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))));
};
let shownEvents = "";
const drawEvents = () => {
  const events = [...model.events.values()].sort((a, b) => b.at_secs - a.at_secs || b.number - a.number).slice(0, 100);
  const key = `${events.length}/${events.length ? events[0].at_secs : 0}`;
  if (key === shownEvents) return;
  shownEvents = key;
  $("events").replaceChildren(...events.map((event) => el("li", { className: BAD.test(event.kind) ? "bad" : GOOD.test(event.kind) ? "good" : "" },
    el("time", {}, clock(event.at_secs)), el("span", { className: "kind" }, words(event.kind)), el("span", { className: "text" }, event.text))));
};

// ---- buttons ----
const scaleBy = (n) => () => wish("api/scale", { workers: model.status.workers_wanted + n });
$("more").onclick = scaleBy(1);
$("fewer").onclick = scaleBy(-1);
$("stop").onclick = () => {
  $("sure-text").textContent = `Stop ${model.status.job}? The job writes a checkpoint and can be resumed later.`;
  $("sure").showModal();
};
$("sure-no").onclick = () => $("sure").close();
$("sure-yes").onclick = () => { $("sure").close(); wish("api/stop"); };
addEventListener("resize", draw);

// ---- start ----
readChoices();
const data = $("data").textContent.trim();
if (data) {
  model.isFrozen = true;
  $("link").textContent = "report";
  takeAll(JSON.parse(data));
} else {
  model.token = readToken();
  const check = model.token ? ask("api/token").catch(() => { model.token = ""; notice("Invalid token; the page is read-only."); }) : Promise.resolve();
  check.then(follow).then(() => { if (model.token) followLogs(); });
}
