"""A language model with Native Sparse Attention (arXiv 2502.11089), for transformers, in plain PyTorch.

Shapes and words are those of attention_nsa.py.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .attention_nsa import NSACache, NSACompressor, NSADenseAttention, NSARMSNorm, NSAttention, Places, rope_turns
from .configuration_nsa import NSAConfig

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:  # earlier versions, without gradient checkpointing
    GradientCheckpointingLayer = nn.Module


class NSAMLP(nn.Module):
    """silu(gate(x)) * up(x), projected back."""

    def __init__(self, config):
        super().__init__()
        wide, narrow, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.gate_proj = nn.Linear(narrow, wide, bias=bias)
        self.up_proj = nn.Linear(narrow, wide, bias=bias)
        self.down_proj = nn.Linear(wide, narrow, bias=bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class NSADecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, kind="nsa"):
        super().__init__()
        window = config.window if kind == "window" else None
        self.self_attn = NSAttention(config) if kind == "nsa" else NSADenseAttention(config, window)
        self.mlp = NSAMLP(config)
        self.input_layernorm = NSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = NSARMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, places, turns, block_turns, state=None):
        x = x + self.self_attn(self.input_layernorm(x), places, turns, block_turns, state)
        return x + self.mlp(self.post_attention_layernorm(x))


class NSAPreTrainedModel(PreTrainedModel):
    """Initialisation, and what transformers asks of a model."""

    config_class = NSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NSADecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _is_stateful = True  # the cache cannot be cropped, which assisted generation needs

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # the model makes an NSACache

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, NSARMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, NSACompressor):
            nn.init.normal_(module.position, std=std)
        elif isinstance(module, NSAttention):
            nn.init.zeros_(module.gate_bias)


class NSAModel(NSAPreTrainedModel):
    """The layers, without the output head."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = config.layer_pattern or ["nsa"]
        self.layers = nn.ModuleList(
            [NSADecoderLayer(config, kinds[index % len(kinds)]) for index in range(config.num_hidden_layers)]
        )
        self.norm = NSARMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        position_ids=None,
        token_type_ids=None,
    ):
        """Activations of the last layer.

        Args:
          input_ids: [B, T].
          attention_mask: [B, P + T], 1 for tokens; zeros before a row's first token are padding.
          past_key_values: `NSACache` of the P columns before.
          inputs_embeds: [B, T, D], in place of input_ids.
          use_cache: return an `NSACache`.
          output_attentions: must not be asked for: there are no dense matrices of attention.
          output_hidden_states: return the input of every layer and the result; None: as the config says.
          return_dict: False returns a tuple; None: as the config says.
          position_ids: None, or those that the model uses anyway.
          token_type_ids: not used; tokenizers give them.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: sparse attention has no dense matrices to return")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if not x.shape[0] or not x.shape[1]:
            name = "input_ids" if inputs_embeds is None else "inputs_embeds"
            raise ValueError(f"{name} has the shape {tuple(x.shape[:2])}: give at least one token")
        cache = past_key_values
        if cache is not None and not isinstance(cache, NSACache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}: must be the NSACache that the model returns"
            )
        if cache is None and use_cache:
            cache = NSACache()
        if cache is not None and self.training and self.layers[0].gradient_checkpointing:
            raise ValueError("gradient checkpointing goes without a cache: leave out use_cache and past_key_values")
        past = cache.seen if cache is not None else 0
        start = self._first_columns(x, attention_mask, cache, past)
        places = Places(self.config, start, past, x.shape[1])
        self._check_positions(places, position_ids)
        self._check_dynamic(places)
        turns = rope_turns(self.config, places.positions, places.row_lengths)
        ends = places.new_blocks * self.config.compress_stride + self.config.compress_block - 1
        block_turns = rope_turns(self.config, ends, places.row_lengths)
        if cache is not None:
            cache.start, cache.seen = start, past + x.shape[1]
            cache.embedded += 0 if inputs_embeds is None else x.shape[1]
            cache.states = cache.states or [{} for _ in self.layers]
        hidden = []
        for index, layer in enumerate(self.layers):
            hidden.append(x)
            x = layer(x, places, turns, block_turns, None if cache is None else cache.states[index])
        x = self.norm(x)
        result = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=(*hidden, x) if output_hidden_states else None,
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def _first_columns(self, x, mask, cache, past):
        """The column of each row's first token, [B]."""
        batch, length = x.shape[0], past + x.shape[1]
        known = cache.start if cache is not None else None
        if mask is None:
            return torch.zeros(batch, dtype=torch.long, device=x.device) if known is None else known
        if mask.shape != (batch, length):
            raise ValueError(f"attention_mask has the shape {tuple(mask.shape)}: must be {(batch, length)}")
        if ((mask != 0) & (mask != 1)).any():
            raise ValueError("attention_mask: must hold zeros and ones; rows of several documents are not served")
        seen = mask.to(x.device).bool()
        start = (seen.cumsum(-1) == 0).sum(-1)
        holes = ~seen & (torch.arange(length, device=x.device) >= start[:, None])
        # Behind a row's last token padding changes nothing, since no token sees what comes after it.
        if (seen[:, 1:] & holes[:, :-1]).any() or (past and holes[:, :past].any()):
            raise ValueError("attention_mask: must be zeros and then ones in each row (padding on the left)")
        if known is not None and not torch.equal(start.clamp_max(past), known):
            raise ValueError("attention_mask: differs from that of the cached tokens")
        return start

    def _check_positions(self, places, given):
        """Positions count from a row's first token, or from its first column, which rotates keys and queries alike."""
        if given is None:
            return
        usual, real = places.positions, places.positions >= 0
        given = given.to(usual.device)
        if not any(((given == at) | ~real).all() for at in (usual, usual + places.start[:, None])):
            raise ValueError("position_ids: must be 0, 1, 2, ... in each row; leave them out")

    def _check_dynamic(self, places):
        """RoPE of the kind "dynamic" would turn the cached keys of longer rows again."""
        rope = self.config.rope_options
        if rope["kind"] == "dynamic" and places.past and int(places.row_lengths.max()) > rope["original_length"]:
            raise ValueError(
                f"RoPE of the kind 'dynamic' serves cached rows of at most {rope['original_length']} tokens; "
                "use shorter rows, or use_cache=False"
            )


