// Pictures: SVG made element by element, so that any text in it is text. Three rules of colour, as
// everywhere in the study: one palette for attention; orange is the first token and green a key of a
// head's own; all else is grey.
"use strict";

const INK = "#222222", GREY = "#707070", LIGHT = "#b8b8b8";
const SANS = "DejaVu Sans, Verdana, sans-serif", MONO = "DejaVu Sans Mono, monospace";

function add(parent, tag, values = {}, words = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(values).forEach(([name, value]) => node.setAttribute(name, value));
  node.textContent = words;
  parent.append(node);
  return node;
}

const write = (svg, words, x, y, values) => add(svg, "text", { x, y, ...values }, words);
const box = (svg, x, y, width, height, values) =>
  add(svg, "rect", { x, y, width, height, ...values });
const line = (svg, x1, y1, x2, y2, values) =>
  add(svg, "line", { x1, y1, x2, y2, stroke: LIGHT, "stroke-width": 0.7, ...values });

// An empty picture in place of what the holder has; `name` says in words what is seen.
function picture(holder, width, height, name) {
  holder.replaceChildren();
  const svg = add(holder, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": name, fill: INK, direction: "ltr", "font-family": SANS, "font-size": 12 });
  box(svg, 0, 0, width, height, { fill: "#ffffff" });
  return svg;
}

const short = (label) => label.replace(/^(.{9}).{2,}$/u, "$1…"); // at most ten letters

// The font of tokens beside cells of a side, and the room that the longest needs.
function labelled(labels, side) {
  const size = Math.min(12, 0.9 * side);
  const longest = Math.max(...labels.map((label) => short(label).length));
  const font = { "font-size": size, "font-family": MONO };
  return { font, room: Math.ceil(longest * size * 0.62) + 8 };
}

// Squares, one path a shade: square roots of share(row, column), which is undefined where none is.
function squares(parent, rows, columns, side, share) {
  const paths = new Map(), last = DATA.palette.length - 1;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const value = share(row, column);
      if (value === undefined) continue;
      const fill = DATA.palette[Math.round(Math.sqrt(Math.min(1, value)) * last)];
      const d = `M${column * side} ${row * side}h${side - 0.5}v${side - 0.5}h${0.5 - side}z`;
      paths.set(fill, (paths.get(fill) ?? "") + d);
    }
  }
  paths.forEach((d, fill) => add(parent, "path", { fill, d }));
}

// One head's map: a row a query, a column a key. Returns which query stands at a point of it.
function drawMap(holder, { labels, share, starAt, title, query }) {
  const T = labels.length, side = Math.max(10, Math.min(24, (holder.clientWidth - 100) / (T + 1)));
  const { font, room } = labelled(labels, side), top = room + 44;
  const left = room + (starAt ? side + 8 : 0);
  const svg = picture(holder, Math.max(left + T * side + 4, 280), top + T * side + 4, title);
  title.split("\n").forEach((words, i) => write(svg, words, 4, 16 + 17 * i, { "font-weight": "bold" }));
  const column = (label, x) => add(svg, "text",
    { ...font, transform: `translate(${x + side * 0.72} ${top - 6}) rotate(-90)` }, short(label));
  labels.forEach((label, i) => {
    const weight = i === query ? "bold" : "normal";
    write(svg, short(label), room - 5, top + side * (i + 0.75),
      { ...font, "text-anchor": "end", "font-weight": weight });
    column(label, left + side * i);
  });
  const frame = { fill: "none", "stroke-width": 2.5 };
  if (starAt) {
    squares(add(svg, "g", { transform: `translate(${room} ${top})` }), T, 1, side, starAt);
    column("own key", room);
    box(svg, room, top, side, side * T, { ...frame, stroke: DATA.colors.star });
  }
  const seen = (i, j) => (j > i ? undefined : share(i, j));
  squares(add(svg, "g", { transform: `translate(${left} ${top})` }), T, T, side, seen);
  box(svg, left, top, side, side * T, { ...frame, stroke: DATA.colors.first });
  box(svg, room, top + side * query, left - room + side * (query + 1), side,
    { fill: "none", stroke: INK, "stroke-width": 1.5 });
  return (event) => {
    const row = Math.floor((event.clientY - svg.getBoundingClientRect().top - top) / side);
    return row >= 0 && row < T ? row : query;
  };
}

