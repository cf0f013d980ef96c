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
    leave_out_nan_in_maxima(interpreter.interpreter_builder)
    leave_out_what_is_not_asserted(interpreter.interpreter_builder)
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
    of_tensors: dict[str, tuple] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in known:
            make_type(self, element_ty, shape)
            known[key] = {**vars(self)}
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
    """Call operations of `triton.language` without asking each time whether they are called inside a kernel."""
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


def compute_with_numpy_what_is_known(interpreter: Any) -> None:
    """Compute an operation with NumPy alone where Triton has shown what it computes with operands of these types.

    For every operation Triton works out the type of the result, casts the operands to it and spreads a scalar over the
    other's block. What comes of it is one function of NumPy, which spreads by itself. It is kept if it returns the very
    result that Triton had.
    """
    from triton.language import core

    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    plain = {f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 8, 16, 32, 64)} | {"fp32", "fp64"}
    computed: list[tuple] | None = (
        None  # of the operation that is being learned: functions, and the handles they were given
    )

    def note(name: str, describe: Any) -> None:
        compute = getattr(builder, name)

        def noted(*arguments: Any) -> Any:
            if computed is not None:
                computed.append(describe(*arguments))
            return compute(*arguments)

        setattr(builder, name, noted)

    def cast(data: Any) -> Any:
        return data

    def move_pointer(pointer: Any, offset: Any) -> tuple:
        width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        return (lambda address, index: address + width * index.astype(np.uint64)), pointer, offset

    note("binary_op", lambda lhs, rhs, function: (function, lhs, rhs))
    note("ternary_op", lambda first, second, third, function: (function, first, second, third))
    note("create_addptr", move_pointer)
    note("cast_impl", lambda operand, kind: (cast, operand))

    def is_plain(tensor: Any) -> bool:
        return tensor.dtype.is_ptr() or tensor.dtype.name in plain

    def kind_of(operand: Any) -> Any:
        if type(operand) is core.tensor:
            return operand.type.name
        return (type(operand), repr(operand)) if type(operand) in (int, float) else getattr(operand, "name", operand)

    def step_of(operands: tuple, computed: list, result: Any) -> Any:
        """What each operand is cast to, or the constant it is, the function of these, and the result's properties."""
        tensors = [operand for operand in operands if type(operand) is core.tensor]
        casts = [handle for function, *handles in computed if function is cast for handle in handles]
        functions = [each for each in computed if each[0] is not cast]
        known = {id(tensor.handle) for tensor in tensors}
        if not all(map(is_plain, (*tensors, result))) or not known.issuperset(map(id, casts)):
            return None
        if not functions and len(casts) == 1:
            functions = [(cast, result.handle)]
        if len(functions) != 1:
            return None
        function, *handles = functions[0]
        inputs = [
            (handle.data.dtype, None if type(operand) is core.tensor else handle.data)
            for operand, handle in zip(operands, handles)
        ]
        step = function, inputs, result.handle.dtype, (result.type, result.dtype, result.shape, result.numel)
        again, data = compute(step, operands).handle.data, result.handle.data
        is_same = (again.dtype, again.shape, again.tobytes()) == (data.dtype, data.shape, data.tobytes())
        return step if is_same else None

    def compute(step: tuple, operands: tuple) -> Any:
        function, inputs, dtype, properties = step
        values = []
        for operand, (kind, value) in zip(operands, inputs):
            if value is None:
                value = operand.handle.data
                if value.dtype is not kind:
                    value = value.astype(kind)
            values.append(value)
        result, handle = new(core.tensor), new(interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = function(*values), dtype, {}
        result.handle, result.type, result.dtype, result.shape, result.numel = handle, *properties
        return result

    new = object.__new__

    def learn(name: str) -> None:
        operation, steps = getattr(semantic, name), {}

        def operate(*operands: Any, **last: Any) -> Any:
            nonlocal computed
            operands += (*last.values(),)
            key = tuple([kind_of(operand) for operand in operands])
            step = steps.get(key)
            if step is not None and computed is None:
                return compute(step, operands)
            if key in steps or computed is not None:  # it is not one function, or part of what is being learned
                return operation(*operands)
            computed = []
            try:
                result = operation(*operands)
                steps[key] = step_of(operands, computed, result)
            finally:
                computed = None
            return result

        setattr(semantic, name, operate)

    spread = semantic.broadcast_impl_value

    def spread_values(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        are_alike = lhs.type.is_block() == rhs.type.is_block() and lhs.handle.data.shape == rhs.handle.data.shape
        return (lhs, rhs) if are_alike else spread(lhs, rhs)

    semantic.broadcast_impl_value = spread_values
    for name in ("add", "sub", "mul", "truediv", "minimum", "maximum", "and_", "or_", "xor_", "shl", "lshr", "ashr"):
        learn(name)
    for name in ("less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal", "where", "cast"):
        learn(name)


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
