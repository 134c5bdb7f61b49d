// The page: its state, which its address holds too; what it asks of the worker; what it shows of that.

const $ = (id) => document.getElementById(id);
const DATA = JSON.parse($("data").textContent);
const NAMES = [...Object.keys(DATA.models), ...Object.keys(DATA.real)];
const TOKENIZER = makeTokenizer(DATA.tokenizer.vocabulary, DATA.tokenizer.merges);
const UNTOUCHED = { drop: 0, hide: 0, flat: 0, place: 1, element: 1 }; // no operation
const FIRST = { model: NAMES[0], step: 12000, head: 12, text: DATA.samples[0], query: 12, bos: 0,
  threshold: 0.3, tour: 0, ...UNTOUCHED }; // heads, queries and places count from 1
const LIMITS = { step: [0, 1e6], head: [1, 1000], query: [1, CONTEXT], place: [1, CONTEXT],
  element: [0, 1], threshold: [0.05, 0.95], tour: [0, DATA.tour.length],
  drop: [0, 1], hide: [0, 1], flat: [0, 1], bos: [0, 1] };
const state = { ...FIRST };

const isLive = () => state.model in DATA.models; // it computes; of the real models maps were stored
const configOf = (name = state.model) => DATA.models[name]?.config ?? DATA.real[name];
const stepsOf = (name) => Object.keys(DATA.models[name].sets).map(Number);
const stepOf = (name) => // of those that the model has
  stepsOf(name).findLast((step) => step <= state.step) ?? stepsOf(name)[0];
const operated = () =>
  isLive() && Object.keys(UNTOUCHED).some((name) => state[name] !== UNTOUCHED[name]);

function writeAddress() {
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
const shades = {}; // of all maps of a real model, by its name
let worker, requests = 0;

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
  const at = configOf(name).fixed ? place - 1 : -1, number = ++requests;
  const ids = arrange(tokens, at).slice(drop), T = ids.length;
  const origin = arrange([...tokens.keys()], at, -1).slice(drop);
  const answered = new Promise((resolve) => { waiting.set(number, resolve); });
  worker.postMessage({ number, set: `${name}/${stepOf(name)}`, config: configOf(name), ids,
    edits: { hide, element, flat } });
  const result = await answered;
  waiting.delete(number);
  const shareIn = (head) => (i, j) => result.maps[(head * T + i) * T + j];
  return { ...result, ids, origin, labels: ids.map(TOKENIZER.label), shareIn };
}

// The same of a real model: of the text, if that is one of its sentences, else of the first sentence.
async function mapsOf(name) {
  const { texts, packed } = DATA.real[name];
  const own = DATA.sentences.indexOf(state.text), [, , , bos = 0] = DATA.words[name];
  const which = own < 0 ? bos : 2 * own + state.bos;
  shades[name] ??= new Uint8Array(await inflate(packed));
  const size = ({ labels: { length: T } }) => T * (T + 1) / 2; // a causal map's
  const { labels, alpha } = texts[which];
  const before = texts.slice(0, which).reduce((sum, text) => sum + alpha.length * size(text), 0);
  return { labels, alpha,
    shareIn: (head) => stored(shades[name], before + head * size(texts[which])) };
}

// ---- the model as it is operated on and as it was trained, and then the others beside it

const results = { edited: null, trained: null, byName: {} };
let round = 0;

async function compute() {
  if (!isLive() && !DATA.sentences.includes(state.text)) state.text = DATA.sentences[0];
  const now = ++round, tokens = TOKENIZER.encode(state.text);
  const resultOf = (name, edits) =>
    (name in DATA.models ? pass(name, tokens, edits) : mapsOf(name));
  writeAddress();
  if (!enough(tokens)) return;
  const edited = await resultOf(state.model, state);
  const trained = operated() ? await resultOf(state.model, UNTOUCHED) : edited;
  if (now !== round) return; // the state has changed meanwhile
  Object.assign(results, { edited, trained });
  show();
  for (const name of NAMES) {
    const result = name === state.model ? edited : await resultOf(name, state);
    if (now !== round) return;
    results.byName[name] = result;
    showModels();
  }
}

