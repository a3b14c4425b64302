"""Trajectory terms in the Hugging Face Trainer.

`compute_loss` adds the term to the Trainer's own loss. A callback tells the term the epoch and each
optimizer step, and puts its state into every checkpoint's folder, for `resume_from_checkpoint`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise ImportError("transformers is missing: pip install 'saltflat[transformers]'") from error

from saltflat.integrations.hooks import has_weights, warn_if_never_active
from saltflat.memory.indexing import with_index_column
from saltflat.terms import Batch, TrajectoryTerm

__all__ = ["TrajectoryMixin", "TrajectoryTrainer"]

STATE = "trajectory.pt"
"""The file of a checkpoint's folder that holds the term."""

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class TrajectoryMixin(_Base):
    """Adds a trajectory term to any Trainer: `class Mine(TrajectoryMixin, Seq2SeqTrainer): ...`.

    The Trainer's own loss is unchanged, or is dropped if the term replaces the loss. Where
    gradients are accumulated, the term of a step is the mean of its batches' terms.

    If the term needs an index, samples get a column "index" with their position in `train_dataset`,
    unless they have one, and the Trainer keeps it. The log has the mean "trajectory_loss".

    Args:
        *args: The Trainer's.
        term: Any trajectory term, built after the TrainingArguments, which start torch.distributed.
        **kwargs: The Trainer's.

    Raises:
        TypeError: If the term needs an index, and the dataset is a stream.
        ValueError: If the term has weights of its own, and `model_init` would make a new model.
    """

    def __init__(self, *args: Any, term: TrajectoryTerm, **kwargs: Any) -> None:
        if has_weights(term) and kwargs.get("model_init") is not None:
            name = type(term).__name__
            raise ValueError(f"{name} was built on another model than model_init makes: pass model")
        super().__init__(*args, **kwargs)
        self.term = term
        self._sum, self._count = torch.zeros(()), 0  # of the trajectory terms since the last log
        if term.needs_index and self.train_dataset is not None:
            self.train_dataset: Any = with_index_column(self.train_dataset)
        self.add_callback(_Follow(self))

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
        labels = next((inputs[name] for name in self.label_names if name in inputs), None)
        if self.term.needs_index and index is None:
            raise ValueError(
                f"a batch has no 'index', and {type(self.term).__name__} needs it: let the data "
                "collator hand it on; for a train_dataset that you set after building the Trainer, "
                "set trainer.train_dataset = saltflat.with_index_column(dataset)"
            )
        # This may take the labels out of `inputs`, to smooth them.
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        batch = Batch(index, ((), self._for_term(inputs)), labels)
        with self.accelerator.autocast():  # as the model was; a teacher is not wrapped
            term = self.term(self._logits(inputs, outputs), batch)
        self._sum, self._count = self._sum.to(term.device) + term.detach(), self._count + 1
        scaled = term / self._batches(num_items_in_batch)
        loss = scaled if self.term.replaces_loss else loss + scaled
        return (loss, outputs) if return_outputs else loss

    def _logits(self, inputs: dict[str, Any], outputs: Any) -> Any:
        """The logits in a model's outputs; in a tuple they follow the loss, if there is one."""
        if not isinstance(outputs, dict):
            return outputs[1 if inputs.keys() & set(self.label_names) else 0]
        if "logits" not in outputs:
            names = ", ".join(outputs)
            raise ValueError(f"{type(self.term).__name__} needs logits, the model has {names}")
        return outputs["logits"]

    def _for_term(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The model's inputs, without labels that only its loss needs."""
        config = getattr(self.model, "config", None)
        decodes = getattr(config, "is_encoder_decoder", False)
        if decodes and not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
            return inputs  # it makes the decoder's input from the labels
        return {name: x for name, x in inputs.items() if name not in self.label_names}

    def _batches(self, num_items_in_batch: Any) -> int:
        """The number of batches to divide a term by: 1 where `training_step` divides."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # absent in transformers 5.0
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        return self.current_gradient_accumulation_steps if scaled else 1

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, on inputs without the index."""
        inputs = {name: x for name, x in inputs.items() if name != "index"}
        return super().prediction_step(model, inputs, *args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; a resume loads the term too."""
        last = resume_from_checkpoint is True
        if folder := get_last_checkpoint(self.args.output_dir) if last else resume_from_checkpoint:
            path = Path(folder) / STATE
            if not path.exists():
                raise ValueError(f"{path} is missing: the checkpoint was saved without the term")
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            self.term.load_state_dict(state)
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
    """The Trainer with a trajectory term; see `TrajectoryMixin`."""


class _Follow(TrainerCallback):
    """Tells a trainer's term the epochs and steps, and saves it."""

    def __init__(self, trainer: TrajectoryMixin) -> None:
        self.trainer = trainer
        self.epoch = 0
        """The next one. The Trainer's own is a fraction of its estimate of the epoch's length."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        term = self.trainer.term.to(args.device)
        self.epoch = int(state.epoch or 0)
        if term.epoch is not None and term.epoch > self.epoch:
            raise ValueError(
                f"term is in epoch {term.epoch}, but training begins in epoch {self.epoch}: set a "
                "new one, trainer.term = ..., or resume_from_checkpoint"
            )
        epochs = state.num_train_epochs
        warn_if_never_active(term, epochs, f"num_train_epochs={epochs}")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.term.set_epoch(self.epoch)
        self.epoch += 1

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.term.update(cast(nn.Module, self.trainer.model))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.save_only_model:
            return
        self.trainer.term.sync()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            torch.save(self.trainer.term.state_dict(), folder / STATE)
