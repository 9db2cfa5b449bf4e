"""Native Sparse Attention (arXiv 2502.11089) and its cache, in plain PyTorch.

Shapes: B rows, T tokens of a call, P columns before them, S = P + T, N query heads, K key/value heads, G = N / K, H and
V features of a head's keys and values, C compressed blocks, J selection blocks, D model width. Rows may be padded on
the left. A column is an index into the padded row; a position counts from the row's first token, and blocks lie at
positions, so that a padded row gives what it gives alone.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache

# Numbers of the largest intermediate array of attention: queries are served in pieces so that it is not larger.
_LARGEST_ARRAY = 2**24


class NSACache(Cache):
    """What generation keeps of the tokens before, for each layer.

    Attributes:
      start: [B], the column of each row's first token.
      seen: P, the columns that the cache holds.
      embedded: how many of them were given as embeddings.
      states: for each layer, arrays by name: `key_slc` and `value_slc` of all columns, `key_win` and `value_win` of the
        last window - 1, `key_raw` and `value_raw` of the last compress_block - 1, `key_cmp` and `value_cmp` of all
        compressed blocks. What the others hold is absent: with `shared_kv` `key_win`, `value_win` and `value_raw`, with
        the selector "mean_key" `key_raw`, `value_raw` and `value_cmp`; `key_cmp` are the mean keys.
        Dense layers have `key` and `value` of all columns, window layers of the last window - 1.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self):
        super().__init__(layers=[])
        self.start = None
        self.seen = 0
        self.embedded = 0
        self.states = []

    def __len__(self):
        return len(self.states)

    def get_seq_length(self, layer_idx=0):
        """Columns that the cache holds, padding included."""
        return self.seen

    def get_max_cache_shape(self, layer_idx=0):
        """-1: the cache grows."""
        return -1

    def get_max_length(self):
        """None: the cache grows."""
        return None

    def _each_row(self, change):
        if self.start is not None:
            self.start = change(self.start)
        self.states = [{name: change(array) for name, array in state.items()} for state in self.states]

    def reorder_cache(self, beam_idx):
        """Row i becomes what row beam_idx[i] was."""
        self._each_row(lambda array: array.index_select(0, beam_idx.to(array.device)))

    def batch_select_indices(self, indices):
        """Keeps the rows of these indices."""
        self._each_row(lambda array: array[indices.to(array.device)])

    def batch_repeat_interleave(self, repeats):
        """Repeats every row."""
        self._each_row(lambda array: array.repeat_interleave(repeats, dim=0))

    def reset(self):
        """Forgets everything."""
        self.start, self.seen, self.embedded, self.states = None, 0, 0, []

    def crop(self, *args, **kwargs):
        """Not possible: columns that left the window are not kept."""
        raise NotImplementedError("NSACache cannot be cropped: what left the window is not kept")


class Places:
    """Where the tokens of a call are: what all layers need to know about columns, positions and blocks."""

    def __init__(self, config, start, past, length):
        self.past, self.length, self.start = past, length, start
        columns = torch.arange(past, past + length, device=start.device)
        self.positions = columns - start[:, None]  # [B, T], negative for padding
        self.row_lengths = past + length - start  # [B]
        # Rows may complete another number of blocks each. Blocks beyond a row's are seen by no query.
        old, new = (_whole_blocks(tokens, config).clamp_min(0) for tokens in (past - start, past + length - start))
        most = int((new - old).max())
        self.new_blocks = old[:, None] + torch.arange(most, device=start.device)  # [B, M]
        self.num_compressed = int(old.max()) + most
        self.num_selection_blocks = max(-(-int(self.row_lengths.max()) // config.select_block), 1)


def _whole_blocks(tokens, config):
    """How many compressed blocks so many tokens give; 0 or less stands for none."""
    return torch.div(tokens - config.compress_block, config.compress_stride, rounding_mode="floor") + 1


def _frequencies(config, lengths):
    """Radians per token of each pair of a head's features: [B, H/2], float32.

    Args:
      config: the model's.
      lengths: [B], tokens of each row, on which the kind "dynamic" depends.
    """
    rope = config.rope_options
    half, turned = config.head_dim // 2, (rope["rotary_dim"] or config.head_dim) // 2
    dim, theta, kind, factor = 2 * turned, rope["theta"], rope["kind"], rope["factor"]
    original, index = rope["original_length"], torch.arange(turned, dtype=torch.float32, device=lengths.device)
    base = torch.full((len(lengths), 1), float(theta), dtype=torch.float32, device=lengths.device)
    if kind == "dynamic":
        ratio = lengths[:, None].to(torch.float32).clamp_min(original) / original
        base = base * (factor * ratio - (factor - 1)) ** (dim / (dim - 2))
    frequency = base ** (-index / turned)
    kept = None
    if kind == "linear":
        frequency = frequency / factor
    elif kind == "llama3":
        turns = original * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif kind == "yarn":

        def pair_with(turns):  # the pair that makes so many turns within the original length
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_with(rope["beta_fast"])), 0)
        high = min(math.ceil(pair_with(rope["beta_slow"])), dim - 1)
        kept = 1.0 - ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    elif kind not in ("none", "dynamic"):
        raise ValueError(f"rope_options['kind']={kind!r}: must be none, linear, dynamic, llama3 or yarn")
    if kept is not None:
        frequency = frequency * kept + frequency / factor * (1.0 - kept)
    return F.pad(frequency, (0, half - turned))


