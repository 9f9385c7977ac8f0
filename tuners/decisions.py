"""Every constant that steers a decision of a tuning, with its unit and the measurement behind it.

What is not here decides nothing: sizes of buffers, names, limits of formats.
"""

from __future__ import annotations

# Timing ----------------------------------------------------------------------------------------
TURN_S = 0.3
"""Seconds of one timed block. Blocks of 0.2 s and more, A B B A, gave 0.11% error and no false
'faster' in 400 simulated repetitions; fewer, longer blocks cancel less drift."""
SLOW_TURN_S = 2.0
"""Seconds that a block has at most where steps are slow: ResNet-50 from JPEG files and fasterrcnn
take 0.2 to 1 s a step, and a visit should stay under 15 s. What takes longer than two turns of such
blocks ends after two: the noise of the baseline's own tells the rest."""
LOOKS = (3, 5, 8, 12, 18)
"""Rounds after which the final race may stop. Each look has a fifth of the 5% of error, so that the
interval holds although it is looked at: in 97.6% of 4,000 simulated races that stop when they may
(normal noise, AR(1) noise of blocks with r from 0.3 to 0.9, load in stretches), and at all five
looks at once in 94.4%."""
PAIRS = LOOKS[0]
"""Turns of a visit, and steps of a block where they are slow: three of 0.3 s tell 3% at 0.5% noise.
A visit that is close to the best has twice as many."""
SETTLE_BLOCKS = 12
"""Blocks where some still compile, and turns' time, after which a config is timed though it has not
settled: shapes vary, or the host is busy."""
HOPELESS = 0.8
"""Below this fraction of the best ratio so far a visit ends after one turn. What waits for its data
for the rest of its time has its loader tuned before anything else: workers gain a quarter then,
which is what the first compute configs gain."""

# Choosing --------------------------------------------------------------------------------------
CLEARLY = 1.01
"""A ratio below this decides nothing: GPU-bound repeats differ by 0.5%. What gains less is not
advised, what is this close ties, and a race ends when it knows every ratio so closely."""
GAIN = 1.03
"""A ratio from which more of something is worth it: a larger batch (ResNet-50 gains 3% from 512 to
1024 for twice the memory), more workers, pinned memory, time that is spent waiting for data."""
NOTABLE = 1.1
"""A ratio that visits show reliably, who are within 5% of the race: two blocks that differ by less
are settled, what is further behind the leader is not raced, and what seemed to gain as much and is
not advised has a line that says why."""
TELLS = 2.0
"""An interval that reaches beyond so many times its mean tells no speed-up: beside another tuning
one network was said to gain 42 times (19.8-89.0), and 1.0 times in quiet. In 300 simulated tunings
under a load that comes and goes no advice was off by more than 1.3 times. More workers are advised
if its low end is as high: a script that waited 92% of its time was 38 times as fast with them, its
interval from 12 to 120."""
LEADERS = 3
"""Configs in the final race beside the baseline: racing the leaders raised 'picked within 1% of the
best' from 82% to 97% at 1% noise; more take time from each other."""

# Time ------------------------------------------------------------------------------------------
COMPILE_S = {"": (20.0, 0.12), "cudagraphs": (5.0, 0.0), "max-autotune": (300.0, 0.0)}
"""Seconds that compiling takes, and more for each module, before one has been seen: on 16 cores
beside an H200 GPT-2 (150 modules) took 29 s, ResNet-50 (151) 32-45, EfficientNetV2-S (714) 102-109;
the backend cudagraphs 3-4 s, and max-autotune over 8 minutes for ResNet-50."""
LIKELY = 0.6
"""What compiles is first tried where this fraction of that is left: first estimates are up to 1.5
times too long."""
SLACK = 0.05
"""Fraction of the budget by which a visit may overrun it before it is given up."""
WORTH = 1 / 3
"""Of the time that a run may be tuned within itself, what one visit may take: compiled configs were
1.5 times as fast and more on 9 of 13 scripts of others, which saves a third of what is left."""
FAST_STEP_S = 0.005
"""Below this the host is the limit, and a CUDA graph in the script's own precision is tried before
a compilation: mnist gained 5.9x, an LSTM 3.2x."""

# Captured steps --------------------------------------------------------------------------------
CHECKED = 3
"""Steps before a capture, which make lazy state (PyTorch's notes advise three), and replays after
it that are compared with the same step without a graph, each on a batch of its own."""
CHECKED_AGAIN = 1000
"""Replays until one is compared again, for values that are read deeper than is watched; then twice
as many each time. A comparison takes up to ten steps: 1%."""
IN_A_ROW = 8
"""Captures, each undone by the very next change, after which graphs are given up; and batches
unlike the example after which a warning says that nothing is replayed: a job has up to eight
shapes."""
RUNS = 4
"""More runs of a step, from nudged weights, and of its replay, from one state, if the first two
differ: rounding puts some activations on the other side of a kink (0.27% of what a weight moved by,
on an H200)."""
SPREADS = 3.0
"""What a replay may differ by, in units of the widest distance between two runs of one way."""
RELATIVE = 1e-5
"""Fraction of what a step moves that counts as such a distance: for a sum in another order."""

