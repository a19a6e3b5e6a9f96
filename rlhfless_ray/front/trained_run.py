"""A finished run as an object: its metrics, its figures in a notebook, and its trained policy."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.report.run_view import RunView

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Turns = Sequence[JsonObject]


class TrainedRun:
    """A run folder whose run has ended.

    Examples:
        >>> from rlhfless_ray import TrainedRun
        >>> TrainedRun("runs/none")
        TrainedRun('runs/none'): unknown after step 0
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @cached_property
    def view(self) -> RunView:
        return RunView.read(self.folder)

    @property
    def metrics(self) -> list[JsonObject]:
        """One row per step, in order; step 0 is the evaluation before training."""
        return self.view.metrics

    @cached_property
    def recipe(self) -> Recipe:
        return Recipe.load(self.folder / "recipe.yaml")

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @cached_property
    def policy(self) -> TrainedPolicy:
        """The trained policy. Raises UserError if the run has ended before it was written."""
        return TrainedPolicy(self.folder / "model", self.recipe.rollout.temperature)

    def push_to_hub(self, repo_id: str, *, private: bool = False) -> str:
        """Upload the policy with a model card to the Hugging Face hub, and return its address. Raises UserError if the hub refuses."""
        from rlhfless_ray.front.model_card import model_card

        return self.policy.push_to_hub(repo_id, private=private, card=model_card(self.view, repo_id))

    def _repr_html_(self) -> str:
        return self.view._repr_html_()

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r}): {self.view.status.get('status', 'unknown')} after step {len(self.view.steps)}"


class TrainedPolicy:
    """A model folder that is loaded with transformers when it is first used, on a GPU if there is one."""

    def __init__(self, folder: Path, temperature: float = 1.0) -> None:
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: there is no model; the run has ended before it was written")
        self.folder, self.temperature = folder, temperature

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder).to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def generate(
        self, prompts: str | Turns | Sequence[str | Turns], *, max_tokens: int = 256, temperature: float | None = None
    ) -> str | list[str]:
        """Return a response to each prompt, or to the only one. A prompt is a text, or turns for the chat template.

        `temperature`: 0 is greedy. None: that of the run's rollouts.
        """
        several = not isinstance(prompts, str) and not (len(prompts) > 0 and isinstance(prompts[0], dict))
        found = [self._response(prompt, max_tokens, temperature) for prompt in (prompts if several else [prompts])]  # type: ignore[arg-type]
        return found if several else found[0]

    def _response(self, prompt: str | Turns, max_tokens: int, temperature: float | None) -> str:
        temperature = self.temperature if temperature is None else temperature
        if isinstance(prompt, str):
            inputs = self.tokenizer(prompt, return_tensors="pt")
        else:
            if not self.tokenizer.chat_template:
                raise UserError("generate: the policy's tokenizer has no chat template; give texts instead of turns")
            inputs = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True)
        inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items() if name in ("input_ids", "attention_mask")}
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        padding = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        tokens = self.model.generate(**inputs, max_new_tokens=max_tokens, pad_token_id=padding, **sampling)  # type: ignore[operator]
        return str(self.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def chat(self) -> None:
        """Talk to the policy in a terminal or notebook until an empty line."""
        turns: list[JsonObject] = []
        while asked := input("> ").strip():
            turns.append({"role": "user", "content": asked})
            answer = self.generate(turns) if self.tokenizer.chat_template else self.generate(asked)
            turns.append({"role": "assistant", "content": str(answer)})
            print(answer)

    def save(self, folder: str | Path) -> Path:
        """Copy the model folder. Raises UserError if the target exists."""
        try:
            return Path(shutil.copytree(self.folder, folder))
        except OSError as error:
            raise UserError(f"save: cannot write {folder} ({one_line(error)})") from None

    def push_to_hub(self, repo_id: str, *, private: bool = False, card: str = "") -> str:
        """Upload the model folder, and `card` as its README.md. Returns its address. Raises UserError if the hub refuses."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        hub = HfApi()
        try:
            address = hub.create_repo(repo_id, private=private, exist_ok=True)
            hub.upload_folder(repo_id=repo_id, folder_path=self.folder, commit_message="Upload a policy trained with rlhfless-ray")
            if card:
                hub.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo_id)
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
            raise UserError(f"push_to_hub: the Hugging Face hub did not take {repo_id} ({one_line(error, 200)})") from None
        return str(address)
