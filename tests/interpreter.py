"""Triton's interpreter, made faster, and Triton 3.6's made to work with NumPy 2.4.

What it does again and again in Python is done once, or for a whole tensor. Where a Triton release is built differently, it
is left as it is.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np


def speed_up() -> None:
    """Change Triton's interpreter, once per process."""
    from triton.runtime import interpreter

    parts = ("_patch_attr", "_patch_lang", "_patch_lang_tensor", "GridExecutor", "ReduceOps", "_get_np_dtype")
    parts += ("interpreter_builder", "interpreter_semantic")
    if hasattr(interpreter, "is_faster") or not all(hasattr(interpreter, part) for part in parts):
        return
    interpreter.is_faster = True
    prepare_once_per_launch(interpreter)
    reduce_whole_tensors(interpreter)
    look_up_types_once(interpreter)
    describe_types_once()
    call_operations_directly(interpreter)
    agree_on_types_once(interpreter.interpreter_semantic)
    leave_out_nan_in_maxima(interpreter.interpreter_builder)
    leave_out_what_is_not_asserted(interpreter.interpreter_builder)
    count_with_any_scalar(interpreter)


def prepare_once_per_launch(interpreter: Any) -> None:
    """Replace the functions of `triton.language` once per launch, not at every call of a device function.

    To interpret a kernel, Triton replaces these functions, and restores them after the launch. It replaces them again at
    each call of a function with `@triton.jit` inside the kernel, which changes nothing and takes more than half of the time.
    """
    from triton import language

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor
    call, patched = launch.__call__, set()

    @cache
    def modules_of(function: Any) -> set[int]:
        return {id(language), id(language.core)} & {id(value) for value in function.__globals__.values()}

    def patch_lang(function: Any) -> Any:
        """Replace the functions of those language modules that the function's module imports, unless that is done."""
        used = modules_of(function)
        if used and used <= patched:
            return None  # the scope to restore, which the interpreter uses at the launch only
        patched.update(used)
        return patch(function)

    def call_kernel(executor: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        try:
            call(executor, *arguments, **options)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_lang
    launch.__call__ = call_kernel


def reduce_whole_tensors(interpreter: Any) -> None:
    """Combine halves of the tensors at once in `tl.reduce`, for which Triton calls the function for every two numbers.

    Neighbours are combined, then those results, and so on: as on a GPU a tree, which is the same for any function that is
    associative, be it commutative or not.
    """
    operations = interpreter.ReduceOps
    reduce_numbers = operations.generic_reduce

    def generic_reduce(self: Any, tensors: tuple) -> list:
        count = tensors[0].handle.data.shape[self.axis] if self.axis is not None else 0
        if count < 2 or count & (count - 1):
            return reduce_numbers(self, tensors)
        values, dtypes = [tensor.handle.data for tensor in tensors], [tensor.dtype for tensor in tensors]
        while values[0].shape[self.axis] > 1:
            sides = [
                self.to_tensor(data.take(range(side, data.shape[self.axis], 2), self.axis), dtype)
                for side in (0, 1)
                for data, dtype in zip(values, dtypes)
            ]
            combined = self.combine_fn.fn(*sides)
            values = [part.handle.data for part in (combined if isinstance(combined, tuple) else (combined,))]
        if not self.keep_dims:
            values = [data.squeeze(self.axis) for data in values]
        return [self.to_tensor(data if data.shape else data.item(), dtype) for data, dtype in zip(values, dtypes)]

    operations.generic_reduce = generic_reduce


def look_up_types_once(interpreter: Any) -> None:
    """Keep the NumPy dtype of each type of Triton, for which Triton builds a table at each operation."""
    find, found = interpreter._get_np_dtype, {}

    def numpy_dtype(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    interpreter._get_np_dtype = numpy_dtype


def describe_types_once() -> None:
    """Keep what Triton works out of a type: its name and its size, at each operation, and the types of a tuple's values.

    The first type of its kind is made as Triton makes it, and the first tensor of each type; others are given the same
    attributes. The type of a tuple is made when it is asked for.
    """
    from triton.language import core

    if not hasattr(core, "_type_for_tuple_values"):
        return
    make_type, make_tensor, make_tuple = core.block_type.__init__, core.tensor.__init__, core.tuple.__init__
    known: dict[tuple, dict] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in known:
            make_type(self, element_ty, shape)
            known[key] = {**vars(self), "of_tensors": {}}
        vars(self).update(known[key])
        self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        kept = vars(type).setdefault("of_tensors", {})
        if not kept:
            make_tensor(self, handle, type)
            kept.update(vars(self))
        vars(self).update(kept)
        self.handle, self.type = handle, type

    def init_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = [*args]
        else:
            make_tuple(self, args, type)

    def type_of_tuple(self: Any) -> Any:
        if "its_type" not in vars(self):
            self.its_type = core._type_for_tuple_values(self.values)
        return self.its_type

    core.block_type.__init__, core.tensor.__init__, core.tuple.__init__ = init_type, init_tensor, init_tuple
    core.tuple.type = property(type_of_tuple, lambda self, type: vars(self).update(its_type=type))


def call_operations_directly(interpreter: Any) -> None:
    """Call operations of `triton.language` without asking each time whether they are called inside a kernel."""

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, operation = interpreter.interpreter_semantic, getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return operation(*arguments, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr


def agree_on_types_once(semantic: Any) -> None:
    """Let operands of one type pass as they are, and make the tensor of a number once for each type that it meets.

    For every operation Triton works out the type of the result, casts both operands to it and gives them one shape, which
    changes nothing where they are of one type already.
    """
    check, check_bits = semantic.binary_op_type_checking_impl, semantic.bitwise_op_type_checking_impl
    broadcast = semantic.broadcast_impl_value
    are_plain = {f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 8, 16, 32, 64)} | {"fp32", "fp64"}
    of_numbers: dict[tuple, Any] = {}

    def check_operands(lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        is_number, kinds = [type(side) in (bool, int, float) for side in (lhs, rhs)], (type(lhs), type(rhs))
        if not any(is_number):
            if lhs.type.name == rhs.type.name and lhs.dtype.name in are_plain:
                return lhs, rhs
        elif not all(is_number):
            number, tensor = (lhs, rhs) if is_number[0] else (rhs, lhs)
            key = kinds, repr(number), tensor.type.name, flags, *named.items()
            if key in of_numbers:
                return (of_numbers[key], rhs) if is_number[0] else (lhs, of_numbers[key])
            first, second = check(lhs, rhs, *flags, **named)
            if (second if is_number[0] else first) is tensor:  # it is not cast
                of_numbers[key] = first if is_number[0] else second
            return first, second
        return check(lhs, rhs, *flags, **named)

    def check_integers(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        lhs, rhs = check_operands(lhs, rhs)
        are_alike = lhs.type.name == rhs.type.name and lhs.dtype.is_int()
        return (lhs, rhs) if are_alike else check_bits(lhs, rhs)

    def broadcast_values(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.type.name == rhs.type.name else broadcast(lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.bitwise_op_type_checking_impl = check_operands, check_integers
    semantic.broadcast_impl_value = broadcast_values


def leave_out_nan_in_maxima(builder: Any) -> None:
    """Let `tl.maximum` and `tl.minimum` return the number that is not NaN, as on a GPU, and as `tl.max` does here, too."""
    for name, larger in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        setattr(builder, name, lambda lhs, rhs, larger=larger: builder.binary_op(lhs, rhs, larger))


def leave_out_what_is_not_asserted(builder: Any) -> None:
    """Compute no condition "this integer has not overflowed", which Triton asserts only where it is told to debug."""
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def count_with_any_scalar(interpreter: Any) -> None:
    """Let a scalar of a kernel be a number of iterations, whatever NumPy is installed.

    The interpreter keeps a scalar as an array of one element. Triton 3.6 makes an int of it by `int(array)`, an error from
    NumPy 2.4 on, so that every kernel with a loop fails. Later releases of Triton do not.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
