// Two real models as maps that were stored, and the toy.

const real = { model: "smollm2", text: 0, bos: 0, head: 1, query: 6 }; // heads, queries: from 1
const levels = {}; // by model: the shades of all maps, one after the other

async function showReal() {
  const { title, H, texts, packed } = DATA.real[real.model], which = 2 * real.text + real.bos;
  levels[real.model] ??= new Uint8Array(await inflate(packed));
  const { tokens, alpha } = texts[which];
  const size = (text) => text.tokens.length * (text.tokens.length + 1) / 2;
  const before = texts.slice(0, which).reduce((sum, text) => sum + alpha.length * size(text), 0);
  const start = before + (real.head - 1) * size(texts[which]), whole = DATA.palette.length - 1;
  const share = (i, j) => (levels[real.model][start + i * (i + 1) / 2 + j] / whole) ** 2;
  real.query = Math.min(real.query, tokens.length);
  $("real-summary").textContent = summary(alpha, tokens);
  for (const name of ["model", "text"]) $(`real-${name}`).value = real[name];
  $("real-bos").checked = real.bos;
  showView("real-", { title, H, alpha, labels: tokens, share, head: real.head - 1,
    query: real.query - 1 }, chooseReal);
}

// Another model begins with a head that has a sink and looks elsewhere too.
function chooseReal(values) {
  Object.assign(real, values);
  const { alpha } = DATA.real[real.model].texts[2 * real.text + 1];
  const far = alpha.map((share) => Math.abs(share - 0.6));
  if ("model" in values) real.head = 1 + far.indexOf(Math.min(...far));
  return showReal();
}

function buildReal() {
  $("real-model").append(...Object.entries(DATA.real).map(([name, { title }]) => option(name, title)));
  $("real-text").append(...DATA.sentences.map((text, i) => option(i, text)));
  $("real-model").onchange = ({ target }) => chooseReal({ model: target.value });
  $("real-bos").onchange = ({ target }) => chooseReal({ bos: Number(target.checked) });
  for (const name of ["text", "head", "query"]) {
    $(`real-${name}`).oninput = ({ target }) => chooseReal({ [name]: Number(target.value) });
  }
  chooseReal({ model: real.model });
}

// ---- the toy: the logits of a head's own key and of four keys, and what each operation makes of them

const KEYS = ["own key", "key 1", "key 2", "key 3", "key 4"];
const NOTHING = [0, -3, -3.5, -2.5, -3], MATCH = [0, -3, 3, -2.5, -3];

function softmax(logits) {
  const powers = logits.map(Math.exp), sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

function showToy(sliders) {
  const logits = sliders.map((slider) => Number(slider.value)), keys = logits.slice(1);
  const shares = [softmax(keys), softmax(logits), keys.map((s) => 1 / (1 + Math.exp(-s)))];
  const spent = shares.map((column) => column.slice(-4).reduce((a, b) => a + b).toFixed(2));
  const bar = (share = 0, i) => {
    const style = `width:${80 * share}px;background:${i ? GREY : DATA.colors.star}`;
    return make("span", {}, make("i", { style }), share ? share.toFixed(2) : "");
  };
  const rows = KEYS.map((name, i) => [name, sliders[i], logits[i].toFixed(1),
    ...shares.map((column) => bar(column.at(i - KEYS.length), i))]);
  const titles = ["", "logit", "", "softmax", "softmax with an own key", "sigmoid"];
  table($("toy-table"), [titles, ...rows, ["spent on the four keys", "", "", ...spent]]);
  $("toy-summary").textContent = `On the four keys softmax spends ${spent[0]}, softmax with a key of its `
    + `own ${spent[1]}, and the sigmoid ${spent[2]}.`;
}

function buildToy() {
  const sliders = KEYS.map((name) => make("input", { type: "range", min: -4, max: 4, step: 0.5 }));
  const put = (logits) => {
    sliders.forEach((slider, i) => { slider.value = logits[i]; });
    showToy(sliders);
  };
  sliders.forEach((slider, i) => {
    slider.setAttribute("aria-label", `logit of ${KEYS[i]}`);
    slider.oninput = () => { showToy(sliders); slider.focus(); };
  });
  $("nothing").onclick = () => put(NOTHING);
  $("match").onclick = () => put(MATCH);
  put(NOTHING);
}
