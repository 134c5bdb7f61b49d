// The page: its state, which its address holds too; what it asks of the worker; what it shows.

const $ = (id) => document.getElementById(id);
const trouble = (words) => { $("trouble").textContent = words; };
DATA = readData(); // in place of the little that the first map needs
const NAMES = [...Object.keys(DATA.models), ...Object.keys(DATA.real)];
const OWN = Object.keys(DATA.models).length === 0; // the page of a user's model, which was recorded
const GROWN = "grown"; // the model that is trained in the page
const UNTOUCHED = { drop: 0, hide: 0, flat: 0, place: 1, element: 1 }; // no operation
const OWN_KEY = CONTEXT + 1; // `state.key` of a head's own key; 0: no key is followed
const FIRST = { model: NAMES[0], step: 12000, head: DATA.words[NAMES[0]]?.head ?? 1,
  text: OWN ? DATA.sentences[0] : DATA.samples[0], query: 9, key: 0, bos: 0, threshold: null,
  tour: 0, embed: 0, lang: "", ...UNTOUCHED }; // heads, queries, keys and places count from 1
const LIMITS = { step: [0, 1e6], head: [1, 10000], query: [1, CONTEXT], key: [0, OWN_KEY],
  place: [1, CONTEXT], element: [0, 1], threshold: [0.05, 0.95], tour: [0, DATA.tour.length],
  drop: [0, 1], hide: [0, 1], flat: [0, 1], bos: [0, 1], embed: [0, 1] };
const state = { ...FIRST };

// What the page holds. If it was damaged on its way, a line says so.
function readData() {
  try {
    return JSON.parse($("data").textContent);
  } catch ({ message }) {
    trouble(`The page is damaged: its data cannot be read (${message}). Get it anew.`);
    addEventListener("error", (event) => event.preventDefault()); // the line says it, not the console
    throw new Error("no data");
  }
}

const isLive = (name = state.model) => name in DATA.models; // of the others maps were stored
const configOf = (name = state.model) => DATA.models[name]?.config ?? DATA.real[name];
const stepsOf = (name) => Object.keys(DATA.models[name].sets).map(Number);
const stepOf = (name) => stepsOf(name).findLast((step) => step <= state.step) ?? stepsOf(name)[0];
// Until one drags it, the paper's; of a model that reads only short texts a higher one.
const thresholdOf = (name = state.model) => state.threshold ?? DATA.words[name]?.threshold ?? 0.3;

// ---- words: those of a language, where it has them, else English

const language = () => (state.lang in DATA.texts ? state.lang
  : Object.keys(DATA.texts).find((one) => navigator.language.startsWith(one)) ?? "en");
const texts = (part) => ({ ...DATA.texts.en[part], ...DATA.texts[language()][part] });
const said = (name, values = {}) => say(texts("said")[name], values);
const wordsOf = (name) => ({ ...DATA.words[name], ...DATA.texts[language()].models?.[name] });
const inWords = (number) => number.toLocaleString(language());
const ENGLISH = { ...WORDS };

// English stands in the page itself.
function readWords() {
  for (const { dataset, innerHTML } of document.querySelectorAll("[data-say]")) {
    DATA.texts.en.page[dataset.say] = innerHTML;
  }
}

function writeWords() {
  const words = texts("page"), { alpha = 0, loss = 0 } = DATA.rounding ?? {};
  const rounding = { alpha: alpha.toFixed(3), loss: two(loss) };
  if (OWN) words.title = said("own_title", { name: DATA.words[NAMES[0]].title });
  document.documentElement.lang = language();
  Object.assign(WORDS, ENGLISH, DATA.texts[language()].draw);
  for (const holder of document.querySelectorAll("[data-say]")) {
    holder.innerHTML = say(words[holder.dataset.say], rounding);
  }
  for (const holder of document.querySelectorAll("[data-name]")) {
    holder.ariaLabel = words[holder.dataset.name];
  }
  $("as-in-training").label = said("as_in_training");
  $("sentences").label = said("sentences");
  $("now").replaceChildren(
    ...[...document.querySelectorAll("#try a")].map((link) => link.cloneNode(true)));
  for (const one of $("languages").children) one.ariaPressed = one.lang === language();
  for (const name of NAMES) nameCard(name);
}

