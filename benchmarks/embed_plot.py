"""Plot memory against rows for both ways of saving embeddings, as an SVG.

    python benchmarks/embed_plot.py docs/images/embed-memory.svg [--rows 20000,40000,80000,120000] [--data DIR]

The two ways are those of embed.py: a list that is concatenated at the end, and brim.TensorWriter. Vectors are
768 + 1024 float32 per row and come from no model, whose memory would be the same for both.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from peak import measure
from tables import GB, MB, progress

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 60, 40, 200, 50
WAYS = {"append and join": ("join", "#c0392b"), "brim": ("writer", "#1f6f8b")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--rows", default="20480,40960,81920,122880")
    parser.add_argument("--data", type=Path, default=Path("bench-data"))
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    arguments.data.mkdir(parents=True, exist_ok=True)
    actual: dict[str, list[tuple[int, float]]] = {name: [] for name in WAYS}
    for count in rows:
        for name, (kind, _) in WAYS.items():
            actual[name].append((count, peak_gb(kind, count, arguments.data)))
            progress(f"{name}, {count:,} rows: {actual[name][-1][1]:.2f} GB")
    arguments.target.write_text(svg(actual))


def peak_gb(kind: str, rows: int, data: Path) -> float:
    folder = Path(tempfile.mkdtemp(dir=data))
    try:
        script = Path(__file__).with_name("embed.py")
        measured = measure([sys.executable, str(script), "--child", kind, str(folder / "out.safetensors"), str(rows)])
    finally:
        shutil.rmtree(folder)
    if measured.exit_code:
        raise SystemExit(measured.output[-2000:])
    return measured.peak_bytes / GB


def svg(actual: dict[str, list[tuple[int, float]]]) -> str:
    most_rows = max(rows for line in actual.values() for rows, _ in line)
    most_gb = max(size for line in actual.values() for _, size in line) * 1.1

    def x(rows: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * rows / most_rows

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / most_gb

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" role="img">',
        "<title>Peak memory against rows: a list that is joined, and brim</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-weight="bold">Peak memory while saving vectors (GB)</text>',
    ]
    for step in range(5):
        size = most_gb * step / 4
        parts += [
            f'<path d="M{LEFT} {y(size):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y(size) + 4:.1f}" text-anchor="end" fill="#555">{size:.1f}</text>',
        ]
    for rows, _ in next(iter(actual.values())):
        parts.append(
            f'<text x="{x(rows):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#555">{rows:,}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">rows</text>')
    for name, line in actual.items():
        colour, last = WAYS[name][1], line[-1]
        points = " ".join(f"{x(rows):.1f},{y(size):.1f}" for rows, size in line)
        label = f"{name}: {last[1] * GB / MB:,.0f} MB"
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>',
            *(f'<circle cx="{x(rows):.1f}" cy="{y(size):.1f}" r="3.5" fill="{colour}"/>' for rows, size in line),
            f'<text x="{x(last[0]) + 8:.1f}" y="{y(last[1]) - 8:.1f}" fill="{colour}">{label}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
