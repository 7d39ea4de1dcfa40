"""Sizes that bound what the kernels hold at once; the memory plan uses them, so nothing is imported here."""

TILE = 64  # tokens of an attention tile; independent of the block size, so that numbers do not change with it

MAX_STRIDE = 64  # tokens, of a selection of keys

SCORE_UNIT = 2.0**-32  # of sums of key scores

# The reference attention. An intermediate has no more numbers, unless one query block needs more.
SCRATCH_FLOATS = 1_048_576
INTERMEDIATES = 4  # queries, keys or values, scores, sums

# The native attention, see native/src/attention.h and native/src/kernels/attention_scratch.h.
HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 576
LANES = 16
SPAN = 1024  # tokens
BLOCK_ROWS = 128  # that a task has, unless one token alone has more
TASKS_PER_THREAD = 4  # with fewer, the spans of a task become tasks of their own
MAX_SPAN_BYTES = 64 << 20  # of all states of spans
THREAD_BYTES = 20 << 10  # what a thread with AMX has besides queries, a tile of keys and values, and states

# The attention on GPUs, see kernels/triton/attention/items.py.
GPU_TILE_HEIGHTS = 3  # that tiles of query rows have
GPU_PART_BYTES = 256 << 20  # of all sums over spans of keys, for tiles of one height

# What NCCL takes of a GPU for its channels: assumed, not measured.
NCCL_BYTES = 512 << 20

# The experts on GPUs, see kernels/triton/experts/routing.py.
GPU_PAIR_BYTES = 24  # of a row and one of its experts: their numbers, a weight, and at the most a tile

# The experts on a CPU, see native/src/experts.cpp.
NATIVE_PAIR_BYTES = 64  # of a row and one of its experts: numbers, a weight, and at the most a block

# The estimate of a selection of keys, see native/src/kernels/key_masses.cpp.
MASS_ROWS = 4  # that are computed together
GPU_ESTIMATE_BYTES = 1 << 25  # of query blocks that are estimated at a time
GPU_CHOICE_BYTES = 64  # of a key block for a query block and head, while they are sorted by their masses
VISIT_BYTES = 48  # of a tile that a query block sees, in a list that doubles as it grows

POOLED_TOKENS = 256  # whose hidden states are added up together where prompts are pooled

PROMPT_LOGITS = 1 << 23  # that are held at a time where log-probabilities of prompts are found


def gpu_estimate_bytes(num_heads: int, num_key_blocks: int, num_rows: int) -> int:
    """Return the bytes of estimating and choosing key blocks, for a query block of `num_rows` rows."""
    return num_heads * num_key_blocks * max(num_rows * 4 + 8, GPU_CHOICE_BYTES)  # sums and masses; choice


def prompt_logit_rows(vocab_size: int, sampled_rows: int = 1) -> int:
    """Return the positions of a prompt whose logits are held at a time, no fewer than rows are sampled."""
    return max(sampled_rows, PROMPT_LOGITS // vocab_size)


MIN_SHORTLISTED_BYTES = 1 << 25  # of an output layer that has an int8 copy; others may stay in a cache

# Sampling orders the most likely tokens of a row.
MIN_HEAD_TOKENS = 128  # least tokens in a head that is not complete
MAX_HEAD_TOKENS = 1024

SHORT_COUNTS_END = 1 << 14  # tokens that a request may have for counts of its tokens to be two bytes each

FLOAT8_INPUTS = 32
"""Inputs of float8 weights share a scale in multiples of this: what tensor cores multiply at least."""

MXFP4_GROUP = 32
"""Inputs of weights in MXFP4 that share a scale."""

KERNEL_GROUPS = (128, 64, 32, 16)
"""Inputs of weights in groups that share a scale and a zero."""


def kernel_group(num_inputs: int, most: int = KERNEL_GROUPS[0]) -> int:
    """Return the largest group size, up to `most`, into which the inputs can be cut, or 0."""
    return next((size for size in KERNEL_GROUPS if size <= most and num_inputs % size == 0), 0)