// The operations that are on, in words.
const operations = () => (!isLive() ? [] : [
  state.drop && said("dropped"), state.hide && said("hidden"), state.flat && said("flattened"),
  configOf().fixed && state.place > 1 && said("placed", { place: state.place }),
  state.element < 1 && said("multiplied", { factor: two(state.element) }),
].filter(Boolean));
const operated = () => operations().length > 0;

// A visitor who came by no link sees one map, and no count before a guess.
const isFresh = () => document.body.classList.contains("fresh");
const setFresh = (fresh) => document.body.classList.toggle("fresh", fresh && !OWN);

// ---- the address

function addressOf() {
  const text = state.text.replace(/[\ud800-\udfff]/gu, "\ufffd"); // lone surrogates
  const parts = new URLSearchParams({ model: state.model, head: state.head, text });
  for (const name of Object.keys(LIMITS)) {
    if (state[name] !== FIRST[name]) parts.set(name, state[name]);
  }
  if (state.lang) parts.set("lang", state.lang);
  return `#${parts}`;
}

function writeAddress() {
  if (!isFresh()) history.replaceState(null, "", addressOf());
}

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  Object.assign(state, FIRST, { lang: state.lang, text: parts.get("text") ?? FIRST.text });
  if (NAMES.includes(parts.get("model"))) state.model = parts.get("model");
  if (parts.get("lang") in DATA.texts) state.lang = parts.get("lang");
  for (const [name, [least, most]] of Object.entries(LIMITS)) {
    const value = Number(parts.get(name) ?? NaN), whole = most > 1 ? Math.round(value) : value;
    if (whole >= least && whole <= most) state[name] = whole;
  }
  document.body.classList.toggle("embedded", state.embed === 1);
}

// ---- the worker, and the maps that were stored

const waiting = new Map(); // what resolves the promise of each request, by its number
let worker, requests = 0;

const workerOf = (id) =>
  new Worker(URL.createObjectURL(new Blob([id], { type: "text/javascript" })));

function startWorker() {
  worker = workerOf(`${$("model").textContent}; answerRequests();`);
  worker.onmessage = ({ data }) => waiting.get(data.number)(data);
  worker.onerror = ({ message }) => trouble(said("broken_worker", { message }));
  worker.postMessage({ models: DATA.models });
}

// Words as a model's own tokenizer cuts them: the grown one knows the first of all tokens only.
const TOKENIZERS = new Map();
function tokenizerOf(name) {
  const { vocabulary, merges } = DATA.tokenizer, V = configOf(name)?.V ?? vocabulary.length;
  if (!TOKENIZERS.has(V)) {
    const joined = V - (vocabulary.length - merges.length); // the others are bytes and special
    TOKENIZERS.set(V, makeTokenizer(vocabulary.slice(0, V), merges.slice(0, joined)));
  }
  return TOKENIZERS.get(V);
}

// One forward pass on the text. The sink is <fix>, wherever it stands, or else the first token.
// watch: the head whose numbers are asked for, from 0.
async function pass(name, edits, { watch = -1, step } = {}) {
  const { place, drop, hide, element, flat } = edits;
  if (!isLive(name)) return mapsOf(name);
  const { encode, label } = tokenizerOf(name), tokens = encode(state.text);
  const at = configOf(name).fixed ? place - 1 : -1, number = ++requests;
  const ids = arrange(tokens, at).slice(drop), T = ids.length;
  const sink = Math.max(0, ids.indexOf(FIXED));
  const answered = new Promise((resolve) => { waiting.set(number, resolve); });
  worker.postMessage({ number, set: `${name}/${step ?? stepOf(name)}`, config: configOf(name), ids, watch,
    edits: { hide, element, flat }, sink });
  const result = await answered;
  waiting.delete(number);
  if (result.error) throw new Error(result.error);
  if (result.watched) result.watched.head = watch + 1;
  const labels = ids.map(label);
  // The weights themselves: where a query spends 1, they are its shares.
  const weightIn = (head) => (i, j) =>
    result.spent[head * T + i] * result.maps[(head * T + i) * T + j];
  // The place of each token in the text, so that losses can be compared wherever <fix> (-1) stands.
  const places = arrange([...tokens.keys()], at, -1).slice(drop);
  return { ...result, ids, sink, labels, weightIn, places };
}

