// SPDX-License-Identifier: Apache-2.0
// Opens the page of a real job in a real browser. Checks that its curves move, kills a worker with
// the button and checks that the job recovers, scales it, checks both themes and a phone, stops the
// job with the keyboard, and reads its report.
//
// node page.mjs ELASTICDL DATA [FOLDER FOR SCREENSHOTS]
import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { PATIENCE, accessible, launch, looks, open, shooter } from "./browser.mjs";

const [binary, data, shots] = process.argv.slice(2);
const shoot = shooter(shots);
const home = mkdtempSync(join(tmpdir(), "elasticdl-page-"));
const env = { ...process.env, ELASTICDL_HOME: home };
const elasticdl = async (...args) => (await promisify(execFile)(binary, args, { env })).stdout;
const job = spawn(binary, [
  // The job sleeps and uses little CPU time, which the browser needs.
  "train", "--job_name=seen", "--model_def=count", "--model_params=sleep_ms=20", `--training_data=${data}/train`, `--validation_data=${data}/test`,
  "--num_workers=2", "--num_epochs=2000", "--minibatch_size=32", "--evaluation_steps=400", "--learning_rate_schedule=cosine:100:20000",
  "--allow_chaos", "--checkpoint_secs=5",
], { env, stdio: ["ignore", "ignore", "pipe"] });
let printed = "";
job.stderr.on("data", (text) => { printed += text; });
const ended = new Promise((resolve) => job.on("exit", resolve));

