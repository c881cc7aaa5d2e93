// SPDX-License-Identifier: Apache-2.0
// The logs of the job's processes, for readers with the token. Only a part of a log is kept, and
// nothing is read while the logs are out of sight.
"use strict";
const MAX_CHUNK = 64 << 10, MAX_CHUNKS = 8;
const EVERY = 1000;
/// Adjacent parts of one log, in order.
const log = { process: "", chunks: [], isSeen: false, shown: "" };

const askLogs = async (range) => (await ask("api/logs", { process: log.process, ...range })).json();
const setProcesses = (names) => {
  const select = $("log-process");
  if (names.join() === [...select.options].map((option) => option.value).join()) return;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (!names.includes(log.process)) log.process = names.find((name) => name.startsWith("worker")) || names[0] || "";
  select.value = log.process;
};
/// Adds a part at the end. A small one joins the last one, so that there are few.
const append = ({ from, to, text }) => {
  const last = log.chunks[log.chunks.length - 1];
  // The log was emptied, and begins again.
  if (last && from !== last.to) log.chunks = [];
  if (last && from === last.to && to - last.from <= MAX_CHUNK) Object.assign(last, { to, text: last.text + text });
  else if (text) log.chunks.push({ from, to, text });
  if (log.chunks.length > MAX_CHUNKS) log.chunks.shift();
};
const readLog = oneAtATime(async () => {
  const process = log.process;
  const last = log.chunks[log.chunks.length - 1];
  const part = await askLogs(last ? { from: last.to } : {});
  if (log.process === process) setProcesses(part.processes);
  if (log.process === process) append(part);
  // Another one was chosen meanwhile.
  else setTimeout(readLog);
  // Far behind, for example after a while out of sight: continue from the end.
  if (last && log.process === process && part.to - part.from > MAX_CHUNK / 2) {
    log.chunks = [];
    setTimeout(readLog);
  }
  drawLog();
});
const readEarlier = oneAtATime(async () => {
  const [process, first] = [log.process, log.chunks[0]];
  if (!first || first.from === 0) return;
  const part = await askLogs({ to: first.from });
  if (log.process !== process || log.chunks[0] !== first) return;
  // A reader of the past does not follow.
  $("log-follow").checked = false;
  if (part.to === first.from && part.text) log.chunks.unshift(part);
  if (log.chunks.length > MAX_CHUNKS) log.chunks.pop();
  drawLog();
});
const drawLog = () => {
  const wanted = $("log-filter").value.toLowerCase();
  const lines = log.chunks.map(({ text }) => text).join("").split("\n").slice(0, -1);
  const found = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
  const first = log.chunks[0];
  $("log-earlier").disabled = !first || first.from === 0;
  const count = wanted ? `${whole(found.length)} of ${whole(lines.length)} lines` : `${whole(lines.length)} lines`;
  if ($("log-count").textContent !== count) $("log-count").textContent = count;
  const text = found.join("\n") || (log.process ? "no lines" : "no logs in the job folder");
  const box = $("log");
  if (text !== log.shown) box.textContent = log.shown = text;
  if ($("log-follow").checked) box.scrollTop = box.scrollHeight;
};
$("log-process").onchange = () => {
  log.process = $("log-process").value;
  log.chunks = [];
  readLog();
};
$("log-filter").oninput = drawLog;
$("log-follow").onchange = () => {
  // After a look at the past, the end may be missing.
  if ($("log-follow").checked) log.chunks = [];
  readLog();
};
$("log-earlier").onclick = readEarlier;
/// Shows the logs to a reader with the token.
const followLogs = () => {
  $("logs").hidden = false;
  new IntersectionObserver((entries) => {
    log.isSeen = entries[entries.length - 1].isIntersecting;
    if (log.isSeen) readLog();
  }).observe($("logs"));
  setInterval(() => {
    if (log.isSeen && !document.hidden && $("log-follow").checked) readLog();
  }, EVERY);
};
