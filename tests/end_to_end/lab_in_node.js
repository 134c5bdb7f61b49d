// Runs the lab's own script as it stands in its page: node lab_in_node.js index.html < cases > answers
// A case names a model and a step, and has a text (and where the fixed token goes) or ids, and edits.
"use strict";
const fs = require("fs"), vm = require("vm");

const page = fs.readFileSync(process.argv[2], "utf8");
const element = (start) => {
  const after = page.split(start)[1];
  return after.slice(0, after.indexOf("</script>"));
};
const data = JSON.parse(element('<script type="application/json" id="data">'));
const lab = vm.runInThisContext(
  `${element('<script id="model">')}; ({ makeTokenizer, arrange, weightsOf, forward })`);
const tokenizer = lab.makeTokenizer(data.tokenizer.vocabulary, data.tokenizer.merges);
const plain = (arrays) => Object.fromEntries(
  Object.entries(arrays).map(([name, values]) => [name, Array.from(values)]));

async function main() {
  const cases = JSON.parse(fs.readFileSync(0, "utf8")), known = new Map();
  const asked = {}, answers = [];
  for (const { model, step, text, place, ids: chosen, edits, watch, damage } of cases) {
    const { config } = data.models[model], set = `${model}/${step}`;
    if (damage) { // the weights end too early
      const { packed } = data.models[model].sets[step];
      const broken = { [model]: { ...data.models[model], sets: { [step]: { ...data.models[model].sets[step],
        packed: packed.slice(0, 400) } } } };
      const error = await lab.weightsOf(set, broken, new Map()).then(() => "", (one) => String(one));
      answers.push({ error });
      continue;
    }
    const weights = asked[set] = await lab.weightsOf(set, data.models, known);
    const ids = chosen ?? lab.arrange(tokenizer.encode(text), place);
    const before = process.cpuUsage(), result = lab.forward(weights, config, ids, edits, 0, watch);
    const milliseconds = process.cpuUsage(before).user / 1000;
    const { next, watched, ...arrays } = result;
    answers.push({ ids, labels: ids.map(tokenizer.label), milliseconds, next, ...plain(arrays),
      watched: watched && plain(Object.fromEntries(Object.entries(watched).filter(([, one]) => one))) });
  }
  for (const set of Object.keys(asked)) asked[set] = plain(asked[set]);
  fs.writeFileSync(1, JSON.stringify({ answers, weights: asked }));
}
main();
