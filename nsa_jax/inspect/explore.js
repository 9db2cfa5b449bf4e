// What a model reads: one token, layer, head group, branch and checkpoint at a time.

const DATA = JSON.parse(document.getElementById("data").textContent);
const VIEWS = DATA.views;
const T = DATA.strings.length;
const BRANCHES = ["compressed", "selected", "window"];
const [FUTURE, CANDIDATE, FORCED, FREE] = [0, 1, 2, 3]; // of a block, as the arrays hold it
// What is drawn of a block: its colour, and what the legend says.
const LOOKS = {
  future: ["--future", "not yet written"],
  unread: ["--unread", "not read"],
  forced: ["--forced", "forced: first and latest blocks"],
  chosen: ["--chosen", "chosen by score"],
  free: ["--free", "no choice: everything fits"],
  compressed: ["--compressed", "read through compressed blocks"],
  window: ["--window", "read through the window"],
  other: ["--window", "read by other branches alone"],
};
const state = { token: T - 1, layer: 0, group: 0, branch: "selected", view: 0, colour: "attention" };

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
const grouped = (value) => value.toLocaleString("en-US");
const percent = (share) => (share > 0 && share < 0.001 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`);
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Views are decoded when they are first shown.
const decoded = new Map();
function arrays(index) {
  if (!decoded.has(index)) decoded.set(index, decode(index));
  return decoded.get(index);
}
async function decode(index) {
  const text = atob(document.getElementById(`view-${index}`).textContent.trim());
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const { layers, groups, blocks } = VIEWS[index],
    rows = layers.length * groups * T,
    bits = Math.ceil(blocks / 8);
  let at = 0;
  const take = (count) => raw.subarray(at, (at += count));
  return {
    ...VIEWS[index],
    bits,
    kinds: take(T * blocks),
    chosen: take(rows * bits),
    weights: take(rows * 3 * blocks),
    gates: take(rows * 3),
  };
}
// The shares of one query in one layer and group: what is drawn of each block, and the share of attention in it.
const lineOf = (view, layer, group) => layer * view.groups + group;
function gatesOf(view, layer, group, t) {
  const at = (lineOf(view, layer, group) * T + t) * 3;
  return [0, 1, 2].map((branch) => view.gates[at + branch] / 255);
}
function shareOf(view, layer, group, branch, t, j) {
  const value = view.weights[((lineOf(view, layer, group) * 3 + branch) * T + t) * view.blocks + j] / 255;
  return value * value;
}
function listedAs(view, layer, group, t, j) {
  const kind = view.kinds[t * view.blocks + j];
  if (kind === FUTURE) return "future";
  if (kind === FORCED) return "forced";
  if (kind === FREE) return "free";
  const byte = view.chosen[(lineOf(view, layer, group) * T + t) * view.bits + (j >> 3)];
  return (byte >> (j & 7)) & 1 ? "chosen" : "unread";
}
function query(view, layer, group, t, branch = state.branch) {
  const gates = gatesOf(view, layer, group, t),
    sum = gates[0] + gates[1] + gates[2] || 1,
    found = [];
  for (let j = 0; j < view.blocks; j++) {
    const listed = listedAs(view, layer, group, t, j);
    let share = 0,
      look = listed;
    if (listed !== "future") {
      if (branch === "all") {
        for (let b = 0; b < 3; b++) share += (gates[b] / sum) * shareOf(view, layer, group, b, t, j);
        if (listed === "unread" && share > 0) look = "other";
      } else {
        share = shareOf(view, layer, group, BRANCHES.indexOf(branch), t, j);
        if (branch !== "selected") look = share > 0 ? branch : "unread";
      }
    }
    found.push({ look, listed, share });
  }
  return found;
}
const isRead = (look) => look !== "unread" && look !== "future";
// How strongly a block is drawn: by its share of the attention (its square root, so that little is seen), or evenly.
// A listed block is seen even if nothing in it is attended to.
function strength({ look, listed, share }) {
  if (!isRead(look)) return 1;
  if (state.colour === "choice") return 0.85;
  const least = look === listed ? 0.16 : 0.03;
  return least + (1 - least) * Math.sqrt(share);
}

// The text.
const spans = [];
function visible(text) {
  if (text === "") return [el("b", {}, "∎")];
  return text.split(/(\s|\p{C})/gu).flatMap((piece) => {
    if (piece === "") return [];
    if (piece === " ") return [el("b", {}, "·"), el("wbr")];
    if (piece === "\n") return [el("b", {}, "⏎"), "\n"];
    if (piece === "\t") return [el("b", {}, "→"), "\t"];
    if (/^[\s\p{C}]$/u.test(piece)) return [el("b", {}, `\\u${piece.codePointAt(0).toString(16).padStart(4, "0")}`)];
    return [piece];
  });
}
const plain = (t) => visible(DATA.strings[t]).map((part) => part.textContent ?? part).join("").replace(/\n/g, "");
function makeText() {
  const box = el("pre", { id: "text", tabindex: "0", role: "group", "aria-label": "the text: click a token" });
  DATA.strings.forEach((text, t) => {
    const span = el("span", { "data-token": t }, visible(text));
    spans.push(span);
    box.append(span);
  });
  box.addEventListener("click", (event) => {
    const found = event.target.closest("[data-token]");
    if (found) move({ token: Number(found.dataset.token) });
  });
  return box;
}
function rgb(name, cache) {
  if (!cache[name]) {
    const hex = token(LOOKS[name][0]).slice(1);
    cache[name] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }
  return cache[name];
}
function paintText(view, found) {
  const cache = {},
    size = view.select_block;
  spans.forEach((span, t) => {
    const one = found[Math.floor(t / size)],
      future = t > state.token;
    const read =
      !future && isRead(one.look) && !(state.branch === "window" && t <= state.token - view.window);
    span.style.background = read ? `rgba(${rgb(one.look, cache)},${strength(one) * 0.8})` : "";
    span.className = future ? "future" : t === state.token ? "cursor" : "";
  });
  const here = spans[state.token],
    box = here.parentElement;
  const top = here.offsetTop - box.offsetTop;
  if (top < box.scrollTop + 10 || top > box.scrollTop + box.clientHeight - 40) box.scrollTop = top - box.clientHeight / 2;
}

// The map: queries down, blocks across.
let drawn = { key: "", image: null };
function paintMap(view) {
  const canvas = document.getElementById("map"),
    ratio = devicePixelRatio || 1,
    width = Math.round(canvas.clientWidth * ratio),
    height = Math.round(canvas.clientHeight * ratio);
  if (!width || !height) return;
  canvas.width = width;
  canvas.height = height;
  const key = [state.view, state.layer, state.group, state.branch, state.colour, document.documentElement.dataset.theme].join();
  if (drawn.key !== key) {
    const cache = {},
      ground = rgb("unread", cache),
      image = new ImageData(view.blocks, T);
    for (let t = 0; t < T; t++) {
      query(view, state.layer, state.group, t).forEach((one, j) => {
        const tone = rgb(one.look, cache),
          alpha = strength(one),
          at = 4 * (t * view.blocks + j);
        for (let c = 0; c < 3; c++) image.data[at + c] = alpha * tone[c] + (1 - alpha) * ground[c];
        image.data[at + 3] = 255;
      });
    }
    drawn = { key, image: el("canvas", { width: view.blocks, height: T }) };
    drawn.image.getContext("2d").putImageData(image, 0, 0);
  }
  const context = canvas.getContext("2d"),
    left = 44 * ratio,
    bottom = height - 22 * ratio,
    right = width - 2 * ratio;
  context.imageSmoothingEnabled = false;
  context.drawImage(drawn.image, left, 0, right - left, bottom);
  const line = ((state.token + 0.5) / T) * bottom;
  context.strokeStyle = token("--ink");
  context.lineWidth = 1.5 * ratio;
  context.strokeRect(left, line - 2.5 * ratio, right - left, 5 * ratio);
  context.fillStyle = token("--muted");
  context.font = `${11 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const near = (y) => Math.abs(y - line) < 12 * ratio;
  for (const [text, y] of [
    ["0", 7 * ratio],
    [grouped(T - 1), bottom - 7 * ratio],
  ])
    if (!near(y)) context.fillText(text, left - 5 * ratio, y);
  context.fillStyle = token("--ink");
  context.fillText(grouped(state.token), left - 5 * ratio, Math.min(Math.max(line, 7 * ratio), bottom - 7 * ratio));
  context.fillStyle = token("--muted");
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillText("block 0", left, bottom + 6 * ratio);
  context.textAlign = "right";
  context.fillText(`${view.blocks - 1}`, right, bottom + 6 * ratio);
  context.textAlign = "center";
  context.fillText(`blocks of ${view.select_block} tokens`, (left + right) / 2, bottom + 6 * ratio);
  canvas.setAttribute(
    "aria-label",
    `map of the blocks that each query reads in layer ${view.layers[state.layer]}, group ${state.group}`,
  );
}
function pick(event) {
  const box = event.currentTarget.getBoundingClientRect(),
    share = (event.clientY - box.top) / (box.height - 22);
  move({ token: Math.min(Math.max(Math.floor(share * T), 0), T - 1) });
}

// Rows of blocks of the chosen token: of every layer and group, and of every checkpoint.
function strip(found, act) {
  const canvas = el("canvas", { height: 1, width: found.length, "aria-hidden": "true", on: { click: act } }),
    cache = {},
    ground = rgb("unread", cache),
    image = new ImageData(found.length, 1);
  found.forEach((one, j) => {
    const tone = rgb(one.look, cache),
      alpha = strength(one);
    for (let c = 0; c < 3; c++) image.data[4 * j + c] = alpha * tone[c] + (1 - alpha) * ground[c];
    image.data[4 * j + 3] = 255;
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.imageRendering = "pixelated";
  return canvas;
}
const chosenBlocks = (found) => found.flatMap((one, j) => (one.listed === "chosen" ? [j] : []));
function row(label, current, found, note, act) {
  return [
    el("button", { type: "button", class: "label", "aria-current": String(current), on: { click: act } }, label),
    strip(found, act),
    el("span", { class: "number" }, note),
  ];
}
function paintLayers(view) {
  const rows = view.layers.flatMap((layer, l) =>
    Array.from({ length: view.groups }, (_, g) => {
      const found = query(view, l, g, state.token),
        gates = gatesOf(view, l, g, state.token);
      return row(
        `layer ${layer}, group ${g}`,
        l === state.layer && g === state.group,
        found,
        gates.map((gate) => gate.toFixed(2)).join(" "),
        () => move({ layer: l, group: g }),
      );
    }),
  );
  document.getElementById("layers").replaceChildren(...rows.flat());
}
let painting = 0;
async function paintViews(view) {
  const turn = ++painting,
    all = await Promise.all(VIEWS.map((_, index) => arrays(index)));
  if (turn !== painting) return; // another token was chosen meanwhile
  const mine = chosenBlocks(query(view, state.layer, state.group, state.token)),
    rows = all.map((other, index) => {
      const l = other.layers.indexOf(view.layers[state.layer]);
      if (l < 0 || state.group >= other.groups) return [];
      const found = query(other, l, state.group, state.token),
        theirs = chosenBlocks(found),
        shared = theirs.filter((j) => mine.includes(j)).length;
      const same = other.select_block === view.select_block;
      const note = index === state.view ? "shown" : !mine.length ? "" : same ? `${shared} of ${mine.length} same` : "other blocks";
      return row(nameOf(index), index === state.view, found, note, () => move({ view: index }));
    });
  document.getElementById("views").replaceChildren(...rows.flat());
}
const RUNS = [...new Set(VIEWS.map((view) => view.run))];
const nameOf = (index) => {
  const { run, step } = VIEWS[index],
    at = step === null ? "" : `step ${grouped(step)}`;
  return RUNS.length > 1 ? `${run}${at ? `, ${at}` : ""}` : at || run;
};

// Numbers of the chosen token.
function paintNumbers(view, found) {
  const gates = gatesOf(view, state.layer, state.group, state.token);
  document.getElementById("gates").replaceChildren(
    ...BRANCHES.flatMap((name, b) => [
      el("span", {}, name),
      el(
        "span",
        { class: "bar-line" },
        el("span", { style: { width: `${100 * gates[b]}%`, background: `var(--${name})` } }),
      ),
      el("span", { class: "number" }, gates[b].toFixed(2)),
    ]),
  );
  const size = view.select_block;
  const rows = found
    .map((one, j) => ({ ...one, j }))
    .filter((one) => isRead(one.look))
    .sort((a, b) => b.share - a.share)
    .slice(0, 64)
    .map(({ j, look, share }) => {
      const end = Math.min((j + 1) * size, T) - 1;
      const text = Array.from({ length: end - j * size + 1 }, (_, i) => plain(j * size + i)).join("");
      return el(
        "tr",
        { on: { click: () => move({ token: Math.min(end, T - 1) }) } },
        el("td", { class: "number" }, el("i", { class: "dot", style: { background: `var(${LOOKS[look][0]})` } }), grouped(j)),
        el("td", { class: "number" }, `${grouped(j * size)}–${grouped(end)}`),
        el("td", { class: "number" }, percent(share)),
        el("td", { class: "piece" }, text.slice(0, 60)),
      );
    });
  document.getElementById("blocks").replaceChildren(...rows);
  const count = (look) => found.filter((one) => one.listed === look).length,
    readable = found.filter((one) => one.look !== "future").length;
  const listed = count("free")
    ? `All ${readable} blocks fit in the list of ${view.num_selected}: there is nothing to choose.`
    : `It lists ${count("forced") + count("chosen")} of ${readable} blocks: ${count("forced")} forced, ${count("chosen")} chosen.`;
  document.getElementById("where").replaceChildren(
    `Token ${grouped(state.token)} `,
    el("strong", {}, plain(state.token)),
    el("span", { class: "wide" }, ` (id ${DATA.ids[state.token]})`),
    `, layer ${view.layers[state.layer]}, group ${state.group}. ${listed}`,
  );
}
function paintLegend() {
  const looks = {
    selected: ["forced", "chosen", "free", "unread"],
    all: ["forced", "chosen", "free", "other", "unread"],
    compressed: ["compressed", "unread"],
    window: ["window", "unread"],
  }[state.branch];
  document
    .getElementById("legend")
    .replaceChildren(
      ...looks.map((look) => el("span", {}, el("i", { style: { background: `var(${LOOKS[look][0]})` } }), LOOKS[look][1])),
    );
}

// Controls.
function choice(label, name, options) {
  const box = el("span", { class: "choice", role: "group", "aria-label": label });
  for (const [value, text] of options)
    box.append(el("button", { type: "button", "data-value": value, on: { click: () => move({ [name]: value }) } }, text));
  box.dataset.of = name;
  return box;
}
function stepper(label, id, back, forth) {
  const press = (sign, what, act) =>
    el("button", { type: "button", class: "step", "aria-label": what, on: { click: act } }, sign);
  return el(
    "span",
    { class: "control" },
    label,
    press("‹", `${label.toLowerCase()} before`, back),
    el("output", { id }),
    press("›", `next ${label.toLowerCase()}`, forth),
  );
}
const checkpoints = (run) => VIEWS.flatMap((view, index) => (view.run === run ? [index] : []));
const turn = (value, by, count) => (value + by + count) % count;
function shift(name, by) {
  const { layers, groups } = VIEWS[state.view];
  move({ [name]: turn(state[name], by, name === "layer" ? layers.length : groups) });
}
function shiftView(by) {
  const mine = checkpoints(VIEWS[state.view].run),
    at = mine.indexOf(state.view) + by;
  if (at >= 0 && at < mine.length) move({ view: mine[at] });
}
function shiftRun() {
  const mine = checkpoints(VIEWS[state.view].run),
    theirs = checkpoints(RUNS[turn(RUNS.indexOf(VIEWS[state.view].run), 1, RUNS.length)]);
  // The checkpoint as far from the end, so that last ones are compared with each other.
  const back = mine.length - mine.indexOf(state.view);
  move({ view: theirs[Math.max(theirs.length - back, 0)] });
}
function controls() {
  const slider = el("input", {
    type: "range",
    id: "checkpoint",
    min: 0,
    step: 1,
    "aria-label": "checkpoint",
    on: { input: () => move({ view: checkpoints(VIEWS[state.view].run)[Number(slider.value)] }) },
  });
  return el(
    "div",
    { class: "controls" },
    RUNS.length > 1
      ? el(
          "span",
          { class: "control" },
          "Run",
          el(
            "span",
            { class: "choice", role: "group", "aria-label": "Run", id: "runs" },
            RUNS.map((run) =>
              el("button", { type: "button", "data-value": run, on: { click: () => run !== VIEWS[state.view].run && shiftRunTo(run) } }, run),
            ),
          ),
        )
      : null,
    el("span", { class: "control steps" }, "Checkpoint", slider, el("output", { id: "step" })),
    stepper("Layer", "layer", () => shift("layer", -1), () => shift("layer", 1)),
    stepper("Group", "group", () => shift("group", -1), () => shift("group", 1)),
    choice("Branch", "branch", [
      ["all", "All"],
      ["compressed", "Compressed"],
      ["selected", "Selected"],
      ["window", "Window"],
    ]),
    el("span", { class: "control" }, el("span", { class: "wide" }, "Colour"), choice("Colour", "colour", [
      ["attention", "Attention"],
      ["choice", "Choice"],
    ])),
  );
}
function shiftRunTo(run) {
  while (VIEWS[state.view].run !== run) shiftRun();
}
function paintControls() {
  const view = VIEWS[state.view],
    mine = checkpoints(view.run),
    slider = document.getElementById("checkpoint");
  slider.max = mine.length - 1;
  slider.value = mine.indexOf(state.view);
  slider.hidden = mine.length < 2;
  const only = mine.length < 2 && view.step !== null ? " (no other is here)" : "";
  document.getElementById("step").textContent = view.step === null ? "not known" : `step ${grouped(view.step)}${only}`;
  slider.setAttribute("aria-valuetext", `step ${view.step}`);
  document.getElementById("layer").textContent = view.layers[state.layer];
  document.getElementById("group").textContent = state.group;
  for (const box of document.querySelectorAll(".choice[data-of]"))
    for (const button of box.children)
      button.setAttribute("aria-pressed", String(button.dataset.value === state[box.dataset.of]));
  for (const button of document.querySelectorAll("#runs button"))
    button.setAttribute("aria-pressed", String(button.dataset.value === view.run));
}

// One change, and everything that follows from it. The address keeps it, so that it can be sent.
let latest = 0;
async function move(change) {
  Object.assign(state, change);
  const { layers, groups } = VIEWS[state.view];
  state.layer = Math.min(state.layer, layers.length - 1);
  state.group = Math.min(state.group, groups - 1);
  state.token = Math.min(Math.max(state.token, 0), T - 1);
  const turn = ++latest,
    view = await arrays(state.view);
  if (turn !== latest) return;
  const found = query(view, state.layer, state.group, state.token);
  paintControls();
  paintLegend();
  paintText(view, found);
  paintMap(view);
  paintNumbers(view, found);
  paintLayers(view);
  if (VIEWS.length > 1) paintViews(view);
  try {
    history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  } catch (error) {
    /* a frame without an address */
  }
  document.documentElement.dataset.ready = "true";
}
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)),
    number = (name, most) => {
      const value = Number(given.get(name));
      return given.has(name) && Number.isInteger(value) && value >= 0 && value <= most ? { [name]: value } : {};
    };
  const word = (name, values) => (values.includes(given.get(name)) ? { [name]: given.get(name) } : {});
  return {
    view: checkpoints(RUNS[0]).at(-1),
    ...number("view", VIEWS.length - 1),
    ...number("token", T - 1),
    ...number("layer", 1e6),
    ...number("group", 1e6),
    ...word("branch", ["all", ...BRANCHES]),
    ...word("colour", ["attention", "choice"]),
  };
}
const KEYS = {
  ArrowLeft: (wide) => move({ token: state.token - wide }),
  ArrowRight: (wide) => move({ token: state.token + wide }),
  ArrowUp: () => shift("layer", -1),
  ArrowDown: () => shift("layer", 1),
  Home: () => move({ token: 0 }),
  End: () => move({ token: T - 1 }),
  g: () => shift("group", 1),
  b: () => {
    const names = ["all", ...BRANCHES];
    move({ branch: names[turn(names.indexOf(state.branch), 1, 4)] });
  },
  c: () => move({ colour: state.colour === "choice" ? "attention" : "choice" }),
  r: shiftRun,
  ",": () => shiftView(-1),
  ".": () => shiftView(1),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, summary")) return;
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act) return;
  event.preventDefault();
  act(event.shiftKey ? VIEWS[state.view].select_block : 1);
});

