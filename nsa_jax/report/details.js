// Sections of the run that is chosen: health by layer, alarms, samples, configuration, environment.

const BRANCHES = ["compressed", "selected", "window"];
const MAPS = [
  {
    title: "Gates",
    about:
      "How each layer weighs its branches. Equal shares are balanced. A share near 1 means that the layer uses one branch only.",
    maps: [
      ...BRANCHES.map((name) => [`gate_share_${name}`, `Share of gates: ${name}`, "", "third"]),
      [
        "gate_entropy",
        "Gate entropy",
        () => `nats; ${chosen().config["model.nsa.selector"] === "mean_key" ? "0.69" : "1.10"} is balance, alarm below ${chosen().config["guards.min_gate_entropy"] ?? 0.5}`,
        "entropy",
      ],
      ["gate_collapsed", "Gates on a single branch", "share of tokens and heads", "zero"],
    ],
  },
  {
    title: "Outputs",
    about:
      "The size of what each branch adds, as a share of all three. A branch with a large gate can still add little.",
    maps: BRANCHES.map((name) => [`output_share_${name}`, `Share of output: ${name}`, "", "third"]),
  },
  {
    title: "Selection",
    about:
      "Which blocks the selected branch reads, and what they hold of dense attention: selection chooses well where lists hold much more than random ones.",
    maps: [
      ["selection_held", "Attention held by lists", "share of dense attention, a few queries", "share"],
      ["selection_random", "Attention held by random lists", "share of dense attention", "share"],
      ["selection_best", "Attention held by the best lists", "share of dense attention", "share"],
      ["blocks_beyond", "Blocks chosen by score", "share of listed blocks, beyond the forced ones", "share"],
      ["block_distance", "Distance of the blocks", "tokens before the query, mean", "free"],
      ["block_overlap", "Blocks shared with the neighbour", "share that the query before also reads", "share"],
      ["blocks_distinct", "Distinct blocks", "per query", "free"],
      ["keys_counted", "Keys read", "per query, counted from the lists", "free"],
    ],
  },
];
// Parameters, gradients and updates: one group of maps each.
const PARTS = [
  ["weights", "Weights", "After each step."],
  ["gradients", "Gradients", "Of the whole batch, before clipping."],
  ["updates", "Updates", "What a step adds to the weights: with Adam about the learning rate in size, everywhere."],
].map(([name, title, about]) => ({
  title,
  about,
  maps: [
    [`${name}_norm`, `${title}: norm`, "log", "log"],
    [`${name}_largest`, `${title}: largest entry`, "absolute value, log", "log"],
    [`${name}_zeros`, `${title}: zeros`, "share of entries", "zero"],
  ],
}));
// The values that a colour scale spans: of all runs, so that runs can be compared, and of maps that share it.
const SHARES = BRANCHES.flatMap((branch) => [`gate_share_${branch}`, `output_share_${branch}`]);
function spanned(name, source) {
  const names = SHARES.includes(name) ? SHARES : [name];
  return DATA.runs
    .flatMap((run) => names.flatMap((one) => run[source]?.z[one] ?? []))
    .flat()
    .filter((value) => value !== null);
}
function mapRange(kind, numbers) {
  const low = numbers.reduce((a, b) => Math.min(a, b), Infinity),
    high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  if (kind === "third") {
    const reach = Math.max(0.2, high - 1 / 3, 1 / 3 - low);
    return [1 / 3 - reach, 1 / 3 + reach];
  }
  if (kind === "entropy") return [Math.min(0.5, low), Math.log(3)];
  if (kind === "zero") return [0, Math.max(0.1, high)];
  if (kind === "share") return [0, 1];
  if (kind === "log") {
    const positive = numbers.filter((value) => value > 0),
      least = positive.reduce((a, b) => Math.min(a, b), Infinity);
    return positive.length ? [Math.log10(least), Math.max(Math.log10(high), Math.log10(least) + 0.05)] : [0, 1];
  }
  const span = Math.max(high - low, Math.abs(high) * 0.05, 1e-6); // noise must not look like a pattern
  return [(low + high - span) / 2, (low + high + span) / 2];
}
// The one value of a figure in all layers, steps and runs; null if it varies.
function constant(name, source) {
  const numbers = spanned(name, source);
  return numbers.length && !SHARES.includes(name) && numbers.every((value) => value === numbers[0]) ? numbers[0] : null;
}
function logColours(low, high) {
  const values = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++)
    for (const factor of high - low > 1.2 ? [1] : [1, 2, 5]) values.push(factor * 10 ** power);
  const shown = values.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
  const ticks = shown.length > 1 ? shown : [10 ** low, 10 ** high];
  return { tickvals: ticks.map(Math.log10), ticktext: ticks.map((value) => digits(value, 2)) };
}
function heatMap(name, title, kind, source = "health") {
  const run = chosen(),
    health = run[source],
    z = health?.z[name];
  if (!z || !z.flat().some((value) => value !== null)) return null;
  const third = kind === "third",
    log = kind === "log",
    [low, high] = mapRange(kind, spanned(name, source));
  const layers = Array.from({ length: health.layers }, (_, layer) => layer);
  const x = health.x.map((step) => along(run, step));
  return {
    traces: [
      {
        type: "heatmap",
        x,
        y: layers,
        z: log ? z.map((line) => line.map((value) => (value > 0 ? Math.log10(value) : null))) : z,
        customdata: z,
        zmin: low,
        zmax: high,
        xgap: 0,
        ygap: health.layers <= 16 ? 1 : 0,
        colorscale: third ? AROUND[theme()] : "Cividis",
        hoverongaps: false,
        hovertemplate: `layer %{y}<br>${state.axis} %{x:,.6~g}<br>%{customdata:.4~g}<extra></extra>`,
        colorbar: {
          thickness: 10,
          outlinewidth: 0,
          tickfont: { size: 11, color: token("--muted") },
          nticks: 5,
          // The colour scale is symmetric around a third; shares are not.
          ...(third && { tickvals: [0, 0.2, 0.4, 0.6, 0.8, 1].filter((share) => share >= low && share <= high) }),
          ...(log && logColours(low, high)),
          x: 1.01,
          xpad: 4,
        },
      },
    ],
    label: `Heat map: ${title} by layer over ${axisTitle()}`,
    options: {
      height: Math.min(150 + 9 * health.layers, 520),
      hovermode: "closest",
      xaxis: { showgrid: false },
      yaxis: {
        title: { text: "layer", standoff: 6 },
        showgrid: false,
        dtick: Math.max(1, Math.ceil(health.layers / 8)),
        tickformat: "d",
      },
    },
  };
}
function health() {
  const content = [heading("health", "Health of NSA, layer by layer", true)];
  if (!chosen().health && !DATA.runs.some((run) => run.health)) {
    return [
      ...content,
      el(
        "p",
        { class: "panel empty" },
        "No run logged health: config.guards.health is off, or the model has no NSA layers.",
      ),
    ];
  }
  content.push(el("p", { class: "muted keys", id: "keys" }, keysRead()));
  return [...content, ...groups(MAPS, "health")];
}
// Headings and maps. Figures that never change are told in a line, since a map of them shows nothing.
function groups(list, source) {
  return list.flatMap(({ title, about, maps }) => {
    const still = maps.map(([name, head, unit]) => [head, constant(name, source), unit]).filter((one) => one[1] !== null);
    const drawn = maps.filter(([name]) => constant(name, source) === null);
    const same = still.map(([head, value, unit]) => `${head} (${unit}): ${digits(value)}`).join("; ");
    return [
      el(
        "div",
        { class: "group" },
        el("h3", {}, title),
        el("p", {}, about),
        same ? el("p", { class: "still" }, `The same in every layer and at every step: ${same}.`) : null,
      ),
      el(
        "div",
        { class: "grid maps" },
        drawn.map(([name, head, unit, kind]) =>
          chart(`map-${name}`, { title: head, unit, make: () => heatMap(name, head, kind, source), follows: "run" }),
        ),
      ),
    ];
  });
}
function layers() {
  const content = [heading("layers", "Weights, gradients and updates, layer by layer", true)];
  if (!DATA.runs.some((run) => run.layers))
    return [
      ...content,
      el("p", { class: "panel empty" }, "No run recorded them: config.guards.health is off, or an older version trained it."),
    ];
  return [...content, ...groups(PARTS, "layers")];
}