def rope_turns(config, positions, lengths):
    """Cosines and sines of RoPE at positions [B, T]: two float32 arrays [B, 1, T, H/2]."""
    rope = config.rope_options
    angle = positions.to(torch.float32)[..., None] * _frequencies(config, lengths)[:, None]
    cos, sin = angle.cos(), angle.sin()
    if rope["kind"] == "yarn":
        amplitude = rope["attention_factor"] or 0.1 * math.log(rope["factor"]) + 1.0
        turned = (rope["rotary_dim"] or config.head_dim) // 2
        scale = torch.ones(cos.shape[-1], device=cos.device)
        scale[:turned] = amplitude
        cos, sin = cos * scale, sin * scale
    return cos[:, None], sin[:, None]


def _turn(x, turns):
    """Turns feature i of a head's first half with feature i of its second: x [B, heads, T, H]."""
    cos, sin = turns
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _softmax(scores, mask):
    """Softmax over the last axis where `mask`; rows that see nothing give 0."""
    scores = scores.masked_fill(~mask, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(peak == -torch.inf, 0.0, peak))
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0.0, 1.0, total)


def _scores(query, key):
    """Scaled products in float32: query [B, K, G, T, H], key [B, K, S, H] -> [B, K, G, T, S]."""
    return query.float() @ key.float()[:, :, None].transpose(-1, -2) * query.shape[-1] ** -0.5


def _fold(p_cmp, num_blocks, config):
    """Importance of selection blocks (paper eq. 9): [..., C] -> [..., J].

    Block j receives the sum over m in [0, l'/d), r in [0, l/d) of p_cmp[(l'/d) j + m - r].
    """
    per_block = config.select_block // config.compress_stride
    overlap = config.compress_block // config.compress_stride
    width = per_block * (num_blocks - 1) + per_block + overlap - 1
    padded = F.pad(p_cmp, (overlap - 1, max(width - (overlap - 1) - p_cmp.shape[-1], 0)))
    total = torch.zeros((*p_cmp.shape[:-1], num_blocks), dtype=p_cmp.dtype, device=p_cmp.device)
    for shift in range(per_block + overlap - 1):
        weight = min(shift + 1, per_block, overlap, per_block + overlap - 1 - shift)
        total = total + weight * padded[..., shift : shift + per_block * (num_blocks - 1) + 1 : per_block]
    return total


def _select(importance, positions, config):
    """The blocks that each query reads (paper eq. 11).

    Args:
      importance: [B, K, T, J].
      positions: [B, T].
      config: the model's.

    Returns:
      Indices [B, K, T, n] and which of them are blocks. The forced ones come first, then the highest scores, ties to
      the lower index; n is at most J.
    """
    j = torch.arange(importance.shape[-1], device=importance.device)
    last = torch.div(positions, config.select_block, rounding_mode="floor")[:, None, :, None]
    candidate = j <= last
    forced = candidate & ((j < config.num_initial) | (j > last - config.num_local))
    largest = torch.finfo(torch.float32).max
    priority = torch.nan_to_num(importance, nan=0.0, posinf=largest).clamp_min(0.0)
    priority = torch.where(candidate, priority, -1.0)
    priority = torch.where(forced, torch.inf, priority)
    value, index = priority.sort(dim=-1, descending=True, stable=True)
    return index[..., : config.num_selected], value[..., : config.num_selected] >= 0


