// The guided tour, whose words are in texts.yaml: each step has a guess before its picture, and its
// numbers are computed. And the start of the page.

const stepNow = () => DATA.tour[state.tour - 1];
let computed; // resolves when the picture of a step is there

function scaleOf({ answer }) {
  if (answer === "share") return { most: 1, step: 0.01, written: (value) => value.toFixed(2) };
  return { most: answer, step: 1, written: (value) => `${value} of ${answer} heads` };
}

function answerOf({ answer, real: stored }) {
  if (answer === "share") return results.edited.alpha[state.head - 1];
  return above(stored ? DATA.real[stored.model].texts[2 * stored.text].alpha : results.edited.alpha);
}

function showTour() {
  const step = stepNow(), page = document.body.classList;
  page.toggle("touring", Boolean(step));
  page.toggle("at-real", Boolean(step?.real));
  $("tour-form").hidden = $("tour-end").hidden = !step;
  $("tour-back").hidden = state.tour < 2;
  $("verdict").textContent = "";
  curtain(Boolean(step));
  const { title, before } = step ?? DATA.welcome, { length } = DATA.tour;
  $("tour-title").textContent = step ? `${state.tour} of ${length}: ${title}` : title;
  $("tour-text").textContent = before;
  $("tour-next").textContent = !step ? "Start the tour" : state.tour < length ? "Next" : "To the lab";
  if (!step) return;
  const { most, step: apart } = scaleOf(step);
  $("question").textContent = step.question;
  Object.assign($("guess"), { min: 0, max: most, step: apart, value: most / 2 });
  showGuess();
}

function showGuess() {
  const words = scaleOf(stepNow()).written(Number($("guess").value));
  $("guessed").textContent = words;
  $("guess").setAttribute("aria-valuetext", words);
}

function curtain(closed) {
  for (const id of ["curtain", "real-curtain", "reveal"]) $(id).hidden = !closed;
  for (const id of ["picture", "real-picture"]) $(id).hidden = closed;
  $("tour-next").disabled = closed;
  $("tour-play").hidden = closed || !stepNow()?.play;
}

function goTo(number) {
  const step = DATA.tour[number - 1];
  Object.assign(state, UNTOUCHED, { tour: number, threshold: FIRST.threshold });
  if (step) Object.assign(state, { text: FIRST.text, query: FIRST.query }, step.state);
  if (step?.real) chooseReal(step.real);
  showTour();
  computed = compute();
  $("tour").scrollIntoView();
}

async function reveal(event) {
  event.preventDefault();
  await computed;
  const step = stepNow(), { written } = scaleOf(step), guess = written(Number($("guess").value));
  curtain(false);
  show();
  showReal();
  const answer = make("strong", {}, `You guessed ${guess}, and it is ${written(answerOf(step))}. `);
  $("verdict").replaceChildren(answer, step.after);
  $("tour-next").focus();
}

function start() {
  if (typeof DecompressionStream === "undefined" || typeof Worker === "undefined") {
    trouble("This browser is too old for the models: they need DecompressionStream (2023).");
    return;
  }
  startWorker();
  readAddress();
  build();
  buildReal();
  buildToy();
  $("tour-form").onsubmit = reveal;
  $("guess").oninput = showGuess;
  $("tour-next").onclick = () => goTo((state.tour + 1) % (DATA.tour.length + 1));
  $("tour-back").onclick = () => goTo(state.tour - 1);
  $("tour-end").onclick = () => goTo(0);
  showTour();
  if (state.tour) goTo(state.tour);
  else computed = compute();
}
start();
