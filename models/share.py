"""What does one of several ranks hold of a decoder that all of them compute together?

Tensor parallelism (arXiv 1909.08053): queries, keys, values, gate and up are cut by their outputs, the output
projection and down by their inputs, so that what a rank computes of a block is a summand of it. With latent
attention each rank makes the latents of all, and its own heads' queries, keys and values of them. Embedding
and head are cut by the vocabulary. Each expert is cut as a dense MLP is. Each rank holds the norms and the
routers whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.config import DecoderConfig
from models.mixture_config import MLP_ROLES

Slices = tuple[slice, ...]  # of a tensor's first dimensions; those after them are whole


@dataclass(frozen=True, slots=True)
class Share:
    """The share of rank `tensor` of `tensors` in stage `stage` of `stages`, counted from 0.

    The stages hold consecutive layers; the first has the embedding, the last the norm and the head.
    """

    tensor: int = 0
    tensors: int = 1
    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.tensor < self.tensors, f"rank {self.tensor} of {self.tensors}"
        assert 0 <= self.stage < self.stages, f"stage {self.stage} of {self.stages}"

    @staticmethod
    def of_rank(rank: int, tensors: int, stages: int) -> Share:
        """The share of a rank among all. The last stage, which samples, has the first ranks."""
        return Share(rank % tensors, tensors, stages - 1 - rank // tensors, stages)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, config: DecoderConfig) -> range:
        """Which layers this stage holds: all stages equally many, but for one."""
        first, stop = (each * config.num_layers // self.stages for each in (self.stage, self.stage + 1))
        return range(first, stop)

    def most_layers(self, config: DecoderConfig) -> int:
        """Of any stage: what all stages must do alike depends on no other."""
        return -(-config.num_layers // self.stages)

    def holds_embedding(self, config: DecoderConfig) -> bool:
        """Whether this stage looks up tokens, or has a head that is tied to what does."""
        return self.is_first or (self.is_last and config.tie_embeddings)

    def is_elsewhere(self, name: str, config: DecoderConfig) -> bool:
        """Whether the checkpoint's tensor `name` belongs to another stage alone."""
        if name.startswith("model.layers."):
            number = name.split(".")[2]
            known = range(config.num_layers + config.num_unread_layers)
            return number.isdigit() and int(number) in {*known} - {*self.layers(config)}
        if name.startswith("model.embed_tokens."):
            return not self.holds_embedding(config)
        return name.startswith("lm_head.") and not self.is_last

    def whole_name(self, name: str, config: DecoderConfig) -> str:
        """The name in the whole decoder of one of this part's linears, whose layers are counted from 0."""
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[2] = str(int(parts[2]) + self.layers(config).start)
        return ".".join(parts)

    def part(self, config: DecoderConfig) -> DecoderConfig:
        """The decoder that this rank computes; raises ValueError where the ranks cannot share `config`.

        With fewer key-value heads than ranks, several ranks hold the same head. The vocabulary is rounded up,
        so that all ranks hold equally many rows: the rows after the last token are zero.
        """
        check_ranks(config, self.tensors)
        check_stages(config, self.stages)
        layers, mixture = self.layers(config), config.mixture
        if mixture is not None:
            own = mixture.layers[layers.start : layers.stop]
            mixture = replace(
                mixture,
                inner_size=mixture.inner_size // self.tensors,
                shared_size=mixture.shared_size // self.tensors,
                layers=own,
            )
        return replace(
            config,
            num_layers=len(layers),
            windows=config.windows[layers.start : layers.stop],
            mixture=mixture,
            num_heads=config.num_heads // self.tensors,
            num_kv_heads=max(1, config.num_kv_heads // self.tensors),
            intermediate_size=config.intermediate_size // self.tensors,
            vocab_size=-(-config.vocab_size // self.tensors),
        )

    def tokens(self, config: DecoderConfig) -> range:
        """The token ids whose rows of embedding and head this rank holds; none where others hold all."""
        size = -(-config.vocab_size // self.tensors)
        first, stop = (min(rank * size, config.vocab_size) for rank in (self.tensor, self.tensor + 1))
        return range(first, stop)

    def slices(self, name: str, config: DecoderConfig) -> Slices:
        """Which part of the checkpoint's tensor `name` this rank reads; nothing is cut where there is one.

        A bias that is added to a sum of all ranks is read by the first alone, and is zero on the others.
        """
        if self.tensors == 1:
            return ()
        linear, _, kind = name.rpartition(".")
        role = linear.rpartition(".")[2]
        inner = config.intermediate_size
        if config.mixture is not None and ".experts." in linear:
            inner = config.mixture.inner_size
            role = dict(zip(config.mixture.roles, MLP_ROLES))[role]
        elif config.mixture is not None and f".{config.mixture.shared_block}." in linear:
            inner = config.mixture.shared_size
        match role:
            case "embed_tokens" | "lm_head":
                tokens = self.tokens(config)
                return (slice(tokens.start, tokens.stop),)
            case "q_proj" | "q_b_proj":
                return (self._equal(config.num_heads * config.query_dim),)
            case "kv_b_proj" if config.latent is not None:
                return (self._equal(config.num_heads * (config.latent.nope_dim + config.latent.value_dim)),)
            case "q_a_proj" | "kv_a_proj_with_mqa" | "eh_proj":
                return ()
            case "k_proj" | "v_proj":
                return (self._kv_heads(config),)
            case "gate_proj" | "up_proj":
                return (self._equal(inner),)
            case "o_proj" | "down_proj" if kind == "weight":
                is_output = role == "o_proj"
                inputs = config.num_heads * config.value_dim if is_output else inner
                return (slice(None), self._equal(inputs))
            case "o_proj" | "down_proj" if kind == "bias" and self.tensor:
                return (slice(0, 0),)
            case "o_proj" | "down_proj":
                return ()
        assert role.endswith(("norm", "gate")), f"say which part of {name} a rank holds"
        return ()

    def _equal(self, size: int) -> slice:
        part = size // self.tensors
        return slice(self.tensor * part, (self.tensor + 1) * part)

    def _kv_heads(self, config: DecoderConfig) -> slice:
        """The rows of the key-value heads that this rank's query heads read."""
        first = self.tensor * config.num_kv_heads // self.tensors
        stop = first + max(1, config.num_kv_heads // self.tensors)
        return slice(first * config.head_dim, stop * config.head_dim)


def check_ranks(config: DecoderConfig, count: int) -> None:
    """Raise ValueError unless so many ranks can share each layer evenly."""
    if count >= 1 and _can_share(config, count):
        return
    possible = [str(each) for each in range(1, config.num_heads + 1) if _can_share(config, each)]
    inner = " and ".join(map(str, _inner_sizes(config)))
    raise ValueError(
        f"{count} tensor ranks cannot share {config.num_heads} query heads, {config.num_kv_heads} key-value"
        f" heads and an intermediate size of {inner} evenly; choose one of"
        f" {', '.join(possible)}"
    )


def check_stages(config: DecoderConfig, count: int) -> None:
    """Raise ValueError unless each of so many stages has a layer."""
    if count > config.num_layers:
        raise ValueError(
            f"{count} stages have {config.num_layers} layers; choose a number from 1 to {config.num_layers}"
        )


def _can_share(config: DecoderConfig, count: int) -> bool:
    """All query heads of a key-value head are on ranks that hold it, and on these alone."""
    if config.num_heads % count or any(size % count for size in _inner_sizes(config)):
        return False
    return not (config.num_kv_heads % count and count % config.num_kv_heads)


def _inner_sizes(config: DecoderConfig) -> list[int]:
    """Of dense MLPs and of experts, those that the decoder has."""
    mixture, has_dense = config.mixture, config.num_mixtures < config.num_layers
    sizes = [config.intermediate_size] if has_dense else []
    if mixture is not None and config.num_mixtures:
        sizes += [mixture.inner_size, *([mixture.shared_size] if mixture.shared_size else [])]
    return sizes
