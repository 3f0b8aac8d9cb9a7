"""The options of the text models: HRM-Text with its baselines (arXiv 2605.20613), and the GPT."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from models.depth import LARGEST_COUNT
from models.model import ArchBase
from models.text.stack_config import Kernel, StackConfig, StackShape
from utils.config import Bool, Float, Int

# More steps than any run has. At the first of them all schedules are at their start.
LONGEST_RUN = 10**12

Role = Literal["H", "L"]
"""What a call is for: H updates the state that the head reads, L the other one."""


@dataclass(frozen=True)
class CallCounts:
    H: int
    L: int


class TextConfig(StackConfig, ArchBase):
    """The options of every text model."""

    kind = "text"
    attention_kernel: Kernel

    @property
    @abstractmethod
    def stacks(self) -> dict[str, StackShape]:
        """The stacks of the model, by the names of the modules that hold them."""

    @property
    def num_calls(self) -> CallCounts:
        return CallCounts(H=1, L=0)

    def grad_calls_at(self, step: int, total_steps: int) -> CallCounts:
        """Return how many of the last calls in each role carry gradient at a step, from 1."""
        return self.num_calls

    def embedding_has_gradient(self, grad_calls: CallCounts) -> bool:
        return grad_calls.H + grad_calls.L > 0

    @property
    def is_gone_through_once(self) -> bool:
        return self.num_calls == CallCounts(H=1, L=0)

    @property
    def embedding_scale(self) -> float:
        """The factor of the embedded tokens, after which they have unit scale at the start."""
        return 1 / next(iter(self.stacks.values())).stds.inner


class TransformerTextConfig(TextConfig):
    """A plain transformer with the blocks of HRM-Text: one call of one stack."""

    name: Literal["transformer_text"]

    @property
    def stacks(self) -> dict[str, StackShape]:
        return {"level": self.hrm_shape(self.num_layers)}


class GPTConfig(TextConfig):
    """A GPT as Llama has it (arXiv 2302.13971): no gates, and norms with weights."""

    name: Literal["gpt"]
    num_kv_heads: Int = Field(ge=1, le=LARGEST_COUNT)
    mlp: Literal["swiglu", "gelu"]
    tie_head: Bool

    @model_validator(mode="after")
    def _heads_share_keys_evenly(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}; change one of them"
            )
        return self

    @property
    def stacks(self) -> dict[str, StackShape]:
        shape = self.hrm_shape(self.num_layers)
        width = shape.width
        if self.mlp == "gelu":  # two matrices, so the width is not reduced to two thirds
            width = math.ceil(round(self.expansion * self.hidden_size) / self.width_multiple) * self.width_multiple
        gpt = replace(
            shape,
            num_kv_heads=self.num_kv_heads,
            width=width,
            mlp=self.mlp,
            is_gated=False,
            norm_has_weights=True,
            stds=self.stds(width, self.num_layers),
        )
        return {"level": gpt}

    @property
    def tied_head(self) -> bool:
        return self.tie_head

    @property
    def embedding_scale(self) -> float:
        return 1.0


class HalvedTextConfig(TextConfig):
    """The options of the models whose stacks have half of num_layers, with `half_layers`."""

    half_layers: Bool

    @model_validator(mode="after")
    def _layers_can_be_halved(self) -> Self:
        if self.half_layers and self.num_layers % 2:
            raise ValueError(f"half_layers needs an even number of layers, and num_layers is {self.num_layers}")
        return self

    @property
    def stacks(self) -> dict[str, StackShape]:
        return {"L_level": self.hrm_shape(self.num_layers // 2 if self.half_layers else self.num_layers)}


class TwoStackTextConfig(HalvedTextConfig):
    """The options of the models that have a stack for each role; H_override is for the H stack."""

    H_override: dict[str, Any]

    @field_validator("H_override", mode="before")
    @classmethod
    def _null_changes_nothing(cls, value: object) -> object:
        # The default is null, because Hydra lets nobody add keys to an empty mapping.
        return {} if value is None else value

    @model_validator(mode="after")
    def _the_override_is_of_a_stack(self) -> Self:
        allowed = StackConfig.model_fields.keys() - {"hidden_size"}
        if wrong := sorted(self.H_override.keys() - allowed):
            raise ValueError(f"H_override has {', '.join(wrong)}; it may have {', '.join(sorted(allowed))}")
        try:
            self._H_config()
        except ValidationError as error:
            raise ValueError(f"H_override: {error.errors()[0]['msg']}") from error
        return self

    def _H_config(self) -> StackConfig:
        own = {key: getattr(self, key) for key in StackConfig.model_fields}
        return StackConfig(**(own | self.H_override))

    @property
    def stacks(self) -> dict[str, StackShape]:
        stacks = super().stacks
        num_layers = self.H_override.get("num_layers", stacks["L_level"].num_layers)
        return {"H_level": self._H_config().hrm_shape(num_layers), **stacks}


def _first_cycle_has_gradient(config: "HRMTextConfig | TRMTextConfig", grad_calls: CallCounts) -> bool:
    return config.H_cycles == grad_calls.H or config.L_cycles * (config.H_cycles - 1) < grad_calls.L


class HRMTextConfig(TwoStackTextConfig):
    """HRM-Text. `bp_min_steps` and `bp_max_steps` count calls of both stacks with gradient."""

    name: Literal["hrm_text"]
    H_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    L_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    bp_warmup_ratio: Float = Field(ge=0)
    bp_min_steps: Int = Field(ge=2, le=LARGEST_COUNT)  # so that gradient reaches both stacks
    bp_max_steps: Int = Field(ge=2, le=LARGEST_COUNT)

    @model_validator(mode="after")
    def _gradient_grows(self) -> Self:
        if self.bp_min_steps > self.bp_max_steps:
            raise ValueError(f"bp_min_steps {self.bp_min_steps} is more than bp_max_steps {self.bp_max_steps}")
        return self

    @property
    def num_calls(self) -> CallCounts:
        return CallCounts(H=self.H_cycles, L=self.H_cycles * self.L_cycles)

    def bp_steps_at(self, step: int, total_steps: int) -> int:
        warmup = total_steps * self.bp_warmup_ratio
        done = min(1.0, step / warmup) if warmup > 0 else 1.0
        return self.bp_min_steps + math.floor(done * (self.bp_max_steps - self.bp_min_steps))

    def grad_calls_at(self, step: int, total_steps: int) -> CallCounts:
        """As in the base class. The calls of H come first, but one is always left for L."""
        steps = self.bp_steps_at(step, total_steps)
        of_H = min(self.H_cycles, steps - 1)
        return CallCounts(H=of_H, L=steps - of_H)

    def embedding_has_gradient(self, grad_calls: CallCounts) -> bool:
        return _first_cycle_has_gradient(self, grad_calls)


class TRMTextConfig(HalvedTextConfig):
    """The recursion of HRM-Text with one stack in both roles."""

    name: Literal["trm_text"]
    H_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    L_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    H_bp_steps: Int = Field(ge=0, le=LARGEST_COUNT)
    L_bp_steps: Int = Field(ge=0, le=LARGEST_COUNT)

    @property
    def num_calls(self) -> CallCounts:
        return CallCounts(H=self.H_cycles, L=self.H_cycles * self.L_cycles)

    def grad_calls_at(self, step: int, total_steps: int) -> CallCounts:
        return CallCounts(H=self.H_bp_steps, L=self.L_bp_steps)

    def embedding_has_gradient(self, grad_calls: CallCounts) -> bool:
        return _first_cycle_has_gradient(self, grad_calls)


class UTTextConfig(TextConfig):
    """A Universal Transformer (arXiv 1807.03819): one stack, called `cycles` times."""

    name: Literal["ut_text"]
    cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    bp_cycles: Int = Field(ge=1, le=LARGEST_COUNT)

    @property
    def stacks(self) -> dict[str, StackShape]:
        return {"L_level": self.hrm_shape(self.num_layers)}

    @property
    def num_calls(self) -> CallCounts:
        return CallCounts(H=0, L=self.cycles)

    def grad_calls_at(self, step: int, total_steps: int) -> CallCounts:
        return CallCounts(H=0, L=self.bp_cycles)


class RINSTextConfig(TwoStackTextConfig):
    """RINS (arXiv 2502.07503): one stack is called `L_cycles` times, then the other one once."""

    name: Literal["rins_text"]
    L_cycles: Int = Field(ge=1, le=LARGEST_COUNT)
    L_bp_cycles: Int = Field(ge=0, le=LARGEST_COUNT)

    @property
    def num_calls(self) -> CallCounts:
        return CallCounts(H=1, L=self.L_cycles)

    def grad_calls_at(self, step: int, total_steps: int) -> CallCounts:
        return CallCounts(H=1, L=self.L_bp_cycles)

    def embedding_has_gradient(self, grad_calls: CallCounts) -> bool:
        return grad_calls.L > 0  # only this stack reads the embedded tokens
