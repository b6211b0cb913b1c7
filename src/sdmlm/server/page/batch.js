// The second view: many prompts, a few at a time, into a table that can be filtered, sorted and downloaded.

import * as api from "./api.js";
import { differenceNodes } from "./difference.js";
import { announce, byId, clearProblem, element, icon, showProblem } from "./dom.js";
import { parsePrompts } from "./jsonl.js";
import { OUTCOMES, number, outcome, probability } from "./sdm.js";

const AT_ONCE = 4; // the server batches what waits; more would only fill its queue
const PAGE = 500; // rows drawn at first: a browser is slow with ten thousand
const KINDS = {
  ...OUTCOMES,
  error: { icon: "error", name: "Error" },
  open: { icon: "open", name: "Waiting" },
  cancelled: { icon: "open", name: "Cancelled" },
};
const FILTERS = ["all", ...Object.keys(OUTCOMES), "error"];
const COLUMNS = [
  { name: "Line", value: (row) => row.line },
  { name: "Outcome", value: (row) => KINDS[row.kind].short ?? KINDS[row.kind].name },
  { name: "Prompt", value: (row) => row.messages.at(-1).content },
  { name: "Answer", value: (row) => row.evidence?.text ?? row.error },
  { name: "SDM output", value: (row) => row.evidence?.probability, text: probability },
  { name: "q′", value: (row) => row.evidence?.q_prime, text: number },
  { name: "d", value: (row) => row.evidence?.d, text: number },
];

let readRows = []; // rows read, not yet started
let rows = []; // { line, input, messages, kind, evidence, error, element } of the run shown
let running = null; // AbortController
let order = { column: COLUMNS[0], sign: 1 };
let shown = PAGE;
let drawing = false;
let onWhy = () => {};

/** `why` is called with a row whose evidence is to be shown in full. */
export function setUp(why) {
  onWhy = why;
  byId("file").addEventListener("change", (event) => readFile(event.target.files[0]));
  byId("paste").addEventListener("input", (event) => take(event.target.value));
  byId("batch-start").addEventListener("click", start);
  byId("batch-cancel").addEventListener("click", () => running?.abort());
  byId("batch-download").addEventListener("click", download);
  byId("batch-more").addEventListener("click", () => {
    shown += PAGE;
    draw();
  });
  acceptDrops(byId("drop"));
  byId("batch-head").replaceChildren(...COLUMNS.map(headCell), element("th", { scope: "col" }, "Why"));
  byId("filter").replaceChildren(...FILTERS.map(filterChoice));
}

// Reading prompts

function acceptDrops(zone) {
  zone.addEventListener("dragover", (event) => {
    event.preventDefault(); // without this the browser would open the file instead
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return; // dropped text belongs to the box below it
    event.preventDefault();
    zone.classList.remove("over");
    readFile(event.dataTransfer.files[0]);
  });
}

async function readFile(file) {
  if (!file) return;
  byId("paste").value = "";
  try {
    take(new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()), ` in ${file.name}`);
  } catch {
    take("");
    showProblem(`${file.name} is not UTF-8 text: save it as UTF-8 and try again.`);
  }
}

function take(text, where = "") {
  clearProblem();
  const { good, bad } = parsePrompts(text);
  readRows = good;
  const plural = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  byId("batch-found").textContent = text.trim() ? `${plural(good.length, "prompt")}${where}.` : "";
  byId("bad-lines").hidden = bad.length === 0;
  byId("bad-lines-title").textContent = `${plural(bad.length, "line")} left out`;
  const said = bad.map(({ line, message }) => element("li", {}, `Line ${line}: ${message}`));
  byId("bad-lines-list").replaceChildren(...said);
  byId("batch-start").disabled = good.length === 0 || running !== null;
}

// Running

async function start() {
  rows = readRows.map((row) => ({ ...row, kind: "open" }));
  for (const row of rows) row.element = element("tr");
  running = new AbortController();
  shown = PAGE;
  clearProblem();
  byId("batch-results").hidden = false;
  byId("batch-start").disabled = true;
  byId("batch-cancel").hidden = false;
  byId("batch-cancel").focus();
  announce(`Answering ${rows.length} prompts.`);
  rows.forEach(fillRow);
  draw();
  const waiting = rows[Symbol.iterator](); // shared: each worker takes the next row
  await Promise.all(Array.from({ length: AT_ONCE }, () => work(waiting, running)));
  finish();
}

async function work(waiting, run) {
  for (const row of waiting) {
    if (run.signal.aborted) return;
    try {
      row.evidence = await api.askWhole(row.messages, run.signal);
      row.kind = outcome(row.evidence);
    } catch (error) {
      if (error.name === "AbortError") return;
      row.kind = "error";
      row.error = error.message;
      if (error.status === 0 || error.status === 401) stopAll(error, run); // no other row would fare better
    }
    fillRow(row);
    drawSoon();
  }
}

function stopAll(error, run) {
  run.abort();
  showProblem(error.message);
}

function finish() {
  const cancelled = running.signal.aborted;
  running = null;
  for (const row of rows.filter((each) => each.kind === "open")) {
    row.kind = "cancelled";
    fillRow(row);
  }
  draw();
  const focused = document.activeElement === byId("batch-cancel"); // it is about to disappear
  byId("batch-cancel").hidden = true;
  byId("batch-start").disabled = readRows.length === 0;
  if (focused) byId(byId("batch-download").disabled ? "batch-start" : "batch-download").focus();
  announce(`${cancelled ? "Stopped" : "Finished"}: ${byId("batch-count").textContent}`);
}

