// SPDX-License-Identifier: Apache-2.0
// Opens the operator's page of a cluster in a real browser. Checks that jobs appear, share the
// cluster, wait and are resized by the planner; both themes and a phone; filtering with the
// keyboard; and that a slow page never has two requests in progress.
//
// node cluster.mjs PAGE_FIXTURE [FOLDER FOR SCREENSHOTS]
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { PATIENCE, launch, looks, open, shooter } from "./browser.mjs";

const [binary, shots] = process.argv.slice(2);
const shoot = shooter(shots);
const operator = spawn(binary, { stdio: ["pipe", "pipe", "inherit"] });
const ended = new Promise((resolve) => operator.on("exit", resolve));
const lines = createInterface({ input: operator.stdout })[Symbol.asyncIterator]();
const line = async () => {
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error("the fixture does not respond")), PATIENCE).unref());
  const { value, done } = await Promise.race([lines.next(), late]);
  assert(!done, "the fixture has exited");
  return value;
};
const send = async (command) => {
  operator.stdin.write(`${JSON.stringify(command)}\n`);
  assert.equal(await line(), "done");
};
const card = (name) => `#jobs li[data-job="default/${name}"]`;

const run = async (browser) => {
  const address = await line();
  const { page, errors } = await open(browser, address);
  const inFlight = new Set();
  let most = 0;
  page.on("request", (request) => {
    if (!request.url().endsWith("/api/cluster")) return;
    inFlight.add(request);
    most = Math.max(most, inFlight.size);
  });
  for (const end of ["requestfinished", "requestfailed"]) page.on(end, (request) => inFlight.delete(request));
  await page.locator("#more-jobs", { hasText: "no TrainingJobs found" }).waitFor();

  // The first job gets the whole cluster; the second takes its share; the third does not fit.
  await send({ submit: "alone", spec: { min_workers: 1, max_workers: 7 } });
  await page.locator(`${card("alone")} .pill`, { hasText: "Running" }).waitFor();
  const before = Number((await page.locator(`${card("alone")} .size b`).textContent()).split(" ")[0]);
  assert(before >= 6, `workers of the only job: ${before}`);
  await send({ note: "alone", status: { state: "running", records_done: 420, records_total: 1000, records_per_second: 123, workers: before, eta_secs: 600 } });
  await send({ wait: 900 });
  await send({ submit: "second", spec: { min_workers: 2, max_workers: 4 } });
  await send({ submit: "large", spec: { num_workers: 40 } });
  await send({ wait: 300 });
  await page.locator(`${card("second")} .pill`, { hasText: "Running" }).waitFor();
  await page.waitForFunction(([selector, before]) => Number(document.querySelector(selector).textContent.split(" ")[0]) < before, [`${card("alone")} .size b`, before]);
  await page.locator(`${card("large")} .why`, { hasText: "Not enough CPU for its minimum" }).waitFor();
  await page.locator(`${card("large")} .pill`, { hasText: "Queued" }).waitFor();
  await page.locator(`${card("alone")} .why`, { hasText: "Not scaling up" }).waitFor();
  await page.locator(`${card("alone")} .progress`, { hasText: "42 %" }).waitFor();
  await page.locator(`${card("alone")} .progress`, { hasText: "10m left" }).waitFor();

  // The plot shows that it shrank: more steps than a start and an end; limits are marked.
  assert(Number(await page.locator(`${card("alone")} .band`).getAttribute("data-steps")) > 3);
  const marks = await page.locator(`${card("alone")} .band text`).allTextContents();
  assert.deepEqual(marks, ["min 1", "max 7"]);
  await page.waitForFunction(() => document.querySelector("#stacked").dataset.layers === "2");
  assert.match(await page.locator("#stacked svg").getAttribute("aria-label"), /default\/alone \d, default\/second \d/);
  assert.match(await page.locator('[data-tile="CPU"] b').textContent(), /^\d+ %$/);
  assert.equal(await page.locator('[data-tile="GPU"]').count(), 0, "a resource that the cluster does not have is not shown");
  assert.match(await page.locator("#since").textContent(), /this operator started/);
  assert.equal(await page.locator('#queues tr[data-queue="default"] td').last().textContent(), "1");

  // A service without capacity gets it from jobs above their minimum.
  const held = await page.locator(`${card("alone")} .size b`).textContent();
  await send({ service: "web-1", cpu: "2" });
  await page.waitForFunction(([selector, held]) => document.querySelector(selector).textContent !== held, [`${card("alone")} .size b`, held]);

  // Filtering works with the keyboard; details stay open while the page updates.
  await page.locator("#filter").focus();
  await page.keyboard.type("second");
  await page.waitForFunction(() => document.querySelectorAll("#jobs li").length === 1);
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.tagName), "SUMMARY");
  await page.keyboard.press("Enter");
  await page.locator(`${card("second")} code`, { hasText: "port-forward service/elasticdl-second-master" }).waitFor();
  await send({ note: "second", status: { state: "running", records_done: 10, records_total: 1000, workers: 2 } });
  await page.locator(`${card("second")} .progress`, { hasText: "1 %" }).waitFor();
  assert(await page.locator(`${card("second")} code`).isVisible(), "open details stay open");
  await page.locator("#filter").fill("");
  await page.waitForFunction(() => document.querySelectorAll("#jobs li").length === 3);

  await looks(page, shoot, "cluster-");

  // A slow operator does not get two requests at once.
  await page.route("**/api/cluster", async (route) => {
    await new Promise((resolve) => setTimeout(resolve, 5000));
    await route.continue();
  });
  await page.waitForRequest("**/api/cluster");
  await send({ submit: "fourth", spec: { min_workers: 1, max_workers: 1 } });
  await page.locator(card("fourth")).waitFor();
  assert.equal(most, 1, "requests at once");
  assert.deepEqual(errors, []);

  operator.stdin.end();
  assert.equal(await ended, 0);
  await page.locator("#link", { hasText: "not responding" }).waitFor();
};

const browser = await launch();
try {
  await run(browser);
  console.log("page: the cluster's jobs appear, share, wait and shrink; both themes, phone and keyboard work");
} finally {
  await browser.close();
  operator.kill("SIGKILL");
  await ended;
}