// Whether there is something to predict; and a note on how much a model reads.
function enough(tokens) {
  const { fixed } = configOf(), room = CONTEXT - Number(fixed), { length } = tokens;
  const least = fixed && !state.drop ? 1 : 2;
  $("note").textContent = length < least ? "There is too little text: the picture is of the one before."
    : length > room ? `The text is long: a model reads its first ${room} tokens.`
      : `${length} token${length > 1 ? "s" : ""}. Most words are several tokens.`;
  return length >= least;
}

// A change of the state; only some of it needs another forward pass.
function choose(values) {
  Object.assign(state, values);
  if (!["head", "query", "threshold"].includes(Object.keys(values)[0])) return compute();
  writeAddress();
  show();
  return showModels();
}

// ---- numbers

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const above = (alpha) => alpha.filter((share) => share > state.threshold).length;
const starOf = ({ stars, ids: { length: T }, alpha }) =>
  alpha.map((_, head) => mean(stars.subarray(head * T, (head + 1) * T)));

// The place, from 0, to which <fix> was moved; 0 also if there is none, or it was not moved.
const placeOfFixed = ({ origin }) => Math.max(0, origin?.indexOf(-1) ?? 0);

// Each head's attention to the token at a place: a mean over the queries that see it.
function attentionTo(place, { alpha, labels: { length: T }, shareIn }) {
  const queries = [...Array(T).keys()].slice(place);
  return Array.from(alpha, (_, head) => mean(queries.map((i) => shareIn(head)(i, place))));
}

// Each head's attention to <fix> if that was moved, else to the first token.
function sinkOf(result) {
  const place = placeOfFixed(result);
  return place ? attentionTo(place, result) : result.alpha;
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
  const { labels, alpha } = results.edited, { length } = labels, place = placeOfFixed(results.edited);
  state.query = Math.min(state.query, length);
  state.head = Math.min(state.head, alpha.length);
  document.body.classList.toggle("stored", !isLive());
  $("summary").textContent = `${above(alpha)} of ${alpha.length} heads give the first token, `
    + `“${labels[0]}”, more than ${state.threshold.toFixed(2)} of their attention.`
    + (place ? ` To <fix>, now in place ${place + 1}, ${above(sinkOf(results.edited))} do.` : "")
    + (isLive() ? "" : ` Among ${length} tokens even attention gives it ${evenShare(length).toFixed(2)} `
      + `already. So the study reads ${CONTEXT}, where that is ${evenShare(CONTEXT).toFixed(2)}.`);
  $("about-model").textContent = DATA.words[state.model][1];
  $("dots").textContent = place ? "its attention to <fix>" : "its α₁";
  showNumbers();
  showHeads();
  showMap();
  showControls(length);
  if (isLive()) showLosses();
}

function showNumbers() {
  const { edited, trained } = results;
  const count = (shares) => `${above(shares)} of ${shares.length}`, moved = placeOfFixed(edited) > 0;
  const rows = [[`heads with a sink${moved ? " on place 1" : ""}`, ({ alpha }) => count(alpha)],
    ["mean α₁", ({ alpha }) => mean(alpha).toFixed(2)],
    ["α₁ of even attention", ({ labels }) => evenShare(labels.length).toFixed(2)]];
  if (isLive()) {
    const [now, before] = [edited, trained].map(lossesOf);
    const both = [...now.keys()].filter((i) => now[i] !== undefined && before[i] !== undefined);
    rows.push(["loss, nats a token", (one) => mean(both.map((i) => lossesOf(one)[i])).toFixed(2)]);
  }
  if (configOf().star) rows.push(["mean to the own key", (one) => mean(starOf(one)).toFixed(2)]);
  if (moved) {
    rows.push(["heads with a sink on <fix>", (one) => count(sinkOf(one))],
      ["mean to <fix>", (one) => mean(sinkOf(one)).toFixed(2)]);
  }
  const columns = operated() ? [edited, trained] : [edited];
  const titles = operated() ? ["", "operated", "before"] : [""];
  table($("numbers"), [titles, ...rows.map(([name, value]) => [name, ...columns.map(value)])]);
}

