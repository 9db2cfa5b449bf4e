"""Configuration: the trainer's schema, defaults and validation, whose rules lie in rules.py.

A file in configs/ calls `default_config()`, edits what differs and returns it. `validate` is run after flag overrides
are parsed, reports every problem at once, and says how to fix each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict

from nsa_jax.bounds import CHOICES, value_of
from nsa_jax.fields import SOURCE_FIELDS, ConfigError, Problem, check_fields, shown, source_configs, walk
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.rope import RopeScaling
from nsa_jax.rules import FATAL, GENERATED, attention_kinds, broken_rules, geometry

__all__ = [
    "CHOICES",
    "FATAL",
    "ConfigError",
    "GroupFactors",
    "NSAConfig",
    "Problem",
    "accept",
    "check",
    "default_config",
    "nsa_config",
    "validate",
]


@dataclasses.dataclass(frozen=True)
class GroupFactors:
    """What learning rate or weight decay is multiplied by, for groups of parameters; all others have 1.

    Attributes:
      embedding: the embedding, which is the output head too if they are tied.
      head: the output head, if it is a matrix of its own.
      gates: NSA's gates, biases and columns of the projection; a model converted from dense attention has new ones.
      compressor: NSA's compressors of keys and values, new in a converted model as well.
    """

    embedding: float = 1.0
    head: float = 1.0
    gates: float = 1.0
    compressor: float = 1.0


def default_config() -> ConfigDict:
    """Every field of a training run with its default: the schema. The result is locked (unknown fields raise)."""
    c = ConfigDict()
    c.name = "default"  # the run's name; the default workdir is runs/<name>
    c.seed = 0  # one seed for parameters, dropout and data order
    c.allow_dense_regime = False  # accept sequences so short that NSA reads everything anyway
    c.compilation_cache_dir = ""  # compiled programs; empty: compiled in ~/.cache/nsa_jax ($NSA_JAX_CACHE); off: none

    c.model = m = ConfigDict()
    m.attention = "nsa"  # nsa | dense | window (sliding window alone, a baseline)
    m.layer_pattern = ()  # kinds repeated over the layers, such as ("nsa", "dense"), in place of attention; (): none
    m.vocab_size = 0  # 0: the tokenizer's; otherwise at least the tokenizer's (padding for efficiency)
    m.dim = 768  # D, model width
    m.num_layers = 12  # transformer blocks
    m.num_heads = 12  # N, query heads
    m.num_kv_heads = 2  # K, key/value heads; G = N / K query heads share one block list
    m.head_dim = 64  # H, of queries and keys
    m.value_head_dim = 0  # V; 0: head_dim
    m.mlp_dim = 0  # SwiGLU hidden width; 0: 8/3 of dim rounded up to a multiple of 64
    m.rope_theta = 10_000.0  # RoPE base; raise it for long sequences
    m.rotary_dim = 0  # features of a head that RoPE turns; 0: head_dim
    m.qk_norm = False  # RMSNorm of queries and keys per head, before RoPE (Qwen 3)
    m.qkv_bias = False  # biases of queries, keys and values (Qwen 2)
    m.out_bias = False  # bias of attention's output projection
    m.mlp_bias = False  # biases of the MLP's projections
    m.logit_soft_cap = 0.0  # c: logits are c * tanh(logits / c) (Gemma 2); 0: none
    m.norm_eps = 1e-6  # added to the mean square in RMSNorm
    m.init_std = (
        0.02  # of all projections; those that write to the residual stream are scaled by 1/sqrt(2 * num_layers)
    )
    m.dropout = 0.0  # on the outputs of attention and MLP, training only
    m.tie_embeddings = True  # output head shares the embedding matrix
    m.compressor = "mlp"  # mlp (learned, the paper's) | mean
    m.implementation = "auto"  # auto | reference | xla | pallas: which implementation serves the NSA ops
    m.compute_dtype = "bfloat16"  # of activations and matrix products; statistics stay float32
    m.matmul_dtype = ""  # float8: of attention's and the MLP's projections in training; empty: compute_dtype
    m.param_dtype = "float32"  # of parameters and optimizer state
    m.scan_layers = True  # one traced layer scanned num_layers times: compiles faster, same numbers, slower steps
    m.remat = "block"  # none | block | attention_saved | dots_saved | offload | full: what the backward pass recomputes

    m.nsa = n = ConfigDict(dataclasses.asdict(NSAConfig()))  # see NSAConfig
    n.selector = (
        "compressed"  # compressed (NSA) | mean_key (blocks by their mean keys, as in MoBA; no compressed branch)
    )
    n.shared_kv = False  # one projection of keys and one of values for all branches, instead of one for each
    n.gate_bias = 0.0  # where the bias of every gate begins; the gate is its sigmoid at first: 0.5, or 0.88 for 2
    m.rope_scaling = ConfigDict(dataclasses.asdict(RopeScaling()))  # see RopeScaling

    c.data = d = ConfigDict()
    d.source = "stdlib"  # stdlib | text | trees | tokens | hf | task | synthetic
    d.sources = ConfigDict()  # several sources: NAME: {weight: share of tokens, and fields as here}; docs/data.md
    d.files = ()  # text: files or globs, UTF-8, plain, .gz or .zst; tokens: .bin files; trees: folders, (): packages
    d.text_separator = ""  # text: string between the documents of a file; empty: a file is one document
    d.tree_characters = 65_536  # trees: folders with less text are left out
    d.tasks = ()  # task: NAME or NAME:WEIGHT, such as ("needle", "variables2:0.5"); (): all; docs/quality.md
    d.task_length = 0  # task: tokens of the shortest document, lengths are log-uniform up to a row; 0: one fills a row
    d.task_answers_only = True  # task: only tokens of answers count in the loss; False: all tokens
    d.task_answer_weight = 1.0  # task: how much more than a token of text a token of an answer counts in training
    d.hf_path = ""  # hf: first argument of datasets.load_dataset, e.g. HuggingFaceFW/fineweb-edu, parquet, json
    d.hf_name = ""  # hf: configuration name, e.g. sample-10BT
    d.hf_data_files = ()  # hf: data_files of load_dataset, for parquet, json, text
    d.hf_split = "train"  # hf: split to read; validation documents are split off by hash
    d.hf_val_split = ""  # hf: split of held-out documents, e.g. validation; no others are held out then
    d.hf_text_field = "text"  # hf: column that holds the document
    d.hf_tokens_field = ""  # hf: column that holds the token ids of the document, instead of its text
    d.hf_streaming = False  # hf: iterate without downloading; the position goes into the checkpoint
    d.shuffle_buffer = 0  # streams: documents that are shuffled together; 0: the data set's order
    d.stream_lanes = 1  # streams: parts that are read apart; as many as processes, so that each reads only its own
    d.synthetic = "random"  # synthetic: random (uniform) | copy (a random string twice) | recall (values of keys)
    d.synthetic_vocab = 256  # synthetic: vocabulary size
    d.max_documents = 0  # stop after this many documents; 0: all
    d.tokenizer = "byte"  # byte (256 + EOS) | bpe (trained on the corpus and saved) | hf (tokenizer.json or hub id)
    d.tokenizer_path = ""  # hf: path of a tokenizer.json or a hub id
    d.tokenizer_eos = ""  # hf: end-of-document token; empty: found in the tokenizer's own files
    d.tokenizer_workers = 0  # processes that tokenise on each host; 0: one for each core
    d.bpe_vocab_size = 8192  # bpe: vocabulary size to train
    d.seq_len = 2048  # T, tokens in one row
    d.packing = True  # rows hold several documents, attention does not cross them (segment_start)
    d.packing_method = "concatenate"  # concatenate (rows are cut from the stream) | best_fit (few documents are cut)
    d.val_fraction = 0.01  # share of documents held out, chosen by a hash of their content
    d.val_files = ()  # text, tokens: files of held-out documents; no others are held out then
    d.cache_dir = ""  # tokenised corpus; default: ~/.cache/nsa_jax, or $NSA_JAX_CACHE; s3://, gs://: kept there, too
    d.num_workers = 0  # grain worker processes, not of streams; 0: threads in this process
    d.prefetch = 8  # batches prepared ahead

    c.train = t = ConfigDict()
    t.steps = 1000  # optimizer steps of the whole run
    t.batch_size = 8  # sequences per optimizer step, over all devices and accumulation
    t.grad_accum = 1  # micro-batches per optimizer step
    t.batch_ramp = ()  # ("1000:64", "5000:128"): 64 rows to step 1000, 128 to 5000, then batch_size; same micro-batch
    t.log_every = 10  # steps between log lines
    t.eval_every = 500  # steps between validations, beside those before the first step and after the last; 0: no others
    t.eval_batches = 16  # batches of each validation
    t.save_every = 500  # steps between checkpoints; 0: none
    t.keep_last = 3  # checkpoints kept besides the best
    t.keep_every = 0  # also save and keep the steps that are multiples of this, unless save_every is 0; 0: none
    t.keep_best = True  # also save at validations lower than all before, and keep the checkpoint of the lowest
    t.ema_decay = 0.0  # decay of an average of the weights, such as 0.9995, which is validated and exported; 0: none
    t.local_dir = ""  # where a run with an s3:// or gs:// workdir keeps its files; empty: runs/SCHEME/BUCKET/PATH
    t.z_loss = 0.0  # training adds this times the square of each token's logsumexp of logits, such as 1e-4; 0: none
    t.selection_loss = 0.0  # times the divergence of the scores that choose blocks from dense attention; 0: none
    t.selection_queries = 64  # queries of each row that selection_loss looks at
    t.deterministic = True  # on GPUs, sums in one order and matrix products of equal bits: runs are bit-equal
    t.xla_options = ()  # for the compiler, such as ("xla_gpu_enable_latency_hiding_scheduler=True",); docs/parallel.md
    t.offload_optimizer = False  # keep the optimizer's averages in host memory between their uses; docs/training.md
    t.reset_optimizer = False  # if a checkpoint's optimizer state does not fit config.optim, start it anew
    t.sample_tokens = 128  # length of the text sample written at each validation; 0: none
    t.sample_prompt = ""  # the sample continues this
    t.trackers = ()  # wandb, mlflow: experiment trackers that get config, rows and texts too; docs/tracking.md

    c.optim = o = ConfigDict()
    o.name = "adamw"  # adamw | muon (for the matrices of the blocks, adamw for the rest; same learning_rate)
    o.learning_rate = 3e-4  # peak
    o.schedule = "cosine"  # cosine | linear | constant | wsd (constant, then linear at the end), after warm-up
    o.warmup_steps = 100  # the learning rate rises linearly over these
    o.decay_fraction = 0.2  # wsd: share of the steps, at the end, over which the learning rate falls
    o.final_fraction = 0.1  # learning rate at the last step, as a share of the peak
    o.b1 = 0.9  # decay of the gradient's average
    o.b2 = 0.95  # decay of the squared gradient's average
    o.momentum = 0.95  # muon: decay of the sum of gradients
    o.eps = 1e-8  # added to the root of the squared gradient's average
    o.weight_decay = 0.1  # on matrices only (not norms, biases, position embeddings)
    o.clip = 1.0  # global gradient norm; 0: no clipping
    o.learning_rate_factor = ConfigDict(dataclasses.asdict(GroupFactors()))  # see GroupFactors
    o.weight_decay_factor = ConfigDict(dataclasses.asdict(GroupFactors()))  # see GroupFactors

    c.mesh = s = ConfigDict()
    s.data = -1  # devices along the data axis; -1: all that the other axes leave
    s.fsdp = 1  # devices over which parameters and optimizer state are sharded
    s.shard_optimizer = False  # split optimizer state over data too (ZeRO-1): memory for none of the traffic
    s.tensor = 1  # devices over which heads, MLP and vocabulary are split; divides num_kv_heads
    s.context = 1  # devices over which the tokens of a row are split, for rows longer than one device holds

    c.preflight = p = ConfigDict()
    p.ignore = ()  # ids of rules whose errors are accepted, such as ("R013",); recorded in env.json
    p.target = ""  # GPU to compile for where there is none, such as h100; empty: this machine
    p.devices = 1  # how many of them
    p.utilisation = 0.3  # share of the peak FLOP/s that the estimate of hours assumes; measured MFU if you have it
    p.selftest = True  # the causality self-test at the start of every run

    c.guards = g = ConfigDict()
    # An honest 85M-parameter model of the bytes of source code is at 0.4 of it after 350 steps.
    g.floor_ratio = 0.15  # stop if the loss is under this share of the bigram entropy within floor_steps; 0: off
    g.floor_steps = 1000  # how long floor_ratio applies
    g.late_floor_ratio = 0.05  # as floor_ratio, at any step
    g.skip_steps = 0  # leave out steps whose loss or gradient is not finite, so many in a row; one more stops
    g.skip_spikes = 0  # leave out steps whose loss or gradient norm is a spike, so many in a row; one more stops
    g.spike_norm = 5.0  # a gradient norm over this many times the median of the last 64 steps is a spike; 0: none is
    g.roll_back = 0  # so often, return to the last checkpoint and leave out the data since, instead of stopping
    g.max_gap = 1.5  # stop if validation loss exceeds training loss by this many nats; 0: off
    g.divergence = 2.0  # stop if the average training loss (50 steps) rises over its best by this many nats; 0: off
    g.spike = 1.0  # a loss this many nats over the usual is a spike: an alarm, or left out (skip_spikes); 0: off
    g.plateau_steps = 2000  # alarm if the loss has not fallen for so many steps; 0: off
    g.early_stop = 0  # stop after so many validations without improvement; 0: off
    g.early_stop_delta = 0.0  # nats that count as improvement
    g.health = True  # NSA health per layer at log steps
    g.min_gate_entropy = 0.5  # nats, alarm below; three equal gates have 1.10, two have 0.69
    g.max_gate_share = 0.9  # alarm if one branch gets more than this share of the gates
    g.max_collapsed = 0.2  # alarm if more than this share of gates is all on one branch (a healthy layer: up to 0.06)
    g.min_selection_gain = 0.0  # alarm if lists come less than this share of the way from random to the best; 0: off
    g.selection_from = 0.5  # share of the steps after which min_selection_gain applies
    g.stall_seconds = 600.0  # without a finished step: all stacks are written; 0: off, else at least 1
    g.stall_exit = False  # end the process then (status 75), for a supervisor to start it again
    g.heartbeat_seconds = 30.0  # between lines of heartbeat_P.jsonl
    g.upload_seconds = 3600.0  # stop if nothing could be uploaded to an s3:// or gs:// workdir for so long; 0: never
    g.peer_seconds = 30.0  # of silence, after which a process counts as gone and the others stop (status 75)

    c.lock()
    return c


def nsa_config(config: ConfigDict) -> NSAConfig:
    """The operator's config of a training config."""
    return NSAConfig(**geometry(config.model.nsa))


