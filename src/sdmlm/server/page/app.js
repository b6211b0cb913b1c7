// Where the page starts: the two views, the API key, and what the server says about its model.

import * as api from "./api.js";
import * as askView from "./ask.js";
import * as batchView from "./batch.js";
import { byId, clearProblem, showProblem } from "./dom.js";

const TABS = ["ask", "batch"];

function openView(name, focusTab = false) {
  for (const tab of TABS) {
    const chosen = tab === name;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(chosen));
    byId(`tab-${tab}`).tabIndex = chosen ? 0 : -1; // one stop for Tab; the arrows move between tabs
    byId(`view-${tab}`).hidden = !chosen;
  }
  if (focusTab) byId(`tab-${name}`).focus();
}

function setUpTabs() {
  TABS.forEach((tab, i) => {
    byId(`tab-${tab}`).addEventListener("click", () => openView(tab));
    byId(`tab-${tab}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const edge = { Home: TABS[0], End: TABS.at(-1) }[event.key];
      const target = step ? TABS.at((i + step) % TABS.length) : edge;
      if (!target) return;
      event.preventDefault();
      openView(target, true);
    });
  });
}

function setUpKey() {
  document.addEventListener("key-needed", () => {
    byId("key-form").hidden = false;
    byId("key").focus();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    api.setKey(byId("key").value);
    byId("key").value = "";
    byId("key-form").hidden = true; // comes back if the server refuses this one too
    byId("prompt").focus();
    clearProblem();
    load();
  });
}

async function load() {
  try {
    const info = await api.getInfo();
    byId("model").textContent = `Model “${info.model}”, judged against ${info.support_size} documents at alpha ${info.alpha}`;
    askView.useInfo(info);
  } catch (error) {
    showProblem(error.message);
  }
}

/** A row of the batch, with all its evidence, in the first view. */
function showWhy(row) {
  openView("ask");
  byId("prompt").value = row.messages.at(-1).content;
  askView.showGiven(row.messages, row.evidence);
  byId("answer-title").focus();
}

setUpTabs();
setUpKey();
askView.setUp();
batchView.setUp(showWhy);
document.addEventListener("support-changed", load);
load();
