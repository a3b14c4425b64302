"""What is particular to the Hugging Face Trainer: its loss, its models, its columns and resumes."""

import json
import warnings

import pytest
import torch
from datasets import Dataset
from problems import CLASSES, SAMPLES, same
from torch.nn.functional import cross_entropy
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.models.bart.modeling_bart import shift_tokens_right

from saltflat import MESA, SAF, with_index_column
from saltflat.integrations.transformers import STATE, TrajectoryTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::accelerate"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
LENGTH = 6
SAF_SETTINGS = {"lag": 1, "start_epoch": 1}
MESA_SETTINGS = {"decay": 0.9, "start_epoch": 1}


def texts(indexed=False):
    generator = torch.Generator().manual_seed(0)
    columns = {
        "input_ids": torch.randint(12, (SAMPLES, LENGTH), generator=generator).tolist(),
        "attention_mask": torch.ones(SAMPLES, LENGTH, dtype=torch.int64).tolist(),
        "labels": torch.randint(CLASSES, (SAMPLES,), generator=generator).tolist(),
        "note": ["not for the model"] * SAMPLES,
    }
    if indexed:
        columns["index"] = list(range(SAMPLES))[::-1]
    return Dataset.from_dict(columns)


def bert(dropout=0.1):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(
        BertConfig(vocab_size=12, intermediate_size=8, num_labels=CLASSES, **sizes, **drop)
    )


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=2, n_positions=8))


def bart():
    torch.manual_seed(0)
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    tokens = {"vocab_size": 12, "pad_token_id": 1, "decoder_start_token_id": 2}
    config = BartConfig(d_model=8, dropout=0.0, **layers, **heads, **tokens)
    return BartForConditionalGeneration(config)


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


def translations():
    """From texts to others of the same length, the ends of which are padding."""
    rows = [dict(row) for row in texts().select_columns(["input_ids"])]
    for row in rows:
        row["labels"] = [(3 * token + 1) % 12 for token in row["input_ids"][:-2]] + [-100] * 2
    return rows


def with_decoder_inputs(samples):
    """As DataCollatorForSeq2Seq makes them, which the smoothing of labels needs."""
    batch = default_data_collator(samples)
    batch["decoder_input_ids"] = shift_tokens_right(batch["labels"], 1, 2)
    return batch


def sentences():
    """Texts to continue, of which every other has two labels alone."""
    rows = [dict(row) for row in texts().select_columns(["input_ids"])]
    for number, row in enumerate(rows):
        count = LENGTH if number % 2 else 2
        row["labels"] = row["input_ids"][:count] + [-100] * (LENGTH - count)
    return rows


