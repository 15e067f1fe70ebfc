"""The rules of language that a program can check, in code, tests and documents (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = (*ROOT.glob("eos/**/*.py"), *ROOT.glob("spark_connector/**/*.py"))
TESTS = tuple(ROOT.glob("tests/**/*.py"))
DOCUMENTS = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))

FIRST_WORDS = frozenset({"It", "They", "These", "Those", "Of", "What", "Who", "Whose", "Whether", "Which", "So", "Nor"})
"""Words with which no docstring begins."""
LONGEST_SENTENCE = 40
"""Most words of a docstring's first sentence."""
LONGEST_TEST_NAME = 70
BANNED = re.compile(
    r"\b(anew|so many|came to pass|comes to pass|come to pass|to be had|be had|as yet|convict\w*|suspects?|strangers?"
    r"|whoever|who is told|is told|are told|was told|were told|half way|had better)\b",
    re.IGNORECASE,
)
"""Words of earlier texts over which readers stumbled: use `again`, `this many`, `succeed`, `unavailable`, `logged`."""

EXPLAINED = re.compile(r"(?:^|(?<=[.:;]\s)|(?<=\n))`([a-z_]\w*)`(?: \([^)]*\))?: ")
"""A parameter that a docstring explains: its name in backticks, at the start of a sentence, and a colon."""

FOREIGN = {
    "_ALL_BROKERS_DOWN",
    "oauth_cb",
    "rd_kafka_enq_once_del_source",
    "rd_kafka_txn_handle_EndTxn",
    "protocol_data",
    "c_rehash",
    "__eos_sinks",
}
"""Names of other programs, of their answers and of topics, which docstrings mention in backticks."""


class Text(NamedTuple):
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text[:110]}"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def docstrings(paths: tuple[Path, ...]) -> Iterator[Text]:
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
                found := ast.get_docstring(node)
            ):
                yield Text(relative(path), getattr(node, "lineno", 1), found)


def comments(paths: tuple[Path, ...]) -> Iterator[Text]:
    for path in paths:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                yield Text(relative(path), token.start[0], token.string)


def strings(paths: tuple[Path, ...]) -> Iterator[Text]:
    """Messages: every string of several words that is not a docstring."""
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3:
                yield Text(relative(path), node.lineno, node.value)


def lines(paths: tuple[Path, ...]) -> Iterator[Text]:
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield Text(relative(path), number, line)


def first_sentence(docstring: str) -> str:
    return re.split(r"(?<=[.:?!])\s|\n\n", docstring.strip(), maxsplit=1)[0]


def test_docstring_begins_with_a_verb_or_noun() -> None:
    found = list(docstrings(PRODUCT))
    assert len(found) > 1_000
    assert [str(one) for one in found if one.text.split()[0].strip(",:") in FIRST_WORDS] == []


def test_first_sentence_of_a_docstring_is_short() -> None:
    found = list(docstrings(PRODUCT))
    assert len(found) > 1_000
    assert [str(one) for one in found if len(first_sentence(one.text).split()) > LONGEST_SENTENCE] == []


@pytest.mark.parametrize("kind", ["docstrings", "comments", "messages", "documents"])
def test_text_has_no_banned_words(kind: str) -> None:
    found = {
        "docstrings": lambda: docstrings(PRODUCT),
        "comments": lambda: comments(PRODUCT),
        "messages": lambda: strings(PRODUCT),
        "documents": lambda: lines(DOCUMENTS),
    }[kind]()
    texts = list(found)
    assert len(texts) > 500
    assert [str(one) for one in texts if BANNED.search(one.text)] == []


def test_test_names_are_short() -> None:
    names = [
        Text(relative(path), node.lineno, node.name)
        for path in TESTS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 1_000
    assert [str(one) for one in names if len(one.text) > LONGEST_TEST_NAME] == []


def names_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    every = function.args
    parameters = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    return {one.arg for one in parameters if one is not None}


def test_explained_parameters_of_a_docstring_exist() -> None:
    examined, wrong = 0, []
    for path in PRODUCT:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for name in EXPLAINED.findall(ast.get_docstring(node) or ""):
                examined += 1
                if name not in names_in(node):
                    wrong.append(str(Text(relative(path), node.lineno, name)))
    assert examined > 50
    assert wrong == []


def test_names_in_docstrings_exist() -> None:
    known = set(FOREIGN)
    for path in PRODUCT:
        for node in ast.walk(tree_of(path)):
            for field in ("id", "attr", "arg", "name", "module"):
                known.update(re.findall(r"\w+", str(getattr(node, field, ""))))
    named = [
        Text(text.path, text.line, name)
        for text in docstrings(PRODUCT)
        for name in re.findall(r"`([a-z_]\w*_[a-z]\w*)(?:\(\))?`", text.text)
    ]
    assert len(named) > 200
    assert [str(one) for one in named if one.text not in known] == []
