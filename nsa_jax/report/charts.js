// Style and drawing of charts. A chart is drawn when it comes near the screen, and again when the theme, the runs shown
// or the horizontal axis change.

const DATA = JSON.parse(document.getElementById("data").textContent);
// Makes an element. Texts become text nodes, so that they are never parsed as HTML.
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (name === "style")
      for (const [property, setting] of Object.entries(value)) made.style.setProperty(property, setting);
    else made.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const COLOURS = {
  // Okabe and Ito's hues, made to stand out on each background
  light: ["#0b67b2", "#c24e00", "#00795a", "#9c3f87", "#7d6100", "#0e7c93", "#5b5f66", "#b3261e"],
  dark: ["#62b5f5", "#ff9f63", "#46cf9f", "#e794d3", "#e3c251", "#62d2e6", "#b9c1c9", "#ff9a90"],
};
const DASHES = ["solid", "dot", "dash", "dashdot"];
// Colours of branch shares. The middle of the scale is a third, which means balance.
const AROUND = {
  light: [
    [0, "#0b4f8a"],
    [0.25, "#6ba3d0"],
    [0.5, "#f1f2f3"],
    [0.75, "#e5965a"],
    [1, "#8f3a00"],
  ],
  dark: [
    [0, "#7cc3ff"],
    [0.25, "#35698f"],
    [0.5, "#252c34"],
    [0.75, "#9a5a2a"],
    [1, "#ffb27d"],
  ],
};

const charts = [];
const state = { run: 0, shown: [], axis: "step", unit: "loss", log: false, smooth: "none", range: null };
let plotlyReady = false;
const theme = () => document.documentElement.dataset.theme;
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => COLOURS[theme()][index % COLOURS.light.length];
// Plotly interprets some HTML tags in texts. Text from a run is escaped, so that it is shown literally.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const phone = () => matchMedia("(max-width: 600px)").matches;
const coarse = () => matchMedia("(pointer: coarse)").matches;

// The horizontal axis: steps, tokens, or time since the first log line (interpolated between log lines).
function timeUnit() {
  const longest = Math.max(...DATA.runs.map((run) => run.clock.s.at(-1) ?? 0));
  return longest > 2 * 3600 ? ["h", 3600] : longest > 300 ? ["min", 60] : ["s", 1];
}
function secondsAt(run, step) {
  const { x, s } = run.clock;
  if (!x.length) return null;
  if (step <= x[0]) return s[0];
  if (step >= x.at(-1)) return s.at(-1);
  let low = 0,
    high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= step) low = middle;
    else high = middle;
  }
  return s[low] + ((s[high] - s[low]) * (step - x[low])) / (x[high] - x[low]);
}
// What was trained on, as logged: batches may grow. Runs of earlier versions logged no tokens.
function tokensAt(run, step) {
  const { x = [], y = [] } = run.series["train/tokens"] ?? {};
  if (!x.length) return run.tokens_per_step ? step * run.tokens_per_step : null;
  const high = x.findIndex((at) => at >= step);
  if (high < 0) return y.at(-1);
  const [from, begin] = high ? [x[high - 1], y[high - 1]] : [0, 0];
  return x[high] === from ? y[high] : begin + ((y[high] - begin) * (step - from)) / (x[high] - from);
}
function along(run, step) {
  if (state.axis === "tokens") return tokensAt(run, step);
  if (state.axis === "time") {
    const s = secondsAt(run, step);
    return s === null ? null : s / timeUnit()[1];
  }
  return step;
}
const axisTitle = () =>
  ({ step: "step", tokens: "tokens seen", time: `time since the first log line (${timeUnit()[0]})` })[state.axis];

function smoothed(values, factor) {
  if (!factor) return values;
  const keep = Math.exp(-factor / Math.max(values.length, 1));
  let sum = 0,
    weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}
const SMOOTH = { none: 0, some: 60, much: 15 };

