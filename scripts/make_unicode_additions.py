#!/usr/bin/env python3
"""Writes src/data/tokenizer/unicode_additions.inc: the characters that Unicode 15 and 16 added to each property that split patterns use.

Debian 12's PCRE2 knows Unicode 14, the `tokenizers` package 16. Equal tokens need equal classes, so patterns spell out the
difference: the code points that Unicode 14 leaves unassigned and that the package's own regular expressions find in a class.
Needs a Python whose unicodedata is version 14 (3.11).

    .venv/bin/python scripts/make_unicode_additions.py
"""

import pathlib
import unicodedata

from tokenizers import Regex, pre_tokenizers

CATEGORIES = "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp Cc Cf".split()
SCRIPTS = "Arabic Bengali Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai".split()
OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "src" / "data" / "tokenizer" / "unicode_additions.inc"


def members(name: str, text: str) -> set[int]:
    splitter = pre_tokenizers.Split(Regex(rf"[\p{{{name}}}]+"), behavior="removed", invert=True)
    return {ord(character) for part, _ in splitter.pre_tokenize_str(text) for character in part}


def as_class(code_points: set[int]) -> str:
    ranges = []
    for code_point in sorted(code_points):
        if ranges and ranges[-1][1] == code_point - 1:
            ranges[-1][1] = code_point
        else:
            ranges.append([code_point, code_point])
    return "".join(f"\\x{{{a:X}}}" + (f"-\\x{{{b:X}}}" if b > a else "") for a, b in ranges)


def main() -> None:
    assert unicodedata.unidata_version == "14.0.0", unicodedata.unidata_version
    unassigned = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) == "Cn"]
    text = "".join(map(chr, unassigned))
    lines = ["// Made by scripts/make_unicode_additions.py: {property, PCRE2's name of it, members new in Unicode 15 to 16}."]
    for name in CATEGORIES + SCRIPTS:
        # Without "sc:" PCRE2 also matches script extensions, which the package doesn't.
        lines.append(f'{{"{name}", "{"sc:" * (name in SCRIPTS)}{name}", R"({as_class(members(name, text))})"}},')
    OUTPUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
