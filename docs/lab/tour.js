// The guided tour, a guess before each picture; its words are in texts.yaml. And the page's start.

const stepNow = () => DATA.tour[state.tour - 1];

// A head's share of attention, or how many of all `heads` are above the threshold.
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
  $("tour-back").hidden = state.tour === 1;
  $("tour-end").hidden = state.tour === length;
  $("tour-next").textContent = state.tour < length ? "Next" : "To the lab";
  const most = step.heads ?? 1;
  Object.assign($("guess"), { max: most, step: step.heads ? 1 : 0.01, value: most / 2 });
  $("reveal").disabled = true;
  set("guess", {}, "Move the slider to your guess.");
}

function guess() {
  const { heads } = stepNow(), { value } = $("guess");
  $("reveal").disabled = false;
  set("guess", {}, heads ? `${value} of ${heads} heads` : Number(value).toFixed(2));
}

function curtain(closed) {
  document.body.classList.toggle("guessing", closed);
  $("tour-next").disabled = closed;
}

function goTo(number) {
  setFresh(false);
  Object.assign(state, FIRST, { tour: number });
  Object.assign(state, stepNow()?.state);
  showTour();
  compute();
  $(number ? "guess" : "tour-start").focus();
  scrollTo(0, 0);
}

async function reveal(event) {
  event.preventDefault();
  await compute();
  curtain(false);
  show();
  const { heads, after } = stepNow(), found = answer(results.edited);
  const answered = heads ? `${found} of ${heads}` : found.toFixed(2);
  const verdict = make("strong", {}, `You guessed ${$("guess").value}, and it is ${answered}. `);
  $("verdict").replaceChildren(verdict, make("span", { innerHTML: after }));
  $("tour-next").focus();
  scrollTo(0, 0); // on a phone the picture is now below the verdict
}

function start() {
  if (!window.DecompressionStream) trouble("This browser is too old: the models need one of 2024.");
  startWorker();
  buildControls();
  $("tour-form").onsubmit = reveal;
  $("guess").oninput = guess;
  $("tour-start").onclick = () => goTo(1);
  $("skip").onclick = () => goTo(0);
  $("tour-next").onclick = () => {
    $("tour-done").textContent = state.tour === DATA.tour.length ? "Tour done. " : "";
    goTo((state.tour + 1) % (DATA.tour.length + 1));
  };
  $("tour-back").onclick = () => goTo(state.tour - 1);
  $("tour-end").onclick = () => goTo(0);
  onhashchange = () => {
    openAddress();
    // On a phone the picture is above the summary, which lies under a bar there.
    if (matchMedia("(max-width: 899px)").matches) $("of-head").scrollIntoView();
    else $("summary").scrollIntoView({ block: "nearest" });
  };
  openAddress();
}

// Show what the address asks for.
function openAddress() {
  setFresh(!location.hash);
  readAddress();
  if (state.tour) return goTo(state.tour);
  showTour();
  return compute();
}
start();
