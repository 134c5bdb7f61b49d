// What interactive.py puts beside a still picture: the same drawn as SVG, which answers to hands.
// Called as (figure element, kind, data). No network, no library; where scripts are stripped, the picture stays.
(root, kind, data) => {
  const WIDTH = 640, INK = "#222222", GREY = "#707070", { palette, colors } = data;
  const image = root.querySelector("img"), controls = document.createElement("div");
  const set = (node, values) => Object.entries(values).forEach(([key, value]) => node.setAttribute(key, value));
  const add = (parent, tag, values = {}, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    set(node, values);
    node.textContent = text;
    parent.append(node);
    return node;
  };
  const svg = add(image.parentElement, "svg", { role: "group", "aria-label": image.alt, "font-size": 13,
    "font-family": "DejaVu Sans, Verdana, sans-serif", fill: INK, style: "width:100%;min-width:440px;display:block" });
  const write = (text, x, y, values = {}) => add(svg, "text", { x, y, ...values }, text);
  const line = (x1, y1, x2, y2, values = {}) => add(svg, "line", { x1, y1, x2, y2, stroke: GREY, ...values });
  // A grid of cells, one path a colour. Painting takes levels, rows of `columns`; below 0 a cell stays empty.
  const grid = (x, y, size, columns) => {
    const group = add(svg, "g", { transform: `translate(${x} ${y}) scale(${size})` });
    return (levels) => {
      const paths = palette.map(() => "");
      levels.forEach((level, i) => {
        if (level >= 0) paths[level] += `M${i % columns} ${Math.floor(i / columns)}h.94v.94h-.94z`;
      });
      group.innerHTML = paths.map((d, i) => (d ? `<path fill="${palette[i]}" d="${d}"/>` : "")).join("");
    };
  };
  const slider = (label, count, value, changed) => {
    const input = Object.assign(document.createElement("input"), { type: "range", min: 0, max: count - 1, value });
    const holder = document.createElement("label");
    input.addEventListener("input", () => changed(Number(input.value)));
    holder.append(`${label} `, input);
    controls.append(holder);
    return input;
  };
  const button = (label, pressed) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: label });
    made.addEventListener("click", () => pressed(made));
    controls.append(made);
  };
  const place = (event) => {  // of a pointer, in the picture's own units
    const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  };
  const finish = (height) => {
    set(svg, { viewBox: `0 0 ${WIDTH} ${height}` });
    controls.className = "controls";
    controls.style.cssText = "display:flex;flex-wrap:wrap;gap:.4em 1.4em;align-items:center;margin:.3em 0";
    root.querySelector(".still").replaceWith(controls);
    image.remove();
  };

  const kinds = {
    async explorer() {
      const { columns, names, T, tokens, alpha } = data, rows = names.length / columns, size = 340 / T, top = 96;
      const cell = Math.min(150 / columns, 340 / rows, 26), left = 34, right = WIDTH - 344, whole = palette.length - 1;
      const zipped = Uint8Array.from(atob(data.packed), (letter) => letter.charCodeAt(0));
      const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("deflate"));
      const packed = new Uint8Array(await new Response(stream).arrayBuffer());
      let text = 0, head = data.head, query = T - 1;
      const title = write("", left, 20, { "font-weight": "bold" }), said = write("", left, top + 376);
      write("α₁ by head", left, top - 8);
      const heads = grid(left, top, cell, columns), map = grid(right, top, size, T);
      const frame = { fill: "none", "stroke-width": 2.5 };
      const chosen = add(svg, "rect", { ...frame, stroke: colors.other, width: cell, height: cell });
      const asked = add(svg, "rect", { ...frame, stroke: colors.star, x: right, width: size * T, height: size });
      add(svg, "rect", { ...frame, stroke: colors.first, x: right, y: top, width: size, height: size * T });
      for (let row = 0; row < rows; row += cell > 20 ? 1 : Math.max(1, Math.ceil(rows / 4))) {
        write(names[row * columns][0], left - 6, top + cell * (row + 0.5) + 4, { "text-anchor": "end", fill: GREY });
      }
      const small = { "font-size": Math.min(12, 0.95 * size), "font-family": "monospace" };
      const keys = tokens[0].map((_, j) => {
        const x = right + size * (j + 0.75);
        return write("", x, top - 5, { ...small, transform: `rotate(-90 ${x} ${top - 5})` });
      });
      const queries = tokens[0].map((_, i) => write("", right - 5, top + size * (i + 0.78), { ...small, "text-anchor": "end" }));
      const show = () => {
        const start = (text * names.length + head) * T * (T + 1) / 2, levels = [];
        for (let i = 0; i < T; i++) {
          for (let j = 0; j < T; j++) levels.push(j > i ? -1 : packed[start + i * (i + 1) / 2 + j]);
        }
        map(levels);
        heads(alpha[text].map((value) => Math.round(value * whole)));
        set(chosen, { x: left + cell * (head % columns), y: top + cell * Math.floor(head / columns) });
        set(asked, { y: top + size * query });
        tokens[text].forEach((name, i) => { keys[i].textContent = queries[i].textContent = name; });
        const share = (j) => (levels[query * T + j] / whole) ** 2;
        const most = [...Array(query + 1).keys()].sort((a, b) => share(b) - share(a)).slice(0, 3);
        const looks = most.map((j) => `${j + 1} “${tokens[text][j]}” ${share(j).toFixed(2)}`).join(", ");
        title.textContent = `block ${names[head][0]}, head ${names[head][1]}: α₁ = ${alpha[text][head].toFixed(2)}`;
        said.textContent = `query ${query + 1} “${tokens[text][query]}” looks at about ${looks}`;
      };
      const inside = ([x, y], x0, y0, step, wide, high) => {
        const column = Math.floor((x - x0) / step), row = Math.floor((y - y0) / step);
        return column >= 0 && row >= 0 && column < wide && row < high ? [row, column] : null;
      };
      const point = (event) => {
        const one = inside(place(event), left, top, cell, columns, rows);
        const row = inside(place(event), right, top, size, T, T);
        if (one && event.type === "click") ofHead.value = head = one[0] * columns + one[1];
        else if (row) ofQuery.value = query = row[0];
        else return;
        show();
      };
      svg.addEventListener("pointermove", point);
      svg.addEventListener("click", point);
      const ofHead = slider("head", names.length, head, (value) => { head = value; show(); });
      const ofQuery = slider("query", T, query, (value) => { query = value; show(); });
      if (tokens.length > 1) slider("text", tokens.length, 0, (value) => { text = value; show(); });
      show();
      finish(top + 390);
    },

    film() {
      const { steps, runs, key } = data, end = steps.length - 1, most = steps[end];
      const picks = [...new Set([0, 1, 2, 3, 4, 5, 6].map((nth) => Math.round(nth * end / 6)))];  // shown as thumbnails
      const lines = [key === "k*" ? colors.star : colors.first, colors.other, colors.baseline, colors.paper];
      const left = 46, right = 500, row = 124, base = runs.length * row + 116;
      const x = (step) => left + (right - left) * step / most, y = (share) => base - 84 * share;
      const middle = { "text-anchor": "middle" }, quiet = { fill: GREY, "font-size": 11 };
      [0, 0.5, 1].forEach((share) => {
        line(left, y(share), right, y(share), { "stroke-width": 0.4 });
        write(share, left - 8, y(share) + 4, { ...quiet, "text-anchor": "end" });
      });
      const power = 10 ** Math.floor(Math.log10(most)), apart = [0.2, 0.5, 1, 2].find((n) => most / (n * power) <= 6) * power;
      for (let step = 0; step <= most; step += apart) {
        write(step.toLocaleString("en"), x(step), base + 16, { ...quiet, ...middle });
      }
      write(`mean attention to ${key} over all heads, by training step`, left, base + 36);
      const shown = runs.map(({ name, heads, frames, means }, i) => {
        const color = lines[i % lines.length];
        const height = frames[0].length / heads, top = i * row, width = (right - left + 30) / picks.length;
        write(name, left - 26, top + 18, { "font-weight": "bold", fill: color });
        const size = Math.min((width - 8) / heads, 72 / height);
        picks.forEach((pick, j) => {
          const at = left - 26 + width * j;
          grid(at, top + 28, size, heads)(frames[pick]);
          write(steps[pick].toLocaleString("en"), at + size * heads / 2, top + 42 + size * height, { ...quiet, ...middle });
        });
        const points = means.map((mean, j) => `${x(steps[j])},${y(mean)}`).join(" ");
        add(svg, "polyline", { points, fill: "none", stroke: color, "stroke-width": 2.5 });
        const large = Math.min(100 / heads, 80 / height), mean = write("", 534, top + 18, { "font-weight": "bold" });
        return { paint: grid(534, top + 28, large, heads), mean };
      });
      const head = line(0, base - 90, 0, base + 4, { stroke: INK, "stroke-width": 1.5 });
      const now = write("", 534, base - 40, { "font-weight": "bold" });
      const show = (frame) => {
        shown.forEach(({ paint, mean }, i) => {
          paint(runs[i].frames[frame]);
          mean.textContent = `mean ${runs[i].means[frame].toFixed(2)}`;
        });
        set(head, { x1: x(steps[frame]), x2: x(steps[frame]) });
        now.textContent = `step ${steps[frame].toLocaleString("en")}`;
      };
      const input = slider("step", steps.length, end, show);
      let timer = 0;
      const stop = (made) => { timer = clearInterval(timer); made.textContent = "play"; };
      button("play", (made) => {
        if (timer) { stop(made); return; }
        if (Number(input.value) === end) input.value = 0;
        made.textContent = "stop";
        timer = setInterval(() => {
          show(Number(input.value));
          if (Number(input.value) === end || !root.isConnected) stop(made); else input.value = Number(input.value) + 1;
        }, 150);
      });
      show(end);
      finish(base + 44);
    },

    logits() {
      const { names, low, high, values } = data, top = 44, bottom = 190, unit = 56, rows = [316, 402, 488];
      let logits = [...data.logits];
      const apart = 444 / names.length;  // of the columns
      const at = (i) => 176 + apart * i, y = (s) => bottom - (bottom - top) * (s - low) / (high - low);
      const color = (i) => (i ? colors.other : colors.star), bold = { "font-weight": "bold" }, middle = { "text-anchor": "middle" };
      const softmax = (values) => {
        const powers = values.map(Math.exp), total = powers.reduce((sum, power) => sum + power, 0);
        return powers.map((power) => power / total);
      };
      write("logits s", 8, 30, bold);
      line(140, y(0), 590, y(0));
      const bars = ["softmax", "sigmoid", "softmax with k*"].map((title, row) => {
        write(title, 8, rows[row] - 18, bold);
        write("on text", 8, rows[row] + 2, { fill: GREY });
        line(140, rows[row], 590, rows[row]);
        if (values) write("output", 8, rows[row] + 20, { fill: GREY });
        const columns = names.map((_, i) => row < 2 && !i ? null : [
          add(svg, "rect", { x: at(i) - 20, width: 40, fill: color(i) }), write("", at(i), 0, middle)]);
        return { columns, sum: write("", 76, rows[row] + 2, bold), output: write("", 76, rows[row] + 20, bold) };
      });
      const length = (shares) => Math.hypot(  // of the output: a sum of values, one for each name
        ...values[0].map((_, d) => shares.reduce((sum, share, i) => sum + share * values[i][d], 0)));
      const handles = names.map((name, i) => {
        const stem = line(at(i), 0, at(i), y(0), { stroke: color(i), "stroke-width": 2 });
        const handle = add(svg, "circle", { cx: at(i), r: 9, fill: color(i), tabindex: 0, role: "slider",
          "aria-label": `logit of ${name}`, "aria-valuemin": low, "aria-valuemax": high,
          style: "cursor:ns-resize;touch-action:none" });
        write(name, at(i), bottom + 40, { ...middle, ...bold });
        const put = (s) => { logits[i] = Math.min(high, Math.max(low, s)); show(); };
        handle.addEventListener("pointerdown", (event) => handle.setPointerCapture(event.pointerId));
        handle.addEventListener("pointermove", (event) => {
          if (handle.hasPointerCapture(event.pointerId)) put(low + (high - low) * (bottom - place(event)[1]) / (bottom - top));
        });
        handle.addEventListener("keydown", (event) => {
          const step = { ArrowUp: 0.5, ArrowDown: -0.5 }[event.key];
          if (step) { event.preventDefault(); event.stopPropagation(); put(logits[i] + step); }
        });
        return { stem, handle, value: write("", at(i), 0, middle) };
      });
      const show = () => {
        handles.forEach(({ stem, handle, value }, i) => {
          set(handle, { cy: y(logits[i]), "aria-valuenow": logits[i].toFixed(1) });
          set(stem, { y1: y(logits[i]) });
          set(value, { y: y(logits[i]) + (logits[i] > 0 ? -14 : 24) });
          value.textContent = logits[i].toFixed(1);
        });
        const keys = logits.slice(1), sigmoid = keys.map((s) => 1 / (1 + Math.exp(-s)));
        [[0, ...softmax(keys)], [0, ...sigmoid], softmax(logits)].forEach((shares, row) => {
          bars[row].columns.forEach((column, i) => {
            if (!column) return;
            set(column[0], { y: rows[row] - shares[i] * unit, height: shares[i] * unit });
            set(column[1], { y: rows[row] - shares[i] * unit - 4 });
            column[1].textContent = shares[i].toFixed(2);
          });
          bars[row].sum.textContent = shares.slice(1).reduce((total, share) => total + share, 0).toFixed(2);
          if (values) bars[row].output.textContent = length(shares).toFixed(2);
        });
      };
      button(data.match ? "nothing matches" : "all alike", () => { logits = [...data.logits]; show(); });
      if (data.match) button("one key matches", () => { logits = [...data.logits]; logits[data.match] = data.matching; show(); });
      show();
      finish(514);
    },
  };
  kinds[kind]();
}
