// The page as a whole: header, navigation, choice of run and theme.

const SECTIONS = [
  ["outcome", "Outcome", outcome, true],
  ["figures", null, figures, true],
  ["runs", "Runs", comparison, true, many],
  ["loss", "Loss", loss, false],
  ["needles", null, needles, true],
  ["optimisation", "Optimisation", optimisation, false],
  ["speed", "Speed", speed, false],
  ["health", "Health", health, false],
  ["selection", "Selection", selection, true],
  ["layers", "Layers", layers, false],
  ["events", "Alarms", events, true],
  ["samples", "Samples", samples, true],
  ["commands", "Commands", commands, true],
  ["config", "Config", configuration, true],
  ["environment", "Environment", environment, true],
].filter(([, , , , wanted]) => wanted !== false);

function fill(id, make) {
  const section = document.getElementById(id);
  for (let i = charts.length - 1; i >= 0; i--) {
    if (!section.contains(charts[i].area)) continue;
    if (charts[i].drawn) Plotly.purge(charts[i].area);
    charts.splice(i, 1);
  }
  const from = charts.length;
  let content;
  try {
    content = make();
  } catch (error) {
    // A run's records may be damaged in unforeseen ways. The other sections are still shown.
    content = el("p", { class: "panel empty" }, `This section cannot be drawn (${error.message}).`);
  }
  section.replaceChildren(...[content].flat().filter(Boolean));
  for (const entry of charts.slice(from)) watcher.observe(entry.area);
}
function choose(index) {
  const focused = document.activeElement?.dataset?.choose;
  state.run = index;
  const picker = document.getElementById("run");
  if (picker) picker.value = index;
  for (const [id, , make, ofRun] of SECTIONS) if (ofRun) fill(id, make);
  for (const id of ["health", "layers"]) {
    const title = document.getElementById(`${id}-title`);
    title.parentElement.replaceWith(heading(id, title.textContent, true));
  }
  const keys = document.getElementById("keys");
  if (keys) keys.textContent = keysRead();
  redraw((entry) => entry.follows !== "all");
  if (focused !== undefined) document.querySelector(`[data-choose="${index}"]`)?.focus();
}
function setTheme(name, keep) {
  document.documentElement.dataset.theme = name;
  if (keep)
    try {
      localStorage.setItem("nsa_jax-report-theme", name);
    } catch (error) {
      /* not allowed from disk */
    }
  const button = document.getElementById("theme");
  button.textContent = name === "dark" ? "Light theme" : "Dark theme";
  for (const mark of document.querySelectorAll(".swatch[data-run]"))
    mark.style.setProperty("--swatch", colour(Number(mark.dataset.run)));
  redraw();
}
function start() {
  const first = DATA.runs[0],
    count = DATA.runs.length;
  state.shown = DATA.runs.map(() => true);
  const button = el("button", {
    type: "button",
    id: "theme",
    on: { click: () => setTheme(theme() === "dark" ? "light" : "dark", true) },
  });
  const links = SECTIONS.filter(([, name]) => name).map(([id, name]) => el("a", { href: `#${id}` }, name));
  const picker = many
    ? el(
        "label",
        {},
        "Run",
        select(
          "run",
          DATA.runs.map((run, index) => [index, run.label]),
          0,
          (value) => choose(Number(value)),
        ),
      )
    : null;
  const press = (text, label, act, zoomedOnly = true) =>
    el(
      "button",
      { type: "button", "aria-label": label, title: label, class: zoomedOnly ? "zoomed" : null, on: { click: act } },
      text,
    );
  const zoom = el(
    "span",
    { class: "zoom", role: "group", "aria-label": "Zoom all charts over time" },
    el("span", { class: "muted small" }, "Zoom"),
    press("‹", "earlier", () => zoomBy(1, -0.5)),
    press("−", "zoom out", () => zoomBy(2)),
    press("+", "zoom in", () => zoomBy(0.5), false),
    press("›", "later", () => zoomBy(1, 0.5)),
    press("Reset", "reset zoom", () => setRange(null)),
  );
  const app = document.getElementById("app");
  app.replaceChildren(
    el(
      "header",
      { class: "top" },
      el(
        "div",
        { class: "page" },
        el(
          "div",
          {},
          el("p", { class: "kicker" }, "nsa_jax run report"),
          el("h1", {}, many ? `${count} runs` : first.label),
          el(
            "p",
            { class: "under small" },
            many ? DATA.runs.map((run) => run.label).join(", ") : first.path,
            ` · written ${DATA.generated}`,
          ),
        ),
        button,
      ),
    ),
    el(
      "div",
      { class: `bar${many ? " many" : ""}` },
      el("div", { class: "page" }, picker, zoom, el("nav", { "aria-label": "Sections" }, links)),
    ),
    el(
      "main",
      { id: "main", class: "page" },
      SECTIONS.map(([id, name]) => el("section", { id, "aria-labelledby": name ? `${id}-title` : null })),
    ),
    el(
      "footer",
      {},
      el(
        "div",
        { class: "page" },
        el(
          "p",
          {},
          `Curves show at most ${grouped(DATA.points)} points: of each stretch of steps its smallest and largest value, so that no spike is lost. Heat maps show at most ${DATA.columns} columns: of entropy, ` +
            "collapse and mismatches the worst value, of the others the mean. Drag to zoom and double-click to reset, or use the buttons at the top; all charts over time follow. Time counts from the first log line, pauses included.",
        ),
        el(
          "p",
          {},
          `nsa_jax${DATA.version ? ` ${DATA.version}` : ""}, ${DATA.library}. This file holds everything it shows.`,
        ),
      ),
    ),
  );
  for (const [id, , make] of SECTIONS) fill(id, make);
  setTheme(theme(), false);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    let kept = null;
    try {
      kept = localStorage.getItem("nsa_jax-report-theme");
    } catch (error) {
      /* not allowed from disk */
    }
    if (!kept) setTheme(event.matches ? "dark" : "light", false);
  });
}
start();
loadPlotly()
  .then(() => {
    redraw();
    document.documentElement.dataset.ready = "true";
  })
  .catch((error) => {
    document
      .getElementById("main")
      .prepend(
        el(
          "p",
          { class: "panel outcome tone-bad", role: "alert" },
          `The charts cannot be drawn in this browser (${error.message}); it needs DecompressionStream, which all have had since 2023.`,
        ),
      );
  });
