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


def test_columns_of_batches_say_their_shapes() -> None:
    tree = ast.parse((ROOT / "rlhf_nb" / "types.py").read_text(encoding="utf-8"))
    fields = [
        (c.name, n) for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.AnnAssign)
    ]
    plain = [f"{c}.{n.target.id}" for c, n in fields if ast.unparse(n.annotation) in ("Tensor", "Tensor | None")]  # type: ignore[union-attr]
    assert not plain and len([n for _, n in fields if SHAPED.search(ast.unparse(n.annotation).replace("'", '"'))]) > 25
