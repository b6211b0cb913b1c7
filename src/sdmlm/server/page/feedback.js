// Thumbs up and down: a person's judgement of the answer shown is added to the support, and can be taken back.

import * as api from "./api.js";
import { byId, clearProblem, showProblem } from "./dom.js";

let current = null; // { messages, completion } of the answer shown
let feedbackId = null; // of the judgement shown, while it stands
let changing = false; // a judgement is on its way

export function setUp() {
  byId("thumb-up").addEventListener("click", () => judge(true));
  byId("thumb-down").addEventListener("click", () => judge(false));
  byId("undo").addEventListener("click", undo);
}

/** Offer to judge this answer. */
export function offer(messages, completion) {
  current = { messages, completion };
  showFeedback(null);
  byId("feedback").hidden = false;
}

const judge = (label) =>
  change(async ({ messages, completion }) => {
    if (feedbackId !== null) await api.undoFeedback(feedbackId); // a change of mind replaces the first judgement
    feedbackId = null;
    const { id } = await api.sendFeedback({ messages, completion, label });
    return () => showFeedback(id, label);
  });

const undo = () =>
  change(async () => {
    await api.undoFeedback(feedbackId);
    return () => {
      byId("thumb-up").focus(); // the undo button is about to disappear
      showFeedback(null);
      byId("feedback-note").textContent = "Taken back.";
    };
  });

/** Run one change after the other, and show it unless another answer has come in between. */
async function change(send) {
  const judged = current;
  if (changing) return;
  changing = true;
  clearProblem();
  try {
    const showIt = await send(judged);
    document.dispatchEvent(new CustomEvent("support-changed"));
    if (judged === current) showIt();
  } catch (error) {
    if (judged === current && feedbackId === null) showFeedback(null);
    showProblem(error.message);
  } finally {
    changing = false;
  }
}

function showFeedback(id, label = null) {
  feedbackId = id;
  byId("thumb-up").setAttribute("aria-pressed", String(label === true));
  byId("thumb-down").setAttribute("aria-pressed", String(label === false));
  byId("undo").hidden = id === null;
  byId("feedback-note").textContent = id === null ? "" : "Noted: new answers are compared with this one too.";
}
