"""Encoder-decoders write texts: against transformers, whole passes, and each text by itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.engine import open_engine
from pipeline.eval.generation.batch import GenerationBatch
from pipeline.eval.generation.generate import Continuation, generate
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.scoring import Prompt, Request, continue_greedily, score
from pipeline.eval.text import continue_prompt
from pipeline.train.distributed.process_group import Processes, destroy
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.loop.trainer import train
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from tests import tiny
from tests.eval.generation.test_generate import Letters, ids
from tests.eval.server.running import running
from tests.train.huggingface.parity import QUIET, VOCAB
from tests.train.huggingface.test_t5 import ROWS, save_weights

LENGTHS = (10, 1, 23, 3, 39, 11, 2)
END, START = VOCAB - 1, 7


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    folder, theirs = tmp_path_factory.mktemp("t5") / "theirs", ROWS[request.param].build()
    save_weights(theirs, folder)
    found = HuggingFaceFolder(folder)
    ours = Decoder(found.spec)
    ours.load_state_dict(found.read(found.tensors))
    ours.start_token = START
    return theirs, ours.eval()


def draw_prompts() -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(VOCAB - 1) for _ in range(length)] for length in LENGTHS]


@pytest.mark.first(3)
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_greedy_equals_transformers(models: tuple[PreTrainedModel, Decoder], penalty: float) -> None:
    """Token for token, prompts of unequal length together, three at a time."""
    theirs, ours = models
    settings = [Sampling(temperature=0, max_tokens=25 - n, repetition_penalty=penalty) for n in range(len(LENGTHS))]
    found = generate(ours, Letters(END), draw_prompts(), settings, slots=3)
    for prompt, how, continuation in zip(draw_prompts(), settings, found, strict=True):
        expected = theirs.generate(
            input_ids=torch.tensor([[*prompt, END]]),
            max_new_tokens=how.max_tokens,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=END,
            decoder_start_token_id=START,
            use_cache=False,  # which has as many layers as the encoder
        )[0, 1:].tolist()
        ends = expected[-1] == END
        assert ids(continuation) == (expected[:-1] if ends else expected)
        assert continuation.finish == ("stop" if ends else "length")


@torch.no_grad()
def test_log_probabilities_are_those_of_whole_passes(models: tuple[PreTrainedModel, Decoder]) -> None:
    """Drawn tokens have the log-probabilities that one pass of both sides gives, here and there."""
    theirs, ours = models
    settings = [Sampling(temperature=1, max_tokens=20, seed=seed, logprobs=0) for seed in range(len(LENGTHS))]
    found = generate(ours, Letters(END), draw_prompts(), settings, slots=4)
    assert len({tuple(ids(continuation)) for continuation in found}) == len(found)
    for prompt, continuation in zip(draw_prompts(), found, strict=True):
        taken = ids(continuation)
        encoder, decoder = torch.tensor([[*prompt, END]]), torch.tensor([[START, *taken[:-1]]])
        whole = ours(torch.cat((encoder, decoder), 1), Context(encoder=encoder.shape[1]))[..., :VOCAB]
        for logits in (whole, theirs(input_ids=encoder, decoder_input_ids=decoder).logits):
            wanted = logits[0].log_softmax(-1)[torch.arange(len(taken)), torch.tensor(taken)]
            got = torch.tensor([token.logprob for token in continuation.tokens])
            torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-4)


def test_a_text_does_not_depend_on_the_others(models: tuple[PreTrainedModel, Decoder]) -> None:
    _, ours = models
    settings = [Sampling(max_tokens=5 + 3 * n, temperature=n % 3, seed=n) for n in range(len(LENGTHS))]
    together = generate(ours, Letters(END), draw_prompts(), settings, slots=3)

    def alone(prompt: list[int], how: Sampling) -> Continuation:
        return generate(ours, Letters(END), [prompt], how)[0]

    assert [alone(*pair) for pair in zip(draw_prompts(), settings, strict=True)] == together


def test_refusals(models: tuple[PreTrainedModel, Decoder]) -> None:
    batch = GenerationBatch(models[1], Letters(END), slots=1, max_length=8)
    with pytest.raises(UserError, match="log-probabilities of the prompt"):
        batch.start([1, 2], Sampling(logprobs=0, prompt_logprobs=True))
    with pytest.raises(UserError, match="9 tokens"):
        batch.start([1] * 8, Sampling())
    batch.start([1] * 7, Sampling(max_tokens=100))


SPANS = {
    "model.encoder": {"layers": 1},
    "model.document_attention": True,
    "tokenizer.special_tokens": [f"<extra_id_{number}>" for number in range(8)],
    "train.objective": {"type": "spans"},
    "train.duration": "2 steps",
    "train.precision.compute": "fp32",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose run is over."""
    file = tiny.write_run(tmp_path_factory.mktemp("spans"), SPANS)
    preprocess(load(file))
    train(load(file))
    return file


def test_a_trained_run_writes_and_serves(trained: Path) -> None:
    config = load(trained, ["generate.prompt=the sea <extra_id_0>", "generate.temperature=9"])
    assert continue_prompt(config, console=QUIET)
    with running(load(trained, ["serve.port=0"])) as server:
        answer = server.post("/v1/completions", {"prompt": "the sea", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] <= 4


def test_scores(trained: Path) -> None:
    """A context goes through the encoder; what is predicted is what the decoder would write."""
    destroy()
    engine = open_engine(load(trained), None, Processes(0, 1, 0, 1))
    model, end = engine.model.whole, engine.tokenizer.end_of_document
    contexts = [[3, 4, 5], [3], list(range(5, 25)), [3, 4, 5]]
    requests = [Request([*context, 9, 8 + number], 2) for number, context in enumerate(contexts)]
    found = score(engine, requests, batch_size=3)
    for request, scored in zip(requests, found, strict=True):
        *context, first, second = request.tokens
        tokens = torch.tensor([[*context, end, end, first]])
        logits = model(tokens, Context(encoder=len(context) + 1))[0].detach().double().log_softmax(-1)
        assert scored.nats == pytest.approx(-(logits[0, first] + logits[1, second]).item(), abs=1e-4)
    prompts = [Prompt(context, 5) for context in contexts]
    cached = generate(model, engine.tokenizer, contexts, Sampling(temperature=0, max_tokens=5))
    assert continue_greedily(engine, prompts, batch_size=2) == [ids(each) for each in cached]
