"""Run files and site files: frozen sections, unknown keys refused, cross-checks. The docstring under a field is its help.

A run file (configs/*.toml) says what is trained and how; every peer of a run has the same one. A site file
(peers/*.toml) says where one peer runs: its device, addresses, links and emulation. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class RunSection(Section):
    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """Name of the run and of its folder."""
    folder: str = "runs"
    """Folder that holds the runs; a peer writes to FOLDER/ID/SITE/."""
    seed: int = 0
    """Seeds the initial weights and the order of the data."""
    rounds: PositiveInt = 12
    """Rounds to commit in total, over all restarts."""
    min_peers: PositiveInt = 1
    """The first plan waits for this many trainers, and the voters never become fewer."""
    target_ppl: PositiveFloat | None = None
    """Validation perplexity whose first crossing is reported as time to target."""
    validate_every_rounds: PositiveInt = 1
    """The anchor is validated every so many rounds."""
    fresh: bool = False
    """Start anew: the old folder is moved aside."""


class ModelSection(Section):
    path: str = ""
    """Folder or hub id of a causal language model; empty: the Llama described by the fields below."""
    pretrained: bool = False
    """With `path`: start from its weights (from_pretrained), not from new ones (from_config)."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream; an even multiple of heads."""
    intermediate_size: PositiveInt = 352
    """Width of the MLP."""
    layers: PositiveInt = 4
    """Transformer blocks."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt = 4
    """Heads of keys and values; they divide heads."""
    tie_embeddings: bool = True
    """One matrix for input and output embeddings."""
    sequence_length: PositiveInt = 128
    """Tokens per training sequence."""
    autocast: Literal["auto", "off", "bf16"] = "auto"
    """bf16 autocast; auto: on where the device has it natively. Weights stay fp32."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """How attention is computed: sdpa, fused; eager, matrix by matrix (on a CPU the faster one for short sequences in bf16, but
    its memory grows with the square of the length). auto: what the architecture prefers."""
    compile: bool = False
    """Training steps through torch.compile: faster, after some seconds at the start. On a CPU it needs a C++ compiler."""
    gradient_checkpointing: bool = False
    """Keep a block's input alone and compute it again in the backward pass: less memory, slower steps."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are, by patterns over their names (`*embed_tokens*`): neither trained nor exchanged."""


class DatasetSection(Section):
    source: Literal["python-stdlib", "text", "jsonl"] = "python-stdlib"
    """The running Python's own sources, text files, or JSONL files."""
    paths: tuple[str, ...] = ()
    """Files or glob patterns for text and jsonl (.gz and .zst are read as they are)."""
    field: str = "text"
    """The jsonl field that holds the document."""
    tokenizer: str = "bytes"
    """`bytes`, or a Hugging Face tokenizer: folder, tokenizer.json or hub id."""
    validation_sequences: PositiveInt = 64
    """Sequences held out of training, taken from whole documents."""
    shuffle: bool = True
    """A new order of the sequences each epoch."""
    read_seconds: PositiveFloat = 60.0
    """A data source that is silent for so long: a start ends with exit code 75, a round goes on without this peer."""
    keep_tokens: bool = True
    """Tokens are kept in ~/.cache/geomesh/tokens (XDG_CACHE_HOME), for all peers of a host: the next start reads no text."""


class InnerSection(Section):
    optimizer: Literal["adamw", "lion"] = "adamw"
    """Of the inner steps; its moments stay with each peer."""
    learning_rate: PositiveFloat = 1e-3
    """Peak of the inner learning rate, at reference_batch."""
    min_learning_rate_share: Share = 0.1
    """The cosine ends at this share of the learning rate."""
    warmup_tokens: int = Field(default=0, ge=0)
    """Global tokens over which the learning rate rises from 0."""
    total_tokens: PositiveInt = 1_000_000
    """Global tokens at which the cosine ends."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the optimizer's moments."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled; on matrices, not on vectors."""
    clip_norm: PositiveFloat | None = 1.0
    """Gradients of a larger norm are scaled down to it; None: never."""
    reference_batch: PositiveInt = 8
    """Sequences a step at which the learning rate is as given; others scale with the square root, within [0.5, 2]."""
    scale_learning_rate: Literal["sqrt", "none"] = "sqrt"
    """How the learning rate follows a batch that is not reference_batch."""
    micro_batch: PositiveInt | None = None
    """Sequences per forward pass; None: the whole batch if it fits."""
    max_skipped_steps: PositiveInt = 50
    """A step whose gradient is not finite is skipped and counted; so many in a row end the peer with exit code 4."""


