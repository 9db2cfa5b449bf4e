"""A small NSA language model that trains on a laptop, and shows at its end that it needs its selected branch.

What:    a byte-level model with 0.5M parameters: a row of 256 tokens is 32 selection blocks of 8, of which a query
         reads at most 8, beside a window of 16 tokens. Two layers of windows reach back 30 tokens.
Data:    half of the rows are the source text of the running Python's standard library (about 30 MB, no download), one
         document per file. The other half are the task `keypad` (nsa_jax/data/long_tasks.py): what each of ten digits
         stands for is stated once, at least 64 tokens before it is first asked. Validation uses files that are held
         out by a hash of their content, and rows of the task that training does not see.
Takes:   4 to 5 minutes on 2 CPU cores, of which half a minute are preflight, compilation and the first tokenisation.
Reaches: over five seeds (benchmarks/results/quickstart_cpu.json) at least 97 % of the questions about far tokens are
         answered, and no more than by chance (20 %) by the window alone; at most 2.24 bits per byte of held-out text.
Command: python train.py --config=configs/quickstart.py
"""

from ml_collections import ConfigDict

from nsa_jax.config import default_config


def get_config() -> ConfigDict:
    """The quickstart run."""
    c = default_config()
    c.name = "quickstart"

    c.model.dim = 128
    c.model.num_layers = 2
    c.model.num_heads = 4
    c.model.num_kv_heads = 4  # each head selects for itself: what one does not list, another may
    c.model.head_dim = 32
    c.model.mlp_dim = 384
    c.model.init_std = 0.1  # about 1 / sqrt(dim): a narrow model starts to learn sooner
    c.model.compressor = "mean"  # compressed blocks say where to look, the tokens themselves what stands there
    c.model.compute_dtype = "float32"  # CPUs multiply float32 faster than bfloat16
    c.model.remat = "none"  # memory is no concern at this size
    c.model.nsa.shared_kv = True  # what a key matches in one branch, it matches in all: selection is learned sooner
    c.model.nsa.compress_block = 4
    c.model.nsa.compress_stride = 4
    c.model.nsa.select_block = 8
    c.model.nsa.num_selected = 8
    c.model.nsa.num_local = 1
    c.model.nsa.window = 16

    c.data.sources = {
        "text": {"source": "stdlib"},
        "keypad": {"source": "task", "tasks": ("keypad",), "task_answer_weight": 8.0},
    }
    c.data.seq_len = 256

    c.train.steps = 300
    c.train.batch_size = 24
    c.train.log_every = 20
    c.train.eval_every = 100
    c.train.eval_batches = 4
    c.train.save_every = 150
    c.train.sample_prompt = "def "

    c.optim.learning_rate = 3e-3
    c.optim.schedule = "wsd"
    c.optim.decay_fraction = 0.35
    c.optim.warmup_steps = 30
    c.optim.weight_decay = 0.0
    return c