# Fields of config.data that only these sources read.
_READ_BY = {
    "files": ("text", "tokens", "trees"),
    **dict.fromkeys(("hf_path", "hf_name", "hf_data_files", "hf_split", "hf_text_field", "hf_tokens_field"), ("hf",)),
    "hf_streaming": ("hf",),
    "synthetic": ("synthetic",),
    "text_separator": ("text",),
    "tree_characters": ("trees",),
    **dict.fromkeys(("tasks", "task_length", "task_answers_only", "task_answer_weight"), ("task",)),
}

# Fields that have an effect only while another field has one of these values, or () is not 0.
_NEEDS = {
    "data.tokenizer_path": ("data.tokenizer", ("hf",)),
    "data.tokenizer_eos": ("data.tokenizer", ("hf",)),
    "data.bpe_vocab_size": ("data.tokenizer", ("bpe",)),
    "data.shuffle_buffer": ("data.hf_streaming", (True,)),
    "data.stream_lanes": ("data.hf_streaming", (True,)),
    **dict.fromkeys(
        ("model.compressor", "model.nsa.compress_block", "model.nsa.compress_stride"),
        ("model.nsa.selector", ("compressed",)),
    ),
    "optim.momentum": ("optim.name", ("muon",)),
    "optim.decay_fraction": ("optim.schedule", ("wsd",)),
    "optim.final_fraction": ("optim.schedule", tuple(x for x in CHOICES["optim.schedule"] if x != "constant")),
    "train.selection_queries": ("train.selection_loss", ()),
    "train.keep_every": ("train.save_every", ()),
    "guards.spike_norm": ("guards.skip_spikes", ()),
    "guards.early_stop_delta": ("guards.early_stop", ()),
    "guards.stall_exit": ("guards.stall_seconds", ()),
    "guards.selection_from": ("guards.min_selection_gain", ()),
    **dict.fromkeys(
        ("guards.min_gate_entropy", "guards.max_gate_share", "guards.max_collapsed", "guards.min_selection_gain"),
        ("guards.health", (True,)),
    ),
    "optim.learning_rate_factor.head": ("model.tie_embeddings", (False,)),
    "optim.weight_decay_factor.head": ("model.tie_embeddings", (False,)),
    **{
        f"model.rope_scaling.{field.name}": ("model.rope_scaling.kind", CHOICES["model.rope_scaling.kind"][1:])
        for field in dataclasses.fields(RopeScaling)
        if field.name != "kind"
    },
}


