"""Every constant that steers a decision of a tuning, with its unit and the measurement behind it.

What is not here decides nothing: sizes of buffers, names, limits of formats.
"""

from __future__ import annotations

# Timing ----------------------------------------------------------------------------------------
TURN_S = 0.3
"""Seconds of one timed block. Blocks of 0.2 s and more, A B B A, gave 0.11% error and no false
'faster' in 400 simulated repetitions; fewer, longer blocks cancel less drift."""
SLOW_TURN_S, SLOW_TURN_STEPS = 2.0, 3
"""Seconds and steps that a block has at most where steps are slow: ResNet-50 from JPEG files and
fasterrcnn take 0.2 to 1 s a step, and a visit should stay under 15 s."""
SLOW_VISIT_S = 8.0
"""Seconds of measuring after which two turns are enough: the noise of the baseline's own tells the
rest."""
SETTLED = 0.1
"""Two blocks in a row that differ by less are settled (fraction of the step time)."""
SETTLE_STEPS = 4
"""Steps before a config is timed, at least: reduce-overhead records its graphs in three."""
SETTLE_S, SETTLE_BLOCKS = 3.0, 12
"""Seconds, and blocks where some still compile, after which a config is timed though it has not
settled: shapes vary, or the host is busy."""
PAIRS, MORE_PAIRS = 3, 6
"""Turns of a visit, and of one that is close to the best: three of 0.3 s tell 3% at 0.5% noise."""
HOPELESS = 0.8
"""Below this fraction of the best ratio so far a visit ends after one turn."""
LOOKS = (3, 5, 8, 12, 18)
"""Rounds after which the final race may stop. Each look has a fifth of the 5% of error, so that the
interval holds although it is looked at: in 97.6% of 4,000 simulated races that stop when they may
(normal noise, AR(1) noise of blocks with r from 0.3 to 0.9, load in stretches), and at all five
looks at once in 94.4%."""

# Choosing --------------------------------------------------------------------------------------
CLEARLY = 1.01
"""A ratio below this decides nothing: GPU-bound repeats differ by 0.5%. What gains less is not
advised, what is this close ties, and a race ends when it knows every ratio so closely."""
GAIN = 1.03
"""A ratio from which more of something is worth it: a larger batch (ResNet-50 gains 3% from 512 to
1024 for twice the memory), more workers, pinned memory, time that is spent waiting for data."""
SURELY = 2.0
"""The low end of an interval from which more workers are advised however wide it is: a script that
waited 92% of its time was 38 times as fast with them, its interval from 12 to 120."""
TELLS = 1.0
"""An interval that reaches further than this fraction above its mean tells no speed-up: beside
another tuning one network was said to gain 42 times (19.8-89.0), and 1.0 times in quiet. In 300
simulated tunings under a load that comes and goes no advice was off by more than 1.3 times."""
MENTIONED = 1.1
"""A config that seemed to gain as much and is not advised has a line that says why."""
LEADERS = 3
"""Configs in the final race beside the baseline: racing the leaders raised 'picked within 1% of the
best' from 82% to 97% at 1% noise; more take time from each other."""
NEAR = 0.9
"""A config below this fraction of the leader is not raced: visits are within 5% of the race."""

# Time ------------------------------------------------------------------------------------------
COMPILE_S, COMPILE_MODULE_S = 20.0, 0.12
"""Seconds that compiling takes, and more for each module, before one has been seen: on 16 cores
beside an H200 GPT-2 (150 modules) took 29 s, ResNet-50 (151) 32-45, EfficientNetV2-S (714) 102-109.
"""
QUICK_COMPILE_S = 5.0
"""The same of the backend cudagraphs: 3-4 s."""
LONG_COMPILE_S = 300.0
"""The same of max-autotune: over 8 minutes for ResNet-50."""
MARGIN = 1.3
"""A race is begun where there is time for one that takes so many times as long as its timed blocks,
which leave out what switching takes."""
LIKELY = 0.6
"""A visit is begun where this fraction of its expected time is left: what leads is kept anyway, and
first estimates are up to 1.5 times too long."""
COMPARE_S = 3.0
"""Seconds of a comparison before one has been seen."""
SLACK = 0.05
"""Fraction of the budget by which a visit may overrun it before it is given up."""
WORTH = 1 / 3
"""Of the time that a run may be tuned within itself, what one visit may take: compiled configs were
1.5 times as fast and more on 9 of 13 scripts of others, which saves a third of what is left."""
IDLE_TRIALS = 8
"""Visits of the sampler in a row without a better config after which the search ends."""

