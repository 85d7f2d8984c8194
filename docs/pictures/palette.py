"""Find the fills of shards, and draw them as every eye sees them: docs/pictures/palette.svg.

python docs/pictures/palette.py    # searches for some seconds

All fills have one lightness in OKLCH, so that no shard stands out; of those of a moderate chroma, it looks for the six
whose closest two are furthest apart for the eye that tells least of them apart.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from shardwise.show.colours import FILLS, INK, THEMES

Floats = npt.NDArray[np.float64]

LIGHTNESS, CHROMA, COUNT = 0.78, 0.15, 6
#: What an eye without one kind of cones sees of linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
EYES: dict[str, Floats] = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
#: From linear RGB to cones, and from their cube roots to lightness and two axes of colour (OKLab, Ottosson 2020).
_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_AXES = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def oklab(rgb: Floats) -> Floats:
    """Give the OKLab of linear RGB: float64 (colours, 3)."""
    found: Floats = np.cbrt(rgb @ _CONES.T) @ _AXES.T
    return found


def linear(lab: Floats) -> Floats:
    """Give the linear RGB of OKLab."""
    found: Floats = ((lab @ np.linalg.inv(_AXES).T) ** 3) @ np.linalg.inv(_CONES).T
    return found


def code(rgb: Floats) -> str:
    """Give the code of a colour in sRGB."""
    rgb = np.clip(rgb, 0, 1)
    parts = np.where(rgb <= 0.0031308, 12.92 * rgb, 1.055 * rgb ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def decoded(fill: str) -> Floats:
    """Give the linear RGB of a code."""
    parts = np.array([int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    found: Floats = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return found


def distances(rgb: Floats) -> Floats:
    """Give the OKLab distance of each colour from each, for the eye for which it is least."""
    seen = [oklab(np.clip(rgb @ eye.T, 0, 1)) for eye in EYES.values()]
    found: Floats = np.min([np.linalg.norm(lab[:, None] - lab[None], axis=2) for lab in seen], axis=0)
    return found


def search(tries: int = 2000, step: float = 0.01) -> tuple[float, list[str]]:
    """Give the least distance of the best fills found, and their codes: exchanges one by one, from random starts."""
    side = np.arange(-0.3, 0.3, step)
    lab = np.array([(LIGHTNESS, a, b) for a, b in itertools.product(side, side) if np.hypot(a, b) <= CHROMA])
    rgb = linear(lab)
    rgb = rgb[((rgb >= -1e-3) & (rgb <= 1.001)).all(axis=1)].clip(0, 1)
    apart = distances(rgb)
    random, best, chosen = np.random.default_rng(0), 0.0, [0]
    for _ in range(tries):
        picked = list(random.choice(len(rgb), COUNT, replace=False))
        while True:
            near = apart[np.ix_(picked, picked)] + np.eye(COUNT)
            least = near.min()
            for one in np.unravel_index(near.argmin(), near.shape):
                others = [index for place, index in enumerate(picked) if place != one]
                room = apart[:, others].min(axis=1)
                if room.max() > least + 1e-9:
                    picked = [*others, int(room.argmax())]
                    break
            else:
                break
        if least > best:
            best, chosen = float(least), picked
    return best, [code(rgb[index]) for index in chosen]


def picture() -> str:
    """Draw the fills as each eye sees them, and printed in grey."""
    fills = np.array([decoded(fill) for fill in FILLS])
    rows = [(name, fills @ eye.T) for name, eye in EYES.items()]
    rows.append(("printed in grey", np.repeat((fills @ [0.2126, 0.7152, 0.0722])[:, None], 3, axis=1)))
    wide, high, left = 52, 30, 124
    width, height = left + wide * len(FILLS) + 24, high * len(rows) + 24
    (page, text, _), (dark, pale, _) = THEMES["light"], THEMES["dark"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 {width} {height}" width="{width}" '
        f'height="{height}" style="max-width:100%;height:auto" role="img" aria-labelledby="pt" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">',
        '<title id="pt">The six fills as each eye sees them, and printed in grey</title>',
        f"<style>.page{{fill:{page}}}.text{{fill:{text}}}rect{{stroke:{page}}}"
        f"@media (prefers-color-scheme:dark){{.page{{fill:{dark}}}.text{{fill:{pale}}}rect{{stroke:{dark}}}}}</style>",
        f'<rect class="page" x="-12" y="-12" width="{width}" height="{height}" rx="6"/>',
    ]
    for row, (name, seen) in enumerate(rows):
        y = row * high
        parts.append(f'<text class="text" x="{left - 8}" y="{y + 19}" text-anchor="end">{name}</text>')
        for column, colour in enumerate(seen):
            x = left + column * wide
            parts.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="{code(colour)}"/>')
            parts.append(
                f'<text x="{x + wide / 2:g}" y="{y + 19}" text-anchor="middle" fill="{INK}">cpu:{column}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    least, found = search()
    apart = distances(np.array(list(map(decoded, FILLS))))
    print(f"found, at least {least:.3f} apart: {', '.join(found)}")
    print(f"in use, at least {apart[np.triu_indices(len(FILLS), 1)].min():.3f} apart: {', '.join(FILLS)}")
