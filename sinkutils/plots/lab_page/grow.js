// Growing a model in the page: a worker trains it; its weights, every ten steps, are a film, and a
// model of the lab like the others.

const growth = { worker: null, running: false, config: null, curve: [], maps: [], seed: 0,
  seconds: 0, steps: 0, drawing: false, back: false }; // back: one looks at an earlier frame

const chosenKind = () => document.querySelector("[name=kind]:checked").value;

// A training starts anew with what is chosen now; it runs, or makes one step.
function startGrowth(running) {
  growth.worker?.terminate();
  const kind = chosenKind(), seed = Math.max(0, Math.floor(Number($("seed").value) || 0));
  $("seed").value = seed;
  const choice = { star: kind === "star", sigmoid: kind === "sigmoid", gate: kind === "gate",
    fixed: $("grow-fixed").checked };
  const { vocabulary, merges } = DATA.tokenizer;
  const source = ["model", "train"].map((id) => $(id).textContent).join(";\n");
  growth.worker = workerOf(`${source}; trainOnRequest();`);
  growth.worker.onmessage = ({ data }) => grown(data);
  growth.worker.onerror = ({ message }) => endGrowth(message);
  const config = { ...SHAPE, ...choice };
  Object.assign(growth, { running, config, kind, seed, curve: [], maps: [], steps: 0, seconds: 0,
    back: false });
  delete DATA.models[GROWN];
  growth.worker.postMessage({ choice, seed, packed: DATA.text, vocabulary, merges, running });
  $("grow-state").textContent = said("grow_reading");
  showGrowth();
}

// A message of the worker: where the training is, and the weights there.
function grown(message) {
  if (message.error) return endGrowth(message.error);
  const { step, loss, first, star, weights, seconds } = message, set = `${GROWN}/${step}`;
  Object.assign(growth, { seconds, steps: step });
  growth.curve.push({ step, loss, first, star });
  if (step === RECIPE.steps) growth.running = false;
  addGrown(step);
  worker.postMessage({ set, grown: weights });
  if (growth.back) $("frame-step").max = growth.curve.length - 1;
  else drawFilm();
  showGrowth();
}

function endGrowth(message) {
  growth.running = false;
  growth.worker?.terminate();
  growth.worker = null;
  trouble(said("broken_worker", { message }));
  showGrowth();
}

// The model as the lab has the others: a card, and a set of weights for each step of the film.
function addGrown(step) {
  const { config } = growth;
  DATA.models[GROWN] ??= { config, sets: {} };
  DATA.models[GROWN].sets[step] = {};
  growth.named = step;
  nameGrown();
  if (!NAMES.includes(GROWN)) NAMES.push(GROWN);
  if (!$(`model-${GROWN}`)) addCard(GROWN);
  if (state.model === GROWN) compute();
}

// What the grown model's card says, in the language of now.
function nameGrown() {
  const { config, kind, seed, named: step } = growth, V = config?.V;
  if (step === undefined) return;
  const first = config.fixed ? said("grown_fixed") : "";
  const values = { kind: texts("page")[`kind_${kind}`], first, seed, V,
    step: inWords(step), steps: inWords(RECIPE.steps) };
  DATA.words[GROWN] = { title: said("grown_title"), about: said("grown_about", values),
    head: DATA.words[GROWN]?.head ?? 1 };
}

function press() {
  if (!growth.worker || growth.steps === RECIPE.steps) return startGrowth(true);
  growth.running = !growth.running;
  growth.worker.postMessage({ running: growth.running });
  showGrowth();
}

function oneStep() {
  if (!growth.worker) return startGrowth(false);
  growth.running = false;
  growth.worker.postMessage({ running: false, one: true });
  showGrowth();
}

function anotherSeed() {
  $("seed").value = growth.worker ? growth.seed + 1 : Number($("seed").value) + 1;
  startGrowth(true);
}

// ---- what is shown

function showGrowth() {
  const { worker: at, running, curve, steps, seconds, seed } = growth, now = curve.at(-1);
  const resumed = at && steps < RECIPE.steps && !running;
  const ended = steps === RECIPE.steps ? "grow_restart" : "grow_start";
  $("grow").classList.toggle("empty", curve.length === 0);
  $("grow-start").textContent = said(running ? "grow_pause" : resumed ? "grow_on" : ended);
  $("grow-step").disabled = steps === RECIPE.steps;
  $("grow-operate").disabled = curve.length === 0;
  $("frame-step").disabled = curve.length === 0;
  if (!at && !now) {
    const weights = inWords(shapesOf({ ...SHAPE }).reduce((sum, [, r, c]) => sum + r * c, 0));
    $("grow-state").textContent = said("grow_ready", { weights });
  } else if (now) {
    const rate = seconds ? (steps / seconds).toFixed(0) : "0", still = RECIPE.steps - steps;
    const left = steps && still ? said("grow_left", { left: inWords(Math.ceil(still * seconds / steps)) }) : "";
    const star = growth.config.star ? said("grow_now_star", { star: now.star.toFixed(0) }) : "";
    const values = { step: inWords(now.step), steps: inWords(RECIPE.steps), rate, left, star,
      loss: two(now.loss), first: now.first.toFixed(0) };
    const done = steps === RECIPE.steps ? said("grow_done") : "";
    $("grow-state").textContent = said("grow_now", values) + done;
  }
  drawCurve();
}