// The same of a recorded model, of which only maps of some texts were stored.
async function mapsOf(name) {
  const real = DATA.real[name], { texts: stored_, levels } = real;
  const sentence = Math.max(0, DATA.sentences.indexOf(state.text));
  const bos = name === state.model ? state.bos : DATA.words[name]?.bos ?? 0;
  const which = real.withBos ? 2 * sentence + bos : sentence;
  const { labels, alpha, ...rest } = stored_[which], size = (T) => T * (T + 1) / 2; // causal
  real.shades ??= new Uint8Array(await inflate(real.packed)); // of all its maps
  const sizes = stored_.map((text) => text.alpha.length * size(text.labels.length));
  const sum = (some) => some.reduce((total, one) => total + one, 0);
  if (real.shades.length !== sum(sizes)) throw new Error(`${name}: ${real.shades.length} shades`);
  const before = sum(sizes.slice(0, which)), T = labels.length;
  const weightIn = (head) => stored(real.shades, before + head * size(T), levels);
  return { ...rest, labels, alpha, sink: 0, weightIn };
}

// ---- the model as it is operated on and as it was trained, and then the others beside it

const results = { model: "", edited: null, trained: null, byName: {} };
let round = 0;

function noteOn(tokens) {
  const room = CONTEXT - (configOf().fixed ? 1 : 0);
  const even = evenShare(tokens + (configOf().fixed ? 1 : 0));
  if (!isLive()) return said("not_recorded");
  if (tokens < 3) return said("too_little");
  if (tokens > room) return said("too_long", { room });
  return said(even > 0.2 ? "few" : "tokens", { tokens, even: two(even) });
}

async function compute() {
  if (!isLive() && !DATA.sentences.includes(state.text)) state.text = DATA.sentences[0];
  const now = ++round, tokens = tokenizerOf(state.model).encode(state.text).length;
  writeAddress();
  $("note").textContent = noteOn(tokens);
  $("note").classList.toggle("warns", tokens < 18 && isLive()); // even attention is above 0.2 there
  if (tokens < 3 && isLive()) return;
  try {
    const watch = state.key ? state.head - 1 : -1;
    const edited = await pass(state.model, state, { watch });
    const trained = operated() ? await pass(state.model, UNTOUCHED) : edited;
    if (now !== round) return; // the state has changed meanwhile
    trouble("");
    Object.assign(results, { model: state.model, edited, trained });
    show();
  } catch ({ message }) {
    if (now === round) trouble(said("broken_weights", { message }));
    return;
  }
  await askWhatComesNext(now);
  for (const name of NAMES) {
    if (now !== round) return;
    await computeCard(name, now);
  }
}

// A model that cannot be read has an empty card; a line tells why once it is chosen.
async function computeCard(name, now) {
  try {
    const result = name === state.model ? results.edited : await pass(name, state);
    if (now !== round) return;
    results.byName[name] = result;
    showCard(name);
  } catch ({ message }) {
    results.byName[name] = null;
  }
}

// A change of what is computed, and one of what is shown of it.
function change(values) {
  setFresh(false);
  $("tried").hidden = true;
  Object.assign(state, values);
  return compute();
}

function look(values) {
  setFresh(false);
  Object.assign(state, values);
  writeAddress();
  const { watched } = results.edited ?? {};
  const missing = state.key && isLive() && watched?.head !== state.head;
  show();
  NAMES.forEach(showCard);
  if (missing) compute();
}

// ---- numbers

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const above = (alpha, threshold = thresholdOf()) =>
  alpha.filter((share) => share > threshold).length;
// How many heads rest on a key of their own.
const ownOf = (result, name) =>
  (configOf(name).star ? above(starOf(result), thresholdOf(name)) : 0);
const starOf = ({ stars, labels: { length: T }, alpha }) =>
  alpha.map((_, head) => mean(stars.subarray(head * T, (head + 1) * T)));

