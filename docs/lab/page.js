// The page: its state, which its address holds too; what it asks of the worker; what it shows of that.

const $ = (id) => document.getElementById(id);
const DATA = JSON.parse($("data").textContent), NAMES = Object.keys(DATA.models);
const TOKENIZER = makeTokenizer(DATA.tokenizer.vocabulary, DATA.tokenizer.merges);
const UNTOUCHED = { drop: 0, hide: 0, flat: 0, place: 1, element: 1 }; // no operation
const FIRST = { model: NAMES[0], step: 12000, head: 12, text: DATA.samples[0], query: 12,
  threshold: 0.3, tour: 0, ...UNTOUCHED }; // heads, queries and places count from 1
const LIMITS = { step: [0, 1e6], head: [1, 16], query: [1, CONTEXT], place: [1, CONTEXT],
  element: [0, 1], threshold: [0.05, 0.95], tour: [0, DATA.tour.length],
  drop: [0, 1], hide: [0, 1], flat: [0, 1] };
const state = { ...FIRST };

const configOf = (name = state.model) => DATA.models[name].config;
const stepsOf = (name = state.model) => Object.keys(DATA.models[name].sets).map(Number);
const stepOf = (name = state.model) => // of those that the model has
  stepsOf(name).findLast((step) => step <= state.step) ?? stepsOf(name)[0];
const operated = () => Object.keys(UNTOUCHED).some((name) => state[name] !== UNTOUCHED[name]);

function writeAddress() {
  const text = state.text.replace(/[\ud800-\udfff]/gu, "\ufffd"); // lone surrogates
  const parts = new URLSearchParams({ model: state.model, step: stepOf(), head: state.head, text });
  for (const name of Object.keys(LIMITS)) {
    if (state[name] !== FIRST[name]) parts.set(name, state[name]);
  }
  history.replaceState(null, "", `#${parts}`);
}

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  Object.assign(state, FIRST, { text: parts.get("text") ?? FIRST.text });
  if (NAMES.includes(parts.get("model"))) state.model = parts.get("model");
  for (const [name, [least, most]] of Object.entries(LIMITS)) {
    const value = Number(parts.get(name) ?? NaN), whole = most > 1 ? Math.round(value) : value;
    if (whole >= least && whole <= most) state[name] = whole;
  }
}

// ---- the worker

const waiting = new Map(); // what resolves the promise of each request, by its number
let worker, asked = 0;

function startWorker() {
  const source = new Blob([$("model").textContent], { type: "text/javascript" });
  worker = new Worker(URL.createObjectURL(source));
  worker.onmessage = ({ data }) => waiting.get(data.number)(data);
  worker.onerror = ({ message }) => trouble(`The models do not run in this browser: ${message}`);
  worker.postMessage({ models: DATA.models });
}

function trouble(message) {
  $("trouble").textContent = message;
  $("trouble").hidden = false;
}

// One forward pass: what `forward` gives, with ids, labels, and the place of each token in the text.
async function pass(name, tokens, { place, drop, hide, element, flat }) {
  const config = configOf(name), at = config.fixed ? place - 1 : -1, number = ++asked;
  const ids = arrange(tokens, at).slice(drop), set = `${name}/${stepOf(name)}`;
  const origin = arrange([...tokens.keys()], at, -1).slice(drop);
  const answered = new Promise((resolve) => { waiting.set(number, resolve); });
  worker.postMessage({ number, set, config, ids, edits: { hide, element, flat } });
  const result = await answered;
  waiting.delete(number);
  return { ...result, ids, origin, labels: ids.map(TOKENIZER.label) };
}

// ---- the model as it is operated on and as it was trained, and then the others beside it

const results = { edited: null, trained: null, byName: {} };
let round = 0;

async function compute() {
  const { fixed } = configOf(), room = CONTEXT - Number(fixed), now = ++round;
  const tokens = TOKENIZER.encode(state.text);
  const enough = tokens.length >= (fixed && !state.drop ? 1 : 2);
  writeAddress();
  $("note").textContent = !enough ? "There is too little text: the picture is of the one before."
    : tokens.length > room ? `The text is long: a model reads its first ${room} tokens.`
      : `${tokens.length} token${tokens.length > 1 ? "s" : ""}. The models know few words whole.`;
  if (!enough) return;
  const edited = await pass(state.model, tokens, state);
  const trained = operated() ? await pass(state.model, tokens, UNTOUCHED) : edited;
  if (now !== round) return; // the state has changed meanwhile
  Object.assign(results, { edited, trained });
  show();
  for (const name of NAMES) {
    const result = name === state.model ? edited : await pass(name, tokens, state);
    if (now !== round) return;
    results.byName[name] = result;
    showModels();
  }
}