// What a few held-out queries chose at each validation.
const CHOICES = ["not read", "no choice: everything fits", "forced", "chosen by score"];
const CHOICE_COLOURS = {
  light: ["#e3e7ec", "#8577b8", "#2f8fd0", "#d9590a"],
  dark: ["#313b47", "#9f90d6", "#4fa8e3", "#f2803a"],
};
const sampled = { query: -1, layer: 0, group: 0 };
function selectionChart() {
  const found = chosen().validation.selection,
    [layer, query, group] = [sampled.layer, sampled.query, sampled.group],
    kinds = found.kinds[query],
    own = kinds.findLastIndex((kind) => kind > 0);
  const rank = [null, 0, 2, 1]; // of a kind among CHOICES
  const z = found.steps.map((_, index) => {
    const line = kinds.slice(0, own + 1).map((kind) => rank[kind]);
    for (const block of found.chosen[index][layer][query][group]) line[block] = 3;
    return line;
  });
  const tones = CHOICE_COLOURS[theme()],
    size = found.select_block;
  return {
    traces: [
      {
        type: "heatmap",
        x: kinds.slice(0, own + 1).map((_, block) => block),
        y: found.steps.map(grouped),
        z,
        text: z.map((line) => line.map((kind) => CHOICES[kind] ?? "of another document")),
        zmin: -0.5,
        zmax: 3.5,
        xgap: own < 64 ? 1 : 0,
        ygap: found.steps.length < 40 ? 1 : 0,
        colorscale: tones.flatMap((tone, index) => [
          [index / 4, tone],
          [(index + 1) / 4, tone],
        ]),
        showscale: false,
        hoverongaps: false,
        hovertemplate: "step %{y}<br>block %{x}<br>%{text}<extra></extra>",
      },
    ],
    legend: CHOICES.map((name, index) =>
      el("span", {}, el("span", { class: "swatch", style: { "--swatch": tones[index] } }), name),
    ),
    label: `Blocks that query ${found.queries[query].position} reads in layer ${found.layers[layer]}, group ${group}, at each validation`,
    options: {
      height: Math.min(120 + 14 * found.steps.length, 460),
      hovermode: "closest",
      xtitle: `block of ${grouped(size)} tokens`,
      xaxis: { showgrid: false, tickformat: "d" },
      yaxis: { title: { text: "step", standoff: 6 }, type: "category", autorange: "reversed", showgrid: false, nticks: 12 },
    },
  };
}
function selection() {
  const found = chosen().validation.selection,
    content = [heading("selection", "What held-out queries select", true)];
  if (!found || !found.queries.length || !found.layers.length)
    return [
      ...content,
      el(
        "p",
        { class: "panel empty" },
        "No validation recorded block lists: config.guards.health or config.train.eval_batches is off, the model has no NSA layers, or an older version trained it.",
      ),
    ];
  sampled.query = Math.min(sampled.query < 0 ? Infinity : sampled.query, found.queries.length - 1);
  sampled.layer = Math.min(sampled.layer, found.layers.length - 1);
  sampled.group = Math.min(sampled.group, found.groups - 1);
  const text = el("pre", { class: "sample context", "aria-label": "text before the query" });
  const tell = () => (text.textContent = `… ${found.queries[sampled.query].text}`);
  const pick = (name, label, options) =>
    el(
      "label",
      {},
      label,
      select(`selection-${name}`, options, sampled[name], (value) => {
        sampled[name] = Number(value);
        tell();
        redraw((entry) => entry.id === "chart-selection");
      }),
    );
  tell();
  return [
    ...content,
    el(
      "div",
      { class: "tools" },
      pick(
        "query",
        "Query",
        found.queries.map((one, index) => [index, `token ${grouped(one.position - found.start)} of its document`]),
      ),
      pick(
        "layer",
        "Layer",
        found.layers.map((layer, index) => [index, layer]),
      ),
      pick(
        "group",
        "Group",
        Array.from({ length: found.groups }, (_, group) => [group, group]),
      ),
    ),
    chart("chart-selection", {
      title: "Blocks it reads, by training step",
      make: selectionChart,
      linked: false,
      follows: "run",
      about: "The same query of the same held-out row at each validation. The text ends with it.",
    }),
    text,
  ];
}
function keysRead() {
  const health = chosen().health;
  if (!health) return "This run logged no health: config.guards.health is off, or the model has no NSA layers.";
  const layers = (health.z.key_mismatches ?? []).filter((row) => row.some((value) => value !== null));
  const wrong = layers.flat().reduce((a, b) => a + (b ?? 0), 0);
  const checks = `${grouped(health.n)} ${health.n === 1 ? "check" : "checks"} of ${grouped(layers.length)} layers`;
  return wrong
    ? `In ${checks}, block lists held other keys than the formula predicts.`
    : `In ${checks}, every query read exactly the keys that the formula predicts.`;
}

