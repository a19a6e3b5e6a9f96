"""Steps of all tasks against plain transformers and torch, and of two ranks against one."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe.rollout_sections import PolicyConfig
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.load_rows import load_rows
from rlhfless_ray.supervise.stage_losses import DESIRABLE, LOSSES
from rlhfless_ray.weights.load_policy import load_tokenizer
from rlhfless_ray.weights.model_folder import read_folder, write_folder
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.learner

BETA, ROWS = 0.4, 12
DIVIDED = 3  # two ranks that share one copy of the model
SLICED = " sliced"  # two ranks that share sequences
PACKED = " packed"  # rows lie end to end
PACKED_CASES = ("sft", "rm", "dpo", "dpo_apart", "kto")
SLICED_CASES = ("sft", "sft_sequence", "rm", "dpo", "dpo_apart", "kto", "kd", "kd_lora", "prm_all", "lora", "stage_1")
DIVIDED_CASES = ("sft", "rm", "dpo", "kto", "kd", "kd_lora", "prm", "lora", "stage_1")
CASES: dict[str, dict[str, Any]] = {
    "sft": {"task": "sft"},
    "sft_sequence": {"task": "sft", "loss": {"mean": "sequence"}},
    "rm": {"task": "rm"},
    "dpo": {"task": "dpo", "loss": {"beta": BETA, "nll_coefficient": 0.3}},
    "dpo_apart": {"task": "dpo", "loss": {"beta": BETA, "nll_coefficient": 0.3}, "learner": {"share_prompts": "off"}},
    "ipo": {"task": "dpo", "loss": {"beta": BETA, "kind": "ipo"}},
    "kto": {"task": "kto", "loss": {"beta": BETA, "desirable_weight": 1.3}},
    "kd": {"task": "kd", "teacher": {"path": "teacher"}, "loss": {"teacher_weight": 0.3}},
    "kd_lora": {"task": "kd", "teacher": {"path": "teacher"}, "lora": {"rank": 4}},
    "prm": {"task": "prm", "data": {"reward_tokens": ["=", "#"]}},
    "prm_soft": {"task": "prm", "data": {"reward_tokens": ["=", "#"]}},
    "prm_three": {"task": "prm", "data": {"reward_tokens": ["=", "#", "0"]}},
    "prm_all": {"task": "prm"},
    "lora": {"task": "sft", "lora": {"rank": 4}},
    "stage_1": {
        "task": "dpo",
        "loss": {"beta": BETA, "nll_coefficient": 0.3},
        "learner": {"zero_stage": 1},
        "run": {"deterministic": True},
    },
}


for name in PACKED_CASES:
    CASES[name + PACKED] = CASES[name]


def parsed(name: str) -> SupervisedRecipe:
    tree = {"policy": {"hidden_size": 64, "layers": 1}, **CASES[name]}
    if tree["task"] == "prm":  # its rows are written by the fixture
        tree["policy"] = {"path": "model"}
        tree["data"] = {"path": f"{name}.jsonl", "placeholder_token": ";", **tree.get("data", {})}
    else:
        tree["data"] = {"task": "chain", "rows": ROWS}
    tree["data"]["batch_rows"] = 8
    learner = {"learning_rate": 1e-2, "micro_batch_tokens": 300, "grad_clip": 0, "adam_eps": 1e-4, **tree.pop("learner", {})}
    return SupervisedRecipe.parse({**tree, "learner": learner, "run": {"seed": 7, **tree.get("run", {})}})


def write_steps(folder: Path, name: str) -> SupervisedRecipe:
    """Write rows with one to five steps, and return the recipe that reads them."""
    recipe, rng = parsed(name), np.random.default_rng(3)
    rows = []
    for row in task("chain").rows(ROWS, 1, "train"):
        steps = int(rng.integers(1, 6))
        known = recipe.data.reward_tokens or ["=", "#", "0", "1"]
        labels: list[Any] = [round(float(x), 2) for x in rng.random(steps)] if name == "prm_soft" else list(rng.choice(known, steps))
        rows.append({"prompt": row["prompt"] + "".join(f"{rng.integers(10)};" for _ in range(steps)), "label": labels})
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": str(file)})})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_processes: None) -> dict[int, dict[str, Any]]:
    from rlhfless_ray.weights.tiny_model import scratch_policy

    folder = tmp_path_factory.mktemp("ranks")
    write_folder(folder / "model", scratch_policy(parsed("sft"), task("chain")))
    wide = parsed("sft").model_copy(update={"policy": PolicyConfig(hidden_size=128, layers=1)})
    write_folder(folder / "teacher", scratch_policy(wide, task("chain")))
    tokenizer = load_tokenizer(read_folder(folder / "model"), False)
    steps = [np.array([5, 0, 3, 8, 11, 2, 1]), np.array([4, 9, 6, 7])]
    recipes = {name: write_steps(folder, name) if CASES[name]["task"] == "prm" else parsed(name) for name in CASES}
    cases = {name: (recipe, load_rows(recipe, tokenizer), steps) for name, recipe in recipes.items()}
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    found: dict[int, dict[str, Any]] = {}
    script = str(Path(__file__).with_name("rank_process.py"))
    for ranks in (1, 2, DIVIDED):
        if ranks == 2:
            sliced = {name + SLICED: (wide_of(cases[name][0], "sequence_parallel"), *cases[name][1:]) for name in SLICED_CASES}
            (folder / "cases.pickle").write_bytes(pickle.dumps(cases | sliced))
        if ranks == DIVIDED:  # in processes of their own, because DeepSpeed keeps the groups of ranks of its first model
            divided = {name: (wide_of(cases[name][0], "tensor_parallel"), *cases[name][1:]) for name in DIVIDED_CASES}
            (folder / "cases.pickle").write_bytes(pickle.dumps(divided))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = [
            subprocess.Popen(
                forked([sys.executable, script, str(folder), str(rank), "2" if ranks == DIVIDED else str(ranks), str(port)]),
                cwd=ROOT,
                env={**environment(), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2 if ranks == DIVIDED else ranks)
        ]
        said = [process.communicate(timeout=300)[0] for process in started]
        assert all(process.returncode == 0 for process in started), "\n".join(said)[-4000:]
        found[ranks] = pickle.loads((folder / f"results_{2 if ranks == DIVIDED else ranks}.pickle").read_bytes())
    found[0] = {"folder": folder, "cases": cases}  # type: ignore[dict-item]
    return found


def wide_of(recipe: SupervisedRecipe, what: str) -> SupervisedRecipe:
    return recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"ranks": 2, what: 2})})


PAIRS = [(name, 2) for name in (*CASES, *(name + SLICED for name in SLICED_CASES))]


@pytest.mark.parametrize(("name", "ranks"), [*PAIRS, *((name, DIVIDED) for name in DIVIDED_CASES)])
def test_two_ranks_learn_what_one_does(results: dict[int, Any], name: str, ranks: int) -> None:
    one, two = results[1][name.removesuffix(SLICED)], results[ranks][name]
    for a, b in zip([one["held"], *one["steps"]], [two["held"], *two["steps"]], strict=True):
        for found in (a.metrics, b.metrics):
            found.pop("accuracy", None)  # before the first step all ratios are 0 but for rounding, so who is ahead is chance
        assert a.metrics == pytest.approx(b.metrics, rel=2e-4, abs=1e-5)
        assert a.trained_tokens == b.trained_tokens and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
    for key, weight in one["weights"].items():
        assert np.allclose(weight, two["weights"][key], atol=3e-4), key


def test_sharing_a_prompt_and_zero_change_nothing(results: dict[int, Any]) -> None:
    for other in ("dpo_apart", "stage_1"):
        for a, b in zip(results[1]["dpo"]["steps"], results[1][other]["steps"], strict=True):
            same = ("loss", "margin", "nll")
            assert [a.metrics[key] for key in same] == pytest.approx([b.metrics[key] for key in same], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_rows_learn_what_padded_ones_do(results: dict[int, Any], name: str) -> None:
    apart, end_to_end = results[1][name], results[1][name + PACKED]
    if apart["references"]:
        assert not np.array_equal(apart["references"][0], end_to_end["references"][0]), "other sums, so they were packed"
        assert np.allclose(apart["references"][0], end_to_end["references"][0], atol=1e-3)
    for a, b in zip([apart["held"], *apart["steps"]], [end_to_end["held"], *end_to_end["steps"]], strict=True):
        same = [key for key in ("loss", "margin", "kl") if key in a.metrics]
        assert [a.metrics[key] for key in same] == pytest.approx([b.metrics[key] for key in same], rel=1e-3, abs=1e-5)
        assert a.trained_tokens == b.trained_tokens and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)


class Plain:
    """The same steps in plain torch: one sequence at a time, the whole logits, autograd, torch's AdamW."""

    def __init__(self, results: dict[int, Any], name: str) -> None:
        from transformers import AutoModelForCausalLM

        self.recipe, self.rows, self.steps = results[0]["cases"][name]
        self.examples = self.rows.train
        folder = self.folder = results[0]["folder"] / "model"
        if self.recipe.task == "rm":
            from rlhfless_ray.learn.policy_model import load_critic

            self.model = load_critic(folder, "float32", False, "score", self.recipe.run.seed)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.teacher = AutoModelForCausalLM.from_pretrained(results[0]["folder"] / "teacher", dtype=torch.float32)
        self.model.train()
        self.starts = np.cumsum(self.examples.lengths) - self.examples.lengths
        with torch.no_grad():
            self.references = [] if self.recipe.task not in ("dpo", "kto") else [self.sum(i) for i in range(len(self.examples.lengths))]

    def sequence(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        here = slice(self.starts[number], self.starts[number] + self.examples.lengths[number])
        return torch.from_numpy(self.examples.tokens[here].astype(np.int64)), torch.from_numpy(self.examples.mask[here])

    def logprobs(self, number: int) -> torch.Tensor:
        ids, mask = self.sequence(number)
        logits = self.model(input_ids=ids[None]).logits[0, :-1]
        return -functional.cross_entropy(logits, ids[1:], reduction="none")[mask[1:]]

    def sum(self, number: int) -> torch.Tensor:
        return self.logprobs(number).sum()

    def crosses(self, number: int) -> torch.Tensor:
        """Cross-entropy with the teacher at each trained token."""
        ids, mask = self.sequence(number)
        with torch.no_grad():
            q = self.teacher(input_ids=ids[None]).logits[0, :-1].softmax(-1)
        return -(q * self.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)).sum(-1)[mask[1:]]

    def steps_of(self, number: int) -> torch.Tensor:
        """The loss at each placeholder, as OpenRLHF computes it."""
        ids, _ = self.sequence(number)
        ids = ids[:-1]
        vocabulary = {token: self.rows.reward_tokens[i] for i, token in enumerate(self.recipe.data.reward_tokens or [])}
        tokenizer = load_tokenizer(read_folder(Path(self.folder)), False)
        row = json.loads(Path(self.recipe.data.path).read_text().splitlines()[number])
        (placeholder,) = tokenizer(";")["input_ids"]
        logits = self.model(input_ids=ids[None]).logits[0][ids == placeholder]
        if not vocabulary:
            return functional.cross_entropy(logits, torch.tensor([tokenizer(x)["input_ids"][0] for x in row["label"]]), reduction="none")
        logits = logits[:, list(vocabulary.values())]
        if isinstance(row["label"][0], float):
            p = torch.tensor(row["label"])
            return functional.cross_entropy(logits, torch.stack([p, 1 - p], dim=-1), reduction="none")
        return functional.cross_entropy(logits, torch.tensor([list(vocabulary).index(x) for x in row["label"]]), reduction="none")

    def loss(self, rows: np.ndarray) -> torch.Tensor:
        section = self.recipe.loss
        if self.recipe.task == "sft":
            parts = [self.logprobs(i) for i in rows]
            return -torch.cat(parts).mean() if section.mean == "token" else -torch.stack([p.mean() for p in parts]).mean()
        if self.recipe.task == "kd":
            weight = section.teacher_weight
            nll = -torch.cat([self.logprobs(i) for i in rows]).mean()
            return (1 - weight) * nll + weight * torch.cat([self.crosses(i) for i in rows]).mean()
        if self.recipe.task == "prm":
            return torch.cat([self.steps_of(i) for i in rows]).mean()
        if self.recipe.task == "rm":
            values = [self.model(input_ids=self.sequence(i)[0][None, :-1]).logits[0, 0] for row in rows for i in (2 * row, 2 * row + 1)]
            difference = torch.stack(values[::2]) - torch.stack(values[1::2])
            return torch.log1p(torch.exp(-difference)).mean()
        ratios = [[self.sum(i) - self.references[i] for i in (2 * row, 2 * row + 1)] for row in rows]
        if self.recipe.task == "kto":
            kl = torch.stack([pair[1] for pair in ratios]).mean().clamp(min=0).detach()
            own = torch.stack([pair[0] for pair in ratios])
            good = torch.from_numpy(self.examples.extras[rows]) > 0.5
            self.rewards = [BETA * own[kind].detach().mean().item() for kind in (good, ~good)]
            lost = torch.where(good, section.desirable_weight * torch.sigmoid(-BETA * (own - kl)), torch.sigmoid(-BETA * (kl - own)))
            return lost.mean()
        difference = torch.stack([a - b for a, b in ratios])
        if section.kind == "ipo":
            return ((difference - 1 / (2 * BETA)) ** 2).mean()
        nll = -torch.stack([self.logprobs(2 * row).mean() for row in rows])
        return (torch.log1p(torch.exp(-BETA * difference)) + section.nll_coefficient * nll).mean()