def _near(query, key, value, window, places, at):
    """Attention of queries from number `at` of the call on to the last `window` tokens: float32 [B, K, G, T, V]."""
    first = places.past + places.length - key.shape[2]  # column of the first key that is kept
    low = max(places.past + at - window + 1 - first, 0)
    high = places.past + at + query.shape[3] - first
    token = torch.arange(low + first, high + first, device=query.device) - places.start[:, None]  # [B, keys]
    token, t = token[:, None], places.positions[:, at : at + query.shape[3], None]
    mask = (token >= (t - window + 1).clamp_min(0)) & (token <= t)
    probs = _softmax(_scores(query, key[:, :, low:high]), mask[:, None, None])
    return probs @ value[:, :, None, low:high].float()


class NSARMSNorm(nn.Module):
    """Root mean square normalisation with statistics in float32."""

    def __init__(self, features, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class NSACompressor(nn.Module):
    """The mean of a block plus an MLP of the block and its tokens' places (paper eq. 7)."""

    def __init__(self, config, features):
        super().__init__()
        block = config.compress_block
        self.position = nn.Parameter(torch.zeros(block, features))
        self.in_proj = nn.Linear(block * features, 2 * features)
        self.out_proj = nn.Linear(2 * features, features, bias=False)

    def forward(self, x):  # [..., l, F] -> [..., F]
        hidden = F.silu(self.in_proj((x + self.position).flatten(-2)))
        return _mean(x) + self.out_proj(hidden)


def _heads(x, count):
    """[B, T, count * features] -> [B, count, T, features]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _mean(x):
    """[..., l, F] -> [..., F], summed in float32."""
    return x.float().mean(-2).to(x.dtype)


class NSAttention(nn.Module):
    """Native Sparse Attention: compressed, selected and window attention, each multiplied by a gate.

    With the selector "mean_key" there is no compressed branch (MoBA, arXiv 2502.13189).
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        n, k, h, v = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.value_head_dim
        bias = config.qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, n * h, bias=bias)
        self.compresses = config.selector == "compressed"
        branches = ("cmp", "slc", "win") if self.compresses else ("slc", "win")
        self.suffixes = ("",) if config.shared_kv else tuple(f"_{branch}" for branch in branches)
        for branch in self.suffixes:
            setattr(self, f"k{branch}_proj", nn.Linear(config.hidden_size, k * h, bias=bias))
            setattr(self, f"v{branch}_proj", nn.Linear(config.hidden_size, k * v, bias=bias))
        self.gate_proj = nn.Linear(config.hidden_size, n * len(branches), bias=False)
        self.gate_bias = nn.Parameter(torch.zeros(n, len(branches)))
        self.o_proj = nn.Linear(n * v, config.hidden_size, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = NSARMSNorm(h, config.rms_norm_eps)
            self.k_norm = NSARMSNorm(h, config.rms_norm_eps)
        if self.compresses and config.compressor == "mlp":
            self.compress_key = NSACompressor(config, h)
            self.compress_value = NSACompressor(config, v)

    def forward(self, x, places, turns, block_turns, state=None):
        """Attention of a call's tokens to all before them and to themselves.

        Args:
          x: [B, T, D].
          places: `Places`.
          turns: RoPE's cosines and sines at the tokens.
          block_turns: the same at the last positions of the blocks that the call completes.
          state: the layer's part of the cache, which is brought up to date; None without one.
        """
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        query = _heads(self.q_proj(x), heads)
        keys = {name: _heads(getattr(self, f"k{name}_proj")(x), kv_heads) for name in self.suffixes}
        values = {name: _heads(getattr(self, f"v{name}_proj")(x), kv_heads) for name in self.suffixes}
        if config.qk_norm:
            query, keys = self.q_norm(query), {name: self.k_norm(key) for name, key in keys.items()}
        own = "" if config.shared_kv else "_slc"
        arrays = {"key_slc": _turn(keys[own], turns), "value_slc": values[own]}
        if not config.shared_kv:
            arrays |= {"key_win": _turn(keys["_win"], turns), "value_win": values["_win"]}
        if self.compresses:
            arrays["key_raw"] = keys["" if config.shared_kv else "_cmp"]
        if self.compresses and not config.shared_kv:
            arrays["value_raw"] = values["_cmp"]
        arrays = self._with_past(arrays, places, block_turns, state)
        gates = self.gate_proj(x).float().unflatten(-1, self.gate_bias.shape) + self.gate_bias.float()
        gates = torch.sigmoid(gates).transpose(1, 2).unflatten(1, (kv_heads, -1))  # [B, K, G, T, branches]
        query = _turn(query, turns).unflatten(1, (kv_heads, -1))  # [B, K, G, T, H]
        step = self._queries_at_once(query, places)
        pieces = [
            self._attend(query[..., at : at + step, :], gates[..., at : at + step, :], arrays, places, at)
            for at in range(0, places.length, step)
        ]
        attended = torch.cat(pieces, dim=3).flatten(1, 2).transpose(1, 2).flatten(2)  # [B, T, N*V]
        return self.o_proj(attended.to(x.dtype))

    def _with_past(self, arrays, places, block_turns, state):
        """The arrays with those of the cache before them, and compressed keys and values."""
        config = self.config
        kept = {"win": config.window - 1, "raw": config.compress_block - 1}
        if state:
            arrays = {name: torch.cat([state[name], array], dim=2) for name, array in arrays.items()}
        recent = {name: array for name, array in arrays.items() if name[-3:] in kept}
        raw = {name: arrays.pop(f"{name}_raw", arrays[f"{name}_slc"]) for name in ("key", "value")}
        for name in ("key", "value") if self.compresses else ("key",):
            fresh = self._compress(name, raw[name], places)
            fresh = _turn(fresh, block_turns) if name == "key" and self.compresses else fresh
            if state:
                missing = places.num_compressed - state[f"{name}_cmp"].shape[2]
                old = F.pad(state[f"{name}_cmp"], (0, 0, 0, max(missing, 0)))
                index = places.new_blocks[:, None, :, None].expand(fresh.shape)
                fresh = old.scatter(2, index, fresh)
            arrays[f"{name}_cmp"] = fresh
        if state is not None:
            state.update(arrays)
            for name, array in recent.items():
                state[name] = array[:, :, max(array.shape[2] - kept[name[-3:]], 0) :]
        return arrays

    def _compress(self, name, raw, places):
        """Keys or values of the blocks that the call completes: raw [B, K, columns, F] -> [B, K, M, F]."""
        config = self.config
        first = places.past + places.length - raw.shape[2]
        offset = torch.arange(config.compress_block, device=raw.device)
        columns = (places.start[:, None] + places.new_blocks * config.compress_stride)[..., None] + offset - first
        columns = columns.clamp(0, raw.shape[2] - 1)  # [B, M, l]
        row = torch.arange(raw.shape[0], device=raw.device)[:, None, None]
        covered = raw.transpose(1, 2)[row, columns].movedim(3, 1)  # [B, K, M, l, F]
        learned = self.compresses and config.compressor == "mlp"
        return getattr(self, f"compress_{name}")(covered) if learned else _mean(covered)

    def _queries_at_once(self, query, places):
        """How many queries are served together."""
        config, (batch, kv_heads, group, length, features) = self.config, query.shape
        listed = min(config.num_selected, places.num_selection_blocks) * config.select_block
        each = max(
            group * (places.num_compressed + config.window), listed * max(features, config.value_head_dim, group)
        )
        return min(max(_LARGEST_ARRAY // (batch * kv_heads * each), 1), length)

    def _attend(self, query, gates, arrays, places, at):
        """The sum of the gated branches, float32 [B, K, G, T, V].

        Args:
          query: [B, K, G, T, H], those of the call from number `at` on.
          gates: [B, K, G, T, branches].
          arrays: what `_with_past` returns.
          places: of the call.
          at: see query.
        """
        config, length = self.config, query.shape[3]
        positions = places.positions[:, at : at + length]
        key_cmp = arrays["key_cmp"]
        importance = torch.zeros(
            (*query.shape[:2], length, places.num_selection_blocks), dtype=torch.float32, device=query.device
        )
        out = torch.zeros((*query.shape[:4], config.value_head_dim), dtype=torch.float32, device=query.device)
        if key_cmp.shape[2]:
            visible = _whole_blocks(positions + 1, config)[..., None]  # a block is seen from its last token on
            mask = torch.arange(key_cmp.shape[2], device=query.device) < visible  # [B, T, C]
            # Mean keys are ranked by their products with the sum of a group's queries; the mean ranks them alike.
            scorers = query if self.compresses else query.float().mean(2, keepdim=True).to(query.dtype)
            probs = _softmax(_scores(scorers, key_cmp), mask[:, None, None])
            if self.compresses:
                out = gates[..., 0:1] * (probs @ arrays["value_cmp"].float()[:, :, None])
            importance = _fold(probs.detach().sum(2), places.num_selection_blocks, config)
        index, real = _select(importance, positions, config)
        out = out + gates[..., -2:-1] * self._selected(query, arrays, places, positions, index, real)
        key, value = (arrays.get(f"{name}_win", arrays[f"{name}_slc"]) for name in ("key", "value"))
        return out + gates[..., -1:] * _near(query, key, value, config.window, places, at)

    def _selected(self, query, arrays, places, positions, index, real):
        """Attention to the tokens of the listed blocks: index and real [B, K, T, n]."""
        size, (batch, kv_heads) = self.config.select_block, query.shape[:2]
        token = index[..., None] * size + torch.arange(size, device=query.device)  # positions [B, K, T, n, l']
        mask = (real[..., None] & (token <= positions[:, None, :, None, None])).flatten(-2)
        column = (token.flatten(-2) + places.start[:, None, None, None]).clamp(0, arrays["key_slc"].shape[2] - 1)
        row = torch.arange(batch, device=query.device)[:, None, None, None]
        head = torch.arange(kv_heads, device=query.device)[:, None, None]
        key, value = (
            arrays[name][row, head, column].float() for name in ("key_slc", "value_slc")
        )  # [B, K, T, n l', F]
        scores = torch.einsum("bkgth,bktsh->bkgts", query.float(), key) * query.shape[-1] ** -0.5
        return torch.einsum("bkgts,bktsv->bkgtv", _softmax(scores, mask[:, :, None]), value)


class NSADenseAttention(nn.Module):
    """Attention to all tokens before, or to the last `window`: a layer of a pattern that is not sparse."""

    def __init__(self, config, window=None):
        super().__init__()
        self.config, self.window = config, window
        n, k, h, v = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.value_head_dim
        for name, width in (("q", n * h), ("k", k * h), ("v", k * v)):
            setattr(self, f"{name}_proj", nn.Linear(config.hidden_size, width, bias=config.qkv_bias))
        self.o_proj = nn.Linear(n * v, config.hidden_size, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (NSARMSNorm(h, config.rms_norm_eps) for _ in range(2))

    def forward(self, x, places, turns, block_turns, state=None):
        """As `NSAttention`, whose arguments these are."""
        kv_heads, end = self.config.num_key_value_heads, places.past + places.length
        query, key = _heads(self.q_proj(x), self.config.num_attention_heads), _heads(self.k_proj(x), kv_heads)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        key, value = _turn(key, turns), _heads(self.v_proj(x), kv_heads)
        if state:
            key, value = torch.cat([state["key"], key], dim=2), torch.cat([state["value"], value], dim=2)
        window = self.window or end
        if state is not None:
            first = 0 if self.window is None else max(key.shape[2] - window + 1, 0)
            state.update(key=key[:, :, first:], value=value[:, :, first:])
        query = _turn(query, turns).unflatten(1, (kv_heads, -1))  # [B, K, G, T, H]
        step = max(_LARGEST_ARRAY // (query[:, :, :, 0, 0].numel() * key.shape[2]), 1)
        pieces = [
            _near(query[..., at : at + step, :], key, value, window, places, at) for at in range(0, places.length, step)
        ]
        return self.o_proj(torch.cat(pieces, dim=3).flatten(1, 2).transpose(1, 2).flatten(2).to(x.dtype))
