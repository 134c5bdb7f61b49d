// The guided tour, a guess before each picture; its words are in texts.yaml. And the page's start.

const stepNow = () => DATA.tour[state.tour - 1];

// A guess or an answer: a head's share of attention, or so many of all `heads`.
const inWords = (value) =>
  (stepNow().heads ? `${value} of ${stepNow().heads} heads` : value.toFixed(2));

const answer = ({ alpha }) => (stepNow().heads ? above(alpha) : alpha[state.head - 1]);

function showTour() {
  const step = stepNow(), { length } = DATA.tour;
  document.body.classList.toggle("touring", Boolean(step));
  curtain(Boolean(step));
  if (!step) return;
  $("tour-title").textContent = `${state.tour} of ${length}: ${step.title}`;
  $("tour-text").textContent = step.before;
  $("question").textContent = step.question;
  $("verdict").textContent = "";
  $("tour-play").hidden = !step.play;
  $("tour-next").textContent = state.tour < length ? "Next" : "To the lab";
  const most = step.heads ?? 1;
  Object.assign($("guess"), { max: most, step: step.heads ? 1 : 0.01, value: most / 2 });
  showGuess();
}

const showGuess = () => set("guess", {}, inWords(Number($("guess").value)));

function curtain(closed) {
  document.body.classList.toggle("guessing", closed);
  $("tour-next").disabled = closed;
}

function goTo(number) {
  Object.assign(state, UNTOUCHED, { tour: number, threshold: FIRST.threshold });
  const { text, query } = FIRST;
  if (stepNow()) Object.assign(state, { text, query, bos: 0 }, stepNow().state);
  showTour();
  compute();
  document.body.scrollIntoView();
  $(number ? "guess" : "tour-start").focus();
}

async function reveal(event) {
  event.preventDefault();
  await compute();
  curtain(false);
  show();
  const guess = inWords(Number($("guess").value)), found = inWords(answer(results.edited));
  const verdict = make("strong", {}, `You guessed ${guess}, and it is ${found}. `);
  $("verdict").replaceChildren(verdict, stepNow().after);
  $("tour-next").focus();
}

function start() {
  if (!window.DecompressionStream) trouble("This browser is too old: the models need one of 2024.");
  startWorker();
  buildControls();
  $("tour-form").onsubmit = reveal;
  $("guess").oninput = showGuess;
  $("tour-start").onclick = () => goTo(1);
  $("tour-next").onclick = () => goTo((state.tour + 1) % (DATA.tour.length + 1));
  $("tour-back").onclick = () => goTo(state.tour - 1);
  $("tour-end").onclick = () => goTo(0);
  onhashchange = () => {
    openAddress();
    $("summary").scrollIntoView({ block: "nearest" });
  };
  openAddress();
}

// Show what the address asks for.
function openAddress() {
  readAddress();
  if (state.tour) return goTo(state.tour);
  showTour();
  return compute();
}
start();
