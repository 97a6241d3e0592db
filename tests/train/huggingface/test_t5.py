"""Encoder-decoders against transformers: files, logits, gradients, packed pairs, generation, training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.weight_source import open_weights
from pipeline.train.huggingface.configs import from_hf_config, to_hf_config
from pipeline.train.huggingface.convert import from_hf, to_hf
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from tests.train.huggingface import parity
from tests.train.huggingface.hf_mapping import randomize
from tests.train.huggingface.parity import QUIET, VOCAB, Pair, Row, close, draw, tensors_of

SHAPE = {
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 44,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 3,
}


class T5Row(Row):
    """A T5 with the head of its version."""

    def build(self) -> PreTrainedModel:
        config = self.config(**{"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 0, **self.values})
        model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32)
        if not config.scale_decoder_outputs:
            model.lm_head.weight = nn.Parameter(torch.empty(VOCAB, config.d_model))
        randomize(model, seed=3, gain=self.gain)
        return model.eval()


ROWS = {
    "1.0": T5Row(T5Config, SHAPE, gain=0.7),
    "1.1": T5Row(T5Config, {**SHAPE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, gain=0.7),
    "ul2": T5Row(T5Config, {**SHAPE, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False}, gain=0.7),
}


@pytest.fixture(scope="module", params=ROWS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Pair:
    row = ROWS[request.param]
    folder, theirs = tmp_path_factory.mktemp("t5"), row.build()
    save(theirs, folder / "theirs", tokenizer)
    found = HuggingFaceFolder(folder / "theirs")
    ours = Decoder(found.spec)
    ours.load_state_dict(found.read(found.tensors))
    return Pair(row, theirs, folder / "theirs", found, ours, tokenizer)


def save(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer) -> None:
    """A model with its tokenizer."""
    save_weights(model, folder)
    tokenizer.save(folder)
    storage.put_json(folder / "tokenizer_config.json", {"eos_token": tokenizer.end_of_document_token})


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """A model as version 4 of transformers saved it: its head where it has one of its own, the embedding once."""
    folder.mkdir()
    untied = not model.config.scale_decoder_outputs
    left_out = "(en|de)coder.embed_tokens.weight" + ("" if untied else "|lm_head.weight")
    kept = {name: value for name, value in model.state_dict().items() if not re.fullmatch(left_out, name)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    values = json.loads(model.config.to_json_string())
    values |= {"tie_word_embeddings": not untied, "architectures": [type(model).__name__]}
    storage.put_json(folder / "config.json", values)


def logits_of(pair: Pair, encoder: Tensor, decoder: Tensor) -> Tensor:
    found = pair.ours(torch.cat((encoder, decoder), 1), Context(encoder=encoder.shape[1]))
    return found[..., :VOCAB]


def test_conversion(pair: Pair, tmp_path: Path) -> None:
    """Each tensor is bit for bit what it was, and transformers loads our export."""
    from_hf(pair.folder, tmp_path / "ours", console=QUIET)
    to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    before, after = tensors_of(pair.folder), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    for name in ("config.json", "generation_config.json"):  # the end of a document, which others fill up with, is 0
        values = json.loads((tmp_path / "again" / name).read_text())
        assert values["decoder_start_token_id"] == values["pad_token_id"] == SHAPE["decoder_start_token_id"]
    source = open_weights(tmp_path / "ours", None, "model")
    converted = source.read(source.tensors)
    state = pair.ours.state_dict()
    assert state.keys() == converted.keys() and all(torch.equal(converted[name], state[name]) for name in state)
    again, report = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "again", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    encoder, decoder = draw(2, 13), draw(2, 7, seed=5)
    with torch.no_grad():
        found, wanted = (
            model.eval()(input_ids=encoder, decoder_input_ids=decoder).logits for model in (again, pair.theirs)
        )
    close(found, wanted, "logits")


def test_a_tied_head_without_a_factor(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A T5 1.1 that version 5 of transformers made itself: its config.json is that of one with a head of its own."""
    theirs = T5ForConditionalGeneration(
        T5Config(**{"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 0, **ROWS["1.1"].values})
    ).eval()
    randomize(theirs, seed=3, gain=0.7)
    assert theirs.lm_head.weight is theirs.shared.weight
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    storage.put_json(tmp_path / "theirs/tokenizer_config.json", {"eos_token": tokenizer.end_of_document_token})
    found = HuggingFaceFolder(tmp_path / "theirs")
    assert found.model.tie_embeddings and found.model.logit_scale == 1.0
    ours = Decoder(found.spec)
    ours.load_state_dict(found.read(found.tensors))
    from_hf(tmp_path / "theirs", tmp_path / "ours", console=QUIET)
    to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    encoder, decoder = draw(2, 13), draw(2, 7, seed=5)
    with torch.no_grad():
        wanted = theirs(input_ids=encoder, decoder_input_ids=decoder).logits
        close(again(input_ids=encoder, decoder_input_ids=decoder).logits, wanted, "logits of the export")
        inputs = torch.cat((encoder, decoder), 1)
        close(ours(inputs, Context(encoder=encoder.shape[1]))[..., :VOCAB], wanted, "logits")


def test_config(pair: Pair) -> None:
    """config.json there and back, every key is read, and what is not computed is refused by its name."""
    parity.check_keys(pair.row)
    model = pair.found.model
    _, values = to_hf_config(model, VOCAB, pair.found.positions)
    assert decoder_spec(from_hf_config(values, "config.json")[1], VOCAB, 64) == decoder_spec(model, VOCAB, 64)
    for key, value in {"feed_forward_proj": "gated-tanh", "is_decoder": True, "dense_act_fn": "silu2"}.items():
        with pytest.raises(UserError, match=key):
            from_hf_config({**values, key: value}, "config.json")
    with pytest.raises(UserError, match="logit_scale"):
        to_hf_config(model.model_copy(update={"logit_scale": 3.0}), VOCAB, 64)


def test_logits_and_gradients(pair: Pair) -> None:
    for length, behind in ((1, 1), (13, 1), (40, 33)):
        encoder, decoder = draw(2, length), draw(2, behind, seed=length)
        with torch.no_grad():
            wanted = pair.theirs(input_ids=encoder, decoder_input_ids=decoder).logits
            close(logits_of(pair, encoder, decoder), wanted, f"logits of {length} and {behind}")
    encoder, decoder, targets = draw(3, 40), draw(3, 21, seed=5), draw(3, 21, seed=6).flatten()
    F.cross_entropy(pair.theirs(input_ids=encoder, decoder_input_ids=decoder).logits.flatten(0, 1), targets).backward()
    F.cross_entropy(logits_of(pair, encoder, decoder).flatten(0, 1), targets).backward()
    theirs = {name: value.grad for name, value in pair.theirs.named_parameters()}
    gradients = {name: value.grad for name, value in pair.ours.named_parameters()}
    assert pair.found.mapping.theirs.keys() <= theirs.keys()
    for name in pair.found.mapping.theirs:
        wanted = theirs[name]
        assert wanted is not None
        close(pair.found.mapping.to_theirs(name, gradients)[:VOCAB], wanted, name)
    for model in (pair.ours, pair.theirs):
        model.zero_grad()


@torch.no_grad()
def test_packed(pair: Pair) -> None:
    """A pair in a window with others is computed as transformers computes it alone."""
    sizes = ((9, 4), (1, 5), (21, 1), (3, 17))
    pairs = [(draw(1, one, seed=one), draw(1, other, seed=40 + other)) for one, other in sizes]
    rows = [*(one for one, _ in pairs), *(other for _, other in pairs)]
    lengths = torch.tensor([row.shape[1] for row in rows])
    starts = lengths.cumsum(0) - lengths
    context = Context(
        bounds_BS=starts.repeat_interleave(lengths)[None], starts=starts, encoder=sum(one for one, _ in sizes)
    )
    together, place = pair.ours(torch.cat(rows, 1), context)[..., :VOCAB], 0
    for encoder, decoder in pairs:
        alone = pair.theirs(input_ids=encoder, decoder_input_ids=decoder).logits
        close(together[:, place : place + decoder.shape[1]], alone, f"pair of {encoder.shape[1]}")
        place += decoder.shape[1]


@torch.no_grad()
def test_greedy(pair: Pair) -> None:
    """The likeliest tokens, with the encoder's keys and values made once, for prompts of several lengths at once."""
    counts, steps = [11, 4, 17], 20
    prompts = [draw(1, count, seed=count) for count in counts]
    states = pair.ours.new_states(len(counts))
    padded = torch.cat([F.pad(prompt, (0, max(counts) - prompt.shape[1])) for prompt in prompts])
    pair.ours(padded, Context(encoder=max(counts), states=states, counts=counts))
    tokens, found = torch.zeros(len(counts), 1, dtype=torch.int64), []
    for _ in range(steps):
        tokens = pair.ours(tokens, Context(states=states))[:, -1:].argmax(-1)
        found.append(tokens)
    for prompt, ours in zip(prompts, torch.cat(found, 1), strict=True):
        theirs = pair.theirs.generate(
            input_ids=prompt,
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=VOCAB + 1,
            decoder_start_token_id=0,
            use_cache=False,  # which has as many layers as the encoder
        )
        assert theirs[0, 1:].tolist() == ours.tolist()


@torch.no_grad()
def test_rows_join_and_leave(pair: Pair) -> None:
    """A row's logits are those of a whole pass, whoever else is there."""
    encoders = [draw(1, count, seed=count) for count in (6, 15, 3)]
    decoders = [draw(1, 5, seed=50 + count) for count in range(3)]
    states = pair.ours.new_states(0)
    for encoder, decoder in zip(encoders, decoders, strict=True):
        more = pair.ours.new_states(1)
        pair.ours(encoder, Context(encoder=encoder.shape[1], states=more))
        pair.ours(decoder[:, :2], Context(states=more))
        states.join(more)
    states.remove(0)  # the last takes its place
    found = pair.ours(torch.cat((decoders[2], decoders[1]))[:, 2:], Context(states=states))[..., :VOCAB]
    for row, which in zip(found, (2, 1), strict=True):
        wanted = logits_of(pair, encoders[which], decoders[which])[0, 2:]
        close(row, wanted, f"row {which}")


@pytest.mark.guard
def test_training(pair: Pair, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Twenty steps from the same weights on the same batches: the same losses."""
    save(pair.row.build(), tmp_path / "theirs", tokenizer)
    found, theirs = HuggingFaceFolder(tmp_path / "theirs"), pair.row.build().train()
    ours = Decoder(found.spec)
    ours.load_state_dict(found.read(found.tensors))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)) for model in (theirs, ours)]
    for step in range(20):
        encoder, decoder, targets = draw(4, 30, seed=step), draw(4, 12, seed=100 + step), draw(4, 12, seed=200 + step)
        outputs = (
            theirs(input_ids=encoder, decoder_input_ids=decoder).logits,
            ours(torch.cat((encoder, decoder), 1), Context(encoder=30)),
        )
        losses = []
        for logits, optimizer, model in zip(outputs, optimizers, (theirs, ours), strict=True):
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-5, step
