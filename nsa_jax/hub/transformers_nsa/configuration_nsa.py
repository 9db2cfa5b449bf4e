"""Configuration of a language model with Native Sparse Attention (arXiv 2502.11089), for transformers."""

from transformers import PretrainedConfig

_ROPE = {
    "theta": 10_000.0,
    "rotary_dim": 0,
    "kind": "none",
    "factor": 1.0,
    "original_length": 0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 0.0,
}


class NSAConfig(PretrainedConfig):
    """Everything that a model's function depends on.

    Attributes:
      value_head_dim: features of a head's values; head_dim is that of queries and keys.
      compress_block, compress_stride: tokens of a compressed block, and between the starts of neighbours.
      compressor: "mlp" or "mean".
      select_block: tokens of a selection block.
      num_selected, num_initial, num_local: selection blocks that a query reads, and of these the first and the last
        ones, which it always reads.
      window: tokens that the sliding window reads, the query's own included.
      selector: "compressed", or "mean_key" for blocks chosen by the mean of their keys, without a compressed branch;
        compress_block and compress_stride are then select_block.
      shared_kv: the branches share one projection of keys and one of values.
      layer_pattern: kinds of attention that the layers repeat, each "nsa", "dense" or "window"; empty: all are "nsa".
      qk_norm: queries and keys are normalised per head before RoPE.
      qkv_bias, out_bias, mlp_bias: which projections have biases.
      logit_soft_cap: c, of logits c * tanh(logits / c); 0 means none.
      rope_options: base `theta`, `rotary_dim` features that are turned (0: all), and how frequencies are changed for
        longer rows: `kind` is none, linear, dynamic, llama3 or yarn; the other numbers are the kinds'.
    """

    model_type = "nsa"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        value_head_dim=None,
        compress_block=32,
        compress_stride=16,
        compressor="mlp",
        select_block=64,
        num_selected=16,
        num_initial=1,
        num_local=2,
        window=512,
        selector="compressed",
        shared_kv=False,
        layer_pattern=(),
        qk_norm=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        logit_soft_cap=0.0,
        rope_options=None,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        max_position_embeddings=4096,
        use_cache=True,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim or head_dim
        self.compress_block = compress_block
        self.compress_stride = compress_stride
        self.compressor = compressor
        self.select_block = select_block
        self.num_selected = num_selected
        self.num_initial = num_initial
        self.num_local = num_local
        self.window = window
        self.selector = selector
        self.shared_kv = shared_kv
        self.layer_pattern = list(layer_pattern)
        self.qk_norm = qk_norm
        self.qkv_bias = qkv_bias
        self.out_bias = out_bias
        self.mlp_bias = mlp_bias
        self.logit_soft_cap = logit_soft_cap
        self.rope_options = {**_ROPE, **(rope_options or {})}
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
