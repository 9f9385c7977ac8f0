"""Every constant that steers a decision of a tuning, with its unit and the measurement behind it.

Constants elsewhere decide nothing: sizes of buffers, names, limits of formats.
"""

from __future__ import annotations

# Timing ----------------------------------------------------------------------------------------
TURN_S = 0.3
"""Seconds of one timed block. Blocks of 0.2 s and more, A B B A, gave 0.11% error and no false
'faster' in 400 simulated repetitions; fewer, longer blocks cancel less drift."""
SLOW_TURN_S = 2.0
"""Seconds of a block at most if steps are slow: ResNet-50 from JPEG files and fasterrcnn take 0.2
to 1 s a step, and a visit should stay under 15 s. After two turns of such blocks it ends: the rest
is estimated from the baseline's noise."""
LOOKS = (3, 5, 8, 12, 18)
"""Rounds after which the final race may stop. Each look has a fifth of the 5% of error, so that the
interval holds: in 97.6% of 4,000 simulated races that stop when they may (normal noise, AR(1) noise
of blocks with r from 0.3 to 0.9, load in stretches), and at all five looks at once in 94.4%."""
PAIRS = LOOKS[0]
"""Turns of a visit, and slow steps of a block: three of 0.3 s tell 3% at 0.5% noise. A visit that
is close to the best has twice as many."""
SETTLE_BLOCKS = 12
"""Blocks, or seconds in units of TURN_S, after which a config is timed though it has not settled:
shapes vary, or the host is busy."""
HOPELESS = 0.8
"""Below this fraction of the best ratio so far a visit ends after one turn. A script that waits for
data for the rest of its time has its loader tuned first: workers gain a quarter then, as much as
the first compute configs."""

# Choosing --------------------------------------------------------------------------------------
CLEARLY = 1.01
"""A ratio below this decides nothing: GPU-bound repeats differ by 0.5%. Configs that gain less are
not advised, configs this close tie, and a race ends when it knows every ratio so closely."""
GAIN = 1.03
"""A ratio from which more of something is worth it: a larger batch (ResNet-50 gains 3% from 512 to
1024 for twice the memory), more workers, pinned memory, less waiting for data."""
NOTABLE = 1.1
"""A ratio that visits show reliably: they are within 5% of the race. Two blocks that differ by less
are settled, configs further behind the leader are not raced, and a config that seemed to gain as
much and is not advised has a line that says why."""
RESOLVABLE = 2.0
"""An interval that reaches beyond so many times its mean is too noisy: beside another tuning one
network seemed to gain 42 times (19.8-89.0), and 1.0 times on a quiet host. In 300 simulated tunings
under a load that comes and goes no advice was off by more than 1.3 times. More workers are advised
if the low end is as high: a script that waited 92% of its time gained 38 times (12-120)."""
LEADERS = 3
"""Configs in the final race beside the baseline: racing them raised 'picked within 1% of the best'
from 82% to 97% at 1% noise; more take time from each other."""

# Time ------------------------------------------------------------------------------------------
COMPILE_S = {"": (20.0, 0.12), "cudagraphs": (5.0, 0.0), "max-autotune": (300.0, 0.0)}
"""Seconds that compiling is expected to take, and seconds for each module: on 16 cores beside an
H200 GPT-2 (150 modules) took 29 s, ResNet-50 (151) 32-45, EfficientNetV2-S (714) 102-109; the
backend cudagraphs 3-4 s, and max-autotune over 8 minutes for ResNet-50."""
LIKELY = 0.6
"""Fraction of these seconds that suffices to try it: they are up to 1.5 times too long."""
SLACK = 0.05
"""Fraction of the budget by which a visit may overrun it."""
WORTH = 1 / 3
"""Fraction of the budget that one visit in a run that goes on may take: compiled configs were at
least 1.5 times as fast on 9 of 13 scripts of others, which saves a third of what is left."""
FAST_STEP_S = 0.005
"""Faster steps are limited by the host, and a CUDA graph in the script's own precision is tried
before compiling: mnist gained 5.9x, an LSTM 3.2x."""

# Captured steps --------------------------------------------------------------------------------
CHECKED = 3
"""Warm-up steps before a capture (PyTorch's notes advise three), and replays after it that are
compared with the same step without a graph, each on a batch of its own."""
CHECKED_AGAIN = 1000
"""Replays until one is compared again, for values that are not watched; then twice as many each
time. A comparison takes up to ten steps: 1%."""
IN_A_ROW = 8
"""Times in a row that show a rule. Captures that the very next change undoes: graphs are given up.
Batches unlike the example: a warning says that nothing is replayed; a job has up to eight shapes.
Steps of an optimizer like the advised one: the advice is applied to its model; of unlike ones: the
user is told. An optimizer that fits a few weights before the training makes fewer."""
SPREADS = 3.0
"""Allowed difference of a replay, in units of the widest distance between two equal runs."""
RELATIVE = 1e-5
"""Least such distance, as a fraction of the update: for a sum in another order."""

