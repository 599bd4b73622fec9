r"""Decision which rules of an EBNF grammar can become terminals without changing the language.

A terminal consumes as much text as it can. This equals trying all divisions of a text only if no character that could
extend a complete terminal can follow it: in a rule with `ws "\n"`, `ws ::= [ \n]*` cannot be a terminal. The check is
conservative, and all characters beyond ASCII count as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

MAX_NODES = 2000
"""Maximum number of nodes of a grammar that is analyzed. In a larger one, all regular rules become terminals."""
MAX_PASSES = 120
MAX_POSITIONS = 200
MAX_WORK = 200_000
"""Maximum number of pairs of positions that are compared in all automata of a grammar."""
_OTHERS = 1 << 128
ASCII = _OTHERS - 1
EVERYTHING = ASCII | _OTHERS


@dataclass(frozen=True, slots=True)
class Chars:
    """One of some characters, as bits: bit i for character i, bit 128 for all characters beyond ASCII."""

    mask: int


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """Special token, which is not text."""


@dataclass(frozen=True, slots=True)
class Seq:
    """Sequence of parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Alternatives."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Repetition of a part: once, or zero times if `optional`, or any number of times if `many`."""

    part: Node
    optional: bool
    many: bool


Node = Chars | Ref | Token | Seq | Alt | Loop


def mask_of(character: str) -> int:
    """Return the mask of a character."""
    return 1 << ord(character) if character.isascii() else _OTHERS


def text_node(text: str) -> Node:
    """Return a node for exactly this text.

    A text that makes the grammar too large to analyze gives a node of that size.
    """
    if len(text) > MAX_NODES:
        return Seq((Chars(EVERYTHING),) * (MAX_NODES + 1))
    return Seq(tuple(Chars(mask_of(character)) for character in text))


def safe_terminals(rules: Mapping[str, Node], regular: set[str]) -> set[str]:
    """Return the regular rules that can become terminals.

    Args:
        rules: Syntax tree of each rule.
        regular: Rules that reach neither themselves nor a special token.
    """
    if sum(map(_size, rules.values())) > MAX_NODES:
        return set(regular)
    sets = _Sets(rules)
    if not sets.converged:
        return set(regular)
    budget = _Budget(MAX_WORK)
    return {name for name in rules if name in regular and not _extensions(name, rules, budget) & sets.follow[name]}


@dataclass(slots=True)
class _Budget:
    left: int


def _size(node: Node) -> int:
    if isinstance(node, Seq | Alt):
        return 1 + sum(map(_size, node.parts))
    return 1 + _size(node.part) if isinstance(node, Loop) else 1


