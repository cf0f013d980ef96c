/*
 * The site's widgets: `<div class="sd-widget" data-widget="schedule">` (or residual, speedup, block,
 * truncation) becomes an interactive figure. The div's content is the fallback, shown until then. All numbers come from
 * math.js, all colours from widgets.css, which takes them from the palette.
 */
(function () {
  "use strict";

  const math = globalThis.specdecodeMath;

  // ---- Elements ------------------------------------------------------------------------------------------------------

  const maker =
    (namespace) =>
    (tag, attributes, ...children) => {
      const element = document.createElementNS(namespace, tag);
      for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
      element.append(...children);
      return element;
    };
  const html = maker("http://www.w3.org/1999/xhtml");
  const svg = maker("http://www.w3.org/2000/svg");

  const percent = (value) => `${(100 * value).toFixed(1)}%`;
  const fixed = (digits) => (value) => value.toFixed(digits);
  const range = (count) => Array.from({ length: count }, (_, i) => i);

  let serial = 0;
  const unique = (name) => `sd-${name}-${(serial += 1)}`;

  // A native range input with its label and its value.
  function slider(label, { min = 0, max = 1, step = 0.01, value, format = fixed(2) }, changed) {
    const shown = html("span", { class: "sd-slider__value", "aria-hidden": "true" });
    const input = html("input", { type: "range", min, max, step, value, autocomplete: "off" });
    const show = () => {
      shown.textContent = format(input.valueAsNumber);
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    input.addEventListener("input", () => {
      show();
      changed();
    });
    show();
    return {
      node: html("label", { class: "sd-slider" }, html("span", {}, label), shown, input),
      get value() {
        return input.valueAsNumber;
      },
    };
  }

  function button(label, pressed) {
    const node = html("button", { type: "button", class: "sd-button" }, label);
    node.addEventListener("click", pressed);
    return node;
  }

  // Named numbers in a grid; `names` maps the key that `set` takes to what a reader sees.
  function readouts(names) {
    const cells = {};
    const node = html("dl", { class: "sd-readouts" });
    for (const [key, name] of Object.entries(names)) {
      cells[key] = html("dd", { "data-readout": key });
      node.append(html("div", {}, html("dt", {}, name), cells[key]));
    }
    return {
      node,
      set(values) {
        for (const [key, value] of Object.entries(values)) cells[key].textContent = value;
      },
    };
  }

  // The same numbers as a table, closed at first: for those who do not see the picture, or want to copy.
  function table(caption, headings, title = "The numbers") {
    const body = html("tbody");
    const head = html("tr", {}, ...headings.map((heading) => html("th", { scope: "col" }, heading)));
    const grid = html("table", { class: "sd-table", "aria-label": caption }, html("thead", {}, head), body);
    const node = html(
      "details",
      { class: "sd-numbers" },
      html("summary", {}, title),
      html("div", { class: "sd-scroll", tabindex: "0", role: "region", "aria-label": caption }, grid),
    );
    return {
      node,
      set(rows) {
        const cells = ([first, ...rest]) => [
          html("th", { scope: "row" }, first),
          ...rest.map((cell) => html("td", {}, cell)),
        ];
        body.replaceChildren(...rows.map((row) => html("tr", {}, ...cells(row))));
      },
    };
  }

  // Tells screen readers, once things have settled.
  function announcer() {
    const node = html("p", { class: "sd-announcer", role: "status" });
    let timer;
    return {
      node,
      say(text) {
        clearTimeout(timer);
        timer = setTimeout(() => (node.textContent = text), 500);
      },
    };
  }

  function legend(...entries) {
    const items = entries.map(([mark, text]) =>
      html("li", {}, svg("svg", { class: "sd-swatch", viewBox: "0 0 16 12", "aria-hidden": "true" }, mark), text),
    );
    return html("ul", { class: "sd-legend" }, ...items);
  }

  // ---- Charts --------------------------------------------------------------------------------------------------------

  // A picture of fixed height, drawn in the pixels that it has, so that its text is as large on a phone.
  function chart(height, draw) {
    const node = svg("svg", { class: "sd-chart", role: "img", style: `height: ${height}px` });
    let width = 0;
    const redraw = () => {
      if (width === 0) return;
      node.setAttribute("viewBox", `0 0 ${width} ${height}`);
      node.replaceChildren(...draw(width, height));
    };
    new ResizeObserver(([entry]) => {
      const now = Math.round(entry.contentRect.width);
      if (now === width) return;
      width = now;
      redraw();
    }).observe(node);
    return {
      node,
      redraw(description) {
        node.setAttribute("aria-label", description);
        redraw();
      },
    };
  }

  const text = (x, y, anchor, content) => svg("text", { x, y, "text-anchor": anchor }, content);
  const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });
  const box = (x, y, width, height, name) => svg("rect", { x, y, width, height, class: name });
  const path = (points, name) =>
    svg("path", { d: `M${points.map((point) => point.join(" ")).join("L")}`, class: name });

  // Grid, ticks and axis titles. Ticks are [label, fraction of the axis] pairs; `x` and `y` place a fraction.
  function frame(width, height, { xTicks, yTicks, xTitle, yTitle }) {
    const [left, right, top, bottom] = [42, 16, 22, 36];
    const x = (fraction) => left + fraction * (width - left - right);
    const y = (fraction) => height - bottom - fraction * (height - top - bottom);
    const nodes = yTicks.flatMap(([label, fraction]) => [
      line(x(0), y(fraction), x(1), y(fraction), fraction === 0 ? "sd-axis" : "sd-grid"),
      text(left - 6, y(fraction) + 4, "end", label),
    ]);
    nodes.push(...xTicks.map(([label, fraction]) => text(x(fraction), y(0) + 15, "middle", label)));
    nodes.push(text(x(0.5), height - 4, "middle", xTitle), text(2, 11, "start", yTitle));
    return { x, y, nodes };
  }

  // ---- The base rate and decay of a synthetic acceptance schedule ----------------------------------------------------

  function scheduleWidget() {
    const drafts = slider("Drafts per step, K", { min: 1, max: 16, step: 1, value: 3, format: String }, changed);
    const mean = slider("Mean joint rate", { value: 0.69 }, changed);
    const least = slider("Least decay", { value: 0.85 }, changed);
    const results = readouts({ a: "base rate a", d: "decay d", mean: "mean joint rate", length: "acceptance length" });
    const why = html("p", { class: "sd-summary" });
    const status = announcer();
    const numbers = table("Rates by offset", ["offset", "conditional", "joint"]);
    let solved;

    const bars = chart(220, (width, height) => {
      const count = solved.jointRates.length;
      const { x, y, nodes } = frame(width, height, {
        xTicks: range(count).map((i) => [i, (i + 0.5) / count]),
        yTicks: [0, 0.25, 0.5, 0.75, 1].map((tick) => [tick.toFixed(2), tick]),
        xTitle: "offset i",
        yTitle: "acceptance rate",
      });
      const band = x(1 / count) - x(0);
      const wide = Math.min(32, 0.38 * band);
      for (const i of range(count)) {
        const middle = x((i + 0.5) / count);
        const pair = [
          [solved.conditionalRates[i], middle - wide - 1, "sd-conditional"],
          [solved.jointRates[i], middle + 1, "sd-joint"],
        ];
        for (const [rate, start, name] of pair) {
          nodes.push(box(start, y(rate), wide, y(0) - y(rate), name));
          if (wide >= 26) nodes.push(text(start + wide / 2, y(rate) - 4, "middle", rate.toFixed(2)));
        }
      }
      return nodes;
    });

    function reason() {
      const reach = `${solved.highestMean.toFixed(4)} at a = 1`;
      if (mean.value === 1) return "Every draft is accepted, so both are 1.";
      if (mean.value === 0) return "No draft is accepted, so the base rate is 0.";
      if (drafts.value === 1) return "A single draft never decays: the base rate is the mean itself.";
      if (solved.decay > least.value) {
        return `The least decay reaches a mean of only ${reach}, so the base rate stays at 1 and the decay rises.`;
      }
      return `The least decay reaches a mean of ${reach}; this is enough, so the base rate is at most 1.`;
    }

    function update() {
      solved = math.schedule(mean.value, drafts.value, least.value);
      const { baseRate, decay, meanRate, acceptanceLength } = solved;
      results.set({
        a: baseRate.toFixed(6),
        d: decay.toFixed(6),
        mean: meanRate.toFixed(4),
        length: acceptanceLength.toFixed(4),
      });
      why.textContent = reason();
      numbers.set(
        range(drafts.value).map((i) => [i, solved.conditionalRates[i].toFixed(6), solved.jointRates[i].toFixed(6)]),
      );
      const joint = solved.jointRates.map(fixed(2)).join(", ");
      bars.redraw(`Bar chart of the conditional and joint acceptance rates by offset. Joint rates: ${joint}.`);
    }
    function changed() {
      update();
      const { baseRate, decay, acceptanceLength } = solved;
      status.say(
        `Base rate ${baseRate.toFixed(6)}, decay ${decay.toFixed(6)}, acceptance length ${acceptanceLength.toFixed(4)}. ` +
          why.textContent,
      );
    }
    update();
    return [
      "Solver for an acceptance schedule",
      html("div", { class: "sd-sliders" }, drafts.node, mean.node, least.node),
      results.node,
      bars.node,
      legend(
        [box(1, 1, 14, 10, "sd-conditional"), "conditional rate, a·dⁱ"],
        [box(1, 1, 14, 10, "sd-joint"), "joint rate: all drafts through i are accepted"],
      ),
      why,
      numbers.node,
      status.node,
    ];
  }

  // ---- Acceptance and residual, with simulated verifications ---------------------------------------------------------

  const TOKENS = ["cat", "dog", "fox", "owl"];
  const TARGET = [0.4, 0.35, 0.15, 0.1];
  const DRAFT = [0.2, 0.25, 0.4, 0.15];
  const SEED = 0; // the first seed, whatever it shows; test_widget_mathematics.py states how far its frequencies are from p
  const MOST_RUNS = 1e5;
  const FLOOR = 1e-3; // the least total variation that the chart shows

  function residualWidget() {
    const rates = readouts({ alpha: "accepted, α", rejected: "rejected, 1 − α" });
    const runs = readouts({ runs: "verifications", accepted: "accepted so far", distance: "total variation to p" });
    const summary = html("p", { class: "sd-summary" });
    const status = announcer();
    const numbers = table("Probabilities by token", ["token", "p", "q", "min", "residual", "emitted"]);
    const hatch = unique("hatch");
    const reduced = matchMedia("(prefers-reduced-motion: reduce)");
    let target, draft, counts, done, accepted, history, stream, random, timer;
    const distance = () =>
      math.totalVariation(
        counts.map((count) => count / done),
        target,
      );

    // A bar of the picture: rectangles as shares of the width.
    const bar = (...children) => svg("svg", { class: "sd-bar", "aria-hidden": "true" }, ...children);
    const share = (name) => svg("rect", { height: "100%", class: name });
    const place = (rect, start, end) => {
      rect.setAttribute("x", `${100 * start}%`);
      rect.setAttribute("width", `${100 * Math.max(0, end - start)}%`);
    };

    // One token: a bar each for p and q, which are range inputs, and one for what verification emits.
    const rows = TOKENS.map((token, v) => {
      const shown = range(3).map(() => html("span", { class: "sd-row__value", "aria-hidden": "true" }));
      const parts = {
        target: share("sd-target"),
        kept: share("sd-draft"),
        refused: share("sd-refused"),
        overlap: share("sd-overlap"),
        recovered: share("sd-recovered"),
        simulated: svg("line", { y1: "0", y2: "100%", class: "sd-simulated" }),
      };
      parts.refused.style.fill = `url(#${hatch})`;
      const input = (model, name, set) => {
        const node = html("input", { type: "range", min: 0, max: 100, step: "any", autocomplete: "off" });
        node.setAttribute("aria-label", `${model} ${name}(${token})`);
        node.addEventListener("input", () => {
          set(node.valueAsNumber / 100);
          changed();
        });
        return node;
      };
      const inputs = [
        input("target", "p", (value) => (target = math.withProbability(target, v, value))),
        input("draft", "q", (value) => (draft = math.withProbability(draft, v, value))),
      ];
      const row = (name, cell, i) => [html("span", { "aria-hidden": "true" }, name), cell, shown[i]];
      const node = html(
        "div",
        { class: "sd-row", role: "group", "aria-label": token },
        html("strong", { "aria-hidden": "true" }, token),
        ...row("p", html("div", { class: "sd-track" }, bar(parts.target), inputs[0]), 0),
        ...row("q", html("div", { class: "sd-track" }, bar(parts.kept, parts.refused), inputs[1]), 1),
        ...row("emitted", html("div", { class: "sd-track" }, bar(parts.overlap, parts.recovered, parts.simulated)), 2),
      );
      return { node, parts, inputs, shown };
    });

    const decades = Math.log10(MOST_RUNS);
    const floorDecades = -Math.log10(FLOOR);
    const distances = chart(180, (width, height) => {
      const power = (n) => ["1", "10", "100", "1k", "10k", "100k"][n];
      const { x, y, nodes } = frame(width, height, {
        xTicks: range(decades + 1).map((n) => [power(n), n / decades]),
        yTicks: range(floorDecades + 1).map((n) => [n === 0 ? "1" : 10 ** -n, 1 - n / floorDecades]),
        xTitle: "verifications",
        yTitle: "total variation to p",
      });
      const point = ([n, variation]) => [
        x(Math.log10(n) / decades).toFixed(1),
        y(1 + Math.log10(Math.max(FLOOR, variation)) / floorDecades).toFixed(1),
      ];
      const noise = range(decades + 1).map((n) => [10 ** n, math.samplingNoise(target, 10 ** n)]);
      nodes.push(path(noise.map(point), "sd-noise"));
      if (done > 0) nodes.push(path([...history, [done, distance()]].map(point), "sd-distance"));
      return nodes;
    });

    const toggle = button("Start", () => (timer === undefined ? start() : stop()));
    const thousand = button("1,000 more", () => {
      run(1000);
      tell();
    });
    const again = button("Reset", () => {
      [target, draft] = [TARGET, DRAFT];
      changed();
    });
    const emitted = html("p", { class: "sd-stream", "aria-hidden": "true" });

    function showBars() {
      const kept = math.overlap(target, draft);
      rows.forEach(({ parts, inputs, shown }, v) => {
        place(parts.target, 0, target[v]);
        place(parts.kept, 0, kept[v]);
        place(parts.refused, kept[v], draft[v]);
        place(parts.overlap, 0, kept[v]);
        place(parts.recovered, kept[v], target[v]);
        [target[v], draft[v]].forEach((prob, side) => {
          inputs[side].value = 100 * prob;
          inputs[side].setAttribute("aria-valuetext", prob.toFixed(3));
          shown[side].textContent = prob.toFixed(3);
        });
      });
      const alpha = math.acceptanceRate(target, draft);
      rates.set({ alpha: percent(alpha), rejected: percent(1 - alpha) });
      const left = math.residual(target, draft);
      const named = TOKENS.flatMap((token, v) => (left[v] > 0 ? [`${token} ${percent(left[v])}`] : []));
      summary.textContent =
        alpha < 1 - 1e-12
          ? `The rejected mass is the total variation of p and q. The residual gives it to: ${named.join(", ")}.`
          : "p and q are equal: every draft is accepted, and no residual is drawn.";
    }

    function showRuns() {
      const frequencies = counts.map((count) => (done > 0 ? count / done : 0));
      rows.forEach(({ parts, shown }, v) => {
        for (const end of ["x1", "x2"]) parts.simulated.setAttribute(end, `${100 * frequencies[v]}%`);
        parts.simulated.style.visibility = done > 0 ? "visible" : "hidden";
        shown[2].textContent = done > 0 ? frequencies[v].toFixed(3) : "–";
      });
      runs.set({
        runs: done.toLocaleString("en"),
        accepted: done > 0 ? percent(accepted / done) : "–",
        distance: done > 0 ? distance().toFixed(4) : "–",
      });
      emitted.replaceChildren(
        ...stream.map((step) =>
          html(
            "span",
            { class: step.accepted ? "sd-kept" : "sd-replaced" },
            step.accepted ? `✓ ${TOKENS[step.token]}` : `✗ ${TOKENS[step.draft]} → ${TOKENS[step.token]}`,
          ),
        ),
      );
      if (stream.length === 0) emitted.textContent = "Start it to draft and verify, one token at a time.";
      const kept = math.overlap(target, draft);
      const left = math.residual(target, draft);
      numbers.set(
        TOKENS.map((token, v) => [
          token,
          ...[target, draft, kept, left].map((values) => values[v].toFixed(3)),
          done > 0 ? frequencies[v].toFixed(3) : "–",
        ]),
      );
      distances.redraw(
        done > 0
          ? `Total variation to p after ${done} verifications: ${distance().toFixed(4)}.`
          : "Total variation to p against the number of verifications; none yet.",
      );
      thousand.disabled = done >= MOST_RUNS;
    }

    function run(count) {
      for (const stop = Math.min(MOST_RUNS, done + count); done < stop;) {
        const step = math.verify(target, draft, random);
        counts[step.token] += 1;
        accepted += step.accepted ? 1 : 0;
        done += 1;
        if (done >= stop - 4 || count === 1) stream = [step, ...stream].slice(0, 4);
        if (done >= 1.05 * (history.at(-1)?.[0] ?? 0)) history.push([done, distance()]);
      }
      showRuns();
    }

    // The first verifications come one by one, then ever more at once; with reduced motion in six leaps.
    function start() {
      if (done >= MOST_RUNS) clear();
      toggle.textContent = "Pause";
      const growth = reduced.matches ? 9 : 0.05;
      const tick = () => {
        if (!toggle.isConnected) return stop();
        if (!document.hidden) run(Math.max(1, Math.ceil(growth * done)));
        if (done >= MOST_RUNS) {
          stop();
          tell();
        }
      };
      timer = setInterval(tick, reduced.matches ? 1000 : 100);
      tick();
    }
    function stop() {
      clearInterval(timer);
      timer = undefined;
      toggle.textContent = "Start";
      if (done > 0) tell();
    }
    function tell() {
      status.say(`After ${done} verifications the total variation to p is ${distance().toFixed(4)}.`);
    }

    function clear() {
      counts = TOKENS.map(() => 0);
      [done, accepted, history, stream, random] = [0, 0, [], [], math.generator(SEED)];
      showRuns();
    }
    function changed() {
      if (timer !== undefined) stop();
      clear();
      showBars();
      status.say(`Accepted ${percent(math.acceptanceRate(target, draft))}. ${summary.textContent}`);
    }

    [target, draft] = [TARGET, DRAFT];
    clear();
    showBars();

    const stripes = svg(
      "pattern",
      { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      box(0, 0, 3, 6, "sd-draft"),
    );
    const refused = box(1, 1, 14, 10, "sd-refused");
    refused.style.fill = `url(#${hatch})`;
    return [
      "Acceptance and residual of two distributions",
      svg("svg", { class: "sd-definitions", "aria-hidden": "true" }, svg("defs", {}, stripes)),
      html("div", { class: "sd-rows" }, ...rows.map((row) => row.node)),
      legend(
        [box(1, 1, 14, 10, "sd-target"), "target p"],
        [box(1, 1, 14, 10, "sd-draft"), "draft q"],
        [refused, "rejected, q − p"],
        [box(1, 1, 14, 10, "sd-overlap"), "accepted, min(p, q)"],
        [box(1, 1, 14, 10, "sd-recovered"), "recovered, p − q"],
        [line(8, 0, 8, 12, "sd-simulated"), "simulated"],
      ),
      rates.node,
      summary,
      html("div", { class: "sd-buttons" }, toggle, thousand, again),
      emitted,
      runs.node,
      distances.node,
      legend(
        [line(0, 6, 16, 6, "sd-distance"), "these verifications"],
        [line(0, 6, 16, 6, "sd-noise"), "as many draws from p itself, on average"],
      ),
      numbers.node,
      status.node,
    ];
  }

  // ---- Expected tokens and speed-up against the number of drafts -----------------------------------------------------

  const MOST_DRAFTS = 16;

  // Distributions with a given overlap alpha. Block verification sees more of them than that.
  const PAIRS = {
    mirrored: {
      name: "two tokens, mirrored",
      at: (alpha) => [
        [alpha / 2, 1 - alpha / 2],
        [1 - alpha / 2, alpha / 2],
      ],
    },
    certain: {
      name: "a draft that was certain",
      at: (alpha) => [
        [alpha, 1 - alpha],
        [1, 0],
      ],
    },
  };

  function speedupWidget() {
    const rate = slider("Acceptance rate, α", { value: 0.8 }, changed);
    const cost = slider("Cost of a draft, κ", { value: 0.05 }, changed);
    const drafts = slider(
      "Drafts per step, K",
      { min: 0, max: MOST_DRAFTS, step: 1, value: 4, format: String },
      changed,
    );
    const pair = html(
      "select",
      {},
      ...Object.entries(PAIRS).map(([key, { name }]) => html("option", { value: key }, name)),
    );
    pair.addEventListener("change", changed);
    const results = readouts({
      tokens: "tokens, by token",
      blockTokens: "tokens, by block",
      speedup: "speed-up, by token",
      blockSpeedup: "speed-up, by block",
      best: "best K, by token",
      blockBest: "best K, by block",
    });
    const summary = html("p", { class: "sd-summary" });
    const status = announcer();
    const numbers = table("Tokens and speed-up by number of drafts", [
      "K",
      "tokens, by token",
      "tokens, by block",
      "speed-up, by token",
      "speed-up, by block",
    ]);
    let token, block; // {tokens, speedups, best} by number of drafts

    const dot = ([x, y], name) => svg("circle", { cx: x, cy: y, r: 3, class: name });
    const square = ([x, y], name) => box(x - 3, y - 3, 6, 6, name);

    function curves(key, yTitle, least) {
      return (width, height) => {
        const highest = Math.max(...block[key], ...token[key], least);
        const unit = [0.25, 0.5, 1, 2, 4].find((candidate) => highest / candidate <= 5);
        const top = unit * Math.ceil(highest / unit + 0.1);
        const { x, y, nodes } = frame(width, height, {
          xTicks: range(MOST_DRAFTS / 2 + 1).map((half) => [2 * half, (2 * half) / MOST_DRAFTS]),
          yTicks: range(Math.round(top / unit) + 1).map((n) => [
            unit < 1 ? (n * unit).toFixed(2) : n * unit,
            (n * unit) / top,
          ]),
          xTitle: "drafts per step, K",
          yTitle,
        });
        const at = (series, count) => [x(count / MOST_DRAFTS), y(series[key][count] / top)];
        nodes.push(line(x(drafts.value / MOST_DRAFTS), y(0), x(drafts.value / MOST_DRAFTS), y(1), "sd-cursor"));
        for (const [series, name, mark] of [
          [block, "sd-block", square],
          [token, "sd-token", dot],
        ]) {
          const points = range(MOST_DRAFTS + 1).map((count) => at(series, count));
          nodes.push(path(points, name), ...points.map((point) => mark(point, `${name}-mark`)));
          if (key === "speedups" && series.best <= MOST_DRAFTS) {
            const [bestX, bestY] = at(series, series.best);
            nodes.push(svg("circle", { cx: bestX, cy: bestY, r: 7, class: `${name} sd-best` }));
          }
        }
        return nodes;
      };
    }
    const tokens = chart(230, curves("tokens", "expected tokens per step", 1));
    const speedups = chart(230, curves("speedups", "speed-up over no drafts", 1));

    const named = (best) =>
      best === Infinity ? "no limit" : best > MOST_DRAFTS ? `${best} (off the chart)` : String(best);

    function update() {
      const [alpha, costRatio, count] = [rate.value, cost.value, drafts.value];
      const counts = range(MOST_DRAFTS + 1);
      const gains = (expected) => expected.map((value, n) => math.speedup(value, n, costRatio));
      const expected = counts.map((n) => math.expectedTokens(alpha, n));
      token = { tokens: expected, speedups: gains(expected), best: math.bestDraftCount(alpha, costRatio) };
      const distributions = PAIRS[pair.value].at(alpha);
      const blocks = math.blockTokens(...distributions, MOST_DRAFTS);
      const blockGains = gains(blocks);
      const highest = Math.max(...blockGains);
      // Drafts that cost nothing are all worth it, even where floating point can no longer tell their gains apart.
      const isFree = costRatio === 0 && alpha > 0;
      const best = isFree ? MOST_DRAFTS : blockGains.findIndex((gain) => gain >= highest - 1e-9);
      block = { tokens: blocks, speedups: blockGains, best };
      const blockBest = best === MOST_DRAFTS ? `${MOST_DRAFTS} or more` : String(best);
      results.set({
        tokens: expected[count].toFixed(3),
        blockTokens: blocks[count].toFixed(3),
        speedup: `${token.speedups[count].toFixed(3)} ×`,
        blockSpeedup: `${blockGains[count].toFixed(3)} ×`,
        best: named(token.best),
        blockBest,
      });
      const [p, q] = distributions.map((probs) => `(${probs.map(fixed(3)).join(", ")})`);
      summary.textContent =
        `Here p = ${p} and q = ${q}. What token verification emits follows from α alone; what block verification emits ` +
        (pair.value === "certain"
          ? "does not, but a draft that was certain leaves it nothing to gain."
          : "does not: choose other distributions and see.");
      numbers.set(
        counts.map((n) => [n, ...[expected, blocks, token.speedups, blockGains].map((values) => values[n].toFixed(4))]),
      );
      tokens.redraw(
        `Expected tokens per step against K. At K = ${count}: ${expected[count].toFixed(3)} by token, ${blocks[count].toFixed(3)} by block.`,
      );
      speedups.redraw(`Speed-up against K. Best K: ${named(token.best)} by token, ${blockBest} by block.`);
    }
    function changed() {
      update();
      const n = drafts.value;
      status.say(
        `At K = ${n}: ${token.tokens[n].toFixed(3)} tokens and speed-up ${token.speedups[n].toFixed(3)} by token, ` +
          `${block.tokens[n].toFixed(3)} and ${block.speedups[n].toFixed(3)} by block. Best K by token: ${named(token.best)}.`,
      );
    }
    update();
    return [
      "Expected tokens and speed-up",
      html(
        "div",
        { class: "sd-sliders" },
        rate.node,
        cost.node,
        drafts.node,
        html("label", { class: "sd-slider sd-choice" }, html("span", {}, "Distributions with this α"), pair),
      ),
      results.node,
      html("div", { class: "sd-charts" }, tokens.node, speedups.node),
      legend(
        [svg("g", {}, line(0, 6, 16, 6, "sd-token"), dot([8, 6], "sd-token-mark")), "token verification"],
        [
          svg("g", {}, line(0, 6, 16, 6, "sd-block"), square([8, 6], "sd-block-mark")),
          "block verification, by enumeration",
        ],
        [svg("circle", { cx: 8, cy: 6, r: 5, class: "sd-token sd-best" }), "best K"],
      ),
      summary,
      measured(),
      numbers.node,
      status.node,
    ];
  }

  // ---- Accepted drafts of token and block verification, by draft path ------------------------------------------------

  const MOST_BLOCK_DRAFTS = 8;

  // What is not read off these pictures: the rows of real models depend on the text.
  const measured = () =>
    html(
      "p",
      { class: "sd-note" },
      "Exact, for two tokens and rows that do not depend on the text. On real models, with 8 drafts, the paper about " +
        "block verification reports 8.5% more tokens per step.",
    );

  function blockWidget() {
    const targetProb = slider("Target, p(0)", { value: 0.4 }, changed);
    const draftProb = slider("Draft, q(0)", { value: 0.8 }, changed);
    const drafts = slider(
      "Drafts per step, K",
      { min: 1, max: MOST_BLOCK_DRAFTS, step: 1, value: 2, format: String },
      changed,
    );
    const results = readouts({
      token: "accepted drafts, by token",
      block: "accepted drafts, by block",
      moreDrafts: "more accepted drafts",
      moreTokens: "more tokens per step",
    });
    const summary = html("p", { class: "sd-summary" });
    const status = announcer();
    const byPath = table(
      "Acceptance by draft path",
      ["drafts", "proposed", "by token", "by block"],
      "The numbers by draft path",
    );
    const byOffset = table("Joint rates by offset", ["offset", "by token", "by block"], "The numbers by offset");
    let paths, rates, accepted, gains;

    const ticks = [0, 0.25, 0.5, 0.75, 1].map((tick) => [tick.toFixed(2), tick]);

    // Two bars for each path, as wide as it is often proposed, so that areas are joint rates. Block verification accepts
    // no prefix less often, given it: so its bar stands behind, and what is seen of it is what it adds.
    const bars = chart(230, (width, height) => {
      let start = 0;
      const placed = paths.map((path) => ({ ...path, start, end: (start += path.proposed) }));
      const { x, y, nodes } = frame(width, height, {
        xTicks: [],
        yTicks: ticks,
        xTitle: paths[0].drafts.length > 1 ? "drafts x₀ x₁; width: how often proposed" : "draft x₀; width: how often proposed",
        yTitle: "accepted, given these drafts",
      });
      for (const path of placed) {
        const [left, wide] = [x(path.start) + 0.5, Math.max(1, x(path.end) - x(path.start) - 1)];
        nodes.push(box(left, y(path.block), wide, y(0) - y(path.block), "sd-block-bar"));
        nodes.push(box(left, y(path.token), wide, y(0) - y(path.token), "sd-token-bar"));
        const middle = left + wide / 2;
        if (wide >= 20) nodes.push(text(middle, y(0) + 15, "middle", path.drafts.join(" ")));
        if (wide >= 28) {
          nodes.push(text(middle, y(path.block) - 4, "middle", path.block.toFixed(2)));
          if (y(path.token) - y(path.block) < 1 || y(0) - y(path.token) < 16) continue;
          const inside = text(middle, y(path.token) + 13, "middle", path.token.toFixed(2));
          inside.setAttribute("class", "sd-inside");
          nodes.push(inside);
        }
      }
      return nodes;
    });

    const joints = chart(230, (width, height) => {
      const count = rates.token.length;
      const { x, y, nodes } = frame(width, height, {
        xTicks: range(count).map((i) => [i, (i + 0.5) / count]),
        yTicks: ticks,
        xTitle: "offset i",
        yTitle: "joint rate, over all drafts",
      });
      const band = x(1 / count) - x(0);
      const wide = Math.min(32, 0.38 * band);
      for (const i of range(count)) {
        const middle = x((i + 0.5) / count);
        const pair = [
          [rates.token[i], middle - wide - 1, "sd-token-bar"],
          [rates.block[i], middle + 1, "sd-block-bar"],
        ];
        for (const [rate, start, name] of pair) {
          nodes.push(box(start, y(rate), wide, y(0) - y(rate), name));
          if (wide >= 26) nodes.push(text(start + wide / 2, y(rate) - 4, "middle", rate.toFixed(2)));
        }
      }
      return nodes;
    });

    const more = (share) => (share === undefined ? "–" : `${(100 * share).toFixed(1)}%`);

    function reason() {
      if (drafts.value === 1) return "One draft: both methods accept it alike.";
      if (targetProb.value === draftProb.value) return "p and q are equal: every draft is accepted by both methods.";
      if ([0, 1].includes(draftProb.value)) return "The drafter always proposes the same token: the methods are equal.";
      if ([0, 1].includes(targetProb.value)) return "The target is certain: the methods are equal.";
      const [low, high] = targetProb.value < draftProb.value ? [0, 1] : [1, 0];
      return (
        `The gain comes from paths on which a draft with p/q < 1 (token ${low}) is followed by one with p/q > 1 ` +
        `(token ${high}).`
      );
    }

    function update() {
      const [p, q, count] = [targetProb.value, draftProb.value, drafts.value];
      const pair = [
        [p, 1 - p],
        [q, 1 - q],
      ];
      paths = math.draftPaths(...pair, Math.min(count, 2));
      rates = math.jointRatesByMethod(...pair, count);
      const mean = (joint) => joint.reduce((total, rate) => total + rate, 0);
      accepted = { token: mean(rates.token), block: mean(rates.block) };
      const exactly = accepted.block - accepted.token;
      const difference = Math.abs(exactly) < 1e-12 ? 0 : exactly;
      gains = {
        moreDrafts: more(accepted.token > 0 ? difference / accepted.token : undefined),
        moreTokens: more(difference / (1 + accepted.token)),
      };
      results.set({ token: accepted.token.toFixed(3), block: accepted.block.toFixed(3), ...gains });
      summary.textContent = reason();
      byPath.set(
        paths.map((path) => [
          path.drafts.join(", "),
          ...[path.proposed, path.token, path.block].map((value) => value.toFixed(4)),
        ]),
      );
      byOffset.set(range(count).map((i) => [i, rates.token[i].toFixed(4), rates.block[i].toFixed(4)]));
      const described = paths.map(
        (path) => `drafts ${path.drafts.join(", ")}: ${path.token.toFixed(2)} by token, ${path.block.toFixed(2)} by block`,
      );
      bars.redraw(
        `Bar chart of the probability that ${paths[0].drafts.length > 1 ? "the first two drafts are both" : "the draft is"} ` +
          `accepted, given the drafts. ${described.join("; ")}.`,
      );
      const joint = ["token", "block"].map((method) => `by ${method} ${rates[method].map(fixed(2)).join(", ")}`);
      joints.redraw(`Bar chart of the joint rates by offset: ${joint.join("; ")}.`);
    }
    function changed() {
      update();
      status.say(
        `At K = ${drafts.value}: ${accepted.token.toFixed(3)} accepted drafts by token, ${accepted.block.toFixed(3)} by ` +
          `block, ${gains.moreDrafts} more.`,
      );
    }
    update();
    return [
      "Accepted drafts by token and by block",
      html("div", { class: "sd-sliders" }, targetProb.node, draftProb.node, drafts.node),
      results.node,
      html("div", { class: "sd-charts" }, bars.node, joints.node),
      legend(
        [box(1, 1, 14, 10, "sd-token-bar"), "token verification"],
        [box(1, 1, 14, 10, "sd-block-bar"), "block verification (in the first chart: behind the other)"],
      ),
      summary,
      measured(),
      byPath.node,
      byOffset.node,
      status.node,
    ];
  }

  // ---- What top-k, top-p and min-p keep of both models ---------------------------------------------------------------

  const TARGET_LOGITS = [3.2, 2.6, 1.9, 1.9, 1.1, 0.6, 0.1, -0.7]; // tokens 2 and 3 are equal
  const DRAFT_LOGITS = [2.9, 2.5, 1.4, 2.1, 1.6, 1.2, 0.4, 0.7];

  function truncationWidget() {
    const vocab = TARGET_LOGITS.length;
    const unless = (neutral, format) => (value) => (value === neutral ? "all" : format(value));
    const topK = slider("top_k", { min: 1, max: vocab, step: 1, value: vocab, format: unless(vocab, String) }, changed);
    const topP = slider("top_p", { min: 0.05, max: 1, step: 0.05, value: 0.8, format: unless(1, fixed(2)) }, changed);
    const minP = slider("min_p", { min: 0, max: 0.5, value: 0, format: unless(0, fixed(2)) }, changed);
    const temperature = slider("temperature", { min: 0.1, max: 2, step: 0.1, value: 1, format: fixed(1) }, changed);
    const results = readouts({
      target: "target keeps, cutoff",
      draft: "draft keeps, cutoff",
      truncated: "accepted, drafts truncated too",
      plain: "accepted, drafts not truncated",
    });
    const summary = html("p", { class: "sd-summary" });
    const status = announcer();
    const numbers = table("Probabilities by token", ["id", "p", "p′", "q", "q′", "min(p′, q′)", "min(p′, q)"]);
    let target, draft, rates;

    // Two bars for each token: the probability before and after truncation. A triangle marks the last token kept.
    function bars(model, name, yTitle) {
      return (width, height) => {
        const { probs, truncated, cutoff } = model();
        const unit = Math.max(...truncated) > 0.5 ? 0.25 : 0.1;
        const top = unit * Math.ceil(Math.max(...truncated) / unit - 1e-9);
        const { x, y, nodes } = frame(width, height, {
          xTicks: range(vocab).map((v) => [v, (v + 0.5) / vocab]),
          yTicks: range(Math.round(top / unit) + 1).map((n) => [(n * unit).toFixed(2), (n * unit) / top]),
          xTitle: "token",
          yTitle,
        });
        const band = x(1 / vocab) - x(0);
        const wide = Math.min(24, 0.38 * band);
        for (const v of range(vocab)) {
          const middle = x((v + 0.5) / vocab);
          const pair = [
            [probs[v], middle - wide - 1, `${name}-whole`],
            [truncated[v], middle + 1, name],
          ];
          for (const [prob, start, kind] of pair) {
            nodes.push(box(start, y(prob / top), wide, y(0) - y(prob / top), kind));
          }
        }
        const [middle, edge] = [x((cutoff + 0.5) / vocab), y(truncated[cutoff] / top) - 4];
        nodes.push(mark(middle + 1 + wide / 2, edge));
        return nodes;
      };
    }
    const mark = (x, y) =>
      svg("path", { d: `M${x} ${y}L${x - 5} ${y - 8}L${x + 5} ${y - 8}Z`, class: "sd-cutoff" });
    const targets = chart(190, bars(() => target, "sd-target", "target"));
    const drafts = chart(190, bars(() => draft, "sd-draft", "draft"));

    function reason() {
      const left = range(vocab).filter((v) => target.truncated[v] === 0);
      if (left.length === 0) return "Nothing is left out: p′ = p and q′ = q.";
      const lost = left.reduce((total, v) => total + draft.probs[v], 0);
      const difference = rates.truncated - rates.plain;
      const often = Math.abs(difference) < 5e-4 ? "as often" : difference > 0 ? "more often" : "less often";
      return (
        `The target leaves out ${percent(lost)} of untruncated drafts: they are always rejected. Here truncated drafts are ` +
        `accepted ${often}.`
      );
    }

    function update() {
      const options = [temperature.value, topK.value, topP.value, minP.value];
      [target, draft] = [TARGET_LOGITS, DRAFT_LOGITS].map((logits) => math.truncate(logits, ...options));
      rates = {
        truncated: math.acceptanceRate(target.truncated, draft.truncated),
        plain: math.acceptanceRate(target.truncated, draft.probs),
      };
      results.set({
        target: `${target.kept.length} of ${vocab}, token ${target.cutoff}`,
        draft: `${draft.kept.length} of ${vocab}, token ${draft.cutoff}`,
        truncated: percent(rates.truncated),
        plain: percent(rates.plain),
      });
      summary.textContent = reason();
      const both = math.overlap(target.truncated, draft.truncated);
      const one = math.overlap(target.truncated, draft.probs);
      const columns = [target.probs, target.truncated, draft.probs, draft.truncated, both, one];
      numbers.set(range(vocab).map((v) => [v, ...columns.map((column) => column[v].toFixed(3))]));
      const kept = (model) => model.kept.map((v) => `token ${v} ${model.truncated[v].toFixed(2)}`).join(", ");
      targets.redraw(`Bar chart of the target's probabilities before and after truncation. Kept: ${kept(target)}.`);
      drafts.redraw(`Bar chart of the draft's probabilities before and after truncation. Kept: ${kept(draft)}.`);
    }
    function changed() {
      update();
      status.say(
        `Tokens kept: ${target.kept.length} of the target, ${draft.kept.length} of the draft. Drafts accepted: ` +
          `${percent(rates.truncated)} if the drafts are truncated too, ${percent(rates.plain)} if not.`,
      );
    }
    update();
    const pair = (name) => svg("g", {}, box(1, 1, 6, 10, `${name}-whole`), box(9, 1, 6, 10, name));
    return [
      "What top-k, top-p and min-p keep, and how many drafts are accepted",
      html("div", { class: "sd-sliders sd-sliders--four" }, temperature.node, minP.node, topK.node, topP.node),
      results.node,
      html("div", { class: "sd-charts" }, targets.node, drafts.node),
      legend(
        [pair("sd-target"), "target: p, p′"],
        [pair("sd-draft"), "draft: q, q′"],
        [mark(8, 10), "cutoff: the last token kept"],
      ),
      summary,
      numbers.node,
      status.node,
    ];
  }

  // ---- Mounting ------------------------------------------------------------------------------------------------------

  const WIDGETS = {
    schedule: scheduleWidget,
    residual: residualWidget,
    speedup: speedupWidget,
    block: blockWidget,
    truncation: truncationWidget,
  };

  function mountAll() {
    for (const root of document.querySelectorAll(".sd-widget:not([data-mounted])")) {
      const build = WIDGETS[root.dataset.widget];
      if (build === undefined) continue;
      const [name, ...children] = build();
      root.dataset.mounted = "";
      root.setAttribute("role", "group");
      root.setAttribute("aria-label", name);
      root.replaceChildren(...children);
    }
  }

  if (globalThis.document$)
    document$.subscribe(mountAll); // mkdocs-material: after every page, instant ones too
  else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", mountAll);
  else mountAll();
})();
