"""What plans do not know of a call: where its tensors are, and its numbers, such as how many requests there are.

A plan is made once for calls of all sizes. While it is made, `batch * (num_draft_tokens + 1)` is a formula; in each call it
is a number. So no plan depends on a size: to branch on such a number is an error.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Argument:
    """A tensor of a call, by its name."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Number:
    """A number of a call: its name, or the function of other numbers that it is, which may be one that the call names."""

    source: Any
    operands: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        """Raise: what is true of one call need not be true of the next."""
        raise TypeError("a plan cannot depend on a number of a call")

    def __add__(self, other: Any) -> "Number":
        return Number(operator.add, (self, other))

    def __radd__(self, other: Any) -> "Number":
        return Number(operator.add, (other, self)) if other else self

    def __sub__(self, other: Any) -> "Number":
        return Number(operator.sub, (self, other))

    def __mul__(self, other: Any) -> "Number":
        return self if other == 1 else Number(operator.mul, (self, other))

    def __rmul__(self, other: Any) -> "Number":
        return Number(operator.mul, (other, self))

    def __floordiv__(self, other: Any) -> "Number":
        return Number(operator.floordiv, (self, other))

    def __mod__(self, other: Any) -> "Number":
        return Number(operator.mod, (self, other))

    def __and__(self, other: Any) -> "Number":
        return Number(operator.and_, (self, other))


def address_of(tensor: Number) -> Number:
    """Return the address of a tensor of a call."""
    return Number(Tensor.data_ptr, (tensor,))


def ceil_div(a: Any, b: Any) -> Any:
    """Return a quotient, rounded up."""
    return (a + (b - 1)) // b


def rounded_up(number: Any, to: int) -> Any:
    """Return the next multiple of a power of two."""
    return (number + (to - 1)) & -to


def value_of(number: Any, values: dict[str, Any]) -> Any:
    """Return what a number is in a call, given what the call has by name."""
    if not isinstance(number, Number):
        return number
    if not number.operands:
        return values[number.source]
    return number.source(*[value_of(operand, values) for operand in number.operands])


SYMBOLS: dict[Any, str] = {
    operator.add: "{} + {}",
    operator.sub: "{} - {}",
    operator.mul: "{} * {}",
    operator.floordiv: "{} // {}",
    operator.mod: "{} % {}",
    operator.and_: "{} & {}",
    operator.getitem: "{}[{}]",
}


class Writer:
    """Writes Python functions that fill in what depends on a call: they have no loop, and compute each formula once.

    A function that walked the bundles of a kernel would take longer than its launch.

    Args:
        addresses: of tensors, by name, where these are no arguments of the function.
    """

    def __init__(self, addresses: dict[str, Number] | None = None) -> None:
        self.addresses = addresses or {}
        self.variables: dict[Any, str] = {}
        self.body: list[str] = []
        self.scope: dict[str, Any] = {}

    def expression(self, value: Any) -> str:
        """Return the expression of a value: bundles are plain tuples, what kernels are compiled for is None."""
        if isinstance(value, Argument):
            value = self.addresses.get(value.name, address_of(Number(value.name)))
        if isinstance(value, Number):
            return self.variable(value, self.formula, value) if value.operands else str(value.source)
        if isinstance(value, tuple):  # launches have most bundles in common
            return self.variable(id(value), self.fields, value)
        return repr(value) if isinstance(value, int | float) else "None"

    def variable(self, key: Any, write: Callable[[Any], str], value: Any) -> str:
        """Return the variable that holds a value."""
        if key not in self.variables:
            source = write(value)
            self.variables[key] = name = f"v{len(self.variables)}"
            self.body.append(f"{name} = {source}")
        return self.variables[key]

    def formula(self, number: Any) -> str:
        """Return the expression of a computed number."""
        operands, function = map(self.expression, number.operands), number.source
        if function in SYMBOLS:
            return SYMBOLS[function].format(*operands)
        if not isinstance(function, str):
            name = f"f{len(self.scope)}"
            self.scope[name], function = function, name
        return f"{function}({', '.join(operands)})"

    def fields(self, values: Any) -> str:
        """Return the expression of a tuple."""
        return "(" + "".join(f"{self.expression(value)}, " for value in values) + ")"

    def function(self, names: Iterable[str], value: Any) -> Callable[..., Any]:
        """Return the function of arguments of these names that returns a value."""
        result = self.expression(value)
        exec("\n    ".join([f"def fill({', '.join(names)}):", *self.body, f"return {result}"]), self.scope)
        fill: Callable[..., Any] = self.scope["fill"]
        return fill