def arguments(folder, **kwargs):
    settings = {
        "num_train_epochs": 4,
        "per_device_train_batch_size": 6,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return TrainingArguments(str(folder), **{**settings, **kwargs})


def term_for(method, model, **settings):
    if method == "saf":
        return SAF(SAMPLES, CLASSES, **{**SAF_SETTINGS, **settings})
    return MESA(model, **{**MESA_SETTINGS, **settings})


class Watched(TrajectoryTrainer):
    """Keeps what it was given, so that a loop by hand can repeat it."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.batches = [*getattr(self, "batches", []), dict(inputs)]
        self.epochs = [*getattr(self, "epochs", []), self.term.epoch]
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss]
        return loss


def trained(
    method, folder, *, model=None, data=None, resume=None, stop=None, settings=None, **kwargs
):
    model = model or bert()
    args = arguments(folder, **kwargs)
    callbacks = [stop] if isinstance(stop, TrainerCallback) else [StopAt(stop)] if stop else []
    trainer = Watched(
        model,
        args,
        train_dataset=texts() if data is None else data,
        term=term_for(method, model, **(settings or {})),
        callbacks=callbacks,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class StopAt(TrainerCallback):
    """Ends training after so many steps, as if it had been interrupted."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


class ShortEpochs(TrainerCallback):
    """Ends every epoch after three of its four batches."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 3 == 0


both = pytest.mark.parametrize("method", ["saf", "mesa"])


@both
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("divides", [True, False], ids=["trainer divides", "model should"])
def test_training_equals_the_plain_loop(method, accumulate, divides, tmp_path):
    """Of four batches an epoch; the last of them is a step of its own where three make one."""
    model = bert(0.0)
    if divides:
        model.accepts_loss_kwargs = False
    trainer = trained(method, tmp_path, model=model, gradient_accumulation_steps=accumulate)
    assert len(trainer.batches) == 16
    model = bert(0.0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    term = term_for(method, model)
    terms, means = [], []
    for number, batch in enumerate(trainer.batches):
        epoch, step = divmod(number, 4)
        term.set_epoch(epoch)
        index, labels = batch.pop("index", None), batch.pop("labels")
        logits = model(**batch).logits
        added = term(logits, index) if method == "saf" else term(logits, **batch)
        terms.append(float(added.detach()))
        together = min(accumulate, 4 - step // accumulate * accumulate)
        loss = cross_entropy(logits, labels) / (together if divides else 1) + added / together
        loss.backward()
        torch.testing.assert_close(loss.detach(), trainer.losses[number])
        if (step + 1) % accumulate == 0 or step == 3:
            means.append(sum(terms[-together:]) / together)
            optimizer.step()
            optimizer.zero_grad()
            if method == "mesa":
                term.update(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor, msg=name)
    assert terms[:4] == [0] * 4 and min(terms[4:]) > 0
    logged = [log["trajectory_loss"] for log in trainer.state.log_history if "loss" in log]
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(means))


def summed(outputs, labels, num_items_in_batch):
    """A loss that divides by the count of a whole step, as the Trainer's documentation has it."""
    return cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("method", "make", "data", "extra"),
    [
        ("saf", bert, texts, {}),
        ("mesa", bert, texts, {}),
        ("mesa", gpt2, sentences, {}),
        ("saf", bert, texts, {"label_smoothing_factor": 0.1}),
        ("saf", bert, texts, {"compute_loss_func": summed}),
    ],
    ids=["bert saf", "bert mesa", "gpt2", "label smoothing", "own loss"],
)
def test_the_trainers_own_loss_is_left_alone(method, make, data, extra, accumulate, tmp_path):
    """With weight 0 the weights are those of the plain Trainer, to the bit, dropout included."""
    extra = dict(extra)
    how = {name: extra.pop(name) for name in ("compute_loss_func",) if name in extra}
    results = []
    for kind in (Trainer, TrajectoryTrainer):
        model = make()
        if kind is TrajectoryTrainer:
            how["term"] = term_for(method, model, weight=0.0)
        args = arguments(tmp_path, gradient_accumulation_steps=accumulate, **extra)
        trainer = kind(model, args, train_dataset=data(), **how)
        results.append((trainer.train().training_loss, dict(model.state_dict())))
    assert same(*results)


def test_the_trainers_own_accumulation_is_as_the_page_says(tmp_path):
    """For the same 24 samples in 1, 2 and 4 batches, by a Trainer without a term."""
    logs = []
    for set_right in (False, True):
        for count in (1, 2, 4):
            model = bert(0.0)
            if set_right:
                model.accepts_loss_kwargs = False
            how = {"num_train_epochs": 1, "gradient_accumulation_steps": count}
            args = arguments(tmp_path, per_device_train_batch_size=24 // count, **how)
            trainer = Trainer(model, args, train_dataset=texts())
            trainer.train()
            logs.append(trainer.state.log_history[0])
    assert [round(log["loss"], 3) for log in logs] == [1.387, 2.773, 5.546, 1.387, 1.387, 1.387]
    norms = torch.tensor([log["grad_norm"] for log in logs])
    torch.testing.assert_close(norms / norms[0], torch.tensor([1.0, 2, 4, 1, 1, 1]))


@pytest.mark.parametrize(
    ("make", "smoothing", "collate"),
    [(bart, 0.0, None), (t5, 0.0, None), (bart, 0.1, None), (t5, 0.1, with_decoder_inputs)],
)
def test_the_teacher_sees_what_the_student_sees(make, smoothing, collate, tmp_path):
    """And so says the same as long as nothing is learnt.

    An encoder-decoder makes its decoder's input of the labels, unless these are kept from it to be
    smoothed: then BART takes the encoder's input, and T5 must be given one.
    """
    for rate in (0.0, 0.1):
        model = make()
        trainer = TrajectoryTrainer(
            model,
            arguments(tmp_path, num_train_epochs=2, label_smoothing_factor=smoothing),
            train_dataset=translations(),
            data_collator=collate,
            term=term_for("mesa", model),
            optimizers=(torch.optim.SGD(model.parameters(), lr=rate), None),
        )
        trainer.train()
        terms = [log["trajectory_loss"] for log in trainer.state.log_history[4:8]]
        assert max(terms) < 1e-6 if rate == 0 else min(terms) > 1e-5


@pytest.mark.usefixtures("own_accelerator")
def test_the_teacher_runs_in_the_models_precision(tmp_path):
    """And so again says the same as long as nothing is learnt."""
    model, types = bert(0.0), []
    term = term_for("mesa", model, start_epoch=0)
    for one in (model, term.teacher.module):
        one.classifier.register_forward_hook(lambda *call: types.append(call[-1].dtype))
    trainer = TrajectoryTrainer(
        model,
        arguments(tmp_path, bf16=True),
        train_dataset=texts(),
        term=term,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.0), None),
    )
    trainer.train()
    assert types == [torch.bfloat16] * 32
    assert [log["trajectory_loss"] for log in trainer.state.log_history[:-1]] == [0] * 16