// Alarms and other events.
function timeline() {
  const run = chosen(),
    names = [...new Set(run.events.map((event) => event.name))];
  const looks = { alarm: ["--warn", "diamond", 11], stop: ["--bad", "x", 12], note: ["--muted", "circle", 8] };
  const traces = Object.entries(looks)
    .map(([kind, [tone, symbol, size]]) => {
      const events = run.events.filter((event) => event.kind === kind);
      return events.length
        ? {
            type: "scatter",
            mode: "markers",
            x: events.map((event) => along(run, event.step)),
            y: events.map((event) => plain(event.name)),
            text: events.map((event) => plain(wrap(event.message)).replaceAll("\n", "<br>")),
            customdata: events.map((event) => grouped(event.step)),
            marker: { color: token(tone), symbol, size, line: { color: token("--panel"), width: 1 } },
            hovertemplate: "step %{customdata}: %{text}<extra></extra>",
          }
        : null;
    })
    .filter(Boolean);
  const end = along(run, run.outcome.step);
  const range = state.range ?? [0 - (end || 1) * 0.03, (end || 1) * 1.03];
  return {
    traces,
    label: `Time line of ${run.events.length} events`,
    options: {
      height: 96 + 30 * names.length,
      hovermode: "closest",
      xaxis: { range: [...range] },
      yaxis: {
        type: "category",
        categoryorder: "array",
        categoryarray: names.map(plain).reverse(),
        range: [-0.6, names.length - 0.4],
      },
    },
  };
}
function wrap(text, width = coarse() ? 40 : 70) {
  let line = 0;
  return text
    .slice(0, 600)
    .split(" ")
    .map((word) => {
      const pieces = word.match(new RegExp(`.{1,${width}}`, "gsu")) ?? [""];
      return pieces
        .map((piece) => {
          line += piece.length + 1;
          const turn = line > width;
          if (turn) line = piece.length;
          return (turn ? "\n" : "") + piece;
        })
        .join("");
    })
    .join(" ");
}
function events() {
  const run = chosen(),
    content = [heading("events", "Alarms and events", true)];
  if (!run.events.length)
    return [
      ...content,
      el("p", { class: "panel empty" }, "No alarm was raised, and no checkpoint or resume is recorded."),
    ];
  const listed = run.events.filter((event) => event.kind !== "note");
  const rows = listed.map((event) =>
    el(
      "tr",
      {},
      el("td", { class: "number" }, grouped(event.step)),
      el("td", { class: "mono" }, event.name),
      el("td", { class: "wide" }, event.message),
    ),
  );
  content.push(
    chart("chart-events", {
      title: "Time line",
      make: timeline,
      follows: "run",
      about: "Alarms, stops, checkpoints that are kept, resumes.",
    }),
  );
  content.push(
    listed.length
      ? el(
          "div",
          { class: "panel" },
          scroll("Alarms", table([["Step", "number"], ["Alarm"], ["What it said"]], rows, "Alarms"), true),
        )
      : el("p", { class: "panel empty" }, "No alarm was raised."),
  );
  return content;
}