// Lines. A part is {name, label, scale, points, raw}: one metric; colours tell runs apart, or metrics if there is one run.
function lineTraces(parts) {
  const single = DATA.runs.length === 1,
    traces = [];
  DATA.runs.forEach((run, index) => {
    if (!state.shown[index]) return;
    parts.forEach((part, order) => {
      const series = run.series[part.name];
      if (!series || !series.y.some((value) => value !== null)) return;
      const x = series.x.map((step) => along(run, step));
      const scaled = (values) => values.map((value) => (value === null ? null : value * (part.scale ?? 1)));
      const y = scaled(series.y);
      const tone = single ? colour(order) : colour(index);
      const factor = part.points ? 0 : SMOOTH[state.smooth];
      const shared = { type: "scatter", x, connectgaps: false };
      if (factor) {
        traces.push({ ...shared, y, mode: "lines", line: { color: tone, width: 1 }, opacity: 0.3, hoverinfo: "skip" });
      }
      const few = y.length < 3;
      traces.push({
        ...shared,
        y: factor ? smoothed(series.mean ? scaled(series.mean) : y, factor) : y, // kept points are extremes
        customdata: y, // what was logged, also where the line is smoothed
        mode: part.points || few ? "lines+markers" : "lines",
        line: { color: tone, width: part.points ? 2 : 1.7, dash: single || part.points ? "solid" : DASHES[order % 4] },
        marker: { color: tone, size: 7, symbol: part.points ? "circle" : "square" },
        name: plain(single ? part.label : parts.length > 1 ? `${run.label}, ${part.label}` : run.label),
        hovertemplate: `%{customdata:${part.format ?? ".4~g"}}${part.suffix ?? ""}`,
      });
    });
  });
  return traces;
}

function layoutOf(options) {
  const ink = token("--ink"),
    muted = token("--muted"),
    line = token("--line"),
    panel = token("--panel");
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: muted };
  const axis = {
    gridcolor: line,
    zeroline: false,
    linecolor: line,
    tickcolor: line,
    ticks: "outside",
    ticklen: 4,
    automargin: true,
  };
  return {
    height: phone() ? Math.min(options.height ?? 260, 270) : (options.height ?? 260),
    autosize: true,
    paper_bgcolor: panel,
    plot_bgcolor: panel,
    font,
    margin: { l: 48, r: 14, t: coarse() ? 12 : 36, b: 46 }, // the buttons of the chart lie above the data
    showlegend: false,
    hovermode: options.hovermode ?? "x unified",
    hoverlabel: { bgcolor: panel, bordercolor: line, font: { ...font, color: ink }, namelength: 40 },
    dragmode: coarse() ? false : "zoom",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
    xaxis: {
      ...axis,
      automargin: false,
      title: { text: options.xtitle ?? axisTitle(), standoff: 8 },
      separatethousands: true,
      unifiedhovertitle: {
        text: { step: "step %{x:,}", tokens: "%{x:,} tokens", time: `%{x:.4~g} ${timeUnit()[0]}` }[state.axis],
      },
      ...options.xaxis,
    },
    yaxis: { ...axis, ...options.yaxis },
    shapes: options.shapes ?? [],
    annotations: options.annotations ?? [],
  };
}

