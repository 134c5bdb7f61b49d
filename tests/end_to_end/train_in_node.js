// Runs the lab's training in Node: node train_in_node.js train.js < question > answer
"use strict";
const fs = require("fs"), vm = require("vm");

const names = "weightsIn, lossAndGradients, adamW, rateAt, makeTraining, initialWeights";
const source = `const FIXED = 2; ${fs.readFileSync(process.argv[2], "utf8")}; ({ ${names} })`;
const lab = vm.runInThisContext(source);
const { cases = [], trainings = [] } = JSON.parse(fs.readFileSync(0, "utf8"));
const plain = (views) => Object.fromEntries(
  Object.entries(views).map(([name, values]) => [name, Array.from(values)]));

// The gradients of a batch, and the weights after a few updates on it.
function gradients({ config, weights, tokens, recipe, updates }) {
  const { flat, views } = lab.weightsIn(config), grads = lab.weightsIn(config);
  Object.entries(weights).forEach(([name, values]) => views[name].set(values));
  const { loss, heads } = lab.lossAndGradients(views, grads.views, config, tokens), first = plain(grads.views);
  const means = { m: new Float32Array(flat.length), v: new Float32Array(flat.length) };
  for (let step = 0; step < updates; step++) {
    if (step) lab.lossAndGradients(views, grads.views, config, tokens);
    lab.adamW(flat, grads.flat, means, step, recipe);
  }
  const rates = Array.from({ length: recipe.steps }, (_, step) => lab.rateAt(step, recipe));
  const maps = heads.map((one) => Array.from(one.weights));
  return { loss, grads: first, updated: plain(views), rates, maps };
}

// A whole training, and what it costs.
function training({ choice, ids, seed, steps }) {
  const made = lab.makeTraining(choice, ids, seed), before = process.cpuUsage();
  for (let step = 0; step < steps; step++) made.advance();
  const seconds = process.cpuUsage(before).user / 1e6;
  return { ...made.evaluate(), seconds, start: Array.from(lab.initialWeights(made.config, seed).flat) };
}

fs.writeFileSync(1, JSON.stringify({
  answers: cases.map(gradients), trainings: trainings.map(training),
}));