# Loops -----------------------------------------------------------------------------------------
LARGE_BYTES = 8 * 2**20
"""Bytes from which copying a tensor takes longer than a busy host needs to keep two streams in step
(0.2 ms at PCIe 4.0's 25 GB/s). Larger batches have their own copy stream; smaller outputs of a CUDA
graph, such as a loss, are copied; smaller tensors that a captured step holds are compared though it
is not seen to write them."""
AWAITED_S = 10.0
"""Seconds that a run waits for optional things: artifacts in transit (compiling takes 15 to 45);
the digests of other ranks."""

# Comparison with fp32 --------------------------------------------------------------------------
POINTS = 4
"""Samples of a comparison. With fp32, pairs of weights and a batch: two at the kept weights, two at
disturbed ones; the second batch rules out faults of the first alone. Of a captured step, further
runs from nudged weights, and replays from one state, if the first two differ: rounding puts some
activations on the other side of a kink (0.27% of a weight's update on an H200)."""
PERTURBATION = 0.25
"""How weights are disturbed: each tensor by this fraction up or down, which slopes show, and each
element by up to half as much, which errors show."""
FAULT, ALLOWED = 0.1, 0.3
"""A fault of one tensor's slope that must stand out, and the part of it that is always allowed; the
rest is for standard errors. Both hold for doubled variances of outputs, too: dropout at twice its
rate doubles them. A number format may take half as much from the slope of all gradients."""
LOST = 0.5
"""How far a number format may take a tensor's slope from fp32's; and the error from which a tensor
is nothing but rounding. On an H200 plain bf16 took 10% from the slope of GPT-2's last bias, and
added 6% to a layer of ResNet-18. Two choices of algorithms for ResNet-50 in bf16, each 11% off fp32
in a layer, were 7.5% off along it to opposite sides."""
STANDARD_ERRORS = 4.0
"""Standard errors allowed beyond a limit."""
ROUNDINGS = 2.5
"""Allowed error of a tensor, in units of its rounding. Two orders of summation differ by up to 1.4
times in bf16, twice in fp32. Gradients of deep networks shatter: on an H200 bf16 left a third of a
fresh FCN-ResNet50's along fp32's; weights rounded to bf16 take about as much from fp32's."""
NEGLIGIBLE = 1e-2
"""Fraction of a tensor that may always be off: on an H200 an encoder compiled in fp16 had a bias
0.7% off fp32, eager 0.1%. Fraction of the gradient that may stay unknown, in its least tensors: of
EfficientNetV2-S in bf16 32 draws tell 99% to a tenth, another 20 tensors would take 500 and more.
And by which a gradient that is nothing but rounding may be other rounding."""
UPDATE_OFF = 1e-4
"""Fraction of an update by which an optimizer may differ: fused kernels round otherwise. AdamW's
weight decay is five times that at a weight of 0.05, lr 1e-4."""
MOST_DRAWS = 512
"""Draws of each config at most: GPT-2 with dropout shows a fault of a tenth from 32 on; small
models need hundreds."""

# Starts of a command ---------------------------------------------------------------------------
START_S = 1800.0
"""Seconds until a command's first steps, which may read data first, and until the steps of a config
in a script that nothing interrupts. A later start has the rest of the budget."""
STARTS = 3
"""Starts of a command that may wait for their turns, one for each value of a script's option; and
starts in a row that end within a block, after which the command counts as too short."""

# Looking at a run ------------------------------------------------------------------------------
MIN_OBSERVED_STEPS = 4
"""Optimizer steps before advisor decides which of them make one step of the script; calls
of a kind before it counts as frequent."""
MAX_OBSERVED_STEPS = 128
"""Optimizer steps after which a run is left alone if they cannot be told apart, or, in a trial, if
none was of the model that trained: a step of the script has at most half as many. An optimizer that
made none of them, such as a generator's, is waited for as long."""
FREQUENT = 0.2
"""Fraction of a model's calls: input signatures that are so frequent are compiled for. Each takes
as long as the first, half a minute."""

# Memory of a run -------------------------------------------------------------------------------
HEADROOM = 1.5
"""A config is tried in a real run if so many times a step's temporary memory is free; and compared
with strict fp32, which takes twice as much as half precision, if twice that is."""
LEAST_FREE = 0.1
"""Fraction of the device's memory; if less is free, a switch empties PyTorch's cache. That waits
for the device, and later steps allocate again."""