// Samples.
function samples() {
  const run = chosen(),
    list = run.samples,
    content = [heading("samples", "Samples", true)];
  if (!list.length)
    return [
      ...content,
      el(
        "p",
        { class: "panel empty" },
        "This run wrote no samples.jsonl: config.train.sample_tokens is 0, there was no validation yet, or an older version trained it.",
      ),
    ];
  const text = el("pre", { class: "sample", id: "sample-text", tabindex: "0", "aria-live": "polite" });
  const slider = el("input", {
    type: "range",
    min: 0,
    max: list.length - 1,
    step: 1,
    id: "sample-slider",
    "aria-label": "sample by step",
    on: { input: () => show(Number(slider.value)) },
  });
  const at = select(
    "sample-step",
    list.map((one, index) => [index, `step ${grouped(one.step)}${one.name === "sample" ? "" : `, ${one.name}`}`]),
    0,
    (value) => show(Number(value)),
  );
  const step = (by, label, sign) =>
    el("button", { type: "button", "aria-label": label, on: { click: () => show(Number(slider.value) + by) } }, sign);
  const before = step(-1, "earlier sample", "←"),
    after = step(1, "later sample", "→");
  function show(index) {
    slider.value = at.value = index;
    slider.setAttribute("aria-valuetext", `step ${list[index].step}`);
    before.disabled = index === 0;
    after.disabled = index === list.length - 1;
    text.textContent = list[index].text || "(empty)";
  }
  show(list.length - 1);
  return [
    ...content,
    el(
      "div",
      { class: "panel" },
      el("div", { class: "tools", style: { "margin-bottom": 0 } }, before, slider, after, at),
      text,
    ),
  ];
}