class OuterSection(Section):
    learning_rate: PositiveFloat = 0.7
    """Step of the anchor along the mean delta."""
    momentum: Share = 0.9
    """Of the outer optimizer, which is the same on all peers."""
    nesterov: bool = True
    """Nesterov momentum rather than plain."""


class CodecSection(Section):
    payload: Literal["sign", "fp32", "fp16", "int8"] = "sign"
    """What a contribution carries: signs and magnitudes, or plain numbers for comparison."""
    magnitude: Literal["l1", "rms"] = "l1"
    """What a magnitude is of its tensor or row: mean of absolute values, or root of mean square."""
    granularity: Literal["tensor", "row"] = "tensor"
    """One magnitude per tensor or per row; embeddings always have one per row."""
    residual: bool = False
    """Carry what the bits lost into the next round, per peer."""
    residual_decay: Share = 1.0
    """Share of the residual that is carried on."""
    second_phase_bits: Literal[1, 2, 4, 8] = 2
    """Bits a parameter of a reducer's answer to signs; plain payloads are answered in kind."""


class PlannerSection(Section):
    mode: Literal["planned", "uniform", "fixed"] = "planned"
    """planned: from measured speeds, every round; uniform: the same batch and steps for all; fixed: as `fixed` says."""
    round_tokens: PositiveInt = 65_536
    """Tokens a round that the planner aims at, over all members."""
    max_round_tokens: PositiveInt | None = None
    """Rounds may be as long as this where the exchange would else take more than exchange_share; None: never longer than
    round_tokens."""
    min_steps: PositiveInt = 4
    """Fewest inner steps of a member."""
    max_steps: PositiveInt = 500
    """Most inner steps of a member."""
    max_steps_ratio: PositiveFloat = 4.0
    """Largest allowed ratio of inner steps between two members."""
    exchange_share: Share = 0.05
    """Share of a round that the exchange should take at most: rounds are made longer for it, up to max_round_tokens."""
    critical_batch_tokens: PositiveInt | None = None
    """Tokens a step beyond which a larger batch stops helping; None: unknown, no discount."""
    batch: PositiveInt = 8
    """Batch of every member in the modes uniform and fixed (fixed: unless `fixed` names the site)."""
    inner_steps: PositiveInt = 20
    """Inner steps of every member in the modes uniform and fixed (fixed: unless `fixed` names the site)."""
    fixed: dict[str, tuple[PositiveInt, PositiveInt]] = {}
    """Mode fixed: batch and inner steps by site name."""
    topology: Literal["auto", "gather", "reduce"] = "auto"
    """auto: the faster by prediction in mode planned, gather in the others."""
    grace_seconds: PositiveFloat = 2.0
    """A member later than its predicted finish by this (and 20%) is asked to close."""
    overlap: Literal["none", "delayed"] = "none"
    """delayed: whoever waits for a round's update begins the next round, and applies the update when it is there. Mode planned
    only."""


class NetSection(Section):
    listen: str = "/ip4/127.0.0.1/tcp/0"
    """Address to listen on (a libp2p multiaddress)."""
    announce: str = ""
    """Address that others dial; empty: the one listened on. No wildcard, no port 0."""
    seeds: tuple[str, ...] = ()
    """Addresses of peers to meet the run through (/ip4/.../tcp/.../p2p/ID)."""
    streams: PositiveInt = Field(default=8, le=16)
    """Parallel libp2p streams to each peer for bulk bytes."""
    upload_mbps: PositiveFloat | None = None
    """Most that this peer sends in bulk, to all others together, in Mbit/s; None: no limit. Control is not held up by it, and
    what it relays for others (`relay`) does not count."""
    most_peers: PositiveInt = 128
    """Other peers at one time; a further one is refused, and told so, until one of them is gone."""
    chunk_bytes: PositiveInt = Field(default=131_072, le=1_048_576)
    """Size of a piece of an exchange."""
    filler: bool = True
    """Open TCP's windows before an exchange with up to 1 MiB of filler to each distant peer: once for each connection, and
    before every exchange where the kernel closes windows of idle connections (net.ipv4.tcp_slow_start_after_idle)."""
    heartbeat_seconds: PositiveFloat = 1.0
    """How often peers tell each other where they are."""
    heartbeat_limit_seconds: PositiveFloat = 5.0
    """A peer not heard for this long is taken for lost. While others still train, it is planned without only after a quarter
    of the round's training; bytes are waited for longer by the measured round trip."""
    election_seconds: PositiveFloat = 3.0
    """How long a candidate waits for votes, and over what time candidates spread; longer by itself where answers have taken
    longer."""
    settle_seconds: PositiveFloat = 2.0
    """The first plan waits this long after the last trainer became ready."""
    leave_seconds: PositiveFloat = 60.0
    """A peer that is stopped waits this long at most for a round without it: make it longer than two rounds."""
    reach_seconds: PositiveFloat = 60.0
    """How long to try to reach the run before giving up with exit code 3."""
    daemon_start_seconds: PositiveFloat = 60.0
    """How long the libp2p daemon may take to start."""
    port_mapping: bool = False
    """Ask routers to map the port (UPnP, NAT-PMP)."""
    relay: bool = False
    """Relay for peers of the run that cannot be dialled, and use such relays if this peer is one of them (docs/relay.md)."""
    relay_bytes: PositiveInt = 2**40
    """As a relay: bytes each way that one relayed connection may carry."""
    relay_seconds: PositiveInt = Field(default=2_592_000, le=2**31)
    """As a relay: how long one relayed connection may live."""
    join_secret_file: str = ""
    """File with a secret that all peers of a closed run share; empty: anybody may join."""
    allow: tuple[str, ...] = ()
    """Peer ids that may join; empty: anybody (or whoever has the secret)."""


