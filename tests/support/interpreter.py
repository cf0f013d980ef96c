"""Triton's interpreter, made faster, and Triton 3.6's made to work with NumPy 2.4.

Repeated work in Python is done once, or for a whole tensor. The interpreter is unchanged in Triton releases with a
different structure, and if the environment variable SPECDECODE_PLAIN_INTERPRETER is set, to any value. Kernels then run
several times slower. The gate runs about 40 of the kernels' tests with the unchanged interpreter, to show that they do
not depend on these changes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np


def speed_up() -> None:
    """Change Triton's interpreter, once per process."""
    from triton.runtime import interpreter

    parts = ("_patch_attr", "_patch_lang", "_patch_lang_tensor", "GridExecutor", "ReduceOps", "_get_np_dtype")
    parts += ("interpreter_builder", "interpreter_semantic", "TensorHandle")
    if hasattr(interpreter, "is_faster") or not all(hasattr(interpreter, part) for part in parts):
        return
    interpreter.is_faster = True
    prepare_once_per_launch(interpreter)
    reduce_whole_tensors(interpreter)
    look_up_types_once(interpreter)
    describe_types_once()
    call_operations_directly(interpreter)
    leave_out_nan_in_maxima(interpreter.interpreter_builder)
    leave_out_what_is_not_asserted(interpreter.interpreter_builder)
    spread_only_what_differs(interpreter.interpreter_semantic)
    compute_with_numpy_what_is_known(interpreter)
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
        """Replace the functions of the language modules that the function's module imports, unless this is done already."""
        used = modules_of(function)
        if used and used <= patched:
            return None  # the scope to restore, which the interpreter uses only at the launch
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

    Neighbours are combined, then their results, and so on: a tree, as on a GPU, which is correct for any associative
    function, commutative or not.
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
    """Cache the NumPy dtype of each Triton type; Triton builds a table for it at each operation."""
    find, found = interpreter._get_np_dtype, {}

    def numpy_dtype(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    interpreter._get_np_dtype = numpy_dtype


def describe_types_once() -> None:
    """Cache the name and size of a type, and the types of a tuple's values, which Triton computes at each operation.

    Triton makes the first type of each kind, and the first tensor of each type; later ones copy the attributes. The type
    of a tuple is made on access.
    """
    from triton.language import core

    if not hasattr(core, "_type_for_tuple_values"):
        return
    make_type, make_tensor, make_tuple = core.block_type.__init__, core.tensor.__init__, core.tuple.__init__
    known: dict[tuple, dict] = {}
    of_tensors: dict[str, tuple] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in known:
            make_type(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])
        self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[type.name] = self.dtype, self.shape, self.numel
        self.dtype, self.shape, self.numel = of_tensors[type.name]
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
    """Call operations of `triton.language` without checking each time whether they are called inside a kernel.

    Most arguments are tensors, which need no unwrapping; and each number becomes a tensor only once.
    """
    from triton.language import core

    semantic, unwrap = interpreter.interpreter_semantic, core._unwrap_if_constexpr
    number_of, may_be_wrapped = semantic.to_tensor, (core.constexpr, core.tuple, tuple, list)
    numbers: dict[tuple, Any] = {}

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return operation(*arguments, **options)

        scope.set_attr(owner, name, call)

    def to_tensor(value: Any, check_type: bool = True) -> Any:
        if type(value) is core.tensor:
            return value
        if type(value) not in (bool, int, float):
            return number_of(value, check_type)
        key = type(value), repr(value)
        if key not in numbers:
            numbers[key] = number_of(value)
        return numbers[key]

    interpreter._patch_attr, semantic.to_tensor = patch_attr, to_tensor
    core._unwrap_if_constexpr = lambda value: unwrap(value) if isinstance(value, may_be_wrapped) else value


class Operation(NamedTuple):
    """The computation of a Triton operation on operands of certain types.

    The inputs are, for each operand, the dtype that it is cast to, and its array if it is a number. `dtype` is the dtype
    of the result's handle; the properties are the result's type, dtype, shape and number of elements.
    """

    function: Callable[..., np.ndarray]
    inputs: list[tuple[np.dtype, np.ndarray | None]]
    dtype: Any
    properties: tuple


