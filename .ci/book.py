"""The site: `make docs`. Notebooks with their stored outputs, guides, the API and pages gathered from them become Markdown below build/site/source,
and Sphinx makes build/site/html of it. No notebook is executed and the package isn't imported, so the site needs neither torch nor a network.

    .venv-docs/bin/python .ci/book.py             # write the pages, build them, check every link
    .venv-docs/bin/python .ci/book.py --sources   # only write the pages; no Sphinx is needed
    .venv-docs/bin/python .ci/book.py --again     # only what has changed; warnings of other pages are not repeated
    .venv-docs/bin/python .ci/book.py FOLDER      # the same into another folder than build/site
"""

from __future__ import annotations

import ast
import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from links import place
from order import Room, rooms, title

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / ".ci" / "book"  # pages that exist on the site only, its settings and its style
GUIDES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md"]
ARXIV = re.compile(r"(?<![\d.])(\d{4}\.\d{4,5})(?![\d.]*\d)")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
BADGE = re.compile(r"\[!\[Open In Colab\]\([^)]*\)\]\(([^)]*)\)")
WRONG = re.compile(
    r"goes wrong$|go wrong$|^When something looks wrong|^When it (breaks|doesn't start)|gone astray$", re.I
)
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def notebook(name: str) -> list[dict[str, Any]]:
    """The cells of a notebook that a reader sees; `source` is one string, without the lines that only nbdev reads."""
    found = []
    for cell in json.loads((ROOT / "nbs" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if not re.match(r"#\|\s*hide", source):
            code = cell["cell_type"] == "code"
            kept = "\n".join(line for line in source.splitlines() if not (code and line.startswith("#|")))
            found.append(cell | {"source": kept.strip("\n")})
    return found


def prose(cells: list[dict[str, Any]]) -> str:
    """The text of a notebook."""
    return "\n\n".join(c["source"] for c in cells if c["cell_type"] == "markdown")


def fenced(text: str, kind: str, *options: str) -> str:
    """A block that no text inside can end."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return "\n".join([f"{ticks}{kind}", *options, *([""] if options else []), text.rstrip("\n"), ticks])


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with its prose changed, and with blocks and spans of code as they were."""
    parts = re.split(r"(^(?P<tick>`{3,}|~{3,}).*?^(?P=tick)\s*$|(?<!`)`[^`\n]+`(?!`))", text, flags=re.M | re.S)
    out, i = [], 0
    while i < len(parts):  # the pattern has two groups: the code, and its ticks
        out += [change(parts[i])] + ([parts[i + 1]] if i + 1 < len(parts) else [])
        i += 3
    return "".join(out)


class Site:
    """Which files are pages, and where everything else is found."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.rooms = rooms(ROOT)
        self.names = [name for room in self.rooms for name in room.notebooks]
        self.guides = GUIDES + sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))
        self.pages = {f"nbs/{name}.ipynb" for name in self.names} | set(self.guides) | {"nbs/README.md"}
        where = place(ROOT)
        self.web = f"{where.url}/blob/{where.ref}"

    def target(self, link: str, at: str, to: str) -> str:
        """A link of the file `at` as it must stand on the page `to`; both are paths below the repository."""
        if re.match(r"[a-z]+:", link):
            return link
        if link.startswith("#"):  # Jupyter writes #When-it-goes-wrong
            return link.lower()
        path, _, anchor = link.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(at), unquote(path)))
        if path in self.pages:
            path = path.removesuffix(".ipynb").removesuffix(".md") + ".md"
        elif (ROOT / path).is_file() and path.startswith("docs/"):
            copy = self.source / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)
        elif (ROOT / path).exists():
            return f"{self.web}/{path}"
        else:
            raise SystemExit(f"{at} links to {link}, and {path} doesn't exist")
        return os.path.relpath(path, os.path.dirname(to) or ".") + (f"#{anchor}" if anchor else "")

    def relinked(self, text: str, at: str, to: str) -> str:
        """Text with its links as they must be on another page."""

        def change(part: str) -> str:
            return LINK.sub(lambda m: m[1] + self.target(m[2], at, to) + m[3], part)

        # a link's text may hold code, so targets are looked for everywhere but in blocks
        blocks = re.split(r"(^```.*?^```\s*$)", text, flags=re.M | re.S)
        return "".join(part if part.startswith("```") else change(part) for part in blocks)

    def write(self, page: str, text: str) -> None:
        """A page of the site."""
        path = self.source / page
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.rstrip("\n") + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")

    def output(self, out: dict[str, Any], stem: str, i: int) -> str:
        """One stored output, in the richest form that needs no kernel."""
        data = {k: v if isinstance(v, str) else "".join(v) for k, v in out.get("data", {}).items()}
        if "text/html" in data:
            return fenced(f'<div class="nb-html">{data["text/html"]}</div>', "{raw} html")
        for kind, ending in (("image/svg+xml", "svg"), ("image/png", "png")):
            if kind in data:
                picture = self.source / f"{stem}_{i}.{ending}"
                picture.parent.mkdir(parents=True, exist_ok=True)
                picture.write_bytes(
                    data[kind].encode() if ending == "svg" else base64.b64decode(data[kind].replace("\n", ""))
                )
                return f"![{html.escape(data.get('text/plain', 'figure')).strip('<>&;lgt')}]({picture.name})"
        if "text/markdown" in data:
            return data["text/markdown"]
        text = COLOURS.sub("", "".join(out.get("text", "")) or data.get("text/plain", "")).strip("\n")
        return fenced(text, "{code-block} none", ":class: nb-output") if text.strip() else ""

    def lesson(self, name: str) -> str:
        """A notebook as a page."""
        at = f"nbs/{name}.ipynb"
        parts, seen = [], False
        cells = notebook(name)
        flat = not re.search(
            r"^## ", prose(cells), re.M
        )  # a page without second-level headings: its third-level ones are
        for cell in cells:
            text = cell["source"]
            if cell["cell_type"] == "markdown":
                text = BADGE.sub(lambda m: f"[Open in Colab]({m[1]})", text)
                text = self.relinked(text, at, at)
                if seen:  # one title a page
                    text = outside_code(text, lambda part: re.sub(r"^# ", "## ", part, flags=re.M))
                if flat:
                    text = outside_code(text, lambda part: re.sub(r"^##(?=#+ )", "#", part, flags=re.M))
                seen |= bool(re.search(r"^# ", text, re.M))
                parts.append(text)
                continue
            if text.strip():
                try:
                    ast.parse(text)
                    kind = "python"
                except SyntaxError:  # magics of a notebook
                    kind = "{code-block} none"
                parts.append(fenced(text, kind))
            for out in cell.get("outputs", []):
                parts.append(self.output(out, f"nbs/{name}", len(parts)))
        if not seen:
            parts.insert(0, f"# {name.replace('/', '.')}")
        return "\n\n".join(p for p in parts if p)


def sections(text: str, wanted: re.Pattern[str]) -> Iterator[str]:
    """The bodies of the sections whose heading is wanted, down to the next heading of the same height."""
    lines, inside, level, body = text.splitlines(), False, 0, []
    code = False
    for line in [*lines, "# "]:
        code ^= line.startswith("```")
        heading = None if code else re.match(r"(#+) (.*)", line)
        if heading and inside and len(heading[1]) <= level:
            yield "\n".join(body).strip()
            inside, body = False, []
        if heading and not inside and wanted.search(heading[2].strip()):
            inside, level, body = True, len(heading[1]), []
        elif inside:
            body.append(f"**{heading[2]}**" if heading else line)


def troubleshooting(site: Site) -> str:
    """Every "when it goes wrong", with a link to what it belongs to."""
    out = ["# Troubleshooting", "What to look at when a number looks wrong or a run stops. `rlhf-nb doctor METHOD --config FILE` looks before a run, the lights of `rlhf-nb watch RUN` during it. This page is gathered from all notebooks and guides; your browser's search (Ctrl F) finds a symptom in it."]  # fmt: skip
    for room in site.rooms:
        found = []
        for name in room.notebooks:
            for body in sections(prose(notebook(name)), WRONG):
                at = f"nbs/{name}.ipynb"
                heading = title(ROOT / at).replace("`", "")
                found.append(f"### {heading}\n\n{site.relinked(body, at, 'troubleshooting.md')}\n\n[To the notebook](nbs/{name}.md)")  # fmt: skip
        if found:
            out += [f"## {room.part}: {room.name}", *found]
    out.append("## Guides")
    for guide in site.guides:
        for body in sections((ROOT / guide).read_text(encoding="utf-8"), WRONG):
            out.append(
                f"### {first_heading(guide)}\n\n{site.relinked(body, guide, 'troubleshooting.md')}\n\n[To the guide]({guide})"
            )
    return "\n\n".join(out)


def first_heading(guide: str) -> str:
    """The title of a guide."""
    found = re.search(r"^# (.*)$", (ROOT / guide).read_text(encoding="utf-8"), re.M)
    return found[1] if found else guide


def cited() -> dict[str, list[str]]:
    """arXiv id -> the notebooks, guides and tables that cite it, in reading order."""
    found: dict[str, list[str]] = {}
    files = {f"nbs/{n}.ipynb": prose_and_code(n) for room in rooms(ROOT) for n in room.notebooks}
    tables = [*sorted((ROOT / "rlhf_nb").rglob("*.yaml")), *sorted((ROOT / "benchmarks").glob("*.py"))]
    for path in [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / g for g in GUIDES), *tables]:
        files[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    for name, text in files.items():
        near = re.sub(r"arxiv", "", text, flags=re.I) != text
        for m in ARXIV.finditer(text) if near else ():
            if re.search(r"arxiv", text[max(0, m.start() - 100) : m.start()], re.I):
                places = found.setdefault(m[1], [])
                if name not in places:
                    places.append(name)
    return found


def prose_and_code(name: str) -> str:
    """All sources of a notebook."""
    cells = json.loads((ROOT / "nbs" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells)


def references() -> dict[str, list[str]]:
    """arXiv id -> authors and title, and why it is here: docs/references.yaml."""
    return yaml.safe_load((ROOT / "docs" / "references.yaml").read_text(encoding="utf-8"))


def bibliography() -> str:
    """Every paper that is cited, why, and where."""
    where = place(ROOT)
    known, out = references(), ["# Bibliography", "Every paper on arXiv that a notebook, a guide or a table cites: what we took from it, and where. Ordered by date."]  # fmt: skip
    for key, places in sorted(cited().items()):
        what, why = known[key]
        links = ", ".join(
            f"[{p.removeprefix('nbs/').removesuffix('.ipynb').removesuffix('.md').replace('/', '.')}]({p.replace('.ipynb', '.md') if p.endswith(('.ipynb', '.md')) else f'{where.url}/blob/{where.ref}/{p}'})"
            for p in places
        )
        out.append(f"[{key}](https://arxiv.org/abs/{key}) {what}. {why} *In {links}.*")
    return "\n\n".join(out)


def metric_tables() -> Iterator[tuple[str, list[str]]]:
    """(notebook, rows) of every table that explains names in the log."""
    for room in rooms(ROOT):
        for name in room.notebooks:
            for table in re.findall(r"(?:^\|.*\n?)+", prose(notebook(name)), re.M):
                rows = table.strip().splitlines()
                if re.match(r"\| *(name|key) *\| *(meaning|what) *\|", rows[0]):
                    yield name, rows


def metric_lines() -> dict[str, list[tuple[str, str]]]:
    """The name in the log -> (what it means and what is healthy, the notebook that says so)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rows in metric_tables():
        for row in rows[2:]:
            key, *rest = [c.strip() for c in re.split(r"(?<!\\)\|", row.strip().strip("|"))]
            said = "; healthy: ".join(c for c in rest[:2] if c and c not in "–—")
            found.setdefault(key, []).append((said, name))
    for key, said in yaml.safe_load((ROOT / "docs" / "metrics.yaml").read_text(encoding="utf-8")).items():
        found.setdefault(", ".join(f"`{k.strip()}`" for k in key.split(",")), []).append((said, ""))
    return found


def metrics(site: Site) -> str:
    """The glossary of metrics."""
    out = ["# Metrics", "Every name that a run writes into `metrics.jsonl`, gathered from the notebooks that log it. `eval/` stands before what held-out rows gave, `_stderr` behind a standard error, `perf/` before what is only speed. Several lines: methods use the name for their own quantity.", "| name | meaning | from |", "|---|---|---|"]  # fmt: skip
    lines = []
    for key, said in sorted(metric_lines().items(), key=lambda item: item[0].strip("`")):
        for text, name in said:
            where = f"[{name.replace('/', '.')}](nbs/{name}.md)" if name else "all methods"
            text = site.relinked(text, f"nbs/{name}.ipynb", "metrics.md") if name else text
            lines.append(f"| {key} | {text} | {where} |")
    return "\n\n".join(out[:2]) + "\n\n" + "\n".join(out[2:] + lines)


def escaped(text: str) -> str:
    """A docstring's sentence as Markdown: only code and links keep their signs."""
    return outside_code(text, lambda part: re.sub(r"([\\*_<>$\[\]{}|#~^])", r"\\\1", part))


def docstring(text: str | None) -> str:
    """A docstring (one line, then Args, Returns, Raises) as Markdown."""
    if not text:
        return ""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        head = re.fullmatch(r"\s*(Args|Attributes|Returns|Raises|Yields|Fields):", line)
        item = re.fullmatch(r"    (\S[^:]*?): (.*)", line)
        if head:
            inside = True
            out += ["", f"**{ {'Args': 'Parameters'}.get(head[1], head[1]) }**", ""]
        elif inside and item and not line.startswith("     "):
            out.append(f"- `{item[1].strip('`')}`: {escaped(item[2])}")
        elif inside and line.startswith("     "):
            out.append("  " + escaped(line.strip()))
        else:
            inside &= not line.strip() or line.startswith("    ")
            out.append(escaped(line.strip()))
    return "\n".join(out)


def raised(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The errors that a function's own code raises and its docstring doesn't name, with the beginning of their sentence."""
    said, found = ast.get_docstring(node) or "", dict[str, str]()
    calls = [n.exc for n in ast.walk(node) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    for call in calls:
        kind = ast.unparse(call.func)
        if kind.endswith("Error") and kind not in said and call.args:
            words = call.args[0].values if isinstance(call.args[0], ast.JoinedStr) else [call.args[0]]
            text = "".join(str(w.value) if isinstance(w, ast.Constant) else "…" for w in words)
            found.setdefault(kind, textwrap.shorten(text, 160, placeholder=" …"))
    lines = [f"- `{kind}`: {escaped(text)}" for kind, text in found.items() if kind != "NotImplementedError"]
    return "\n".join([f"**{'Also raises' if 'Raises:' in said else 'Raises'}**", "", *lines]) if lines else ""


def signature(node: ast.AST) -> str:
    """The head of a function or class, as it is written."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(b) for b in node.bases)
        fields = [f"    {ast.unparse(n)}" for n in node.body if isinstance(n, ast.AnnAssign)]
        return "\n".join([f"class {node.name}({bases}):" if bases else f"class {node.name}:", *fields])
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    back = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({ast.unparse(node.args)}){back}"
    if len(line) <= 90:
        return line
    call = ast.parse(f"def {node.name}({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(call, ast.FunctionDef)
    arguments = ast.unparse(call.args)
    parts, depth, word = [], 0, ""
    for sign in arguments + ",":
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            parts.append(f"    {word.strip()},")
            word = ""
        else:
            word += sign
    return "\n".join([f"{node.name}(", *parts, f"){back}"])


def public(tree: ast.Module) -> list[str]:
    """`__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def described(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, Markdown) of every public name of a module, in the order of its code."""
    names, kinds = set(public(tree)), (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and node.name in names:
            names.discard(node.name)
            parts = [fenced(signature(node), "python"), docstring(ast.get_docstring(node))]
            parts += [] if isinstance(node, ast.ClassDef) else [raised(node)]
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    said = ast.get_docstring(inner) if isinstance(inner, kinds) else None
                    if said and isinstance(inner, kinds) and not inner.name.startswith("_"):
                        parts += [fenced(signature(inner), "python"), docstring(said)]
                        parts += [] if isinstance(inner, ast.ClassDef) else [raised(inner)]
            yield node.name, "\n\n".join(part for part in parts if part)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (inner for whole in targets for inner in ast.walk(whole)):
                if isinstance(target, ast.Name) and target.id in names:
                    names.discard(target.id)
                    yield target.id, fenced(textwrap.shorten(ast.unparse(node), 240, placeholder=" ..."), "python")
    names -= {  # names that a module hands on are described where they are made
        alias.asname or alias.name
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom | ast.Import)
        for alias in n.names
    }
    if names:
        raise SystemExit(f"{module} exports {sorted(names)}, which its code doesn't define at the top level")


def api(room: Room) -> str:
    """The public names of a room."""
    out = [f"# API: {room.name}", f"{room.part}: {room.about[0].upper() + room.about[1:]}. Every public name of `rlhf_nb{'' if room.name == 'ground' else '.' + room.name}`. In shapes, B is sequences, P prompt tokens, C completion tokens, T = P + C, V the vocabulary, G answers to a prompt."]  # fmt: skip
    for name in room.notebooks:
        path = ROOT / "rlhf_nb" / f"{name}.py"
        if path.exists():
            dotted = name.replace("/", ".")
            entries = list(described(dotted, ast.parse(path.read_text(encoding="utf-8"))))
            if entries:
                out.append(f"## {dotted}\n\nSource and explanation: [{dotted}](../nbs/{name}.md)")
                out += [f"### {entry.replace('_', chr(92) + '_')}\n\n{text}" for entry, text in entries]
    return "\n\n".join(out) if len(out) > 2 else ""


def toctree(pages: list[str], *options: str) -> str:
    """A list of pages in the side bar."""
    return fenced("\n".join(pages), "{toctree}", *(options or (":hidden:",)))


def course(site: Site) -> str:
    """The way through the lessons, from their own first cells."""
    lessons = [n for n in site.names if n.startswith("course/")]
    rest = [n for n in site.names if n.startswith("tutorials/")]
    keys = [n for n in site.names if n.startswith("solutions/")]
    lines = ["| lesson | question |", "|---|---|"]
    for name in lessons:
        first = notebook(name)[0]["source"]
        question = re.search(r"^\*\*(.*?)\*\*", first, re.M)
        lines.append(
            f"| [{title(ROOT / 'nbs' / f'{name}.ipynb')}](nbs/{name}.md) | {question[1] if question else ''} |"
        )
    text = (PAGES / "course.md").read_text(encoding="utf-8")
    listed = "\n".join(f"- [{title(ROOT / 'nbs' / f'{n}.ipynb')}](nbs/{n}.md)" for n in rest)
    site.write("solutions.md", "# Solutions\n\nOne way to solve each exercise, executed. Try first: `learn.hint(NAME)` gives one hint more at each call.\n\n" + toctree([f"nbs/{n}" for n in keys], ":maxdepth: 1"))  # fmt: skip
    pages = [f"nbs/{n}" for n in lessons + rest] + ["docs/dojo", "docs/teaching", "solutions"]
    return text.replace("LESSONS", "\n".join(lines)).replace("TUTORIALS", listed) + "\n\n" + toctree(pages)


def under_the_hood(site: Site) -> dict[str, str]:
    """The module notebooks, room by room, in reading order."""
    pages, out = {}, ["# Under the hood", "The package is exported from notebooks: each is one module's explanation, source and tests. They are listed in reading order; each uses only what stands above it."]  # fmt: skip
    part = ""
    for room in site.rooms:
        if room.name in ("course", "solutions", "tutorials"):
            continue
        if room.part != part:
            part = room.part
            out.append(f"## {part}\n\n{room.about[0].upper() + room.about[1:]}.")
        lines = "\n".join(f"- [{n.replace('/', '.')}](nbs/{n}.md): {line}" for n, line in room.notebooks.items())
        out.append(f"**[{room.name}](hood_{room.name}.md)**\n\n{lines}")
        pages[f"hood_{room.name}.md"] = f"# {room.name}\n\n{lines}\n\n" + toctree([f"nbs/{n}" for n in room.notebooks])
    pages["hood.md"] = "\n\n".join(out) + "\n\n" + toctree([p.removesuffix(".md") for p in pages])
    return pages


def sources(source: Path) -> Site:
    """Write all pages; those that are already there and right keep their time, for `--again`."""
    site = Site(source)
    for name in site.names:
        site.write(f"nbs/{name}.md", site.lesson(name))
    for guide in [*site.guides, "nbs/README.md"]:
        text = re.sub(r"^<!--.*?-->\n", "", (ROOT / guide).read_text(encoding="utf-8"), flags=re.M)
        site.write(guide, site.relinked(text, guide, guide))
    for page in PAGES.glob("*.md"):
        site.write(page.name, page.read_text(encoding="utf-8"))
    site.write("course.md", course(site))
    for page, text in under_the_hood(site).items():
        site.write(page, text)
    listed = []
    for room in site.rooms:
        text = api(room)
        if text:
            site.write(f"api/{room.name}.md", text)
            listed.append(room)
    entries = "\n".join(f"- [{room.name}](api/{room.name}.md): {', '.join(n.split('/')[-1] for n in room.notebooks)}" for room in listed)  # fmt: skip
    site.write("api.md", "# API\n\nEvery public name, with its signature, shapes, errors and source, room by room. The search finds a name from any page.\n\n" + entries + "\n\n" + toctree([f"api/{room.name}" for room in listed]))  # fmt: skip
    site.write("troubleshooting.md", troubleshooting(site))
    site.write("bibliography.md", bibliography())
    site.write("metrics.md", metrics(site))
    return site


class Links(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.loads: list[str] = []  # what the page fetches by itself

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v for k, v in attrs if v}
        self.ids |= {given[k] for k in ("id", "name") if k in given}
        if tag in ("a", "link") and "href" in given:
            self.links.append(given["href"])
        if "src" in given:
            self.links.append(given["src"])
        if tag in ("script", "img", "iframe", "video", "audio") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon") and "href" in given:
            self.loads.append(given["href"])


def dead(folder: Path) -> list[str]:
    """Links of a built site that lead nowhere, and what a page would fetch from a network."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path] = Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    faults = []
    for path, page in pages.items():
        name = path.relative_to(folder)
        faults += [f"{name} fetches {load}" for load in page.loads if re.match(r"(https?:)?//", load)]
        for link in set(page.links):
            if re.match(r"[a-z]+:|//", link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / unquote(target.split("?")[0])).resolve() if target else path
            if file.is_dir():
                file /= "index.html"
            if not file.exists():
                faults.append(f"{name} links to {link}: no such file")
            elif anchor and file in pages and unquote(anchor) not in pages[file].ids:
                faults.append(f"{name} links to {link}: no such place on that page")
    return faults


def reachable(folder: Path) -> int:
    """Let the keyboard into every block of code, which scrolls where it is too wide; returns how many blocks."""
    count = 0
    for path in folder.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        wide = re.sub(r"<pre(?![^>]*tabindex)(?=[ >])", '<pre tabindex="0"', text)
        count += wide.count('<pre tabindex="0"')
        if wide != text:
            path.write_text(wide, encoding="utf-8")
    return count


def main() -> None:
    build = next((Path(a).resolve() for a in sys.argv[1:] if not a.startswith("--")), ROOT / "build" / "site")
    if "--again" not in sys.argv:
        shutil.rmtree(build, ignore_errors=True)
    site = sources(build / "source")
    print(f"{sum(1 for _ in site.source.rglob('*.md'))} pages written")
    if "--sources" in sys.argv:
        return
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(build / "tree"), "-c", str(PAGES)]  # fmt: skip
    if subprocess.run([*sphinx, str(site.source), str(build / "html")]).returncode:
        raise SystemExit("Sphinx warned; the lines above say where")
    reachable(build / "html")
    faults = dead(build / "html")
    if faults:
        raise SystemExit("\n".join(faults[:50]) + f"\n{len(faults)} dead links")
    print(f"0 warnings, 0 dead links: {build / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
