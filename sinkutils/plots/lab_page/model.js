// The study's model in plain JavaScript: tokens, weights, a forward pass, and operations on it.
// It runs in a worker, so that the page never freezes, and in Node, where it is tested against
// su.measure. T tokens, L blocks, H heads, D numbers a head, d = H D; everything counts from 0.
"use strict";

const CONTEXT = 64; // tokens that a model reads
const FIXED = 2; // <fix>, the token that begins every text of some models
const LONGEST = 32 * CONTEXT; // characters of a text that are looked at

// ---- tokens: byte-level BPE as GPT-2 has it

// A byte is written as a letter: itself where it is printable, else one from 256 on.
const LETTERS = [];
for (let byte = 0, next = 256; byte < 256; byte++) {
  const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  LETTERS.push(String.fromCharCode(printable ? byte : next++));
}
const BLANK = "\\p{White_Space}", WORD = ["'s|'t|'re|'ve|'m|'ll|'d", " ?\\p{L}+", " ?\\p{N}+",
  ` ?[^${BLANK}\\p{L}\\p{N}]+`, `${BLANK}+(?![^${BLANK}])`, `${BLANK}+`].join("|");

// vocabulary: the letters of each token, by id; merges: pairs "a b", the first to be merged first.
function makeTokenizer(vocabulary, merges) {
  const ids = new Map(vocabulary.map((token, id) => [token, id]));
  const ranks = new Map(merges.map((pair, rank) => [pair, rank]));
  const idsOfWord = (word) => {
    // A lone surrogate is no character: TextEncoder makes it U+FFFD.
    let parts = [...new TextEncoder().encode(word)].map((byte) => LETTERS[byte]);
    while (true) {
      const pairs = parts.slice(1).map((part, i) => ranks.get(`${parts[i]} ${part}`) ?? Infinity);
      const best = Math.min(...pairs);
      if (best === Infinity) return parts.map((part) => ids.get(part));
      const merged = [];
      for (let i = 0; i < parts.length; i++) {
        merged.push(pairs[i] === best ? parts[i] + parts[++i] : parts[i]);
      }
      parts = merged;
    }
  };
  const known = new Map(); // a text has few words, many times
  const idsOf = (word) => {
    if (!known.has(word)) known.set(word, idsOfWord(word));
    return known.get(word);
  };
  return {
    encode: (text, most = LONGEST) =>
      (text.slice(0, most).match(new RegExp(WORD, "gu")) ?? []).flatMap(idsOf),
    // A token as it is written, its blanks made visible; bytes that are no character as numbers.
    label: (id) => {
      if (id <= FIXED) return vocabulary[id];
      const bytes = Uint8Array.from(vocabulary[id], (letter) => LETTERS.indexOf(letter));
      const text = new TextDecoder().decode(bytes);
      if (text.includes("\ufffd")) return bytes.join(" ");
      const visible = { "\n": "↵", "\t": "→", " ": "␣" };
      return text.replace(/^ (?=\S)/, "").replace(/[\n\t ]/g, (blank) => visible[blank]);
    },
  };
}

// What a model reads: CONTEXT tokens at most, with the fixed token in its place (-1: nowhere).
function arrange(tokens, place, fixed = FIXED) {
  const read = tokens.slice(0, CONTEXT);
  if (place >= 0) read.splice(place, 0, fixed);
  return read.slice(0, CONTEXT);
}

// ---- weights

