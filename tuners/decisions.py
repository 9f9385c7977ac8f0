"""Every constant that steers a decision of a tuning, with its unit and the measurement behind it.

Constants elsewhere decide nothing: sizes of buffers, names, limits of formats.
"""

# Timing ----------------------------------------------------------------------------------------
TURN_S = 0.3
"""Seconds of one timed block. Blocks of 0.2 s and more, A B B A, gave 0.11% error and no false
'faster' in 400 simulated repetitions; fewer, longer blocks cancel less drift."""
SLOW_TURN_S = 2.0
"""Most seconds of a block if steps are slow: ResNet-50 from JPEG files and fasterrcnn take 0.2 to
1 s a step, and a visit should stay under 15 s. After two turns of such blocks the visit ends, and
the baseline's noise gives the width of the interval."""
LOOKS = (3, 5, 8, 12, 18)
"""Rounds after which the final race may stop. Each look gets a fifth of the 5% error. In 4,000
simulated races (normal noise, AR(1) noise of blocks with r from 0.3 to 0.9, load in stretches) the
interval held in 97.6% where the race stopped, and in 94.4% at all five looks at once."""
PAIRS = LOOKS[0]
"""Turns of a visit, and steps of a slow block. Three turns of 0.3 s resolve 3% at 0.5% noise. A
config close to the best gets twice as many turns."""
SETTLE_BLOCKS = 12
"""After this many blocks, or this many times TURN_S seconds, a config is timed although its step
time still changes: its shapes vary, or the host is busy."""
HOPELESS = 0.8
"""Below this fraction of the best ratio so far, a visit ends after one turn. If a script waits for
data for the remaining fraction of its time or more, its loader is tuned first: workers then gain a
quarter, as much as the first compute configs."""

# Choosing --------------------------------------------------------------------------------------
CLEARLY = 1.01
"""A ratio below this decides nothing: GPU-bound repeats differ by 0.5%. Configs that gain less are
not advised, configs this close tie, and a race ends when it knows every ratio within 1%."""
GAIN = 1.03
"""Least ratio that is worth its cost: a larger batch (ResNet-50 gains 3% from 512 to 1024 for twice
the memory), more workers, pinned memory, a search for a loader with less waiting."""
NOTABLE = 1.1
"""A ratio that visits show reliably: their ratios are within 5% of the race's. If two blocks differ
by less, the config has settled. Configs further behind the leader are not raced. A config that
seemed to gain this much and is not advised gets a line with the reason."""
RESOLVABLE = 2.0
"""An interval that ends above this multiple of its mean is too noisy: next to another tuning, one
network seemed to gain 42 times (19.8-89.0), and 1.0 times on a quiet host. In 300 simulated tunings
under a load that comes and goes no advice was off by more than 1.3 times. More workers are advised
if the low end reaches this number: a script that waited 92% of its time gained 38x (12-120). A
block that is so many times as slow as the last one is measured again: one of ResNet-152 held 53 s
in which workers started, and made bf16 seem 12.5 times as fast (3.8 times by another tuning)."""
LEADERS = 3
"""Configs in the final race besides the baseline. Racing three raised 'picked within 1% of the
best' from 82% to 97% at 1% noise; more configs leave less time for each."""

# Time ------------------------------------------------------------------------------------------
COMPILE_S = {"": (20.0, 0.12), "cudagraphs": (5.0, 0.0), "max-autotune": (300.0, 0.0)}
"""Expected seconds of compiling, and more seconds per module, by mode ('' for other modes). On 16
cores of an H200's host, GPT-2 (150 modules) took 29 s, ResNet-50 (151) 32-45, EfficientNetV2-S
(714) 102-109; the backend cudagraphs 3-4 s, and max-autotune over 8 minutes for ResNet-50."""
LIKELY = 0.6
"""Compiling is tried if this fraction of COMPILE_S is left, which is up to 1.5 times too long."""
SLACK = 0.05
"""Fraction of the budget by which a visit may overrun it."""
WORTH = 1 / 3
"""Largest fraction of the budget for one visit if a real run is tuned while it goes on: compiled
configs were 1.5 times as fast on 9 of 13 third-party scripts, which saves a third of the rest."""
FAST_STEP_S = 0.005
"""Steps faster than this are limited by the host, so a CUDA graph in the script's own precision is
tried before compiling: mnist gained 5.9x, an LSTM 3.2x."""

# Captured steps --------------------------------------------------------------------------------
CHECKED = 3
"""Warm-up steps before a capture (PyTorch's notes advise three). Also the replays after a capture
that are compared with the same step without a graph, each on a batch of its own."""
CHECKED_AGAIN = 1000
"""Replays until a replay is compared again, because not all values are watched; this number doubles
each time. A comparison takes as long as up to ten steps: 1%."""
IN_A_ROW = 8
"""Repeats that show a pattern. If as many captures in a row are undone by the next change, graphs
are given up. If as many batches are unlike the example (a job has up to eight shapes), the user is
warned. After as many steps of an optimizer, the advice is applied to its model if it is like the
advised one; else the user is warned. Fitting a few weights before training takes fewer steps."""
SPREADS = 3.0
"""Allowed difference of a replay, in units of the widest distance between two equal runs."""
RELATIVE = 1e-5
"""Least value of this distance, as a fraction of the update: sums may run in another order."""