class NSAForCausalLM(NSAPreTrainedModel, GenerationMixin):
    """The language model. `forward` and `generate` are those of transformers; the cache is an `NSACache`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = NSAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, inputs_embeds=None, use_cache=True, **kwargs
    ):
        """The arguments of `forward` for the next token: what the cache does not hold yet."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        given = {"attention_mask": attention_mask, "past_key_values": past_key_values, "use_cache": use_cache}
        passed = ("output_attentions", "output_hidden_states", "logits_to_keep")
        given |= {name: kwargs[name] for name in passed if name in kwargs}
        if inputs_embeds is not None and not seen:
            return {"inputs_embeds": inputs_embeds, **given}
        # input_ids may lack what was given as embeddings; the mask counts all columns.
        columns = input_ids.shape[1]
        if columns <= seen and past_key_values is not None:
            columns += past_key_values.embedded or seen
        new = (columns if attention_mask is None else attention_mask.shape[1]) - seen
        return {"input_ids": input_ids[:, -new:], **given}

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        position_ids=None,
        token_type_ids=None,
        logits_to_keep=0,
        **loss_arguments,
    ):
        """float32 logits [B, T, vocabulary], and the loss of `labels` (shifted here; -100 is left out).

        Args:
          input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_attentions, output_hidden_states,
            return_dict, position_ids, token_type_ids: see `NSAModel`.
          labels: [B, T].
          logits_to_keep: only the logits of so many last tokens are computed; 0 means all.
          loss_arguments: of the loss, such as num_items_in_batch.
        """
        if unknown := set(loss_arguments) - {"num_items_in_batch"}:
            raise TypeError(f"forward takes no argument {', '.join(sorted(unknown))}")
        out = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
            return_dict=True,
            position_ids=position_ids,
            token_type_ids=token_type_ids,
        )
        hidden = out.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, keep]).float()
        if cap := self.config.logit_soft_cap:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()