function showHeads() {
  const { edited, trained } = results, holder = $("heads"), width = holder.clientWidth;
  if (!width) return; // behind a curtain
  const moved = placeOfFixed(edited) > 0; // then even attention to <fix> is not what T's line shows
  const headAt = drawHeads(holder, { ...configOf(), alpha: sinkOf(edited), head: state.head - 1,
    star: configOf().star && starOf(edited), rings: operated() ? trained.alpha : null,
    threshold: state.threshold, T: moved ? 0 : edited.labels.length, width });
  holder.onclick = (event) => {
    const head = headAt(event);
    if (head >= 0) choose({ head: head + 1 });
  };
}

function showMap() {
  const { labels, alpha, stars, spent, shareIn } = results.edited, holder = $("map");
  if (!holder.clientWidth) return;
  const head = state.head - 1, query = state.query - 1, at = head * labels.length;
  const place = placeOfFixed(results.edited);
  const name = nameOf(head, configOf().H, alpha)
    + (place ? `, ${sinkOf(results.edited)[head].toFixed(2)} to <fix>` : ""), [title] = DATA.words[state.model];
  const after = isLive() ? `, ${stepOf(state.model).toLocaleString("en")} steps` : "";
  const view = { labels, share: shareIn(head), query, title: `${title}${after}\n${name}`,
    starAt: configOf().star && ((i) => stars[at + i]), width: holder.clientWidth };
  const row = drawMap(holder, view);
  const frame = holder.querySelector(`rect[stroke="${DATA.colors.first}"]`);
  frame.setAttribute("x", Number(frame.getAttribute("x")) + place * frame.getAttribute("width"));
  holder.onpointermove = (event) => {
    if (row(event) !== query) choose({ query: row(event) + 1 });
  };
  set("head", { max: alpha.length, value: state.head }, name);
  set("query", { max: labels.length, value: state.query }, `${state.query}, “${labels[query]}”`);
  const sum = configOf().sigmoid && spent[at + query].toFixed(2);
  $("looks").textContent = looksAt(view) + (sum ? ` These are shares of the ${sum} that it spends.` : "");
}

// A bar a token: the nats that it costs; a tick: before the operation. No bar where none is predicted.
function showLosses() {
  const [losses, trained] = [results.edited, results.trained].map(lossesOf), holder = $("losses");
  const before = operated() ? trained : [], n = Math.max(losses.length, trained.length);
  const labels = TOKENIZER.encode(state.text).slice(0, n).map(TOKENIZER.label);
  const step = Math.max(11, Math.min(24, (holder.clientWidth - 50) / n));
  const { font, room } = labelled(labels, step), left = 34, high = 90, bottom = 102;
  const svg = picture(holder, left + n * step + 8, bottom + room + 6, "Loss of each token, as bars");
  const most = Math.max(4, ...[...losses, ...before].filter((loss) => loss !== undefined));
  const y = (loss) => bottom - high * loss / most;
  for (let loss = 0; loss <= most; loss += most > 8 ? 4 : 2) {
    line(svg, left, y(loss), left + n * step, y(loss));
    write(svg, loss, left - 6, y(loss) + 4, { "text-anchor": "end", fill: GREY });
  }
  labels.forEach((label, i) => {
    const x = left + i * step, height = bottom - y(losses[i] ?? 0);
    const turned = { transform: `translate(${x + step * 0.66} ${bottom + 6}) rotate(-90)` };
    box(svg, x + 1, bottom - height, step - 3, height, { fill: LIGHT });
    if (before[i] !== undefined) {
      line(svg, x, y(before[i]), x + step - 1, y(before[i]), { stroke: INK, "stroke-width": 2 });
    }
    add(svg, "text", { ...font, ...turned, "text-anchor": "end" }, short(label));
  });
  $("ticks").hidden = !operated();
}

// A card a model, with all its heads as a square of cells, a row a block.
function showModels() {
  for (const name of NAMES) {
    const card = $(`model-${name}`), [holder, , words] = card.children, result = results.byName[name];
    card.setAttribute("aria-pressed", name === state.model);
    if (!result) continue; // not yet
    holder.replaceChildren();
    const { H } = configOf(name), shares = sinkOf(result), rows = shares.length / H;
    const another = !(name in DATA.models) && !DATA.sentences.includes(state.text);
    words.textContent = `${above(shares)} of ${shares.length} heads`
      + (another ? ", on its own text" : "")
      + (placeOfFixed(result) ? ` on <fix>, ${above(result.alpha)} on place 1` : "");
    const svg = picture(holder, H * 10, rows * 10, "");
    Object.entries({ width: 60, height: 60, preserveAspectRatio: "none", "aria-hidden": true })
      .forEach(([attribute, value]) => svg.setAttribute(attribute, value));
    squares(svg, rows, H, 10, (row, column) => shares[row * H + column]);
  }
}