@pytest.mark.parametrize(("method", "step"), [("saf", 5), ("mesa", 5), ("saf", 8)])
def test_resumed_training_equals_training_straight_through(method, step, tmp_path):
    """Of four steps an epoch, with dropout, and with checkpoints that are rotated away."""
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    straight = trained(method, tmp_path / "straight")
    first = trained(method, tmp_path / "other", stop=step, **saving)
    folders = sorted(path.name for path in (tmp_path / "other").glob("checkpoint-*"))
    assert folders == [f"checkpoint-{step - 1}", f"checkpoint-{step}"]
    second = trained(method, tmp_path / "other", resume=True, **saving)
    assert same(first.losses + second.losses, straight.losses)
    assert same(dict(second.model.state_dict()), dict(straight.model.state_dict()))
    assert same(dict(second.term.state_dict()), dict(straight.term.state_dict()))


@both
def test_epochs_that_end_early_are_epochs(method, tmp_path):
    trainer = trained(method, tmp_path, stop=ShortEpochs())
    assert trainer.epochs == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_passes_over_a_stream_are_epochs(tmp_path):
    """Of four batches a pass, which the Trainer cannot know."""
    data = texts().to_iterable_dataset()
    saving = {"max_steps": 16, "save_strategy": "steps", "save_steps": 8}
    straight = trained("mesa", tmp_path, data=data, **saving)
    assert straight.epochs == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    terms = [log["trajectory_loss"] for log in straight.state.log_history[:-1]]
    assert terms[:4] == [0] * 4 and min(terms[4:]) > 0
    where = str(tmp_path / "checkpoint-8")
    resumed = trained("mesa", tmp_path, data=data, resume=where, **saving)
    assert resumed.epochs == [2] * 4 + [3] * 4


def test_a_checkpoint_without_the_term(tmp_path):
    trainer = trained("saf", tmp_path, save_strategy="epoch", num_train_epochs=2)
    (tmp_path / "checkpoint-4" / STATE).unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4/trajectory.pt is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_samples_keep_an_index_of_their_own(tmp_path):
    given = trained("saf", tmp_path, data=texts(indexed=True), num_train_epochs=2)
    made = trained("saf", tmp_path, num_train_epochs=2)
    listed = trained("saf", tmp_path, data=[dict(row) for row in texts()], num_train_epochs=2)
    for batch, other, plain in zip(given.batches, made.batches, listed.batches, strict=True):
        assert torch.equal(batch["index"], SAMPLES - 1 - other["index"])
        assert same(other, plain)
        assert "note" not in batch


def test_samples_that_a_transform_makes_get_their_index(tmp_path):
    """Although it leaves out whatever columns it pleases."""
    columns = ("input_ids", "attention_mask", "labels")
    data = texts().with_transform(lambda rows: {name: rows[name] for name in columns})
    kept = trained("saf", tmp_path, data=data, num_train_epochs=2)
    assert same(kept.batches, trained("saf", tmp_path, num_train_epochs=2).batches)