// On touch screens, dragging scrolls the page and tapping shows values. The buttons of the bar zoom.
const CONFIG = () => ({
  responsive: true,
  displaylogo: false,
  displayModeBar: coarse() ? false : "hover",
  doubleClick: coarse() ? false : "reset+autosize", // a tap counts as two clicks
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  toImageButtonOptions: { format: "png", scale: 2 },
});
// Labels of a logarithmic axis at 1, 2 and 5, or at powers of ten where there are many.
function logTicks(traces) {
  let low = Infinity,
    high = 0;
  for (const { y } of traces)
    for (const value of y)
      if (value !== null && value > 0) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
  if (!high) return {};
  const first = Math.floor(Math.log10(low)) - 1,
    end = Math.ceil(Math.log10(high)) + 1,
    ticks = [];
  const decades = Math.log10(high / low),
    inner = decades > 4 ? [1] : decades > 0.6 ? [1, 2, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
  const every = Math.max(1, Math.ceil((end - first) / 8));
  for (let power = first; power <= end; power += every)
    for (const factor of every > 1 ? [1] : inner) ticks.push(Number((factor * 10 ** power).toPrecision(3)));
  const text = (value) =>
    value >= 1e5 || value < 1e-4 ? value.toExponential(0) : value.toLocaleString("en-US", { maximumFractionDigits: 6 });
  return { tickvals: ticks, ticktext: ticks.map(text) };
}

// A chart: a figure with a heading, and `make` that gives {traces, layout options} or null if there is nothing to draw.
function chart(id, { title, unit, about, make, linked = true, follows = "all", missing = "not logged by this run" }) {
  const area = el("div", { class: "chart waiting", id, role: "img", "aria-label": title });
  const legend = el("div", { class: "legend" });
  const note = el("p", { class: "empty small" });
  const unitText = el("span", { class: "unit" });
  const figure = el(
    "figure",
    { class: "panel" },
    el("figcaption", {}, el("h3", {}, title, unitText), legend, about ? el("p", {}, about) : null),
    area,
    note,
  );
  const entry = {
    id,
    area,
    legend,
    note,
    unitText,
    unit,
    make,
    linked,
    follows,
    missing,
    near: false,
    drawn: false,
    height: 0,
  };
  charts.push(entry);
  return figure;
}

let linking = false;
function draw(entry) {
  if (!plotlyReady || !entry.near) return;
  const made = entry.make();
  const nothing = !made || !made.traces.length;
  const unit = typeof entry.unit === "function" ? entry.unit() : entry.unit;
  entry.unitText.textContent = unit ? ` · ${unit}` : "";
  entry.area.hidden = nothing;
  entry.area.classList.remove("waiting");
  entry.note.textContent = nothing ? (typeof entry.missing === "function" ? entry.missing() : entry.missing) : "";
  entry.legend.replaceChildren(...(nothing ? [] : (made.legend ?? [])));
  if (nothing) {
    if (entry.drawn) Plotly.purge(entry.area);
    entry.drawn = false;
    return;
  }
  const options = { ...made.options };
  if (options.yaxis?.type === "log") options.yaxis = { ...options.yaxis, ...logTicks(made.traces) };
  if (entry.linked && state.range) options.xaxis = { ...options.xaxis, range: [...state.range], autorange: false };
  const layout = layoutOf(options);
  entry.area.style.minHeight = `${layout.height}px`;
  Plotly.react(entry.area, made.traces, layout, CONFIG());
  if (made.label) entry.area.setAttribute("aria-label", made.label);
  if (!entry.drawn && entry.linked) entry.area.on("plotly_relayout", (change) => zoomed(entry, change));
  entry.drawn = true;
}
// Zooming one chart zooms all that share its axis.
function zoomed(entry, change) {
  if (linking) return;
  const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0],
    to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
  if (change["xaxis.autorange"]) setRange(null, entry);
  else if (from !== undefined && to !== undefined) setRange([from, to], entry);
}
function setRange(range, origin = null) {
  state.range = range;
  document.documentElement.toggleAttribute("data-zoomed", range !== null);
  linking = true;
  const update = range ? { "xaxis.range": [...range], "xaxis.autorange": false } : { "xaxis.autorange": true };
  const others = charts.filter((other) => other.linked && other.drawn && other !== origin);
  Promise.all(others.map((other) => (range ? Plotly.relayout(other.area, update) : draw(other)))).finally(() => {
    linking = false;
  });
}
// The buttons of the bar zoom around the middle of the visible range, within the range of the runs.
function zoomBy(factor, shift = 0) {
  const whole = Math.max(...DATA.runs.map((run) => along(run, run.outcome.step) ?? 0), 0) || 1;
  const [from, to] = state.range ?? [0, whole],
    width = Math.min((to - from) * factor, whole);
  const start = Math.min(Math.max((from + to) / 2 - width / 2 + shift * width, 0), whole - width);
  setRange(width >= whole ? null : [start, start + width]);
}
const redraw = (which = () => true) => charts.filter(which).forEach(draw);
const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      const entry = charts.find((one) => one.area === target);
      entry.near = true;
      draw(entry);
    }
  },
  { rootMargin: "600px 0px" },
);
addEventListener("beforeprint", () =>
  charts.forEach((entry) => {
    entry.near = true;
    draw(entry);
  }),
);

// The library is stored as gzip in base64, which is a third of its size.
async function loadPlotly() {
  const text = atob(document.getElementById("library").textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  plotlyReady = true;
}