def _without_effect(config: ConfigDict) -> list[Problem]:
    """R063: fields that were set and that nothing reads."""
    values, defaults = dict(walk(config)), dict(walk(default_config()))
    sources = source_configs(config)
    kinds = {alone.data.source for alone in sources.values()}
    first = min(sources, key=lambda name: sources[name].data.source in GENERATED)  # the first that reads something
    # A config that is made for a dataset keeps its name and vocabulary when flags choose other data or bytes.
    made_for_dataset = values["data.hf_path"] and not ("stdlib" in kinds and kinds <= {"stdlib", *GENERATED})
    kept = {f"data.{name}" for name, readers in _READ_BY.items() if readers == ("hf",)} - {"data.hf_streaming"}
    kept = {*kept, "data.bpe_vocab_size"} if made_for_dataset else set()
    problems = []

    def report(name: str, because: str, fix: str, of_kinds: Iterable[str] = kinds) -> None:
        # Files beside a source that needs none: training on other data than those that were meant.
        severity = "error" if name.endswith(".files") and {"stdlib", *GENERATED}.issuperset(of_kinds) else "warning"
        message = f"config.{name}={shown(values[name])} has no effect, because {because}"
        default = f"at its default, {defaults[name]!r}" if name in defaults else "out"
        problems.append(Problem("R063", severity, message, f"{fix}, or leave config.{name} {default}"))

    for name, (other, needed) in _NEEDS.items():
        read = values[other] in needed if needed else bool(values[other])
        if values[name] != defaults[name] and not read and name not in kept:
            to = f"={needed[0]!r}" if needed else ""
            report(name, f"config.{other}={values[other]!r}", f"set config.{other}{to}")
    if values["data.num_workers"] and values["data.hf_streaming"] and kinds == {"hf"}:
        report("data.num_workers", "config.data.hf_streaming=True", "set config.data.hf_streaming=False")
    for name, because, fix in _without_parameters(config):
        if values[name] != defaults[name]:
            report(name, because, fix)
    for field, readers in _READ_BY.items():
        name = f"data.{field}"
        if values[name] != defaults[name] and not _is_read(config, field, readers) and name not in kept:
            fix = f"set config.data.source={readers[0]!r}"
            if reader := next((source for source, alone in sources.items() if alone.data.source in readers), ""):
                fix = f"set config.data.sources.{reader}.{field}"
            elif first and field not in SOURCE_FIELDS:
                fix += " and no config.data.sources"
            elif first:
                fix = f"set config.data.sources.{first}.source={readers[0]!r} and config.data.sources.{first}.{field}"
            report(name, _because(config, field, readers), fix)
        for source, own in config.data.sources.items():
            kind = sources[source].data.source
            if own.get(field, defaults[name]) != defaults[name] and kind not in readers:
                path = f"data.sources.{source}"
                of = f"{path if 'source' in own else 'data'}.source={shown(kind)}"
                report(f"{path}.{field}", f"config.{of}", f"set config.{path}.source={readers[0]!r}", (kind,))
    named = all("source" in fields for fields in config.data.sources.values())
    if first and named and values["data.source"] not in {defaults["data.source"], "synthetic", *kinds}:
        report("data.source", _because(config, "source"), f"set config.data.sources.{first}.source")
    return problems


