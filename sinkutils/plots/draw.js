// How heads and maps are shown, in the notebooks' interactive pictures and in the lab. SVG made
// element by element, so that any text in it is text. One palette for attention. Orange is the
// sink, green a key of a head's own, and all else is grey. DATA has the palette and the colours.
// Tokens, heads and queries count from 0 here, from 1 in words.

// The lab has others where a page is dark.
const TONES = { ink: "#222222", grey: "#707070", light: "#b8b8b8", ground: "#ffffff" };
// The words in pictures, which the lab has in other languages too.
const WORDS = { point: ".", attention: "attention", own: "own key", share: "share of attention",
  block: "block", everyHead: "Attention of every head to the first token",
  head: "Head {head} of block {block}: α₁ = {alpha}",
  to: "{share} to {key}", toOwn: "the key of its own", token: "“{token}” ({place})", logit: "logit", logitOf: "logit of {key}",
  with: "softmax with {key}", spent: "spent on the other keys", length: "length of the output" };
const say = (words, values) => words.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const two = (number) => number.toFixed(2).replace(".", WORDS.point); // decimals
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
  add(svg, "line", { x1, y1, x2, y2, stroke: TONES.light, "stroke-width": 0.7, ...values });

// An empty picture in place of what the holder has; `name` says in words what is seen.
function picture(holder, width, height, name) {
  holder.replaceChildren();
  const svg = add(holder, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": name, fill: TONES.ink, direction: "ltr", "font-family": SANS, "font-size": 12 });
  svg.style.display = "block";
  box(svg, 0, 0, width, height, { fill: TONES.ground });
  return svg;
}

// Where a pointer is, in the picture's own units.
function pointIn(svg, event) {
  const { left, top, width } = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / width;
  return [(event.clientX - left) * scale, (event.clientY - top) * scale];
}

function short(label, most) {
  const letters = [...label];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : label;
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

// Shares of a causal map that was stored row by row from `start` on, as so many levels of their
// square roots: shades of the palette, or finer.
const stored = (shades, start, levels = DATA.palette.length) => (i, j) =>
  (shades[start + i * (i + 1) / 2 + j] / (levels - 1)) ** 2;

const nameOf = (head, H, alpha, block = 1 + Math.floor(head / H)) =>
  say(WORDS.head, { head: head % H + 1, block, alpha: two(alpha[head]) });

// Which shade is how much: shades are of square roots, and so the ticks stand at them.
function drawScale(svg, x, y) {
  const wide = 110, font = { "font-size": 10, fill: TONES.grey, "text-anchor": "middle" };
  const step = wide / DATA.palette.length;
  write(svg, WORDS.attention, x, y + 8, { ...font, "text-anchor": "start" });
  DATA.palette.forEach((fill, i) => box(svg, x + i * step, y + 12, step + 0.3, 9, { fill }));
  for (const share of [0, 0.1, 0.5, 1]) {
    write(svg, String(share).replace(".", WORDS.point), x + wide * Math.sqrt(share), y + 31, font);
  }
}

// One head's map: a row a query, a column a key; a cell of the row may be framed. Returns which
// query and key stand at a point of it: key STAR is that of the head's own, undefined is none.
const STAR = -1;
function drawMap(holder, { labels, share, starAt, title, query, key, width, sink = 0 }) {
  const T = labels.length, names = labels.map((label) => short(label, width < 400 ? 7 : 10));
  const longest = Math.max(...[...names, WORDS.own].map((name) => name.length));
  const columns = T + (starAt ? 2 : 0); // the own key's, and a gap
  const side = Math.max(7, Math.min(24, (width - 7.5 * longest - 12) / columns));
  const every = side < 9.4 ? 2 : 1; // of many tokens every other is named
  const lines = title.split("\n");
  const size = Math.max(10, Math.min(12, side)), font = { "font-size": size, "font-family": MONO };
  const room = Math.ceil(longest * size * 0.62) + 8; // for the labels
  const top = room + 12 + 17 * Math.max(2, lines.length);
  const left = room + (starAt ? side + 8 : 0);
  const wide = Math.max(left + T * side + 4, 280);
  const svg = picture(holder, wide, top + T * side + 4, title);
  lines.forEach((words, i) => write(svg, words, 4, 16 + 17 * i, { "font-weight": "bold" }));
  const column = (name, x) => add(svg, "text",
    { ...font, transform: `translate(${x + side / 2 + size / 3} ${top - 9}) rotate(-90)` }, name);
  names.forEach((name, i) => {
    if (i % every && i !== query) return;
    const weight = i === query ? "bold" : "normal";
    write(svg, name, room - 5, top + side / 2 + side * i + size / 3,
      { ...font, "text-anchor": "end", "font-weight": weight });
    column(name, left + side * i);
  });
  // A frame has a head and a rim of the ground: shades of the palette come near to its orange.
  const frame = (x, color) => {
    const high = side * T, around = { fill: "none", stroke: TONES.ground, "stroke-width": 5.5 };
    box(svg, x - 1, top - 1, side + 1.5, high + 1.5, around);
    box(svg, x - 1, top - 1, side + 1.5, high + 1.5,
      { fill: "none", stroke: color, "stroke-width": 3 });
    box(svg, x - 2.5, top - 7, side + 4.5, 6, { fill: color });
  };
  if (starAt) {
    squares(add(svg, "g", { transform: `translate(${room} ${top})` }), T, 1, side, starAt);
    column(WORDS.own, room);
    frame(room, DATA.colors.star);
  }
  const seen = (i, j) => (j > i ? undefined : share(i, j));
  squares(add(svg, "g", { transform: `translate(${left} ${top})` }), T, T, side, seen);
  frame(left + side * sink, DATA.colors.first);
  drawScale(svg, Math.min(wide, Math.max(width, 280)) - 122, top + 2); // in the empty corner, where keys come after their query
  box(svg, room, top + side * query, left - room + side * (query + 1), side,
    { fill: "none", stroke: TONES.ink, "stroke-width": 1.5 });
  if (key !== undefined) {
    const x = key === STAR ? room : left + side * key;
    box(svg, x, top + side * query, side, side, { fill: "none", stroke: TONES.ink, "stroke-width": 3 });
  }
  return (event) => {
    const [x, y] = pointIn(svg, event), row = Math.floor((y - top) / side);
    const inRow = row >= 0 && row < T, column = Math.floor((x - left) / side);
    const own = starAt && x >= room && x < room + side;
    const seen = column >= 0 && column <= row ? column : undefined;
    return { query: inRow ? row : query, key: inRow ? (own ? STAR : seen) : undefined };
  };
}

// What a query looks at most.
function mostOf({ labels, share, starAt, query }) {
  const keys = labels.slice(0, query + 1)
    .map((token, j) => [say(WORDS.token, { token, place: j + 1 }), share(query, j)]);
  if (starAt) keys.push([WORDS.toOwn, starAt(query)]);
  const most = keys.sort((a, b) => b[1] - a[1]).slice(0, 3);
  return most.map(([key, value]) => say(WORDS.to, { share: two(value), key })).join(", ");
}

// What the token at `sink` gets from even attention: a mean over the queries that see it.
const evenShare = (T, sink = 0) =>
  [...Array(T).keys()].slice(sink).reduce((sum, i) => sum + 1 / (i + 1), 0) / (T - sink);

// Every head as a dot over its block, at the height of the attention that it gives; green diamonds:
// to a key of its own; rings: before, or after. Returns which head is at a point, or -1.
function drawHeads(holder, { alpha, star, rings, H, blocks, head: chosen, threshold, T, sink, width,
  name = WORDS.everyHead, color = DATA.colors.first }) {
  const rows = alpha.length / H, many = rows > 6, size = many ? 2.4 : 5;
  const left = 48, right = width - 6, top = 12, high = 168;
  const svg = picture(holder, width, top + high + 30, name);
  const across = (place) => left + (right - left) * place / rows;
  const y = (share) => top + high * (1 - share);
  const x = (head) => across(Math.floor(head / H) + (head % H + 0.8) / (H + 0.6));
  for (const share of [0, 0.5, 1]) {
    line(svg, left, y(share), right, y(share));
    write(svg, String(share).replace(".", WORDS.point), left - 6, y(share) + 4, { "text-anchor": "end", fill: TONES.grey });
  }
  add(svg, "text", { transform: `translate(13 ${y(0.5)}) rotate(-90)`, "text-anchor": "middle",
    fill: TONES.grey }, WORDS.share);
  write(svg, WORDS.block, 4, top + high + 22, { fill: TONES.grey });
  for (let row = 0; row < rows; row += many ? Math.ceil(rows / 10) : 1) {
    write(svg, blocks ? blocks[row] : row + 1, across(row + 0.5), top + high + 22,
      { "text-anchor": "middle", fill: TONES.grey });
  }
  const level = (share, dashes) => line(svg, left, y(share), right, y(share),
    { stroke: TONES.ink, "stroke-dasharray": dashes, "stroke-width": 1.4 });
  if (T) level(evenShare(T, sink), "1 3");
  if (threshold) level(threshold, "6 4");
  const dot = (head, share, values) => add(svg, "circle", { cx: x(head), cy: y(share), ...values });
  const ring = { fill: "none", stroke: TONES.grey, r: size };
  alpha.forEach((share, head) => {
    if (rings) dot(head, rings[head], ring);
    const diamond = star && `M${x(head)} ${y(star[head]) - 6}l6 6l-6 6l-6 -6z`;
    if (star) add(svg, "path", { d: diamond, fill: DATA.colors.star });
    dot(head, share, { r: size, fill: color });
    if (head === chosen) dot(head, share, { ...ring, r: size + 3.5, stroke: TONES.ink });
  });
  return (event) => {
    const [px, py] = pointIn(svg, event);
    const far = Array.from(alpha, (share, head) => Math.hypot(x(head) - px, y(share) - py));
    const near = far.indexOf(Math.min(...far));
    return far[near] < 10 ? near : -1;
  };
}
