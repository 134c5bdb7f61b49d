// Training in the page: the same small model, forward and backward by hand, in plain JavaScript.
// It runs in a worker of its own, and in Node, where its gradients are compared with PyTorch's.
// B texts of T tokens make N = B T rows; L blocks, H heads, D numbers a head, d = H D, V tokens.
"use strict";

const RECIPE = { B: 8, T: 64, steps: 1000, warmup: 20, rate: 0.03, floor: 0.1, decay: 0.1,
  beta1: 0.9, beta2: 0.95, tiny: 1e-8, clip: 1, every: 10, held: 16 };
const END = 0; // <eos>
const SHAPE = { V: 512, L: 2, H: 2, D: 16, F: 64, learned: false };

// ---- weights

// Name, rows and columns of every weight, named as in the study's PyTorch model.
function shapesOf({ V, L, H, D, F, star, gate }) {
  const d = H * D, shapes = [["embed.weight", V, d]];
  for (let layer = 0; layer < L; layer++) {
    const add = (name, rows, columns) => shapes.push([`blocks.${layer}.${name}`, rows, columns]);
    add("attention.qkv.weight", 3 * d, d);
    add("attention.out.weight", d, d);
    if (star) add("attention.key_bias", H, D);
    if (gate) add("attention.gate.weight", H, d);
    add("ffn.up.weight", 2 * F, d);
    add("ffn.down.weight", d, F);
    add("norm_1.weight", 1, d);
    add("norm_2.weight", 1, d);
  }
  shapes.push(["norm.weight", 1, d], ["unembed.weight", V, d]);
  return shapes;
}

// All weights in one array, and a view of it for each name.
function weightsIn(config, all) {
  const shapes = shapesOf(config), views = {};
  const size = shapes.reduce((sum, [, rows, columns]) => sum + rows * columns, 0);
  const flat = all ?? new Float32Array(size);
  let start = 0;
  for (const [name, rows, columns] of shapes) {
    views[name] = flat.subarray(start, start += rows * columns);
  }
  return { flat, views };
}

// Numbers in [0, 1), the same for the same seed (mulberry32).
function randomOf(seed) {
  let state = Math.imul(seed + 1, 0x9e3779b1);
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// The start of training, with the study's standard deviations. Gains are 1.
function initialWeights(config, seed) {
  const { flat, views } = weightsIn(config), random = randomOf(seed);
  const normal = () =>
    Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
  for (const [name, , columns] of shapesOf(config)) {
    let deviation = Math.sqrt(2 / 5 / columns);
    if (name.endsWith("key_bias")) deviation = 0.02;
    if (name.endsWith("ffn.down.weight")) deviation = 1 / Math.sqrt(columns) / config.L;
    const gain = name.includes("norm");
    views[name].forEach((_, i) => { views[name][i] = gain ? 1 : deviation * normal(); });
  }
  return { flat, views };
}

// ---- products of matrices

function transposed(A, rows, columns) {
  const out = new Float32Array(rows * columns);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) out[j * rows + i] = A[i * columns + j];
  }
  return out;
}

// C += A B^T. A: (M, K), B: (N, K), C: (M, N); M is a multiple of 4. Four rows by two columns at a
// time, so that each number that is read serves several products.
function addProduct(C, A, B, M, N, K) {
  for (let j = 0; j < N; j += 2) {
    const last = j + 1 === N, b0 = j * K, b1 = last ? b0 : b0 + K;
    for (let i = 0; i < M; i += 4) {
      const a0 = i * K, a1 = a0 + K, a2 = a1 + K, a3 = a2 + K;
      let c00 = 0, c01 = 0, c10 = 0, c11 = 0, c20 = 0, c21 = 0, c30 = 0, c31 = 0;
      for (let k = 0; k < K; k++) {
        const x = B[b0 + k], y = B[b1 + k];
        const p = A[a0 + k], q = A[a1 + k], r = A[a2 + k], s = A[a3 + k];
        c00 += p * x; c01 += p * y;
        c10 += q * x; c11 += q * y;
        c20 += r * x; c21 += r * y;
        c30 += s * x; c31 += s * y;
      }
      const at = i * N + j;
      C[at] += c00; C[at + N] += c10; C[at + 2 * N] += c20; C[at + 3 * N] += c30;
      if (last) continue;
      C[at + 1] += c01; C[at + N + 1] += c11; C[at + 2 * N + 1] += c21; C[at + 3 * N + 1] += c31;
    }
  }
}

