"""The formulas again, written as plain, slow loops in double precision, from docs/method.md and the papers. Tests compare with them."""

from __future__ import annotations

import itertools
import math

import numpy as np


def sdm(z, q, d):
    powers = [(2.0 + q) ** (d * v) for v in z]
    return [v / sum(powers) for v in powers]


def loss(z, q, d, y):
    return -math.log(sdm(z, q, d)[y], 2.0 + q)


def q_prime(q, p_predicted):
    return min(q, (2.0 + q) ** p_predicted)


def distances(vectors, query):
    return [math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(v, query, strict=True))) for v in vectors]


def similarity(vectors, labels, predictions, query, prediction, exclude=-1):
    """(q, d_nearest): walk outwards from the query; a group of equally near vectors counts only if none of it ends the run."""
    others = [i for i in range(len(vectors)) if i != exclude]
    far = distances(vectors, query)
    q = 0
    for distance in sorted({far[i] for i in others}):
        ring = [i for i in others if far[i] == distance]
        if any(labels[i] != predictions[i] or predictions[i] != prediction for i in ring):
            break
        q += len(ring)
    return q, min((far[i] for i in others), default=math.inf)


def distance_quantile(x, stored_by_class):
    values = []
    for stored in stored_by_class:
        values.append(1.0 - sum(s < x for s in stored) / len(stored) if len(stored) else 0.0)
    return min(values)


def find_region(q_primes, p, labels, alpha):
    """Algorithm 1, literally: (q'_min, psi)."""
    n_classes = p.shape[1]
    for v in sorted({x for x in q_primes if x > 0}):
        psi = []
        for c in range(n_classes):
            own = sorted(p[i][c] for i in range(len(labels)) if labels[i] == c and q_primes[i] >= v)
            psi.append(own[min(math.floor((1 - alpha) * len(own)), len(own) - 1)] if own else 0.0)
        if all(value >= alpha for value in psi):
            return v, tuple(psi)
    return math.inf, None


def contains(q_min, psi, q_primes, p, predictions):
    inside = []
    for i, y_hat in enumerate(predictions):
        others = [p[i][c] >= psi[c] for c in range(p.shape[1]) if c != y_hat]
        inside.append(bool(q_primes[i] >= q_min and p[i][y_hat] >= psi[y_hat] and not any(others)))
    return np.array(inside)


def effective_sample_size(x, calibration_q_primes, labels, n_classes):
    out = []
    for c in range(n_classes):
        own = [q for q, y in zip(calibration_q_primes, labels, strict=True) if y == c]
        out.append(min(sum(q < x for q in own), max(len(own) - 1, 0)))
    return out


def dkw_epsilon(sizes, alpha):
    return max(math.sqrt(math.log(2 / (1 - alpha)) / (2 * n)) if n else 1.0 for n in sizes)


def confidence(z, q):
    """The log-odds of SDM(z, q, d = 1) at the prediction; minus infinity at q = 0."""
    if q == 0:
        return -math.inf
    outputs = sdm(z, q, 1.0)
    predicted = max(range(len(z)), key=lambda c: z[c])
    return math.log(outputs[predicted]) - math.log(sum(p for c, p in enumerate(outputs) if c != predicted))


def distance_of_class(x, stored, is_stored=False):
    """d against one class: the share of its stored distances that are not below x; x itself is left out where it is stored."""
    others = list(stored)
    if is_stored:
        others.remove(x)
    return sum(s >= x for s in others) / len(others) if others else 0.0


def relative_distance(vectors, labels, query, c):
    """The distance to the nearest vector, times how much farther class c is than the others."""
    own = min((d for d, y in zip(distances(vectors, query), labels, strict=True) if y == c), default=math.inf)
    other = min((d for d, y in zip(distances(vectors, query), labels, strict=True) if y != c), default=math.inf)
    if own == 0:
        return 0.0
    return math.inf if math.isinf(own) or other == 0 else min(own, other) * own / other


def ledoit_wolf(points):
    """The shrunk covariance of centred points (Ledoit and Wolf 2004, equations 5 to 14)."""
    n, width = points.shape
    sample = sum(np.outer(x, x) for x in points) / n
    mu = np.trace(sample) / width
    delta = ((sample - mu * np.eye(width)) ** 2).sum() / width
    beta = sum(((np.outer(x, x) - sample) ** 2).sum() for x in points) / n**2 / width
    shrinkage = min(beta, delta) / delta
    return (1 - shrinkage) * sample + shrinkage * mu * np.eye(width)


