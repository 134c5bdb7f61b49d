// What interactive.py puts beside a still picture: the same, drawn anew by draw.js, with controls. It stands
// in a function of (root, kind, DATA): the figure element, one of KINDS, and what that needs.

const image = root.querySelector("img"), controls = document.createElement("div");

function slider(label, count, value, changed) {
  const input = document.createElement("input"), holder = document.createElement("label");
  Object.assign(input, { type: "range", min: 0, max: count - 1, value });
  input.oninput = () => changed(Number(input.value));
  holder.append(`${label} `, input);
  controls.append(holder);
  return input;
}

function button(label, pressed) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", textContent: label });
  made.onclick = () => pressed(made);
  controls.append(made);
}

// Put live pictures and the controls in the place of the still one; only now, when nothing can go wrong.
function replaceStill(...pictures) {
  const live = document.createElement("div");
  live.style.cssText = "display:flex;flex-wrap:wrap;gap:4px 16px";
  live.append(...pictures);
  controls.className = "controls";
  controls.style.cssText = "display:flex;flex-wrap:wrap;gap:.4em 1.4em;align-items:center;margin:.3em 0";
  root.querySelector(".still").replaceWith(controls);
  image.parentElement.replaceWith(live);
}

function place() {
  const holder = document.createElement("div");
  holder.style.cssText = "overflow-x:auto;max-width:100%";
  return holder;
}

const KINDS = {
  // Choose a head by its alpha_1, see its map, follow a query.
  async explorer() {
    const { H, blocks, T, tokens, alpha, name, packed } = DATA;
    const shades = new Uint8Array(await inflate(packed));
    const heads = place(), map = place(), words = document.createElement("p");
    const count = alpha[0].length;
    let text = 0, head = DATA.head, query = T - 1, headAt, queryAt;
    const show = () => {
      const share = stored(shades, (text * count + head) * T * (T + 1) / 2);
      const title = `${name}\n${nameOf(head, H, alpha[text], blocks[Math.floor(head / H)])}`;
      const view = { labels: tokens[text], share, query, title, width: 440 };
      const all = { alpha: alpha[text], H, blocks, head, T, threshold: 0.3, width: 280 };
      headAt = drawHeads(heads, all);
      queryAt = drawMap(map, view);
      words.textContent = `Query ${query + 1}, “${tokens[text][query]}”. It gives ${mostOf(view)}.`;
      // What a screen reader says in place of the sliders' bare numbers.
      ofHead.ariaValueText = nameOf(head, H, alpha[text], blocks[Math.floor(head / H)]);
      ofQuery.ariaValueText = `${query + 1}, “${tokens[text][query]}”`;
      if (ofText) ofText.ariaValueText = `${text + 1} of ${tokens.length}`;
    };
    const ofHead = slider("head", count, head, (value) => { head = value; show(); });
    const ofQuery = slider("query", T, query, (value) => { query = value; show(); });
    const change = (value) => { text = value; show(); };
    const ofText = tokens.length > 1 ? slider("text", tokens.length, 0, change) : null;
    heads.onclick = (event) => {
      if (headAt(event) < 0) return;
      ofHead.value = head = headAt(event);
      show();
    };
    map.onpointermove = map.onclick = (event) => {
      const { query: under } = queryAt(event);
      if (under === query) return;
      ofQuery.value = query = under;
      show();
    };
    show();
    const left = place();
    left.append(heads, words);
    left.style.width = "280px";
    replaceStill(left, map);
  },

  // Every head of each run along training; rings: where it ends.
  film() {
    const { steps, runs, key, color } = DATA, end = steps.length - 1, holders = runs.map(place);
    const titles = runs.map(() => document.createElement("strong"));
    const now = document.createElement("output");
    const name = `Attention of every head to ${key}`;
    for (const title of titles) {
      title.style.cssText = "display:block;font-size:13px;white-space:pre-line";
    }
    const show = (frame) => {
      runs.forEach(({ name: run, H, frames, means }, i) => {
        const all = { alpha: frames[frame], rings: frames[end], H, threshold: 0.3, width: 356 };
        drawHeads(holders[i], { ...all, name, color });
        titles[i].textContent = `${run}\nmean ${means[frame].toFixed(2)}`;
        holders[i].prepend(titles[i]);
      });
      now.textContent = `step ${steps[frame].toLocaleString("en")}`;
      input.ariaValueText = now.textContent;
    };
    const input = slider("training", steps.length, end, show);
    let timer = 0;
    const stop = (made) => {
      timer = clearInterval(timer);
      made.textContent = "play";
    };
    button("play", (made) => {
      if (timer) {
        stop(made);
        return;
      }
      if (Number(input.value) === end) input.value = 0;
      made.textContent = "stop";
      timer = setInterval(() => {
        show(Number(input.value));
        if (Number(input.value) === end || !root.isConnected) stop(made);
        else input.value = Number(input.value) + 1;
      }, 150);
    });
    controls.append(now);
    show(end);
    replaceStill(...holders);
  },

  // Drag a logit, see what each operation makes of it.
  logits() {
    const { logits, match, matching, descent } = DATA, table = document.createElement("table");
    const put = makeToy(table, DATA);
    button(match ? "nothing matches" : "after descent", () => put(logits));
    if (descent) button("all alike", () => put(logits.map(() => 0)));
    if (descent) button("one step of descent", put.descend);
    if (match) button("one key matches", () => put(Object.assign([...logits], { [match]: matching })));
    put(logits);
    replaceStill(table);
  },
};
KINDS[kind]();
