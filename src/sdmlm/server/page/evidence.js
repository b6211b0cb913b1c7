// Why an answer was accepted or not: its signals among the calibration documents, the region at any alpha, the documents.

import { alphaCurve, histogram, logitScale, scatter, similarityScale, unitScale } from "./charts.js";
import { differenceNodes } from "./difference.js";
import { byId, element, fillDefinitionList, icon } from "./dom.js";
import {
  OUTCOMES, admitted, asPoint, calibrationPoints, certifies, effect, inRegion, isEmpty, number, outcome, outcomeIn,
  outputAtYes, percent, probability,
} from "./sdm.js";
import { showVerdict } from "./verdict.js";

let info = null; // GET /v1/sdm
let points = []; // its calibration points
let shares = []; // of them accepted, at each alpha
let current = null; // the evidence shown
let asked = ""; // the prompt that it answers

export function setUp() {
  byId("alpha").addEventListener("input", draw);
  byId("alpha-reset").addEventListener("click", () => {
    setAlpha(info.alpha);
    byId("alpha").focus(); // the button is about to disappear
    draw();
  });
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(byId("view-ask"));
}

/** Take what the server says about its model: the calibration points and the region at each alpha. */
export function useInfo(given) {
  const chosen = info ? regionChosen().alpha : given.alpha;
  info = { ...given, regions: withOwn(given) };
  points = calibrationPoints(info.calibration);
  shares = info.regions.map((region) => admitted(region, points).share);
  for (const [kind, c] of [["no", 0], ["yes", 1]]) {
    for (const place of document.querySelectorAll(`.name-${kind}`)) place.textContent = info.classes[c];
  }
  byId("alpha").max = info.regions.length - 1;
  setAlpha(chosen);
  byId("region").hidden = false;
  byId("region-use").textContent = regionUse();
  if (current) show(current);
  else draw();
}

/** What the region is for, in words. */
function regionUse() {
  const { certificate, alpha, classes } = info;
  const what = "The rule of the papers: an answer whose verdict lies in it is reliably judged, by an estimate.";
  return certifies(certificate, alpha)
    ? `${what} This model has a certificate, which decides instead what is verified, up to alpha ${number(certificate.alpha)}; above that both rules have to accept; ` +
      `the region still decides which answers are judged wrong (${classes[0]}).`
    : what;
}

/** The grid of regions with the server's own alpha among them, ascending. */
function withOwn({ regions, region }) {
  const others = regions.filter((r) => r.alpha !== region.alpha);
  return [...others, region].sort((a, b) => a.alpha - b.alpha);
}

/** Show all there is about an answer. */
export function show(evidence, messages = null) {
  current = evidence;
  if (messages) asked = messages.map((m) => m.content).join("\n");
  if (!info) return; // without the calibration set there is nothing to draw against
  byId("signals").hidden = byId("numbers").hidden = false;
  showRule(evidence);
  showExemplars(evidence.exemplars);
  showNumbers(evidence);
  draw();
}

/** Back to the calibration set alone. */
export function clear() {
  current = null;
  for (const id of ["rule", "signals", "exemplars", "numbers"]) byId(id).hidden = true;
  draw();
}

/** The two questions of the certificate, and what this answer says to them. */
function showRule(e) {
  const certificate = info.certificate;
  byId("rule").hidden = certificate === null || e.certified === null;
  if (byId("rule").hidden) return;
  const { least_certainty: least, least_usual: usual } = certificate;
  const check = (passed, question, found) =>
    element("li", {}, icon(passed ? "verified" : "rejected"), element("span", {}, element("b", {}, question), ` ${found}`));
  byId("rule-list").replaceChildren(
    check(least !== null && e.certainty >= least, `Judged ${info.classes[1]}, and surely enough?`,
      `Certainty of ${info.classes[1]} ${probability(e.certainty)}; at least ${probability(least)} is asked for.`),
    check(e.usual >= usual, "An answer as the model usually writes them?",
      `${percent(e.usual)} of its known answers are more unusual; at least ${percent(usual)} is asked for.`),
  );
}

function showExemplars(exemplars) {
  byId("exemplars").hidden = exemplars.length === 0;
  byId("exemplars-list").replaceChildren(...exemplars.map(exemplarItem));
}

