"""Recipe settings that OpenRLHF's flags need and the recipe may not have yet, and what the installed recipe accepts.

A key's `as_now` is what the runtime does while its recipe lacks the key: a flag that asks for exactly that is honoured
without it. UNSET: nothing it does equals any value, so the flag is refused until the key exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pydantic import TypeAdapter

UNSET = object()


class Key(NamedTuple):
    name: str
    type: str
    default: Any
    as_now: Any
    meaning: str


NEEDED = tuple(
    Key(*row)
    for row in [
        ("run.episodes", "int | None", None, UNSET, "passes over the prompts; sets the number of steps"),
        ("run.deterministic", "bool", False, False, "deterministic kernels in learner and engines"),
        ("policy.hub", "'huggingface' | 'modelscope'", "huggingface", "huggingface", "where a name that is no folder is fetched from"),
        ("policy.attention", "str", "auto", UNSET, "attention kernel of the learner, by its transformers name"),
        ("policy.experts", "str | None", None, None, "kernel of mixture-of-experts layers, by its transformers name"),
        ("prompts.split", "str", "train", "train", "split of the data set"),
        ("prompts.paths", "list[str]", [], UNSET, "several data sets in prompts.path's place; name@subdir is a folder of one"),
        ("prompts.probabilities", "list[float] | None", None, None, "their mixing probabilities; None: one after the other"),
        ("prompts.max_rows", "int | None", None, None, "rows kept of each data set, and of their mix"),
        ("prompts.input_template", "str | None", None, None, "format string with one {} around the prompt column"),
        ("evaluate.path", "str", "", UNSET, "a data set to evaluate on, written like prompts.path"),
        ("evaluate.split", "str", "train", UNSET, "its split"),
        ("evaluate.temperature", "float", 0.6, UNSET, "sampling temperature of evaluation"),
        ("evaluate.samples_per_prompt", "int", 4, UNSET, "k of pass-k"),
        ("rollout.top_p", "float", 1.0, 1.0, "nucleus sampling"),
        (
            "rollout.max_total_tokens",
            "int | None",
            None,
            UNSET,
            "longest prompt and response together; a response may use what its prompt leaves",
        ),
        ("rollout.tensor_parallel", "int", 1, 1, "slots of one engine"),
        ("rollout.batch_prompts", "int | None", None, None, "prompts generated at once where that is more than a step trains on"),
        ("rollout.max_lag_steps", "int", 0, 0, "steps by which samples may be older than the weights they train; 0: synchronous"),
        ("rollout.mix_versions", "bool", False, False, "a response under way goes on with new weights instead of being waited for"),
        (
            "reward.contract",
            "'row' | 'openrlhf'",
            "row",
            UNSET,
            "`openrlhf`: the function is called with lists of queries, prompts, labels and returns rewards, scores, extra_logs",
        ),
        ("reward.url", "list[str]", [], UNSET, "HTTP rewards: POST of query, prompts, labels; several are rotated"),
        ("reward.model_path", "str", "", UNSET, "a scalar reward model, served as a function"),
        ("reward.ranks", "int", 1, UNSET, "slots of the reward model"),
        ("reward.offload", "bool", False, UNSET, "the reward model's weights rest in host memory"),
        ("reward.normalize", "bool", False, False, "apply mean and deviation stored with the reward model"),
        ("reward.value_head", "str", "score", UNSET, "attribute that holds the reward model's scalar head"),
        ("reward.clip_range", "tuple[float, float] | None", None, UNSET, "rewards are clipped to it after the baseline is subtracted"),
        ("reward.overlong_buffer_tokens", "int | None", None, None, "DAPO's soft length penalty: the window before the longest response"),
        ("reward.overlong_penalty", "float", 1.0, 1.0, "its size at the longest response"),
        (
            "reward.stop_properly_penalty",
            "float | None",
            None,
            None,
            "truncated samples: factor of their reward (>= 0) or their reward itself (< 0)",
        ),
        ("agent.path", "str", "", "", "Python file with class AgentExecutor; it supplies the rewards too"),
        ("agent.max_tokens", "int | None", None, UNSET, "longest episode"),
        (
            "algorithm.advantage.estimator",
            "one of the names of --algo.advantage.estimator",
            "group_norm",
            UNSET,
            "how rewards become advantages",
        ),
        ("algorithm.advantage.gamma", "float", 1.0, UNSET, "discount"),
        ("algorithm.advantage.lambd", "float", 1.0, UNSET, "lambda of GAE"),
        ("algorithm.advantage.normalize_std", "bool", True, UNSET, "whitening divides by the deviation, besides centring"),
        (
            "algorithm.filter_range",
            "tuple[float, float] | None",
            None,
            None,
            "prompts whose mean score is not strictly inside are dropped and others drawn",
        ),
        ("algorithm.epochs", "int", 1, 1, "passes of the optimizer over a rollout batch"),
        ("algorithm.batch_samples", "int | None", None, UNSET, "samples of one optimizer step, drawn from the shuffled rollout batch"),
        ("algorithm.loss.kind", "'ppo' | 'gspo'", "ppo", "ppo", "ratio of tokens or of sequences"),
        ("algorithm.loss.dual_clip", "float | None", None, None, "bound on the loss of negative advantages, above 1"),
        ("algorithm.loss.entropy_coefficient", "float | None", None, None, "weight of the entropy bonus; 0: logged only"),
        ("algorithm.loss.balance_coefficient", "float", 0.0, 0.0, "weight of the load-balancing loss of mixture-of-experts models"),
        (
            "algorithm.loss.correction_level",
            "'off' | 'token' | 'seq'",
            "off",
            UNSET,
            "learner / sampler importance weights: per token, gated per token or per sequence",
        ),
        ("algorithm.loss.correction_mode", "'mask' | 'clip'", "mask", UNSET, "what is outside the band is dropped, or clamped"),
        ("algorithm.loss.correction_gating", "'ratio' | 'binary_kl' | 'tv'", "ratio", UNSET, "the statistic the band holds for"),
        ("algorithm.loss.correction_low", "float", 0.0, UNSET, "lower end of the band"),
        ("algorithm.loss.correction_high", "float", 5.0, UNSET, "upper end of the band"),
        ("algorithm.kl.place", "'loss' | 'reward'", "loss", "loss", "the KL estimate is a loss term, or taken off each token's reward"),
        ("algorithm.kl.target", "float | None", None, None, "adaptive coefficient: the KL it steers to"),
        ("algorithm.kl.horizon", "int", 10000, 10000, "its horizon in samples"),
        ("algorithm.kl.unbiased_gradient", "bool", False, False, "gradient of the reverse KL by a clamped importance weight"),
        ("learner.adam_eps", "float", 1e-8, 1e-8, "epsilon of AdamW"),
        ("learner.decay_all", "bool", True, True, "weight decay on biases and norms too"),
        ("learner.schedule", "str", "constant", UNSET, "learning-rate schedule, by its transformers name"),
        ("learner.warmup_share", "float", 0.0, UNSET, "warm-up as a share of all optimizer steps"),
        ("learner.min_rate_share", "float", 0.0, UNSET, "floor of cosine_with_min_lr as a share of the peak"),
        ("learner.optimizer", "'adam' | 'muon'", "adam", "adam", "optimizer of the policy"),
        ("learner.muon_learning_rate", "float", 0.02, UNSET, "of the matrices that Muon takes"),
        ("learner.muon_momentum", "float", 0.95, UNSET, "its momentum"),
        ("learner.optimizer_offload", "bool", False, UNSET, "optimizer state in host memory"),
        ("learner.tensor_parallel", "int", 1, 1, "ranks that share each layer"),
        ("learner.ring_attention", "int", 1, 1, "ranks that share each sequence"),
        ("reference.ranks", "int", 1, UNSET, "slots of the reference model"),
        ("reference.offload", "bool", False, UNSET, "its weights rest in host memory"),
        ("critic.path", "str", "", UNSET, "model the critic starts from"),
        ("critic.ranks", "int", 1, UNSET, "slots of the critic"),
        ("critic.value_head", "str", "score", UNSET, "attribute that holds its scalar head"),
        ("critic.value_clip", "float | None", 0.5, UNSET, "clip of the value loss"),
        ("critic.freeze_policy_steps", "int", 0, UNSET, "steps at the start that train the critic alone"),
        ("critic.save", "bool", False, UNSET, "export it at the end"),
        *[
            (f"critic.{name}", kind, default, UNSET, f"as learner.{name}")
            for name, kind, default in [
                ("learning_rate", "float", 9e-6),
                ("betas", "tuple[float, float]", (0.9, 0.95)),
                ("adam_eps", "float", 1e-8),
                ("weight_decay", "float", 0.0),
                ("schedule", "str", "cosine_with_min_lr"),
                ("warmup_share", "float", 0.03),
                ("min_rate_share", "float", 0.1),
                ("grad_clip", "float", 1.0),
                ("optimizer", "'adam' | 'muon'", "adam"),
                ("muon_learning_rate", "float", 0.02),
                ("muon_momentum", "float", 0.95),
            ]
        ],
        ("lora.rank", "int", 0, 0, "0: every weight is trained"),
        ("lora.alpha", "int", 16, UNSET, "scale of the adapters"),
        ("lora.dropout", "float", 0.0, UNSET, "their dropout"),
        ("lora.target_modules", "list[str]", ["all-linear"], UNSET, "layers that get one"),
        ("ema.beta", "float | None", None, None, "an average of the policy's weights with this decay is kept, and is what gets saved"),
        ("save.path", "str", "", UNSET, "folder of the final Hugging Face model (the critic's: the same name with _critic)"),
        ("checkpoint.path", "str", "", UNSET, "root of checkpoints: _actor/global_step<N>, latest, global_step<N>_hf"),
        ("checkpoint.max_gib", "float", float("inf"), float("inf"), "most that checkpoints may take, in GiB"),
        ("checkpoint.save_hf", "bool", False, False, "a Hugging Face folder at each checkpoint"),
        ("checkpoint.resumable", "bool", True, True, "off: a Hugging Face folder only"),
        ("checkpoint.resume", "bool", False, False, "go on from checkpoint.path where it holds one, else start"),
        ("checkpoint.best_metric", "str", "none", "none", "evaluation metric of the best checkpoint; empty: the first *_pass1"),
        ("watch.every_steps", "int", 1, 1, "steps between two lines of the metrics' sinks"),
        ("watch.wandb_entity", "str | None", None, None, "entity in Weights & Biases"),
        ("watch.wandb_group", "str | None", None, None, "group in Weights & Biases"),
        ("watch.run_name", "str", "", UNSET, "name of the run in Weights & Biases and of TensorBoard's folder"),
        ("watch.tensorboard_path", "str", "", UNSET, "root of TensorBoard's files"),
    ]
)


@cache
def needed() -> dict[str, Key]:
    return {key.name: key for key in NEEDED}


class Installed:
    """What the installed recipe accepts today."""

    def __init__(self) -> None:
        from rlhfless_ray.recipe import Recipe, known_keys

        self.keys = known_keys(Recipe)

    def lacks_section(self, key: str) -> bool:
        return not self.knows(key.partition(".")[0])

    def knows(self, key: str) -> bool:
        return key in self.keys

    def accepts(self, key: str, value: Any) -> bool:
        """Whether the recipe has the key and the key's own type and range allow the value."""
        return self.knows(key) and _valid(key, value)

    def lacks(self, settings: dict[str, Any]) -> list[str]:
        """The keys that the recipe would need to do what is asked; none where it does so anyway."""
        return [key for key, value in settings.items() if not self.accepts(key, value) and not self._does_so_anyway(key, value)]

    def accepted(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if self.accepts(key, value)}

    def _does_so_anyway(self, key: str, value: Any) -> bool:
        known = needed().get(key)
        return not self.knows(key) and known is not None and known.as_now is not UNSET and known.as_now == value


def _valid(key: str, value: Any) -> bool:
    from pydantic import ValidationError

    try:
        _validator(key).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _validator(key: str) -> TypeAdapter[Any]:
    """Return what checks a value of a recipe's key. To build it takes longer than to check a value."""
    from typing import Annotated

    from pydantic import TypeAdapter

    from rlhfless_ray.recipe import Recipe

    section: Any = Recipe
    *parents, leaf = key.split(".")
    for parent in parents:
        section = section.model_fields[parent].annotation
    info = section.model_fields[leaf]
    kind: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return TypeAdapter(kind)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys → sections."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