// y = x W^T, (N, rows) of (N, columns): a linear map of every row.
function mapped(x, W, N, columns) {
  const rows = W.length / columns, y = new Float32Array(N * rows);
  addProduct(y, x, W, N, rows, columns);
  return y;
}

// Back through a linear map: the gradient of W is added to dW, that of x is returned.
function mappedBack(dy, x, W, dW, N, columns) {
  const rows = W.length / columns, dx = new Float32Array(N * columns);
  addProduct(dx, dy, transposed(W, rows, columns), N, columns, rows);
  if (rows % 4 === 0) {
    addProduct(dW, transposed(dy, N, rows), transposed(x, N, columns), rows, columns, N);
  } else { // as few rows as a gate has: from the other side
    const turned = new Float32Array(W.length);
    addProduct(turned, transposed(x, N, columns), transposed(dy, N, rows), columns, rows, N);
    transposed(turned, columns, rows).forEach((value, i) => { dW[i] += value; });
  }
  return dx;
}

const addTo = (sum, x) => { for (let i = 0; i < x.length; i++) sum[i] += x[i]; };

// ---- RMSNorm, rotary, SwiGLU

// y = h / s * g, where s is the root mean square of the row. Returns y and every row's s.
function normed(h, gain, N) {
  const d = gain.length, y = new Float32Array(N * d), sizes = new Float32Array(N);
  for (let n = 0, at = 0; n < N; n++, at += d) {
    let squares = 0;
    for (let i = 0; i < d; i++) squares += h[at + i] ** 2;
    const size = sizes[n] = Math.sqrt(squares / d + 1e-5);
    for (let i = 0; i < d; i++) y[at + i] = h[at + i] / size * gain[i];
  }
  return { y, sizes };
}

// dh = g dy / s - h (g dy . h) / (d s^3), added to `dh`; dg += dy h / s.
function normedBack(dy, h, sizes, gain, dGain, dh, N) {
  const d = gain.length;
  for (let n = 0, at = 0; n < N; n++, at += d) {
    const s = sizes[n];
    let along = 0;
    for (let i = 0; i < d; i++) along += gain[i] * dy[at + i] * h[at + i];
    for (let i = 0; i < d; i++) {
      dGain[i] += dy[at + i] * h[at + i] / s;
      dh[at + i] += gain[i] * dy[at + i] / s - h[at + i] * along / (d * s ** 3);
    }
  }
}

// Turn the queries and keys of rows (N, 3 d) of q, k, v in place; sign -1 turns them back.
function turn(qkv, N, { T, H, D }, sign) {
  const half = D / 2, d = H * D;
  for (let t = 0; t < T; t++) {
    for (let i = 0; i < half; i++) {
      const angle = sign * t * 10000 ** (-2 * i / D), cos = Math.cos(angle), sin = Math.sin(angle);
      for (let n = t; n < N; n += T) {
        for (let part = 0; part < 2 * H; part++) { // the heads' queries, then their keys
          const at = n * 3 * d + part * D + i, first = qkv[at], second = qkv[at + half];
          qkv[at] = first * cos - second * sin;
          qkv[at + half] = second * cos + first * sin;
        }
      }
    }
  }
}

const logistic = (x) => 1 / (1 + Math.exp(-x));

// (N, 2 F) -> (N, F): silu of the first half times the second half.
function swiglu(up, N, F) {
  const out = new Float32Array(N * F);
  for (let n = 0; n < N; n++) {
    for (let i = 0; i < F; i++) {
      const gate = up[n * 2 * F + i];
      out[n * F + i] = gate * logistic(gate) * up[n * 2 * F + F + i];
    }
  }
  return out;
}