// The loss is a mean over the tokens of the text that are predicted both before and after.
const inBoth = (place) =>
  [results.edited, results.trained].every(({ places }) => places.indexOf(place) > 0);
const lossOf = ({ losses, places }) => mean(losses.filter((_, t) => inBoth(places[t + 1])));

// The probability of the text's next token after the query, where that is the same token.
function nextShare({ places, losses }) {
  const [now, next] = results.edited.places?.slice(state.query - 1, state.query + 1) ?? [];
  const at = places?.indexOf(now);
  return at >= 0 && next !== undefined && places[at + 1] === next && Math.exp(-losses[at]);
}

// ---- what is shown

function show() {
  if (results.model !== state.model || !results.edited) return; // not yet
  const { edited: { labels, alpha, sink }, trained } = results;
  state.query = Math.min(state.query, labels.length);
  state.head = Math.min(state.head, alpha.length);
  if (state.key === OWN_KEY ? !configOf().star : state.key > state.query) state.key = 0;
  document.body.classList.toggle("is-live", isLive());
  document.body.classList.toggle("is-operated", operated());
  document.body.classList.toggle("has-own-key", Boolean(configOf().star));
  document.body.classList.toggle("is-sigmoid", Boolean(configOf().sigmoid));
  document.body.classList.toggle("has-bos", Boolean(configOf().withBos));
  $("about-model").textContent = wordsOf(state.model).about;
  const another = trained.labels[trained.sink]; // after a drop
  const found = above(trained.alpha);
  const before = !operated() ? "" : another === labels[sink] ? said("before", { found })
    : said("before_to", { found, token: another });
  const values = { found: above(alpha), all: alpha.length, before, token: labels[sink],
    threshold: two(thresholdOf()), own: ownOf(results.edited, state.model) };
  $("summary").textContent = (configOf().sigmoid ? said("summary_spent", values) : said("summary", values))
    + (configOf().star ? said("summary_own", values) : "");
  $("operated").textContent = said("operating", { operations: operations().join(", ") });
  $("operated").append(make("span", { className: "narrow" }, said("count", values)));
  showNumbers();
  showControls();
  showWords();
  if (!$("map").clientWidth) return; // behind the curtain
  showHeads();
  showMap();
  showFollowed();
}

function showNumbers() {
  const { edited, trained } = results;
  const rows = [["mean", ({ alpha }) => mean(alpha)],
    ["even", ({ labels, sink }) => evenShare(labels.length, sink)]];
  if (configOf().star) rows.push(["own_key", (one) => mean(starOf(one))]);
  if (configOf().sigmoid) rows.push(["spends", ({ spent }) => mean(spent)]);
  if (isLive()) rows.push([operated() ? "loss_both" : "loss", lossOf]);
  if ([edited, trained].every(nextShare)) rows.push(["next_share", nextShare]);
  const labels = { token: edited.labels[state.query - 1], next: edited.labels[state.query] };
  $("numbers").replaceChildren(...rows.map(([name, value]) => {
    const before = operated() && said("value_before", { value: two(value(trained)) });
    return make("tr", {}, make("th", { scope: "row" }, said(name, labels)),
      make("td", {}, two(value(edited))), make("td", { className: "before" }, before || ""));
  }));
}

function showHeads() {
  const { edited, trained } = results, holder = $("heads");
  if (!holder.clientWidth) return; // the counts are still to be guessed
  const headAt = drawHeads(holder, { ...configOf(), ...edited, head: state.head - 1,
    star: configOf().star && starOf(edited), rings: operated() ? trained.alpha : null,
    threshold: thresholdOf(), T: edited.labels.length, width: holder.clientWidth });
  holder.onclick = (event) => {
    if (headAt(event) >= 0) look({ head: headAt(event) + 1 });
  };
}

// What one head's map shows, as draw.js wants it.
function viewOf(head) {
  const { labels, alpha, stars, weightIn, sink } = results.edited, at = head * labels.length;
  const steps = isLive() ? said("steps_of", { steps: inWords(stepOf(state.model)) }) : "";
  const [name] = nameOf(head, configOf().H, alpha).split(":");
  const title = said("map_title", { model: wordsOf(state.model).title, steps, head: name,
    share: two(alpha[head]), token: labels[sink] });
  const edits = operations().map((words) => `\n${words}`).join("");
  return { labels, share: weightIn(head), query: state.query - 1, sink, title: title + edits,
    starAt: configOf().star && ((i) => stars[at + i]) };
}

