#!/usr/bin/env python3
"""Fails on wording and C++ forms that this project avoids, and says what to write in their place. check_english.py SOURCE_DIR

Wording is checked in the comments, string literals and test names of C++, in the comments and strings of Python, in the comments of shell
scripts and CMake files, and in Markdown. C++ must not return a comma expression, and a public function has at most five parameters."""

import ast
import io
import pathlib
import re
import sys
import tokenize
from typing import Iterator, NamedTuple

FOLDERS = ("include", "src", "models", "tests", "benchmarks", "docs", "scripts", "cmake")
SKIPPED = ("tests/data", "tests/fuzz/corpus", "benchmarks/results", "tests/style/check_english.py")
MAX_PARAMETERS = 5
# (file below include/, function): the reason why it has more parameters.
MANY_PARAMETERS: dict[tuple[str, str], str] = {}

# "Behind" is about space, or about what is hidden. About time it is "after".
BEHIND = re.compile(r"\bbehind\b((?:\s+\w+){0,3})", re.I)
BEHIND_THINGS = {"firewall", "interface", "interfaces", "scenes", "proxy", "door", "header", "registry", "flag"}
BEFORE_BEHIND = re.compile(
    r"\b(?:(?:decision|idea|reason|reasoning|design|theory)s?|lag|lags|lagging|fall|falls|falling|far|(?:a|one|two|\d+) steps?|"
    r"leav\w+(?:\s+\w+){0,3}|left)\s+$",
    re.I,
)
# After "left behind" the sentence ends, or says by whom or when; "left behind a step" is about time.
ENDS = re.compile(r"\s*(?:$|[.,;:!?)\"'`|]|by\b|when\b|if\b|\\n)")

ANYWHERE = [
    (re.compile(r"\bby another road\b", re.I), "name the call: 'called without nn::Ref'"),
    (re.compile(r"\bgo(?:es)? on behind\b", re.I), "'resumes after', 'continues after'"),
    (re.compile(r"\bstands there twice\b", re.I), "'duplicate'"),
    (re.compile(r"\bwasn't sent by\b", re.I), "'rank 3 stopped sending at byte N'"),
    (re.compile(r"\bwhat has the memory\b", re.I), "'cannot report memory use'"),
    (re.compile(r"\bwhat a run tells\b", re.I), "'metrics and logging'"),
    (re.compile(r"\b(?:can't|cannot) be told\b(?! (?:to|that|apart)\b)", re.I), "'is unknown', 'cannot report'"),
    (re.compile(r"\bgo(?:es)? on\b(?! (?:a|an|the|its|one|top)\b)", re.I), "'continues', 'resumes'"),
    (re.compile(r"\bdo(?:es)?n't go with\b", re.I), "'can't be combined with'"),
]
IN_COMMENTS = [(re.compile(r"\b(?:is|are)(?: not|n't)? told\b(?! (?:to|that|about|when|how)\b)", re.I), "'is reported', 'learns of', 'is given'")]
OPENINGS = [
    (re.compile(r"of (?!course\b)", re.I), "begin with the noun: 'The index of ...'"),
    (re.compile(r"who(?:se)? (?!.*\?)", re.I), "begin with the noun: 'The rank that ...'"),
    (re.compile(r"what (?!.*\?)", re.I), "begin with the noun: 'The parts of ... that ...'"),
    (re.compile(r"Nor "), "join it to the sentence before, or write 'Also not'"),
    (re.compile(r"Those that\b"), "name them: 'The tensors that ...'"),
]


class Text(NamedTuple):
    kind: str  # comment, string, name or prose
    line: int
    words: str


def problems_of(text: Text) -> Iterator[tuple[int, str, str]]:
    """(line, the words, what to write instead)"""

    def found(match: re.Match) -> tuple[int, str]:
        return text.line + text.words.count("\n", 0, match.start()), " ".join(match[0].split())

    if text.kind == "name":
        if riddle := re.search(r"Behind|Told|GotOver|GoesOn|GoOn(?![a-z])", text.words):
            yield text.line, text.words, f"what happens instead of '{riddle[0]}'"
        return
    for match in BEHIND.finditer(text.words):
        before, after = text.words[: match.start()], text.words[match.start() + len("behind") :]
        prepared = BEFORE_BEHIND.search(before)
        if BEHIND_THINGS & set(match[1].lower().split()):
            continue
        if prepared and (not re.match(r"leav|left", prepared[0].lower()) or ENDS.match(after)):
            continue
        yield *found(match), "'after' if it is about time"
    rules = ANYWHERE + (IN_COMMENTS if text.kind == "comment" else [])
    for pattern, instead in rules:
        for match in pattern.finditer(text.words):
            yield *found(match), instead
    if text.kind == "comment":
        for pattern, instead in OPENINGS:
            if match := pattern.match(text.words):
                yield text.line, " ".join(text.words.split()[:4]), instead


# ---- C++

TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|(?:u8|[uUL])?R"(?P<mark>[^()\s\\]*)\(.*?\)(?P=mark)"|"(?:[^"\\\n]|\\.)*"|(?<![0-9a-fA-F])'(?:[^'\\\n]|\\.)+'""", re.S)
TEST = re.compile(r"^(?:TYPED_)?TEST(?:_[FP])?\((\w+),\s*(\w+)\)", re.M)


