// Outcome and comparison of runs, and what all sections use. Sections of one run are made again when another is chosen.

const chosen = () => DATA.runs[state.run];
const many = DATA.runs.length > 1;
const grouped = (value) => value.toLocaleString("en-US");
function digits(value, significant = 4) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  const decimals = Math.max(significant - 1 - Math.floor(Math.log10(Math.abs(value) || 1)), 0);
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 6) });
}
function short(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (Math.abs(value) >= size) return `${digits(value / (size === 1e4 ? 1e3 : size), 3)}${letter}`;
  }
  return digits(value, 4);
}
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), // first, or 59.6 s of a minute would be 60
    h = Math.floor(whole / 3600),
    m = Math.floor(whole / 60) % 60,
    s = whole % 60;
  return h ? `${grouped(h)} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}
const shown = (value) =>
  value === null || value === undefined ? "–" : typeof value === "string" ? value || '""' : JSON.stringify(value);
const points = (run, name) => run.series[name]?.y.filter((value) => value !== null) ?? [];
const last = (run, name) => points(run, name).at(-1) ?? null;
const least = (run, name) => points(run, name).reduce((a, b) => (a === null || b < a ? b : a), null);
const most = (run, name) => points(run, name).reduce((a, b) => (a === null || b > a ? b : a), null);
// Of all points: those of the curve are extremes.
const middle = (run, name) => run.medians[name] ?? null;
const alarms = (run) => run.events.filter((event) => event.kind === "alarm");
const memory = (run) => most(run, "memory/device_peak_gib") ?? most(run, "memory/host_peak_rss_gib");
const swatch = (index) => el("span", { class: "swatch", "data-run": index, style: { "--swatch": colour(index) } });
const TONES = {
  finished: "good",
  stopped: "bad",
  requested: "info",
  running: "info",
  interrupted: "warn",
  empty: "warn",
};
const MARKS = { finished: "✓", stopped: "✕", requested: "■", running: "▶", interrupted: "!", empty: "!" };
const heading = (id, text, ofRun = false) =>
  el(
    "div",
    { class: "head" },
    el("h2", { id: `${id}-title` }, text),
    ofRun && many ? el("span", { class: "of muted" }, swatch(state.run), chosen().label) : null,
  );
// A dotted name that may break after its dots and underscores.
const broken = (name) => name.split(/(?<=[._])/).flatMap((piece, index) => (index ? [el("wbr"), piece] : [piece]));
function table(columns, rows, caption) {
  const head = el(
    "tr",
    {},
    columns.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)),
  );
  return el(
    "table",
    { "aria-label": caption, class: caption === "Runs side by side" ? "runs" : null },
    el("thead", {}, head),
    el("tbody", {}, rows),
  );
}
const scroll = (label, content, tall = false) =>
  el("div", { class: `scroll${tall ? " tall" : ""}`, tabindex: "0", role: "region", "aria-label": label }, content);

// A command with a button that copies it.
function command(text) {
  const button = el("button", { type: "button", class: "copy", "aria-label": `copy: ${text}`, on: { click: copy } }, "Copy");
  async function copy() {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch (error) {
      getSelection().selectAllChildren(button.parentElement.querySelector("code")); // from disk, some browsers refuse
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Selected";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
  return el("pre", { class: "command" }, el("code", {}, text), button);
}
function commands() {
  const run = chosen(),
    page = run.explore
      ? el(
          "p",
          { style: { "margin-bottom": "10px" } },
          el("a", { href: run.explore }, "Explore what this run reads"),
          ": click the tokens of a text and see the blocks of every layer.",
        )
      : null;
  const rows = run.commands.map(({ what, command: text }) => [el("dt", {}, what), el("dd", {}, command(text))]);
  return [
    heading("commands", "Commands", true),
    el("div", { class: "panel" }, page, el("dl", { class: "commands" }, rows.flat())),
  ];
}

// Outcome.
function outcome() {
  const run = chosen(),
    { state: how, title, message, step, steps } = run.outcome;
  const of = steps ? ` of ${grouped(steps)}` : "";
  const reached = how === "finished" ? message : `step ${grouped(step)}${of}`,
    [split, loss] = last(run, "val/loss") === null ? ["training", last(run, "train/loss")] : ["validation", last(run, "val/loss")],
    value = loss === null ? "" : ` · ${split} loss ${digits(loss)}`;
  const banner = el(
    "div",
    { class: `panel outcome tone-${TONES[how]}`, role: "status" },
    el("span", { class: "mark", "aria-hidden": "true" }, MARKS[how]),
    el(
      "div",
      {},
      el("p", {}, el("strong", {}, title), ` · ${reached}${value}`),
      how === "finished" ? null : el("p", {}, message),
    ),
  );
  const notes = run.notes.length
    ? el("p", { class: "small muted", style: { "margin-top": "10px" } }, `Left out: ${run.notes.join("; ")}.`)
    : null;
  return [heading("outcome", "Outcome", true), banner, farQuestions(run.far_task), notes];
}
function farQuestions(shares) {
  if (!shares) return null;
  const percent = (name) => `${(100 * shares[name]).toFixed(1)} %`,
    others = [
      ["without_selected", "without the selected branch"],
      ["window_only", "by windows alone"],
    ];
  const rest = others.filter(([name]) => name in shares).map(([name, what]) => `${percent(name)} ${what}`);
  return el(
    "p",
    { class: "small", style: { "margin-top": "10px" } },
    `Questions about far tokens: ${[`${percent("accuracy")} right`, ...rest, `chance is ${percent("chance")}`].join(", ")}.`,
  );
}
// Figures: on a phone they follow the loss.
function figures() {
  const run = chosen(),
    { step } = run.outcome;
  const env = run.environment,
    best = run.best;
  const tokens = tokensAt(run, step);
  const count = alarms(run).length,
    speed = middle(run, "perf/tokens_per_second"),
    mfu = middle(run, "perf/mfu");
  const device = env.devices ? `${env.devices.count} × ${env.devices.kind}` : null;
  const onDevice = most(run, "memory/device_peak_gib") !== null;
  const parameters = env.parameters?.total ?? null;
  const cards = [
    [
      "Validation loss",
      digits(last(run, "val/loss")),
      best ? `best ${digits(best["val/loss"])} at step ${grouped(best.step)}` : "nats per token",
    ],
    [
      "Bits per byte",
      digits(last(run, "val/bits_per_byte") ?? last(run, "train/bits_per_byte")),
      last(run, "val/bits_per_byte") === null ? "training" : "validation",
    ],
    ["Training loss", digits(last(run, "train/loss")), "last logged, nats per token"],
    ["Speed", short(speed), mfu === null ? "tokens/s, median" : `tokens/s, median; ${(mfu * 100).toFixed(1)} % MFU`],
    [
      "Peak memory",
      memory(run) === null ? "–" : `${digits(memory(run), 3)} GiB`,
      onDevice ? "fullest device" : "of the process",
    ],
    ["Parameters", short(parameters), parameters === null ? "" : grouped(parameters)],
    ["Tokens seen", short(tokens), `logged over ${duration(run.clock.s.at(-1))}`],
    [
      "Goodput",
      run.goodput ? `${((100 * (run.goodput.training ?? 0)) / run.goodput.wall).toFixed(1)} %` : "–",
      "of the wall time trained, all starts",
    ],
    [
      "Alarms",
      grouped(count),
      count ? [...new Set(alarms(run).map((event) => event.name))].join(", ") : "none was raised",
    ],
    ["Device", device ?? "–", env.versions?.jax ? `JAX ${env.versions.jax}, Python ${env.versions.python}` : ""],
  ];
  return el(
    "dl",
    { class: "cards" },
    cards.map(([name, value, note]) =>
      el("div", { class: "card" }, el("dt", {}, name), el("dd", {}, value), el("dd", {}, note)),
    ),
  );
}
function comparison() {
  const rows = DATA.runs.map((run, index) => {
    const box = el("input", {
      type: "checkbox",
      "aria-label": `draw ${run.label}`,
      on: {
        change: () => {
          state.shown[index] = box.checked;
          redraw((c) => c.follows !== "run");
        },
      },
    });
    box.checked = state.shown[index];
    const name = el(
      "button",
      { type: "button", "aria-pressed": index === state.run, "data-choose": index, on: { click: () => choose(index) } },
      run.label,
    );
    return el(
      "tr",
      { class: index === state.run ? "chosen" : null },
      el("td", {}, box),
      el("th", { scope: "row" }, el("span", { class: "name" }, swatch(index), name)),
      el("td", { class: `state tone-${TONES[run.outcome.state]}` }, run.outcome.title),
      el("td", { class: "number" }, grouped(run.outcome.step)),
      ...[last(run, "val/loss"), least(run, "val/loss"), last(run, "val/bits_per_byte"), last(run, "train/loss")].map(
        (value) => el("td", { class: "number" }, digits(value)),
      ),
      el("td", { class: "number" }, short(middle(run, "perf/tokens_per_second"))),
      el("td", { class: "number" }, digits(memory(run), 3)),
      el("td", { class: "number" }, short(run.environment.parameters?.total ?? null)),
      el("td", { class: "number" }, grouped(alarms(run).length)),
    );
  });
  const n = "number",
    columns = [
      ["Draw"],
      ["Run (choose one for details)"],
      ["Outcome"],
      ["Steps", n],
      ["Val. loss", n],
      ["Best", n],
      ["Bits/byte", n],
      ["Train loss", n],
      ["Tokens/s", n],
      ["Memory, GiB", n],
      ["Parameters", n],
      ["Alarms", n],
    ];
  return [
    heading("runs", "Runs side by side"),
    el("div", { class: "panel" }, scroll("Runs side by side", table(columns, rows, "Runs side by side"))),
    ...difference(),
  ];
}
function difference() {
  if (!DATA.differences.length)
    return [
      el(
        "p",
        { class: "muted", style: { "margin-top": "12px" } },
        "Configuration and environment of these runs are the same.",
      ),
    ];
  const rows = DATA.differences.map(({ name, values }) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "mono" }, broken(name)),
      values.map((value) =>
        el("td", { class: "mono" }, name === "git.commit" && value ? String(value).slice(0, 12) : shown(value)),
      ),
    ),
  );
  const head = [["Field"], ...DATA.runs.map((run) => [run.label])];
  return [
    el("div", { class: "group" }, el("h3", {}, "What differs")),
    el(
      "div",
      { class: "panel" },
      scroll("What differs between the runs", table(head, rows, "Fields that differ between the runs"), true),
    ),
  ];
}
