"""Draw the chart of README.md: memory over time of a pyarrow script and of brim, measured from outside, as SVG.

    python benchmarks/curves.py            measures, writes benchmarks/results/memory-curves.json, draws
    python benchmarks/curves.py --draw     draws the stored measurements
    python benchmarks/curves.py --demo     runs examples/demo.py and records its terminal as SVG

The pyarrow script reads all files into a table and writes it; brim builds the same files with a limit of 300 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RESULT = HERE / "results" / "memory-curves.json"
IMAGES = HERE.parent / "docs" / "images"
MB = 10**6
FILES, FILE_MB = 10, 50
IN_MEMORY = """
import sys, pathlib, pyarrow as pa, pyarrow.parquet as pq
rows = [{"path": p.name, "bytes": p.read_bytes()} for p in sorted(pathlib.Path(sys.argv[1]).iterdir())]
pq.write_table(pa.Table.from_pylist(rows), sys.argv[2])
"""
LIGHT = {"ink": "#24292f", "dim": "#8c959f", "bad": "#cf222e", "good": "#0a7d6c"}
DARK = {"ink": "#e6edf3", "dim": "#6e7681", "bad": "#ff7b72", "good": "#3fb6a0"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 840, 300, 70, 215, 46, 40


def measured() -> dict[str, object]:
    from peak import measure
    from tables import machine

    with tempfile.TemporaryDirectory(prefix="curves-") as folder:
        local = Path(folder)
        (local / "files").mkdir()
        for number in range(FILES):
            (local / "files" / f"{number:02d}.bin").write_bytes(os.urandom(FILE_MB * MB))
        methods = {
            "pyarrow, all at once": [sys.executable, "-c", IN_MEMORY, f"{local}/files", f"{local}/all.parquet"],
            "brim build": [
                sys.executable,
                "-m",
                "brim",
                "build",
                f"{local}/files",
                f"{local}/out",
                "--memory",
                "300MB",
            ],
        }
        curves = {}
        for name, command in methods.items():
            actual = measure(command, curve=True)
            if actual.exit_code:
                raise SystemExit(f"{name} failed:\n{actual.output}")
            step = max(len(actual.curve) // 240, 1)
            tops = [
                max(actual.curve[index : index + step], key=lambda point: point[1])
                for index in range(0, len(actual.curve), step)
            ]
            curves[name] = {
                "seconds": round(actual.seconds, 2),
                "peak_bytes": actual.peak_bytes,
                "curve": [[round(second, 3), size] for second, size in tops],
            }
        return {"machine": machine(local, ["pyarrow"]), "bytes": FILES * FILE_MB * MB, "curves": curves}


def path_of(points: list[list[float]], seconds: float, top: float) -> str:
    def at(point: list[float]) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / seconds
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * point[1] / top
        return f"{x:.1f} {y:.1f}"

    return "M" + " L".join(at(point) for point in points)


def drawn(actual: dict[str, object], colours: dict[str, str]) -> str:
    curves: dict[str, dict[str, object]] = actual["curves"]  # type: ignore[assignment]
    seconds = max(float(method["curve"][-1][0]) for method in curves.values())  # type: ignore[index]
    top = 1.08 * max(float(mode["peak_bytes"]) for mode in curves.values())  # type: ignore[arg-type]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="13">',
        f'<text x="{LEFT}" y="22" fill="{colours["ink"]}" font-size="15" font-weight="600">'
        f"Memory while {FILES} files of {FILE_MB} MB become Parquet</text>",
    ]
    floor = HEIGHT - BOTTOM
    for size in range(0, int(top), 500 * MB):
        y = floor - (HEIGHT - TOP - BOTTOM) * size / top
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{colours["dim"]}" stroke-opacity=".3"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{colours["dim"]}">{size / 1e9:.1f} GB</text>'
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{floor + 20}" text-anchor="end" fill="{colours["dim"]}">{seconds:.1f} s</text>'
    )
    parts.append(f'<text x="{LEFT}" y="{floor + 20}" fill="{colours["dim"]}">0</text>')
    for name, colour in zip(curves, (colours["bad"], colours["good"]), strict=True):
        variant = curves[name]
        points: list[list[float]] = variant["curve"]  # type: ignore[assignment]
        end = points[-1]
        peak = float(variant["peak_bytes"])  # type: ignore[arg-type]
        x = LEFT + (WIDTH - LEFT - RIGHT) * end[0] / seconds
        y = floor - (HEIGHT - TOP - BOTTOM) * (peak if end[0] == seconds else end[1]) / top
        parts.append(f'<path d="{path_of(points, seconds, top)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        label = f"{name}: {peak / MB:,.0f} MB"
        parts.append(
            f'<text x="{x + 10:.1f}" y="{min(y + 4, floor - 6):.1f}" fill="{colour}" font-weight="600">{label}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def recorded() -> None:
    from rich.console import Console
    from rich.text import Text

    result = subprocess.run([sys.executable, "examples/demo.py"], capture_output=True, text=True, cwd=HERE.parent)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    text = re.sub(r"/\S+/(?=brim-\d|out\b)", "", result.stdout)
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    for line in text.splitlines():
        style = "bold cyan" if line.startswith("$") else "bold" if re.match(r"\d\. ", line) else ""
        style = "red" if "killed" in line and line.startswith("   k") else style
        console.print(Text(line, style=style))
    drawn = console.export_svg(title="make demo")
    drawn = re.sub(r' textLength="[\d.]+"', "", drawn)  # stretches lines whose font has another width
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S)  # would be fetched from a server
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "demo.svg").write_text(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--demo", action="store_true")
    arguments = parser.parse_args()
    if arguments.demo:
        recorded()
        return
    if not arguments.draw:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(measured()) + "\n")
    actual = json.loads(RESULT.read_text())
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "memory-light.svg").write_text(drawn(actual, LIGHT))
    (IMAGES / "memory-dark.svg").write_text(drawn(actual, DARK))


if __name__ == "__main__":
    main()
