"""The production run: a 12-layer NSA model on FineWeb-Edu at 2,048 tokens, sized for one or more A100s.

What:    dim 768, 12 layers, 12 query heads in 2 key/value groups of head dim 64, the paper's block geometry (l=32,
         d=16, l'=64, n=16, w=512), bfloat16 compute with float32 parameters. The three branches share keys and values,
         and blocks are compressed to their means: of five models trained at 32,768 tokens this form alone answers
         questions about far facts, and it has the lowest loss from 512 tokens on (docs/quality.md). The paper's form is
         --config.model.nsa.shared_kv=False --config.model.compressor=mlp --config.model.mlp_dim=0.
         The results of attention and of matrix products are kept for the backward pass, and layers are unrolled. Steps
         are faster so, and take longer to compile (docs/performance.md#memory).
Data:    FineWeb-Edu, sample-10BT, through Hugging Face `datasets` (the first run downloads about 28 GB). A byte-pair
         vocabulary of 32,768 is trained on the corpus and kept in the cache. 50,000 steps of 128 x 2,048 tokens are
         13.1 billion tokens.
Takes:   not measured end to end. Tokens per second of this model are in benchmarks/results.
Reaches: not measured.
Command: python train.py --config=configs/a100_prod.py
Facts:   if the model is to find single facts in long rows, make every fourth layer dense:
         --config.model.layer_pattern="('nsa','nsa','nsa','dense')" (facts were counted at 8,192 tokens, the
         loss on text at 32,768 too, docs/quality.md).
Other:   several GPUs share the batch without configuration; --config.mesh.fsdp=8 also shards parameters and optimizer
         state. Text files instead of the download: --config.data.source=text --config.data.files="('corpus/*.txt',)".
"""

from ml_collections import ConfigDict

from nsa_jax.config import default_config


def get_config() -> ConfigDict:
    """The production run."""
    c = default_config()
    c.name = "a100_prod"

    c.model.dim = 768
    c.model.num_layers = 12
    c.model.num_heads = 12
    c.model.num_kv_heads = 2
    c.model.head_dim = 64
    c.model.mlp_dim = 2432  # about as many parameters as with the paper's projections and compressors and 2,048
    c.model.compressor = "mean"
    c.model.nsa.shared_kv = True  # blocks are chosen by the keys that are read
    c.model.nsa.compress_block = 32
    c.model.nsa.compress_stride = 16
    c.model.nsa.select_block = 64
    c.model.nsa.num_selected = 16
    c.model.nsa.window = 512
    c.model.compute_dtype = "bfloat16"
    c.model.remat = "dots_saved"
    c.model.scan_layers = False

    c.data.source = "hf"
    c.data.hf_path = "HuggingFaceFW/fineweb-edu"
    c.data.hf_name = "sample-10BT"
    c.data.tokenizer = "bpe"
    c.data.bpe_vocab_size = 32_768
    c.data.seq_len = 2048
    c.data.val_fraction = 0.001

    c.train.steps = 50_000
    c.train.batch_size = 128
    c.train.grad_accum = 2  # for one A100-80GB; on two or more, 1 fits
    c.train.log_every = 20
    c.train.eval_every = 1000
    c.train.eval_batches = 32
    c.train.save_every = 1000

    c.optim.learning_rate = 6e-4
    c.optim.schedule = "cosine"
    c.optim.warmup_steps = 1000
    c.optim.weight_decay = 0.1
    c.optim.clip = 1.0

    c.guards.min_selection_gain = 0.1  # with shared keys lists come most of the way (docs/quality.md)

    c.preflight.target = "a100-80gb"
    c.preflight.devices = 8
    return c