def balanced_cross_entropy(z, y):
    """The mean over classes of the mean of -log softmax(z) at the true class."""
    losses = [-math.log(math.exp(row[c]) / sum(math.exp(v) for v in row)) for row, c in zip(z, y, strict=True)]
    by_class = [[loss for loss, c in zip(losses, y, strict=True) if c == k] for k in sorted(set(y))]
    return sum(sum(own) / len(own) for own in by_class) / len(by_class)


# The next-token loss


def next_token_loss(logits, labels, base):
    """Eq. 1, one token at a time in double precision: the sum, and the number of tokens that count."""
    total, count = 0.0, 0
    for n, b in enumerate(base.double().tolist()):
        for i in range(labels.shape[1] - 1):
            target = int(labels[n, i + 1])
            if target != -100:
                z = logits[n, i].double().tolist()
                total -= math.log(b ** z[target] / sum(b**v for v in z), b)
                count += 1
    return total, count


# The summary vector


def summary(states, at, mask):
    kept = [states[i].tolist() for i in range(at + 1) if mask[i]]
    return [*states[at].tolist(), *np.mean(kept, axis=0)]


# The region of a search


def verified_region(finals, q_min, psi, alpha):
    """One threshold after the other: `finals` are (q', output for Yes, label)."""
    if math.isinf(q_min):
        return math.inf
    starts = sorted({q_min * k for k in (1, 2, 4, 8, 16)})
    for start in starts:
        labels = [y for q, yes, y in finals if q >= start - min(1e-4 * start, 0.1) and yes >= psi - 1e-5]
        n, wrong = len(labels), labels.count(0)
        chance = sum(math.comb(n, k) * (1 - alpha) ** k * alpha ** (n - k) for k in range(wrong + 1))
        if chance <= 0.05 / len(starts):
            return start
    return math.inf


# Measures of a score


def risks(order):
    return [sum(not right for right in order[:k]) / k for k in range(1, len(order) + 1)]


def aurc(points):
    """The mean over all orders of points of equal score, one order at a time."""
    groups = [[right for s, right in points if s == score] for score in sorted({s for s, _ in points}, reverse=True)]
    orders = itertools.product(*(set(itertools.permutations(group)) for group in groups))
    areas = [np.mean(risks([right for group in order for right in group])) for order in orders]
    return float(np.mean(areas))


def calibration_error(confidence, correct, bins):
    total = 0.0
    for b in range(bins):
        inside = [(c, r) for c, r in zip(confidence, correct, strict=True) if min(int(c * bins), bins - 1) == b]
        if inside:
            gap = sum(r for _, r in inside) / len(inside) - sum(c for c, _ in inside) / len(inside)
            total += len(inside) / len(confidence) * abs(gap)
    return total


# Conformal sets


def softmax(row):
    top = max(row)
    powers = [math.exp(v - top) for v in row]
    return [v / sum(powers) for v in powers]


def conformal_score(row, label, u, penalty, k_reg):
    """The RAPS score by its definition: walk down the ranking until the class is met."""
    p = softmax(row)
    ranking = sorted(range(len(row)), key=lambda c: (-row[c], c))
    mass = 0.0
    for rank, c in enumerate(ranking, start=1):
        if c == label:
            return mass + u * p[c] + penalty * max(rank - k_reg, 0)
        mass += p[c]
    raise AssertionError


def conformal_sets(z, y, z_new, alpha, penalty, k_reg, seed):
    u = np.random.default_rng([seed, 0]).random(len(z)).tolist()
    scores = sorted(conformal_score(z[i].tolist(), int(y[i]), u[i], penalty, k_reg) for i in range(len(z)))
    # The smallest k with k / (n + 1) >= alpha, by counting; beyond n the threshold is infinite.
    k = next(k for k in range(1, len(z) + 2) if k >= (len(z) + 1) * alpha - 1e-9)
    tau = scores[k - 1] if k <= len(z) else math.inf
    u_new = np.random.default_rng([seed, 1]).random(len(z_new)).tolist()
    return [
        {c for c in range(z.shape[1]) if conformal_score(row, c, u_new[i], penalty, k_reg) <= tau}
        for i, row in enumerate(z_new.tolist())
    ]


# A cell of the experiments' tables


def group_cell(points, group):
    """Accuracy, n/|D| and n of a group, one point at a time."""
    n = right = 0
    for y, y_hat, admitted in points:
        value = {"y": y, "y_hat": y_hat}.get(group.split("=")[0])
        if admitted and (group == "all" or value == int(group[-1])):
            n += 1
            right += y == y_hat
    return (right / n if n else None), n / len(points), n
