"""``torch.func.grad`` raises for a function that does a part of its work on another stream. Plain PyTorch, no harness.

    python functional_gradients.py        # one GPU

Each transform differentiates ``3 * x * x`` at 2, once on one stream and once with the factor on a side stream, which
the function waits for. Both must give 12. Exits with 1 if one raises or is wrong.
"""

import sys

import torch

DEVICE = torch.accelerator.current_accelerator()
SIDE = torch.Stream(device=DEVICE)


def on_one_stream(x):
    """Three times the square."""
    return (x * x * 3).sum()


def on_two_streams(x):
    """The same, the factor on another stream, ordered on both sides."""
    current = torch.accelerator.current_stream()
    square = x * x
    SIDE.wait_stream(current)
    with SIDE:
        tripled = square * 3
    current.wait_stream(SIDE)
    return tripled.sum()


def plain(function, x):
    """The gradient without a transform."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def vjp(function, x):
    """The gradient by a backward that is called after the transform."""
    result, backward = torch.func.vjp(function, x)
    return backward(torch.ones_like(result))[0]


def transformed(transform):
    """The gradient by a transform."""
    return lambda function, x: transform(function)(x)


DERIVATIVES = {
    "torch.autograd.grad": plain,
    "torch.func.vjp": vjp,
    "torch.func.grad": transformed(torch.func.grad),
    "torch.func.jacrev": transformed(torch.func.jacrev),
    "torch.func.vmap of grad": lambda function, x: torch.func.vmap(torch.func.grad(function))(x.view(2, 2)).view(4),
}


def outcome(derivative, function):
    """What a derivative gives, in words."""
    x = torch.full((4,), 2.0, device=DEVICE)
    torch.accelerator.synchronize()
    try:
        found = derivative(function, x).tolist()
    except NotImplementedError as error:
        return f"NotImplementedError: {error}"
    return "right" if found == [12.0] * 4 else f"wrong: {found}"


print(f"torch {torch.__version__}, {DEVICE.type}")
print(f"{'derivative':26}{'one stream':14}two streams")
failed = False
for name, derivative in DERIVATIVES.items():
    found = [outcome(derivative, function) for function in (on_one_stream, on_two_streams)]
    failed = failed or found != ["right", "right"]
    print(f"{name:26}{found[0]:14}{found[1]}")
print("The defect is there." if failed else "The defect is not there.")
sys.exit(1 if failed else 0)
