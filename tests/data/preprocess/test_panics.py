"""A tokenizer whose library panics on a document: the command names file and regex, once."""

from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.data.preprocess.stage import preprocess
from tests.data.runs import make_config
from tests.data.tokenization.test_strangers import CATASTROPHE, definition, split
from tests.data.tokenization.test_strangers import write as write_tokenizer


def test_preprocess_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.data.tokenization.tokenizer.probe", lambda *_: None)
    tokenizer = write_tokenizer(tmp_path, definition(pre_tokenizer=split(CATASTROPHE)))
    documents = tmp_path / "a.jsonl"
    documents.write_text('{"text": "one"}\n' * 20 + '{"text": "' + "a" * 300 + 'b"}\n')
    source = {"name": "s", "type": "jsonl", "paths": [str(documents)]}
    config = make_config(tmp_path, [source], tokenizer={"path": str(tokenizer)})
    with pytest.raises(UserError, match=r"tokenizer\.json: pre_tokenizer\.pattern = ") as error:
        preprocess(config)
    assert CATASTROPHE in str(error.value) and error.value.exit_code == 2
    assert "attempt" not in capfd.readouterr().out