function swigluBack(dOut, up, N, F) {
  const dUp = new Float32Array(N * 2 * F);
  for (let n = 0; n < N; n++) {
    for (let i = 0; i < F; i++) {
      const at = n * 2 * F + i, gate = up[at], open = logistic(gate), dy = dOut[n * F + i];
      dUp[at] = dy * up[at + F] * open * (1 + gate * (1 - open));
      dUp[at + F] = dy * gate * open;
    }
  }
  return dUp;
}

// ---- attention

// qkv: (N, 3 d). Returns the heads' outputs (N, d), the weights (B, H, T, T) and those of k*.
function attend(qkv, star, { B, T, H, D, sigmoid }) {
  const d = H * D, row = 3 * d, scale = 1 / Math.sqrt(D);
  const out = new Float32Array(B * T * d);
  const weights = new Float32Array(B * H * T * T), stars = new Float32Array(B * H * T);
  for (let b = 0; b < B; b++) {
    for (let head = 0; head < H; head++) {
      const start = b * T * row + head * D; // of the first query
      for (let i = 0; i < T; i++) {
        const query = start + i * row, at = ((b * H + head) * T + i) * T;
        let own = -Infinity;
        if (star) {
          own = 0;
          for (let c = 0; c < D; c++) own += qkv[query + c] * star[head * D + c];
          own *= scale;
        }
        let peak = own;
        for (let j = 0; j <= i; j++) {
          const key = start + d + j * row;
          let logit = 0;
          for (let c = 0; c < D; c++) logit += qkv[query + c] * qkv[key + c];
          weights[at + j] = logit * scale;
          peak = Math.max(peak, logit * scale);
        }
        let sum = 1; // the sigmoid has no sum to divide by
        if (sigmoid) {
          for (let j = 0; j <= i; j++) weights[at + j] = logistic(weights[at + j]);
        } else {
          sum = star ? Math.exp(own - peak) : 0;
          for (let j = 0; j <= i; j++) sum += weights[at + j] = Math.exp(weights[at + j] - peak);
          if (star) stars[(b * H + head) * T + i] = Math.exp(own - peak) / sum;
        }
        const to = (b * T + i) * d + head * D;
        for (let j = 0; j <= i; j++) {
          const weight = weights[at + j] /= sum, value = start + 2 * d + j * row;
          for (let c = 0; c < D; c++) out[to + c] += weight * qkv[value + c];
        }
      }
    }
  }
  return { out, weights, stars };
}

// The gradient of qkv, given that of the heads' outputs; that of k* is added to `dStar`.
function attendBack(dOut, qkv, star, dStar, { weights, stars }, { B, T, H, D, sigmoid }) {
  const d = H * D, row = 3 * d, scale = 1 / Math.sqrt(D);
  const dQkv = new Float32Array(qkv.length), dWeights = new Float64Array(T);
  for (let b = 0; b < B; b++) {
    for (let head = 0; head < H; head++) {
      const start = b * T * row + head * D;
      for (let i = 0; i < T; i++) {
        const query = start + i * row, at = ((b * H + head) * T + i) * T;
        const from = (b * T + i) * d + head * D;
        let along = 0; // sum of A dA, which a softmax takes off; k* has no value, and so dA = 0
        for (let j = 0; j <= i; j++) {
          const value = start + 2 * d + j * row, weight = weights[at + j];
          let dWeight = 0;
          for (let c = 0; c < D; c++) {
            dWeight += dOut[from + c] * qkv[value + c];
            dQkv[value + c] += weight * dOut[from + c];
          }
          dWeights[j] = dWeight;
          along += weight * dWeight;
        }
        for (let j = 0; j <= i; j++) {
          const weight = weights[at + j], key = start + d + j * row;
          const slope = sigmoid ? dWeights[j] * (1 - weight) : dWeights[j] - along;
          const dLogit = weight * slope * scale;
          for (let c = 0; c < D; c++) {
            dQkv[query + c] += dLogit * qkv[key + c];
            dQkv[key + c] += dLogit * qkv[query + c];
          }
        }
        if (!star) continue;
        const dLogit = -stars[(b * H + head) * T + i] * along * scale;
        for (let c = 0; c < D; c++) {
          dQkv[query + c] += dLogit * star[head * D + c];
          dStar[head * D + c] += dLogit * qkv[query + c];
        }
      }
    }
  }
  return dQkv;
}

