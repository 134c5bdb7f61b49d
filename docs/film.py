"""The README's film: heads turn to the first token as a model trains; with a key of their own they turn to that.

    python docs/film.py      writes docs/film.gif (make figures)

A dot is a head; it stands as high as the share of attention that it gives, on average over 100 texts. Both films are of
records at seed 0: `fixed_1`, the baseline, and `k_bias`, the same with a learned key and no value in each head.
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation, PillowWriter

from sinkutils.plots.theme import theme
from sinkutils.study.record import read_record, record_folder

colors = theme()
records = {name: read_record(record_folder("laptop", name, 0)) for name in ("fixed_1", "k_bias")}
# By name: (times, targets, heads).
curves = {name: record.arrays["curve"].float().flatten(2) for name, record in records.items()}
steps = [point["step"] for point in records["fixed_1"].metrics["curve"]]
heads = range(1, 1 + curves["fixed_1"].shape[-1])

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.1), sharey=True, layout="constrained")
for ax, title in ((left, "softmax attention"), (right, "each head has a key of its own")):
    ax.axhline(0.3, color="#222222", linewidth=1, linestyle="--")
    (
        ax.axvline(4.5, color="#c8c8c8"),
        ax.axvline(8.5, color="#c8c8c8"),
        ax.axvline(12.5, color="#c8c8c8"),
    )
    ax.set(title=title, xlim=(0, 17), ylim=(-0.03, 1.03), xticks=[2.5, 6.5, 10.5, 14.5])
    ax.set_xticklabels([f"block {block}" for block in (1, 2, 3, 4)])
    ax.grid(False)
left.set_ylabel("share of attention")
base = left.plot(heads, curves["fixed_1"][0, 0], "o", color=colors["first"])[0]
first = right.plot(
    heads, curves["k_bias"][0, 0], "o", color=colors["first"], label="to the first token"
)[0]
star = right.plot(
    heads, curves["k_bias"][0, -1], "D", color=colors["star"], label="to the key of its own"
)[0]
right.legend(loc="upper left", fontsize=8)
clock = figure.suptitle(" ")


def draw(time: int) -> None:
    base.set_ydata(curves["fixed_1"][time, 0])
    first.set_ydata(curves["k_bias"][time, 0])
    star.set_ydata(curves["k_bias"][time, -1])
    clock.set_text(f"training step {steps[time]:,}")


# The beginning, where heads move most, and the end, which one wants to look at, stand still for a while.
frames = [0] * 3 + list(range(len(steps))) + [len(steps) - 1] * 8
film = FuncAnimation(figure, draw, frames=frames)
film.save(Path(__file__).with_name("film.gif"), PillowWriter(fps=5), dpi=100)