function exemplarItem(exemplar) {
  const { label, prediction, distance, text, id } = exemplar;
  const badge = element("span", { className: "badge" }, info.classes[label] ?? "Out of distribution");
  const wrong = prediction === label ? "" : `, judged ${info.classes[prediction]}`;
  return element(
    "li",
    { className: "card" },
    element("p", { className: "small muted" }, badge, ` distance ${number(distance)}${wrong}, document ${id}`),
    element("div", { className: "document" }, ...(text === null ? ["The text was not kept."] : documentNodes(text))),
  );
}

/** A document as people read it: without control tokens and the tag at its end; what it shares with the prompt is dim. */
function documentNodes(text) {
  const { open } = info.tags;
  let plain = text.endsWith(open) ? text.slice(0, -open.length) : text;
  for (const token of info.control_tokens ?? []) plain = plain.replaceAll(token, "\n");
  return differenceNodes(plain.replace(/\n{3,}/g, "\n\n").trim(), asked);
}

function showNumbers(e) {
  const interval = `${probability(e.probability_lower)} to ${probability(e.probability_upper)}`;
  fillDefinitionList(byId("numbers-list"), [
    ["Verdict", e.verdict],
    ["SDM output", `${probability(e.probability)} (${interval})`],
    ["Similarity q", number(e.q)],
    ["Rescaled similarity q′", number(e.q_prime)],
    ["Distance d", number(e.d)],
    ["Distance to the nearest document", number(e.d_nearest)],
    ["In the region by the lower estimate too", e.accepted_lower ? "yes" : "no"],
    ["Highest alpha with it in the region", number(e.highest_alpha)],
    ["Alpha", number(e.alpha)],
    ["Tokens of prompt and answer", `${e.prompt_tokens} and ${e.completion_tokens}`],
  ]);
}

// Alpha, the region, the signals

const regionChosen = () => info.regions[Number(byId("alpha").value)];

function setAlpha(alpha) {
  byId("alpha").value = info.regions.findIndex((r) => r.alpha === alpha);
}

function draw() {
  if (!info || byId("view-ask").hidden) return; // hidden boxes have no width to draw in
  const region = regionChosen();
  const point = current && asPoint(current, info.classes);
  showAlpha(region, point);
  if (point) showOutcome(region, point);
  drawScatter(region, point);
  if (point) drawSignals(region, point);
}

/** The box above the answer follows the slider. */
function showOutcome(region, point) {
  if (region.alpha === current.alpha) showVerdict(outcome(current), current.verdict);
  else showVerdict(outcomeIn(region, point, info.certificate), current.verdict, number(region.alpha));
}

function showAlpha(region, point) {
  const { share, accuracy } = admitted(region, points);
  const text = number(region.alpha) + (region.alpha === info.alpha ? " (the server's)" : "");
  byId("alpha-value").textContent = text;
  byId("alpha").setAttribute("aria-valuetext", `alpha ${text}`);
  byId("alpha-reset").hidden = region.alpha === info.alpha;
  byId("alpha-effect").replaceChildren(...(point ? effectOn(region, point) : []));
  drawAlphaCurve(region, point);
  fillDefinitionList(byId("alpha-facts"), [
    ["least q′", number(region.q_min)],
    ...info.classes.map((name, c) => [`least output ψ for ${name}`, probability(region.psi[c])]),
    ["calibration documents in the region", `${percent(share)} of ${points.length}`],
    ["judged correctly, of these", percent(accuracy)],
  ]);
}

function effectOn(region, point) {
  const kind = outcomeIn(region, point, info.certificate);
  return [icon(OUTCOMES[kind].icon), element("span", {}, effect(region, point, info.classes, info.certificate))];
}

function drawAlphaCurve(region, point) {
  const accepting = point ? info.regions.map((r) => inRegion(r, point)) : [];
  const alphas = info.regions.map((r) => r.alpha);
  const taking = alphas.filter((_, i) => accepting[i]);
  const bar = taking.length
    ? ` Bar: the alphas at which this answer is in the region, up to ${taking.at(-1)}.`
    : " This answer is in the region at no alpha.";
  const negatives = percent(points.filter((p) => p.label === 0).length / points.length);
  const kind = info.documents === "own"
    ? `These are answers that the model sampled and answers to other prompts beside those it would give: ${negatives} are wrong.`
    : `These are not the model's own answers: ${negatives} of them are negatives, most of them made up.`;
  byId("curve-text").textContent = `Share of the calibration documents in the region, by alpha. ${kind}${point ? bar : ""}`;
  alphaCurve(byId("curve"), {
    id: "curve",
    title: "Share of the calibration documents in the region, by alpha",
    description: byId("curve-text").textContent,
    alphas,
    shares,
    accepting,
    chosen: info.regions.indexOf(region),
  });
}