# Loops -----------------------------------------------------------------------------------------
LARGE_BYTES = 8 * 2**20
"""Bytes from which copying a tensor takes longer than a busy host needs to keep two streams in step
(0.2 ms at PCIe 4.0's 25 GB/s). Larger batches have their own copy stream; smaller outputs of a CUDA
graph, such as a loss, are copied; smaller tensors that a captured step holds are compared even if
no write to them is seen."""
AWAITED_S = 10.0
"""Seconds that a run waits for optional things: artifacts in transit (compiling takes 15 to 45);
the digests of other ranks."""

# Comparison with fp32 --------------------------------------------------------------------------
POINTS = 4
"""Samples of a comparison. With fp32, pairs of weights and a batch: two at the current weights, two
at disturbed ones; a fault counts only if both batches show it. If the first two runs of a captured
step differ: more runs from nudged weights, and more replays from one state, because rounding puts
some activations on the other side of a kink (0.27% of a weight's update on an H200)."""
PERTURBATION = 0.25
"""How weights are disturbed: each tensor is scaled up or down by this fraction, which slopes show,
and each element by up to half as much, which distances show."""
FAULT, ALLOWED = 0.1, 0.3
"""The fault of one tensor's slope that a comparison must find, and the fraction of it that is
always allowed; the rest is for standard errors. Both also apply to a doubled variance of outputs,
as by doubled dropout. A number format may take half of FAULT from the slope of all gradients."""
LOST = 0.5
"""Most that a number format may change one tensor's slope; also the error from which a tensor is
nothing but rounding. On an H200 plain bf16 took 10% from the slope of GPT-2's last bias, and added
6% to a layer of ResNet-18. Two algorithms for ResNet-50 in bf16 were each 11% off fp32 in a layer;
their slopes were 7.5% off in opposite directions."""
STANDARD_ERRORS = 4.0
"""Standard errors allowed beyond a limit."""
ROUNDINGS = 2.5
"""Allowed error of a tensor, in units of its rounding. Two orders of summation differ by up to 1.4
units in bf16, 2 in fp32. Gradients of deep networks shatter: on an H200 bf16 kept a third of the
slope of a fresh FCN-ResNet50's gradients; rounding only the weights to bf16 costs about as much."""
NEGLIGIBLE = 1e-2
"""Error of a tensor that is always allowed: on an H200 an encoder compiled in fp16 had a bias 0.7%
off fp32, eager 0.1%. Also the fraction of the gradient, in its smallest tensors, that may stay
unknown: for EfficientNetV2-S in bf16, 32 draws give 99% to a tenth; 20 more tensors would take 500
and more. Also how far two gradients that are nothing but rounding may differ, as part of a usual
one: on a CPU, that of a bias before a BatchNorm was 1e-5 in eager code, 2e-4 in compiled code."""
UPDATE_OFF = 1e-4
"""Fraction of an update by which an optimizer may differ: fused kernels round differently. AdamW's
weight decay is five times this fraction at a weight of 0.05 and lr 1e-4."""
MOST_DRAWS = 512
"""Draws of each config at most: GPT-2 with dropout shows a fault of a tenth from 32 on; small
models need hundreds."""

# Starts of a command ---------------------------------------------------------------------------
START_S = 1800.0
"""Most seconds until a command's first steps (it may read data first), and until a config's steps
in a script that advisor cannot interrupt. A later start gets the rest of the budget."""
STARTS = 3
"""Most starts of a command that wait for their turns, one for each value of a script's option. Also
the starts in a row that end within a block, after which the command counts as too short."""

# Looking at a run ------------------------------------------------------------------------------
MIN_OBSERVED_STEPS = 4
"""Optimizer steps before advisor decides which of them make one step of the script. Also the calls
with an input signature before this signature counts as frequent."""
MAX_OBSERVED_STEPS = 128
"""Optimizer steps after which advisor leaves a run alone if no repeating step is found, or, in a
trial, if none trains the model. One step of the script has at most half as many. advisor waits as
long for an optimizer that has not stepped yet, such as a generator's."""
FREQUENT = 0.2
"""Fraction of a model's calls from which an input signature is compiled for. Each signature takes
as long to compile as the first: half a minute."""

# Memory of a run -------------------------------------------------------------------------------
HEADROOM = 1.5
"""A config is tried in a real run if this many times a step's temporary memory is free. It is
compared with strict fp32 if twice as much is free: fp32 needs twice half precision's memory."""
LEAST_FREE = 0.1
"""If less than this fraction of the device's memory is free, a switch of configs empties PyTorch's
cache. Emptying waits for the device, and later steps allocate again."""
