"""The README's film: heads turn to the first token as a model trains; with a key of their own they turn to that.

    python docs/film.py      writes docs/film.gif, in Chromium without a window

A dot is a head, drawn by the script that the notebooks and the lab use (sinkutils/plots/draw.js). It stands as high as
the share of attention that it gives, on average over 100 texts. Both films are of records at seed 0: `fixed_1`, the
baseline, and `k_bias`, the same with a learned key and no value in each head.
"""

import json
import subprocess
import tempfile
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

import sinkutils as su
from sinkutils import plots
from sinkutils.plots.theme import COLORS

WIDTH, HEIGHT = 720, 290  # of a frame without its title
TITLE = "Heads grow a sink on the first token, or on a key of their own"
BAND = 30  # height of the title
DRAW = Path(plots.__file__).with_name("draw.js")
PAGE = f"""<!DOCTYPE html><meta charset="utf-8">
<style>
body {{ margin: 0; background: #fff; color: #222; font: 14px "DejaVu Sans", sans-serif; }}
section {{ height: {HEIGHT}px; display: grid; grid-template: 30px 42px 1fr / 1fr 1fr; padding: 0 5px; }}
h1 {{ grid-column: span 2; text-align: center; }}
h1, h2 {{ font-size: 14px; margin: 8px 0 0; text-align: center; }}
</style><body><script>{DRAW.read_text(encoding="utf-8")}
const DATA = [[data]];
const element = (tag, html = "") => Object.assign(document.createElement(tag), {{ innerHTML: html }});
DATA.steps.forEach((step, time) => {{
  const frame = element("section"), [left, right] = [element("div"), element("div")];
  frame.append(element("h1", `training step ${{step.toLocaleString("en")}}`));
  frame.append(element("h2", "softmax: attention to<br>"
    + `<span style="color:${{DATA.colors.first}}">● the first token</span>`));
  frame.append(element("h2", "one more key per head: attention to<br>"
    + `<span style="color:${{DATA.colors.first}}">● the first token</span> `
    + `<span style="color:${{DATA.colors.star}}">◆ the key of its own</span>`));
  frame.append(left, right);
  document.body.append(frame);
  drawHeads(left, {{ ...DATA.softmax[time], H: 4, threshold: 0.3, width: 350 }});
  drawHeads(right, {{ ...DATA.ownKey[time], H: 4, threshold: 0.3, width: 350 }});
}});
</script>"""


def frames(name: str) -> list[dict]:
    """A record's attention at each evaluation, to the first token and to k*."""
    curve = su.record(name, "laptop", 0).arrays["curve"].float()
    shares = curve.flatten(2)  # (times, targets, heads); the last target is k*
    return [{"alpha": now[0].tolist(), "star": now[-1].tolist()} for now in shares]


def titled(frame: Image.Image) -> Image.Image:
    """The frame with the film's title above it."""
    whole = Image.new("RGB", (WIDTH, BAND + HEIGHT), "white")
    whole.paste(frame, (0, BAND))
    bold = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans", weight="bold"))
    font = ImageFont.truetype(bold, 17)
    ImageDraw.Draw(whole).text((WIDTH / 2, BAND), TITLE, fill="#222", font=font, anchor="ms")
    return whole


steps = [point["step"] for point in su.record("fixed_1", "laptop", 0).metrics["curve"]]
softmax = [{"alpha": frame["alpha"]} for frame in frames("fixed_1")]
data = {"steps": steps, "softmax": softmax, "ownKey": frames("k_bias"), "colors": COLORS}

with tempfile.TemporaryDirectory() as folder:
    page, shot = Path(folder, "film.html"), Path(folder, "film.png")
    page.write_text(PAGE.replace("[[data]]", json.dumps(data)), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shot}"]
    size = f"--window-size={WIDTH},{HEIGHT * len(steps)}"  # all frames, one below the other
    subprocess.run(["chromium", *options, size, page.as_uri()], check=True, capture_output=True)
    with Image.open(shot) as whole:
        strip = whole.convert("RGB")

palette, images = strip.quantize(16), []  # one for all, so that a frame holds only what moved
for time in range(len(steps)):
    image = titled(strip.crop((0, HEIGHT * time, WIDTH, HEIGHT * (time + 1))))
    images.append(image.quantize(palette=palette, dither=Image.Dither.NONE))
# The beginning, where heads move most, and the end, which one wants to look at, stand still for a while.
durations = [800] + [200] * (len(steps) - 2) + [1800]
film = Path(__file__).with_name("film.gif")
images[0].save(film, save_all=True, append_images=images[1:], duration=durations, loop=0)