// The letters of base 85, in Python's order, with others for those that HTML would read.
const BASE_85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=:?@^_`{|}~";

// The bytes that were deflated and written in letters, four bytes in five of them. What the last
// five lack was cut off, as were the bytes that it would stand for.
async function inflate(letters) {
  const values = new Uint8Array(128), lacking = (5 - letters.length % 5) % 5;
  [...BASE_85].forEach((letter, value) => { values[letter.charCodeAt(0)] = value; });
  const all = letters + "~".repeat(lacking), words = new DataView(new ArrayBuffer(all.length / 5 * 4));
  for (let i = 0, at = 0; i < all.length; at += 4) {
    let word = 0;
    for (const end = i + 5; i < end; i++) word = word * 85 + values[all.charCodeAt(i)];
    words.setUint32(at, word);
  }
  const bytes = words.buffer.slice(0, words.byteLength - lacking);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// The weights of a set, "model/step", by name; `known` keeps what was unpacked. Each tensor is
// integers times a scale, and a share of the same tensor of another set, its base.
async function weightsOf(set, models, known) {
  if (known.has(set)) return known.get(set);
  const [model, step] = set.split("/"), { sets, tensors } = models[model];
  const { base, packed, scales, shares } = sets[step], weights = {};
  const before = base ? await weightsOf(base, models, known) : {};
  const bytes = await inflate(packed).catch(() => { throw Error("its bytes cannot be unpacked"); });
  const integers = new Int8Array(bytes);
  const wanted = tensors.reduce((sum, [, rows, columns]) => sum + rows * columns, 0);
  if (integers.length !== wanted) throw Error(`${integers.length} weights in place of ${wanted}`);
  let start = 0;
  tensors.forEach(([name, rows, columns], which) => {
    const values = weights[name] = before[name]?.slice() ?? new Float32Array(rows * columns);
    const scale = scales[which], share = before[name] ? shares[which] : 0;
    for (let i = 0; i < values.length; i++) {
      values[i] = integers[start++] * scale + (share ? share * values[i] : 0);
    }
  });
  known.set(set, weights);
  return weights;
}

// ---- the forward pass

// y = W x at each of T positions; W: (m, n) row by row, x: (T, n).
function linear(W, x, T, n) {
  const m = W.length / n, y = new Float32Array(T * m);
  for (let t = 0; t < T; t++) {
    const row = x.subarray(t * n, t * n + n);
    for (let j = 0, w = 0; j < m; j++) {
      let a = 0, b = 0, c = 0, e = 0; // four sums, which a processor adds at once
      for (let i = 0; i < n; i += 4, w += 4) {
        a += W[w] * row[i];
        b += W[w + 1] * row[i + 1];
        c += W[w + 2] * row[i + 2];
        e += W[w + 3] * row[i + 3];
      }
      y[t * m + j] = a + b + c + e;
    }
  }
  return y;
}

function rmsNorm(h, gain, T) {
  const d = gain.length, y = new Float32Array(T * d);
  for (let t = 0; t < T; t++) {
    const squares = h.subarray(t * d, t * d + d).reduce((sum, value) => sum + value ** 2, 0);
    const size = Math.sqrt(squares / d + 1e-5);
    for (let i = 0; i < d; i++) y[t * d + i] = h[t * d + i] / size * gain[i];
  }
  return y;
}

// Rotary: turn queries or keys, (T, d), in place. The pairs are (i, i + D / 2), as in the study.
function rotate(x, T, d, D) {
  for (let t = 0; t < T; t++) {
    for (let i = 0; i < D / 2; i++) {
      const angle = t * 10000 ** (-2 * i / D), cos = Math.cos(angle), sin = Math.sin(angle);
      for (let at = t * d + i; at < (t + 1) * d; at += D) {
        const first = x[at], second = x[at + D / 2];
        x[at] = first * cos - second * sin;
        x[at + D / 2] = second * cos + first * sin;
      }
    }
  }
}

// Take off what all queries, (T, d), have in common: their mean.
function flatten(q, T, d) {
  for (let i = 0; i < d; i++) {
    let sum = 0;
    for (let t = 0; t < T; t++) sum += q[t * d + i];
    for (let t = 0; t < T; t++) q[t * d + i] -= sum / T;
  }
}

// Multiply the largest element of the first token's state, in place.
function scaleElement(h, d, factor) {
  const sizes = h.subarray(0, d).map(Math.abs);
  h[sizes.indexOf(Math.max(...sizes))] *= factor;
}

// One block's attention, (T, d). `seen` takes a row: head, query, weights, that of k*, their sum.
function attention(q, k, v, T, { H, D, sigmoid }, star, hide, seen) {
  const d = H * D, out = new Float32Array(T * d), weights = new Float64Array(T);
  for (let head = 0; head < H; head++) {
    for (let t = 0; t < T; t++) {
      const query = t * d + head * D;
      const logit = (keys, at) => {
        let s = 0;
        for (let i = 0; i < D; i++) s += q[query + i] * keys[at + head * D + i];
        return s / Math.sqrt(D);
      };
      const first = hide && t > 0 ? 1 : 0; // the first query has no other key to see
      const own = star ? logit(star, 0) : -Infinity;
      let peak = own;
      weights.fill(0);
      for (let j = first; j <= t; j++) {
        weights[j] = logit(k, j * d);
        peak = Math.max(peak, weights[j]);
      }
      // Softmax takes the peak out before exp can overflow. The sigmoid has no sum to divide by.
      const f = sigmoid ? (s) => 1 / (1 + Math.exp(-s)) : (s) => Math.exp(s - peak);
      const ofStar = star ? f(own) : 0;
      let sum = ofStar;
      for (let j = first; j <= t; j++) sum += weights[j] = f(weights[j]);
      for (let j = first; j <= t; j++) {
        const share = weights[j] / (sigmoid ? 1 : sum), value = j * d + head * D;
        for (let i = 0; i < D; i++) out[query + i] += share * v[value + i];
      }
      seen(head, t, weights, ofStar, sum);
    }
  }
  return out;
}

// SwiGLU: gates and what they let through, (T, 2 F) -> (T, F).
function gated(up, T, F) {
  return new Float32Array(T * F).map((_, at) => {
    const row = Math.floor(at / F) * 2 * F, gate = up[row + at % F];
    return gate / (1 + Math.exp(-gate)) * up[row + F + at % F];
  });
}

// Each head's output, (T, d), times a number between 0 and 1 that its token gives. Returns those.
function openGates(W, x, out, T, { H, D }) {
  const gates = linear(W, x, T, H * D).map((s) => 1 / (1 + Math.exp(-s)));
  out.forEach((value, i) => { out[i] = value * gates[Math.floor(i / D)]; });
  return gates;
}

// The most likely tokens after each of T, the first the likeliest: {ids, shares} of `many` a token.
function likeliest(logits, T, many) {
  const V = logits.length / T, ids = [], shares = [];
  for (let t = 0; t < T; t++) {
    const row = logits.subarray(t * V, (t + 1) * V), peak = Math.max(...row);
    const sum = row.reduce((total, s) => total + Math.exp(s - peak), 0);
    for (let n = 0, left = row.slice(); n < many; n++) {
      const best = left.indexOf(Math.max(...left));
      left[best] = -Infinity;
      ids.push(best);
      shares.push(Math.exp(row[best] - peak) / sum);
    }
  }
  return { ids, shares };
}

const NEXT = 3; // tokens that are shown as what may come next

// ids -> {maps (L, H, T, T), stars (L, H, T) of k*, spent (L, H, T), alpha (L, H), losses (T - 1),
// next: see `likeliest`}. edits: {hide, flat: whether; element: a factor}. alpha: to the token at
// `sink`, a mean over the queries that see it. Weights of a sigmoid need not sum to one: `spent` is
// their sum, and maps, stars and alpha are shares of it, as su.measure has them.
// watch: a head (from 0, over all blocks), whose q, k, v and output, (T, D) each, are returned too,
// with its key of its own and, a number a token, its gate.
function forward(weights, config, ids, edits, sink = 0, watch = -1) {
  const { L, H, D, F, learned, sigmoid, gate } = config, d = H * D, T = ids.length;
  let watched;
  const maps = new Float32Array(L * H * T * T), alpha = new Float32Array(L * H);
  const stars = new Float32Array(L * H * T), spent = new Float32Array(L * H * T).fill(1);
  const h = new Float32Array(T * d);
  const addToState = (x) => x.forEach((value, i) => { h[i] += value; });
  ids.forEach((id, t) => h.set(weights["embed.weight"].subarray(id * d, id * d + d), t * d));
  if (learned) addToState(weights.position_embedding.subarray(0, T * d));
  for (let layer = 0; layer < L; layer++) {
    const of = (name) => weights[`blocks.${layer}.${name}`];
    const x = rmsNorm(h, of("norm_1.weight"), T), W = of("attention.qkv.weight");
    const [q, k, v] = [0, 1, 2].map((n) => linear(W.subarray(n * d * d, (n + 1) * d * d), x, T, d));
    if (!learned) [q, k].forEach((vectors) => rotate(vectors, T, d, D));
    if (edits.flat) flatten(q, T, d);
    const keep = (head, t, row, ofStar, sum) => {
      const at = (layer * H + head) * T + t;
      for (let j = 0; j <= t; j++) maps[at * T + j] = row[j] / sum;
      stars[at] = ofStar / sum;
      if (sigmoid) spent[at] = sum;
      if (t >= sink) alpha[layer * H + head] += row[sink] / sum / (T - sink);
    };
    const star = of("attention.key_bias");
    const out = attention(q, k, v, T, config, star, edits.hide, keep);
    if (Math.floor(watch / H) === layer) {
      const of = (rows) => Float32Array.from({ length: T * D },
        (_, i) => rows[Math.floor(i / D) * d + (watch % H) * D + i % D]);
      const own = star?.slice((watch % H) * D, (watch % H + 1) * D);
      watched = { q: of(q), k: of(k), v: of(v), out: of(out), star: own };
    }
    const gates = gate && openGates(of("attention.gate.weight"), x, out, T, config);
    if (watched && gates) {
      watched.gates ??= gates.filter((_, i) => i % H === watch % H);
    }
    addToState(linear(of("attention.out.weight"), out, T, d));
    const up = linear(of("ffn.up.weight"), rmsNorm(h, of("norm_2.weight"), T), T, d);
    addToState(linear(of("ffn.down.weight"), gated(up, T, F), T, F));
    if (layer === 0) scaleElement(h, d, edits.element);
  }
  const logits = linear(weights["unembed.weight"], rmsNorm(h, weights["norm.weight"], T), T, d);
  const losses = ids.slice(1).map((id, t) => {
    const row = logits.subarray(t * logits.length / T, (t + 1) * logits.length / T);
    const peak = Math.max(...row), sum = row.reduce((total, s) => total + Math.exp(s - peak), 0);
    return peak + Math.log(sum) - row[id]; // nats of the token after t
  });
  return { maps, stars, spent, alpha, losses, next: likeliest(logits, T, NEXT), watched };
}

// ---- the worker: it is told of the models once, and then answers requests by their number

// A model that grows in the page sends its weights; `set` then names them, as "model/step".
function answerRequests() {
  const known = new Map();
  let models;
  self.onmessage = async ({ data: { number, set, config, ids, edits, sink, watch, ...rest } }) => {
    models ??= rest.models;
    if (rest.grown) known.set(set, rest.grown);
    if (!ids) return;
    try {
      const weights = await weightsOf(set, models, known);
      self.postMessage({ number, ...forward(weights, config, ids, edits, sink, watch) });
    } catch (error) { // such as weights that were damaged on their way
      self.postMessage({ number, error: `${set}: ${error.message}` });
    }
  };
}
