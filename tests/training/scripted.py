"""A model of text that writes what a test says."""

from typing import Any

import torch

from dataset.text.schema import Form
from dataset.text.tokenizer import ByteTokenizer
from models.text.config import HRMTextConfig
from models.text.model import TextModel
from tests.models.text.helpers import make_config
from training.prompts import PromptConfig, Reader, Writer

START, END_OF_INSTRUCTION, END = 256, 257, 258
MAX_LEN = 40


class Script(TextModel):
    """Writes the bytes of a script, and notes what it reads. The cache must count the tokens."""

    def __init__(self, *tokens: int) -> None:
        super().__init__(make_config(HRMTextConfig), vocab_size=512)
        self.init_weights(torch.Generator().manual_seed(0))
        self.script, self.prompts = list(tokens), list[list[int]]()
        self._place = 0

    def hidden(self, inputs_N: torch.Tensor, positions_N: torch.Tensor, *args: Any) -> torch.Tensor:
        if len(inputs_N) > 1:
            self.prompts.append(inputs_N.tolist())
            self._place = 0
        return super().hidden(inputs_N, positions_N, *args)

    def logits(self, y_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = torch.zeros(len(y_ND), self.vocab_size)
        logits_NV[:, 300:] = 9.0  # of the rounded vocabulary
        logits_NV[:, self.script[self._place % len(self.script)]] = 5.0
        self._place += 1
        return logits_NV


def prompt_config(**options: Any) -> PromptConfig:
    defaults = {"prompt": None, "prompt_form": "auto", "max_new_tokens": 8, "temperature": 0.0, "top_k": None}
    rest: dict[str, Any] = {"top_p": None, "stop": [], "stop_tokens": [], "seed": 0}
    return PromptConfig(**(defaults | rest | options))


def make_writer(model: TextModel, form: Form = "text", **options: Any) -> Writer:
    return Writer(model, Reader(ByteTokenizer(), MAX_LEN, form, prompt_config(**options)))
