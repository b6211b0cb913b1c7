// The first view: one prompt, its answer as it streams, the verdict, and why.

import * as api from "./api.js";
import { announce, byId, clearProblem, element, showProblem, textNodes } from "./dom.js";
import * as evidenceView from "./evidence.js";
import * as feedback from "./feedback.js";
import { measuredText, outcome } from "./sdm.js";
import { announceVerdict } from "./verdict.js";

let running = null; // AbortController while an answer streams

export function setUp() {
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("prompt").addEventListener("keydown", askOnEnter);
  byId("stop").addEventListener("click", () => running?.abort());
  evidenceView.setUp();
  feedback.setUp();
}

/** Take what the server says about its model. */
export function useInfo(info) {
  evidenceView.useInfo(info);
  byId("measured").textContent = measuredText(info);
  byId("examples").hidden = info.examples.length === 0;
  byId("examples-list").replaceChildren(...info.examples.map((prompt) => element("li", {}, exampleButton(prompt))));
}

function exampleButton(prompt) {
  const button = element("button", { type: "button", title: prompt }, prompt);
  button.addEventListener("click", () => {
    byId("prompt").value = prompt;
    byId("prompt").focus();
  });
  return button;
}

// Asking

function askOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Enter picks a character
  event.preventDefault();
  ask();
}

async function ask() {
  const prompt = byId("prompt").value;
  if (running) return;
  if (!prompt.trim()) return showProblem("Write a prompt first.");
  clearProblem();
  const messages = [{ role: "user", content: prompt }];
  const run = begin();
  try {
    const evidence = await api.ask(messages, (piece) => run === running && byId("answer").append(...textNodes(piece)), run.signal);
    finish(run, () => show(messages, evidence));
  } catch (error) {
    finish(run, () => (error.name === "AbortError" ? stopped() : failed(error)));
  }
}

/** The end of a run, unless another answer has taken its place meanwhile. */
function finish(run, how) {
  if (run !== running) return;
  how();
  end();
}

function begin() {
  running = new AbortController();
  byId("answer").replaceChildren();
  byId("answer").setAttribute("aria-busy", "true"); // read out once, when it is complete
  byId("answer-card").hidden = false;
  byId("answer-card").classList.add("streaming");
  for (const id of ["verdict", "cut", "feedback"]) byId(id).hidden = true;
  byId("reason").textContent = "";
  byId("ask").disabled = true;
  byId("stop").hidden = false;
  announce("Answering.");
  evidenceView.clear();
  return running;
}

function end() {
  running = null;
  if (document.activeElement === byId("stop")) byId("prompt").focus(); // it is about to disappear
  byId("answer").setAttribute("aria-busy", "false");
  byId("answer-card").classList.remove("streaming");
  byId("ask").disabled = false;
  byId("stop").hidden = true;
}

function stopped() {
  byId("reason").textContent = "Stopped before the answer was complete, so there is no verdict.";
  announce("Stopped.");
}

function failed(error) {
  byId("answer-card").hidden = byId("answer").textContent === "";
  if (!byId("answer-card").hidden) byId("reason").textContent = "This answer is incomplete and has no verdict.";
  showProblem(error.message);
}

// Showing

/** Show an answer that was not asked for here, in place of whatever streams. */
export function showGiven(messages, evidence) {
  const run = running;
  if (run) end();
  run?.abort();
  show(messages, evidence);
}

function show(messages, evidence) {
  byId("answer-card").hidden = false;
  byId("answer").replaceChildren(...textNodes(evidence.text));
  byId("cut").hidden = evidence.finish_reason !== "length";
  byId("reason").replaceChildren(...textNodes(evidence.reason));
  announceVerdict(outcome(evidence), evidence.verdict);
  feedback.offer(messages, evidence.text);
  evidenceView.show(evidence, messages);
}
