// What a text shares with another is shown dim, and shortened where it is long, so that the difference stands out.

import { element, textNodes } from "./dom.js";

const MOST_WORDS = 600; // the comparison takes time and memory in the product of both lengths
const SHORTEST_RUN = 3; // words in a row: single words are shared by chance
const LONG_RUN = 9; // longer runs are shortened to their ends
const ENDS = 3; // words at each end

/** The text as nodes: runs of words that the other text has too, in the same order, are in `.shared`. */
export function differenceNodes(text, other) {
  const [words, others] = [text.split(/(?<=\s)(?=\S)/), other.split(/(?<=\s)(?=\S)/)];
  if (words.length > MOST_WORDS || others.length > MOST_WORDS) return textNodes(text);
  const shared = longRuns(commonWords(words.map(bare), others.map(bare)));
  const nodes = [];
  for (let i = 0; i < words.length; ) {
    let end = i + 1;
    while (end < words.length && shared[end] === shared[i]) end += 1;
    const run = words.slice(i, end);
    nodes.push(...(shared[i] ? [sharedRun(run)] : textNodes(run.join(""))));
    i = end;
  }
  return nodes;
}

/** A run that both texts have; the whole of it is its title where it is shortened. */
function sharedRun(run) {
  const whole = run.join("");
  if (run.length <= LONG_RUN) return element("span", { className: "shared" }, whole);
  const short = `${run.slice(0, ENDS).join("")}… ${run.slice(-ENDS).join("")}`;
  return element("span", { className: "shared", title: whole }, short);
}

const bare = (word) => word.trim();

/** Which words belong to a longest common subsequence. */
function commonWords(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const skip = Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : skip;
    }
  }
  const common = new Array(a.length).fill(false);
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      common[i] = true;
      i += 1;
      j += 1;
    } else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return common;
}

function longRuns(common) {
  const kept = [...common];
  for (let i = 0; i < kept.length; ) {
    let end = i;
    while (end < kept.length && common[end]) end += 1;
    if (end - i < SHORTEST_RUN) kept.fill(false, i, end);
    i = end + 1;
  }
  return kept;
}