const keyFrom0 = () => (state.key === OWN_KEY ? STAR : state.key ? state.key - 1 : undefined);

function showMap() {
  const { labels, spent } = results.edited, holder = $("map"), T = labels.length;
  const head = state.head - 1, view = viewOf(head), query = state.query - 1;
  const at = drawMap(holder, { ...view, key: keyFrom0(), width: holder.clientWidth });
  holder.onpointermove = (event) => {
    const under = at(event);
    if (under.query === query || state.key) return; // one key is followed until it is let go
    if (isFresh()) showRow(under.query);
    else look({ query: under.query + 1 });
  };
  holder.onclick = (event) => {
    const under = at(event);
    if (under.key === undefined || state.tour) return;
    follow({ query: under.query + 1, key: under.key === STAR ? OWN_KEY : under.key + 1 });
  };
  const sum = !configOf().sigmoid ? "" // a recorded model's rows sum to 1
    : said("in_all", { spent: two(spent[head * T + query]) });
  const list = mostOf(view), values = { query: state.query, token: labels[query], list };
  $("looks").textContent = said("looks", values) + sum;
}

// The numbers of a cell stand at the window's lower edge: the cell stays above them.
let chosen = false; // a cell, just now: its numbers are still to come
function follow(values) {
  chosen = true;
  look(values);
}

function keepInView() {
  const frame = $("map").firstChild.lastChild.getBoundingClientRect();
  const over = frame.bottom + 8 - $("follow").getBoundingClientRect().top;
  if (chosen && over > 0) scrollBy(0, over);
  chosen = false;
}

// Before the guess one may point at rows too: that alone opens no count.
function showRow(query) {
  state.query = query + 1;
  set("query", { value: state.query }, said("query_of",
    { query: state.query, token: results.edited.labels[query] }));
  showMap();
}

// A model's card, with all its heads as a square of cells, a row a block.
function showCard(name) {
  if (!results.byName[name]) return; // not yet
  const { alpha } = results.byName[name], { H } = configOf(name), rows = alpha.length / H;
  const [holder, , words] = $(`model-${name}`).children, threshold = thresholdOf(name);
  const values = { found: above(alpha, threshold), all: alpha.length,
    own: ownOf(results.byName[name], name) };
  words.textContent = said("card", values)
    + (values.own ? said("card_own", values) : "");
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
    said("query_of", { query: state.query, token: labels[state.query - 1] }));
  set("key", { max: state.query, value: state.key === OWN_KEY ? 0 : state.key }, keyInWords());
  set("threshold", { value: thresholdOf() }, two(thresholdOf()));
  set("element", { value: state.element }, two(state.element));
  for (const name of NAMES) $(`model-${name}`).ariaPressed = name === state.model;
  $("sample").value = state.text;
  if ($("sample").selectedIndex < 0) $("sample").value = "";
  $("undo").disabled = !operated();
  $("as-in-training").disabled = $("text").readOnly = !isLive();
  if ($("text").value !== state.text) $("text").value = state.text;
  showLink();
  if (!isLive()) return;
  const steps = stepsOf(state.model), step = stepOf(state.model);
  set("step", { max: steps.length - 1, value: steps.indexOf(step) },
    said("steps", { steps: inWords(step) }));
  set("place", { max: labels.length + state.drop, value: state.place, disabled: !fixed },
    fixed ? state.place : said("no_place"));
}

function keyInWords() {
  const key = keyFrom0(), { share, starAt, labels, query } = viewOf(state.head - 1);
  if (key === undefined) return said("no_key");
  if (key === STAR) return said("key_own", { share: two(starAt(query)) });
  return said("key_of", { key: state.key, token: labels[key], share: two(share(query, key)) });
}

// A slider, and what says its value: to eyes and to a screen reader.
function set(id, values, words) {
  Object.assign($(id), values).setAttribute("aria-valuetext", words);
  $(`${id}-value`).textContent = words;
}

// ---- controls

