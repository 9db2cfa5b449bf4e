// The curves over time, and loss by position.
const UNITS = {
  loss: ["nats per token", "loss"],
  perplexity: ["per token", "perplexity"],
  bits_per_byte: ["of text", "bits per byte"],
};
const item = (text, { dash = "solid", tone = token("--muted"), dot = false } = {}) => {
  const line = { solid: "none", dot: "1.5 4", dash: "6 4", dashdot: "6 3 1.5 3" }[dash];
  const mark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [k, v] of Object.entries({ width: 26, height: 10, viewBox: "0 0 26 10", "aria-hidden": "true" }))
    mark.setAttribute(k, v);
  const stroke = document.createElementNS(mark.namespaceURI, "line");
  for (const [k, v] of Object.entries({
    x1: 1,
    x2: 25,
    y1: 5,
    y2: 5,
    stroke: tone,
    "stroke-width": 2,
    "stroke-dasharray": line,
  }))
    stroke.setAttribute(k, v);
  mark.append(stroke);
  if (dot) {
    const circle = document.createElementNS(mark.namespaceURI, "circle");
    for (const [k, v] of Object.entries({ cx: 13, cy: 5, r: 3.5, fill: tone })) circle.setAttribute(k, v);
    mark.append(circle);
  }
  return el("span", {}, mark, text);
};
const faded = (hex) => `${hex}66`;
function curves(parts, options = {}) {
  const traces = lineTraces(parts);
  const there = parts.filter((part) => DATA.runs.some((run, index) => state.shown[index] && run.series[part.name]));
  const legend =
    parts.length < 2
      ? []
      : there.map((part) => {
          const order = parts.indexOf(part);
          return item(
            part.label,
            many
              ? { dash: part.points ? "solid" : DASHES[order % 4], dot: part.points }
              : { tone: colour(order), dot: part.points },
          );
        });
  return { traces, legend, options };
}
function alarmShapes() {
  const steps = [...new Set(alarms(chosen()).map((event) => event.step))].slice(0, 40);
  return steps
    .map((step) => ({
      type: "line",
      x0: along(chosen(), step),
      x1: along(chosen(), step),
      yref: "paper",
      y0: 0,
      y1: 1,
      line: { color: token("--warn"), width: 1, dash: "dot" },
    }))
    .filter((shape) => shape.x0 !== null);
}
function lossChart() {
  const parts = [
    { name: `train/${state.unit}`, label: "training" },
    { name: `val/${state.unit}`, label: "validation", points: true },
  ];
  const sources = Object.keys(chosen().series).filter((name) => name.startsWith(`val/${state.unit}/`));
  for (const name of sources.sort()) parts.push({ name, label: `validation, ${name.split("/").pop()}`, points: true });
  const shapes = alarmShapes(),
    nats = chosen().preflight.bigram_entropy;
  const floor =
    typeof nats !== "number" || state.unit === "bits_per_byte" ? null : state.unit === "loss" ? nats : Math.exp(nats);
  const marks = shapes.length
    ? [item(many ? `alarm of ${chosen().label}` : "alarm", { dash: "dot", tone: token("--warn") })]
    : [];
  if (floor !== null) {
    shapes.push({
      type: "line",
      xref: "paper",
      x0: 0,
      x1: 1,
      y0: floor,
      y1: floor,
      line: { color: token("--muted"), width: 1, dash: "dash" },
    });
    marks.push(item("bigram entropy", { dash: "dash" }));
  }
  const made = curves(parts, {
    height: 400,
    shapes,
    yaxis: { type: state.log ? "log" : "linear", title: { text: UNITS[state.unit][1], standoff: 6 } },
  });
  const value = last(chosen(), `val/${state.unit}`) ?? last(chosen(), `train/${state.unit}`);
  return {
    ...made,
    legend: [...made.legend, ...marks],
    label: `Training and validation ${UNITS[state.unit][1]} over ${axisTitle()}; last of ${chosen().label}: ${digits(value)}`,
  };
}
// The step of the checkpoint that nsa_jax.evaluate read: the run may have gone on since.
function evaluatedStep(run) {
  const { step } = run.evaluation;
  return typeof step === "number" ? `, step ${grouped(step)}` : "";
}
function positionChart() {
  const exp = state.unit === "perplexity",
    traces = [],
    shapes = [];
  const add = (run, index, bins, name, { dash = "solid", opacity = 1 } = {}) =>
    traces.push({
      type: "scatter",
      mode: opacity < 1 ? "lines" : "lines+markers",
      name: plain(many ? `${run.label}, ${name}` : name),
      opacity,
      x: bins.map((b) => Math.sqrt((b.from + 1) * b.to)),
      y: bins.map((b) => (exp ? Math.exp(b.loss) : b.loss)),
      text: bins.map(
        (b) =>
          (b.to - b.from > 1 ? `positions ${grouped(b.from + 1)} to ${grouped(b.to)}` : `position ${b.to}`) +
          `, ${grouped(b.tokens)} tokens`,
      ),
      line: { color: colour(index), width: opacity < 1 ? 1.2 : 2, dash },
      marker: { size: 6, color: colour(index) },
      hovertemplate: "%{y:.4~g}<br>%{text}",
    });
  const evaluated = DATA.runs.some((run, index) => state.shown[index] && run.evaluation.position?.length);
  let earlier = 0;
  DATA.runs.forEach((run, index) => {
    if (!state.shown[index]) return;
    if (run.evaluation.position?.length) add(run, index, run.evaluation.position, `evaluation${evaluatedStep(run)}`, { dash: "dash" });
    const found = run.validation.positions;
    found.forEach(({ step, bins }, order) => {
      const last = order === found.length - 1;
      if (many && !last) return; // of several runs the last validation alone, so that curves can be told apart
      earlier += !last;
      add(run, index, bins, `step ${grouped(step)}`, { opacity: last ? 1 : 0.2 + (0.4 * order) / found.length });
    });
  });
  const marks = [];
  if (!many && earlier) marks.push(item("earlier", { tone: faded(colour(0)) }), item("last validation", { tone: colour(0) }));
  if (evaluated) marks.push(item(`nsa_jax.evaluate${many ? "" : evaluatedStep(chosen())}`, { dash: "dash", tone: many ? token("--muted") : colour(0) }));
  const window = chosen().config["model.nsa.window"];
  if (typeof window === "number" && traces.length)
    shapes.push({
      type: "line",
      x0: window,
      x1: window,
      yref: "paper",
      y0: 0,
      y1: 1,
      line: { color: token("--muted"), width: 1, dash: "dot" },
    });
  return {
    traces,
    legend: [...marks, ...(shapes.length ? [item(`window, ${grouped(window)} tokens`, { dash: "dot" })] : [])],
    options: {
      height: 330,
      hovermode: "closest",
      shapes,
      xtitle: "position in the context",
      xaxis: { type: "log", dtick: Math.log10(4), tickformat: ",d" },
      yaxis: { type: state.log ? "log" : "linear", title: { text: exp ? "perplexity" : "loss", standoff: 6 } },
    },
  };
}
function buttons(label, options, current, pick) {
  const box = el("span", { class: "choice", role: "group", "aria-label": label });
  for (const [value, text, off] of options) {
    box.append(
      el(
        "button",
        {
          type: "button",
          "aria-pressed": value === current,
          "data-value": value,
          disabled: off,
          on: {
            click: (event) => {
              for (const other of box.children) other.setAttribute("aria-pressed", other === event.currentTarget);
              pick(value);
            },
          },
        },
        text,
      ),
    );
  }
  return box;
}
function loss() {
  const axis = (value) => {
    state.axis = value;
    setRange(null);
  };
  const noTokens = !DATA.runs.some((run) => run.tokens_per_step),
    noTime = !DATA.runs.some((run) => run.clock.x.length > 1);
  const log = el("input", {
    type: "checkbox",
    on: {
      change: () => {
        state.log = log.checked;
        redraw((c) => c.follows === "unit");
      },
    },
  });
  const longest = Math.max(0, ...DATA.runs.map((run) => run.series["train/loss"]?.n ?? 0));
  state.smooth = longest > 150 ? "some" : "none";
  const tools = el(
    "div",
    { class: "tools" },
    buttons(
      "Unit of the loss",
      [
        ["loss", "Loss"],
        ["perplexity", "Perplexity"],
        ["bits_per_byte", "Bits per byte"],
      ],
      state.unit,
      (value) => {
        state.unit = value;
        redraw((c) => c.follows === "unit");
      },
    ),
    buttons(
      "Horizontal axis",
      [
        ["step", "Steps"],
        ["tokens", "Tokens", noTokens],
        ["time", "Time", noTime],
      ],
      state.axis,
      axis,
    ),
    el(
      "label",
      {},
      "Smoothing",
      select(
        "smooth",
        [
          ["none", "none"],
          ["some", "some"],
          ["much", "much"],
        ],
        state.smooth,
        (value) => {
          state.smooth = value;
          redraw((c) => c.follows !== "run");
        },
      ),
    ),
    el("label", {}, log, "Logarithmic"),
  );
  const position = chart("chart-position", {
    title: "Loss by position in the context",
    unit: () => (state.unit === "perplexity" ? "perplexity" : "nats per token"),
    make: positionChart,
    linked: false,
    follows: "unit",
    about:
      "Position in the document. Where the curve still falls beyond the window, the model uses what lies outside it.",
    missing: "No validation has been recorded. config.train.eval_batches asks for it; nsa_jax.evaluate measures it later.",
  });
  return [
    heading("loss", "Loss"),
    tools,
    el(
      "div",
      { class: "grid lead" },
      chart("chart-loss", {
        title: "Training and validation",
        unit: () => UNITS[state.unit].slice().reverse().join(", "),
        make: lossChart,
        follows: "unit",
        missing: "No loss has been logged yet.",
      }),
      position,
    ),
  ];
}
function select(id, options, current, pick) {
  const made = el(
    "select",
    { id, on: { change: () => pick(made.value) } },
    options.map(([value, text]) => el("option", { value }, text)),
  );
  made.value = current;
  return made;
}
function optimisation() {
  const log = { type: "log" };
  const one = (id, title, name, unit, about, yaxis) =>
    chart(id, { title, unit, about, make: () => curves([{ name, label: title }], { height: 230, yaxis }) });
  return [
    heading("optimisation", "Optimisation"),
    el(
      "div",
      { class: "grid four" },
      one("chart-lr", "Learning rate", "learning_rate", "", null, { exponentformat: "power", rangemode: "tozero" }),
      one("chart-grad", "Gradient norm", "norm/grad", "unclipped, log", null, log),
      one("chart-param", "Parameter norm", "norm/param", ""),
      one("chart-update", "Update norm", "norm/update", "log", null, log),
    ),
  ];
}
function speed() {
  const zero = { rangemode: "tozero" };
  const grid = [
    chart("chart-speed", {
      title: "Throughput",
      unit: "tokens per second",
      make: () =>
        curves([{ name: "perf/tokens_per_second", label: "tokens/s", format: ",.4~s" }], {
          height: 230,
          yaxis: { ...zero, tickformat: "~s" },
        }),
    }),
    chart("chart-wait", {
      title: "Waiting for data",
      unit: "ms, log",
      make: () =>
        curves(
          [
            { name: "perf/data_wait_p50_seconds", label: "median", scale: 1e3, suffix: " ms" },
            { name: "perf/data_wait_p95_seconds", label: "95th percentile", scale: 1e3, suffix: " ms" },
          ],
          { height: 230, yaxis: { type: "log" } },
        ),
    }),
    chart("chart-share", {
      title: "Time spent waiting",
      unit: "%",
      make: () =>
        curves([{ name: "perf/data_wait_share", label: "share", scale: 100, suffix: " %" }], {
          height: 230,
          yaxis: zero,
        }),
    }),
    chart("chart-goodput", {
      title: "Goodput",
      unit: "% of the wall time that trained",
      make: () =>
        curves(
          [
            { name: "perf/goodput", label: "this start", scale: 100, suffix: " %" },
            { name: "perf/goodput_run", label: "all starts", scale: 100, suffix: " %" },
          ],
          { height: 230, yaxis: { ...zero, range: [0, 100], autorange: false } },
        ),
    }),
    chart("chart-memory", {
      title: "Memory",
      unit: "GiB",
      make: () =>
        curves(
          [
            { name: "memory/device_peak_gib", label: "device, peak" },
            { name: "memory/device_in_use_gib", label: "device, in use" },
            { name: "memory/host_peak_rss_gib", label: "process, peak" },
          ],
          { height: 230, yaxis: zero },
        ),
    }),
  ];
  if (DATA.runs.some((run) => run.series["perf/mfu"]))
    grid.splice(
      1,
      0,
      chart("chart-mfu", {
        title: "Model FLOP/s utilisation",
        unit: "% of the device's peak",
        make: () =>
          curves([{ name: "perf/mfu", label: "MFU", scale: 100, suffix: " %" }], { height: 230, yaxis: zero }),
      }),
    );
  return [
    heading("speed", "Speed and memory"),
    el("div", { class: `grid ${grid.length === 4 ? "four" : "flow"}` }, grid),
    goodput(),
  ];
}
function goodput() {
  if (!DATA.runs.some((run) => run.goodput)) return null;
  const causes = Object.keys(Object.assign({}, ...DATA.runs.map((run) => run.goodput)));
  const cell = (spent, cause) =>
    spent?.[cause] === undefined
      ? "–"
      : `${duration(spent[cause])} (${((100 * spent[cause]) / spent.wall).toFixed(1)} %)`;
  const rows = causes.map((cause) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, cause === "wall" ? "all" : cause),
      DATA.runs.map((run) => el("td", { class: "number" }, cell(run.goodput, cause))),
    ),
  );
  const head = [["Where the time went"], ...DATA.runs.map((run) => [run.label, "number"])];
  return el(
    "div",
    { class: "panel", style: { "margin-top": "16px" } },
    scroll("Goodput", table(head, rows, "Where the time of all starts went")),
  );
}
