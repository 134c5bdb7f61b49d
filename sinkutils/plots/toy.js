// A toy, in the notebooks and in the lab: the logits of one query, which one drags, and what
// softmax and sigmoid make of them. The first name is a key of the head's own, of value zero.

function makeToy(table, { names, low, high, values }) {
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const softmax = (logits) => {
    const powers = logits.map(Math.exp), total = sum(powers);
    return powers.map((power) => power / total);
  };
  // A notebook's own style of tables would paint dark rows into a light picture.
  const addRow = (...cells) => {
    const row = table.insertRow();
    row.style.background = "none";
    for (const content of cells) {
      const cell = row.insertCell();
      cell.style.cssText = "text-align:left;padding:2px min(12px, 1.5vw) 2px 0";
      cell.append(content);
    }
    return row;
  };
  // Narrow enough for a phone: names and titles wrap, sliders and bars are a share of the window.
  const outputs = () => [0, 1, 2].map(() => make("output", {}));

  table.style.cssText = "color:inherit;font-size:14px;border-collapse:collapse";
  const titles = addRow("", WORDS.logit, "", "softmax", "sigmoid",
    say(WORDS.with, { key: names[0] }));
  titles.style.fontWeight = "bold";
  const sliders = names.map((name) => make("input", { type: "range", min: low, max: high,
    step: values ? "any" : 0.5, ariaLabel: say(WORDS.logitOf, { key: name }), oninput: show }));
  const rows = names.map((name, i) => addRow(name, sliders[i], "", "", "", ""));
  sliders.forEach((slider) => { slider.style.width = "var(--slider, min(120px, 15vw))"; });
  const spent = outputs(), lengths = outputs();
  addRow(WORDS.spent, ...spent).cells[0].colSpan = 3;
  if (values) addRow(WORDS.length, ...lengths).cells[0].colSpan = 3;

  // How long the output is: the sum of all values, each times its weight.
  const lengthOf = (weights) => Math.hypot(
    ...values[0].map((_, d) => sum(weights.map((weight, i) => weight * values[i][d]))));

  function show() {
    const logits = sliders.map((slider) => Number(slider.value)), keys = logits.slice(1);
    const sigmoid = keys.map((s) => 1 / (1 + Math.exp(-s)));
    const columns = [[0, ...softmax(keys)], [0, ...sigmoid], softmax(logits)];
    rows.forEach((row, i) => {
      row.cells[2].textContent = sliders[i].ariaValueText = logits[i].toFixed(1);
      columns.forEach((weights, column) => {
        const bar = make("span", {}), width = `calc(${weights[i]} * var(--bar, min(80px, 7vw)))`;
        const background = i ? DATA.colors.other : DATA.colors.star;
        Object.assign(bar.style, { display: "inline-block", height: "12px", width, background });
        const isThere = i > 0 || column === 2; // only the last column has the key of its own
        row.cells[3 + column].style.whiteSpace = "nowrap";
        row.cells[3 + column].replaceChildren(bar, isThere ? ` ${two(weights[i])}` : "–");
      });
    });
    columns.forEach((weights, column) => {
      spent[column].textContent = two(sum(weights.slice(1)));
      if (values) lengths[column].textContent = two(lengthOf(weights));
    });
  }
  const put = (logits) => {
    sliders.forEach((slider, i) => { slider.value = logits[i]; });
    show();
  };
  // One step of gradient descent on half the squared length of the last column's output o, with a
  // rate of 1. Its slope on logit j is A_j o.(v_j - o). As the sliders have no step, small changes count too.
  put.descend = () => {
    const logits = sliders.map((slider) => Number(slider.value)), weights = softmax(logits);
    const o = values[0].map((_, d) => sum(weights.map((weight, i) => weight * values[i][d])));
    const along = values.map((v) => sum(o.map((x, d) => x * (v[d] - x))));
    put(logits.map((s, j) => s - weights[j] * along[j]));
  };
  return put;
}
