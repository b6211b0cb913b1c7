// The box above an answer: what to do with it, and the verdict.

import { announce, byId, element, icon } from "./dom.js";
import { OUTCOMES } from "./sdm.js";

/** Show one of the outcomes; `at` names another alpha than the one that was asked for. */
export function showVerdict(kind, verdict, at = null) {
  const { icon: symbol, name, text } = OUTCOMES[kind];
  const more = `${text} Verdict: ${verdict}.${at === null ? "" : ` (At alpha ${at}, as on the slider below.)`}`;
  byId("verdict").className = `verdict ${kind}`;
  const words = element("div", {}, element("strong", {}, name), element("span", {}, more));
  byId("verdict").replaceChildren(icon(symbol), words);
  byId("verdict").hidden = false;
  return `${name}. ${more}`;
}

/** The same, and tell screen readers. */
export function announceVerdict(kind, verdict) {
  announce(showVerdict(kind, verdict));
}
