// SPDX-License-Identifier: Apache-2.0
// Shared by the tests of pages in a browser.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.env.NODE_MODULES ?? process.cwd(), "x.js"));
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
// Nothing takes longer than this, even if the machine is busy with other tests.
export const PATIENCE = 90_000;
const FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

export const launch = () => chromium.launch({ executablePath: "/usr/bin/chromium", args: FLAGS });

/// Opens a page, and collects its errors.
export const open = async (browser, address) => {
  const page = await browser.newPage({ viewport: { width: 1280, height: 900 }, colorScheme: "light" });
  const errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => { if (message.type() === "error") errors.push(message.text()); });
  page.setDefaultTimeout(PATIENCE);
  await page.goto(address);
  return { page, errors };
};

/// Checks accessibility, as far as a program can.
export const accessible = async (page, where) => {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const issues = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  const details = issues.map(({ id, nodes }) => `${id}: ${nodes.map((node) => `${node.html} (${node.failureSummary})`).join("\n  ")}`);
  assert.equal(issues.length, 0, `${where} has serious accessibility issues:\n${details.join("\n")}`);
};

/// Takes screenshots, if a folder for them is given.
export const shooter = (folder) => {
  if (folder) mkdirSync(folder, { recursive: true });
  return async (page, name) => {
    if (!folder) return;
    await page.evaluate(() => scrollTo(0, 0));
    await page.screenshot({ path: join(folder, `${name}.png`), fullPage: true });
  };
};

/// Checks the page in both themes, set by the system and by the button, and on a phone.
export const looks = async (page, shoot, prefix = "") => {
  await accessible(page, "the light page");
  await shoot(page, `${prefix}light`);
  await page.emulateMedia({ colorScheme: "dark" });
  await accessible(page, "the dark page");
  await shoot(page, `${prefix}dark`);
  await page.locator("#theme").click();
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
  await page.locator("#theme").click();
  await page.setViewportSize({ width: 360, height: 740 });
  await page.waitForFunction(() => document.documentElement.scrollWidth <= 360);
  await accessible(page, "the page on a phone");
  await shoot(page, `${prefix}phone`);
};