def _without_parameters(config: ConfigDict) -> Iterator[tuple[str, str, str]]:
    """Fields of the groups of NSA's parameters that a model does not have: field, why, and the fix."""
    model = config.model
    for group in ("gates", "compressor"):
        if "nsa" not in attention_kinds(model):
            field, fix = "layer_pattern" if model.layer_pattern else "attention", "give a layer the attention 'nsa'"
        elif group == "compressor" and model.nsa.selector != "compressed":
            field, fix = "nsa.selector", "set config.model.nsa.selector='compressed'"
        elif group == "compressor" and model.compressor != "mlp":
            field, fix = "compressor", "set config.model.compressor='mlp'"
        else:
            continue
        because = f"config.model.{field}={shown(value_of(config, f'model.{field}'))}"
        for kind in ("learning_rate", "weight_decay"):
            yield f"optim.{kind}_factor.{group}", because, fix


def _is_read(config: ConfigDict, field: str, readers: tuple[str, ...]) -> bool:
    """Whether a source takes this field from config.data and reads it."""
    return any(
        alone.data.source in readers and not (name and field in config.data.sources[name])
        for name, alone in source_configs(config).items()
    )


def _because(config: ConfigDict, field: str, readers: tuple[str, ...] = ()) -> str:
    """What each source has instead: a kind that does not read the field, or a value of its own."""
    found = []
    for name, alone in source_configs(config).items():
        of = field if alone.data.source in readers else "source"
        own = name and of in config.data.sources[name]
        found.append(f"config.data.{f'sources.{name}.' if own else ''}{of}={shown(alone.data[of])}")
    return ", ".join(dict.fromkeys(found))


