"""`python -m rlhfless_ray.cli.interactive_chat`: talk to a model, with the flags of OpenRLHF's launcher of this name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlhfless_ray.cli.supervised_launcher import start
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.explain_report import announce
from rlhfless_ray.compat.openrlhf.inference import translate_inference
from rlhfless_ray.compat.openrlhf.inference_table import CHAT
from rlhfless_ray.prompts.first_token import FirstToken
from rlhfless_ray.recipe.local_path import given_path

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ASKS = "Please enter a prompt (or type 'exit' to quit): "


class Conversation:
    """The conversation so far. Without a chat template, prompts and responses are appended to one text."""

    def __init__(self, settings: JsonObject, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.turns: list[dict[str, str]] = []
        self.text = ""
        if path := settings.get("chat.ta_prompt"):
            try:
                self.text = given_path(path, "--ta_prompt").read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--ta_prompt {path}: {getattr(error, 'strerror', None) or error}") from None
        if settings["chat.apply_chat_template"] and not getattr(tokenizer, "chat_template", None):
            raise UserError("--apply_chat_template: the tokenizer of --pretrain has no chat template; leave it out")

        self.before = ([*self.turns], self.text)  # the last prompt

    def clear(self) -> None:
        self.turns, self.text = [], ""

    def take_back(self) -> None:
        """Remove the last prompt, which has no response."""
        self.turns, self.text = self.before

    def ask(self, prompt: str) -> str:
        """Add a prompt, and return the whole text that the model continues."""
        self.before = ([*self.turns], self.text)
        if self.settings["chat.apply_chat_template"]:
            self.turns.append({"role": "user", "content": prompt})
            self.text = self.tokenizer.apply_chat_template(self.turns, tokenize=False, add_generation_prompt=True)
        else:
            self.text += "\n" + self.settings["chat.input_template"].format(prompt)
        if self.settings["chat.enable_csft"]:
            self.text += self.settings["chat.csft_prompt"].strip() + " "
        return self.text

    def tokens(self, prompt: str) -> Tensor:
        """Add a prompt, and return the whole text's tokens (1, tokens) as the tokenizer makes them, with one beginning-of-text token."""
        import torch

        first = FirstToken(self.tokenizer, allowed=False)
        return torch.tensor([first.once(self.tokenizer(first.ready(self.ask(prompt)))["input_ids"])])

    def answer(self, response: str) -> None:
        self.turns.append({"role": "assistant", "content": response})
        self.text += response


def _run(tokens: list[str]) -> None:
    translation = translate_inference(CHAT, tokens)
    announce(translation)
    with translation.flags_in_errors():
        _talk(translation.settings)


def _talk(settings: JsonObject) -> None:
    import torch

    from rlhfless_ray.learn.policy_model import load_model
    from rlhfless_ray.weights.load_policy import context_tokens, load_tokenizer, model_folder, read_model

    folder = model_folder(settings["policy.path"], "policy.path")
    files = read_model(folder)
    tokenizer, longest = load_tokenizer(files, True), context_tokens(files)
    if sys.stdin is None:
        raise UserError("standard input is closed, and prompts are read from it; open it")
    max_tokens = settings["chat.max_len"] if longest is None else min(settings["chat.max_len"], longest)
    conversation = Conversation(settings, tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(folder, settings["policy.dtype"], True).eval().to(device)
    samples = {} if settings["chat.greedy_sampling"] else {"top_p": settings["chat.top_p"], "temperature": settings["chat.temperature"]}
    while True:
        try:
            prompt = input(ASKS)
            prompt.encode()
        except EOFError:
            return
        except UnicodeEncodeError:
            print("the prompt has bytes that are no UTF-8 text; enter it again")
            continue
        if prompt.strip().lower() == "exit":
            return
        if prompt.strip().lower() == "clear":
            conversation.clear()
            continue
        ids = conversation.tokens(prompt).to(device)
        if ids.shape[1] >= max_tokens:
            conversation.take_back()
            print(
                f"with this prompt the conversation has {ids.shape[1]} tokens of at most {max_tokens} (--max_len, or the model's); enter a "
                "shorter one, or clear to start again"
            )
            continue
        with torch.inference_mode():
            generated = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_length=max_tokens,
                do_sample=not settings["chat.greedy_sampling"],
                repetition_penalty=settings["chat.repetition_penalty"],
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
                **samples,
            )
        response = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
        conversation.answer(response)
        print(response, flush=True)


if __name__ == "__main__":
    start(CHAT, _run)
