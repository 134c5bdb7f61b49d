// What `interactive.py` puts into a page beside a still picture: it makes the picture's own SVG answer to hands.
// Called as (figure element, kind, data). No network, no library; without it the picture and its caption stay.
(root, kind, data) => {
  const image = root.querySelector("img"), alt = image.alt;
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const holder = document.createElement("div");
  holder.innerHTML = new TextDecoder().decode(bytes(image.src.split(",")[1]));
  const svg = holder.firstElementChild;
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", alt);
  svg.setAttribute("style", image.getAttribute("style"));
  image.replaceWith(svg);

  const part = (name) => svg.querySelector(`[data-part="${name}"]`);
  const move = (name, values) => Object.entries(values).forEach(([key, value]) => part(name).setAttribute(key, value));
  const say = (name, text) => { part(name).textContent = text; };
  const node = (tag, text, properties) => Object.assign(document.createElement(tag), { textContent: text }, properties);
  const controls = node("div", "", { className: "controls" });
  controls.style.cssText = "display:flex;flex-wrap:wrap;gap:.4em 1.4em;align-items:center;margin:.3em 0;font-size:.9em";
  svg.closest("div").after(controls);

  // A grid of cells, one path a colour: levels in rows of `columns`, below 0 for an empty cell.
  const paint = (name, levels, columns, palette = data.palette) => {
    const paths = palette.map(() => "");
    levels.forEach((level, i) => {
      if (level >= 0) paths[level] += `M${i % columns} ${Math.floor(i / columns)}h.94v.94h-.94z`;
    });
    part(name).innerHTML = paths.map((d, i) => (d ? `<path fill="${palette[i]}" d="${d}"/>` : "")).join("");
  };
  const slider = (label, count, value, changed) => {
    const line = node("label", `${label} `), input = node("input", "", { type: "range", min: 0, max: count - 1, value });
    input.addEventListener("input", () => changed(Number(input.value)));
    line.append(input);
    controls.append(line);
    return input;
  };
  const button = (label, pressed) => {
    const made = node("button", label, { type: "button" });
    made.addEventListener("click", () => pressed(made));
    controls.append(made);
  };
  // Where a pointer is in the picture's own units.
  const place = (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [(event.clientX - box.left) * view.width / box.width, (event.clientY - box.top) * view.height / box.height];
  };

  const kinds = {
    film() {
      const last = data.steps.length - 1;
      const show = (frame) => {
        data.runs.forEach((run, i) => {
          paint(`now${i}`, run.frames[frame], run.heads);
          say(`sink${i}`, `${run.sinks[frame].toFixed(0)} %`);
        });
        const x = data.left + (data.right - data.left) * data.steps[frame] / data.steps[last];
        move("playhead", { x1: x, x2: x });
        say("step", `step ${data.steps[frame].toLocaleString("en")}`);
      };
      const input = slider("step", last + 1, last, show);
      let timer = 0;
      const stop = (made) => { clearInterval(timer); timer = 0; made.textContent = "play"; };
      button("play", (made) => {
        if (timer) { stop(made); return; }
        if (Number(input.value) === last) input.value = 0;
        made.textContent = "stop";
        timer = setInterval(() => {
          show(Number(input.value));
          if (Number(input.value) === last || !root.isConnected) stop(made); else input.value = Number(input.value) + 1;
        }, 150);
      });
    },

    threshold() {
      let chosen = data.start, eps = data.epsilon;
      const show = () => {
        const now = data.lengths[chosen], y = data.bottom - (data.bottom - data.top) * data.epsilons[eps];
        now.alpha.forEach((value, i) => {
          const above = value > data.epsilons[eps];
          move(`dot${i}`, { cy: data.bottom - (data.bottom - data.top) * value, fill: above ? data.on : data.off });
        });
        move("epsilon", { y1: y, y2: y });
        move("uniform", { y1: data.bottom - (data.bottom - data.top) * now.floor,
                          y2: data.bottom - (data.bottom - data.top) * now.floor });
        say("read", `T = ${now.T}, ε = ${data.epsilons[eps]}: Sink₁ = ${now.sinks[eps].toFixed(1)} %`);
      };
      slider("threshold ε", data.epsilons.length, eps, (value) => { eps = value; show(); });
      slider("length T", data.lengths.length, chosen, (value) => { chosen = value; show(); });
    },

    logits() {
      const { low, high, top, bottom, rows } = data;
      let logits = [...data.logits];
      const sum = (values) => values.reduce((total, value) => total + value, 0);
      const softmax = (values) => {
        const powers = values.map(Math.exp), total = sum(powers);
        return powers.map((power) => power / total);
      };
      const draw = () => {
        logits.forEach((s, i) => {
          const y = bottom - (bottom - top) * (s - low) / (high - low);
          move(`handle${i}`, { cy: y, "aria-valuenow": s.toFixed(1) });
          move(`stem${i}`, { y1: y });
          say(`logit${i}`, s.toFixed(1));
          move(`logit${i}`, { y: y + (s > 0 ? -14 : 24) });
        });
        const weights = [[0, ...softmax(logits.slice(1))], [0, ...logits.slice(1).map((s) => 1 / (1 + Math.exp(-s)))],
                         softmax(logits)];
        weights.forEach((shares, row) => {
          shares.forEach((share, i) => {
            if (!i && row < 2) return;
            move(`bar${row}-${i}`, { y: rows[row] - share * data.unit, height: share * data.unit });
            say(`share${row}-${i}`, share.toFixed(2));
            move(`share${row}-${i}`, { y: rows[row] - share * data.unit - 4 });
          });
          say(`sum${row}`, sum(shares.slice(1)).toFixed(2));
        });
      };
      logits.forEach((_, i) => {
        const handle = part(`handle${i}`);
        handle.style.cssText = "cursor:ns-resize;touch-action:none";
        Object.entries({ tabindex: 0, role: "slider", "aria-label": `logit of ${data.names[i]}`,
          "aria-valuemin": low, "aria-valuemax": high }).forEach(([key, value]) => handle.setAttribute(key, value));
        const put = (s) => { logits[i] = Math.min(high, Math.max(low, s)); draw(); };
        handle.addEventListener("pointerdown", (event) => handle.setPointerCapture(event.pointerId));
        handle.addEventListener("pointermove", (event) => {
          if (handle.hasPointerCapture(event.pointerId)) put(low + (high - low) * (bottom - place(event)[1]) / (bottom - top));
        });
        handle.addEventListener("keydown", (event) => {
          const step = { ArrowUp: 0.5, ArrowDown: -0.5 }[event.key];
          if (step) { event.preventDefault(); event.stopPropagation(); put(logits[i] + step); }
        });
      });
      button("nothing matches", () => { logits = [...data.logits]; draw(); });
      button("one key matches", () => { logits = [...data.logits]; logits[data.match] = data.matching; draw(); });
      draw();
    },

    masks() {
      const sliders = {};
      const show = (kind, value) => {
        paint("mask", [...data.masks[kind][value]].map((digit) => digit - 1), data.T);
        say("read", data.titles[kind][value]);
        const other = kind === "prefix" ? "window" : "prefix";
        sliders[other].value = other === "prefix" ? 0 : data.T - 1;  // one of the two at a time
      };
      sliders.prefix = slider("prefix p", data.T, data.kind === "prefix" ? data.value : 0, (value) => show("prefix", value));
      sliders.window = slider("window w", data.T, data.kind === "window" ? data.value : data.T - 1, (value) => show("window", value));
    },

    async explorer() {
      const { columns, names, T } = data, rows = T * (T + 1) / 2, top = data.palette.length - 1;
      const stream = new Blob([bytes(data.packed)]).stream().pipeThrough(new DecompressionStream("deflate"));
      const packed = new Uint8Array(await new Response(stream).arrayBuffer());
      let text = 0, head = data.head, query = T - 1;
      const show = () => {
        const start = (text * names.length + head) * rows, tokens = data.tokens[text], levels = [];
        for (let i = 0; i < T; i++) {
          for (let j = 0; j < T; j++) levels.push(j > i ? -1 : packed[start + i * (i + 1) / 2 + j]);
        }
        paint("map", levels, T);
        paint("heads", data.alpha[text].map((value) => Math.round(value * top)), columns);
        move("chosen", { x: head % columns, y: Math.floor(head / columns) });
        move("query", { y: query });
        tokens.forEach((name, j) => { say(`key${j}`, name); say(`query${j}`, name); });
        const share = (j) => (levels[query * T + j] / top) ** 2;
        const most = [...Array(query + 1).keys()].sort((a, b) => share(b) - share(a)).slice(0, 3);
        const looks = most.map((j) => `${j + 1} “${tokens[j]}” ${share(j).toFixed(2)}`).join(", ");
        say("title", `block ${names[head][0]}, head ${names[head][1]}: α₁ = ${data.alpha[text][head].toFixed(2)}`);
        say("said", `query ${query + 1} “${tokens[query]}” looks at about ${looks}`);
      };
      const inside = (name, size, event, wide, high) => {
        const [x, y] = place(event), origin = part(name).transform.baseVal[0].matrix;
        const column = Math.floor((x - origin.e) / size), row = Math.floor((y - origin.f) / size);
        return column >= 0 && row >= 0 && column < wide && row < high ? [row, column] : null;
      };
      const point = (event) => {
        const one = inside("heads", data.cell, event, columns, names.length / columns);
        const row = inside("map", data.size, event, T, T);
        if (one && event.type === "click") { head = one[0] * columns + one[1]; input.value = head; }
        else if (row) query = row[0];
        else return;
        show();
      };
      svg.addEventListener("pointermove", point);
      svg.addEventListener("click", point);
      const input = slider("head", names.length, head, (value) => { head = value; show(); });
      slider("query", T, query, (value) => { query = value; show(); });
      if (data.tokens.length > 1) slider("text", data.tokens.length, 0, (value) => { text = value; show(); });
      show();
    },
  };
  kinds[kind]();
}