/// Retries until there is a result.
const until = async (what, ask) => {
  const start = Date.now();
  for (;;) {
    const answer = await ask().catch(() => null);
    if (answer) return answer;
    assert(Date.now() - start < PATIENCE, `timed out waiting for ${what}; the job printed:\n${printed}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
};
const row = (name) => `#processes tr[data-name="${name}"]`;
const tile = (page, name) => page.locator(`[data-tile="${name}"] b`);

/// What a reader does with the plots: values, axis, smoothing, zoom, CSV.
const examine = async (page) => {
  const loss = page.locator('[data-plot="Loss"]'), chart = loss.locator(".chart"), tip = loss.locator(".tip");
  // Training and validation are in one plot.
  await loss.locator(".last", { hasText: "validation" }).waitFor();
  await page.waitForFunction(() => document.querySelectorAll('[data-plot="Loss"] .curve').length === 2);
  await page.waitForFunction(() => document.querySelector('[data-plot="Loss"]').dataset.points > 12);

  // The mouse shows exact values, a finger does, and the keyboard does.
  const place = async () => {
    await chart.scrollIntoViewIfNeeded();
    return chart.boundingBox();
  };
  const value = /^step [\d,]+ · [\w. ]+ straining -?[\d.]+(e-\d+)?( at [\w ,.]+)?validation -?[\d.]+( at [\w ,.]+)?$/;
  let { x, y, width, height } = await place();
  await page.mouse.move(x + width / 2, y + height / 2);
  assert.match(await tip.textContent(), value);
  await page.mouse.move(x + width / 2, y - 60);
  await tip.waitFor({ state: "hidden" });
  const speed = page.locator('[data-plot="Speed"]');
  await speed.locator(".chart").dispatchEvent("pointermove", { pointerType: "touch", pointerId: 7, clientX: (await speed.boundingBox()).x + 90 });
  assert.match(await speed.locator(".tip").textContent(), /all workers [\d,.]+ records\/s$/);
  await chart.focus();
  await page.keyboard.press("End");
  const last = await tip.textContent();
  assert.match(last, value);
  await page.keyboard.press("Home");
  assert.notEqual(await tip.textContent(), last);
  const first = await tip.textContent();
  await page.keyboard.press("ArrowRight");
  assert.notEqual(await tip.textContent(), first);
  await page.keyboard.press("Escape");
  assert.equal(await tip.isVisible(), false);

  // The axis, smoothing and zoom survive a reload.
  await page.locator("#axis").selectOption("step");
  await page.locator("#smoothing").fill("0.6");
  await page.waitForFunction(() => document.querySelectorAll('[data-plot="Loss"] .curve.raw').length === 1);
  ({ x, y, width, height } = await place());
  await page.mouse.move(x + 90, y + height / 2);
  await page.mouse.down();
  await page.mouse.move(x + 120, y + height / 2);
  assert.equal(await chart.locator(".selection").count(), 1);
  await page.mouse.move(x + 290, y + height / 2);
  // The master has more points of a part than of the whole.
  await Promise.all([page.waitForResponse(/api\/curves\?from=\d/), page.mouse.up()]);
  const ends = () => page.evaluate(() => [...document.querySelectorAll('[data-plot="Speed"] svg > text')].slice(0, 2).map((text) => text.textContent));
  await page.waitForFunction(() => location.hash.startsWith("#zoom=step,"));
  await page.waitForFunction(() => document.querySelector('[data-plot="Speed"] svg > text').textContent !== "0");
  const zoomed = await ends();
  await page.reload();
  await page.waitForFunction((zoomed) => document.querySelector('[data-plot="Speed"] svg > text + text')?.textContent === zoomed, zoomed[1]);
  assert.deepEqual(await ends(), zoomed);
  assert.deepEqual(await page.evaluate(() => [$("axis").value, $("smoothing").value]), ["step", "0.6"]);
  await page.locator("#stop").waitFor();

  // CSV has what the plot shows.
  const [saved] = await Promise.all([page.waitForEvent("download"), loss.getByRole("button", { name: "Download Loss as CSV" }).click()]);
  assert.equal(saved.suggestedFilename(), "seen-Loss.csv");
  const [head, ...rows] = readFileSync(await saved.path(), "utf8").trim().split("\n");
  assert.equal(head, "step,seconds,training,validation");
  const [low, high] = zoomed.map((text) => Number(text.replaceAll(",", "")));
  for (const row of rows) {
    const [step, secs, ...values] = row.split(",");
    assert(step >= low - 1 && step <= high + 1 && secs > 0 && values.some((value) => Number.isFinite(parseFloat(value))), row);
  }
  assert(rows.length > 0);

  // The keyboard zooms, too.
  await chart.focus();
  await page.keyboard.press("+");
  await page.waitForFunction((from) => document.querySelector('[data-plot="Speed"] svg > text').textContent !== from, zoomed[0]);
  await page.keyboard.press("0");
  await page.waitForFunction(() => location.hash === "" && $("unzoom").disabled);
  await page.locator("#axis").selectOption("time");
  await page.locator("#smoothing").fill("0");
};

/// Follows a log, searches it, and switches to another one.
const readLogs = async (page) => {
  const lines = page.locator("#log");
  await lines.scrollIntoViewIfNeeded();
  await page.locator("#log-process").selectOption("master");
  await lines.filter({ hasText: "master started" }).waitFor();
  const before = (await lines.textContent()).length;
  await page.waitForFunction((before) => document.querySelector("#log").textContent.length > before, before);
  await page.locator("#log-filter").fill("MASTER started");
  await page.waitForFunction(() => /^1 of [\d,]+ lines$/.test(document.querySelector("#log-count").textContent));
  assert.match(await lines.textContent(), /^\[[^\n]*master started[^\n]*$/);
  await page.locator("#log-filter").fill("");
  await page.locator("#log-process").selectOption("worker-1");
  await page.waitForFunction(() => !/master started|no lines/.test(document.querySelector("#log").textContent));
};

const run = async (browser) => {
  const status = await until("the page's address", async () => {
    const status = JSON.parse(await elasticdl("status", "seen", "--json"));
    return status.step > 0 && status.page ? status : null;
  });
  const [address, token] = status.page.split("/#token=");
  assert(printed.includes(status.page), "the address is printed at the start");

  // Without the token, the page is read-only.
  const post = (path, headers) => fetch(address + path, { method: "POST", headers, body: "{\"workers\":1}" });
  assert.equal((await post("/api/scale", {})).status, 401);
  assert.equal((await post("/api/logs", {})).status, 401, "logs can contain secrets");
  assert.equal((await post("/api/scale", { Authorization: "Bearer 0123" })).status, 401);
  assert.equal((await post("/api/scale", { Authorization: `Bearer ${token}`, Origin: "http://elsewhere" })).status, 403);
  const visitor = await browser.newPage();
  visitor.setDefaultTimeout(PATIENCE);
  await visitor.goto(address);
  await visitor.locator("#read-only").waitFor();
  await visitor.waitForFunction(() => document.querySelectorAll("#processes tbody tr").length > 2);
  assert.equal(await visitor.locator("#stop").isVisible(), false);
  assert.equal(await visitor.locator("#processes button").first().isVisible(), false);
  assert.equal(await visitor.locator("#logs").isVisible(), false);
  await visitor.close();

  // With the token, the curves move.
  const { page, errors } = await open(browser, `${address}/#token=${token}`);
  assert.equal(new URL(page.url()).hash, "", "the token is removed from the address");
  const drawn = () => page.waitForFunction(() => {
    const path = document.querySelector('[data-plot="Loss"] .curve');
    return path && path.getAttribute("d");
  });
  const before = await (await drawn()).jsonValue();
  await page.waitForFunction((before) => document.querySelector('[data-plot="Loss"] .curve').getAttribute("d") !== before, before);
  await examine(page);

  // The job, its data and its machine; what every process uses.
  const facts = await page.locator("#facts").textContent();
  for (const part of ["train --job_name=seen", "commit ", "/train (10,000 records)", "/test (", " cores", "GiB of memory"]) assert(facts.includes(part), `${part}: ${facts}`);
  const fields = await page.locator("#fields").textContent();
  for (const part of ["model_params", "sleep_ms=20", "num_epochs2000"]) assert(fields.includes(part), `${part}: ${fields}`);
  assert(!fields.includes("seed"), fields);
  for (const name of ["master", "ps-0", "worker-1"]) {
    await page.locator(row(name), { hasText: /\d\.\d\d cores\d+ MiB/ }).waitFor();
    const { cpu_secs, memory_bytes } = JSON.parse(await elasticdl("status", "seen", "--json")).usage[name];
    assert(cpu_secs > 0 && memory_bytes > 1 << 20, name);
  }
  await page.locator('[data-tile="CPU"]', { hasText: /MiB of memory/ }).waitFor();

  await readLogs(page);

  // Kill a worker with its button; another one replaces it.
  await page.locator(`${row("worker-0")} button`, { hasText: "Kill" }).click();
  await page.locator("#events", { hasText: "worker-0 was killed (SIGKILL)" }).waitFor();
  await page.waitForFunction((row) => document.querySelector(row)?.cells[1].textContent === "working", row("worker-2"));
  assert.equal(await page.locator(row("worker-0")).count(), 0);
  await page.locator("#lives .life.over", { hasText: "worker-0" }).filter({ hasText: "killed" }).waitFor();
  const legend = await page.locator("#legend").textContent();
  for (const kind of ["compute", "communicate", "data wait", "redo", "heal", "checkpoint", "idle", "down"]) assert(legend.includes(kind), legend);

  // Add a worker.
  await page.locator("#more").click();
  await page.waitForFunction(() => document.querySelector('[data-tile="Workers"] b').textContent === "3 of 3");
  await page.locator("#notice").waitFor({ state: "hidden" });
  const mix = page.locator("#mix svg path");
  await mix.first().waitFor();

  await looks(page, shoot);
  await page.setViewportSize({ width: 1280, height: 900 });

  // Stop it with only the keyboard.
  await page.locator("#stop").focus();
  await page.keyboard.press("Enter");
  await page.locator("#sure").waitFor();
  await accessible(page, "the confirmation dialog");
  await page.locator("#sure-yes").focus();
  await page.keyboard.press("Enter");
  assert.equal(await ended, 3, printed);
  assert.deepEqual(errors.filter((error) => !/ERR_(CONNECTION|INCOMPLETE|EMPTY)|Failed to load/.test(error)), []);

  // The report is one self-contained file.
  const path = (await elasticdl("report", "seen")).trim();
  const text = readFileSync(path, "utf8");
  assert(!text.includes(token), "a report must not contain the token");
  const report = await browser.newPage({ viewport: { width: 1280, height: 900 }, colorScheme: "light", offline: true });
  await report.goto(`file://${path}`);
  await report.locator("#state", { hasText: "stopped" }).waitFor();
  assert.equal(await report.locator("#job").textContent(), "seen");
  assert((await report.locator('[data-plot="Loss"]').getAttribute("data-points")) > 3);
  await report.locator("#lives .life.over", { hasText: "worker-0" }).first().waitFor();
  assert.equal(await report.locator("#stop").isVisible(), false);
  assert.match(await tile(report, "Goodput").textContent(), /%/);
  assert.match(await tile(report, "Records/s").textContent(), /[1-9]/, "the speed of the whole job");
  assert.doesNotMatch(await tile(report, "Workers").textContent(), /^0 of/);
  await accessible(report, "the report");
  await shoot(report, "report");
};

const browser = await launch();
try {
  await run(browser);
  console.log("page: curves, kill, recovery, scale, both themes, phone, keyboard and report work");
} finally {
  await browser.close();
  job.kill("SIGKILL");
  await ended;
  rmSync(home, { recursive: true, force: true });
}