// A gate: every head's output times a number between 0 and 1. Back: the gradients of both.
function gateHeads(out, gates, N, { H, D }) {
  const gated = new Float32Array(out.length);
  for (let i = 0; i < out.length; i++) gated[i] = out[i] * gates[Math.floor(i / D)];
  return gated;
}

function gateBack(dGated, out, gates, N, { H, D }) {
  const dOut = gateHeads(dGated, gates, N, { H, D }), dLogits = new Float32Array(N * H);
  for (let i = 0; i < out.length; i++) dLogits[Math.floor(i / D)] += dGated[i] * out[i];
  dLogits.forEach((value, i) => { dLogits[i] = value * gates[i] * (1 - gates[i]); });
  return { dOut, dLogits };
}

// ---- the model

// Mean cross-entropy of the tokens (B rows of T + 1) in nats. Adds all gradients to `grads`, views
// by name, unless it is null. Returns the loss, and every block's weights of attention.
function lossAndGradients(W, grads, config, tokens) {
  const { V, L, H, D, F, T } = config, d = H * D, B = tokens.length / (T + 1), N = B * T;
  const sizes = { ...config, B }, kept = [], h = new Float32Array(N * d);
  const inputs = new Int32Array(N), targets = new Int32Array(N);
  for (let n = 0; n < N; n++) {
    const at = Math.floor(n / T) * (T + 1) + n % T;
    inputs[n] = tokens[at];
    targets[n] = tokens[at + 1];
    h.set(W["embed.weight"].subarray(inputs[n] * d, inputs[n] * d + d), n * d);
  }
  for (let layer = 0; layer < L; layer++) {
    const of = (name) => W[`blocks.${layer}.${name}`], star = of("attention.key_bias");
    const before = h.slice(), first = normed(h, of("norm_1.weight"), N);
    const qkv = mapped(first.y, of("attention.qkv.weight"), N, d);
    turn(qkv, N, sizes, 1);
    const heads = attend(qkv, star, sizes);
    const gates = config.gate && mapped(first.y, of("attention.gate.weight"), N, d).map(logistic);
    const merged = gates ? gateHeads(heads.out, gates, N, sizes) : heads.out;
    addTo(h, mapped(merged, of("attention.out.weight"), N, d));
    const middle = h.slice(), second = normed(h, of("norm_2.weight"), N);
    const up = mapped(second.y, of("ffn.up.weight"), N, d), hidden = swiglu(up, N, F);
    addTo(h, mapped(hidden, of("ffn.down.weight"), N, F));
    kept.push({ before, first, qkv, heads, gates, merged, middle, second, up, hidden });
  }
  const last = normed(h, W["norm.weight"], N);
  const logits = mapped(last.y, W["unembed.weight"], N, d);
  const loss = softmaxLoss(logits, targets, N, V); // the logits are now their own gradient
  if (grads) {
    const dLast = mappedBack(logits, last.y, W["unembed.weight"], grads["unembed.weight"], N, d);
    const dh = new Float32Array(N * d);
    normedBack(dLast, h, last.sizes, W["norm.weight"], grads["norm.weight"], dh, N);
    for (let layer = L - 1; layer >= 0; layer--) blockBack(layer, dh, W, grads, kept[layer], sizes);
    const dEmbed = grads["embed.weight"];
    for (let n = 0; n < N; n++) {
      for (let i = 0; i < d; i++) dEmbed[inputs[n] * d + i] += dh[n * d + i];
    }
  }
  return { loss, heads: kept.map(({ heads }) => heads) };
}