// Needles, from the evaluation.
function needles() {
  const found = Object.entries(chosen().evaluation.needles ?? {});
  if (!found.length) return [];
  return el(
    "div",
    { class: "grid" },
    found.map(([task, cells]) =>
      chart(`needles-${task}`, {
        title: task === "needle" ? "Needle: one fact in the context" : "Needles: several facts in the context",
        unit: `share of exact answers${evaluatedStep(chosen())}`,
        linked: false,
        follows: "run",
        make: () => {
          const one = chosen().evaluation.needles?.[task] ?? [],
            lengths = [...new Set(one.map((c) => c.length))].sort((a, b) => a - b),
            depths = [...new Set(one.map((c) => c.depth))].sort((a, b) => a - b);
          const z = depths.map((depth) =>
            lengths.map((length) => one.find((c) => c.depth === depth && c.length === length)?.exact_match ?? null),
          );
          return {
            traces: one.length
              ? [
                  {
                    type: "heatmap",
                    x: lengths.map((n) => grouped(n)),
                    y: depths.map((d) => `${Math.round(d * 100)} %`),
                    z,
                    zmin: 0,
                    zmax: 1,
                    xgap: 2,
                    ygap: 2,
                    colorscale: "Cividis",
                    texttemplate: "%{z:.0%}",
                    hovertemplate: "%{x}, depth %{y}<br>%{z:.0%} exact<extra></extra>",
                    colorbar: {
                      thickness: 10,
                      outlinewidth: 0,
                      tickformat: ".0%",
                      tickfont: { size: 11, color: token("--muted") },
                    },
                  },
                ]
              : [],
            options: {
              height: 240,
              hovermode: "closest",
              xtitle: "tokens in the context",
              xaxis: { type: "category", showgrid: false },
              yaxis: { type: "category", title: { text: "depth of the fact", standoff: 6 }, showgrid: false },
            },
          };
        },
      }),
    ),
  );
}

