// How heads and maps are shown, in the notebooks' interactive pictures and in the lab. SVG made
// element by element, so that any text in it is text. One palette for attention. Orange is the
// sink, green a key of a head's own, and all else is grey. DATA has the palette and the colours.
// Tokens, heads and queries count from 0 here, from 1 in words.

const INK = "#222222", GREY = "#707070", LIGHT = "#b8b8b8";
const SANS = "DejaVu Sans, Verdana, sans-serif", MONO = "DejaVu Sans Mono, monospace";

function add(parent, tag, values = {}, words = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(values).forEach(([name, value]) => node.setAttribute(name, value));
  node.textContent = words;
  parent.append(node);
  return node;
}

// An HTML element with these properties and children.
function make(tag, values, ...children) {
  const node = Object.assign(document.createElement(tag), values);
  node.append(...children);
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
  svg.style.display = "block";
  box(svg, 0, 0, width, height, { fill: "#ffffff" });
  return svg;
}

// Where a pointer is, in the picture's own units.
function pointIn(svg, event) {
  const { left, top, width } = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / width;
  return [(event.clientX - left) * scale, (event.clientY - top) * scale];
}

const short = (label) => label.replace(/^(.{9}).{2,}$/u, "$1…"); // at most ten letters

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

// Shares of a causal map that was stored as shades of the palette, row by row from `start` on.
const stored = (shades, start) => (i, j) =>
  (shades[start + i * (i + 1) / 2 + j] / (DATA.palette.length - 1)) ** 2;

const nameOf = (head, H, alpha, block = 1 + Math.floor(head / H)) =>
  `Head ${head % H + 1} of block ${block}: α₁ = ${alpha[head].toFixed(2)}`;

// One head's map: a row a query, a column a key. Returns which query stands at a point of it.
function drawMap(holder, { labels, share, starAt, title, query, width, sink = 0 }) {
  const T = labels.length, side = Math.max(9.5, Math.min(24, (width - 100) / (T + 1)));
  const size = Math.min(12, 0.9 * side), font = { "font-size": size, "font-family": MONO };
  const longest = Math.max(...[...labels, "own key"].map((label) => short(label).length));
  const room = Math.ceil(longest * size * 0.62) + 8, top = room + 44; // for the labels
  const left = room + (starAt ? side + 8 : 0);
  const svg = picture(holder, Math.max(left + T * side + 4, 280), top + T * side + 4, title);
  title.split("\n").forEach(
    (words, i) => write(svg, words, 4, 16 + 17 * i, { "font-weight": "bold" }));
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
  box(svg, left + side * sink, top, side, side * T, { ...frame, stroke: DATA.colors.first });
  box(svg, room, top + side * query, left - room + side * (query + 1), side,
    { fill: "none", stroke: INK, "stroke-width": 1.5 });
  return (event) => {
    const row = Math.floor((pointIn(svg, event)[1] - top) / side);
    return row >= 0 && row < T ? row : query;
  };
}

// What a query looks at most, in words.
function looksAt({ labels, share, starAt, query }) {
  const keys = labels.slice(0, query + 1)
    .map((label, j) => [`“${label}” (${j + 1})`, share(query, j)]);
  if (starAt) keys.push(["the key of its own", starAt(query)]);
  const most = keys.sort((a, b) => b[1] - a[1]).slice(0, 3);
  return `It gives ${most.map(([key, value]) => `${value.toFixed(2)} to ${key}`).join(", ")}.`;
}

// What the token at `sink` gets from even attention: a mean over the queries that see it.
const evenShare = (T, sink = 0) =>
  [...Array(T).keys()].slice(sink).reduce((sum, i) => sum + 1 / (i + 1), 0) / (T - sink);

// Every head as a dot over its block, at the height of the attention that it gives; green diamonds:
// to a key of its own; rings: before, or after. Returns which head is at a point, or -1.
function drawHeads(holder, { alpha, star, rings, H, blocks, head: chosen, threshold, T, sink, width,
  name = "Attention of every head to the first token", color = DATA.colors.first }) {
  const rows = alpha.length / H, many = rows > 6, size = many ? 2.4 : 5;
  const left = 34, right = width - 6, top = 12, high = 168;
  const svg = picture(holder, width, top + high + 30, name);
  const across = (place) => left + (right - left) * place / rows;
  const y = (share) => top + high * (1 - share);
  const x = (head) => across(Math.floor(head / H) + (head % H + 0.8) / (H + 0.6));
  for (const share of [0, 0.5, 1]) {
    line(svg, left, y(share), right, y(share));
    write(svg, share, left - 6, y(share) + 4, { "text-anchor": "end", fill: GREY });
  }
  for (let row = 0; row < rows; row += many ? Math.ceil(rows / 10) : 1) {
    const number = blocks ? blocks[row] : row + 1, words = many && row ? number : `block ${number}`;
    write(svg, words, across(row + 0.5), top + high + 22, { "text-anchor": "middle", fill: GREY });
  }
  const level = (share, dashes) => line(svg, left, y(share), right, y(share),
    { stroke: INK, "stroke-dasharray": dashes, "stroke-width": 1.4 });
  if (T) level(evenShare(T, sink), "1 3");
  if (threshold) level(threshold, "6 4");
  const dot = (head, share, values) => add(svg, "circle", { cx: x(head), cy: y(share), ...values });
  const ring = { fill: "none", stroke: GREY, r: size };
  alpha.forEach((share, head) => {
    if (rings) dot(head, rings[head], ring);
    const diamond = star && `M${x(head)} ${y(star[head]) - 6}l6 6l-6 6l-6 -6z`;
    if (star) add(svg, "path", { d: diamond, fill: DATA.colors.star });
    dot(head, share, { r: size, fill: color });
    if (head === chosen) dot(head, share, { ...ring, r: size + 3.5, stroke: INK });
  });
  return (event) => {
    const [px, py] = pointIn(svg, event);
    const far = Array.from(alpha, (share, head) => Math.hypot(x(head) - px, y(share) - py));
    const near = far.indexOf(Math.min(...far));
    return far[near] < 10 ? near : -1;
  };
}