# Loops -----------------------------------------------------------------------------------------
LARGE = 8 * 2**20
"""Bytes from which copying a tensor takes longer than a busy host needs to keep two streams in step
(0.2 ms at PCIe 4.0's 25 GB/s). Larger batches have a copy stream of their own; smaller outputs of a
CUDA graph, as a loss that a script keeps, are copied; smaller tensors that a captured step holds
are compared though it is not seen to write them."""
AWAITED_S = 10.0
"""Seconds that a run waits for what it can do without: artifacts on their way, where compiling
takes 15 to 45; other ranks' digests, where later ones compare themselves with all before them."""

# Comparison with fp32 --------------------------------------------------------------------------
# `benchmarks/false_alarms.py` on an H200: of 53 correct configs two failed, before NEGLIGIBLE was
# raised for them; every planted fault was found.
POINTS = 4
"""Pairs of weights and a batch: two at the kept weights, two at disturbed ones. Two batches each
rule out what one alone does."""
DISTURBED = 0.25
"""How weights are disturbed: each tensor by so much up or down, which slopes show, and each element
by up to half as much, which errors show."""
FAULT, ALLOWED = 0.1, 0.3
"""A fault of one tensor's slope that must stand out, and what part of it is always allowed; the
rest is for the standard errors. The same holds for doubled variances of outputs: dropout at twice
its rate doubles them. A number format may take half as much from the slope of all gradients
together."""
LOST = 0.5
"""How far a number format may take a tensor's slope from fp32's; and the error from which a tensor
is nothing but rounding. A format alone moves single tensors: on an H200 plain bf16 took 10% from
the slope of GPT-2's last bias, and added 6% to a layer of ResNet-18. Two choices of algorithms for
ResNet-50 in bf16, each 11% off fp32 in a layer, were 7.5% off along it to opposite sides."""
STANDARD_ERRORS = 4.0
"""Standard errors allowed beyond a limit."""
ROUNDINGS = 2.5
"""How many times what rounding does a tensor may be off. Two orders of summation differ by up to
1.4 times in bf16, twice in fp32. Gradients of deep networks shatter: on an H200 bf16 left a third
of a fresh FCN-ResNet50's along fp32's; weights rounded to bf16 take about as much from fp32's."""
NEGLIGIBLE = 1e-2
"""Part of a tensor that may always be off: on an H200 an encoder compiled in fp16 had a bias 0.7%
off fp32, eager 0.1%. And part of the usual gradient below which a slope may stay unknown."""
UPDATE_OFF = 1e-4
"""Part of an update by which an optimizer may differ: fused kernels round otherwise. AdamW's weight
decay is five times that at a weight of 0.05, lr 1e-4."""
MOST_DRAWS = 512
"""Draws of each config at most: on GPT-2 with dropout a fault of a tenth stands out from 32 on;
small models need hundreds."""

# Starts of a command ---------------------------------------------------------------------------
START_S = 1800.0
"""Seconds until a command's first steps, which may read its data first, and until the steps of a
config in a script that nothing interrupts. A later start has what is left of the budget."""
STARTS = 3
"""Starts of a command that may wait for their turns, as each value of an option of the script takes
one; and starts in a row that end within a block, after which the command counts as too short."""

# Looking at a run ------------------------------------------------------------------------------
LEAST_STEPS = 4
"""Optimizer steps before it is decided which of them make one step of the script."""
LOOKED = 128
"""Optimizer steps after which it is left alone if they cannot be told apart, or, in a trial, if
none of them was of the model that trained: a step of the script has at most half as many. An
optimizer that has made none of them, as that of a generator, is waited for as long."""
ANEW = 8
"""Steps of an optimizer like the advised one after which the advice is applied to its model; and
of unlike ones after which the user is told, once. An optimizer that fits a few weights before the
training makes fewer."""

# Memory of a run -------------------------------------------------------------------------------
HEADROOM = 1.5
"""A config is tried in a real run if so many times what a step of the script allocates beyond what
it holds is free; and compared, with strict fp32, which takes twice what half precision does, if
twice as much is."""
LEAST_FREE = 0.1
"""Fraction of the device's memory; if less is free, PyTorch's reserve is given back at a switch.
That waits for the device, and later steps allocate anew."""