// A change of the state; only some of it needs another forward pass.
function choose(values) {
  Object.assign(state, values);
  if (!["head", "query", "threshold"].includes(Object.keys(values)[0])) return compute();
  writeAddress();
  show();
  showModels();
  return showReal();
}

// ---- numbers

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const evenShare = (T) => mean(Array.from({ length: T }, (_, i) => 1 / (i + 1)));
const above = (alpha) => alpha.filter((share) => share > state.threshold).length;
const counted = (alpha) => `${above(alpha)} of ${alpha.length} heads`;
const starOf = ({ stars, ids: { length: T }, alpha }) =>
  alpha.map((_, head) => mean(stars.subarray(head * T, (head + 1) * T)));

// Mean attention of all heads to <fix>, over the queries that see it.
function toFixed({ maps, ids: { length: T }, origin }) {
  const place = origin.indexOf(-1);
  return mean(maps.filter((_, at) => at % T === place && Math.floor(at / T) % T >= place));
}

// Losses by their place in the text; that of <fix>, which is in no text, is left out.
function lossesOf({ losses, origin }) {
  const byPlace = [];
  losses.forEach((loss, t) => { if (origin[t + 1] >= 0) byPlace[origin[t + 1]] = loss; });
  return byPlace;
}

// ---- what is shown

function show() {
  if (!results.edited) return; // no text yet
  const { edited, trained } = results, { H, star, sigmoid } = configOf(), T = edited.ids.length;
  const changed = operated(), [now, before] = [edited, trained].map(lossesOf);
  const both = [...now.keys()].filter((i) => now[i] !== undefined && before[i] !== undefined);
  const numbers = {
    "heads with a sink": ({ alpha }) => `${above(alpha)} of ${alpha.length}`,
    "mean α₁": ({ alpha }) => mean(alpha).toFixed(2),
    "loss, nats a token": (one) => mean(both.map((i) => lossesOf(one)[i])).toFixed(2),
  };
  if (star) numbers["mean to the own key"] = (one) => mean(starOf(one)).toFixed(2);
  if (edited.origin.indexOf(-1) > 0) numbers["mean to <fix>"] = (one) => toFixed(one).toFixed(2);
  const columns = changed ? [edited, trained] : [edited];
  table($("numbers"), [["", ...(changed ? ["operated", "before"] : [])], ...Object.entries(numbers).map(
    ([name, value]) => [name, ...columns.map(value)])]);
  $("summary").textContent = summary(edited.alpha, edited.labels);
  state.query = Math.min(state.query, T);
  const at = (state.head - 1) * T, steps = stepOf().toLocaleString("en");
  showView("", { ...edited, H, title: `${DATA.words[state.model][0]}, ${steps} steps`,
    before: changed ? trained.alpha : null, star: star && starOf(edited), head: state.head - 1,
    query: state.query - 1, share: (i, j) => edited.maps[(at + i) * T + j],
    starAt: star && ((i) => edited.stars[at + i]) }, choose);
  const spent = edited.spent[at + state.query - 1].toFixed(2);
  if (sigmoid) $("looks").textContent += ` These are shares of the ${spent} that it spends.`;
  const labels = TOKENIZER.encode(state.text).slice(0, Math.max(now.length, before.length));
  drawLosses($("losses"), labels.map(TOKENIZER.label), now, changed ? before : []);
  $("ticks").hidden = !changed;
  $("own-key").hidden = !star;
  showControls(T, steps);
}

const summary = (alpha, labels) => `${counted(alpha)} give the first token, “${labels[0]}”, more `
  + `than ${state.threshold.toFixed(2)} of their attention.`;

// Heads, the map of one, and what a query looks at, in the elements whose ids begin with `prefix`.
function showView(prefix, view, change) {
  const { alpha, H, head, query, labels, share, starAt } = view;
  const [heads, map] = [$(`${prefix}heads`), $(`${prefix}map`)];
  if (!heads.clientWidth) return; // behind a curtain
  const name = `Head ${head % H + 1} of block ${Math.floor(head / H) + 1}: α₁ = `
    + alpha[head].toFixed(2);
  const pointed = drawHeads(heads, { ...view, threshold: state.threshold });
  const row = drawMap(map, { ...view, title: `${view.title}\n${name}` });
  heads.firstChild.onclick = (event) => {
    if (pointed(event).head) change({ head: pointed(event).head });
  };
  heads.firstChild.onpointermove = (event) => {
    const { share: height, head: dot } = pointed(event), threshold = Math.round(20 * height) / 20;
    if (event.buttons && !dot) choose({ threshold: Math.min(0.95, Math.max(0.05, threshold)) });
  };
  map.firstChild.onpointermove = (event) => {
    if (row(event) !== query) change({ query: row(event) + 1 });
  };
  set(`${prefix}head`, { max: alpha.length, value: head + 1 }, name);
  const place = { max: labels.length, value: query + 1 }, seen = labels.slice(0, query + 1);
  set(`${prefix}query`, place, `${query + 1}, “${labels[query]}”`);
  const keys = seen.map((label, j) => [`“${label}” (${j + 1})`, share(query, j)]);
  if (starAt) keys.push(["the key of its own", starAt(query)]);
  const most = keys.sort((a, b) => b[1] - a[1]).slice(0, 3);
  const words = most.map(([key, value]) => `${value.toFixed(2)} to ${key}`);
  $(`${prefix}looks`).textContent = `It gives ${words.join(", ")}.`;
}

