"""Divide a decoder among ranks: which layers, heads, vocabulary and experts each of them holds.

Tensor parallelism (arXiv 1909.08053): queries, keys, values, gate and up are cut by their outputs, the output
projection and down by their inputs, so that a rank's result for a block is a summand of it. With latent
attention each rank computes all latents, and from them the queries, keys and values of its own heads.
Recurrent states, and the convolution before them, are cut by heads.
Embedding and head are cut by the vocabulary. Each rank holds whole norms and routers. Experts are cut as a
dense MLP is, or spread: then every rank computes its own experts for all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.config import MLP_ROLES, DecoderConfig, MixtureConfig, RecurrentConfig

Slices = tuple[slice, ...]  # slices of a tensor's first dimensions; later dimensions are whole

# Tensors of recurrent layers that have the queries, keys and values of all heads one after the other
THREEFOLD = ("in_proj_qkv", "conv1d")
# What every rank holds whole of them: norms, and the first of two linears that lead to decays and gates
WHOLE = ("f_a_proj", "g_a_proj", "norm", "o_norm")


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `tensor` of `tensors` in stage `stage` of `stages`, counted from 0.

    The stages hold consecutive layers; the first has the embedding, the last the norm and the head. The
    experts of each layer are spread over `experts` parts of the tensor ranks, which are neighbours in equal
    numbers; the neighbours of a part divide each of its experts. Each page of the cache is divided between
    `contexts` neighbours, which would hold the same otherwise. With `drafts_from_tokens`, a head in the last
    stage reads the embedding, which that stage then holds as well.
    """

    tensor: int = 0
    tensors: int = 1
    stage: int = 0
    stages: int = 1
    experts: int = 1
    contexts: int = 1
    drafts_from_tokens: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.tensor < self.tensors, f"rank {self.tensor} of {self.tensors}"
        assert 0 <= self.stage < self.stages, f"stage {self.stage} of {self.stages}"

    @staticmethod
    def of_rank(rank: int, tensors: int, stages: int, experts: int = 1, contexts: int = 1) -> Share:
        """Return the share of a rank among all. The last stage, which samples, has the first ranks."""
        return Share(rank % tensors, tensors, stages - 1 - rank // tensors, stages, experts, contexts)

    @property
    def of_an_expert(self) -> tuple[int, int]:
        """The index of this rank among those that divide its experts, and their number."""
        count = self.tensors // self.experts
        return self.tensor % count, count

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def within_stage(self) -> Share:
        """The share of a head that drafts, which one stage holds alone."""
        return replace(self, stage=0, stages=1)

    def layers(self, config: DecoderConfig) -> range:
        """Return the layers that this stage holds; all stages hold equally many, or one more than others."""
        first, stop = (each * config.num_layers // self.stages for each in (self.stage, self.stage + 1))
        return range(first, stop)

    def most_layers(self, config: DecoderConfig) -> int:
        """Return the largest number of layers of any stage, which all stages must know alike."""
        return -(-config.num_layers // self.stages)

    def holds_embedding(self, config: DecoderConfig) -> bool:
        """Whether this stage looks up tokens, or has a head that is tied to the embedding."""
        return self.is_first or (self.is_last and (config.tie_embeddings or self.drafts_from_tokens))

    def is_elsewhere(self, name: str, config: DecoderConfig) -> bool:
        """Whether the checkpoint's tensor `name` belongs to other stages, or other ranks' experts."""
        if name.startswith("model.layers."):
            number = name.split(".")[2]
            known = range(config.layers_behind.stop)
            if number.isdecimal() and int(number) in self.layers(config):
                return self.is_others_expert(name, config, int(number), f"model.layers.{number}.")
            return number.isdecimal() and int(number) in known
        if name.startswith("model.embed_tokens."):
            return not self.holds_embedding(config)
        return name.startswith("lm_head.") and not self.is_last

    def is_others_expert(self, name: str, config: DecoderConfig, layer: int, prefix: str) -> bool:
        """Whether `name` belongs to an expert of this layer, with this prefix, that only other ranks hold."""
        mixture = config.mixture_of(layer)
        if mixture is None or self.experts == 1:
            return False
        number = name.removeprefix(f"{prefix}{mixture.block}.experts.").partition(".")[0]
        is_known = number.isdecimal() and int(number) < mixture.num_experts
        return is_known and mixture.places(layer).index(int(number)) not in self.places(mixture)

    def places(self, mixture: MixtureConfig) -> range:
        """Return the places of the experts on this rank."""
        count = mixture.num_experts // self.experts
        first = self.tensor // self.of_an_expert[1] * count
        return range(first, first + count)

    def part(self, config: DecoderConfig) -> DecoderConfig:
        """Return the decoder that this rank computes; raises ValueError if the ranks cannot share `config`.

        With fewer key-value heads than ranks, several ranks hold the same head. The vocabulary is rounded up,
        so that all ranks hold equally many rows: the rows after the last token are zero.
        """
        check_experts(config, self.tensors, self.experts)
        check_ranks(config, self.tensors, self.experts)
        check_stages(config, self.stages)
        layers, mixture, recurrent = self.layers(config), config.mixture, config.recurrent
        if mixture is not None:
            mixture = replace(
                mixture,
                inner_size=mixture.inner_size // self.of_an_expert[1],
                shared_size=mixture.shared_size // self.tensors,
                placement=mixture.placement[layers.start : layers.stop],
                held=None if self.experts == 1 else self.places(mixture),
            )
        if recurrent is not None:
            recurrent = replace(
                recurrent,
                num_key_heads=recurrent.num_key_heads // self.tensors,
                num_value_heads=recurrent.num_value_heads // self.tensors,
            )
        return replace(
            config,
            layers=config.layers[layers.start : layers.stop],
            first_layer=layers.start,
            mixture=mixture,
            recurrent=recurrent,
            num_heads=config.num_heads // self.tensors,
            num_kv_heads=max(1, config.num_kv_heads // self.tensors),
            intermediate_size=config.intermediate_size // self.tensors,
            vocab_size=-(-config.vocab_size // self.tensors),
        )

    def tokens(self, config: DecoderConfig) -> range:
        """Return the token ids whose rows of embedding and head this rank holds; none if others hold all."""
        size = -(-config.vocab_size // self.tensors)
        first, stop = (min(rank * size, config.vocab_size) for rank in (self.tensor, self.tensor + 1))
        return range(first, stop)

    def slices(self, name: str, config: DecoderConfig) -> Slices:
        """Return which part of the checkpoint's tensor `name` this rank reads; with one rank, nothing is cut.

        A bias that is added to a sum over all ranks is read by the first alone, and is zero on the others.
        """
        if self.tensors == 1:
            return ()
        if (recurrent := self._recurrent_tensor(name, config)) is not None:
            return self._recurrent_slices(*recurrent)
        linear, _, kind = name.rpartition(".")
        role = linear.rpartition(".")[2]
        inner, (rank, ranks) = config.intermediate_size, (self.tensor, self.tensors)
        if config.mixture is not None and ".experts." in linear:
            inner, (rank, ranks) = config.mixture.inner_size, self.of_an_expert
            role = dict(zip(config.mixture.roles, MLP_ROLES))[role]
        elif config.mixture is not None and f".{config.mixture.shared_block}." in linear:
            inner = config.mixture.shared_size
        if ranks == 1:
            return ()
        match role:
            case "embed_tokens" | "lm_head":
                tokens = self.tokens(config)
                return (slice(tokens.start, tokens.stop),)
            case "q_proj" | "q_b_proj":
                return (_equal(config.num_heads * config.query_dim, rank, ranks),)
            case "kv_b_proj" if config.latent is not None:
                width = config.latent.nope_dim + config.latent.value_dim
                return (_equal(config.num_heads * width, rank, ranks),)
            case "q_a_proj" | "kv_a_proj_with_mqa" | "eh_proj" | "fc" | "wq_b" | "wk" | "weights_proj":
                return ()
            case "k_proj" | "v_proj":
                return (self._kv_heads(config),)
            case "gate_proj" | "up_proj":
                return (_equal(inner, rank, ranks),)
            case "o_proj" | "down_proj" if kind == "weight":
                is_output = role == "o_proj"
                inputs = config.num_heads * config.value_dim if is_output else inner
                return (slice(None), _equal(inputs, rank, ranks))
            case "o_proj" | "down_proj" if kind == "bias" and rank:
                return (slice(0, 0),)
            case "o_proj" | "down_proj":
                return ()
        assert role.endswith(("norm", "gate")), f"say which part of {name} a rank holds"
        return ()

    def ranges(self, name: str, config: DecoderConfig) -> Slices:
        """Return the rows that this rank reads of a tensor, one range after the other, if they are several.

        Otherwise there are none, and `slices` says what it reads.
        """
        found = None if self.tensors == 1 else self._recurrent_tensor(name, config)
        if found is None or found[1].partition(".")[0] not in THREEFOLD:
            return ()
        parts, first = [], 0
        for width in found[0].widths:
            own = self._equal(width)
            parts.append(slice(first + own.start, first + own.stop))
            first += width
        return tuple(parts)

    def _recurrent_tensor(self, name: str, config: DecoderConfig) -> tuple[RecurrentConfig, str] | None:
        """Return the sizes of a layer with a state, and the name within it of a tensor; None for others."""
        parts = name.split(".", 4)
        if parts[:2] != ["model", "layers"] or len(parts) < 5 or int(parts[2]) >= config.num_layers:
            return None
        recurrent = config.recurrent_of(int(parts[2]))
        return (recurrent, parts[4]) if recurrent is not None and parts[3] == recurrent.block else None

    def _recurrent_slices(self, recurrent: RecurrentConfig, name: str) -> Slices:
        """Return the slices of a tensor of a layer with a state, which is cut by heads."""
        shape, role = recurrent.vectors().get(name), name.partition(".")[0]
        if role in WHOLE or role in THREEFOLD:
            return ()
        if role == recurrent.output:
            if name.endswith(".weight"):
                return (slice(None), self._equal(recurrent.widths[2]))
            return (slice(0, 0),) if self.tensor and name.endswith(".bias") else ()
        if shape is None:
            return (self._equal(next(size for linear, _, size in recurrent.linears(0) if linear == role)),)
        axis = next(axis for axis, size in enumerate(shape) if size > 1)
        return (*(slice(None),) * axis, self._equal(shape[axis]))

    def _equal(self, size: int) -> slice:
        return _equal(size, self.tensor, self.tensors)

    def heads(self, config: DecoderConfig) -> Slices:
        """Return the slice of this rank's query heads, for a tensor with a number for each head."""
        return () if self.tensors == 1 else (_equal(config.num_heads, self.tensor, self.tensors),)

    def cached(self, config: DecoderConfig) -> list[object]:
        """Return what decides the bytes of this rank's pages: ranks where it is equal keep equal pages."""
        layers, heads = self.layers(config), self._kv_heads(config)
        is_own = config.recurrent is not None  # states are divided by their own heads
        return [
            [self.tensors, self.stages, self.experts, self.contexts],
            [layers.start, layers.stop],
            None if config.latent is not None else [heads.start, heads.stop],
            self.tensor % self.contexts,
            self.tensor if is_own else None,
        ]

    def _kv_heads(self, config: DecoderConfig) -> slice:
        """Return the rows of the key-value heads that this rank's query heads read."""
        first = self.tensor * config.num_kv_heads // self.tensors
        stop = first + max(1, config.num_kv_heads // self.tensors)
        return slice(first * config.head_dim, stop * config.head_dim)


def check_ranks(config: DecoderConfig, count: int, experts: int = 1) -> None:
    """Raise ValueError unless `count` ranks can share each layer evenly, with experts in `experts` parts."""
    if count >= 1 and _can_share(config, count, experts):
        return
    all_counts = range(experts, config.num_heads + 1, experts)
    possible = [str(each) for each in all_counts if _can_share(config, each, experts)]
    inner, states = " and ".join(map(str, _inner_sizes(config))), ""
    if config.recurrent is not None:
        states = f", {config.recurrent.num_key_heads} key heads of recurrent states"
    raise ValueError(
        f"{count} tensor ranks cannot share {config.num_heads} query heads, {config.num_kv_heads} key-value"
        f" heads{states} and an intermediate size of {inner} evenly"
        + (f", with experts in {experts} parts" if experts > 1 else "")
        + (f"; choose one of {', '.join(possible)}" if possible else "; choose fewer parts")
    )


def check_experts(config: DecoderConfig, tensors: int, count: int) -> None:
    """Raise ValueError unless whole experts can be spread over `count` parts of the tensor ranks."""
    if count == 1:
        return
    if config.mixture is None or not config.num_mixtures:
        raise ValueError(f"the model has no experts to spread over {count} parts of the ranks; set it to 1")
    total = config.mixture.num_experts
    possible = [str(each) for each in range(1, tensors + 1) if tensors % each == 0 == total % each]
    if str(count) not in possible:
        raise ValueError(
            f"{total} experts cannot be spread evenly over {count} parts of {tensors} tensor ranks;"
            f" choose one of {', '.join(possible)}"
        )


def most_contexts(config: DecoderConfig, tensors: int) -> int:
    """Return how many neighbours of the tensor ranks hold the same keys and values of a layer: all latents.

    It is 1 as well where a layer keeps what is not divided: a window, a state, index keys, or sinks.
    """
    if config.recurrent is not None or config.has_sinks or any(each is not None for each in config.windows):
        return 1
    if config.latent is not None:
        return tensors if config.latent.index is None else 1
    return max(1, tensors // config.num_kv_heads)


def check_contexts(config: DecoderConfig, tensors: int, count: int) -> None:
    """Raise ValueError unless `count` neighbours can divide each page of the cache between them."""
    most = most_contexts(config, tensors)
    possible = [str(each) for each in range(1, most + 1) if most % each == 0]
    if str(count) in possible:
        return
    why = f"{most} of {tensors} tensor ranks hold the same keys and values"
    for has, what in (
        (config.recurrent is not None, "recurrent states"),
        (config.has_sinks, "attention sinks"),
        (config.latent is not None and config.latent.index is not None, "index keys of sparse attention"),
        (any(each is not None for each in config.windows), "sliding windows"),
    ):
        why = f"the model has {what}, which are not divided" if has else why
    raise ValueError(
        f"{count} ranks cannot divide a page of the cache: {why}; choose {' or '.join(possible)}"
    )


def check_stages(config: DecoderConfig, count: int) -> None:
    """Raise ValueError unless each of `count` stages has a layer."""
    if count > config.num_layers:
        raise ValueError(
            f"{count} stages have {config.num_layers} layers; choose a number from 1 to {config.num_layers}"
        )


def _equal(size: int, rank: int, ranks: int) -> slice:
    part = size // ranks
    return slice(rank * part, (rank + 1) * part)


def _can_share(config: DecoderConfig, count: int, experts: int) -> bool:
    """Whether all sizes divide evenly.

    The ranks that hold a key-value head must also have exactly its query heads.
    """
    *sizes, of_expert = _inner_sizes(config)
    if config.recurrent is not None and config.recurrent.num_key_heads % count:
        return False
    if config.num_heads % count or any(size % count for size in sizes) or of_expert % (count // experts):
        return False
    return not (config.num_kv_heads % count and count % config.num_kv_heads)


def _inner_sizes(config: DecoderConfig) -> list[int]:
    """Return the inner sizes of dense MLPs and of experts, as far as there are any.

    Chosen experts come last.
    """
    mixture, has_dense = config.mixture, config.num_mixtures < config.num_layers
    sizes = [config.intermediate_size] if has_dense else []
    if mixture is not None and config.num_mixtures:
        sizes += [*([mixture.shared_size] if mixture.shared_size else []), mixture.inner_size]
    return sizes
