// SPDX-License-Identifier: Apache-2.0
// Code that all pages share. Text is inserted as text, never as markup.
"use strict";
const $ = (id) => document.getElementById(id);
const el = (tag, properties, ...children) => {
  const node = Object.assign(document.createElement(tag), properties || {});
  node.append(...children);
  return node;
};
const whole = (number) => Math.round(number).toLocaleString("en-US");
const clock = (secs) => new Date(secs * 1000).toLocaleTimeString("en-GB");
const notice = (text) => {
  $("notice").textContent = text;
  $("notice").hidden = !text;
};
/// Makes of `draw` what may be called as often as one likes. A machine that trains has little time
/// for pictures: they take at most a fifth of it.
const throttled = (draw) => {
  let timer = 0;
  let rested = 0;
  return () => {
    if (timer) return;
    timer = setTimeout(() => {
      timer = 0;
      const began = performance.now();
      draw();
      rested = performance.now() + 4 * (performance.now() - began);
    }, Math.max(0, rested - performance.now()));
  };
};
/// Makes of `ask` what has one question under way at a time: a page that cannot keep up must not
/// ask ever more.
const oneAtATime = (ask) => {
  let asking = null;
  return () => { asking ??= ask().catch(() => {}).finally(() => { asking = null; }); };
};
$("theme").onclick = () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* It is asked for again. */ }
};
try {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* Without a store the system's theme counts. */ }
