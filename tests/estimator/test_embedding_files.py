import contextlib
import json

import numpy as np
import pytest

from sdmlm.estimator.embedding_files import read_embeddings

X = np.arange(6, dtype=np.float32).reshape(3, 2)


def jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def parquet(path, columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_the_three_kinds_say_the_same(tmp_path):
    np.savez(tmp_path / "a.npz", X=X, y=[0, 1, 1], ids=["a", "b", "c"], texts=["A", "B", "C"], logits=X * 2)
    columns = {
        "embedding": X.tolist(),
        "label": [0, 1, 1],
        "id": ["a", "b", "c"],
        "text": ["A", "B", "C"],
        "logits": (X * 2).tolist(),
    }
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for path in (tmp_path / "a.npz", jsonl(tmp_path / "a.jsonl", rows), parquet(tmp_path / "a.parquet", columns)):
        found = read_embeddings(path)
        assert np.array_equal(found.X, X)
        assert found.labels(path).tolist() == [0, 1, 1]
        assert found.class_names == ["0", "1"]
        assert found.documents() == {"a": "A", "b": "B", "c": "C"}
        assert np.array_equal(found.logits, X * 2)


def test_named_classes_and_defaults(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"embedding": [1, 2], "label": name} for name in ("spam", "ham", "spam")])
    found = read_embeddings(path)
    assert found.class_names == ["ham", "spam"]
    assert found.labels(path).tolist() == [1, 0, 1]
    assert found.ids == [0, 1, 2]
    assert found.documents() == {}
    assert read_embeddings(path, ["spam", "eggs"]).labels(path).tolist() == [0, -1, 0]


def test_no_labels(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"embedding": [1, 2]}])
    with pytest.raises(ValueError, match=r"a\.jsonl has no labels"):
        read_embeddings(path).labels(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b"[" * 100_000, r"line 1: not JSON \(nested too deeply\)"),
        ("a.jsonl", b"[1]", "line 1: expected an object"),
        ("a.jsonl", b'{"x": 1}', "has no embeddings"),
        ("a.jsonl", b'{"embedding": [1]}\n{"embedding": [1, 2]}', "different lengths"),
        ("a.jsonl", b'{"embedding": [1], "label": 0}\n{"embedding": [1]}', "row 2: label is missing"),
        ("a.jsonl", b'{"embedding": 1}', "must be a matrix"),
        ("a.jsonl", b'\xff{"embedding": [1]}', "not UTF-8"),
        ("a.npz", b"not a zip", "not a readable"),
        ("a.parquet", b"not a table", "not a readable"),
        ("a.csv", b"1,2", "unknown kind"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_embeddings(tmp_path / name)
    assert name in str(error.value)


def test_npz_problems(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_embeddings(tmp_path / "no.npz")
    np.savez(tmp_path / "a.npz", X=X, y=[0, 1])
    with pytest.raises(ValueError, match="3 embeddings but 2 entries of label"):
        read_embeddings(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", X=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="object arrays are refused"):
        read_embeddings(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", X=X, y=[0, np.nan, 1])
    with pytest.raises(ValueError, match="NaN"):
        read_embeddings(tmp_path / "c.npz")


def test_a_damaged_npz_gives_nothing_but_value_errors(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, X=np.random.default_rng(0).normal(size=(200, 20)), y=np.zeros(200, int))
    whole = path.read_bytes()
    for at in range(0, len(whole), 997):
        data = bytearray(whole)
        data[at] ^= 255
        path.write_bytes(data)
        with contextlib.suppress(ValueError):  # a flipped byte may do no harm, but nothing else may be raised
            read_embeddings(path)


def test_arrays_of_the_wrong_shape_are_named(tmp_path):
    with open(tmp_path / "single.npz", "wb") as file:
        np.save(file, X)
    with pytest.raises(ValueError, match="single array"):
        read_embeddings(tmp_path / "single.npz")
    for name, value in {"y": 1, "ids": [["a"]] * 3, "texts": [["a"]] * 3}.items():
        np.savez(tmp_path / "a.npz", X=X, **{name: value})
        with pytest.raises(ValueError, match="per row"):
            read_embeddings(tmp_path / "a.npz")


def test_one_stray_label_costs_nothing(tmp_path):
    np.savez(tmp_path / "a.npz", X=X, y=[0, 1, 10**12])
    assert len(read_embeddings(tmp_path / "a.npz").class_names) == 3
