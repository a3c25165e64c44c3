import builtins
import gzip
import itertools
import json
import logging
import os
import shutil
import stat
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from geomesh_p2p.config import DatasetSection
from geomesh_p2p.core.types import Range
from geomesh_p2p.engine import data, reading, token_cache
from geomesh_p2p.engine.documents import DOCUMENT_CHARACTERS, documents
from geomesh_p2p.engine.tokenizer import END_OF_DOCUMENT_BYTE, load_tokenizer
from geomesh_p2p.errors import DataError, TemporaryError
from tests.injection.proof import fired, inject

LENGTH = 8


def jsonl_section(tmp_path, texts, name="docs.jsonl", **fields):
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DatasetSection(**{"source": "jsonl", "paths": (str(path),), "validation_sequences": 2} | fields)


def corpus_of(section, seed=0, length=LENGTH, **more):
    return data.load_corpus(section, load_tokenizer(section.tokenizer), length, seed, **more)


@pytest.fixture
def texts():
    return [f"<{index:03d}> " + chr(ord("a") + index % 26) * (5 + index % 17) for index in range(60)]


@pytest.fixture
def corpus(tmp_path, texts):
    return corpus_of(jsonl_section(tmp_path, texts))


def as_texts(tokens):
    return bytes(tokens.astype(np.uint8)).rstrip(b"\xff").split(b"\xff")