// Configuration and environment.
function configuration() {
  const run = chosen(),
    names = Object.keys(run.config),
    changed = new Map(Object.entries(run.changed)),
    content = [heading("config", "Configuration", true)];
  if (!names.length)
    return [
      ...content,
      el("p", { class: "panel empty" }, "env.json has no configuration: the run ended before its first step."),
    ];
  const body = el("div");
  const all = el("input", { type: "checkbox", on: { change: fill } });
  const search = el("input", {
    type: "search",
    placeholder: "filter fields",
    "aria-label": "filter fields",
    on: { input: fill },
  });
  function fill() {
    const wanted = search.value.trim().toLowerCase();
    const rows = names
      .filter(
        (name) =>
          (all.checked || wanted || changed.has(name)) &&
          `${name} ${shown(run.config[name])}`.toLowerCase().includes(wanted),
      )
      .map((name) =>
        el(
          "tr",
          { class: changed.has(name) ? "changed" : null },
          el("th", { scope: "row", class: "mono" }, broken(name)),
          el("td", { class: "mono value" }, shown(run.config[name])),
          el("td", { class: "mono muted" }, changed.has(name) ? shown(changed.get(name)) : "the same"),
        ),
      );
    body.replaceChildren(
      rows.length
        ? table([["Field"], ["Value"], ["Default"]], rows, "Configuration")
        : el("p", { class: "empty" }, "No field."),
    );
  }
  fill();
  return [
    ...content,
    el(
      "div",
      { class: "panel" },
      el(
        "div",
        { class: "tools" },
        el("span", { class: "muted small" }, `${changed.size} of ${names.length} fields are not the default`),
        search,
        el("label", {}, all, "Show all"),
      ),
      scroll("Configuration", body, true),
    ),
  ];
}
function environment() {
  const run = chosen(),
    env = run.environment,
    content = [heading("environment", "Environment", true)];
  if (!Object.keys(env).length)
    return [...content, el("p", { class: "panel empty" }, "No env.json: the run ended before its first step.")];
  const flat = (value, prefix) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? Object.entries(value).flatMap(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key))
      : [[prefix, value]];
  const rows = flat(env, "")
    .filter(([name]) => name !== "command")
    .map(([name, value]) =>
      el(
        "tr",
        {},
        el("th", { scope: "row", class: "mono" }, broken(name)),
        el(
          "td",
          { class: "mono" },
          typeof value === "number" && Math.abs(value) >= 1000 ? grouped(value) : shown(value),
        ),
      ),
    );
  const findings = [...(run.preflight.warnings ?? []), ...(run.preflight.ignored ?? [])];
  return [
    ...content,
    el(
      "div",
      { class: "panel" },
      el(
        "div",
        { style: { "margin-bottom": "16px" } },
        el("h3", {}, "Preflight"),
        findings.length
          ? el(
              "ul",
              { class: "plain small" },
              findings.map((line) => el("li", {}, line)),
            )
          : el("p", { class: "muted small" }, run.preflight.seconds ? "Nothing to warn of." : "Not recorded."),
      ),
      el("h3", {}, "Recorded at the first step"),
      scroll("Environment", table([["Field"], ["Value"]], rows, "Environment"), true),
    ),
  ];
}
