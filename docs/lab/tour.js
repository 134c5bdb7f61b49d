// The guided tour, whose words are in texts.yaml: each step has a guess before its picture, and its
// numbers are computed. And the start of the page.

const stepNow = () => DATA.tour[state.tour - 1];
let computed; // resolves when the picture of a step is there

function scaleOf({ answer }) {
  if (answer === "share") return { most: 1, step: 0.01, written: (value) => value.toFixed(2) };
  return { most: answer, step: 1, written: (value) => `${value} of ${answer} heads` };
}

function answerOf({ answer }) {
  const { alpha } = results.edited;
  return answer === "share" ? alpha[state.head - 1] : above(alpha);
}

function showTour() {
  const step = stepNow(), { title, before } = step ?? DATA.welcome, { length } = DATA.tour;
  document.body.classList.toggle("touring", Boolean(step));
  $("tour-form").hidden = $("tour-end").hidden = !step;
  $("tour-back").hidden = state.tour < 2;
  $("verdict").textContent = "";
  curtain(Boolean(step));
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
  set("guess", {}, scaleOf(stepNow()).written(Number($("guess").value)));
}

function curtain(closed) {
  $("curtain").hidden = $("reveal").hidden = !closed;
  $("picture").hidden = $("tour-next").disabled = closed;
  $("tour-play").hidden = closed || !stepNow()?.play;
}

function goTo(number) {
  const step = DATA.tour[number - 1];
  Object.assign(state, UNTOUCHED, { tour: number, threshold: FIRST.threshold });
  if (step) Object.assign(state, { text: FIRST.text, query: FIRST.query, bos: 0 }, step.state);
  showTour();
  computed = compute();
  $("tour").scrollIntoView();
  $(step ? "guess" : "tour-next").focus();
}

async function reveal(event) {
  event.preventDefault();
  await computed;
  const step = stepNow(), { written } = scaleOf(step), guess = written(Number($("guess").value));
  curtain(false);
  show();
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
  buildModels();
  buildTexts();
  buildControls();
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