// All heads as a grid of squares, a row a block.
function drawGrid(holder, alpha, H, side) {
  const rows = alpha.length / H, svg = picture(holder, H * side, rows * side, "");
  svg.setAttribute("aria-hidden", "true"); // the text beside it says how many are dark
  squares(svg, rows, H, side, (row, column) => alpha[row * H + column]);
}

// Every head as a dot over its block, at the height of its attention to the first token; green: to the
// key of its own; rings: before the operation. Returns what is at a point: a share, and a head, from 1
// (0: none).
function drawHeads(holder, { alpha, star, before, H, threshold, labels, head: chosen }) {
  const blocks = alpha.length / H, many = blocks > 6, size = many ? 2.4 : 5;
  const width = holder.clientWidth, left = 34, right = width - 6, top = 12, high = 168;
  const svg = picture(holder, width, top + high + 30, "Attention of every head to the first token");
  const across = (place) => left + (right - left) * place / blocks;
  const y = (share) => top + high * (1 - share);
  const x = (head) => across(Math.floor(head / H) + (head % H + 0.8) / (H + 0.6));
  for (const share of [0, 0.5, 1]) {
    line(svg, left, y(share), right, y(share));
    write(svg, share, left - 6, y(share) + 4, { "text-anchor": "end", fill: GREY });
  }
  for (let block = 0; block < blocks; block += many ? 3 : 1) {
    const middle = across(block + 0.5), name = many && block ? block + 1 : `block ${block + 1}`;
    write(svg, name, middle, top + high + 22, { "text-anchor": "middle", fill: GREY });
  }
  const even = y(evenShare(labels.length));
  line(svg, left, even, right, even, { stroke: INK, "stroke-dasharray": "1 3", "stroke-width": 1.2 });
  line(svg, left, y(threshold), right, y(threshold),
    { stroke: INK, "stroke-dasharray": "6 4", "stroke-width": 1.5 });
  const ring = { fill: "none", stroke: GREY };
  alpha.forEach((share, head) => {
    if (before) add(svg, "circle", { cx: x(head), cy: y(before[head]), r: size, ...ring });
    const d = star && `M${x(head)} ${y(star[head]) - 6}l6 6l-6 6l-6 -6z`;
    if (star) add(svg, "path", { d, fill: DATA.colors.star });
    add(svg, "circle", { cx: x(head), cy: y(share), r: size, fill: DATA.colors.first });
    if (head === chosen) {
      add(svg, "circle", { cx: x(head), cy: y(share), r: size + 3.5, ...ring, stroke: INK });
    }
  });
  return (event) => {
    const { left: x0, top: y0 } = svg.getBoundingClientRect();
    const [px, py] = [event.clientX - x0, event.clientY - y0];
    const far = Array.from(alpha, (share, head) => Math.hypot(x(head) - px, y(share) - py));
    const near = far.indexOf(Math.min(...far));
    return { share: 1 - (py - top) / high, head: far[near] < 10 ? near + 1 : 0 };
  };
}

// A bar a token: the nats that it costs; a tick: before the operation. Undefined where not predicted.
function drawLosses(holder, labels, losses, before) {
  const n = labels.length, step = Math.max(11, Math.min(24, (holder.clientWidth - 50) / n));
  const { font, room } = labelled(labels, step), left = 34, top = 12, high = 90, bottom = top + high;
  const svg = picture(holder, left + n * step + 8, bottom + room + 6, "Loss of each token, as bars");
  const most = Math.max(4, ...[...losses, ...before].filter((loss) => loss !== undefined));
  const y = (loss) => bottom - high * loss / most;
  for (let loss = 0; loss <= most; loss += most > 8 ? 4 : 2) {
    line(svg, left, y(loss), left + n * step, y(loss));
    write(svg, loss, left - 6, y(loss) + 4, { "text-anchor": "end", fill: GREY });
  }
  labels.forEach((label, i) => {
    const x = left + i * step, tick = { stroke: INK, "stroke-width": 2 };
    const height = bottom - y(losses[i] ?? 0);
    box(svg, x + 1, bottom - height, step - 3, height, { fill: LIGHT });
    if (before[i] !== undefined) line(svg, x, y(before[i]), x + step - 1, y(before[i]), tick);
    add(svg, "text", { ...font, "text-anchor": "end",
      transform: `translate(${x + step * 0.66} ${bottom + 6}) rotate(-90)` }, short(label));
  });
}

// Offer a picture as a file of its own.
function saveSvg(svg, name) {
  const link = document.createElement("a"), text = new XMLSerializer().serializeToString(svg);
  link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