// The film: the maps of all heads at a step, the newest unless one looks back.
async function drawFilm(frame = growth.curve.length - 1) {
  if (growth.drawing || frame < 0) return;
  growth.drawing = true;
  const { step } = growth.curve[frame], name = said("grow_film", { steps: inWords(step) });
  Object.assign($("frame-step"), { max: growth.curve.length - 1 });
  set("frame-step", { value: frame }, name);
  try {
    const result = await pass(GROWN, UNTOUCHED, { step });
    drawMaps($("film"), result, growth.config, name);
    // The lab shows the head first that rests most.
    const rests = growth.config.star ? starOf(result) : result.alpha;
    DATA.words[GROWN].head = rests.indexOf(Math.max(...rests)) + 1;
  } catch ({ message }) {
    trouble(said("broken_weights", { message }));
  }
  growth.drawing = false;
}

// Small maps side by side, without the names of tokens.
function drawMaps(holder, { labels, weightIn, stars, alpha }, { H, star, L }, name) {
  const T = labels.length, room = holder.clientWidth / 2 - 14; // on a phone two stand side by side
  const side = Math.max(2, Math.min(9, 200 / T, room / (T + 2))), gap = star ? 2 * side : 0;
  holder.replaceChildren(...alpha.keys().map((head) => {
    const place = make("figure", {});
    const svg = picture(place, gap + side * T + 4, side * T + 4, `${name}: ${nameOf(head, H, alpha)}`);
    if (star) {
      const own = add(svg, "g", { transform: "translate(2 2)" });
      squares(own, T, 1, side, (i) => stars[head * T + i]);
      box(svg, 1, 1, side + 1, side * T + 1, { fill: "none", stroke: DATA.colors.star, "stroke-width": 2 });
    }
    const maps = add(svg, "g", { transform: `translate(${2 + gap} 2)` }), share = weightIn(head);
    squares(maps, T, T, side, (i, j) => (j > i ? undefined : share(i, j)));
    box(svg, 1 + gap, 1, side + 1, side * T + 1,
      { fill: "none", stroke: DATA.colors.first, "stroke-width": 2 });
    const words = said("grow_head", { block: Math.floor(head / H) + 1, head: head % H + 1 });
    place.append(make("figcaption", {}, words));
    return place;
  }));
}

// Along training: the percentage of pairs that rest on the first token, and on the key of their own.
function drawCurve() {
  const holder = $("curve"), wide = Math.max(260, holder.clientWidth), high = 150;
  if (!holder.clientWidth) return;
  const { curve, config } = growth, left = 42, top = 22, { steps } = RECIPE;
  const svg = picture(holder, wide, high + top + 28, said("curve_title"));
  const x = (step) => left + (wide - left - 10) * step / steps, y = (share) => top + high * (1 - share / 100);
  write(svg, said("curve_title"), 4, 13, { "font-weight": "bold" });
  const small = { fill: TONES.grey, "font-size": 11 };
  for (const share of [0, 50, 100]) {
    line(svg, left, y(share), wide - 10, y(share));
    write(svg, `${share} %`, left - 4, y(share) + 4, { ...small, "text-anchor": "end" });
  }
  for (const step of [0, steps / 2, steps]) {
    write(svg, inWords(step), x(step), top + high + 16,
      { ...small, "text-anchor": step === steps ? "end" : "middle" });
  }
  write(svg, said("curve_step"), x(steps / 4), top + high + 16, small);
  if (!config) return;
  const kinds = [["first", said("curve_first"), DATA.colors.first]];
  if (config.star) kinds.push(["star", said("curve_star"), DATA.colors.star]);
  kinds.forEach(([kind, words, color], n) => {
    const points = curve.map((one) => `${x(one.step)},${y(one[kind])}`).join(" ");
    add(svg, "polyline", { points, fill: "none", stroke: color, "stroke-width": 2.5 });
    write(svg, words, left + 8, top + 14 + 15 * n, { class: kind, "font-weight": "bold" });
  });
}

function buildGrowth() {
  $("grow-start").onclick = press;
  $("grow-step").onclick = oneStep;
  $("grow-again").onclick = anotherSeed;
  $("frame-step").oninput = ({ target: { value, max } }) => {
    growth.back = Number(value) < Number(max);
    drawFilm(Number(value));
  };
  $("grow-operate").onclick = () => {
    change({ ...UNTOUCHED, model: GROWN, head: DATA.words[GROWN].head, key: 0, step: FIRST.step });
    $("lab").scrollIntoView();
  };
  for (const choice of document.querySelectorAll("[name=kind], #grow-fixed, #seed")) {
    choice.onchange = stopGrowth; // what runs is not what is chosen any more
  }
  showGrowth();
}

function stopGrowth() {
  growth.worker?.terminate();
  Object.assign(growth, { worker: null, running: false, curve: [], steps: 0 });
  showGrowth();
}
