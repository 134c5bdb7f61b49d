// One token followed through one head: from a query and a key to the weight, and to what is summed.

const sub = (letter, index) => make("i", {}, letter, make("sub", {}, String(index)));
// With a minus that is as long as a plus, and none before a zero.
const signed = (number) => two(number).replace(/^-(?=[0.,]+$)/, "").replace("-", "−");
const nameOfKey = (key) => (key === STAR ? "*" : key + 1);

// A table of numbers, a column a dimension, with a bar over each; the last column is their sum.
// oneScale: bars of all rows can be compared, and not only those of one.
function vectors(rows, oneScale = false) {
  const largest = (values) => Math.max(...values.map(Math.abs), 1e-9);
  const ofAll = largest(rows.flatMap(({ values }) => values));
  const cell = (value, most) => {
    const words = signed(value), below = words.startsWith("−");
    const made = make("td", { className: below ? "minus" : "" }, words);
    made.style.setProperty("--size", Math.abs(value) / most);
    return made;
  };
  const table = make("table", { className: "vectors" });
  for (const { name, values, total } of rows) {
    const most = oneScale ? ofAll : largest(values);
    const cells = values.map((value) => cell(value, most));
    const sum = make("td", { className: "total" }, total === undefined ? "" : `Σ ${signed(total)}`);
    table.append(make("tr", {}, make("th", { scope: "row" }, name), ...cells, sum));
  }
  return make("div", { className: "figure", tabIndex: 0, role: "region", ariaLabel: "" }, table);
}

// A row of the head's map: its keys, those that count most and the one that is followed.
function rowOfKeys(keys, chosen, columns) {
  const first = [...keys].sort((a, b) => b.weight - a.weight).slice(0, 6);
  const followed = keys.find(({ key }) => key === chosen);
  if (followed && !first.includes(followed)) first.push(followed);
  const rest = keys.filter((one) => !first.includes(one));
  const table = make("table", { className: "keys" });
  table.append(make("tr", {}, make("th", {}), ...columns.map(([name]) => make("th", { scope: "col" }, name))));
  for (const one of first) {
    const cells = columns.map(([, of]) => make("td", {}, of(one)));
    const row = make("tr", { className: one.key === chosen ? "chosen" : "" },
      make("th", { scope: "row" }, one.label), ...cells, make("td", {}, lengthOf(one.weight)));
    table.append(row);
  }
  if (rest.length) {
    const weight = rest.reduce((sum, one) => sum + one.weight, 0);
    table.append(make("tr", {}, make("th", { scope: "row" }, said("follow_rest", { count: rest.length })),
      ...columns.map(([, , ofRest]) => make("td", {}, ofRest ? two(weight) : "")),
      make("td", {}, lengthOf(weight))));
  }
  return table;
}

function lengthOf(share) {
  const length = make("span", { className: "bar" });
  length.style.width = `${Math.round(120 * Math.min(1, share))}px`;
  return length;
}

// A_{i,j} of block l and head h, as the paper writes it.
function weightName(query, key) {
  const { H } = configOf(), head = state.head - 1;
  const name = make("i", {}, "A");
  name.append(make("sup", {}, `${Math.floor(head / H) + 1},${head % H + 1}`));
  name.append(make("sub", {}, `${query + 1},${nameOfKey(key)}`));
  return name;
}

const formula = (...parts) => make("p", { className: "formula" }, ...parts);

function showFollowed() {
  const key = keyFrom0(), query = state.query - 1, { edited } = results;
  const { watched, labels } = edited;
  $("follow").hidden = key === undefined;
  if (key === undefined) return;
  const [head] = nameOf(state.head - 1, configOf().H, edited.alpha).split(":");
  const { share, starAt } = viewOf(state.head - 1), own = key === STAR;
  $("follow-title").textContent = said(own ? "follow_title_own" : "follow_title",
    { query: labels[query], i: state.query, key: labels[key], j: key + 1, head,
      weight: two(own ? starAt(query) : share(query, key)) });
  if (isLive() && watched?.head !== state.head) return; // not yet
  const made = isLive() ? steps(query, key, watched) : recordedSteps(query, key);
  $("follow-steps").replaceChildren(...made);
  keepInView();
}

