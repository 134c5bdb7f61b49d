// The guided tour, a guess before each picture; its words are in texts.yaml. And the page's start.

const stepNow = () => {
  const step = DATA.tour[state.tour - 1];
  return step && { ...step, ...texts("tour")[state.tour - 1] };
};

// A head's share of attention, or how many of all `heads` are above the threshold.
const answer = ({ alpha }) => (stepNow().heads ? above(alpha) : alpha[state.head - 1]);

function showTour() {
  const step = stepNow();
  document.body.classList.toggle("touring", Boolean(step));
  document.body.classList.toggle("open", Boolean(step?.open));
  curtain(Boolean(step));
  if (!step) return;
  $("verdict").textContent = "";
  writeTour();
  const most = step.heads ?? 1;
  Object.assign($("guess"), { max: most, step: step.heads ? 1 : 0.01, value: most / 2 });
  $("reveal").disabled = true;
  set("guess", {}, said("move_slider"));
}

// The words of a step, and of its verdict once it is there.
function writeTour() {
  const step = stepNow(), { length } = DATA.tour;
  if (!step) return;
  $("tour-title").textContent = said("tour_step", { step: state.tour, length, title: step.title });
  $("tour-text").textContent = step.before;
  $("question").textContent = step.question;
  $("tour-play").hidden = !step.play;
  $("tour-back").hidden = state.tour === 1;
  $("tour-end").hidden = state.tour === length;
  $("tour-next").textContent = said(state.tour < length ? "next" : "to_lab");
  if ($("verdict").textContent) writeVerdict();
  else if (!$("reveal").disabled) guess();
}

function guess() {
  const { heads } = stepNow(), { value } = $("guess");
  $("reveal").disabled = false;
  set("guess", {}, heads ? said("guess_heads", { value, heads }) : two(Number(value)));
}

function curtain(closed) {
  document.body.classList.toggle("guessing", closed);
  $("tour-next").disabled = closed;
}

function goTo(number) {
  setFresh(false);
  Object.assign(state, FIRST, { tour: number, lang: state.lang });
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
  writeVerdict();
  $("tour-next").focus();
  scrollTo(0, 0); // on a phone the picture is now below the verdict
}

function writeVerdict() {
  const { heads, after } = stepNow(), found = answer(results.edited);
  const answered = heads ? said("answer_heads", { found, heads }) : two(found);
  const verdict = make("strong", {},
    said("verdict", { guess: heads ? $("guess").value : two(Number($("guess").value)), answer: answered }));
  $("verdict").replaceChildren(verdict, make("span", { innerHTML: after }));
}

function start() {
  if (!window.DecompressionStream) trouble(said("old"));
  startWorker();
  readWords();
  buildControls();
  writeWords();
  buildShare();
  buildGrowth();
  if (OWN) writeReport();
  $("tour-form").onsubmit = reveal;
  $("guess").oninput = guess;
  $("tour-start").onclick = () => goTo(1);
  $("skip").onclick = () => goTo(0);
  $("tour-next").onclick = () => {
    $("tour-done").textContent = state.tour === DATA.tour.length ? said("tour_done") : "";
    goTo((state.tour + 1) % (DATA.tour.length + 1));
  };
  $("tour-back").onclick = () => goTo(state.tour - 1);
  $("tour-end").onclick = () => goTo(0);
  $("follow-end").onclick = () => {
    look({ key: 0 });
    $("map").focus();
  };
  onhashchange = () => {
    showTried(); // before the address holds more than the link did
    openAddress();
    // On a phone the picture is above the summary, which lies under a bar there.
    if (matchMedia("(max-width: 899px)").matches) $("of-head").scrollIntoView();
    else $("summary").scrollIntoView({ block: "nearest" });
  };
  openAddress();
  window.started = true; // to its end: page.html looks for it
}

// Of a thing to try: its question and what we see, beside the picture, until one goes on.
function showTried() {
  const item = [...document.querySelectorAll("#try a")].find(({ hash }) => hash === location.hash)?.closest("li");
  $("tried").hidden = !item;
  $("tried").innerHTML = item?.innerHTML ?? "";
  for (const link of $("tried").querySelectorAll('a[href^="#"]')) link.replaceWith(link.textContent);
}

// Of the page of a user's model: what was recorded of it, and the report of each text.
function writeReport() {
  const [name] = NAMES, { H, texts: recorded } = DATA.real[name], { report } = DATA;
  const count = recorded.length, heads = recorded[0].alpha.length;
  $("recorded-of").textContent = said("recorded", { name: DATA.words[name].title, heads,
    blocks: heads / H, texts: count === 1 ? said("one_text") : said("many_texts", { count }),
    tokens: Math.max(...recorded.map(({ labels }) => labels.length)) });
  const columns = ["sink", "excess", "most", "element", "value", "tokens"];
  const head = ["text", ...columns].map((one) => make("th", { scope: "col" }, said(`report_${one}`)));
  const rows = report.map((row, n) => make("tr", {}, make("th", { scope: "row" }, short(DATA.sentences[n], 40)),
    ...columns.map((one) => make("td", {}, reported(row[one])))));
  $("report").replaceChildren(make("tr", {}, ...head), ...rows);
}

function reported(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? said("report_most_at", value) : String(value);
}

// Show what the address asks for.
function openAddress() {
  setFresh(!location.hash);
  const { lang } = state;
  readAddress();
  chosen = state.key > 0; // a link to a cell leads to it
  if (state.lang !== lang) writeWords();
  if (state.tour) return goTo(state.tour);
  showTour();
  return compute();
}
start();
