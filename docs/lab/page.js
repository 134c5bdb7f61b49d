// The page: its state, which its address holds too; what it asks of the worker; what it shows.

const $ = (id) => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
const NAMES = [...Object.keys(DATA.models), ...Object.keys(DATA.real)];
const TOKENIZER = makeTokenizer(DATA.tokenizer.vocabulary, DATA.tokenizer.merges);
const UNTOUCHED = { drop: 0, hide: 0, flat: 0, place: 1, element: 1 }; // no operation
const FIRST = { model: NAMES[0], step: 12000, head: 12, text: DATA.samples[0], query: 13, bos: 0,
  threshold: null, tour: 0, ...UNTOUCHED }; // heads, queries and places count from 1
const LIMITS = { step: [0, 1e6], head: [1, 1000], query: [1, CONTEXT], place: [1, CONTEXT],
  element: [0, 1], threshold: [0.05, 0.95], tour: [0, DATA.tour.length],
  drop: [0, 1], hide: [0, 1], flat: [0, 1], bos: [0, 1] };
const state = { ...FIRST };

const isLive = () => state.model in DATA.models; // it computes; of the real models maps were stored
const configOf = (name = state.model) => DATA.models[name]?.config ?? DATA.real[name];
const stepsOf = (name) => Object.keys(DATA.models[name].sets).map(Number);
const stepOf = (name) => stepsOf(name).findLast((step) => step <= state.step) ?? 0;
// Until one drags it, the paper's; of a model that reads only short texts a higher one.
const thresholdOf = (name = state.model) => state.threshold ?? DATA.words[name].threshold ?? 0.3;

// The operations that are on, in words.
const operations = () => (!isLive() ? [] : [
  state.drop && "the first token is dropped", state.hide && "the first token is hidden",
  state.flat && "the mean query is subtracted",
  configOf().fixed && state.place > 1 && `<fix> is in place ${state.place}`,
  state.element < 1 && `the largest number is multiplied by ${state.element.toFixed(2)}`,
].filter(Boolean));
const operated = () => operations().length > 0;

// A visitor who came by no link sees no answers of the tour before the tour.
const isFresh = () => document.body.classList.contains("fresh");
const setFresh = (fresh) => document.body.classList.toggle("fresh", fresh);

