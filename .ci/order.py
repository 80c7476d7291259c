"""nbs/order.yml, read; nbs/README.md and the table of floors in docs/architecture.md, written from it. `--check` only compares."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- floors: written from nbs/order.yml -->\n).*?(<!-- end of floors -->)", re.S)


class Room(NamedTuple):
    """A folder of notebooks; `ground` stands for the modules that lie in no folder."""

    part: str
    about: str  # of the part
    name: str
    floor: float | None  # tutorials have none
    sees: tuple[str, ...] | None  # rooms it may import; None: all below it
    notebooks: dict[str, str]  # path below nbs/ without its ending -> the line about it


def rooms(root: Path = ROOT) -> list[Room]:
    """All rooms in the order in which they are read."""
    made = []
    for part in yaml.safe_load((root / "nbs" / "order.yml").read_text(encoding="utf-8")):
        for room in part["rooms"]:
            folder = "" if room["room"] == "ground" else room["room"] + "/"
            lines = {folder + name: line for entry in room["notebooks"] or [] for name, line in entry.items()}
            sees = tuple(room["sees"]) if "sees" in room else None
            made.append(Room(part["part"], part["about"], room["room"], room.get("floor"), sees, lines))
    return made


def floors(root: Path = ROOT) -> dict[str, float]:
    """The floor of each room, and of each module that lies in no room: those stand on one another as they are listed."""
    made: dict[str, float] = {}
    for room in rooms(root):
        if room.name == "ground":
            made |= {name: i / 100 for i, name in enumerate(room.notebooks)}
        elif room.floor is not None:
            made[room.name] = float(room.floor)
    return made


def title(path: Path) -> str:
    """A notebook's first heading."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        heading = re.search(r"^# (.*)$", "".join(cell["source"]), re.M)
        if cell["cell_type"] == "markdown" and heading:
            return heading[1]
    return ""


def contents(root: Path = ROOT) -> str:
    """nbs/README.md: every notebook with a link and its line, in reading order."""
    lines = ["<!-- written from nbs/order.yml: edit that file -->", "", "# All notebooks, in reading order", ""]
    lines += ["A notebook exports the module that it is named after: `losses/kl.ipynb` is `rlhf_nb.losses.kl`."]
    lines += ["It uses what stands above it and nothing that stands below."]
    part = ""
    for room in rooms(root):
        if room.part != part:
            part = room.part
            lines += ["", f"## {part}", "", f"{room.about[0].upper()}{room.about[1:]}.", ""]
        for path, line in room.notebooks.items():
            name = path.replace("/", ".") if room.floor is not None or room.name == "ground" else path.partition("/")[2]
            lines.append(f"- [`{name}`]({path}.ipynb) {line}")
    return "\n".join(lines) + "\n"


def table(root: Path = ROOT) -> str:
    """The rows of docs/architecture.md: floors from the top down."""
    lines = ["| floor | room | modules |", "|---|---|---|"]
    built = [r for r in rooms(root) if r.floor is not None]
    for room in sorted(built, key=lambda r: -(r.floor or 0)):
        names = ", ".join(f"[`{p.split('/')[-1]}`](../nbs/{p}.ipynb)" for p in room.notebooks)
        sees = f" (sees only {', '.join(room.sees)})" if room.sees else ""
        lines.append(f"| {room.floor:g} | `{room.name}`{sees} | {names} |")
    return "\n".join(lines) + "\n"


def written(root: Path = ROOT) -> dict[Path, str]:
    """The text of each file that is written from the order."""
    page = root / "docs" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    return {
        root / "nbs" / "README.md": contents(root),
        page: TABLE.sub(lambda m: m[1] + "\n" + table(root) + "\n" + m[2], text),
    }


def add_missing(root: Path = ROOT) -> None:
    """Give each notebook that the order lacks a line at the end of its room: its title."""
    order, listed = root / "nbs" / "order.yml", {path for r in rooms(root) for path in r.notebooks}
    lines = order.read_text(encoding="utf-8").splitlines()
    for path in sorted((root / "nbs").glob("*/*.ipynb")):
        name, room = path.stem, f"  - room: {path.parent.name}"
        if f"{path.parent.name}/{name}" in listed or room not in lines:
            continue
        at = lines.index("    notebooks:", lines.index(room)) + 1
        while at < len(lines) and lines[at].startswith("    - "):
            at += 1
        lines.insert(at, f"    - {name}: {json.dumps(title(path), ensure_ascii=False)}")
    order.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--check" not in sys.argv:
        add_missing()
    for path, text in written().items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path.relative_to(ROOT)} differs from nbs/order.yml: run `make export`")
