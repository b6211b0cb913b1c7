// The rules of the method that the page needs: outcomes, membership in the region, and how to say them.

// `value` is the outcome as the server and downloads spell it.
export const OUTCOMES = {
  verified: {
    icon: "verified",
    name: "Verified",
    value: "verified",
    text: "Judged right, and reliably so: usable without a person looking.",
  },
  wrong: {
    icon: "wrong",
    name: "Judged wrong",
    value: "judged wrong",
    text: "Judged not to follow the prompt, and reliably so: do not use it.",
  },
  rejected: {
    icon: "rejected",
    name: "Not verified: a person should look",
    short: "Not verified",
    value: "not verified",
    text: "The verdict is not reliable enough. The answer may well be right.",
  },
  ood: {
    icon: "ood",
    name: "Not verified, out of distribution: a person should look",
    short: "Out of distribution",
    value: "out of distribution",
    text: "The nearest known document speaks for another verdict. The answer may well be right.",
  },
};

/** Which of the four outcomes an answer's evidence stands for. */
export function outcome(evidence) {
  return Object.keys(OUTCOMES).find((kind) => OUTCOMES[kind].value === evidence.outcome);
}

/** Whether the model's certificate decides at an alpha which answers are verified: it promises no more than its own. */
export const certifies = (certificate, alpha) => certificate !== null && alpha <= certificate.alpha;

/** Whether the certificate rejects an answer that is judged right: then it is rejected at a higher alpha, too. */
const refused = (point) => point.certified === false && point.prediction === 1;

/** The outcome at another alpha than that of the evidence: by the certificate where it decides, otherwise by the region. */
export function outcomeIn(region, point, certificate) {
  if (certifies(certificate, region.alpha) && point.certified) return "verified";
  if (point.q === 0) return "ood";
  if (refused(point) || (certifies(certificate, region.alpha) && point.prediction === 1)) return "rejected";
  if (!inRegion(region, point)) return "rejected";
  return point.prediction === 1 ? "verified" : "wrong";
}

/** What was measured on the model's own answers, in words. */
export function measuredText({ measured = [], certificate = null }) {
  if (certificate) return certificate.says;
  if (!measured.length) return "How many of this model's own answers are verified, and how many of those are right, has not been measured.";
  return measured.map(({ name, prompts, alpha, verified, verified_right: right }) =>
    `Measured on this model's own answers to ${prompts} prompts (${name}, alpha ${alpha}): ` +
    `${percent(verified / prompts)} verified${verified ? `, ${percent(right / verified)} of these right` : ""}.`).join(" ");
}

/** The evidence as a point among the calibration points. */
export function asPoint(evidence, classes) {
  const { q, d, q_prime, probability, certified } = evidence;
  return { q, d, q_prime, probability, certified, prediction: classes.indexOf(evidence.verdict) };
}

/** Columns of the calibration set as points. */
export function calibrationPoints(columns) {
  return columns.label.map((label, i) => ({
    label,
    prediction: columns.prediction[i],
    q: columns.q[i],
    d: columns.d[i],
    q_prime: columns.q_prime[i],
    probability: columns.probability[i],
  }));
}

/** SDM output at class 1 ("Yes"); with two classes the outputs add up to 1. */
export const outputAtYes = (point) => (point.prediction === 1 ? point.probability : 1 - point.probability);

/** An empty region: Algorithm 1 found none (infinity is null in JSON). */
export const isEmpty = (region) => region.q_min === null;

/** What thresholds give way by, as the server decides (docs/method.md): calibration points lie on them. */
const leastQ = (region) => region.q_min - Math.min(region.q_min * 1e-4, 0.1);
const leastOutput = (psi) => psi - Math.min(1e-5, 1e-2 * Math.max(0, 1 - psi));

/** Membership: q' >= q'_min, the predicted class reaches its psi, and no other class does. */
export function inRegion(region, point) {
  if (isEmpty(region) || point.q === 0 || point.q_prime < leastQ(region)) return false;
  const yes = outputAtYes(point);
  return [1 - yes, yes].every((output, c) => output >= leastOutput(region.psi[c]) === (c === point.prediction));
}

/** One sentence on the point at another alpha. */
export function effect(region, point, classes, certificate) {
  const name = classes[point.prediction];
  const at = `At alpha ${region.alpha}`;
  const certified = certifies(certificate, region.alpha) && point.prediction === 1;
  if (certified && point.certified) return `${at} this answer is verified by the certificate.`;
  if (certified || refused(point)) return `${at} this answer is not verified: the certificate does not accept it.`;
  if (inRegion(region, point)) return `${at} this answer is in the region as “${name}”.`;
  if (point.q === 0) return `${at} this answer is not verified: q = 0, out of distribution at every alpha.`;
  if (isEmpty(region)) return `${at} this answer is not verified: there is no region.`;
  if (point.q_prime < leastQ(region)) {
    return `${at} this answer is not verified: q′ ${number(point.q_prime)} is below ${number(region.q_min)}.`;
  }
  const psi = region.psi[point.prediction];
  return `${at} this answer is not verified: its output ${probability(point.probability)} is below ψ ${probability(psi)}.`;
}

/** Share of the points in the region, and the share of those that is predicted correctly. */
export function admitted(region, points) {
  const inside = points.filter((p) => inRegion(region, p));
  const right = inside.filter((p) => p.prediction === p.label).length;
  return { count: inside.length, share: inside.length / points.length, accuracy: right / inside.length };
}

// Numbers as people read them.

export function number(value) {
  if (value === null || value === undefined) return "none";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

/** Four digits, and more where four would round a probability to 0 or 1. */
export function probability(value) {
  if (value === null || value === undefined) return "none";
  if (value === 0 || value === 1) return String(value);
  for (let digits = 4; digits < 8; digits++) {
    const text = value.toFixed(digits);
    if (![0, 1].includes(Number(text))) return text;
  }
  return value < 0.5 ? "< 0.0000001" : "> 0.9999999";
}

export function percent(share) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(share > 0.995 && share < 1 ? 2 : 1)}%` : "none";
}