// The mean loss; in place of the logits stands its gradient, (softmax - one at the target) / N.
function softmaxLoss(logits, targets, N, V) {
  let total = 0;
  for (let n = 0, at = 0; n < N; n++, at += V) {
    let peak = -Infinity, sum = 0;
    for (let i = 0; i < V; i++) peak = Math.max(peak, logits[at + i]);
    total += peak - logits[at + targets[n]];
    for (let i = 0; i < V; i++) sum += logits[at + i] = Math.exp(logits[at + i] - peak);
    total += Math.log(sum);
    for (let i = 0; i < V; i++) logits[at + i] /= sum * N;
    logits[at + targets[n]] -= 1 / N;
  }
  return total / N;
}

// Back through a block. dh: the gradient of what it returned, and then of what it was given.
function blockBack(layer, dh, W, grads, kept, sizes) {
  const { B, T, H, D, F } = sizes, N = B * T, d = H * D;
  const of = (name) => W[`blocks.${layer}.${name}`], g = (name) => grads[`blocks.${layer}.${name}`];
  const back = (name, dy, x, columns) => mappedBack(dy, x, of(name), g(name), N, columns);
  const dHidden = back("ffn.down.weight", dh, kept.hidden, F);
  const dSecond = back("ffn.up.weight", swigluBack(dHidden, kept.up, N, F), kept.second.y, d);
  const { middle, second } = kept;
  normedBack(dSecond, middle, second.sizes, of("norm_2.weight"), g("norm_2.weight"), dh, N);
  let dOut = back("attention.out.weight", dh, kept.merged, d), dFirst;
  if (kept.gates) {
    const both = gateBack(dOut, kept.heads.out, kept.gates, N, sizes);
    dOut = both.dOut;
    dFirst = back("attention.gate.weight", both.dLogits, kept.first.y, d);
  }
  const star = "attention.key_bias";
  const dQkv = attendBack(dOut, kept.qkv, of(star), g(star), kept.heads, sizes);
  turn(dQkv, N, sizes, -1);
  const fromQkv = back("attention.qkv.weight", dQkv, kept.first.y, d);
  if (dFirst) addTo(fromQkv, dFirst);
  const { before, first } = kept;
  normedBack(fromQkv, before, first.sizes, of("norm_1.weight"), g("norm_1.weight"), dh, N);
}

// ---- AdamW, as torch.optim.AdamW has it

// The rate of a step (0, 1, ..): a linear warm-up, then a cosine down to a tenth.
function rateAt(step, { steps, warmup, rate, floor }) {
  if (step < warmup) return rate * (step + 1) / warmup;
  const done = Math.min(1, (step - warmup) / Math.max(1, steps - 1 - warmup));
  return rate * (floor + (1 - floor) * (1 + Math.cos(Math.PI * done)) / 2);
}

// One update of all weights. step counts from 0; m and v are the running means. Gradients are
// first made shorter, so that their norm over all weights is at most `clip`, and then set to 0.
function adamW(weights, grads, { m, v }, step, recipe) {
  const { decay, beta1, beta2, tiny, clip } = recipe, rate = rateAt(step, recipe);
  let squares = 0;
  for (let i = 0; i < grads.length; i++) squares += grads[i] ** 2;
  const shorter = Math.min(1, clip / (Math.sqrt(squares) + 1e-6));
  const mended1 = 1 - beta1 ** (step + 1), mended2 = Math.sqrt(1 - beta2 ** (step + 1));
  for (let i = 0; i < weights.length; i++) {
    const g = grads[i] * shorter;
    m[i] += (1 - beta1) * (g - m[i]);
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    weights[i] *= 1 - rate * decay;
    weights[i] -= rate / mended1 * m[i] / (Math.sqrt(v[i]) / mended2 + tiny);
  }
  grads.fill(0);
}

// ---- a training

// Rows of T + 1 tokens, without a gap; with a fixed token in the first place of each if asked.
function rowsOf(ids, T, fixed) {
  const rows = [];
  for (let start = 0; start + T < ids.length; start += T) {
    const row = Int32Array.from(ids.slice(start, start + T + 1));
    if (fixed) row[0] = FIXED;
    rows.push(row);
  }
  return rows;
}