function drawScatter(region, point) {
  const [no, yes] = info.classes;
  const where = isEmpty(region) ? "There is no region at this alpha." : "Shaded corners: the region.";
  const here = point
    ? ` This answer lies at q′ ${number(point.q_prime)} and output ${probability(outputAtYes(point))} at ${yes}.`
    : "";
  byId("scatter-text").textContent =
    `${points.length} calibration documents: circles are truly ${yes}, triangles truly ${no}. ${where} ` +
    "At q′ = 0: out of distribution.";
  scatter(byId("scatter"), {
    id: "scatter",
    title: "Calibration answers by SDM output and rescaled similarity",
    description: byId("scatter-text").textContent + here,
    points,
    region,
    point,
    names: info.classes,
  });
}

function drawSignals(region, point) {
  drawSimilarity(region, point);
  drawDistance(region, point);
  drawMagnitude(region, point);
}

/** Share of the calibration documents that a test holds for, in words. */
const shareWhere = (test) => percent(points.filter(test).length / points.length);

/** One signal: the sentence above it, and the histogram of `value` by true class. */
function drawSignal(id, sentence, { scale, value, limits, ...more }) {
  byId(`${id}-text`).textContent = sentence;
  const of = (label) => points.filter((p) => p.label === label).map(value);
  const description = [sentence, ...limits.map((limit) => `${limit.text}.`)].join(" ");
  histogram(byId(id), { id, description, scale, yes: of(1), no: of(0), names: info.classes, limits, ...more });
}

function drawSimilarity(region, point) {
  const { q, q_prime } = point;
  const agree = q === 1 ? "document agrees" : `${q} documents agree`;
  const sentence =
    q === 0
      ? `The nearest document is not a ${info.classes[point.prediction]} that was judged correctly: q is 0, as for ` +
        `${shareWhere((p) => p.q === 0)} of the calibration documents.`
      : `The nearest ${agree} without a break (q′ ${number(q_prime)}): higher than for ` +
        `${shareWhere((p) => p.q_prime < q_prime)} of the calibration documents.`;
  const none = isEmpty(region);
  drawSignal("similarity", sentence, {
    title: "Rescaled similarity q′ of the calibration documents",
    axis: "q′, log scale",
    scale: similarityScale([...points, point].map((p) => p.q_prime)),
    value: (p) => p.q_prime,
    marker: { value: q_prime, text: `q′ ${number(q_prime)}` },
    limits: none ? [] : [{ value: region.q_min, text: `least ${number(region.q_min)}` }],
    zones: none ? [] : [[region.q_min, Infinity]],
  });
}

function drawDistance(region, point) {
  const least = Math.min(...points.filter((p) => inRegion(region, p)).map((p) => p.d));
  const sentence =
    `d ${number(point.d)}, where 1 is as near as can be: nearer than ${shareWhere((p) => p.d < point.d)} of the ` +
    "calibration documents. It scales the output and has no threshold of its own.";
  drawSignal("distance", sentence, {
    title: "Distance quantile d of the calibration documents",
    axis: "d",
    scale: unitScale(),
    value: (p) => p.d,
    marker: { value: point.d, text: `d ${number(point.d)}` },
    limits: Number.isFinite(least) ? [{ value: least, text: `least accepted ${number(least)}` }] : [],
  });
}

function drawMagnitude(region, point) {
  const [no, yes] = info.classes;
  const sentence =
    `SDM output ${probability(point.probability)} for ${info.classes[point.prediction]}: more than ` +
    `${shareWhere((p) => p.probability < point.probability)} of the calibration documents have for theirs.`;
  const none = isEmpty(region);
  const [low, high] = none ? [] : [1 - region.psi[0], region.psi[1]];
  drawSignal("magnitude", sentence, {
    title: `SDM output at ${yes} of the calibration documents`,
    axis: `SDM output at ${yes}, logit scale`,
    scale: logitScale([...points, point].map(outputAtYes)),
    value: outputAtYes,
    marker: { value: outputAtYes(point), text: probability(outputAtYes(point)) },
    limits: none
      ? []
      : [
          { value: low, text: `${no} to ${probability(low)}`, align: "end" },
          { value: high, text: `${yes} from ${probability(high)}`, align: "start" },
        ],
    zones: none ? [] : [[0, low], [high, 1]],
  });
}
