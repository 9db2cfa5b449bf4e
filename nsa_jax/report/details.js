// Sections of the run that is chosen: health by layer, alarms, samples, configuration, environment.

const BRANCHES = ["compressed", "selected", "window"];
const MAPS = [
  {
    title: "Gates",
    about:
      "How each layer weighs the three branches. A third each is balanced. A share near 1 means that the layer uses one branch only.",
    maps: [
      ...BRANCHES.map((name) => [`gate_share_${name}`, `Share of gates: ${name}`, "", "third"]),
      [
        "gate_entropy",
        "Gate entropy",
        () => `nats; 1.10 is balance, alarm below ${chosen().config["guards.min_gate_entropy"] ?? 0.5}`,
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
    about: "Which blocks the selected branch reads.",
    maps: [
      ["blocks_beyond", "Blocks chosen by score", "share of listed blocks, beyond the forced ones", "share"],
      ["block_distance", "Distance of the blocks", "tokens before the query, mean", "free"],
      ["block_overlap", "Blocks shared with the neighbour", "share that the query before also reads", "free"],
      ["blocks_distinct", "Distinct blocks", "per query", "free"],
      ["keys_counted", "Keys read", "per query, counted from the lists", "free"],
    ],
  },
];
function mapRange(kind, values) {
  const numbers = values.flat().filter((value) => value !== null);
  const low = numbers.reduce((a, b) => Math.min(a, b), Infinity),
    high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  if (kind === "entropy") return [Math.min(0.5, low), Math.log(3)];
  if (kind === "zero") return [0, Math.max(0.1, high)];
  if (kind === "share") return [0, 1];
  const span = Math.max(high - low, Math.abs(high) * 0.05, 1e-6); // noise must not look like a pattern
  return [(low + high - span) / 2, (low + high + span) / 2];
}
function heatMap(name, title, kind) {
  const run = chosen(),
    health = run.health,
    z = health?.z[name];
  if (!z || !z.flat().some((value) => value !== null)) return null;
  const third = kind === "third",
    siblings = BRANCHES.map((branch) => health.z[name.replace(/[^_]+$/, branch)]).filter(Boolean);
  let [low, high] = mapRange(kind, z);
  if (third) {
    const reach = Math.max(
      0.2,
      ...siblings
        .flat(2)
        .filter((value) => value !== null)
        .map((value) => Math.abs(value - 1 / 3)),
    );
    [low, high] = [1 / 3 - reach, 1 / 3 + reach];
  }
  const layers = Array.from({ length: health.layers }, (_, layer) => layer);
  const x = health.x.map((step) => along(run, step));
  return {
    traces: [
      {
        type: "heatmap",
        x,
        y: layers,
        z,
        zmin: low,
        zmax: high,
        xgap: 0,
        ygap: health.layers <= 16 ? 1 : 0,
        colorscale: third ? AROUND[theme()] : "Cividis",
        hoverongaps: false,
        hovertemplate: `layer %{y}<br>${state.axis} %{x:,.6~g}<br>%{z:.4~g}<extra></extra>`,
        colorbar: {
          thickness: 10,
          outlinewidth: 0,
          tickfont: { size: 11, color: token("--muted") },
          nticks: 5,
          // The colour scale is symmetric around a third; shares are not.
          ...(third && { tickvals: [0, 0.2, 0.4, 0.6, 0.8, 1].filter((share) => share >= low && share <= high) }),
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
  for (const { title, about, maps } of MAPS) {
    content.push(
      el("div", { class: "group" }, el("h3", {}, title), el("p", {}, about)),
      el(
        "div",
        { class: "grid maps" },
        maps.map(([name, head, unit, kind]) =>
          chart(`map-${name}`, { title: head, unit, make: () => heatMap(name, head, kind), follows: "run" }),
        ),
      ),
    );
  }
  return content;
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
        unit: "share of exact answers",
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
    changed = new Set(run.changed),
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
          el("td", { class: "muted" }, changed.has(name) ? "changed" : "default"),
        ),
      );
    body.replaceChildren(
      rows.length
        ? table([["Field"], ["Value"], ["Compared with the default"]], rows, "Configuration")
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
  const command = Array.isArray(env.command) ? env.command.join(" ") : null;
  return [
    ...content,
    el(
      "div",
      { class: "panel" },
      command
        ? el(
            "div",
            { style: { "margin-bottom": "16px" } },
            el("h3", {}, "Command"),
            el("pre", { class: "command" }, command),
          )
        : null,
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
