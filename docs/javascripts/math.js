/*
 * The mathematics behind the site's widgets: no drawing, no document. A page gets it as the global `specdecodeMath`,
 * Node as a module. tests/test_widget_mathematics.py holds every function to the Python that it restates.
 *
 * Distributions are plain arrays over a small vocabulary, and the same at every position of a step.
 */
(function () {
  "use strict";

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // ---- Synthetic acceptance: specdecode.AcceptanceSchedule.from_mean_rate --------------------------------------------

  // J_i = c_0 * ... * c_i with c_i = baseRate * decay**i.
  function jointRates(baseRate, decay, numDraftTokens) {
    const rates = [];
    for (let i = 0, joint = 1; i < numDraftTokens; i++) rates.push((joint *= baseRate * decay ** i));
    return rates;
  }

  // The smallest number in [low, high] at which a condition holds that holds from there up to `high`.
  function smallest(holds, low, high) {
    if (holds(low)) return low;
    for (let middle = (low + high) / 2; low < middle && middle < high; middle = (low + high) / 2) {
      if (holds(middle)) high = middle;
      else low = middle;
    }
    return high; // low and high are neighbouring numbers now
  }

  // [baseRate, decay] whose joint rates sum to `accepted`. The sum rises in both: prefer the least decay.
  function solve(accepted, numDraftTokens, minDecay) {
    if (accepted >= numDraftTokens) return [1, 1];
    const reached = (baseRate, decay) => sum(jointRates(baseRate, decay, numDraftTokens)) >= accepted;
    const decay = smallest((candidate) => reached(1, candidate), minDecay, 1);
    if (decay > minDecay) return [1, decay];
    return [smallest((candidate) => reached(candidate, decay), 0, 1), decay];
  }

  function schedule(meanRate, numDraftTokens, minDecay) {
    const [baseRate, decay] = solve(meanRate * numDraftTokens, numDraftTokens, minDecay);
    const joint = jointRates(baseRate, decay, numDraftTokens);
    return {
      baseRate,
      decay,
      jointRates: joint,
      conditionalRates: joint.map((rate, i) => (i === 0 ? rate : joint[i - 1] > 0 ? rate / joint[i - 1] : 0)),
      meanRate: sum(joint) / numDraftTokens,
      acceptanceLength: 1 + sum(joint),
      highestMean: sum(jointRates(1, minDecay, numDraftTokens)) / numDraftTokens, // what minDecay allows
    };
  }

  // ---- One position: reference.probabilistic -------------------------------------------------------------------------

  const overlap = (targetProbs, draftProbs) => targetProbs.map((prob, v) => Math.min(prob, draftProbs[v]));
  const excess = (probs, otherProbs) => probs.map((prob, v) => Math.max(0, prob - otherProbs[v]));
  const acceptanceRate = (targetProbs, draftProbs) => sum(overlap(targetProbs, draftProbs));
  const totalVariation = (probs, otherProbs) => sum(probs.map((prob, v) => Math.abs(prob - otherProbs[v]))) / 2;

  function acceptanceProbability(targetProb, draftProb) {
    return targetProb === 0 || draftProb === 0 ? 0 : Math.min(1, targetProb / draftProb);
  }

  function residual(targetProbs, draftProbs) {
    const weights = excess(targetProbs, draftProbs);
    const total = sum(weights);
    return total > 0 ? weights.map((weight) => weight / total) : targetProbs;
  }

  // The same proportions among the others, with `value` at `index`.
  function withProbability(probs, index, value) {
    const others = sum(probs.filter((_, v) => v !== index));
    const share = (prob) => (others > 0 ? prob / others : 1 / (probs.length - 1));
    return probs.map((prob, v) => (v === index ? value : (1 - value) * share(prob)));
  }

  // Uniform numbers in [0, 1) from a 32-bit seed (mulberry32).
  function generator(seed) {
    let state = seed | 0;
    return function () {
      state = (state + 0x6d2b79f5) | 0;
      let mixed = Math.imul(state ^ (state >>> 15), state | 1);
      mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)) ^ mixed;
      return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
    };
  }

  // The token whose stretch of the unit interval holds `uniform`; never one of probability 0.
  function pick(probs, uniform) {
    let chosen = 0;
    for (let v = 0, total = 0; v < probs.length; v++) {
      if (probs[v] === 0) continue;
      chosen = v;
      total += probs[v];
      if (uniform < total) break;
    }
    return chosen;
  }

  // Draft one token, then accept it or replace it.
  function verify(targetProbs, draftProbs, random) {
    const draft = pick(draftProbs, random());
    const accepted = random() < acceptanceProbability(targetProbs[draft], draftProbs[draft]);
    return { draft, accepted, token: accepted ? draft : pick(residual(targetProbs, draftProbs), random()) };
  }

  // Mean total variation between `probs` and the frequencies of n draws from it, each frequency taken as normal.
  function samplingNoise(probs, n) {
    return sum(probs.map((prob) => Math.sqrt((2 * prob * (1 - prob)) / (Math.PI * n)))) / 2;
  }

  // ---- Truncation: reference.truncation ------------------------------------------------------------------------------

  function softmax(logits, temperature) {
    const largest = Math.max(...logits);
    const weights = logits.map((logit) => Math.exp((logit - largest) / temperature));
    const total = sum(weights);
    return weights.map((weight) => weight / total);
  }

  // p, the tokens that min-p, top-k and top-p keep in their order, the last of them, and p'.
  function truncate(logits, temperature, topK, topP, minP) {
    const probs = softmax(logits, temperature);
    let kept = logits.map((_, v) => v).sort((v, w) => logits[w] - logits[v] || v - w); // of equal logits the lowest id
    kept = kept.filter((v) => probs[v] >= minP * probs[kept[0]]);
    if (topK > 0) kept = kept.slice(0, topK);
    const mass = sum(kept.map((v) => probs[v]));
    let before = 0;
    kept = kept.filter((v, i) => {
      const isKept = i === 0 || topP === 1 || before < topP * mass;
      before += probs[v];
      return isKept;
    });
    const keptMass = sum(kept.map((v) => probs[v]));
    const truncated = probs.map((prob, v) => (kept.includes(v) ? prob / keptMass : 0));
    return { probs, kept, cutoff: kept.at(-1), truncated };
  }

  // ---- A whole step --------------------------------------------------------------------------------------------------

  // 1 + alpha + ... + alpha^K, which is (1 - alpha^(K+1)) / (1 - alpha) where that is defined.
  function expectedTokens(alpha, numDraftTokens) {
    let total = 0;
    for (let i = 0, power = 1; i <= numDraftTokens; i++, power *= alpha) total += power;
    return total;
  }

  // Tokens per step over the cost of a step: K drafts at `costRatio` each and one pass of the target.
  const speedup = (tokens, numDraftTokens, costRatio) => tokens / (numDraftTokens * costRatio + 1);

  // The smallest K that no longer draft beats; Infinity where one more draft always pays.
  function bestDraftCount(alpha, costRatio) {
    if (alpha > 0 && (costRatio === 0 || (alpha === 1 && costRatio < 1))) return Infinity;
    let count = 0;
    for (let tokens = 1, power = alpha; power > costRatio * speedup(tokens, count, costRatio); power *= alpha) {
      tokens += power;
      count += 1;
    }
    return count;
  }

  // Mean tokens per step of block verification for K = 0 .. most, by enumerating every sequence of drafts.
  function blockTokens(targetProbs, draftProbs, most) {
    const tokens = new Array(most + 1).fill(1);
    // `ratio` is the running ratio c_i; `length` is the mean accepted length of these i drafts if more drafts follow.
    function extend(i, reach, ratio, length) {
      for (let v = 0; v < draftProbs.length; v++) {
        if (draftProbs[v] === 0) continue;
        const next = Math.min(1, (ratio * targetProbs[v]) / draftProbs[v]);
        tokens[i + 1] += reach * draftProbs[v] * (next * (i + 1) + (1 - next) * length); // as the last draft: h = c_K
        if (i + 1 === most) continue;
        let more = 0; // A_i
        for (let w = 0; w < draftProbs.length; w++) more += Math.max(0, next * targetProbs[w] - draftProbs[w]);
        const accepted = more + 1 - next > 0 ? more / (more + 1 - next) : 1;
        extend(i + 1, reach * draftProbs[v], next, accepted * (i + 1) + (1 - accepted) * length);
      }
    }
    if (most > 0) extend(0, 1, 1, 0);
    return tokens;
  }

  // Every path of drafts of this length: how often it is proposed and, given the path, the probability that all of it is
  // accepted by token verification and by block verification, which is the running ratio.
  function draftPaths(targetProbs, draftProbs, length) {
    let paths = [{ drafts: [], proposed: 1, token: 1, block: 1 }];
    const extended = ({ drafts, proposed, token, block }, prob, v) => ({
      drafts: [...drafts, v],
      proposed: proposed * prob,
      token: token * acceptanceProbability(targetProbs[v], prob),
      block: Math.min(1, (block * targetProbs[v]) / prob),
    });
    const isProposed = ({ proposed }) => proposed > 0; // so that nothing is divided by 0
    for (let i = 0; i < length; i++) {
      paths = paths.flatMap((path) => draftProbs.map((prob, v) => extended(path, prob, v)).filter(isProposed));
    }
    return paths;
  }

  // Joint rates J_0 .. J_{K-1} of both methods, by enumerating every path. They add up to the mean of accepted drafts.
  function jointRatesByMethod(targetProbs, draftProbs, numDraftTokens) {
    const rates = { token: [], block: [] };
    for (let length = 1; length <= numDraftTokens; length++) {
      const paths = draftPaths(targetProbs, draftProbs, length);
      for (const method of ["token", "block"]) {
        rates[method].push(sum(paths.map((path) => path.proposed * path[method])));
      }
    }
    return rates;
  }

  const math = {
    schedule,
    overlap,
    excess,
    acceptanceRate,
    totalVariation,
    acceptanceProbability,
    residual,
    withProbability,
    generator,
    verify,
    samplingNoise,
    softmax,
    truncate,
    expectedTokens,
    speedup,
    bestDraftCount,
    blockTokens,
    draftPaths,
    jointRatesByMethod,
  };
  if (typeof module === "object" && module.exports) module.exports = math;
  else globalThis.specdecodeMath = math;
})();