@pytest.mark.parametrize("name", ["sft", "sft_sequence", "rm", "dpo", "ipo", "kto", "kd", "prm", "prm_soft", "prm_three", "prm_all"])
def test_steps_equal_plain_torch(results: dict[int, Any], name: str) -> None:
    plain, ours = Plain(results, name), results[1][name]
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-4)
    for rows, step in zip(plain.steps, ours["steps"], strict=True):
        optimizer.zero_grad()
        loss = plain.loss(rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1e9)
        assert step.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        if name == "dpo":
            parts = step.metrics["preference_loss"], 0.3 * step.metrics["nll"]
            assert step.metrics["loss"] == pytest.approx(sum(parts), rel=1e-5)
        if name == "kto":
            found = [step.metrics[key] for key in ("chosen_reward", "rejected_reward")]
            assert found == pytest.approx(plain.rewards, rel=1e-3, abs=1e-5)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-3)
        optimizer.step()
    state = plain.model.state_dict()
    for key, weight in ours["weights"].items():
        assert np.allclose(weight, state[key].numpy(), atol=2e-4), key


def test_an_evaluation_is_the_mean_over_all_rows(results: dict[int, Any]) -> None:
    for name in ("sft", "rm", "kd", "prm"):
        plain = Plain(results, name)
        with torch.no_grad():
            assert results[1][name]["held"].metrics["loss"] == pytest.approx(plain.loss(np.arange(ROWS)).item(), rel=1e-4)