class SaveSection(Section):
    snapshot_every_rounds: PositiveInt = 5
    """Rounds from one snapshot to the next."""
    keep_snapshots: PositiveInt = Field(default=2, ge=2)
    """Newest snapshots kept on disk."""
    keep_updates: PositiveInt = 50
    """Updates kept on disk behind the newest snapshot, for those who catch up."""
    keep_bytes: PositiveInt | None = None
    """Most bytes of snapshots and updates together in a peer's folder: beyond it the oldest go, but for two snapshots and the
    updates after them; None: no limit but the counts."""


class MetricsSection(Section):
    host: str = "127.0.0.1"
    """Address that metrics are served on; 0.0.0.0 for all of this host's."""
    port: int = Field(default=0, ge=0, le=65535)
    """Prometheus port of the peer; 0: a free one, printed at start."""


class RunConfig(Section):
    run: RunSection
    model: ModelSection = ModelSection()
    dataset: DatasetSection = DatasetSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    codec: CodecSection = CodecSection()
    planner: PlannerSection = PlannerSection()
    net: NetSection = NetSection()
    save: SaveSection = SaveSection()
    metrics: MetricsSection = MetricsSection()


# ---------------------------------------------------------------- site files


class SiteSection(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Unique in a run; peers are ordered by it wherever an order matters."""
    region: str = ""
    trains: bool = True
    """false: an observer, which follows the run and never counts."""


class DeviceSection(Section):
    name: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")
    """auto, cpu, cuda or cuda:N."""
    threads: PositiveInt | None = None
    """torch threads; None: torch's own choice (1 when emulated)."""
    max_batch: PositiveInt | None = None
    """Never more sequences a step than this."""
    ranks: PositiveInt = 1
    """So many devices share each batch, from `name` on (cuda:0, cuda:1, ...; on a CPU: replicas). Outside they are one peer."""
    profile: str = ""
    """Profile file written by `geomesh profile`; empty: measured at the first start, and again once it no longer holds."""


class EmulationSection(Section):
    """A slower or faster device than the real one: each inner step really runs, then waits for its emulated time.

    step_seconds(batch) = time_scale * (fixed_seconds + batch * sequence_seconds); only ratios between sites matter.
    """

    device: str
    """What is emulated, for reports."""
    fixed_seconds: float = Field(ge=0)
    sequence_seconds: PositiveFloat
    max_batch: PositiveInt
    time_scale: PositiveFloat | None = None
    """None: found at start, so that the fastest peer of this host is slow enough to be real."""


class LinkSection(Section):
    """Emulation of the way from this site to another: added delay and a cap on the rate."""

    rtt_ms: float = Field(default=0.0, ge=0)
    mbps: PositiveFloat | None = None


class SiteConfig(Section):
    site: SiteSection
    device: DeviceSection = DeviceSection()
    emulation: EmulationSection | None = None
    links: dict[str, LinkSection] = {}
    """By site name; `default` holds for all that are not named. Each holds for what this site
    sends; what it receives is emulated by the other end."""
    net: dict[str, object] = {}
    """Overrides of the run file's [net] for this site."""
    metrics: dict[str, object] = {}
    """Overrides of the run file's [metrics] for this site."""
