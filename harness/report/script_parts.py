"""What stands in for the harness in a stand-alone script: text that the script contains, in plain PyTorch."""

HEAD = """
_TRIALS = 5
_SLEEP_CYCLES = 40_000_000  # about 20 ms on an H200
_DEVICE = torch.accelerator.current_accelerator()
if _DEVICE is None or not torch.accelerator.is_available():
    print("This needs an accelerator that torch finds (CUDA, ROCm), and there is none.", file=sys.stderr)
    sys.exit(3)
"""

LAB = '''
class _Lab:
    """What the case works with: named streams, inputs that are ready, and what the values should be."""

    def __init__(self):
        self.device = torch.device(_DEVICE.type, 0)
        self._streams = {}
        self._sinks = []
        self._kept = []
        self._seen = []
        for index in range(torch.accelerator.device_count()):
            name = "default" if index == 0 else f"default.{index}"
            self._streams[name] = torch.accelerator.current_stream(index)

    def stream(self, name, device=0):
        """The stream of that name; distinct names are distinct streams."""
        if name == "default" and device:
            name = f"default.{device}"
        while name not in self._streams:
            stream = torch.Stream(device=f"{_DEVICE.type}:{device}")
            if not any(_same(stream, other) for other in self._streams.values()):
                self._streams[name] = stream
        return self._streams[name]

    @contextlib.contextmanager
    def preparing(self):
        """What runs inside is complete when the block ends."""
        yield
        _synchronize()

    def product(self, left, right):
        """A leaf full of ``left``, and its product with ``right``."""
        leaf = torch.full((256,), left, device=self.device, requires_grad=True)
        product = leaf * torch.full((256,), right, device=self.device)
        self._kept += [leaf, product]
        _synchronize()
        return leaf, product

    def poisoned(self, like):
        """NaN until somebody writes it."""
        tensor = torch.full_like(like, float("nan"), requires_grad=False)
        _synchronize()
        return tensor

    def keep(self, thing):
        """Keep a thing alive until the trial is over."""
        self._kept.append(thing)
        return thing

    def observe(self, tensor, expected):
        """Copy a tensor on the current stream; it is compared at the end."""
        self._kept.append(sys._getframe(1))  # and with it the variables there
        tensor = tensor.detach()
        number = len(self._seen)
        if number == len(self._sinks):  # in the first trial, so that later ones allocate nothing here
            self._sinks.append(torch.empty_like(tensor, memory_format=torch.contiguous_format))
            _synchronize()
        self._sinks[number].copy_(tensor, non_blocking=True)
        self._seen.append((tensor, expected))

    def finish(self):
        """The observations that are wrong, in words."""
        _synchronize()
        wrong = []
        for number, (tensor, expected) in enumerate(self._seen):
            got = self._sinks[number].cpu()
            if not isinstance(expected, torch.Tensor):
                expected = torch.full(got.shape, expected, dtype=got.dtype)
            expected = expected.cpu()
            different = (got != expected) & ~((got != got) & (expected != expected))
            if different.any():
                values = f"expected {expected[different][0].item()}, got {got[different][0].item()}"
                wrong.append(f"observation {number}: {int(different.sum())} of {got.numel()} wrong: {values}")
            if tensor.device.type == _DEVICE.type:  # so that no later trial finds there what was right in this one
                once = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
                once.fill_(float("nan") if once.is_floating_point() or once.is_complex() else -1)
        _synchronize()
        self._seen.clear()
        self._kept.clear()
        return wrong


def _same(one, other):
    return (one.device_index, one.stream_id) == (other.device_index, other.stream_id)


def _synchronize():
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
'''

HOLDS = '''
class _Hold:
    """Makes one operation late: occupies its stream before it, in the trials that count.

    The trial that does not count tells how often the place is passed, and whether its stream is current then.
    """

    def __init__(self, stream, visit):
        self.stream = stream
        self.visit = visit
        self.passed = {True: 0, False: 0}
        self.usual = None
        self.slept = 0

    def begin(self):
        """A trial begins."""
        if self.passed[True] or self.passed[False]:
            self.usual = dict(self.passed)
        self.passed = {True: 0, False: 0}

    def __call__(self, *ignored):
        """The place is passed."""
        stream = _lab.stream(self.stream)
        current = _same(torch.accelerator.current_stream(stream.device_index), stream)
        self.passed[current] += 1
        if self.usual is None:
            return
        here = self.usual[True] > 0
        if here != current:
            return
        if self.passed[here] - 1 == min(self.visit, self.usual[here] - 1):
            with stream:
                torch.get_device_module()._sleep(_SLEEP_CYCLES)
            self.slept += 1
'''

NODES = '''
def _hold_nodes(roots):
    """Let the holds of backward see their nodes."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for name, hold in _NODES:
            if node.name() == name:
                node.register_prehook(hold)
        waiting += [each for each, _ in node.next_functions if each is not None]


def _watched(function):
    @functools.wraps(function)
    def call(tensors, *arguments, **options):
        _hold_nodes([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        return function(tensors, *arguments, **options)

    return call


torch.autograd.backward = _watched(torch.autograd.backward)
torch.autograd.grad = _watched(torch.autograd.grad)
'''

MAIN = """
def _main():
    devices = torch.accelerator.device_count()
    if devices < {devices}:
        sys.exit("devices needed: {devices}")
    failed = 0
    for trial in range(1 + _TRIALS):  # the first one loads kernels, holds nothing and does not count
        for hold in _HOLDS:
            hold.begin()
        {call}
        wrong = _lab.finish()
        if trial:
            failed += bool(wrong)
            print(f"trial {{trial}}: {{'; '.join(wrong) or 'right'}}")
    if any(hold.slept == 0 for hold in _HOLDS):
        print("an operation that was to be late was not found", file=sys.stderr)
    print(f"{{failed}} of {{_TRIALS}} trials were wrong (torch {{torch.__version__}}, {{_DEVICE.type}})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_main())
"""
