"""Whatever bytes stand in a file of a run: reading it gives what was written, or a sentence, and in bounded time."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
import zipfile
from collections import OrderedDict
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fedlightning

# isort: split
from fedlightning.codec.allowed import UntrustedError
from fedlightning.codec.exotic_values import slow_keys
from fedlightning.codec.modules import from_tree, to_tree
from fedlightning.codec.tree import NotPlainError, load
from fedlightning.contract.messages import Message, Update
from fedlightning.deployment.checkpoints import Exporter
from fedlightning.errors import DamagedStateError
from fedlightning.models import MLP, Classifier
from fedlightning.resume import state_files as persistence
from fedlightning.run.folder import open_run_folder
from fedlightning.scores.rows import DamagedMetricsError, read_rows
from fedlightning.storage.files import UnreadableError, read_tensors
from fedlightning.study.finished_runs import load_run
from fedlightning.tensors import equal, module_state
from tests.helpers import Toy
from tests.resume.planted import make_run, sign

FEW = settings(
    max_examples=15,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # nothing is made smaller: that takes longer than all the rest
)
MANY = settings(FEW, max_examples=1000, derandomize=False)
AMOUNTS = [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, whose files the tests replace and put back."""
    return make_run(tmp_path_factory.mktemp("fuzz")).run.path


mutations = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
        st.tuples(st.just("put"), st.floats(0, 1), st.binary(max_size=40)),
        st.tuples(st.just("drop"), st.floats(0, 1), st.integers(1, 200)),
    ),
    min_size=1,
    max_size=4,
)


def mutated(content, changes):
    """Return bytes with some changes in them."""
    content = bytearray(content)
    for kind, place, what in changes:
        at = int(place * max(len(content) - 1, 0))
        if kind == "flip" and content:
            content[at] ^= what
        elif kind == "cut":
            del content[at:]
        elif kind == "put":
            content[at:at] = what
        elif kind == "drop":
            del content[at : at + what]
    return bytes(content)


def fuzz(path, amount, read, sentences, prepare=lambda: None):
    """Read a file with any bytes in it, and with changes in what was there; anything but `sentences` is a failure."""
    original = path.read_bytes()

    @amount
    @given(st.one_of(st.binary(max_size=300), mutations.map(partial(mutated, original))))
    def attempt(content):
        path.write_bytes(content)
        prepare()
        try:
            read()
        except sentences as error:
            text = str(error)
            assert 0 < len(text) < 600 and "\n" not in text and "weights_only" not in text

    try:
        attempt()
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("name", ["server-000002.safetensors", "records-000002-0.safetensors", "template.safetensors"])
def test_files_of_tensors(run, tmp_path, name, amount):
    path = shutil.copy(run / "checkpoints" / "last" / name, tmp_path / name)
    fuzz(path, amount, lambda: load(path), (UnreadableError, NotPlainError, UntrustedError))


