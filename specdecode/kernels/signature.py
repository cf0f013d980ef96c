"""The signature of a kernel: the types and constants that it is compiled for, given the bundles of a plan."""

import functools
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
import triton.language as tl

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*u1"}
INTEGERS = {"stride": "i64", "count": "i32"}


@dataclass(frozen=True)
class Symbol:
    """A field of a plan's bundle that has another value in each call: a Python expression of a tensor or a number."""

    expression: str
    dtype: torch.dtype | None = None  # of a tensor


@functools.cache
def kinds(bundle: Any) -> tuple[tuple[str, bool], ...]:
    """Return the annotation of each field of a bundle: its type, and whether it may be aligned."""
    annotations = get_type_hints(bundle, include_extras=True).values()
    metadata = [getattr(annotation, "__metadata__", ("bundle",)) for annotation in annotations]
    return tuple((kind, "aligned" in more) for kind, *more in metadata)


def is_constant(kind: str, value: object) -> bool:
    """Return whether a kernel is compiled for the value of a field."""
    return kind == "constexpr" or value is None or (kind, value) in (("stride", 1), ("count", 0))


def with_values(bundle: Any, values: dict[str, Any]) -> Any:
    """Return a bundle for Triton's interpreter, with symbols replaced by values and constants wrapped as constexpr."""
    fields = []
    for field, (kind, _) in zip(bundle, kinds(bundle.__class__)):
        if kind == "bundle":
            fields.append(with_values(field, values))
        elif isinstance(field, Symbol):
            fields.append(eval(field.expression, {}, values))
        else:
            fields.append(tl.constexpr(field) if field is not None and is_constant(kind, field) else field)
    return type(bundle)(*fields)


class Signature:
    """The types, constants and attributes that a kernel is compiled for.

    Attributes:
        types: the type of each parameter; bundles are nested as in the kernel.
        constants: the values of constants and of absent pointers, by their path.
        attributes: properties that the compiler may assume, by path: multiples of 16.
        num_arguments: the number of pointers and numbers that a launch passes.
    """

    def __init__(self, names: list[str], bundles: tuple[Any, ...]) -> None:
        self.num_arguments = 0
        self.constants: dict[tuple[int, ...], Any] = {}
        self.attributes: dict[tuple[int, ...], list[list[object]]] = {}
        self.types = {name: self.types_of(bundle, (i,)) for i, (name, bundle) in enumerate(zip(names, bundles))}

    def types_of(self, bundle: Any, path: tuple[int, ...]) -> Any:
        """Return the types of a bundle's fields; note its constants and attributes."""
        types: list[Any] = []
        for i, (value, (kind, may_be_aligned)) in enumerate(zip(bundle, kinds(bundle.__class__))):
            here = (*path, i)
            if kind == "bundle":
                types.append(self.types_of(value, here))
            elif is_constant(kind, value):
                self.constants[here] = value
                types.append("constexpr")
            else:
                self.num_arguments += 1
                types.append(TYPES[value.dtype] if kind == "pointer" else INTEGERS.get(kind, kind))
                if may_be_aligned and bundle.ALIGNED:
                    self.attributes[here] = [["tt.divisibility", 16]]
        return type(bundle)(*types)

    def key(self) -> tuple[object, ...]:
        """Return the cache key of the compiled code."""
        return str(self.types), tuple(self.constants.items()), tuple(self.attributes)
