"""What shape a tensor has stands in the signature, in one notation: `Float[Tensor, "B C"]`, as jaxtyping writes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


LOSSES = sorted(p.stem for p in (ROOT / "rlhf_nb" / "losses").glob("[a-z]*.py"))
SHAPED = re.compile(r'(Float|Bool|Int)\[Tensor, "([\w+ .]*)"\]')


def shapeless(text: str) -> list[str]:
    """Tensors of a module's public functions and records whose shape isn't said, or is said twice and differently."""
    found = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and any(getattr(b, "id", "") == "NamedTuple" for b in node.bases):
            said = {n.target.id: ast.unparse(n.annotation) for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore[attr-defined]
            of = ""
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *filter(None, [node.args.kwarg])]
            said = {a.arg: ast.unparse(a.annotation) for a in args if a.annotation is not None}
            said |= {"return": ast.unparse(node.returns)} if node.returns is not None else {}
            of = ast.get_docstring(node) or ""
        else:
            continue
        for name, kind in said.items():
            kind = kind.replace("'", '"')
            if re.search(r"\bTensor\b", SHAPED.sub("", kind)) and not kind.startswith("Callable"):
                found.append(f"{node.name}: {name} is {kind}, without a shape")
            words = re.search(rf"^\s*(?:\w+, )*{name}(?:, \w+)*: (?:bool|int64)?\[([^\]]*)\]", of, re.M)
            shapes = [dims for _, dims in SHAPED.findall(kind)]
            if words and words[1].replace(", ", " ").replace(" + ", "+") not in shapes:
                found.append(f"{node.name}: {name} is {kind} in the signature, [{words[1]}] in the text")
    return found


@pytest.mark.parametrize("module", LOSSES)
def test_public_tensors_say_their_shapes(module: str) -> None:
    found = shapeless((ROOT / "rlhf_nb" / "losses" / f"{module}.py").read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def test_a_tensor_without_a_shape_is_seen() -> None:
    plain = "def f(x: Tensor, y: Float[Tensor, 'B C']) -> int:\n    '''F.\n\n    Args:\n        y: [B], why.\n    '''"
    assert [line.split(" is ")[0] for line in shapeless(plain)] == ["f: x", "f: y"]


SAID = re.compile(r"\[[A-Za-z0-9….][^\]]*\]|\bscalar|\bany shape")


def unsaid(text: str) -> tuple[list[str], int]:
    """Plain tensors of public functions of which neither signature nor docstring says the shape; and how many there are."""
    tree = ast.parse(text)
    lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"]
    public = {e.value for x in lists if isinstance(x, ast.List) for e in x.elts if isinstance(e, ast.Constant)}
    found, seen = [], 0
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name not in public:
            continue
        lines = (ast.get_docstring(node) or "").splitlines()
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        kinds = {a.arg: ast.unparse(a.annotation) for a in args if a.annotation} | {
            "return": ast.unparse(node.returns) if node.returns else ""
        }
        for name, kind in kinds.items():
            if re.search(r"\bTensor\b", SHAPED.sub("", kind.replace("'", '"'))):
                of_args = [line for line in lines if re.match(r"\s+\w+(, \w+)*:", line)]
                own = [x for x in lines if x not in of_args] if name == "return" else [x for x in lines if re.search(rf"\b{name}\b", x)]  # fmt: skip
                seen += 1
                found += [] if any(map(SAID.search, own)) else [f"{node.name}: {name}"]
    return found, seen


def test_docstrings_say_the_shapes_that_signatures_leave_out() -> None:
    """No exception: a tensor of any shape, a scalar, or [its dimensions]."""
    said = {p: unsaid(p.read_text(encoding="utf-8")) for p in sorted((ROOT / "rlhf_nb").rglob("*.py"))}
    assert sum(n for _, n in said.values()) > 250
    assert not any(found for found, _ in said.values()), {p.stem: found for p, (found, _) in said.items() if found}
    plain = '__all__ = [\'f\']\ndef f(x: Tensor, y: Tensor) -> Tensor:\n    """F.\n\n    Args:\n        x: [B], why.\n        y: more.\n    """'
    assert unsaid(plain) == (["f: y", "f: return"], 3)


def test_columns_of_batches_say_their_shapes() -> None:
    tree = ast.parse((ROOT / "rlhf_nb" / "types.py").read_text(encoding="utf-8"))
    fields = [
        (c.name, n) for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.AnnAssign)
    ]
    plain = [f"{c}.{n.target.id}" for c, n in fields if ast.unparse(n.annotation) in ("Tensor", "Tensor | None")]  # type: ignore[union-attr]
    assert not plain and len([n for _, n in fields if SHAPED.search(ast.unparse(n.annotation).replace("'", '"'))]) > 25