function addCard(model) {
  const onclick = () => {
    const { head = 1, bos = 0 } = DATA.words[model] ?? {};
    change({ model, head, bos, key: 0 });
  };
  const cells = make("span", { className: "figure", ariaHidden: true });
  const card = make("button", { type: "button", id: `model-${model}`, onclick },
    cells, make("strong", {}), make("output", {}));
  $("models").append(card);
  nameCard(model);
}

function nameCard(model) {
  const card = $(`model-${model}`);
  if (card) card.children[1].textContent = wordsOf(model).title;
}

function buildControls() {
  document.body.classList.toggle("is-own", OWN);
  NAMES.forEach(addCard);
  for (const [lang, { language: name }] of Object.entries(DATA.texts)) {
    const onclick = () => speak(lang);
    $("languages").append(make("button", { type: "button", lang, onclick }, name));
  }
  if (Object.keys(DATA.texts).length < 2) $("languages").hidden = true;
  const option = (text) => make("option", { value: text }, text);
  $("as-in-training").hidden = OWN;
  if (!OWN) $("as-in-training").append(...DATA.samples.map(option));
  $("sentences").append(...DATA.sentences.map(option));
  for (const name of ["sample", "text"]) {
    $(name).oninput = ({ target }) => change({ text: target.value, key: 0 });
  }
  $("step").oninput = ({ target }) => change({ step: stepsOf(state.model)[target.value] });
  for (const name of ["place", "element"]) {
    $(name).oninput = ({ target }) => change({ [name]: Number(target.value) });
  }
  for (const name of ["threshold", "query", "head", "key"]) {
    $(name).oninput = ({ target }) => look({ [name]: Number(target.value) });
  }
  for (const name of ["drop", "hide", "flat", "bos"]) {
    $(name).onchange = ({ target }) => change({ [name]: Number(target.checked) });
  }
  for (const button of document.querySelectorAll(".undo")) {
    button.onclick = () => change(UNTOUCHED);
  }
  for (const button of document.querySelectorAll(".play")) button.onclick = play;
  $("map").onkeydown = moveThroughMap;
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
  leadToNotebooks();
}

function speak(lang) {
  state.lang = lang;
  nameGrown();
  writeWords();
  writeTour();
  showGrowth();
  writeAddress();
  show();
  NAMES.forEach(showCard);
}

// Arrow keys in the map: to another query or key; Escape lets the key go.
function moveThroughMap(event) {
  const { query, key } = state, { labels } = results.edited ?? { labels: [] };
  const first = configOf().star ? OWN_KEY : 1;
  const left = key === 1 ? first : key === OWN_KEY ? key : Math.max(1, key - 1);
  const right = key === OWN_KEY ? 1 : Math.min(query, key + 1);
  const moves = { ArrowUp: { query: Math.max(1, query - 1) },
    ArrowDown: { query: Math.min(labels.length, query + 1) },
    ArrowLeft: { key: left }, ArrowRight: { key: right }, Escape: { key: 0 } };
  if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  follow(moves[event.key]);
}

// Notebooks are pages in the book. A page that is a file by itself can only say where they are.
function leadToNotebooks() {
  const inBook = location.protocol !== "file:" || location.pathname.includes("/book/");
  addEventListener("click", (event) => {
    const { target } = event;
    if (!target.href?.endsWith(".ipynb")) return;
    if (inBook) target.href = target.href.replace(/\.ipynb$/, ".html");
    else {
      event.preventDefault();
      const file = target.href.split("/").at(-1);
      target.replaceWith(said("notebook", { text: target.textContent, file }));
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

// From the first checkpoint to the last. One who wants less motion sees fewer, for longer.
async function play({ target }) {
  const { tour, model } = state, calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  target.disabled = true;
  const steps = stepsOf(model), every = Math.ceil(steps.length / (calm ? 3 : 20));
  for (const step of steps.filter((_, i) => (steps.length - 1 - i) % every === 0 || i === 0)) {
    if (state.tour !== tour || state.model !== model) break; // one has gone on meanwhile
    await change({ step });
    await new Promise((wake) => { setTimeout(wake, calm ? 2000 : 700); });
  }
  target.disabled = false;
}