function writeAddress() {
  if (isFresh()) return;
  const text = state.text.replace(/[\ud800-\udfff]/gu, "\ufffd"); // lone surrogates
  const parts = new URLSearchParams({ model: state.model, head: state.head, text });
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

// ---- the worker, and the maps that were stored

const waiting = new Map(); // what resolves the promise of each request, by its number
let worker, requests = 0;

const trouble = (words) => { $("trouble").textContent = words; };

function startWorker() {
  const source = new Blob([$("model").textContent], { type: "text/javascript" });
  worker = new Worker(URL.createObjectURL(source));
  worker.onmessage = ({ data }) => waiting.get(data.number)(data);
  worker.onerror = ({ message }) => trouble(`The models do not run in this browser: ${message}`);
  worker.postMessage({ models: DATA.models });
}

// One forward pass. The sink is <fix>, wherever it stands, or else the first token.
async function pass(name, tokens, { place, drop, hide, element, flat }) {
  if (!(name in DATA.models)) return mapsOf(name);
  const at = configOf(name).fixed ? place - 1 : -1, number = ++requests;
  const ids = arrange(tokens, at).slice(drop), T = ids.length;
  const sink = Math.max(0, ids.indexOf(FIXED));
  const answered = new Promise((resolve) => { waiting.set(number, resolve); });
  worker.postMessage({ number, set: `${name}/${stepOf(name)}`, config: configOf(name), ids,
    edits: { hide, element, flat }, sink });
  const result = await answered;
  waiting.delete(number);
  const labels = ids.map(TOKENIZER.label);
  // The weights themselves: where a query spends 1, they are its shares.
  const weightIn = (head) => (i, j) =>
    result.spent[head * T + i] * result.maps[(head * T + i) * T + j];
  // The place of each token in the text, so that losses can be compared wherever <fix> (-1) stands.
  const places = arrange([...tokens.keys()], at, -1).slice(drop);
  return { ...result, sink, labels, weightIn, places };
}

// The same of a real model, of which only maps of the sentences were stored.
async function mapsOf(name) {
  const real = DATA.real[name], { texts } = real, sentence = DATA.sentences.indexOf(state.text);
  const bos = name === state.model ? state.bos : DATA.words[name].bos;
  const which = 2 * Math.max(0, sentence) + bos, { labels, alpha } = texts[which];
  real.shades ??= new Uint8Array(await inflate(real.packed)); // of all its maps
  const size = ({ labels: { length: T } }) => T * (T + 1) / 2; // a causal map's
  const before = texts.slice(0, which).reduce((sum, text) => sum + alpha.length * size(text), 0);
  const weightIn = (head) => stored(real.shades, before + head * size(texts[which]));
  return { labels, alpha, sink: 0, weightIn };
}

// ---- the model as it is operated on and as it was trained, and then the others beside it

const results = { model: "", edited: null, trained: null, byName: {} };
let round = 0;

async function compute() {
  if (!isLive() && !DATA.sentences.includes(state.text)) state.text = DATA.sentences[0];
  const now = ++round, tokens = TOKENIZER.encode(state.text), room = CONTEXT - configOf().fixed;
  const even = evenShare(tokens.length + (configOf().fixed ? 1 : 0));
  writeAddress();
  $("note").textContent = !isLive() ? "This model was run beforehand, on the sentences of the list."
    : tokens.length < 3 ? "There is too little text: the picture is of the one before."
      : tokens.length > room ? `The text is long: the model reads its first ${room} tokens.`
        : even > 0.2 ? `${tokens.length} tokens: so few that even attention gives the first one ${even.toFixed(2)}. `
          + "Compare the dots with the dotted line, or type more."
          : `${tokens.length} tokens. Longer words are several tokens.`;
  if (tokens.length < 3) return;
  const edited = await pass(state.model, tokens, state);
  const trained = operated() ? await pass(state.model, tokens, UNTOUCHED) : edited;
  if (now !== round) return; // the state has changed meanwhile
  Object.assign(results, { model: state.model, edited, trained });
  show();
  for (const name of NAMES) {
    const result = name === state.model ? edited : await pass(name, tokens, state);
    if (now !== round) return;
    results.byName[name] = result;
    showCard(name);
  }
}

// A change of what is computed, and one of what is shown of it.
function change(values) {
  setFresh(false);
  Object.assign(state, values);
  return compute();
}

function look(values) {
  setFresh(false);
  Object.assign(state, values);
  writeAddress();
  show();
  NAMES.forEach(showCard);
}

// ---- numbers

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const above = (alpha, threshold = thresholdOf()) =>
  alpha.filter((share) => share > threshold).length;
const starOf = ({ stars, labels: { length: T }, alpha }) =>
  alpha.map((_, head) => mean(stars.subarray(head * T, (head + 1) * T)));

// The loss is a mean over the tokens of the text that are predicted both before and after.
const inBoth = (place) =>
  [results.edited, results.trained].every(({ places }) => places.indexOf(place) > 0);
const lossOf = ({ losses, places }) => mean(losses.filter((_, t) => inBoth(places[t + 1])));

// ---- what is shown

function show() {
  if (results.model !== state.model) return; // not yet
  const { edited: { labels, alpha, sink }, trained } = results;
  state.query = Math.min(state.query, labels.length);
  state.head = Math.min(state.head, alpha.length);
  document.body.classList.toggle("is-live", isLive());
  document.body.classList.toggle("is-operated", operated());
  document.body.classList.toggle("has-own-key", Boolean(configOf().star));
  document.body.classList.toggle("is-sigmoid", Boolean(configOf().sigmoid));
  $("about-model").textContent = DATA.words[state.model].about;
  const another = trained.labels[trained.sink];
  const whom = another === labels[sink] ? "" : ` to “${another}”`; // after a drop
  const before = operated() ? ` (${above(trained.alpha)}${whom} before)` : "";
  const count = `${above(alpha)} of ${alpha.length} heads`;
  $("summary").textContent = `${count} give “${labels[sink]}” `
    + `more than ${thresholdOf().toFixed(2)} of their attention${before}.`;
  $("operated").textContent =
    `An operation is on: ${operations().join(", ")}. ${count}${before}.`;
  showNumbers();
  showControls();
  if (!$("map").clientWidth) return; // behind the curtain
  showHeads();
  showMap();
}

function showNumbers() {
  const { edited, trained } = results;
  const rows = [["attention, mean of all heads", ({ alpha }) => mean(alpha)],
    ["even attention", ({ labels, sink }) => evenShare(labels.length, sink)]];
  if (configOf().star) rows.push(["to the own key", (one) => mean(starOf(one))]);
  if (configOf().sigmoid) rows.push(["what a query spends", ({ spent }) => mean(spent)]);
  const both = operated() ? " (on the tokens predicted in both)" : "";
  if (isLive()) rows.push([`loss, nats a token${both}`, lossOf]);
  $("numbers").replaceChildren(...rows.map(([name, value]) => {
    const before = operated() ? `${value(trained).toFixed(2)} before` : "";
    return make("tr", {}, make("th", {}, name), make("td", {}, value(edited).toFixed(2)),
      make("th", {}, before));
  }));
}

function showHeads() {
  const { edited, trained } = results, holder = $("heads");
  const headAt = drawHeads(holder, { ...configOf(), ...edited, head: state.head - 1,
    star: configOf().star && starOf(edited), rings: operated() ? trained.alpha : null,
    threshold: thresholdOf(), T: edited.labels.length, width: holder.clientWidth });
  holder.onclick = (event) => {
    if (headAt(event) >= 0) look({ head: headAt(event) + 1 });
  };
}

function showMap() {
  const { labels, alpha, stars, spent, weightIn, sink } = results.edited, holder = $("map");
  const head = state.head - 1, query = state.query - 1, at = head * labels.length;
  const steps = isLive() ? `, ${stepOf(state.model).toLocaleString("en")} steps` : "";
  const [name] = nameOf(head, configOf().H, alpha).split(":");
  const gives = `${name}: ${alpha[head].toFixed(2)} to “${labels[sink]}” (α₁)`;
  const view = { labels, share: weightIn(head), query, sink, width: holder.clientWidth,
    title: `${DATA.words[state.model].title}${steps}\n${gives}`,
    starAt: configOf().star && ((i) => stars[at + i]) };
  const row = drawMap(holder, view);
  holder.onpointermove = (event) => {
    if (row(event) !== query) look({ query: row(event) + 1 });
  };
  const sum = configOf().sigmoid ? ` In all it spends ${spent[at + query].toFixed(2)}.` : "";
  $("looks").textContent = looksAt(view) + sum;
}

// A model's card, with all its heads as a square of cells, a row a block.
function showCard(name) {
  if (!results.byName[name]) return; // not yet
  const { alpha } = results.byName[name], { H } = configOf(name), rows = alpha.length / H;
  const [holder, , words] = $(`model-${name}`).children;
  const threshold = thresholdOf(name), live = name in DATA.models;
  words.textContent = `${above(alpha, threshold)} of ${alpha.length} `
    + (live ? "heads" : `above ${threshold.toFixed(2)} (short text)`);
  const svg = picture(holder, H * 10, rows * 10, "");
  svg.setAttribute("preserveAspectRatio", "none");
  squares(svg, rows, H, 10, (row, column) => alpha[row * H + column] ** 2); // its shades are roots
}

function showControls() {
  const { labels, alpha } = results.edited, { fixed, H } = configOf();
  for (const name of ["drop", "hide", "flat", "bos"]) $(name).checked = state[name];
  const [name] = nameOf(state.head - 1, H, alpha).split(":");
  set("head", { max: alpha.length, value: state.head }, name);
  set("query", { max: labels.length, value: state.query },
    `${state.query}, “${labels[state.query - 1]}”`);
  set("threshold", { value: thresholdOf() }, thresholdOf().toFixed(2));
  set("element", { value: state.element }, state.element.toFixed(2));
  for (const name of NAMES) $(`model-${name}`).ariaPressed = name === state.model;
  $("sample").value = state.text;
  $("sample").children[0].disabled = $("text").readOnly = !isLive();
  if ($("text").value !== state.text) $("text").value = state.text;
  if (!isLive()) return;
  const steps = stepsOf(state.model), step = stepOf(state.model);
  set("step", { max: steps.length - 1, value: steps.indexOf(step) },
    `${step.toLocaleString("en")} steps`);
  set("place", { max: labels.length + state.drop, value: state.place, disabled: !fixed },
    fixed ? state.place : "(this model has none)");
}

// A slider, and what says its value: to eyes and to a screen reader.
function set(id, values, words) {
  Object.assign($(id), values).setAttribute("aria-valuetext", words);
  $(`${id}-value`).textContent = words;
}

// ---- controls

function buildControls() {
  for (const model of NAMES) {
    const { title, head, bos = 0 } = DATA.words[model];
    const onclick = () => change({ model, head, bos });
    const cells = make("span", { className: "figure", ariaHidden: true });
    $("models").append(make("button", { type: "button", id: `model-${model}`, onclick },
      cells, make("strong", {}, title), make("output", {})));
  }
  const [ours, others] = $("sample").children;
  ours.append(...DATA.samples.map((text) => make("option", { value: text }, text)));
  others.append(...DATA.sentences.map((text) => make("option", { value: text }, text)));
  for (const name of ["sample", "text"]) {
    $(name).oninput = ({ target }) => change({ text: target.value });
  }
  $("step").oninput = ({ target }) => change({ step: stepsOf(state.model)[target.value] });
  for (const name of ["place", "element"]) {
    $(name).oninput = ({ target }) => change({ [name]: Number(target.value) });
  }
  for (const name of ["threshold", "query", "head"]) {
    $(name).oninput = ({ target }) => look({ [name]: Number(target.value) });
  }
  for (const name of ["drop", "hide", "flat", "bos"]) {
    $(name).onchange = ({ target }) => change({ [name]: Number(target.checked) });
  }
  for (const button of document.querySelectorAll(".undo")) {
    button.onclick = () => change(UNTOUCHED);
  }
  for (const button of document.querySelectorAll(".play")) button.onclick = play;
  $("now").append(...[...document.querySelectorAll("#try a")].map((link) => link.cloneNode(true)));
  $("save").onclick = saveMap;
  const names = ["k*", "k₁", "k₂", "k₃", "k₄"];
  const put = makeToy($("toy-table"), { names, low: -4, high: 4 });
  $("nothing").onclick = () => put([0, -3, -3.5, -2.5, -3]);
  $("match").onclick = () => put([0, -3, 3, -2.5, -3]);
  $("nothing").click();
  addEventListener("resize", show);
  paint();
  NIGHT.onchange = () => {
    paint();
    show();
    NAMES.forEach(showCard);
  };
  // Notebooks are pages in the book. A page that is a file by itself can only say where they are.
  const inBook = location.protocol !== "file:" || location.pathname.includes("/book/");
  addEventListener("click", (event) => {
    const { target } = event;
    if (!target.href?.endsWith(".ipynb")) return;
    if (inBook) target.href = target.href.replace(/\.ipynb$/, ".html");
    else {
      event.preventDefault();
      target.replaceWith(`${target.textContent} (notebooks/${target.href.split("/").at(-1)})`);
    }
  });
}

// Pictures in the dark: the same palette from its other end, so that much attention is bright.
const BY_DAY = { ...TONES }, SHADES = DATA.palette, NIGHT = matchMedia("(prefers-color-scheme: dark)");
const BY_NIGHT = { ink: "#ececee", grey: "#a9a9b0", light: "#55565e", ground: "#222327" };

function paint() {
  Object.assign(TONES, NIGHT.matches ? BY_NIGHT : BY_DAY);
  DATA.palette = NIGHT.matches ? SHADES.toReversed() : SHADES;
}

// From the first checkpoint to the last.
async function play({ target }) {
  const { tour, model } = state;
  target.disabled = true;
  for (const step of stepsOf(model)) {
    if (state.tour !== tour || state.model !== model) break; // one has gone on meanwhile
    await change({ step });
    await new Promise((wake) => { setTimeout(wake, 700); });
  }
  target.disabled = false;
}

// Offer the map as a file of its own.
function saveMap() {
  const text = new XMLSerializer().serializeToString($("map").firstChild);
  const href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  make("a", { href, download: `${state.model}_head_${state.head}.svg` }).click();
}