def test_rewards_of_kto_are_means_over_the_rows_of_their_kind() -> None:
    means = {"loss": 0.5, "chosen_reward": 0.25 * 2.0, "rejected_reward": 0.75 * -1.0, DESIRABLE: 0.25}
    loss = LOSSES["kto"](parsed("kto"), None)  # type: ignore[arg-type]
    loss.finish(means)
    assert means == {"loss": 0.5, "chosen_reward": 2.0, "rejected_reward": -1.0}
    loss.finish(means := {"chosen_reward": 2.0, "rejected_reward": 0.0, DESIRABLE: 1.0})
    assert means == {"chosen_reward": 2.0}, "without undesirable rows"


def test_adapters_are_merged(results: dict[int, Any]) -> None:
    weights = results[1]["lora"]["weights"]
    start = results[1]["sft"]["weights"].keys()
    assert set(weights) == set(start)


def test_a_reward_model_is_a_sequence_classifier(results: dict[int, Any], tmp_path: Path) -> None:
    """Loaded by transformers and by the reward stage, it gives the rewards that it was trained to give."""
    from transformers import AutoModelForSequenceClassification

    from rlhfless_ray.reward.scalar_model import ScalarModel
    from rlhfless_ray.weights.model_folder import split_files, without_weights

    ours = results[1]["rm"]
    others = without_weights(read_folder(results[0]["folder"] / "model"))
    tensors = {k: torch.from_numpy(v) for k, v in ours["weights"].items()}
    write_folder(tmp_path, {**others, **split_files(tensors), "config.json": ours["config"]})
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert theirs.config.num_labels == 1
    plain = Plain(results, "rm")
    ids = [plain.sequence(i)[0][:-1] for i in range(6)]
    values = ScalarModel.load(tmp_path, "score", "float32").values([x.numpy() for x in ids])
    with torch.no_grad():
        logits = [theirs(input_ids=x[None]).logits.item() for x in ids]
        assert np.allclose(values, logits, atol=1e-5)
        rewards = torch.tensor(
            [theirs(input_ids=plain.sequence(i)[0][None, :-1]).logits.item() for i in range(len(plain.examples.lengths))]
        )
    assert (theirs.config.mean, theirs.config.std) == pytest.approx((rewards.mean().item(), rewards.std().item()), rel=1e-4)
    assert json.loads(results[2]["rm"]["config"])["std"] == pytest.approx(theirs.config.std, rel=1e-2), "on two ranks"