# ---------------------------------------------------------------- positions


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-5, 2**63), epoch=st.integers(0, 2**40))
def test_an_epochs_order_is_a_permutation(size, seed, epoch):
    order = data.permuted(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_orders_of_epochs_and_seeds_differ_and_look_random():
    size = 5000
    orders = [data.permuted(np.arange(size), size, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert np.abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.06
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (orders[first] == orders[second]).mean() < 0.01
    # Written down once: a change here means that runs begun before cannot be joined.
    assert data.permuted(np.arange(6), 1000, 7, 3).tolist() == GOLDEN_ORDER


GOLDEN_ORDER = [966, 849, 284, 804, 85, 688]


def test_a_position_is_the_same_sequence_however_it_is_reached(corpus):
    far = 5 * corpus.sequences + 2
    together = corpus.batch(Range(far - 4, far + 4))
    for offset, row in enumerate(together):
        assert np.array_equal(corpus.batch([far - 4 + offset])[0], row)
    assert together.dtype == np.int64
    assert together.shape == (8, LENGTH + 1)


def test_every_epoch_reads_every_sequence_once(corpus):
    for epoch in (0, 3):
        places = corpus.places(np.arange(corpus.sequences) + epoch * corpus.sequences)
        assert sorted(places) == list(range(corpus.sequences))


def test_sequences_are_the_tokens_in_order_and_targets_are_shifted_by_one(tmp_path, texts):
    corpus = corpus_of(jsonl_section(tmp_path, texts, shuffle=False))
    rows = corpus.batch(range(corpus.sequences))
    assert np.array_equal(rows[:, :-1].ravel(), corpus.tokens[: corpus.sequences * LENGTH])
    assert np.array_equal(rows[:, 1:].ravel(), corpus.tokens[1 : corpus.sequences * LENGTH + 1])
    assert np.array_equal(corpus.batch([corpus.sequences]), rows[:1])  # the next epoch begins


# ---------------------------------------------------------------- the held-out part


def test_whole_documents_are_held_out_and_no_document_is_lost(corpus, texts):
    train, held = as_texts(corpus.tokens), as_texts(corpus.held_out)
    assert sorted(train + held) == sorted(text.encode() for text in texts)
    assert held
    assert not set(train) & set(held)


def test_the_seed_chooses_what_is_held_out(tmp_path, texts):
    section = jsonl_section(tmp_path, texts)
    assert bytes(corpus_of(section, seed=0).held_out) != bytes(corpus_of(section, seed=1).held_out)


def test_shares_of_the_validation_set_make_up_the_whole(corpus):
    whole = corpus.validation()
    assert whole.shape == (2, LENGTH + 1)
    assert len(np.unique(whole, axis=0)) == 2
    parts = np.concatenate([corpus.validation(share, 3) for share in range(3)])
    assert sorted(map(bytes, parts.astype(np.uint8))) == sorted(map(bytes, whole.astype(np.uint8)))
    assert corpus.validation(2, 3).shape == (0, LENGTH + 1)


# ---------------------------------------------------------------- the manifest


def test_the_manifest_names_what_differs(tmp_path, texts):
    base = corpus_of(jsonl_section(tmp_path, texts))
    assert corpus_of(jsonl_section(tmp_path, texts, name="elsewhere.jsonl")).manifest == base.manifest

    def changed(section, **options):
        other = corpus_of(section, **options).manifest
        assert other.digest != base.manifest.digest
        return {key for (key, value), (_, before) in zip(other.fields, base.manifest.fields, strict=True) if value != before}

    assert changed(jsonl_section(tmp_path, [texts[1], texts[0], *texts[2:]])) == {"documents"}
    assert "documents" in changed(jsonl_section(tmp_path, [*texts[:-1], texts[-1] + "!"]))
    assert changed(jsonl_section(tmp_path, texts, shuffle=False)) == {"shuffle"}
    assert changed(jsonl_section(tmp_path, texts, validation_sequences=1)) >= {"validation"}
    assert "sequence_length" in changed(jsonl_section(tmp_path, texts), length=4)
    assert "validation" in changed(jsonl_section(tmp_path, texts), seed=1)


def test_the_standard_library_is_the_default_and_names_its_version():
    corpus = corpus_of(DatasetSection(), length=128)
    assert len(corpus.tokens) > 3_000_000
    fields = dict(corpus.manifest.fields)
    assert fields["python"].startswith("3.")
    assert corpus_of(DatasetSection(), length=128).manifest == corpus.manifest
    assert corpus.validation().shape == (64, 129)


# ---------------------------------------------------------------- sources


def write(path, content):
    opener = {".gz": gzip.open, ".zst": zstandard.open}.get(path.suffix, open)
    with opener(path, "wb") as stream:
        stream.write(content)
    return str(path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_packed_files_are_read_as_they_are(tmp_path, suffix):
    path = write(tmp_path / f"a.txt{suffix}", "één\ntwee\n".encode())
    assert list(documents(DatasetSection(source="text", paths=(path,)))) == ["één\ntwee\n"]
    path = write(tmp_path / f"a.jsonl{suffix}", b'{"body": "one"}\n\n{"body": ""}\n{"body": "two"}')
    assert list(documents(DatasetSection(source="jsonl", paths=(path,), field="body"))) == ["one", "two"]


def test_patterns_are_expanded_in_order_and_no_file_is_read_twice(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        write(tmp_path / name, name.encode())
    section = DatasetSection(source="text", paths=(str(tmp_path / "c.*"), str(tmp_path / "*.txt"), str(tmp_path / "a.txt")))
    assert list(documents(section)) == ["c.md", "a.txt", "b.txt"]


def test_a_long_text_file_becomes_several_documents_at_line_ends(tmp_path):
    text = "".join(f"line {index}\n" for index in range(20_000))
    parts = list(documents(DatasetSection(source="text", paths=(write(tmp_path / "a.txt", text.encode()),))))
    assert "".join(parts) == text
    assert len(parts) > 2
    assert all(part.endswith("\n") and len(part) < DOCUMENT_CHARACTERS + 20 for part in parts)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"good\nbad \xe9\n", r"not UTF-8 \(line 2, byte 0xe9\); .*iconv"),
        ("a.txt", b"", "the file is empty; fill it"),
        ("a.txt", b" \n\n", "white space only"),
        ("a.txt.gz", b"not packed", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"some text" * 1000, mtime=0)[:-20], "cannot be read"),
        ("a.txt.zst", b"not packed", "not a whole zstd file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r":2: not JSON"),
        ("a.jsonl", b'{"body": "x", "id": 3}\n', r":1: no text in field 'text' \(found: body, id\); set dataset.field"),
        ("a.jsonl", b"[1]\n", r":1: no text in field 'text'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_to_do(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    section = DatasetSection(source="jsonl" if "json" in name else "text", paths=(str(path),))
    with pytest.raises(DataError, match=said) as caught:
        list(documents(section))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "said"),
    [((), "paths is empty"), (("no-such-*.txt",), "no file matches 'no-such-\\*.txt'"), ((".",), "is a folder; name")],
)
def test_paths_that_lead_nowhere_are_named(paths, said):
    with pytest.raises(DataError, match=said):
        list(documents(DatasetSection(source="text", paths=paths)))


@pytest.mark.case("C086")
@pytest.mark.parametrize("length", [8, 256])
def test_a_corpus_shorter_than_a_sequence_is_refused_with_both_numbers(tmp_path, length):
    three = jsonl_section(tmp_path, ["abcd"] * 3, validation_sequences=1)
    with pytest.raises(DataError, match=rf"15 tokens in 3 documents; validation needs {length + 1} in whole"):
        corpus_of(three, length=length)


@pytest.mark.case("C086")
def test_two_and_a_half_sequences_are_two_and_the_rest_is_left_out(tmp_path):
    """A ragged end is never a shorter sequence: the epoch has the whole ones, and begins again."""
    section = jsonl_section(tmp_path, ["abc"] * 30, validation_sequences=1)  # 120 tokens, 36 of them held out
    corpus = corpus_of(section, length=33)
    assert len(corpus.tokens) == 84 == 2 * 33 + 18
    assert corpus.sequences == 2
    assert corpus.batch(range(6)).shape == (6, 34)
    assert sorted(corpus.places(np.arange(2)).tolist()) == [0, 1]


@pytest.mark.case("C086")
def test_too_little_text_is_refused_with_the_numbers(tmp_path):
    few = jsonl_section(tmp_path, ["abcdefg"] * 4)  # 32 tokens with the ends of documents
    with pytest.raises(DataError, match=r"32 tokens in 4 documents; .* needs 17 in whole.*hold out 24"):
        corpus_of(few)


# ---------------------------------------------------------------- tokenizers


def test_bytes_need_no_more_than_256_ids():
    tokenizer = load_tokenizer("bytes")
    text = "naïve ☃ \x00 text"
    ids = tokenizer.encode(text)
    assert bytes(ids.astype(np.uint8)).decode() == text
    assert tokenizer.highest_id == 255 == tokenizer.end_of_document == END_OF_DOCUMENT_BYTE


@pytest.fixture
def word_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "</s>": 300}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.case("C087")
def test_a_peer_with_another_tokenizer_is_told_so_by_name(word_tokenizer, tmp_path, texts):
    """The ids' identity is a field of the run's fingerprint: the run refuses the peer and names it."""
    sections = (jsonl_section(tmp_path, texts, tokenizer=name) for name in ("bytes", str(word_tokenizer)))
    one, other = (dict(corpus_of(section).manifest.fields) for section in sections)
    assert "tokenizer" in {name for name in one if one[name] != other[name]}


def test_a_tokenizer_file_or_its_folder_can_be_given(word_tokenizer, tmp_path):
    from_file, from_folder = load_tokenizer(str(word_tokenizer / "tokenizer.json")), load_tokenizer(str(word_tokenizer))
    assert from_file.identity == from_folder.identity != "bytes"
    assert from_file.encode("two three one").tolist() == [2, 0, 1]
    assert (from_file.highest_id, from_file.end_of_document, from_file.dtype) == (300, 300, np.uint16)
    section = jsonl_section(tmp_path, ["one two"] * 20, tokenizer=str(word_tokenizer))
    assert corpus_of(section, length=2).tokens[:6].tolist() == [1, 2, 300, 1, 2, 300]


@pytest.mark.parametrize("name", ["/no/such/tokenizer", "no-such.json", "./here"])
def test_a_tokenizer_that_does_not_exist_is_named(name):
    with pytest.raises(DataError, match="no such file or folder") as caught:
        load_tokenizer(name)
    assert name in str(caught.value)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be used") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the cache


def test_a_cache_gives_the_same_tokens_and_is_made_once(tmp_path, texts, monkeypatch):
    section = jsonl_section(tmp_path, texts)
    plain = corpus_of(section)
    cached = corpus_of(section, cache=tmp_path / "cache")
    assert isinstance(cached.tokens, np.memmap)
    assert np.array_equal(cached.tokens, plain.tokens)
    assert np.array_equal(cached.held_out, plain.held_out)
    assert cached.manifest == plain.manifest
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [next((tmp_path / "cache").iterdir()).name]

    monkeypatch.setattr(data, "_tokenise", None)  # calling it would fail
    assert np.array_equal(corpus_of(section, cache=tmp_path / "cache").tokens, plain.tokens)


@pytest.mark.case("C080")
def test_a_resume_at_nine_tenths_of_a_million_lines_reads_only_what_it_trains(tmp_path, monkeypatch):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{i}\n" for i in range(1_000_000)))
    section = DatasetSection(source="text", paths=(str(path),), validation_sequences=2)
    first = corpus_of(section, length=64, cache=tmp_path / "cache")
    assert len(first.tokens) > 6_000_000

    opened, read = [], []
    real_open, real_read = builtins.open, os.preadv

    def recording_open(file, *more, **named):
        opened.append(str(file))
        return real_open(file, *more, **named)

    def recording_read(descriptor, buffers, at):
        read.append(len(buffers[0]))
        return real_read(descriptor, buffers, at)

    monkeypatch.setattr(builtins, "open", recording_open)
    monkeypatch.setattr(os, "preadv", recording_read)
    again = corpus_of(section, length=64, cache=tmp_path / "cache")
    place = again.sequences * 9 // 10
    batch = again.batch(range(place, place + 4))
    assert str(path) not in opened, "the text is not opened"
    assert sum(read) == 4 * 65, "four sequences and not a byte more"
    assert np.array_equal(batch, first.batch(range(place, place + 4)))
    assert again.manifest == first.manifest


def test_a_cache_that_is_deleted_meanwhile_does_no_harm(tmp_path, texts):
    corpus = corpus_of(jsonl_section(tmp_path, texts), cache=tmp_path / "cache")
    before = corpus.batch(range(20))
    shutil.rmtree(tmp_path / "cache")
    assert np.array_equal(corpus.batch(range(20)), before)


@pytest.mark.case("C082")
@pytest.mark.parametrize(
    "damage", ["cut", "missing", "described as longer", "one bit", "one bit held out", "other documents", "older release"]
)
def test_a_damaged_cache_is_made_again(tmp_path, texts, damage, caplog):
    section = jsonl_section(tmp_path, texts)
    whole = np.array(corpus_of(section, cache=tmp_path / "cache").tokens)
    (folder,) = (tmp_path / "cache").iterdir()
    if damage == "cut":
        os.truncate(folder / "train.npy", 200)
    elif damage == "missing":
        (folder / "held_out.npy").unlink()
    elif damage.startswith("one bit"):
        path = folder / ("held_out.npy" if damage.endswith("held out") else "train.npy")
        data = bytearray(path.read_bytes())
        data[-(len(data) - 128) // 2] ^= 4
        path.write_bytes(data)
    else:
        said = folder / "documents.json"
        told = json.loads(said.read_text())
        if damage == "older release":
            told = {key: value for key, value in told.items() if key not in ("files", "checksum")}
        else:
            told["train" if damage == "described as longer" else "documents"] += 1
        said.write_text(json.dumps(told))
    assert np.array_equal(corpus_of(section, cache=tmp_path / "cache").tokens, whole)
    (line,) = [record.message for record in caplog.records if "tokens are made again" in record.message]
    assert ("was made by an older release" if damage == "older release" else "is damaged (") in line
    caplog.clear()
    assert np.array_equal(corpus_of(section, cache=tmp_path / "cache").tokens, whole)
    assert not caplog.records, "once is enough"


@pytest.mark.case("C080")
def test_kept_tokens_are_read_through_once_a_start(tmp_path, texts, monkeypatch):
    section = jsonl_section(tmp_path, texts)
    corpus_of(section, cache=tmp_path / "cache")
    hashed, of = [], token_cache._hash
    monkeypatch.setattr(token_cache, "_hash", lambda path: (hashed.append(path.name), of(path))[1])
    corpus_of(section, cache=tmp_path / "cache").batch(range(20))
    assert sorted(hashed) == ["held_out.npy", "train.npy"]


@pytest.mark.fault
@pytest.mark.case("C081")
def test_a_source_that_is_silent_at_the_start_is_named_after_its_deadline(tmp_path, texts):
    """A pipe that nobody writes to stands for a file system that hangs."""
    pipe = tmp_path / "pipe.jsonl"
    if not inject(lambda: (os.mkfifo(pipe), True)[1]):
        pipe.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    section = DatasetSection(source="jsonl", paths=(str(tmp_path / "*.jsonl"),), validation_sequences=2, read_seconds=0.3)
    fired(stat.S_ISFIFO(pipe.stat().st_mode), "the file is a pipe without a writer")
    section = section.model_copy(update={"paths": (str(pipe),)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.path.isfile", lambda path: True)
        with pytest.raises(TemporaryError, match=r"no text came for 0\.3 s \(dataset\.read_seconds\) after 0 documents"):
            corpus_of(section)
    with pipe.open("w") as writer:  # lets the thread that hangs go
        writer.write("\n")


@pytest.mark.case("C080")
def test_a_reading_says_every_5_seconds_how_far_it_is(monkeypatch, caplog):
    """By a clock that goes on by a second at each look, and stands still from the twelfth on, when the reading is over."""
    caplog.set_level(logging.INFO)
    looks, begun, over = itertools.count(), threading.Event(), threading.Event()

    def clock():
        assert begun.wait(10)
        seconds = min(next(looks), 12)
        if seconds == 12:
            over.set()
        return float(seconds)

    def read(far):
        far.documents, far.tokens = 1234, 56789
        begun.set()
        assert over.wait(10)
        return "the text"

    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=clock))
    assert reading.read_watched(read, silent_seconds=60.0, look_seconds=0.001) == "the text"
    far = "reading text: 1,234 documents, 56,789 tokens so far"
    assert [record.getMessage() for record in caplog.records] == [far, f"{far}, none for 9 s"]


def test_a_cache_knows_its_content(tmp_path, texts):
    corpus_of(jsonl_section(tmp_path, texts), cache=tmp_path / "cache")
    changed = [*texts[:-1], "changed"]
    assert b"changed" in bytes(corpus_of(jsonl_section(tmp_path, changed), cache=tmp_path / "cache").tokens)


def test_a_cache_that_cannot_be_written_leaves_nothing_half_done(tmp_path, texts, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    plain = corpus_of(jsonl_section(tmp_path, texts))
    cached = corpus_of(jsonl_section(tmp_path, texts), cache=tmp_path / "cache")
    assert np.array_equal(cached.batch(range(9)), plain.batch(range(9)))
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []
