"""Draw which rows of a fused QKV each rank holds, over 4 ranks and over 16: docs/pictures/qkv.svg.

python docs/pictures/qkv.py
"""

from pathlib import Path

import shardwise as sw

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
#: Fills on which black text can be read, one for each of q, k and v; as in `shardwise.draw`.
FILLS = {"q": "#9fd3f0", "k": "#f7cf87", "v": "#8fd9bd"}
LEFT, UNIT, LINE, ROW = 64, 8, 16, 14


def panel(ranks: int, top: int) -> tuple[list[str], int]:
    """Give the elements of a panel that begins at `top`, and where it ends."""
    dim = sw.packed.qkv(HEADS, KV_HEADS, HEAD_DIM, "tp")
    mesh = sw.DeviceMesh((ranks,), ("tp",), [f"rank {i}" for i in range(ranks)])
    partition = sw.TensorLayout((dim,), mesh).partition((dim.size,))
    out = [f'<text x="{LEFT}" y="{top + 12}" font-weight="bold">{ranks} ranks</text>']
    at, heads = LEFT, {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    for name, count in heads.items():
        label = f"{name}: {count} heads" if name == "q" else f"{name}: {count}"
        out.append(f'<text x="{at + count * UNIT / 2:g}" y="{top + 30}" text-anchor="middle">{label}</text>')
        at += count * UNIT
    y = top + 36
    ends = {name: end for (name, _, start, length) in dim.segments(dim.size) for end in [start + length]}
    for rank in mesh.devices.flat:
        out.append(f'<text x="{LEFT - 6}" y="{y + ROW - 3}" text-anchor="end">{rank}</text>')
        out.append(
            f'<path d="M{LEFT} {y + ROW / 2:g}h{sum(heads.values()) * UNIT}" stroke="#767676" stroke-width="0.5"/>'
        )
        for piece in partition.pieces(rank):
            rows = piece.box[0]
            name = next(name for name, end in ends.items() if rows.start < end)
            x, width = LEFT + rows.start / HEAD_DIM * UNIT, (rows.stop - rows.start) / HEAD_DIM * UNIT
            title = f"{rank}: rows {rows.start} to {rows.stop} of the whole, at {piece.start[0]} of its own"
            out.append(
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{ROW - 2}" fill="{FILLS[name]}" stroke="#111111" '
                f'stroke-width="0.5"><title>{title}</title></rect>'
            )
        y += ROW
    return out, y + LINE


def picture() -> str:
    """Give the picture as SVG text, the same each time."""
    four, end = panel(4, 4)
    sixteen, end = panel(16, end)
    width = LEFT + (HEADS + 2 * KV_HEADS) * UNIT + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {end}" width="{width}" height="{end}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#767676">'
    )
    return "\n".join([head, *four, *sixteen, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