def split_cpp(source: str) -> tuple[list[Text], str]:
    """The comments and strings, and the code with blanks in their place. Comments on consecutive lines are one."""
    texts, blocks = [], []

    def blank(match: re.Match) -> str:
        words, line = match[0], source.count("\n", 0, match.start()) + 1
        if words.startswith("/"):
            alone = source.rfind("\n", 0, match.start()) + 1
            alone = not source[alone : match.start()].strip()
            words = re.sub(r"^(?:///?<?|/\*+) ?", "", words)
            if alone and blocks and blocks[-1][1] == line - 1:
                blocks[-1] = (blocks[-1][0], line, f"{blocks[-1][2]}\n{words}")
            else:
                blocks.append((line, line if alone else -1, words))
        else:
            texts.append(Text("string", line, words))
        return re.sub(r"[^\n]", " ", match[0])

    code = TOKEN.sub(blank, source)
    texts += [Text("comment", line, words) for line, _, words in blocks]
    texts += [Text("name", code.count("\n", 0, test.start()) + 1, f"{test[1]}.{test[2]}") for test in TEST.finditer(code)]
    return texts, code


def close_of_template(code: str, start: int) -> int:
    """The position of the '>' that closes the '<' at `start`; -1 where that is a comparison."""
    depth = 0
    for position in range(start, len(code)):
        char = code[position]
        if char == "<":
            depth += 1
        elif char == ">" and code[position - 1] != "-":
            depth -= 1
            if depth == 0:
                return position
        elif char in ";{}":
            return -1
    return -1


def without_nesting(code: str) -> str:
    """`code` without what stands inside of brackets, braces and template arguments."""
    flat, depth, position = [], 0, 0
    while position < len(code):
        char = code[position]
        if char == "<" and re.search(r"\w$|\btemplate $", code[:position]) and (close := close_of_template(code, position)) > 0:
            position = close + 1
            continue
        if char in ")]}":
            depth -= 1
        if depth == 0:
            flat.append(char)
        if char in "([{":
            depth += 1
        position += 1
    return "".join(flat)


def comma_returns(code: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"\breturn\b", code):
        end, depth = match.end(), 0
        while end < len(code) and (depth > 0 or code[end] != ";"):
            depth += (code[end] in "([{") - (code[end] in ")]}")
            end += 1
        statement = code[match.start() : end]
        if "," in without_nesting(statement):
            yield code.count("\n", 0, match.start()) + 1, " ".join(statement.split())[:60]


NOT_FUNCTIONS = {"decltype", "noexcept", "alignas", "requires", "static_assert", "sizeof", "defined", "__attribute__", "return"}


def declarations(code: str) -> Iterator[tuple[int, str]]:
    """The statements of namespaces and classes, each with its position. Function bodies and initializers are left out."""
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda match: re.sub(r"[^\n]", " ", match[0]), code, flags=re.M)
    start, depth, body = 0, 0, 0
    for position, char in enumerate(code):
        if body:
            body += (char == "{") - (char == "}")
            if not body:
                start = position + 1
            continue
        depth += (char == "(") - (char == ")")
        if depth:
            continue
        if char in ";{}":
            statement = code[start:position]
            yield start, statement
            flat = without_nesting(statement)
            scope = re.search(r"\b(?:namespace|class|struct|extern)\b", flat) and "(" not in flat
            if char == "{" and not scope:
                body = 1
            start = position + 1


def long_functions(code: str) -> Iterator[tuple[int, str, int]]:
    for start, statement in declarations(code):
        statement = statement.replace("operator()", "operator__")
        for match in re.finditer(r"(\w+)\s*\(", statement):
            before = statement[: match.start()]
            inside = before.count("(") != before.count(")") or before.count("<") > before.count(">") - before.count("->")
            if match[1] in NOT_FUNCTIONS or inside:
                continue
            end, depth = match.end(), 1
            while end < len(statement) and depth:
                depth += (statement[end] == "(") - (statement[end] == ")")
                end += 1
            parameters = without_nesting(statement[match.end() : end - 1])
            count = parameters.count(",") + 1 if parameters.strip() else 0
            if count > MAX_PARAMETERS:
                yield code.count("\n", 0, start + match.start()) + 1, match[1], count
            break


# ---- other files


def python_texts(source: str) -> Iterator[Text]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text("comment", token.start[0], token.string.lstrip("#! "))
        elif token.type == tokenize.STRING:
            yield Text("string", token.start[0], token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            yield Text("comment", node.body[0].lineno, ast.get_docstring(node, clean=False))


def texts_of(path: pathlib.Path, source: str) -> list[Text]:
    if path.suffix == ".py":
        return list(python_texts(source))
    if path.suffix == ".md":
        return [Text("prose", 1, source)]
    lines = enumerate(source.splitlines(), 1)
    return [Text("comment", line, match[1]) for line, words in lines if (match := re.match(r"\s*#+ (.*)", words))]


def problems_of_file(root: pathlib.Path, path: pathlib.Path) -> list[str]:
    name, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
    found: list[tuple[int, str, str]] = []
    if path.suffix in (".h", ".cpp", ".cu"):
        texts, code = split_cpp(source)
        found += [(line, words, "one statement for each effect") for line, words in comma_returns(code)]
        if name.startswith("include/"):
            for line, function, count in long_functions(code):
                if (name.removeprefix("include/"), function) not in MANY_PARAMETERS:
                    found.append((line, f"{function} with {count} parameters", f"a struct; at most {MAX_PARAMETERS} are allowed"))
    else:
        texts = texts_of(path, source)
    found += [problem for text in texts for problem in problems_of(text)]
    return [f"{name}:{line}: \"{words}\": write {instead}" for line, words, instead in sorted(found)]


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    paths = [root / "README.md", root / "CONTRIBUTING.md", root / "CMakeLists.txt"]
    for folder in FOLDERS:
        paths += sorted((root / folder).rglob("*"))
    problems = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        known = path.suffix in (".h", ".cpp", ".cu", ".py", ".md", ".sh", ".cmake") or path.name == "CMakeLists.txt"
        if known and path.is_file() and not name.startswith(SKIPPED):
            problems += problems_of_file(root, path)
    print("\n".join(problems) or "the wording is plain")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