def test_evaluation_needs_no_index_and_records_nothing(tmp_path):
    trainer = trained("saf", tmp_path, num_train_epochs=2)
    before = {name: tensor.clone() for name, tensor in trainer.term.state_dict().items()}
    for data in (texts(), texts(indexed=True), texts(indexed=True).remove_columns("labels")):
        predictions = trainer.predict(data).predictions
        assert predictions.shape == (SAMPLES, CLASSES)
    assert same(dict(trainer.term.state_dict()), before)


@pytest.mark.parametrize("lost", ["by the collator", "in a dataset set later"])
def test_an_index_that_is_lost_on_the_way(lost, tmp_path):
    def forgetful(samples):
        batch = default_data_collator(samples)
        del batch["index"]
        return batch

    model = bert()
    how = {"term": term_for("saf", model)}
    if lost == "by the collator":
        trainer = TrajectoryTrainer(
            model, arguments(tmp_path), train_dataset=texts(), data_collator=forgetful, **how
        )
    else:
        trainer = TrajectoryTrainer(model, arguments(tmp_path), **how)
        trainer.train_dataset = texts()
    with pytest.raises(ValueError, match=r"no 'index'.*collator.*with_index_column"):
        trainer.train()
    if lost == "in a dataset set later":
        trainer.train_dataset = with_index_column(texts())
        trainer.train()


def test_what_cannot_work_is_said_at_once(tmp_path):
    model, args = bert(), arguments(tmp_path, max_steps=2)
    stream = texts().to_iterable_dataset()
    with pytest.raises(TypeError, match=r"IterableDataset has no index"):
        TrajectoryTrainer(model, args, train_dataset=stream, term=term_for("saf", model))
    with pytest.raises(ValueError, match="model_init"):
        TrajectoryTrainer(model_init=bert, args=args, term=term_for("mesa", model))
    TrajectoryTrainer(model, args, train_dataset=stream, term=term_for("mesa", model)).train()


def test_of_a_stream_nobody_knows_how_many_passes_there_will_be(tmp_path):
    """So no warning says that the term never starts."""
    model = bert()
    how = {"train_dataset": texts().to_iterable_dataset(), "term": term_for("mesa", model)}
    trainer = TrajectoryTrainer(model, arguments(tmp_path, max_steps=2), **how)
    with warnings.catch_warnings(record=True) as said:
        trainer.train()
    assert not [each for each in said if "never" in str(each.message)]
    assert trainer.state.global_step == 2


@both
def test_a_term_trains_once(method, tmp_path):
    trainer = trained(method, tmp_path)
    with pytest.raises(ValueError, match=r"in epoch 3, .*trainer.term ="):
        trainer.train()
    trainer.term = term_for(method, trainer.model)
    trainer.train()
    assert trainer.term.epoch == 3


def test_a_model_without_logits(tmp_path):
    config = bert().config
    config.num_labels = 2  # for the start and the end of an answer
    answers = [{"input_ids": [1] * 6, "start_positions": 1, "end_positions": 2}] * SAMPLES
    with pytest.raises(ValueError, match="the model has loss, start_logits, end_logits"):
        trained("mesa", tmp_path, model=BertForQuestionAnswering(config), data=answers)


@pytest.mark.parametrize("extra", [{}, {"label_smoothing_factor": 0.1}], ids=["", "smoothing"])
def test_a_model_that_returns_tuples(extra, tmp_path):
    """MESA must be told which of the teacher's outputs are the logits."""

    def tuples():
        model = bert()
        model.config.return_dict = False
        return model

    losses = trained("saf", tmp_path, model=tuples(), **extra).losses
    assert same(losses, trained("saf", tmp_path, **extra).losses)
    with pytest.raises(ValueError, match=r"got tuple: .*output=lambda"):
        trained("mesa", tmp_path, model=tuples())
    settings = {"output": lambda out: out[0]}
    losses = trained("mesa", tmp_path, model=tuples(), settings=settings, **extra).losses
    assert same(losses, trained("mesa", tmp_path, **extra).losses)


def test_the_log_is_plain_numbers(tmp_path):
    trainer = trained("mesa", tmp_path, num_train_epochs=2)
    assert json.loads(json.dumps(trainer.state.log_history))[0]["trajectory_loss"] == 0
