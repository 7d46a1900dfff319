"""Translates the formula of a pair function to C++ (src/definitions/README.md).

A formula is parsed as a Python expression into a graph of operations without duplicates.
Reverse-mode differentiation adds the derivatives to the same graph. Interval arithmetic adds bounds
of the result for a range of g.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import cast

#: Limits of float32: maximum, largest argument of exp without overflow, smallest normal number.
_MOST = 3.4028234e38
_MOST_EXPONENT = 88.0
_LEAST_NORMAL = 1.17549435e-38
#: Smallest square root used as a divisor.
_LEAST_ROOT = 1e-18
_MOST_POWER = 1024

_BINARY: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
#: Functions in formulas; all but max and min have one argument.
FUNCTIONS = ("abs", "exp", "log", "log1p", "max", "min", "sigmoid", "softplus", "sqrt", "tanh")


class Graph:
    """A list of operations. Each is identified by its index and follows its operands.

    Leaves are ("number", x), ("g",), ("head", n), and the ends of g's range, ("least",) and
    ("most",). ("function", name, x, y) is the function `name` of x, computed by a numerically
    stable form y. Its derivative is that of the function; y is not differentiated.
    """

    def __init__(self, g_is_positive: bool) -> None:
        self._g_is_positive = g_is_positive
        self.operations: list[tuple] = []
        self._numbers: dict[tuple, int] = {}

    def _add(self, *operation: object) -> int:
        if operation not in self._numbers:
            self._numbers[operation] = len(self.operations)
            self.operations.append(operation)
        return self._numbers[operation]

    def leaf(self, *operation: object) -> int:
        return self._add(*operation)

    def number(self, value: float) -> int:
        if not abs(value) <= _MOST:
            text = str(value) if isinstance(value, float) else f"{len(str(value))} digits"
            raise ValueError(f"it contains a number that float32 cannot represent ({text})")
        return self._add("number", float(value))

    def value_of(self, node: int) -> float | None:
        """Returns the value of a number node; None for other nodes."""
        operation = self.operations[node]
        return operation[1] if operation[0] == "number" else None

    def _fold(self, kind: str, a: float, b: float) -> int:
        if kind == "/":
            if b == 0:
                raise ValueError("it divides by 0")
            return self.number(a / b)
        return self.number({"+": a + b, "-": a - b, "*": a * b}[kind])

    def binary(self, kind: str, a: int, b: int) -> int:
        x, y = self.value_of(a), self.value_of(b)
        if x is not None and y is not None:
            return self._fold(kind, x, y)
        if kind == "+" and x == 0:
            return b
        if kind in "+-" and y == 0:
            return a
        if kind == "*" and (x == 0 or y == 0):
            return self.number(0)
        if kind == "*" and x == 1:
            return b
        if kind in "*/" and y == 1:
            return a
        return self._add(kind, a, b)

    def add(self, a: int, b: int) -> int:
        return self.binary("+", a, b)

    def subtract(self, a: int, b: int) -> int:
        return self.binary("-", a, b)

    def multiply(self, a: int, b: int) -> int:
        return self.binary("*", a, b)

    def divide(self, a: int, b: int) -> int:
        return self.binary("/", a, b)

    def negative(self, a: int) -> int:
        return self.subtract(self.number(0), a)

    def largest(self, a: int, b: int) -> int:
        if self.value_of(b) is None:
            a, b = b, a
        # max propagates NaN only from its second operand, which must therefore not be the constant.
        return a if self._is_below(b, a) else self._add("max", b, a)

    def least(self, a: int, b: int) -> int:
        return self._add("min", b, a) if self.value_of(b) is not None else self._add("min", a, b)

    def _is_below(self, number: int, a: int) -> bool:
        value = self.value_of(number)
        return value is not None and value <= 0 and self.is_positive(a)

    def where_greater(self, a: int, b: int, yes: int, no: int) -> int:
        """Selects `yes` where a > b, and `no` elsewhere."""
        return yes if yes == no else self._add("where", a, b, yes, no)

    def sqrt(self, a: int) -> int:
        return self._add("sqrt", a)

    def exp(self, a: int) -> int:
        return self._add("exp", self.least(a, self.number(_MOST_EXPONENT)))

    def log(self, a: int) -> int:
        kind, *of = self.operations[a]
        if kind == "function" and of[0] == "sigmoid":
            # The left tail of sigmoid underflows, so its logarithm needs this form.
            return self.negative(self.softplus(self.negative(of[1])))
        return self._add("log", self.largest(a, self.number(_LEAST_NORMAL)))

    def log1p(self, a: int) -> int:
        if self.is_positive(a):
            return self._add("log1p", a)
        # For a < 0, use -log(1 + b) with b = -a / (1 + a), which keeps the digits of a.
        zero = self.number(0)
        below = self.least(zero, a)
        rest = self.largest(self.add(self.number(1), below), self.number(_LEAST_NORMAL))
        b = self.divide(self.negative(below), rest)
        above = self._add("log1p", self.largest(a, zero))
        return self._add("function", "log1p", a, self.subtract(above, self._add("log1p", b)))

    def tanh(self, a: int) -> int:
        return self._add("tanh", a)

    def abs(self, a: int) -> int:
        return a if self.is_positive(a) else self._add("abs", a)

    def sigmoid(self, a: int) -> int:
        zero, one = self.number(0), self.number(1)
        small = self.exp(self.negative(self.abs(a)))
        share = self.where_greater(zero, a, small, one)
        return self._add("function", "sigmoid", a, self.divide(share, self.add(one, small)))

    def softplus(self, a: int) -> int:
        more = self.log1p(self.exp(self.negative(self.abs(a))))
        return self.add(self.largest(a, self.number(0)), more)

    def power(self, a: int, b: int) -> int:
        exponent = self.value_of(b)
        if exponent is None:
            return self.exp(self.multiply(b, self.log(a)))
        if abs(exponent) > _MOST_POWER:
            raise ValueError(
                f"it contains the power {exponent:g}; expected an exponent from -{_MOST_POWER} to "
                f"{_MOST_POWER}"
            )
        halves = round(2 * abs(exponent))
        result = self.number(1)
        square = a
        rest = halves // 2
        while rest > 0:
            if rest % 2 == 1:
                result = self.multiply(result, square)
            rest //= 2
            if rest > 0:
                square = self.multiply(square, square)
        if halves % 2 == 1:
            result = self.multiply(result, self.sqrt(a))
        # The remaining exponent is small, so the rounding error of this power is small.
        left = abs(exponent) - halves / 2
        if left != 0:
            more = self.exp(self.multiply(self.number(left), self.log(a)))
            result = self.multiply(result, more)
        return self.divide(self.number(1), result) if exponent < 0 else result

    def is_positive(self, node: int, above: bool = False) -> bool:
        """Returns whether the node is known to be at least 0 or, if `above`, greater than 0."""
        kind, *of = self.operations[node]
        if kind == "number":
            return of[0] > 0 if above else of[0] >= 0
        if kind in ("g", "least", "most"):
            return self._g_is_positive and not above
        if kind == "function":
            return of[0] == "sigmoid" or self.is_positive(of[1], above)
        if kind == "exp":
            return True
        if kind in ("sqrt", "abs"):
            return not above or (kind == "sqrt" and self.is_positive(of[0], above))
        if kind in ("log1p", "tanh"):
            return self.is_positive(of[0], above)
        if kind == "*" and of[0] == of[1] and not above:
            return True
        if kind == "+":
            both = self.is_positive(of[0]) and self.is_positive(of[1])
            return both and (not above or any(self.is_positive(x, True) for x in of))
        if kind in ("*", "min"):
            return self.is_positive(of[0], above) and self.is_positive(of[1], above)
        if kind == "/":
            return self.is_positive(of[0], above) and self.is_positive(of[1], True)
        if kind == "max":
            return any(self.is_positive(x, above) for x in of)
        return False

    def reached_from(self, nodes: Sequence[int]) -> list[int]:
        """Returns these nodes and all their operands, in order."""
        found: set[int] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += self.made_of(node)
        return sorted(found)

    def made_of(self, node: int) -> list[int]:
        kind, *of = self.operations[node]
        if kind in ("number", "g", "head", "least", "most"):
            return []
        return of[1:] if kind == "function" else of

    def derivatives(self, result: int, leaves: Sequence[int]) -> list[int]:
        """Returns the derivative of the result with respect to each leaf.

        At ties, max and min split the gradient.
        """
        order = self.reached_from([result])
        gradient = {result: self.number(1)}
        for node in reversed(order):
            if node not in gradient:
                continue
            for x, slope in self._slopes(node, gradient[node]):
                gradient[x] = self.add(gradient[x], slope) if x in gradient else slope
        return [gradient.get(leaf, self.number(0)) for leaf in leaves]

    def _slopes(self, node: int, d: int) -> list[tuple[int, int]]:
        """Returns (operand, gradient) for each operand of a node, given the node's gradient d."""
        kind, *of = self.operations[node]
        zero, one, half = self.number(0), self.number(1), self.number(0.5)
        if kind == "+":
            return [(of[0], d), (of[1], d)]
        if kind == "-":
            return [(of[0], d), (of[1], self.negative(d))]
        if kind == "*":
            return [(of[0], self.multiply(d, of[1])), (of[1], self.multiply(d, of[0]))]
        if kind == "/":
            share = self.divide(d, of[1])
            return [(of[0], share), (of[1], self.negative(self.multiply(share, node)))]
        if kind == "sqrt":
            root = self.largest(node, self.number(_LEAST_ROOT))
            return [(of[0], self.divide(self.multiply(half, d), root))]
        if kind == "exp":
            return [(of[0], self.multiply(d, node))]
        if kind == "log":
            return [(of[0], self.divide(d, of[0]))]
        if kind == "log1p":
            return [(of[0], self.divide(d, self.add(one, of[0])))]
        if kind == "function" and of[0] == "log1p":
            rest = self.largest(self.add(one, of[1]), self.number(_LEAST_NORMAL))
            return [(of[1], self.divide(d, rest))]
        if kind == "function":
            # This form of sigmoid's derivative is accurate in both tails.
            small = self.exp(self.negative(self.abs(of[1])))
            sum_of = self.add(one, small)
            slope = self.divide(small, self.multiply(sum_of, sum_of))
            return [(of[1], self.multiply(d, slope))]
        if kind == "tanh":
            return [(of[0], self.multiply(d, self.subtract(one, self.multiply(node, node))))]
        if kind == "abs":
            x = of[0]
            below = self.where_greater(zero, x, self.negative(d), zero)
            return [(x, self.where_greater(x, zero, d, below))]
        if kind in ("max", "min"):
            a, b = of
            tie = self.multiply(half, d)
            above = self.where_greater(a, b, d, self.where_greater(b, a, zero, tie))
            below = self.where_greater(b, a, d, self.where_greater(a, b, zero, tie))
            return [(a, above), (b, below)] if kind == "max" else [(a, below), (b, above)]
        if kind == "where":
            a, b, yes, no = of
            return [
                (yes, self.where_greater(a, b, d, zero)),
                (no, self.where_greater(a, b, zero, d)),
            ]
        return []

    def bounds(self, result: int) -> tuple[int, int] | None:
        """Returns the result's lower and upper bound over a range of g, or None if unknown."""
        ranges: dict[int, tuple[int, int]] = {}
        for node in self.reached_from([result]):
            found = self._range(node, ranges)
            if found is None:
                return None
            ranges[node] = found
        return ranges[result]

    def _range(self, node: int, ranges: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
        kind, *of = self.operations[node]
        zero = self.number(0)
        if kind == "g":
            return self.leaf("least"), self.leaf("most")
        if kind in ("number", "head"):
            return node, node
        if kind == "where":
            a, b, yes, no = of
            if any(ranges[x][0] != ranges[x][1] for x in (a, b)):
                # The condition may change within the range.
                return (
                    self.least(ranges[yes][0], ranges[no][0]),
                    self.largest(ranges[yes][1], ranges[no][1]),
                )
            low, high = (self.where_greater(a, b, ranges[yes][n], ranges[no][n]) for n in (0, 1))
            return low, high
        if kind == "function":
            low, high = ranges[of[1]]
            function = getattr(self, of[0])
            return function(low), function(high)
        low, high = ranges[of[0]]
        if kind == "sqrt":
            # The operand is non-negative; only its computed bounds may be negative.
            low, high = self.largest(low, zero), self.largest(high, zero)
        if kind in ("sqrt", "exp", "log", "log1p", "tanh"):
            return self._add(kind, low), self._add(kind, high)
        if kind == "abs":
            below = self.negative(low)
            return (
                self.largest(zero, self.largest(low, self.negative(high))),
                self.largest(below, high),
            )
        if kind == "*" and of[0] == of[1] and not self.is_positive(of[0]):
            # The lower bound of a square is 0 if the range contains 0.
            down, up = self.multiply(low, low), self.multiply(high, high)
            above = self.where_greater(low, zero, down, zero)
            return self.where_greater(zero, high, up, above), self.largest(down, up)
        other_low, other_high = ranges[of[1]]
        if kind == "+":
            return self.add(low, other_low), self.add(high, other_high)
        if kind == "-":
            return self.subtract(low, other_high), self.subtract(high, other_low)
        if kind == "max":
            return self.largest(low, other_low), self.largest(high, other_high)
        if kind == "min":
            return self.least(low, other_low), self.least(high, other_high)
        if kind == "/" and other_low != other_high and not self.is_positive(of[1], True):
            return None
        if all(self.is_positive(x) for x in of):
            divisors = (other_low, other_high) if kind == "*" else (other_high, other_low)
            return self.binary(kind, low, divisors[0]), self.binary(kind, high, divisors[1])
        corners = {self.binary(kind, x, y) for x in (low, high) for y in (other_low, other_high)}
        first, *others = sorted(corners)
        least = most = first
        for corner in others:
            least, most = self.least(least, corner), self.largest(most, corner)
        return least, most


class _Reader:
    """Parses a formula into a graph."""

    def __init__(self, graph: Graph, names: dict[str, int]) -> None:
        self._graph = graph
        self._names = names
        self._calls: dict[str, Callable[..., int]] = {
            name: getattr(graph, name) for name in FUNCTIONS if name not in ("max", "min")
        }
        self.read: set[str] = set()

    def read_node(self, node: ast.expr) -> int:
        graph = self._graph
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return graph.number(cast(float, node.value))
        if isinstance(node, ast.Name):
            if node.id not in self._names:
                known = ", ".join(self._names)
                raise ValueError(f"it contains {node.id}; expected {known}, numbers or functions")
            self.read.add(node.id)
            return self._names[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            operand = self.read_node(node.operand)
            return graph.negative(operand) if isinstance(node.op, ast.USub) else operand
        if isinstance(node, ast.BinOp):
            a, b = self.read_node(node.left), self.read_node(node.right)
            if isinstance(node.op, ast.Pow):
                return graph.power(a, b)
            if type(node.op) in _BINARY:
                return graph.binary(_BINARY[type(node.op)], a, b)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            name = node.func.id
            if name not in FUNCTIONS:
                raise ValueError(f"it contains {name}(); expected one of {', '.join(FUNCTIONS)}")
            arguments = [self.read_node(argument) for argument in node.args]
            if name in ("max", "min") and len(arguments) >= 2:
                join = graph.largest if name == "max" else graph.least
                result = arguments[0]
                for argument in arguments[1:]:
                    result = join(result, argument)
                return result
            if name in self._calls and len(arguments) == 1:
                return self._calls[name](arguments[0])
            expected = "two or more" if name in ("max", "min") else "one"
            raise ValueError(
                f"it passes {len(arguments)} arguments to {name}(); expected {expected}"
            )
        raise ValueError(
            f"it contains {ast.unparse(node)!r}; expected + - * / **, numbers, names and functions"
        )


def _write(graph: Graph, results: Sequence[int]) -> tuple[list[str], list[str]]:
    """Returns one C++ statement per operation and the names of the results."""
    names: dict[int, str] = {}
    lines: list[str] = []
    like = "g"
    leaves = {graph.operations[node][0] for node in graph.reached_from(results)}
    if leaves & {"least", "most"}:
        like = "g.least"
    plain = {"g": "g", "least": "g.least", "most": "g.most"}
    calls = {"sqrt": "Sqrt", "exp": "Exp", "log": "Log", "log1p": "Log1p", "tanh": "Tanh",
             "abs": "Abs", "max": "Max", "min": "Min"}  # fmt: skip
    for node in graph.reached_from(results):
        kind, *of = graph.operations[node]
        if kind in plain:
            names[node] = plain[kind]
            continue
        if kind == "head":
            names[node] = f"t[{of[0]}]"
            continue
        if kind == "function":
            names[node] = names[of[2]]
            continue
        if kind == "number":
            # A double literal keeps full precision in the float64 kernels.
            text = f"Splat({like}, {of[0]!r})"
        elif kind == "where":
            a, b, yes, no = (names[x] for x in of)
            text = f"Select({a} > {b}, {yes}, {no})"
        elif kind in calls:
            text = f"{calls[kind]}({', '.join(names[x] for x in of)})"
        else:
            text = f"{names[of[0]]} {kind} {names[of[1]]}"
        names[node] = f"v{node}"
        lines.append(f"const V {names[node]} = {text};")
    return lines, [names[node] for node in results]


def _function(head: str, lines: Sequence[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"{head} {{\n{body}  }}\n"


def definition_of(
    struct: str, formula: str, heads: Sequence[str], of_distance: bool, text: dict[str, str]
) -> str:
    """Returns the source file of a definition.

    Args:
        struct: name of the struct.
        formula: f, in terms of g and the heads.
        heads: per-head parameters in the formula.
        of_distance: whether g is a squared distance rather than an inner product.
        text: the definition's descriptive strings, "kTitle" and so on.

    Raises:
        ValueError: the formula is invalid; the caller puts "formula is '...': " before the message.
    """
    try:
        tree = ast.parse(formula.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"it is not an expression: {error.msg}") from None
    graph = Graph(of_distance)
    g = graph.leaf("g")
    scalars = [graph.leaf("head", n) for n in range(len(heads))]
    reader = _Reader(graph, {"g": g, **dict(zip(heads, scalars, strict=True))})
    f = reader.read_node(tree)
    for name in ("g", *heads):
        if name not in reader.read:
            raise ValueError(f"it does not contain {name}")

    if g not in graph.reached_from([f]):
        raise ValueError("it does not depend on g")

    d_g, *d_heads = graph.derivatives(f, [g, *scalars])
    if of_distance:
        # The gradient between identical tokens is 0.
        zero = graph.number(0)
        d_g = graph.where_greater(g, zero, d_g, zero)
    by_t = "const V* t" if heads else "const V* /*t*/"
    lines, (value,) = _write(graph, [f])
    functions = [
        _function(
            f"  template <class V>\n  static V Value(V g, const V* /*a*/, const V* /*b*/, {by_t})",
            [*lines, f"return {value};"],
        )
    ]
    lines, slopes = _write(graph, [d_g, *d_heads])
    assigned = [f"d.t[{n}] = {slope};" for n, slope in enumerate(slopes[1:])]
    functions.append(
        _function(
            "  template <class V, class D>\n"
            "  static void Gradient(V g, const V* /*a*/, const V* /*b*/, const V* t, D& d)",
            ["static_cast<void>(t);", *lines, f"d.g = {slopes[0]};", *assigned],
        )
    )
    bounds = graph.bounds(f)
    if bounds is not None:
        lines, (least, most) = _write(graph, bounds)
        functions.append(
            _function(
                "  template <class R, class V>\n"
                "  static R Bounds(R g, const V* /*a*/, const R* /*b*/, const V* t)",
                ["static_cast<void>(t);", *lines, f"return {{{least}, {most}}};"],
            )
        )
    words = "".join(
        f"  static constexpr const char* {name} = {_to_literal(value)};\n"
        for name, value in text.items()
    )
    if heads:
        names = ", ".join(_to_literal(name) for name in heads)
        words += f"  static constexpr const char* kHeads[] = {{{names}}};\n"
    kind = "kSquaredDistance" if of_distance else "kInnerProduct"
    return (
        f"struct {struct} {{\n{words}\n"
        "  static constexpr int kRowScalars = 0;\n"
        "  static constexpr int kColumnScalars = 0;\n"
        f"  static constexpr int kHeadScalars = {len(heads)};\n"
        f"  static constexpr PairInput kInput = PairInput::{kind};\n\n"
        + "\n".join(functions)
        + "};\n"
    )


def _to_literal(text: str) -> str:
    """Returns a C++ string literal with non-ASCII bytes as octal escapes."""
    out = ""
    for byte in text.encode():
        character = chr(byte)
        out += character if 32 <= byte < 127 and character not in '"\\?' else f"\\{byte:03o}"
    return f'"{out}"'
