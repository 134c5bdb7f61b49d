// Taking the page along: its address, the line for a page of one's own, and the map as a file.

const linkOf = () => location.href.split("#")[0] + addressOf();
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/"/g, "&quot;").replace(/</g, "&lt;");

function showLink() {
  const file = location.href.split("#")[0].split("/").at(-1);
  $("link").value = linkOf();
  const title = escaped(texts("page").title);
  $("frame").value = `<iframe src="${escaped(file + addressOf())}&amp;embed=1" title="${title}" `
    + 'width="100%" height="760" style="border:0"></iframe>';
}

async function copyLink() {
  const onDisk = location.protocol === "file:" ? said("at_file") : "";
  showLink();
  $("link").select();
  try {
    await navigator.clipboard.writeText(linkOf());
    $("copied").textContent = said("copied") + onDisk;
  } catch {
    $("copied").textContent = said("not_copied") + onDisk;
  }
}

const mapAsText = () => new XMLSerializer().serializeToString($("map").firstChild);

function offer(blob, ending) {
  const href = URL.createObjectURL(blob);
  make("a", { href, download: `${state.model}_head_${state.head}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

const saveMap = () => offer(new Blob([mapAsText()], { type: "image/svg+xml" }), "svg");

// Twice as fine as on the screen, so that it can be printed.
async function savePng() {
  const { width, height } = $("map").firstChild, times = 2;
  const canvas = make("canvas", { width: times * width.baseVal.value, height: times * height.baseVal.value });
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(mapAsText())}`;
  await image.decode();
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => offer(blob, "png"), "image/png");
}

function buildShare() {
  $("copy").onclick = copyLink;
  $("save").onclick = saveMap;
  $("save-png").onclick = savePng;
  for (const name of ["link", "frame"]) $(name).onfocus = ({ target }) => target.select();
}
