"""Draws performance.svg from performance.json: gnomon's dot product compared with SDPA.

The JSON file contains measured time ratios, gnomon / SDPA, of cases that `gnomon bench` and `make
bench` also print. To add a processor, add its name and one value for each case.
"""

import json
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

plt.rcParams |= {"svg.hashsalt": "gnomon", "font.size": 10, "svg.fonttype": "path"}

INK = "#333333"
COLORS = ("#9ecae1", "#3182bd", "#08306b")
BAR = 0.36


def main() -> None:
    folder = pathlib.Path(__file__).parent
    record = json.loads((folder / "performance.json").read_text(encoding="utf-8"))
    cases = record["ratios"]
    figure, ax = plt.subplots(figsize=(8.2, 3.7), layout="constrained")
    for n, processor in enumerate(record["processors"]):
        places = [
            row + (n - (len(record["processors"]) - 1) / 2) * BAR for row in range(len(cases))
        ]
        speeds = [1 / case["values"][n] for case in cases]
        ax.barh(places, speeds, BAR * 0.92, color=COLORS[n], label=f"AMD EPYC, {processor}")
        for place, speed in zip(places, speeds, strict=True):
            ax.text(speed + 0.03, place, f"{speed:.1f}x", va="center", fontsize=9, color=INK)
    ax.axvline(1, color="#d55e00", lw=1.5)
    ax.set_yticks(range(len(cases)), [case["case"] for case in cases])
    ax.invert_yaxis()
    ax.set_xlim(0, 2.8)
    ax.set_xlabel("speed of gnomon relative to SDPA = 1 (longer is faster)", color=INK)
    ax.set_title(f"Dot-product attention on a CPU ({record['shape']})", fontsize=10.5, color=INK)
    ax.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(folder / "performance.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
