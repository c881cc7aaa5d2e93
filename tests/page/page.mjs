// SPDX-License-Identifier: Apache-2.0
// Opens the page of a real job in a real browser: sees its curves move, kills a worker by the
// button and sees the job heal, scales it, looks at it in both themes and on a phone, stops it by
// the keyboard, and reads the report that it leaves.
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
  // It takes time and no processor: the browser needs that.
  "train", "--job_name=seen", "--model_def=count", "--model_params=sleep_ms=20", `--training_data=${data}/train`, `--validation_data=${data}/test`,
  "--num_workers=2", "--num_epochs=2000", "--minibatch_size=32", "--evaluation_steps=400", "--learning_rate_schedule=cosine:100:20000",
  "--allow_chaos", "--checkpoint_secs=5",
], { env, stdio: ["ignore", "ignore", "pipe"] });
let said = "";
job.stderr.on("data", (text) => { said += text; });
const ended = new Promise((resolve) => job.on("exit", resolve));

/// Asks again until the answer is good.
const until = async (what, ask) => {
  const start = Date.now();
  for (;;) {
    const answer = await ask().catch(() => null);
    if (answer) return answer;
    assert(Date.now() - start < PATIENCE, `${what} did not come; the job said:\n${said}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
};
const row = (name) => `#processes tr[data-name="${name}"]`;
const tile = (page, name) => page.locator(`[data-tile="${name}"] b`);

const run = async (browser) => {
  const status = await until("the page's address", async () => {
    const status = JSON.parse(await elasticdl("status", "seen", "--json"));
    return status.step > 0 && status.page ? status : null;
  });
  const [address, token] = status.page.split("/#token=");
  assert(said.includes(status.page), "the address is said at the start");

  // Who has no token looks, and can change nothing.
  const post = (path, headers) => fetch(address + path, { method: "POST", headers, body: "{\"workers\":1}" });
  assert.equal((await post("/api/scale", {})).status, 401);
  assert.equal((await post("/api/scale", { Authorization: "Bearer 0123" })).status, 401);
  assert.equal((await post("/api/scale", { Authorization: `Bearer ${token}`, Origin: "http://elsewhere" })).status, 403);
  const stranger = await browser.newPage();
  stranger.setDefaultTimeout(PATIENCE);
  await stranger.goto(address);
  await stranger.locator("#read-only").waitFor();
  await stranger.waitForFunction(() => document.querySelectorAll("#processes tbody tr").length > 2);
  assert.equal(await stranger.locator("#stop").isVisible(), false);
  assert.equal(await stranger.locator("#processes button").first().isVisible(), false);
  await stranger.close();

  // Who has it sees the curves move.
  const { page, errors } = await open(browser, `${address}/#token=${token}`);
  assert.equal(new URL(page.url()).hash, "", "the token does not stay in the address");
  const drawn = () => page.waitForFunction(() => {
    const path = document.querySelector('[data-plot="Loss"] .curve');
    return path && path.getAttribute("d");
  });
  const before = await (await drawn()).jsonValue();
  await page.waitForFunction((before) => document.querySelector('[data-plot="Loss"] .curve').getAttribute("d") !== before, before);
  await page.waitForFunction(() => document.querySelector('[data-plot^="Evaluation"]'));

  // Kill a worker by its button; another takes its place.
  await page.locator(`${row("worker-0")} button`, { hasText: "Kill" }).click();
  await page.locator("#events", { hasText: "worker-0 was killed (SIGKILL)" }).waitFor();
  await page.waitForFunction((row) => document.querySelector(row)?.cells[1].textContent === "working", row("worker-2"));
  assert.equal(await page.locator(row("worker-0")).count(), 0);
  await page.locator("#lives .life.over", { hasText: "worker-0" }).filter({ hasText: "killed" }).waitFor();
  const legend = await page.locator("#legend").textContent();
  for (const kind of ["compute", "communicate", "data wait", "redo", "heal", "checkpoint", "idle", "down"]) assert(legend.includes(kind), legend);

  // One worker more.
  await page.locator("#more").click();
  await page.waitForFunction(() => document.querySelector('[data-tile="Workers"] b').textContent === "3 of 3");
  await page.locator("#notice").waitFor({ state: "hidden" });
  const mix = page.locator("#mix svg path");
  await mix.first().waitFor();

  await looks(page, shoot);
  await page.setViewportSize({ width: 1280, height: 900 });

  // Stop it by the keyboard alone.
  await page.locator("#stop").focus();
  await page.keyboard.press("Enter");
  await page.locator("#sure").waitFor();
  await accessible(page, "the question");
  await page.locator("#sure-yes").focus();
  await page.keyboard.press("Enter");
  assert.equal(await ended, 3, said);
  assert.deepEqual(errors.filter((error) => !/ERR_(CONNECTION|INCOMPLETE|EMPTY)|Failed to load/.test(error)), []);

  // What is left is one file that needs nobody.
  const path = (await elasticdl("report", "seen")).trim();
  const text = readFileSync(path, "utf8");
  assert(!text.includes(token), "a report opens no job");
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
  console.log("page: curves, kill, heal, scale, both themes, phone, keyboard and report are good");
} finally {
  await browser.close();
  job.kill("SIGKILL");
  await ended;
  rmSync(home, { recursive: true, force: true });
}