def compute_with_numpy_what_is_known(interpreter: Any) -> None:
    """Compute an operation directly in NumPy, once its computation on operands of these types is recorded.

    At every operation Triton derives the type of the result, casts the operands to it and broadcasts a scalar to the
    other operand's block. The computation itself is one NumPy function, which broadcasts by itself. It is recorded at the
    first call, and kept if it reproduces Triton's result exactly.
    """
    from triton.language import core

    semantic, builder, make = interpreter.interpreter_semantic, interpreter.interpreter_builder, object.__new__
    plain = {f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 8, 16, 32, 64)} | {"fp32", "fp64"}
    # While an operation is recorded: the functions that it calls, and the handles of their arguments.
    noted: list[tuple] | None = None

    def watch(name: str, described: Callable) -> None:
        compute_by_triton = getattr(builder, name)

        def compute(*arguments: Any) -> Any:
            if noted is not None:
                noted.append(described(*arguments))
            return compute_by_triton(*arguments)

        setattr(builder, name, compute)

    def unchanged(data: Any) -> Any:
        """Return the data: `compute` has cast it already."""
        return data

    def move(pointer: Any, offset: Any) -> tuple:
        width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        return (lambda address, index: address + width * index.astype(np.uint64)), pointer, offset

    watch("cast_impl", lambda operand, kind: (unchanged, operand))
    watch("create_addptr", move)
    watch("binary_op", lambda lhs, rhs, function: (function, lhs, rhs))
    watch("ternary_op", lambda first, second, third, function: (function, first, second, third))

    def is_tensor(operand: Any) -> bool:
        return type(operand) is core.tensor

    def kind_of(operand: Any) -> Any:
        if is_tensor(operand):
            return operand.type.name
        return (type(operand), repr(operand)) if type(operand) in (int, float) else getattr(operand, "name", operand)

    def operation_of(operands: tuple, noted: list[tuple], result: Any) -> Operation | None:
        """Return the recorded `Operation`; None unless it is one function of the operands or of casts of them."""
        tensors = [*filter(is_tensor, operands)]
        functions = [each for each in noted if each[0] is not unchanged]
        were_cast = {id(handle) for function, handle, *_ in noted if function is unchanged}
        if not were_cast.issubset(id(tensor.handle) for tensor in tensors):
            return None
        if not functions and len(were_cast) == 1:
            functions = [(unchanged, result.handle)]
        if len(functions) != 1 or any(
            not each.dtype.is_ptr() and each.dtype.name not in plain for each in (*tensors, result)
        ):
            return None
        function, *handles = functions[0]
        inputs = [
            (handle.data.dtype, None if is_tensor(operand) else handle.data)
            for operand, handle in zip(operands, handles)
        ]
        properties = result.type, result.dtype, result.shape, result.numel
        operation = Operation(function, inputs, result.handle.dtype, properties)
        again, data = compute(operation, operands).handle.data, result.handle.data
        is_same = (again.dtype, again.shape, again.tobytes()) == (data.dtype, data.shape, data.tobytes())
        return operation if is_same else None

    def compute(operation: Operation, operands: tuple) -> Any:
        arrays = []
        for operand, (dtype, array) in zip(operands, operation.inputs):
            if array is None:
                array = operand.handle.data
                if array.dtype is not dtype:
                    array = array.astype(dtype)
            arrays.append(array)
        result, handle = make(core.tensor), make(interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = operation.function(*arrays), operation.dtype, {}
        result.handle, result.type, result.dtype, result.shape, result.numel = handle, *operation.properties
        return result

    def learn(name: str) -> None:
        operate_by_triton = getattr(semantic, name)
        operations: dict[tuple, Operation | None] = {}

        def operate(*operands: Any, **last: Any) -> Any:
            nonlocal noted
            operands += (*last.values(),)
            key = tuple([kind_of(operand) for operand in operands])
            if noted is not None:  # this is a part of the recorded operation
                return operate_by_triton(*operands)
            if key not in operations:
                noted = []
                try:
                    result = operate_by_triton(*operands)
                    operations[key] = operation_of(operands, noted, result)
                finally:
                    noted = None
                return result
            operation = operations[key]
            return operate_by_triton(*operands) if operation is None else compute(operation, operands)

        setattr(semantic, name, operate)

    for name in ("add", "sub", "mul", "truediv", "minimum", "maximum", "and_", "or_", "xor_", "shl", "lshr", "ashr"):
        learn(name)
    for name in ("less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal", "where", "cast"):
        learn(name)


def spread_only_what_differs(semantic: Any) -> None:
    """Skip the broadcast of two operands with equal shapes."""
    spread = semantic.broadcast_impl_value

    def spread_values(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        are_alike = lhs.type.is_block() == rhs.type.is_block() and lhs.handle.data.shape == rhs.handle.data.shape
        return (lhs, rhs) if are_alike else spread(lhs, rhs)

    semantic.broadcast_impl_value = spread_values


def leave_out_nan_in_maxima(builder: Any) -> None:
    """Make `tl.maximum` and `tl.minimum` return the operand that is not NaN, as on a GPU, and as `tl.max` does here."""
    for name, larger in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        setattr(builder, name, lambda lhs, rhs, larger=larger: builder.binary_op(lhs, rhs, larger))


def leave_out_what_is_not_asserted(builder: Any) -> None:
    """Skip the condition "this integer has not overflowed", which Triton asserts only in debug mode."""
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def count_with_any_scalar(interpreter: Any) -> None:
    """Allow a scalar of a kernel as a number of iterations with any version of NumPy.

    The interpreter keeps a scalar as an array of one element. Triton 3.6 converts it by `int(array)`, an error from NumPy
    2.4 on, so that every kernel with a loop fails. Later releases of Triton do not.
    """
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
