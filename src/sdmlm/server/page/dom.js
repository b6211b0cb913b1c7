// The few ways in which the page touches the document. Text always goes in as text: answers, prompts and documents are
// not to be trusted as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// Control, format (bidirectional, zero-width, tag), separator and surrogate characters, and what is drawn as nothing.
const HIDDEN =
  /([\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\u{e0100}-\u{e01ef}])/u;

/** Text from outside as nodes: characters that nobody would see are marked with their code. */
export function textNodes(text) {
  return String(text).split(HIDDEN).filter(Boolean).map((part) =>
    HIDDEN.test(part) && !"\n\t".includes(part) ? hiddenMark(part) : part);
}

function hiddenMark(character) {
  const code = `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  const mark = document.createElement("mark");
  mark.className = "hidden-character";
  mark.title = `Hidden character ${code}`;
  mark.textContent = code;
  return mark;
}

/** An HTML element with properties and children (strings become text). */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.flatMap((child) => (typeof child === "string" ? textNodes(child) : [child])));
  return made;
}

/** An SVG element with attributes and children. */
export function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** One of the symbols of index.html; decoration, so hidden from screen readers. */
export function icon(name) {
  return shape("svg", { class: "icon", "aria-hidden": "true" }, shape("use", { href: `#icon-${name}` }));
}

/** The rows of a <dl>. */
export function fillDefinitionList(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

/** A sentence for screen readers only: what has just happened. */
export function announce(text) {
  byId("news").textContent = text;
}

/** Show a problem where everybody sees it, and nobody is interrupted. */
export function showProblem(text) {
  const dismiss = element("button", { type: "button" }, "Dismiss");
  dismiss.addEventListener("click", clearProblem);
  byId("problem").replaceChildren(icon("rejected"), element("p", {}, text), dismiss);
}

export function clearProblem() {
  byId("problem").replaceChildren();
}