function showControls(T) {
  for (const name of ["drop", "hide", "flat", "bos"]) $(name).checked = state[name];
  for (const name of ["element", "threshold"]) {
    set(name, { value: state[name] }, state[name].toFixed(2));
  }
  $("own-key").hidden = !configOf().star;
  $("sample").value = [...DATA.samples, ...DATA.sentences].indexOf(state.text);
  if ($("text").value !== state.text) $("text").value = state.text;
  if (!isLive()) return;
  const { fixed } = configOf(), steps = stepsOf(state.model), step = stepOf(state.model);
  const place = fixed ? state.place : "(this model has none)";
  set("step", { max: steps.length - 1, value: steps.indexOf(step) },
    `${step.toLocaleString("en")} steps`);
  set("place", { max: T + state.drop, value: state.place, disabled: !fixed }, place);
  $("undo").disabled = !operated();
}

// A slider, and what says its value: to eyes and to a screen reader.
function set(id, values, words) {
  Object.assign($(id), values).setAttribute("aria-valuetext", words);
  $(`${id}-value`).textContent = words;
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

// ---- controls

function buildModels() {
  $("models").append(...NAMES.map((model) => {
    const [title, , head, bos = 0] = DATA.words[model], picture = make("span", { className: "figure" });
    const onclick = () => choose({ model, head: head ?? state.head, bos });
    return make("button", { type: "button", id: `model-${model}`, onclick }, picture,
      make("strong", {}, title), make("output", {}));
  }));
}

function buildTexts() {
  const texts = [...DATA.samples, ...DATA.sentences], [ours, everyday] = $("sample").children;
  texts.forEach((text, value) => {
    const group = value < DATA.samples.length ? ours : everyday;
    group.append(make("option", { value, textContent: text }));
  });
  $("sample").onchange = ({ target }) => choose({ text: texts[target.value] });
  $("text").oninput = ({ target }) => choose({ text: target.value });
}

function buildControls() {
  $("step").oninput = ({ target }) => choose({ step: stepsOf(state.model)[target.value] });
  for (const name of ["place", "element", "threshold", "query", "head"]) {
    $(name).oninput = ({ target }) => choose({ [name]: Number(target.value) });
  }
  for (const name of ["drop", "hide", "flat", "bos"]) {
    $(name).onchange = ({ target }) => choose({ [name]: Number(target.checked) });
  }
  $("undo").onclick = () => choose(UNTOUCHED);
  for (const button of document.querySelectorAll(".play")) button.onclick = play;
  $("save").onclick = saveMap;
  $("link").onclick = async ({ target }) => {
    const copied = navigator.clipboard?.writeText(location.href).then(() => "Copied");
    target.textContent = await copied?.catch(() => null) ?? "It is in the address bar";
  };
  addEventListener("hashchange", () => {
    if (!location.hash.includes("=")) return; // a section of the page
    readAddress();
    showTour();
    compute();
  });
  addEventListener("resize", show);
}

function buildToy() {
  const names = ["a key of its own", "key 1", "key 2", "key 3", "key 4"];
  const put = makeToy($("toy-table"), { names, low: -4, high: 4 });
  $("nothing").onclick = () => put([0, -3, -3.5, -2.5, -3]);
  $("match").onclick = () => put([0, -3, 3, -2.5, -3]);
  $("nothing").click();
}

// From the first checkpoint to the last.
async function play({ target }) {
  target.disabled = true;
  for (const step of stepsOf(state.model)) {
    await choose({ step });
    await new Promise((wake) => { setTimeout(wake, 700); });
  }
  target.disabled = false;
}

// Offer the map as a file of its own.
function saveMap() {
  const text = new XMLSerializer().serializeToString($("map").firstChild);
  const href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  make("a", { href, download: `${state.model}_head_${state.head}.svg` }).click();
  URL.revokeObjectURL(href);
}