function setTheme(name, keep) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  if (keep)
    try {
      localStorage.setItem("nsa_jax-report-theme", name);
    } catch (error) {
      /* not allowed from disk */
    }
  move({});
}
const key = (name) => el("kbd", {}, name);
function start() {
  const theme = el("button", {
    type: "button",
    id: "theme",
    "aria-label": "change between light and dark theme",
    on: { click: () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true) },
  });
  const panel = (title, note, ...content) =>
    el("section", { class: "panel" }, el("h2", {}, title, note ? el("small", {}, note) : null), content);
  const map = el("canvas", { id: "map", role: "img", on: { click: pick } });
  const head = ["Block", "Tokens", "Share"].map((name) => el("th", { class: "number", scope: "col" }, name));
  document.getElementById("app").replaceChildren(
    el("header", { class: "top" }, el("div", { class: "page" }, el("h1", {}, `What ${RUNS.join(" and ")} read${RUNS.length > 1 ? "" : "s"}`), theme)),
    el(
      "main",
      { class: "page" },
      controls(),
      el("p", { class: "where", id: "where", "aria-live": "polite" }),
      el("div", { class: "legend", id: "legend" }),
      el(
        "div",
        { class: "columns" },
        el("section", { class: "panel" }, makeText()),
        el(
          "div",
          { class: "side" },
          el("section", { class: "panel" }, map),
          panel("Gates", "mean over the group's heads", el("div", { class: "bars", id: "gates" })),
        ),
      ),
      el(
        "div",
        { class: "more" },
        panel("This token in every layer and group", "gates: compressed, selected, window", el("div", { class: "strips", id: "layers" })),
        VIEWS.length > 1
          ? panel("This token at every checkpoint", "chosen blocks in common with what is shown", el("div", { class: "strips", id: "views" }))
          : null,
        panel(
          "Blocks it reads",
          "by share of the branch's attention",
          el(
            "div",
            { class: "scroll", tabindex: "0", role: "region", "aria-label": "Blocks it reads" },
            el("table", {}, el("thead", {}, el("tr", {}, head, el("th", { scope: "col" }, "Text"))), el("tbody", { id: "blocks" })),
          ),
        ),
      ),
      el(
        "details",
        {},
        el("summary", {}, "Keys, and what is shown"),
        el(
          "p",
          {},
          key("←"), " ", key("→"), " token, with ", key("Shift"), " block; ", key("↑"), " ", key("↓"), " layer; ", key("g"), " group; ",
          key("b"), " branch; ", key(","), " ", key("."), " checkpoint; ", key("r"), " run; ", key("c"), " colour; ", key("Home"), " ", key("End"), ".",
        ),
        el(
          "p",
          {},
          "The framed token is the query: the page shows what is read when the token after it is predicted. A share is the part of a branch's attention, times its gate and averaged over the group's heads, that lies in a block; with all branches, of their sum. What is read through compressed blocks is spread evenly over their tokens. Colours are strong where the square root of the share is large.",
        ),
        el(
          "p",
          {},
          "A run is shown at the checkpoints that it kept: config.train.keep_last and keep_every say how many. A page made of two runs shows both.",
        ),
        DATA.left_out ? el("p", {}, `${grouped(DATA.left_out)} tokens at the end of the text are left out.`) : null,
      ),
    ),
  );
  new ResizeObserver(() => arrays(state.view).then(paintMap)).observe(map);
  Object.assign(state, fromAddress());
  setTheme(document.documentElement.dataset.theme, false);
}
start();