# Loader ----------------------------------------------------------------------------------------
STARVED = 0.25
"""Fraction of its time that the best config waits for data from which the loader is tuned before
anything else: workers gain a third and more then, which is what the first compute configs gain."""
LOADER_TURN_S = 1.0
"""Seconds of a block while loader settings are compared: workers deliver in bursts."""
FAST_STEP_S, SMALL_MODULES = 0.005, 100
"""Below both the host is the limit, and a CUDA graph in the script's own precision is tried before
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
# `benchmarks/false_alarms.py` on an H200: of 53 correct configs two failed, before ALWAYS_OFF was
# raised for them; every planted fault was found.
SAMPLED = 2**16 + 1
"""Elements of a tensor that are compared, evenly spaced."""
CODE_SLOPE, FORMAT_SLOPE, FORMAT_TENSOR_SLOPE = 0.03, 0.05, 0.5
"""How far a slope may be from its reference: of one tensor, compiled code from its own number
format; of all gradients together, a format from fp32; of one tensor, a format from fp32. A format
alone moves single tensors: on an H200 plain bf16 took 10% from the slope of GPT-2's last bias, and
added 6% to a layer of ResNet-18."""
COHERENT = 1.0
"""Part of a format's error in a tensor that may lie along its gradient: two choices of algorithms
for ResNet-50 in bf16, each 11% off fp32 in a layer, were 7.5% off along it to opposite sides."""
STANDARD_ERRORS = 4.0
"""Standard errors allowed beyond a limit."""
NUDGE = 1e-6
"""Relative change of the weights that shows what rounding alone does to a tensor: eight units in
the last place of float32."""
COARSE, SENSITIVE = 2.0**-8, 3.0
"""Relative change of the weights that shows what rounding to a format does to fp32's gradient (a
unit in the last place of bf16), and how many times as much a format may take from it. Gradients of
deep networks shatter: on an H200 bf16 left a third of a fresh FCN-ResNet50's along fp32's."""
DISTURBED, DISTURBED_NOISE = 1.25, 0.1
"""How weights are disturbed: each tensor by a factor, which slopes show, and each element by up to
a share of itself, which errors show."""
ROUNDINGS, ROUNDINGS_ALONE = 2.5, 10.0
"""An error may be so many times the format's, or, in a tensor that is nothing but rounding, so many
times the rounding. Two orders of summation differ by up to 1.4 times in bf16, twice in fp32."""
ALWAYS_OFF = 1e-2
"""Part of a tensor that may always be off: on an H200 an encoder compiled in fp16 had a bias 0.7%
off fp32, eager 0.1%."""
UPDATE_OFF = 1e-4
"""Part of an update by which an optimizer may differ: fused kernels round otherwise. AdamW's weight
decay is five times that at a weight of 0.05, lr 1e-4."""
DRAWS, MOST_DRAWS = 16, 512
"""Draws of each config at first, and at most: on GPT-2 with dropout a fault of a tenth stands out
from 32 on; small models need hundreds."""
SURE_ROUNDS = 8
"""Rounds from which standard errors are known well enough that twice the allowed number of them is
a fault at once. With fewer, other draws must show it too."""
SLOPE_KNOWN = 0.07
"""A slope is known well enough once its allowed standard errors are below this: a fault of a tenth
then stands out of CODE_SLOPE."""
SPREAD, SPREAD_KNOWN = 0.25, 0.5
"""Part by which the outputs' variance over draws may be off; and the same as SLOPE_KNOWN for its
logarithm: dropout at twice its rate doubles the variance."""
SMALL_GRADIENT = 1e-2
"""Share of the usual gradient per element below which a tensor's slope may stay unknown."""

# Comparison within a run -----------------------------------------------------------------------
KEPT_STEPS, KEPT_CALLS = 4, 8
"""Steps of the script that are kept, half of them for the kept weights: two batches each rule out
what one alone does. And calls of one step, at most, for their memory."""
KEPT_WITHIN = 32
"""Steps within which these must have come. Else no gradient comes back to the model's outputs."""
KEPT_ROOM = 3.0
"""Free device memory that keeping the weights there takes, as a multiple of their own: the kept
copy, the script's own values meanwhile, and the gradients of a pass."""
KEPT_PARAMETERS, KEPT_ELEMENTS = 64, 2**22
"""Parameters of an optimizer whose update is made again, evenly spaced over all, and elements that
one may have: its value, its gradient and its state are copied, up to 64 MiB in fp32 with Adam."""

# Starts of a command ---------------------------------------------------------------------------
START_S = 1800.0
"""Seconds until a command's first steps, which may read its data first. A later start has what is
left of the budget."""
RESTARTS = 3
"""Starts in a row that end within a block, after which the command counts as too short."""
SHARED_MEMORY, MOST_STARTS = 0.7, 3
"""Share of the device's memory that several starts may take together, and how many may wait for
their turns: each value of an option of the script takes one."""
NEAR_BATCH = 0.25
"""A batch that differs by a smaller share is the one asked for: an epoch's last is shorter."""

# Looking at a run ------------------------------------------------------------------------------
LEAST_STEPS = 4
"""Optimizer steps before it is decided which of them make one step of the script."""
MOST_PERIOD = 64
"""Optimizer steps that one step of the script has at most."""
MOST_AWAITED = 32
"""Optimizer steps for which an optimizer that has made none yet is waited for: twice a period of up
to 15 steps of a critic for one of a generator."""
LOOKED = 256
"""Optimizer steps after which a script whose steps cannot be told apart is left alone."""
ELSEWHERE = 2 * MOST_PERIOD
"""Steps in a row of other optimizers after which a trial is over: its model trains no more."""
ANEW = 8
"""Steps in a row of an optimizer like the advised one after which the advice is applied to its
model; and steps of unlike ones after which the user is told, once. An optimizer that fits a few
weights before the training makes fewer."""
MOST_CUTS = 3
"""Times that a lap begins anew after an evaluation; a script that evaluates more often has it in
its steps."""

# Memory of a run -------------------------------------------------------------------------------
HEADROOM = 1.5
"""A config is tried in a real run if so many times what a step of the script allocates beyond what
it holds is free."""
COMPARES = 3.0
"""The same for a comparison: strict fp32 takes twice what half precision does, and its gradients
lie beside those of the script."""
LEAST_FREE = 0.1
"""Fraction of the device's memory; if less is free, PyTorch's reserve is given back at a switch.
That waits for the device, and later steps allocate anew."""
BATCH_S = 60.0
"""Seconds that workers have for a batch: they may hang on a lock that was held when they were
forked."""
