// What the models say next: after the query that is looked at, with and without its sink.

// Which operations stand beside each other, by the name of what is said of them.
const EFFECTS = { words_untouched: {}, words_hidden: { hide: 1 }, words_element: { element: 0 } };
const BESIDE = "k_bias"; // the model with a key of its own, which stands beside the others
const effects = { of: "", rows: [] };

// A pass for each row. Nothing is asked again as long as text and model stay.
async function askWhatComesNext(now) {
  if (!isLive()) return;
  const { model, text } = state, models = [model], rows = [];
  // The same tokens have the same places in both models.
  if (model !== BESIDE && isLive(BESIDE) && model !== GROWN) models.push(BESIDE);
  const of = JSON.stringify([text, ...models.map((name) => [name, stepOf(name)])]);
  if (effects.of !== of || model === GROWN) {
    for (const name of models) {
      for (const [row, edits] of Object.entries(EFFECTS)) {
        if (name !== model && row === "words_element") continue;
        const result = await pass(name, { ...UNTOUCHED, ...edits }).catch(() => null);
        if (result) rows.push({ name, row, result });
      }
      if (now !== round) return;
    }
    Object.assign(effects, { of, rows });
  }
  showWords();
}

// Whether what is set is an operation that has a row already.
const amongEffects = () => Object.values(EFFECTS).some((edits) =>
  Object.entries({ ...UNTOUCHED, ...edits }).every(([name, value]) => state[name] === value));

// What is said of each row after the token at `place` of the text (-1: <fix>).
function rowsAfter(place) {
  const all = [...effects.rows];
  if (operated() && !amongEffects()) {
    all.unshift({ name: state.model, row: "words_set", result: results.edited });
  }
  return all.flatMap(({ name, row, result }) => {
    const { ids, shares } = result.next, at = result.places.indexOf(place);
    if (at < 0) return []; // it was dropped
    const many = ids.length / result.places.length, { label } = tokenizerOf(name);
    const next = ids.slice(at * many, at * many + many)
      .map((id, n) => ({ token: label(id), share: shares[at * many + n] }));
    const really = at < result.losses.length
      && { token: result.labels[at + 1], share: Math.exp(-result.losses[at]) };
    const words = said(row);
    const title = name === state.model ? words
      : said("words_other", { title: wordsOf(name).title, row: words });
    return [{ row, title, next, really }];
  });
}

// The same of a recorded model.
function rowsRecorded() {
  const { said: recorded, labels } = results.edited, at = state.query - 1;
  if (at + 1 >= labels.length) return []; // what comes after the text is not known
  return recorded.map(({ row, next, shares }) => ({ row, title: said(row),
    next: next[at].map(([token, share]) => ({ token, share })),
    really: { token: labels[at + 1], share: shares[at] } }));
}

// The query (from 1, in the map) after which hiding the first token costs most; 0: none.
function worstQuery() {
  const { edited } = results;
  if (!isLive()) {
    const [before, hidden] = ["words_untouched", "words_hidden"].map(
      (row) => edited.said?.find((one) => one.row === row)?.shares);
    const costs = hidden?.map((share, t) => before[t] - share) ?? [];
    return costs.indexOf(Math.max(...costs)) + 1;
  }
  const [before, hidden] = effects.rows.map(({ result }) => result);
  if (!hidden) return 0;
  const costs = [...hidden.losses].map((loss, t) =>
    Math.exp(-before.losses[t]) - Math.exp(-loss));
  return edited.places.indexOf(before.places[costs.indexOf(Math.max(...costs))]) + 1;
}

function showWords() {
  const { edited } = results;
  if (!edited) return;
  const ready = isLive() ? effects.rows[0]?.name === state.model : Boolean(edited.said?.length);
  $("words").hidden = !ready;
  if (!ready) return;
  const token = edited.labels[state.query - 1], worst = worstQuery();
  $("words-worst").hidden = worst === 0;
  if (worst) {
    const at = { token: edited.labels[worst - 1], query: worst };
    $("words-worst").textContent = said("words_worst", at);
    $("words-worst").onclick = () => look({ query: worst, key: 0 });
  }
  const rows = isLive() ? rowsAfter(edited.places[state.query - 1]) : rowsRecorded();
  const [before, hidden] = ["words_untouched", "words_hidden"].map(
    (name) => rows.find(({ row }) => row === name)?.really);
  const lost = before && hidden ? said("words_lost",
    { before: two(before.share), hidden: two(hidden.share) }) : "";
  const right = edited.labels[state.query], after = right === undefined ? "words_last" : "words_after";
  $("words-after").textContent = said(after, { token, query: state.query, right }) + lost;
  const heads = ["", said("words_next"), said("words_really")]
    .map((words) => make("th", { scope: "col" }, words));
  const top = make("tr", { className: "heads" }, ...heads);
  $("words-table").replaceChildren(top, ...rows.map(({ title, next, really }) => {
    const shown = next.map((one) => bar(one, really && one.token === really.token));
    const end = really ? bar(really, true) : said("words_end");
    return make("tr", {}, make("th", { scope: "row" }, title), make("td", {}, ...shown),
      make("td", { className: "really" }, end));
  }));
}

// A token and its probability, as a bar and as a number. `right`: it is the one that comes.
function bar({ token, share }, right) {
  const length = make("span", { className: "bar" });
  length.style.width = `${100 * share}%`;
  return make("span", { className: right ? "word right" : "word" }, make("span", {}, length),
    make("b", { title: token }, token), ` ${two(share)}`);
}