const joined = (rows) => Int32Array.from(rows.flatMap((row) => [...row]));

// A model in training. config: SHAPE and star, sigmoid, gate, fixed. ids: the text, in tokens.
function makeTraining(choice, ids, seed, recipe = RECIPE) {
  const config = { ...SHAPE, ...choice, T: recipe.T }, { L, H, T } = config;
  const { flat, views } = initialWeights(config, seed);
  const grads = weightsIn(config), mean = new Float32Array(flat.length);
  const means = { m: mean, v: mean.slice() };
  const rows = rowsOf(ids, T, config.fixed), held = joined(rows.splice(-recipe.held));
  const random = randomOf(seed + 1000003);
  let queue = [], step = 0;

  // The next rows, in an order that is drawn anew for each pass over the text.
  const take = () => {
    while (queue.length < recipe.B) {
      const order = rows.map((row) => [random(), row]).sort((a, b) => a[0] - b[0]);
      queue.push(...order.map(([, row]) => row));
    }
    return joined(queue.splice(0, recipe.B));
  };

  // On rows that were held back: the loss, and the percentage of pairs of a text and a head that
  // give the first token, or the key of their own, more than 0.3.
  const evaluate = () => {
    const { loss, heads } = lossAndGradients(views, null, config, held), B = recipe.held;
    const pairs = { first: 0, star: 0 };
    heads.forEach(({ weights, stars }) => {
      for (let pair = 0; pair < B * H; pair++) {
        let first = 0, star = 0;
        for (let i = 0; i < T; i++) {
          const at = (pair * T + i) * T;
          let sum = 1;
          if (config.sigmoid) { // a share of what the query spends
            sum = 1e-30;
            for (let j = 0; j <= i; j++) sum += weights[at + j];
          }
          first += weights[at] / sum / T;
          star += stars[pair * T + i] / T;
        }
        pairs.first += first > 0.3 ? 100 / (B * H * L) : 0;
        pairs.star += star > 0.3 ? 100 / (B * H * L) : 0;
      }
    });
    return { step, loss, ...pairs };
  };

  // One step; the loss of its rows.
  const advance = () => {
    const { loss } = lossAndGradients(views, grads.views, config, take());
    adamW(flat, grads.flat, means, step++, recipe);
    return loss;
  };
  return { config, flat, views, evaluate, advance, at: () => step };
}

// ---- the worker: it is given a text and a choice, and then runs, pauses and makes single steps

function trainOnRequest() {
  let training, running = false, seconds = 0, timed = false;

  const report = () => {
    const weights = Object.fromEntries(
      Object.entries(training.views).map(([name, values]) => [name, values.slice()]));
    self.postMessage({ ...training.evaluate(), weights, seconds });
  };
  const step = () => {
    const before = performance.now();
    training.advance();
    seconds += (performance.now() - before) / 1000;
  };
  const run = () => {
    timed = false;
    if (!running || training.at() === RECIPE.steps) return;
    step();
    if (training.at() % RECIPE.every === 0) report();
    again();
  };
  // A message that came meanwhile is read before the next step.
  const again = () => {
    if (!timed) setTimeout(run, 0);
    timed = true;
  };
  const begin = async ({ choice, seed, packed, vocabulary, merges }) => {
    const text = new TextDecoder().decode(await inflate(packed)), { V } = SHAPE;
    const joined = V - (vocabulary.length - merges.length);
    const { encode } = makeTokenizer(vocabulary.slice(0, V), merges.slice(0, joined));
    // Documents, each of which ends with a token of its own, <eos>.
    const ids = text.split("\0").flatMap((one) => [...encode(one, Infinity), END]);
    training = makeTraining(choice, ids, seed);
    report();
  };
  self.onmessage = async ({ data }) => {
    try {
      running = data.running;
      if (data.choice) await begin(data);
      if (data.one && training.at() < RECIPE.steps) {
        step();
        report();
      }
      if (running) again();
    } catch ({ message }) {
      self.postMessage({ error: message });
    }
  };
}