// A slider, and what says its value: to eyes and to a screen reader.
function set(id, values, words) {
  Object.assign($(id), values).setAttribute("aria-valuetext", words);
  if ($(`${id}-value`)) $(`${id}-value`).textContent = words;
}

function make(tag, values, ...children) {
  const node = Object.assign(document.createElement(tag), values);
  node.append(...children);
  return node;
}

// The first cell of each row is its name; a cell is text or an element.
function table(holder, rows) {
  const cellOf = (content, i, j) => make(i && j ? "td" : "th", {}, content);
  holder.replaceChildren(...rows.map(
    (row, i) => make("tr", {}, ...row.map((cell, j) => cellOf(cell, i, j)))));
}

function showModels() {
  for (const name of NAMES) {
    const card = $(`model-${name}`), result = results.byName[name];
    card.setAttribute("aria-pressed", name === state.model);
    if (!result) continue;
    drawGrid(card.querySelector(".figure"), result.alpha, configOf(name).H, 14);
    card.querySelector("output").textContent = counted(result.alpha);
  }
}

function showControls(T, steps) {
  const { fixed } = configOf(), place = fixed ? state.place : "(this model has none)";
  for (const name of ["drop", "hide", "flat"]) $(name).checked = state[name];
  set("step", { max: stepsOf().length - 1, value: stepsOf().indexOf(stepOf()) }, `${steps} steps`);
  set("place", { max: T + state.drop, value: state.place, disabled: !fixed }, place);
  for (const name of ["element", "threshold"]) {
    set(name, { value: state[name] }, state[name].toFixed(2));
  }
  $("sample").value = DATA.samples.indexOf(state.text);
  if ($("text").value !== state.text) $("text").value = state.text;
  $("undo").disabled = !operated();
}

// ---- controls

const option = (value, text) => make("option", { value, textContent: text });

function build() {
  $("sample").append(option(-1, "your own text"));
  $("sample").append(...DATA.samples.map((text, i) => option(i, text)));
  $("models").append(...NAMES.map((model) => {
    const [title, about] = DATA.words[model], picture = make("span", { className: "figure" });
    const values = { type: "button", id: `model-${model}`, onclick: () => choose({ model }) };
    return make("button", values, picture, make("strong", {}, title), make("output", {}),
      make("small", {}, about));
  }));
  $("sample").onchange = ({ target }) => choose({ text: DATA.samples[target.value] ?? "" });
  $("text").oninput = ({ target }) => choose({ text: target.value });
  $("step").oninput = ({ target }) => choose({ step: stepsOf()[target.value] });
  for (const name of ["place", "element", "threshold", "query", "head"]) {
    $(name).oninput = ({ target }) => choose({ [name]: Number(target.value) });
  }
  for (const name of ["drop", "hide", "flat"]) {
    $(name).onchange = ({ target }) => choose({ [name]: Number(target.checked) });
  }
  $("undo").onclick = () => choose(UNTOUCHED);
  for (const button of document.querySelectorAll(".play")) button.onclick = play;
  $("save").onclick = () => saveSvg($("map").firstChild, `${state.model}_head_${state.head}.svg`);
  $("link").onclick = async ({ target }) => {
    const copied = navigator.clipboard.writeText(location.href).then(() => "Copied");
    target.textContent = await copied.catch(() => "It is in the address bar");
  };
  const { alpha, heads, loss } = DATA.rounding;
  $("rounding").textContent = "To fit into the page, weights are rounded. At the worst checkpoint "
    + `that moves a head’s α₁ on a text by ${alpha.toFixed(3)} on average, its mean over 100 texts by `
    + `at most ${heads.toFixed(3)}, and the loss by ${loss.toFixed(3)}.`;
  addEventListener("hashchange", () => {
    if (!location.hash.includes("=")) return; // a section of the page
    readAddress();
    showTour();
    compute();
  });
  addEventListener("resize", () => { show(); showReal(); });
}

// From the first checkpoint to the last.
async function play({ target }) {
  target.disabled = true;
  for (const step of stepsOf()) {
    await choose({ step });
    await new Promise((wake) => { setTimeout(wake, 700); });
  }
  target.disabled = false;
}
