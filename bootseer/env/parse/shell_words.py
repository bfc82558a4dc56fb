"""PURE: the simple commands of a line of POSIX shell, as far as known without running it.

In: the line, and the environment for `$NAME`. Out: words, each with a flag for certain text, and the names of all
variables in the line. Text is certain without command substitution, patterns and unknown variables. Nothing is
run. Other syntax (functions, here-documents, loops) leaves `is_certain` False.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\}|[^}]*\})")
_ENDS = {"&&", "||", ";", "|", "&", "(", ")", "\n", ";;", "|&"}
_OPERATORS = ("&&", "||", ";;", "|&", ">>", "<<", ">&", "<&", "&>", ">|", ";", "|", "&", "(", ")", "<", ">", "\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_LEADING = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "fi", "done", "time"}
_COMPOUND = {"for", "case", "select", "function"}


class Word(NamedTuple):
    text: str
    is_certain: bool = True


class Simple(NamedTuple):
    words: tuple[Word, ...]
    reads: tuple[Word, ...] = ()  # files given by `<`
    assigned: tuple[tuple[str, str], ...] = ()  # NAME=VALUE before it
    writes: bool = False  # its output goes to a file


class Line(NamedTuple):
    commands: tuple[Simple, ...]
    variables: tuple[str, ...]  # read from the environment
    is_certain: bool  # False: it contains more than simple commands


_NO_FILE = re.compile(r"/dev/(null|stdout|stderr)|\d|-")


class _Operator(NamedTuple):
    text: str


def parse_line(line: str, environ: Mapping[str, str]) -> Line:
    """Parse a line; never raises, as invalid syntax is only uncertain."""
    lexer = _Lexer(line, environ)
    tokens, is_certain = lexer.tokens()
    commands: list[Simple] = []
    words: list[Word] = []
    reads: list[Word] = []
    redirection, writes = "", False
    for token in [*tokens, _Operator(";")]:
        if isinstance(token, Word):
            if redirection:
                if redirection == "<":
                    reads.append(token)
                writes = writes or (redirection[0] in ">&" and not _NO_FILE.fullmatch(token.text))
                is_certain = is_certain and redirection != "<<"
                redirection = ""
            else:
                words.append(token)
            continue
        if token.text not in _ENDS:
            redirection = token.text
            continue
        redirection = ""
        if words or reads:
            found = _simple(words, reads)._replace(writes=writes)
            is_certain = is_certain and not (found.words and found.words[0].text in _COMPOUND)
            if found.words or found.reads or found.assigned:
                commands.append(found)
        words, reads, writes = [], [], False
    return Line(tuple(commands), tuple(dict.fromkeys(lexer.variables)), is_certain)


def _simple(words: list[Word], reads: list[Word]) -> Simple:
    start = 0
    assigned: list[tuple[str, str]] = []
    while start < len(words):
        found = _ASSIGNMENT.fullmatch(words[start].text)
        if words[start].text in _LEADING:
            start += 1
        elif found and words[start].is_certain:
            assigned.append((found[1], found[2]))
            start += 1
        else:
            break
    return Simple(tuple(words[start:]), tuple(reads), tuple(assigned))


class _Lexer:
    """A lexer that splits a line into words and operators."""

    def __init__(self, line: str, environ: Mapping[str, str]) -> None:
        self._line = line
        self._environ = dict(environ)
        self._place = 0
        self.variables: list[str] = []

    def tokens(self) -> tuple[list[Word | _Operator], bool]:
        found: list[Word | _Operator] = []
        line, word_end = self._line, -1
        while self._place < len(line):
            letter, begin = line[self._place], self._place
            if letter in " \t\r":
                self._place += 1
            elif letter == "#":
                end = line.find("\n", self._place)
                self._place = len(line) if end < 0 else end
            elif line.startswith("\\\n", self._place):
                self._place += 2
            elif operator := self._operator():
                if operator[0] in "<>" and begin == word_end and found and found[-1].text.isdigit():
                    found.pop()  # `2>file`: the number belongs to the redirection
                found.append(_Operator(operator))
            else:
                word = self._word()
                if word is None:
                    return found, False  # an unterminated quote
                word_end = self._place
                found.append(word)
                self._remember(word, found)
        return found, True

    def _operator(self) -> str:
        for operator in _OPERATORS:
            if self._line.startswith(operator, self._place):
                self._place += len(operator)
                return operator
        return ""

    def _remember(self, word: Word, found: list[Word | _Operator]) -> None:
        """Set a variable for the rest of the line, after `NAME=VALUE` as a command or after `export`."""
        assigned = _ASSIGNMENT.fullmatch(word.text)
        before = found[-2] if len(found) > 1 else None
        if assigned is None or (isinstance(before, Word) and before.text != "export"):
            return
        if word.is_certain:
            self._environ[assigned[1]] = assigned[2]
        else:
            self._environ.pop(assigned[1], None)

    def _word(self) -> Word | None:
        line, text, is_certain = self._line, [], True
        quote = ""
        while self._place < len(line):
            letter = line[self._place]
            if quote == "'":
                self._place += 1
                if letter == "'":
                    quote = ""
                else:
                    text.append(letter)
            elif letter == "\\":
                following = line[self._place + 1 : self._place + 2]
                self._place += 2
                if quote and following not in '"\\$`\n':
                    text.append(letter)
                if following != "\n":
                    text.append(following)
            elif letter == '"':
                quote = "" if quote else '"'
                self._place += 1
            elif letter == "'" and not quote:
                quote = "'"
                self._place += 1
            elif letter == "$":
                part = self._expand()
                is_certain = is_certain and part is not None
                # An unset variable gives no word, which matters only for uncertain words.
                text.append(part or "")
            elif letter == "`":
                is_certain = False
                end = line.find("`", self._place + 1)
                self._place = len(line) if end < 0 else end + 1
            elif not quote and (letter in " \t\r\n" or letter in ";|&()<>"):
                break
            else:
                if not quote and letter == "~" and not text:
                    is_certain = is_certain and self._append_home(text)
                elif not quote and letter in "*?":
                    is_certain = False
                    text.append(letter)
                else:
                    text.append(letter)
                self._place += 1
        return None if quote else Word("".join(text), is_certain)

    def _append_home(self, text: list[str]) -> bool:
        following = self._line[self._place + 1 : self._place + 2]
        home = self._environ.get("HOME", "")
        is_own = following in ("", "/", " ", "\n", ";") and home != ""
        text.append(home if is_own else "~")
        return is_own

    def _expand(self) -> str | None:
        """Return the text of the expansion at this place; None if unknown."""
        line, start = self._line, self._place + 1
        if line.startswith("(", start):
            self._place = _closing(line, start)
            return None
        if braced := _BRACED.match(line, start):
            self._place = braced.end()
            name = braced[1]
            self.variables.append(name)
            return self._environ.get(name) if braced[2] == "}" else None
        if found := _NAME.match(line, start):
            self._place = found.end()
            self.variables.append(found[0])
            return self._environ.get(found[0])
        # $1, $?, $$ ...; a single $ is literal
        following = line[start : start + 1]
        self._place = start
        if following and following in "0123456789?$!#@*-{":
            self._place += 1
            return None
        return "$"


def _closing(line: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return place + 1
    return len(line)