def validate(config: ConfigDict) -> list[Problem]:
    """Everything that is wrong or doubtful about a config, without touching a device, data or the network.

    Args:
      config: as `default_config` returns it, with edits. Whatever else it is, is a problem too.

    Returns:
      All problems, errors first; empty if there are none.
    """
    config, wrong, replaced = check_fields(config, default_config())
    # What a rule says about a field that has its default for the time being is not true.
    doubtful = re.compile(rf"\b(?:{'|'.join(map(re.escape, replaced))})\b") if replaced else None
    broken = broken_rules(config)
    refused = {problem.message.partition("=")[0] for problem in broken if problem.severity == "error"}
    broken += [problem for problem in _without_effect(config) if problem.message.partition("=")[0] not in refused]
    broken = [problem for problem in broken if doubtful is None or not doubtful.search(problem.message)]
    return sorted(wrong + broken, key=lambda problem: (problem.severity != "error", problem.rule))


def accept(problems: list[Problem], ignore: tuple[str, ...]) -> list[Problem]:
    """Turns errors of the rules in `config.preflight.ignore` into severity "ignored", if a run could follow."""
    return [
        dataclasses.replace(problem, severity="ignored")
        if problem.severity == "error" and problem.rule in ignore and problem.rule not in FATAL
        else problem
        for problem in problems
    ]


def check(config: ConfigDict, found: Iterable[Problem] = ()) -> list[Problem]:
    """Raises if there is an error that is not ignored; returns the rest.

    Args:
      config: as `default_config` returns it, with edits.
      found: what is known to be wrong already; it cannot be ignored.

    Raises:
      ConfigError: with every problem that was found.
    """
    clean, _, _ = check_fields(config, default_config())
    problems = [*found, *accept(validate(config), clean.preflight.ignore)]
    if any(problem.severity == "error" for problem in problems):
        raise ConfigError(problems)
    return problems