class _Sets:
    """First and follow sets of each rule, and whether it can be empty."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.first = dict.fromkeys(rules, 0)
        self.nullable = dict.fromkeys(rules, False)
        self.follow = dict.fromkeys(rules, 0)
        self.converged = any(self._is_unchanged_by_pass(rules) for _ in range(MAX_PASSES))

    def _is_unchanged_by_pass(self, rules: Mapping[str, Node]) -> bool:
        """Extend the sets by what they imply directly; return True if they were complete."""
        before = (dict(self.first), dict(self.nullable), dict(self.follow))
        for name, node in rules.items():
            self.first[name], self.nullable[name] = self._start(node)
            self._walk(node, self.follow[name])
        return before == (self.first, self.nullable, self.follow)

    def _start(self, node: Node) -> tuple[int, bool]:
        """Return the first set of a node, and whether the node can be empty."""
        if isinstance(node, Chars):
            return node.mask, False
        if isinstance(node, Ref):
            return self.first[node.name], self.nullable[node.name]
        if isinstance(node, Token):
            return 0, False
        if isinstance(node, Loop):
            first, nullable = self._start(node.part)
            return first, nullable or node.optional
        if isinstance(node, Alt):
            starts = [self._start(part) for part in node.parts]
            return _union(first for first, _ in starts), any(nullable for _, nullable in starts)
        whole = 0
        for part in node.parts:
            first, nullable = self._start(part)
            whole |= first
            if not nullable:
                return whole, False
        return whole, True

    def _walk(self, node: Node, after: int) -> None:
        """Add the follow sets of the rules that a node refers to; `after` is the follow set of the node."""
        if isinstance(node, Ref):
            self.follow[node.name] |= after
        elif isinstance(node, Alt):
            for part in node.parts:
                self._walk(part, after)
        elif isinstance(node, Loop):
            self._walk(node.part, after | (self._start(node.part)[0] if node.many else 0))
        elif isinstance(node, Seq):
            for part in reversed(node.parts):
                self._walk(part, after)
                first, nullable = self._start(part)
                after = first | (after if nullable else 0)


def _union(masks: Iterable[int]) -> int:
    whole = 0
    for mask in masks:
        whole |= mask
    return whole


@dataclass(slots=True)
class _Piece:
    """Part of a Glushkov automaton: positions where the part can begin and end."""

    first: frozenset[int]
    last: frozenset[int]
    nullable: bool


class _TooLarge(Exception):
    pass


class _Automaton:
    """Glushkov automaton of a regular rule. Each position is a character of its expression."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self.masks: list[int] = []
        self.next: list[set[int]] = []

    def build(self, node: Node) -> _Piece:
        """Add a part. Raises _TooLarge."""
        if isinstance(node, Chars):
            if len(self.masks) >= MAX_POSITIONS:
                raise _TooLarge
            self.masks.append(node.mask)
            self.next.append(set())
            here = frozenset((len(self.masks) - 1,))
            return _Piece(here, here, False)
        if isinstance(node, Ref):
            return self.build(self._rules[node.name])
        if isinstance(node, Loop):
            piece = self.build(node.part)
            if node.many:
                self._link(piece.last, piece.first)
            return _Piece(piece.first, piece.last, piece.nullable or node.optional)
        if isinstance(node, Alt):
            pieces = [self.build(part) for part in node.parts]
            first = frozenset().union(*(piece.first for piece in pieces))
            last = frozenset().union(*(piece.last for piece in pieces))
            return _Piece(first, last, any(piece.nullable for piece in pieces))
        whole = _Piece(frozenset(), frozenset(), True)
        for part in node.parts if isinstance(node, Seq) else ():
            piece = self.build(part)
            self._link(whole.last, piece.first)
            whole = _Piece(
                whole.first | piece.first if whole.nullable else whole.first,
                piece.last | whole.last if piece.nullable else piece.last,
                whole.nullable and piece.nullable,
            )
        return whole

    def _link(self, ends: frozenset[int], begins: frozenset[int]) -> None:
        for end in ends:
            self.next[end] |= begins


def _extensions(name: str, rules: Mapping[str, Node], budget: _Budget) -> int:
    """Return the characters that can extend a complete text of a regular rule."""
    automaton = _Automaton(rules)
    try:
        whole = automaton.build(rules[name])
    except (_TooLarge, RecursionError):
        return EVERYTHING
    masks, following = automaton.masks, automaton.next
    found = _union(masks[position] for position in whole.first) if whole.nullable else 0
    extensions = [_union(masks[position] for position in positions) for positions in following]
    # Pairs of positions that the same text reaches: if the text may end at one, the other's successors extend it.
    waiting: list[tuple[Collection[int], Collection[int]]] = [(whole.first, whole.first)]
    seen: set[tuple[int, int]] = set()
    while waiting:
        ones, others = waiting.pop()
        budget.left -= len(ones) * len(others)
        if budget.left < 0:
            return EVERYTHING
        for one, other in product(ones, others):
            if masks[one] & masks[other] and (one, other) not in seen:
                seen.add((one, other))
                waiting.append((following[one], following[other]))
                if one in whole.last:
                    found |= extensions[other]
    return found