@pytest.mark.parametrize("amount", AMOUNTS)
def test_manifests(run, tmp_path, amount):
    last = tmp_path / "last"
    shutil.copytree(run / "checkpoints" / "last", last)
    (last / persistence.BEFORE).unlink()
    fuzz(last / "manifest.json", amount, lambda: list(persistence.load(last).records()), DamagedStateError)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["../x", "/x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_manifests_with_other_values(run, tmp_path, amount):
    last = tmp_path / "last"
    shutil.copytree(run / "checkpoints" / "last", last)
    whole = json.loads((last / "manifest.json").read_text())
    places = [(name,) for name in whole] + [("extra", name) for name in whole["extra"]]

    @amount
    @given(st.sampled_from(places), values)
    def attempt(place, value):
        changed = json.loads(json.dumps(whole))
        (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
        (last / "manifest.json").write_text(json.dumps(changed))
        try:
            list(persistence.load(last).records())
        except (DamagedStateError, ValueError) as error:
            assert str(error).startswith("The ") and " state in " in str(error)

    (last / persistence.BEFORE).unlink()
    attempt()


@pytest.mark.parametrize("amount", AMOUNTS)
def test_metrics(run, amount):
    folder = open_run_folder(run)
    mark = json.loads((run / "checkpoints" / "last" / "manifest.json").read_text())["extra"]["metrics"]
    whole = folder.read_rows(2, mark)

    def read():
        assert (
            folder.read_rows(2, mark)[: len(whole)] == whole
        )  # what the state knows is there as it was, or it is refused

    fuzz(run / "metrics.csv", amount, read, DamagedMetricsError)
    fuzz(run / "metrics.csv", amount, lambda: read_rows(run / "metrics.csv"), DamagedMetricsError)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
def test_what_a_report_reads(run, name, amount):
    fuzz(run / name, amount, lambda: load_run(run), (UnreadableError, DamagedMetricsError))


@pytest.mark.parametrize("amount", AMOUNTS)
def test_exported_checkpoints(run, tmp_path, amount):
    path = shutil.copy(run / "checkpoints" / "global.ckpt", tmp_path / "global.ckpt")
    whole = module_state(fedlightning.load(path, trust=["tests"]))

    def read():
        assert equal(module_state(fedlightning.load(path, trust=["tests"])), whole)  # what opens is what was written

    fuzz(path, amount, read, UnreadableError)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_exported_checkpoints_of_ours(tmp_path, amount):
    path, module = tmp_path / "ours.ckpt", Classifier(MLP(4, [3], 2), num_classes=2)
    Exporter(lambda architecture: module).save(path, module, {})
    assert type(Classifier.load_from_checkpoint(path)) is Classifier

    def read():
        assert equal(module_state(fedlightning.load(path)), module_state(module))

    fuzz(path, amount, read, UnreadableError)
    resaved = torch.load(path, weights_only=True)
    torch.save(resaved, path)  # by somebody who knows nothing of checksums: those of the archive are left
    fuzz(path, amount, read, (UnreadableError, UntrustedError))


def test_a_file_of_integers_that_collide_is_refused(tmp_path):
    path = tmp_path / "slow.ckpt"
    torch.save({"state_dict": {}, "fedlightning": {"a": [number * (2**61 - 1) for number in range(20_000)]}}, path)
    with pytest.raises(UnreadableError, match="more large integers than any module"):
        fedlightning.load(path)


def doubled(times):
    """Return a pickle of a dict whose key holds an empty tuple 2 ** `times` times."""
    key = b"".join(b"h%c\x86q%c" % (number, number + 1) for number in range(times))
    return b"\x80\x02}()q\x00" + key + b"K\x01u."


BROKEN_OFF = pickle.dumps({number * (2**61 - 1): 0 for number in range(100)}, 2)[:-1] + b"\xff"
LARGE = pickle.dumps([number * (2**61 - 1) for number in range(20_000)], 2)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [("data.pkl", doubled(60), "tuples within"), ("data.pkl", BROKEN_OFF, "damaged"), ("DATA.PKL", LARGE, "integers")],
)
def test_a_file_of_slow_keys_is_refused_before_torch_reads_it(tmp_path, monkeypatch, name, content, reason):
    path = tmp_path / "slow.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"slow/{name}", content)
        archive.writestr("slow/version", "3\n")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch reads it"))
    with pytest.raises(UnreadableError, match=reason):
        fedlightning.load(path)


def test_keys_that_honest_files_hold_are_not_slow(tmp_path):
    path = tmp_path / "quick.ckpt"
    torch.save({(1, (2, 3)): torch.zeros(2, 2), "a": [torch.Size([1]), (None, ("x",))], "b": OrderedDict(c={4})}, path)
    assert slow_keys(path) is None


@pytest.mark.parametrize("place", [0.02, 0.3, 0.5, 0.7, 0.99, 1.0])
def test_one_bit_of_an_exported_checkpoint(run, tmp_path, place):
    path = shutil.copy(run / "checkpoints" / "global.ckpt", tmp_path / "global.ckpt")
    path.write_bytes(mutated(path.read_bytes(), [("flip", place, 1)]))
    with pytest.raises(
        UnreadableError, match=r"global\.ckpt is not a checkpoint that a run exported: its bytes are not those"
    ):
        fedlightning.load(path, trust=["tests"])


kinds = st.sampled_from(
    [
        "object",
        "name",
        "partial",
        "array",
        "enum",
        "set",
        "Generator",
        "dict",
        "tuple",
        "ref",
        "tensor",
        "view",
        "marked",
        "scalar",
        "archive",
        "StateDict",
        "bytes",
        "list",
    ]
)
paths = st.sampled_from(["torch.nn.modules.linear:Linear", "os:system", "signal:Signals"])
trees = st.recursive(
    values | paths | st.integers(0, 3),
    lambda inner: st.dictionaries(
        kinds, inner | st.lists(inner, max_size=5) | st.tuples(paths, st.just([]), inner), min_size=1, max_size=1
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_trees_of_modules(amount):
    @amount
    @given(trees)
    def attempt(tree):
        try:
            from_tree({"tree": json.dumps(tree), "tensors": [torch.ones(2), torch.zeros(8, dtype=torch.uint8)]})
        except (NotPlainError, UntrustedError) as error:
            assert str(error).startswith(("it", "a "))

    attempt()
    assert isinstance(from_tree(to_tree(Toy(), "it"), ["tests"]), Toy)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_messages(amount):
    server = server_for_messages()
    state = {name: value.clone() for name, value in server.model.items()}
    message = Message(round=0, client="0", state=state, returns=tuple(state))
    good = {"round": 0, "client": "0", "state": state, "num_samples": 1, "steps": 1}
    fields = st.sampled_from(["round", "client", "state", "extras", "num_samples", "steps", "skipped", "model", "tag"])
    entries = st.dictionaries(
        st.sampled_from([*state, "more"]), values | st.just(torch.full((2,), torch.nan)), max_size=3
    )

    @amount
    @given(fields, values | entries)
    def attempt(name, value):
        answer = server.accept(message, Update(**(good | {name: value})))
        if answer.error is not None:
            assert answer.error.startswith("the update of client '0' was refused: ") and answer.state == {}
        else:
            assert answer.state.keys() == state.keys() and answer.client == "0" and answer.round == 0

    attempt()


def server_for_messages():
    from tests.helpers import make_trainer, toy_data

    trainer = make_trainer(None, [], max_rounds=1, save_state=0)
    trainer.fit(Toy(), datamodule=toy_data())
    return trainer.server


def test_a_checkpoint_that_claims_to_be_large_takes_no_memory(run, tmp_path):
    path = shutil.copy(run / "checkpoints" / "global.ckpt", tmp_path / "large.ckpt")
    content = bytearray(path.read_bytes())
    for place in range(len(content) - 4):
        if content[place : place + 4] == b"PK\x01\x02":  # the sizes of an entry in the directory at the end
            content[place + 20 : place + 28] = (0xFFFFFF00).to_bytes(4, "little") * 2
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UnreadableError, match="claims to hold more than it is long"):
        read_tensors(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_the_checksum_does_not_hide_a_change(run, tmp_path):
    last = tmp_path / "last"
    shutil.copytree(run / "checkpoints" / "last", last)
    (last / "server-000002.safetensors").write_bytes(b"PK")
    sign(last)
    with pytest.raises(DamagedStateError, match=r"server-000002\.safetensors cannot be read"):
        persistence.load(last).server()


def test_an_entry_that_is_marked_as_a_folder_is_refused(tmp_path):
    """Torch reads nothing of it, and gives what the memory held before."""
    path = tmp_path / "marked.pt"
    torch.save({"a": torch.arange(12.0)}, path)
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))  # its entry in the directory at the end
    content[place + 38] |= 0x10
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match="marks an entry as a folder"):
        read_tensors(path)
