"""How functions are called: constructors with few arguments, and arguments that stand in the call.

A constructor has at most 12 arguments beside `self`; settings that belong together are a class with a name.

A call does not unpack a tuple or a list that is written out: neither in the call, `f(*(a, b))`, nor as the
one value of a name of the same function, `given = a, b` and `f(*given)`. What it unpacks has a length that
depends on data, or comes from somewhere else.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

FILES = sorted(Path(shoal.__file__).parent.rglob("*.py"))
MOST = 12
Function = ast.FunctionDef | ast.AsyncFunctionDef


def large_constructors(tree: ast.AST) -> list[str]:
    found = []
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            for function in each.body:
                if isinstance(function, Function) and function.name in ("__init__", "__new__"):
                    named = function.args
                    count = len([*named.posonlyargs, *named.args, *named.kwonlyargs]) - 1
                    if count > MOST:
                        found.append(f"line {function.lineno}: {each.name} has {count} arguments")
    return found


def unpacked_bundles(tree: ast.AST) -> list[str]:
    found = []
    for scope in [tree, *(each for each in ast.walk(tree) if isinstance(each, Function))]:
        nodes = list(within(scope))
        stores = Counter(each.id for each in nodes if isinstance(each, ast.Name) and is_stored(each))
        bundles = {
            name for each in nodes for name, value in bound_by(each) if is_bundle(value) and stores[name] == 1
        }
        for call in nodes:
            for each in call.args if isinstance(call, ast.Call) else ():
                if isinstance(each, ast.Starred):
                    value = each.value
                    if is_bundle(value) or (isinstance(value, ast.Name) and value.id in bundles):
                        found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


def within(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, or of a module, without those of the functions in it."""
    for each in ast.iter_child_nodes(scope):
        yield each
        if not isinstance(each, Function):
            yield from within(each)


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def bound_by(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement binds, each with its value."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        targets = [node.target]
    for target in targets:
        if isinstance(target, ast.Name) and node.value is not None:
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for part, value in zip(target.elts, node.value.elts, strict=False):
                if isinstance(part, ast.Name):
                    yield part.id, value


def is_bundle(value: ast.expr) -> bool:
    """Whether a tuple or a list of a known length, 2 or more, is written out."""
    is_written = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) > 1
    return is_written and not any(isinstance(each, ast.Starred) for each in value.elts)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_arguments_are_few_and_stand_in_the_call(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert large_constructors(tree) == []
    assert unpacked_bundles(tree) == []


def test_a_constructor_with_too_many_arguments_is_found():
    names = [f"a{number}" for number in range(MOST + 1)]
    few, many = (f"class A:\n def __init__(self, *, {', '.join(each)}): ..." for each in (names[1:], names))
    assert large_constructors(ast.parse(few)) == []
    assert large_constructors(ast.parse(many)) == ["line 2: A has 13 arguments"]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("f(*(a, b), c)", 1),
        ("def g():\n given = a, b\n f(*given)", 1),
        ("def g():\n one, given = 1, (a, b)\n f(*given)\n h(*given)", 2),
        ("def g():\n given = (a,) if a else (a, b)\n f(*given)", 0),
        ("def g():\n given = a, b\n given = other()\n f(*given)", 0),
        ("def g():\n given = a, *b\n f(*given)", 0),
        ("def g(given):\n f(*given, *other())", 0),
        ("def g():\n given = a, b\n def h(given):\n  f(*given)", 0),
    ],
)
def test_a_bundle_of_arguments_is_found_where_it_is_written_out(code, count):
    assert len(unpacked_bundles(ast.parse(code))) == count
