"""The ops' calls and derivatives.

The ops have a first derivative in reverse mode only. For every other kind of derivative, plain
torch operations compute the op or its gradients:

1. In a torch.func transform or a level of forward-mode differentiation (`in_transform`), the
   function that calls an op calls its plain form instead.
2. In a backward pass that is differentiated again (`is_differentiated_again`), the gradients are
   those of the plain form (`plain_gradients`).

`register_gradient` registers both. `schema_of` derives the arguments of an op from a named tuple.

In eager mode an op with gradients is called through a torch.autograd.Function, which takes 0.03 ms
for 25 arguments. The function that torch registers reads the whole schema again for each argument,
which takes 0.2 ms. There the function of an `Op` is called, without torch's dispatcher, which takes
another 0.02 ms.
"""

from collections.abc import Callable, Sequence
from typing import get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from moe_core.context import in_transform

# The types of an op's arguments that need no dispatcher. Subclasses of Tensor do.
_PLAIN_TYPES = {Tensor, nn.Parameter, type(None), bool, int, float, str, list, torch.dtype}


class Op:
    """A torch.library op, made of a function of the same arguments.

    A call goes to the function itself, unless something observes the op: torch.compile and
    other tracers, dispatch modes such as FlopCounterMode, the profiler, or a subclass of Tensor.
    Tensors on the meta device go to the fake function.

    Args:
        name: "<namespace>::<name>".
        function: its first argument is a tensor.
        schema: None: that of the function's annotations.
    """

    def __init__(self, name: str, function: Callable, schema: str | None = None) -> None:
        self.definition = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        namespace, _, self.name = name.partition("::")
        self.dispatched = getattr(getattr(torch.ops, namespace), self.name)
        self.function = function
        self.gradient: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable) -> Callable:
        return self.definition.register_fake(fake)

    def register_autograd(self, backward: Callable, save: Callable) -> None:
        """Register the gradients, as torch.library.register_autograd.

        Args:
            backward: `backward(ctx, *grads)` returns the gradients of all arguments.
            save: `save(ctx, inputs, output)` keeps in `ctx` what `backward` reads.
        """
        self.definition.register_autograd(backward, setup_context=save)

        def forward(ctx, *inputs):
            output = self(*inputs)  # without gradients here
            save(ctx, inputs, output)
            return output

        # The name of the op is that of the node in profiles.
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.gradient = type(self.name, (torch.autograd.Function,), methods)

    def __call__(self, *arguments):
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if self.gradient is not None and torch.is_grad_enabled() and not is_traced:
            return self.gradient.apply(*arguments)  # type: ignore[attr-defined]
        if is_traced or _is_watched(arguments):
            return self.dispatched(*arguments)
        return self.function(*arguments)


def op(name: str, schema: str | None = None) -> Callable[[Callable], Op]:
    """Decorator that makes an `Op` of a function."""
    return lambda function: Op(name, function, schema)


def _is_watched(arguments: Sequence) -> bool:
    """Whether a call that is not traced needs torch's dispatcher."""
    if is_in_torch_dispatch_mode() or torch.autograd._profiler_enabled():
        return True
    if torch._C._are_functorch_transforms_active():
        return True
    if not _PLAIN_TYPES.issuperset(map(type, arguments)) or arguments[0].is_meta:
        return True
    # With is_grads_batched, gradients are batched tensors, for which torch has a rule of its own.
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and any(isinstance(a, Tensor) and is_batched(a) for a in arguments)


def is_differentiated_again(grad: Tensor) -> bool:
    """Whether a backward pass, which received `grad`, needs gradients that have derivatives."""
    return torch.is_grad_enabled() or in_transform(grad)


def plain_gradients(
    function: Callable, inputs: Sequence, needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a function of plain torch operations, differentiable in inputs and grads.

    Args:
        function: from `inputs` to a tuple of tensors.
        needs: for each input, whether its gradient is computed; otherwise it is None.
        grads: the gradients of the results; None means zeros.
    """
    arguments = list(inputs)
    with torch.enable_grad():
        for i, is_needed in enumerate(needs):
            if is_needed:
                arguments[i] = inputs[i].view_as(inputs[i])
        outputs = function(*arguments)
    pairs = [(out, g) for out, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [argument for argument, is_needed in zip(arguments, needs, strict=True) if is_needed]
    computed = iter(
        torch.autograd.grad(
            [out for out, _ in pairs],
            wanted,
            [grad.to(out.dtype) for out, grad in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(computed) if is_needed else None for is_needed in needs]


def register_gradient(
    op: Op,
    num_differentiable: int,
    backward: Callable[..., Sequence[Tensor | None]],
    plain: Callable[..., Tensor],
    saved_outputs: Sequence[int] = (),
) -> None:
    """Register the gradients of the first output of an op.

    Its other outputs, which only the backward pass reads, have no gradients.

    Args:
        num_differentiable: the number of leading arguments that have gradients.
        backward: `backward(grad, needs, *arguments, *saved)` returns these gradients. `needs` says
            which ones are read.
        plain: the first output as a function of the op's arguments, in plain torch.
        saved_outputs: the indices of the outputs that are saved for `backward`.
    """

    def save(ctx, inputs, output):
        outputs = output if isinstance(output, tuple) else (output,)
        values = [*inputs, *(outputs[i] for i in saved_outputs)]
        ctx.places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        ctx.save_for_backward(*[values[i] for i in ctx.places])
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.num_inputs = len(inputs)
        ctx.mark_non_differentiable(*outputs[1:])
        # Otherwise autograd would allocate zeros for the gradients of these outputs.
        ctx.set_materialize_grads(False)

    def differentiate(ctx, grad, *unused):
        nothing = [None] * (ctx.num_inputs - num_differentiable)
        if grad is None:
            return (*[None] * num_differentiable, *nothing)
        values = list(ctx.others)
        # Activation checkpointing allows one access to the saved tensors.
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            values[place] = tensor
        needs = list(ctx.needs_input_grad[:num_differentiable])
        if is_differentiated_again(grad):

            def function(*differentiable):
                return (plain(*differentiable, *values[num_differentiable : ctx.num_inputs]),)

            gradients: Sequence[Tensor | None] = plain_gradients(
                function, values[:num_differentiable], needs, [grad]
            )
        else:
            gradients = backward(grad, needs, *values)
        pairs = zip(gradients, needs, strict=True)
        return (*[g if is_needed else None for g, is_needed in pairs], *nothing)

    op.register_autograd(differentiate, save)


_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
}


def schema_of(inputs_type: type, prefix: str = "") -> str:
    """The arguments of an op, which are the fields of a named tuple, for torch.library.

    Args:
        prefix: begins their names.
    """
    hints = get_type_hints(inputs_type)
    return ", ".join(f"{_TYPES[hint]} {prefix}{name}" for name, hint in hints.items())


def empty_gradients(grad: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """The gradients that the backward op's fake kernel returns.

    A gradient that is needed has the shape of its tensor. The others have no elements.
    """
    gradients = []
    for tensor, is_needed in zip(tensors, needs, strict=True):
        if is_needed:
            gradients.append(tensor.new_empty(tensor.shape))
        else:
            gradients.append(grad.new_empty(0))
    return gradients