// The four steps, with the numbers that the worker has sent of the head.
function steps(query, key, { q, k, v, out, star, gates }) {
  const { labels, weightIn, stars } = results.edited, { D, sigmoid, learned } = configOf();
  const T = labels.length, head = state.head - 1, share = weightIn(head);
  const rowAt = (rows, t) => [...rows.subarray(t * D, t * D + D)];
  const keyOf = (at) => (at === STAR ? [...star] : rowAt(k, at));
  const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  const ofQuery = rowAt(q, query), ofKey = keyOf(key);
  const weightOf = (at) => (at === STAR ? stars[head * T + query] : share(query, at));
  const hidden = (at) => state.hide && at === 0 && query > 0;
  const all = [...(star ? [STAR] : []), ...Array(query + 1).keys()].map((at) => ({ key: at,
    label: at === STAR ? said("follow_own") : `${labels[at]} (${at + 1})`, weight: weightOf(at),
    logit: dot(ofQuery, keyOf(at)) / Math.sqrt(D) })).filter((one) => !hidden(one.key));
  const product = dot(ofQuery, ofKey), logit = product / Math.sqrt(D), weight = weightOf(key);
  const j = nameOfKey(key), i = query + 1;
  const title = (name) => make("h3", {}, said(name));
  const logits = make("div", {}, title(learned ? "follow_vectors" : "follow_vectors_rotary"), vectors([
    { name: sub("q", i), values: ofQuery }, { name: sub("k", j), values: ofKey },
    { name: make("span", {}, sub("q", i), " · ", sub("k", j)), total: product,
      values: ofQuery.map((value, n) => value * ofKey[n]) }]), title("follow_logit"),
  formula(sub("s", `${i},${j}`), " = ", sub("q", i), " ", sub("k", j),
    make("sup", {}, "⊤"), ` / √`, sub("d", "h"), ` = ${signed(product)} / √${D} = `,
    make("b", {}, signed(logit))));
  const columns = [["s", (one) => signed(one.logit)], ["A", (one) => two(one.weight), true]];
  const row = make("div", {}, title(sigmoid ? "follow_row_sigmoid" : "follow_row"),
    hidden(key) ? make("p", {}, said("follow_hidden"))
      : weightFormula(query, key, all, logit, weight, sigmoid),
    make("div", { className: "figure" }, rowOfKeys(all, key, columns)));
  const sum = make("div", {}, title("follow_sum"));
  if (key === STAR) sum.append(make("p", {}, said("follow_zero")));
  const value = key === STAR ? Array(D).fill(0) : rowAt(v, key);
  const total = rowAt(out, query);
  sum.append(vectors([{ name: make("span", {}, said("follow_value"), make("sub", {}, String(j))), values: value },
    { name: said("follow_part"), values: value.map((one) => one * weight) },
    { name: said("follow_out"), values: total }], true), sumFormula(query, all));
  if (gates) sum.append(make("p", {}, said("follow_gate", { gate: two(gates[query]) })));
  return [logits, row, sum];
}

// A = e^s / sum of e^s, with the numbers in their places.
function weightFormula(query, key, all, logit, weight, sigmoid) {
  const name = weightName(query, key);
  if (sigmoid) {
    return formula(name, " = 1 / (1 + ", power(-logit), ") = ", make("b", {}, two(weight)));
  }
  const others = all.filter((one) => one.key !== key).sort((a, b) => b.logit - a.logit);
  const terms = [{ logit }, ...others.slice(0, 2)].flatMap((one, n) => [n ? " + " : "", power(one.logit)]);
  const more = others.length > 2 ? " + …" : "";
  return formula(name, " = ", power(logit), " / (", ...terms, `${more}) = `, make("b", {}, two(weight)));
}

const power = (exponent) => make("span", {}, "e", make("sup", {}, signed(exponent)));

// The output of the head: a sum over the keys, those with much weight written out.
function sumFormula(query, all) {
  const first = [...all].sort((a, b) => b.weight - a.weight).slice(0, 4);
  const terms = first.flatMap(({ key, weight }, n) =>
    [n ? " + " : "", `${two(weight)} `, sub("v", nameOfKey(key))]);
  const more = all.length > 4 ? " + …" : "";
  return formula("Σ", make("sub", {}, "j"), " ", make("i", {}, "A",
    make("sub", {}, `${query + 1},j`)), " ", sub("v", "j"), " = ", ...terms, more);
}

// Of a recorded model: weights, and the lengths of values.
function recordedSteps(query, key) {
  const { labels, weightIn, norms } = results.edited, { H } = configOf(), head = state.head - 1;
  const share = weightIn(head), lengths = norms?.[Math.floor(head / H)];
  const all = [...Array(query + 1).keys()].map((at) => ({ key: at, weight: share(query, at),
    label: `${labels[at]} (${at + 1})`, norm: lengths?.[at] }));
  const columns = [[said("follow_weight"), (one) => two(one.weight), true]];
  if (lengths) {
    columns.push([said("follow_norm"), (one) => two(one.norm)],
      [said("follow_product"), (one) => two(one.weight * one.norm)]);
  }
  return [make("div", {}, make("p", {}, said("follow_stored")),
    make("div", { className: "figure" }, rowOfKeys(all, key, columns)),
    formula(weightName(query, key), " = ", make("b", {}, two(share(query, key)))),
    sumFormula(query, all))];
}