// Showing

function filterChoice(kind) {
  const name = KINDS[kind]?.short ?? KINDS[kind]?.name ?? "All";
  const input = element("input", { type: "radio", name: "filter", value: kind, checked: kind === "all" });
  input.addEventListener("change", () => {
    shown = PAGE;
    draw();
  });
  return element("label", {}, input, element("span", {}, name, " ", element("b", { id: `filter-${kind}` }, "0")));
}

function headCell(column) {
  const button = element("button", { type: "button" }, column.name);
  column.head = element("th", { scope: "col" }, button);
  button.addEventListener("click", () => {
    order = { column, sign: order.column === column ? -order.sign : 1 };
    draw();
  });
  return column.head;
}

/** Write what is known of a row into its element, which stays the same: what is focused or selected stays so. */
function fillRow(row) {
  const cell = ({ name, value, text = String }) => {
    const known = value(row);
    const plain = known === undefined || known === null ? "" : text(known);
    if (name === "Line") return element("th", { scope: "row", className: "figure" }, plain);
    if (name === "Outcome") return element("td", { className: `kind ${row.kind}` }, icon(KINDS[row.kind].icon), plain);
    if (name === "Prompt") return element("td", { className: "long" }, element("div", {}, ...promptNodes(row, plain)));
    if (name === "Answer") return element("td", { className: "long" }, element("div", {}, plain), reason(row));
    return element("td", { className: "figure" }, element("div", {}, labelled(name, plain)));
  };
  row.element.replaceChildren(...COLUMNS.map(cell), element("td", {}, ...(row.evidence ? [whyButton(row)] : [])));
}

/** A prompt; what it shares with the first one (the first: with the second) is dim and shortened. */
function promptNodes(row, plain) {
  const other = rows[row === rows[0] ? 1 : 0];
  return differenceNodes(plain, other ? String(other.messages.at(-1).content) : "");
}

const reason = (row) => element("p", { className: "small muted reason-cell" }, row.evidence?.reason ?? "");

/** A number with its name, which is shown where the columns have no heads (narrow screens). */
const labelled = (name, plain) => element("span", {}, element("b", { className: "narrow" }, plain && `${name} `), plain);

function whyButton(row) {
  const button = element("button", { type: "button", ariaLabel: `Why, line ${row.line}` }, "Why");
  button.addEventListener("click", () => onWhy(row));
  return button;
}

/** Draw at most some times a second, however fast the answers come. */
function drawSoon() {
  if (drawing) return;
  drawing = true;
  setTimeout(() => {
    drawing = false;
    draw();
  }, 120);
}

function draw() {
  const filter = document.querySelector('input[name="filter"]:checked').value;
  const kept = rows.filter((row) => filter === "all" || row.kind === filter).sort(compare);
  placeRows(kept.slice(0, shown));
  byId("batch-none").hidden = kept.length > 0;
  byId("batch-more").hidden = kept.length <= shown;
  drawCounts();
  for (const column of COLUMNS) {
    if (column === order.column) column.head.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
    else column.head.removeAttribute("aria-sort");
  }
}

/** Put the rows in place; those that are there already are not moved, for a move takes the focus away. */
function placeRows(kept) {
  const body = byId("batch-rows");
  const elements = kept.map((row) => row.element);
  if (elements.length === body.children.length && elements.every((e, i) => e === body.children[i])) return;
  body.replaceChildren(...elements);
}

/** Rows without a value come last, whichever way the others are sorted. */
function compare(a, b) {
  const [x, y] = [order.column.value(a), order.column.value(b)];
  if (x === undefined || y === undefined) return (x === undefined) - (y === undefined) || a.line - b.line;
  const by = typeof x === "string" ? x.localeCompare(y) : x - y;
  return order.sign * by || a.line - b.line;
}

function drawCounts() {
  const count = (kind) => rows.filter((row) => row.kind === kind).length;
  for (const kind of FILTERS) byId(`filter-${kind}`).textContent = kind === "all" ? rows.length : count(kind);
  const done = rows.filter(isDone).length;
  byId("batch-progress").max = rows.length;
  byId("batch-progress").value = done;
  byId("batch-count").textContent = `${done} of ${rows.length} answered, ${count("verified")} verified`;
  byId("batch-download").disabled = done === 0;
}

const isDone = (row) => row.kind !== "open" && row.kind !== "cancelled";

// Downloading

/** All rows that are done, in the order of the lines: the user's fields, then ours. */
function asJsonl() {
  const plain = ({ line, input, kind, evidence, error }) => ({
    ...input,
    line,
    outcome: OUTCOMES[kind]?.value ?? "error",
    ...(evidence ? { answer: evidence.text, sdm: evidence } : { error }),
  });
  return rows.filter(isDone).map((row) => `${JSON.stringify(plain(row))}\n`).join("");
}

function download() {
  const address = URL.createObjectURL(new Blob([asJsonl()], { type: "application/jsonl" }));
  element("a", { href: address, download: "results.jsonl" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000); // the browser needs it a moment longer
}
