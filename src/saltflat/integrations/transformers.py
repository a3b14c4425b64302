"""SAF and MESA in the Hugging Face Trainer.

`compute_loss` adds the trajectory term to the Trainer's own loss. A callback tells the term the
epoch, averages MESA's teacher after each optimizer step, and puts the term's state into every
checkpoint's folder, from which `resume_from_checkpoint` takes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

try:
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError("transformers is missing: pip install 'saltflat[transformers]'") from error

from saltflat.indexed import with_index_column
from saltflat.integrations._transformers import Follow, load
from saltflat.mesa import MESA
from saltflat.saf import SAF

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class TrajectoryMixin(_Base):
    """Makes any Trainer add SAF or MESA: `class Mine(TrajectoryMixin, Seq2SeqTrainer): ...`.

    The Trainer's own loss stays as it is. Where gradients are accumulated, the term of a step is
    the mean of its batches' terms.

    SAF's samples get a column "index" with their place in `train_dataset`, unless they have one,
    and the Trainer keeps it. The log has the mean "trajectory_loss" beside the loss it is part of.

    Args:
        *args: The Trainer's.
        term: A SAF or a MESA, built after the TrainingArguments (which start torch.distributed).
        **kwargs: The Trainer's.

    Raises:
        TypeError: If SAF is to train on a dataset without indices.
        ValueError: If MESA is to follow a model that does not exist yet, or returns tuples.
    """

    def __init__(self, *args: Any, term: SAF | MESA, **kwargs: Any) -> None:
        if isinstance(term, MESA) and kwargs.get("model_init") is not None:
            raise ValueError("MESA was built on another model than model_init makes: pass model=")
        super().__init__(*args, **kwargs)
        config = getattr(self.model, "config", None)
        if isinstance(term, MESA) and not getattr(config, "return_dict", True):
            raise ValueError("MESA needs outputs with .logits: set model.config.return_dict = True")
        self.term = term
        self._sum, self._count = torch.zeros(()), 0  # of the trajectory terms since the last log
        if isinstance(term, SAF) and self.train_dataset is not None:
            self.train_dataset: Any = with_index_column(self.train_dataset)
        self.add_callback(Follow(self))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The Trainer's loss, and in training the trajectory term."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        index = inputs.pop("index", None)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        logits = self._logits(inputs, outputs)
        if isinstance(self.term, MESA):
            with self.accelerator.autocast():  # as the model itself was; the teacher is not wrapped
                term = self.term(logits, **self._for_teacher(inputs))
        elif index is None:
            raise ValueError(
                "a batch without 'index', by which SAF knows samples: a data collator must hand it "
                "on, and a train_dataset that is set after the Trainer was built must have it: "
                "trainer.train_dataset = saltflat.indexed.with_index_column(dataset)"
            )
        else:
            term = self.term(logits, index)
        self._sum, self._count = self._sum.to(term.device) + term.detach(), self._count + 1
        loss = loss + term / self._batches(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _logits(self, inputs: dict[str, Any], outputs: Any) -> Any:
        """Those among a model's outputs; in a tuple they stand after the loss, if it made one."""
        if not isinstance(outputs, dict):
            return outputs[1 if inputs.keys() & set(self.label_names) else 0]
        if "logits" not in outputs:
            names = ", ".join(outputs)
            raise ValueError(f"SAF and MESA compare logits, and the model has none, but {names}")
        return outputs["logits"]

    def _for_teacher(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model was called with, less the labels where only its loss needs them."""
        config = getattr(self.model, "config", None)
        decodes = getattr(config, "is_encoder_decoder", False)
        if decodes and not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
            return inputs  # of the labels it makes what the decoder is given
        return {name: x for name, x in inputs.items() if name not in self.label_names}

    def _batches(self, num_items_in_batch: Any) -> int:
        """By how many batches of a step to divide a term: 1 where `training_step` will do it."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # which transformers 5.0 has not
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        return self.current_gradient_accumulation_steps if scaled else 1

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, on inputs without the index."""
        inputs = {name: x for name, x in inputs.items() if name != "index"}
        return super().prediction_step(model, inputs, *args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; resuming brings the term back too."""
        last = resume_from_checkpoint is True
        if folder := get_last_checkpoint(self.args.output_dir) if last else resume_from_checkpoint:
            load(self.term, folder)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with the trajectory term beside the training loss."""
        if "loss" in logs and self._count:
            logs["trajectory_loss"] = float(self._sum) / self._count
            self._sum, self._count = torch.zeros(()), 0
        super().log(logs, *args, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns: Any = list(dict.fromkeys([*self._signature_columns, "index"]))


class TrajectoryTrainer(TrajectoryMixin, Trainer):
    """The Trainer with SAF or MESA; see `TrajectoryMixin`."""
