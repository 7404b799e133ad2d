"""Checkpoints in one process: what is in the files, what is wrong with them, and how much memory they take."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

import autopar
from autopar.checkpoint import files
from autopar.checkpoint.parts import Part, boxes, pieces
from autopar.cli import main
from autopar.runtime.spmd.mesh import part_of, put_part
from autopar.verification.memory_meter import LiveBytes
from planner.base.errors import CheckpointError
from planner.ir.layout import I, Mesh, R, Shard, local_shape
from tests.autopar.checkpoints import save_small, small, value_at


class Tied(nn.Module):
    """One weight by two names, a scalar, an empty buffer, a buffer that is not saved."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(10, 8, dtype=dtype)
        self.inner = nn.Linear(8, 8, dtype=dtype)
        self.head = nn.Linear(8, 10, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens))) * self.scale


def trained(optimizer: Any, steps: int = 2, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Tied(dtype)
    made = optimizer(model.parameters())
    for _ in range(steps):
        step(model, made)
    return model, made


def step(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    tokens = torch.arange(10)
    loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
    loss.backward()
    optimizer.step()
    return loss.item()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw of a tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_to_the_bit_with_any_optimizer(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(OPTIMIZERS[name])
    autopar.save_checkpoint(tmp_path, model, optimizer)
    expected = [step(model, optimizer) for _ in range(2)]
    for steps in (0, 3):  # into an optimizer without state, and into one with another's
        again = trained(OPTIMIZERS[name], steps)
        autopar.load_checkpoint(tmp_path, *again)
        assert [step(*again) for _ in range(2)] == expected
        for mine, theirs in zip(again[0].state_dict().values(), model.state_dict().values(), strict=True):
            assert torch.equal(mine, theirs)


def test_what_is_saved_is_of_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and schedules go on while a save waits for the disk; the next save waits for it."""
    go = threading.Event()
    write = files.write
    monkeypatch.setattr(files, "write", lambda *args: (go.wait(20), write(*args))[1])
    model, optimizer = small(1.0)
    extra = {"value": 1.0, "list": [1, 2]}
    saving = autopar.save_checkpoint(tmp_path, model, optimizer, extra=extra, wait=False)
    with torch.no_grad():
        for tensor in (*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())):
            tensor.fill_(5)
    optimizer.param_groups[0]["lr"] = 5.0
    extra["list"].append(3)  # type: ignore[attr-defined]
    assert not saving.done
    go.set()
    saving.wait()
    assert saving.done and value_at(str(tmp_path)) == 1.0
    go.clear()
    with torch.no_grad():
        model[0].weight.fill_(1)
    autopar.save_checkpoint(tmp_path, model, optimizer, extra=extra, wait=False)
    with torch.no_grad():
        model[0].weight.fill_(7)
    threading.Timer(0.2, go.set).start()
    assert autopar.load_checkpoint(tmp_path, model)["list"] == [1, 2, 3]
    assert (model[0].weight == 1).all()


def test_a_save_under_way_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another save to the path, in this process or another; a process forked meanwhile does not prolong it."""
    go = threading.Event()
    write = files.write
    monkeypatch.setattr(files, "write", lambda *args: (go.wait(20), write(*args))[1])
    saving = save_small(str(tmp_path), 1.0, wait=False)
    try:
        with pytest.raises(CheckpointError, match=r"another save to .* is under way, of another module or in another"):
            save_small(str(tmp_path), 2.0)
        script = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", script, tmp_path / ".saving"], capture_output=True, text=True)
        assert "BlockingIOError" in other.stderr
    finally:
        go.set()
    saving.wait()
    assert value_at(str(tmp_path)) == 1.0
    claim = files.Claim(tmp_path)
    forked = os.dup(claim._file.fileno())
    claim.end()
    save_small(str(tmp_path), 2.0)
    os.close(forked)
    assert value_at(str(tmp_path)) == 2.0


def test_saves_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    save_small(str(tmp_path), 1.0)
    save_small(str(tmp_path), 2.0)
    assert value_at(str(tmp_path)) == 2.0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_without_autopar(tmp_path: Path) -> None:
    """As :mod:`torch.distributed.checkpoint` reads its own, by the names of the original model, aliases included."""
    model, optimizer = trained(OPTIMIZERS["adamw"])
    autopar.save_checkpoint(tmp_path / "one", model, optimizer)
    dcp_to_torch_save(tmp_path / "one", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    fresh = Tied()
    fresh.load_state_dict(found["model"], strict=True)
    assert torch.equal(fresh.scale, model.scale)
    assert torch.equal(found["optim"]["inner.weight.exp_avg"], optimizer.state[model.inner.weight]["exp_avg"])
    nested = {"model": Tied().state_dict()}
    dcp.load(nested, checkpoint_id=tmp_path / "one", no_dist=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in nested["model"].items())


def test_parts_are_boxes_of_the_whole() -> None:
    """Every layout: the boxes of all ranks cover a tensor, and each is written by just one of those that hold it."""
    mesh, shape = Mesh.of(data=2, tensor=2), (24, 6)
    full = torch.arange(24 * 6).reshape(shape)
    types = [R, I, Shard(0), Shard(1), Shard(0, 3), Shard(0, 2)]
    for layout in itertools.product(types, types):
        if local_shape(shape, layout, mesh.sizes) is None:
            continue
        found = torch.full(shape, -1)
        for rank in range(4):
            local = part_of(full, layout, mesh, rank)
            part = Part.stored(local, shape, layout, mesh, rank)
            again = torch.full(shape, -1)
            put_part(again, local, layout, mesh, rank)
            assert sum(box.of(local).numel() for box in boxes(part.rows)) == local.numel(), layout
            # "a" and "c" come before: whose turn it is must not depend on how many pieces they have here.
            given = {"a": Part.whole(torch.zeros(30, 30), rank, 4), "b": part, "c": Part.whole(torch.zeros(3), rank, 4)}
            for name, box, values in pieces(given, piece_bytes=64):
                if name == "b":
                    place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                    assert values.numel() <= 8 and (found[place] == -1).all(), layout
                    assert torch.equal(again[place], values), layout
                    found[place] = values
        assert torch.equal(found, full), layout


def test_holds_no_more_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving, loading and exporting a tensor take pieces of it, never the whole once more."""
    piece = 2**16
    monkeypatch.setattr("autopar.checkpoint.save.pieces", lambda parts: pieces(parts, piece))
    monkeypatch.setattr("autopar.checkpoint.export.PIECE_BYTES", piece)
    model = nn.Linear(1024, 1024)
    whole = sum(p.nbytes for p in model.parameters())
    with LiveBytes() as live:
        autopar.save_checkpoint(tmp_path / "c", model)
    saved = live.peak
    with LiveBytes() as live:
        autopar.load_checkpoint(tmp_path / "c", model)
    loaded = live.peak
    with LiveBytes() as live:
        autopar.export_safetensors(tmp_path / "c", tmp_path / "out.safetensors")
    beyond = saved - whole, loaded - whole, live.peak
    assert max(beyond) <= 2 * piece < whole / 16, beyond
    assert torch.equal(load_file(tmp_path / "out.safetensors")["weight"], model.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_exports_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = trained(OPTIMIZERS["sgd"], dtype=dtype)
    autopar.save_checkpoint(tmp_path / "c", model, optimizer)
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert autopar.export_safetensors(tmp_path / "c", tmp_path / "out") == [tmp_path / "out" / "model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in found)

    result = CliRunner().invoke(
        main.app, ["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "many"), "--file-bytes", "300"]
    )
    assert result.exit_code == 0, result.output
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = {file: load_file(tmp_path / "many" / file) for file in set(index["weight_map"].values())}
    assert len(shards) > 1 and f"model-00001-of-{len(shards):05}.safetensors" in shards
    assert all(torch.equal(shards[file][name], expected[name]) for name, file in index["weight_map"].items())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    with pytest.raises(CheckpointError, match=r"exists already.*another place"):
        autopar.export_safetensors(tmp_path / "c", tmp_path / "out")
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(CheckpointError, match=r"is a file: give a directory"):
        autopar.export_safetensors(tmp_path / "c", tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_what_a_scheduler_added_to_an_optimizer_is_loaded_before_there_is_one(tmp_path: Path) -> None:
    model, optimizer = trained(OPTIMIZERS["sgd"])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    autopar.save_checkpoint(tmp_path / "c", model, optimizer)
    other, fresh = trained(OPTIMIZERS["sgd"])
    autopar.load_checkpoint(tmp_path / "c", other, fresh)
    assert fresh.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]


def test_an_export_that_fails_leaves_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever of its files, the index included, the disk is full."""
    out, fsync = tmp_path / "out", os.fsync
    left = 0

    def full(file: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    for whole in range(8):  # seven files of a tensor each, and the index
        left = whole
        with pytest.raises(CheckpointError, match=r"cannot write .*: No space left"):
            autopar.export_safetensors(saved, out, file_bytes=1)
        assert os.listdir(out) == []
    left = 8
    assert len(autopar.export_safetensors(saved, out, file_bytes=1)) == len(os.listdir(out)) == 8


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint full of ones."""
    save_small(str(tmp_path / "c"), 1.0)
    return tmp_path / "c"


def refused(path: Path, match: str, value: float = 7.0, **options: Any) -> None:
    """Loading says so, and changes nothing."""
    model, optimizer = small(value)
    with pytest.raises(CheckpointError, match=match):
        autopar.load_checkpoint(path, model, optimizer, **options)
    found = [*model.state_dict().values(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    assert all((tensor == value).all() for tensor in found)
    assert optimizer.param_groups[0]["lr"] == value


def the(path: Path, name: str) -> Path:
    return next(path.glob(f"save-*/{name}"))


def test_files_that_changed_are_refused(saved: Path) -> None:
    data, index, contents = the(saved, "*.distcp"), the(saved, "index.pt"), saved / ".metadata"
    whole = {path: path.read_bytes() for path in (data, index, contents)}
    texts = ("distcp' (has|is damaged)", "index.pt' (has|is damaged)", "metadata' is damaged")
    for path, text in zip(whole, texts, strict=True):
        size = len(whole[path])
        for changed in (
            whole[path][: size // 2],
            b"",
            whole[path] + b"x",
            *(flipped(whole[path], at) for at in range(9, size, 997)),
        ):
            path.write_bytes(changed)
            refused(saved, text)
        path.write_bytes(whole[path])
    data.unlink()
    refused(saved, "No such file")
    data.write_bytes(whole[data])
    assert value_at(str(saved)) == 1.0


def test_a_manifest_that_changed_is_refused_unless_all_that_matters_is_as_it_was(saved: Path) -> None:
    manifest = the(saved, "manifest.json")
    whole, errors, loads = manifest.read_bytes(), [], 0
    changes = [b"", b"5", b"[1]", b"{}", *(flipped(whole, at) for at in range(len(whole)))]
    for changed in changes:
        manifest.write_bytes(changed)
        try:
            stored = files.Stored.open(saved)
            stored.verify()
            loads += stored.contents["extra"] == {"value": 1.0}
        except CheckpointError as error:
            errors.append(str(error))
    assert all(re.search(r"is damaged|instead of|No such file|has format 5", error) for error in errors)
    assert loads == len(changes) - len(errors) < 30  # all that does not matter is who wrote it


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_what_is_no_checkpoint_says_so(saved: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no checkpoint at .*nowhere': it does not exist")
    refused(tmp_path, "it is not a directory that autopar.save_checkpoint wrote")
    (saved / ".metadata").rename(tmp_path / "kept")
    refused(saved, "its first save did not finish")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "kept").rename(tmp_path / "foreign" / ".metadata")
    refused(tmp_path / "foreign", "was not written by autopar.save_checkpoint, or its save-")


def test_a_newer_format_says_so(saved: Path) -> None:
    manifest = json.loads(the(saved, "manifest.json").read_text())
    the(saved, "manifest.json").write_text(json.dumps({**manifest, "format": 9, "autopar": "3.0"}))
    refused(saved, r"has format 9 and was written by autopar 3\.0; this is autopar .*update it")


@pytest.mark.parametrize(
    "evil, named",
    [
        (b"cos\nmkdir\n(S'evil'\ntR.", "os.mkdir"),
        # In protocol 4 a name may have dots, and so lead from a module that is allowed to any that it imports.
        (
            b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09io.FileIO\x93(\x8c\x04evil\x8c\x01wtR.",
            "torch.distributed.checkpoint.filesystem.io.FileIO",
        ),
        (b"cthis\ns\n.", "this.s"),
    ],
)
def test_a_table_of_contents_runs_no_code(
    saved: Path, monkeypatch: pytest.MonkeyPatch, evil: bytes, named: str
) -> None:
    """Even one whose checksum is right; not that of a module that it names either."""
    monkeypatch.chdir(saved.parent)
    manifest = json.loads(the(saved, "manifest.json").read_text())
    manifest[".metadata"] = {"bytes": len(evil), "crc32": zlib.crc32(evil)}
    the(saved, "manifest.json").write_text(json.dumps(manifest))
    (saved / ".metadata").write_bytes(evil)
    refused(saved, f"names {named}, which is no part of one")
    assert not Path("evil").exists() and "this" not in sys.modules


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "fewer tensors": (lambda: nn.Sequential(nn.Linear(4, 3)), sgd, "has 5 tensors that the module lacks, '1"),
    "more tensors": (lambda: nn.Sequential(*small(0)[0], nn.Linear(2, 2)), sgd, "lacks 2 tensors of the module, '2.w"),
    "shapes": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(5)), sgd, r"1.weight has shape \(3,\) in the"),
    "fewer parameters": (lambda: small(0)[0], lambda m: sgd(m[0]), "state for 2 parameters that"),
    "another optimizer": (lambda: small(0)[0], lambda m: torch.optim.AdamW(m.parameters()), "option '.*AdamW.* lacks"),
    "another's parameters": (
        lambda: small(0)[0],
        lambda m: sgd(nn.Linear(2, 2)),
        r"a parameter of shape \(2, 2\) that is not the module's",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_models_and_optimizers_are_refused(saved: Path, what: str) -> None:
    model, optimizer, text = OTHERS[what]
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=text):
        autopar.load_checkpoint(saved, module, optimizer(module))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_groups_are_found_by_their_members(tmp_path: Path) -> None:
    """Groups in another order, or cut finer, get the options of their parameters; none may mix options."""
    model = small(1.0)[0]
    weights, biases = ([p for n, p in model.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    autopar.save_checkpoint(
        tmp_path, model, torch.optim.SGD([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.2}])
    )
    other = torch.optim.SGD([{"params": biases}, {"params": weights[:1]}, {"params": weights[1:]}], lr=9)
    autopar.load_checkpoint(tmp_path, model, other)
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1, 0.1]
    with pytest.raises(CheckpointError, match="group 0 of the optimizer has parameters of 2 groups with different opt"):
        autopar.load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=9))


def test_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = small(1.0)
    autopar.save_checkpoint(tmp_path, model)
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        autopar.load_checkpoint(tmp_path, model, optimizer)
    autopar.save_checkpoint(tmp_path, model, optimizer)
    assert autopar.load_checkpoint(tmp_path, small(2.0)[0]) == {}


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    model, optimizer = small(1.0)
    with pytest.raises(CheckpointError, match=r"extra\['model'\] holds what a checkpoint does not take.*state_dict"):
        autopar.save_checkpoint(tmp_path / "c", model, extra={"model": [threading.Lock()]})
    save_small(str(tmp_path / "c"), 1.0)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no extra 'scaler'; it has \['value'\]"):
        autopar.load_checkpoint(tmp_path / "c", model, optimizer, extra={"scaler": None})
    refused(
        tmp_path / "c", r"extra\['value'\] is of type float, .*load_checkpoint\(...\)\['value'\]", extra={"value": 0.0}
    )
    with torch.device("meta"), pytest.raises(CheckpointError, match=r"weight is on the meta device.*to_empty"):
        autopar.save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    assert value_at(str(tmp_path / "c")) == 1.0


def test_what_is_no_path_and_no_optimizer_says_so(saved: Path) -> None:
    model, optimizer = small(1.0)
    for wrong in (None, model):
        for call in (
            lambda path: autopar.save_checkpoint(path, model),
            lambda path: autopar.load_checkpoint(path, model),
            lambda path: autopar.export_safetensors(path, saved / "out"),
        ):
            with pytest.raises(CheckpointError, match=f"path is of type {type(wrong).__name__}: give a checkpoint's"):
                call(wrong)
    for other in (model, optimizer.state_dict()):
        for do in (autopar.save_checkpoint, autopar.load_checkpoint):
            with pytest.raises(
                CheckpointError, match=rf"optimizer is of type {type(other).__name__}, .* no param_groups"
            ):
                do(saved, model, other)
    with pytest.raises(CheckpointError, match=r"two optimizers have \d+ parameters of the module in common, '"):
        autopar.save_checkpoint(saved, model, [optimizer, optimizer])
    assert value_at(str(saved)) == 1.0


def test_floats_are_cast_and_nothing_else(saved: Path) -> None:
    """To the module's dtypes; the optimizer's state follows its parameters."""
    model, optimizer = small(0.0)
    model.double()
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    autopar.load_checkpoint(saved, model, optimizer)
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    for tensor in (*model.parameters(), *momenta):
        assert tensor.dtype == torch.float64 and (tensor == 1).all()
    model[1].num_batches_tracked = torch.tensor(5.0)
    with pytest.raises(
        CheckpointError, match=r"1.num_batches_tracked is of torch.int64 in .*, of torch.float32 in the"
    ):
        autopar.load_checkpoint(saved, model)
    assert model[1].num_batches_tracked == 5


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow beyond 6000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_leaves_the_checkpoint_before(saved: Path, small_disk: None, wait: bool) -> None:
    model = nn.Linear(100, 100)
    with pytest.raises(CheckpointError, match=r"rank 0 could not write its part of .*: File too large; the checkpoint"):
        autopar.save_checkpoint(saved, model, wait=wait).wait()
    assert value_at(str(saved)) == 1.0 and len(list(saved.glob("save-*"))) == 1
    autopar.save_checkpoint(saved, nn.Linear(2, 2))


def test_a_save_that_failed_unseen_is_told_by_the_next(saved: Path, small_disk: None, caplog: Any) -> None:
    model = nn.Linear(100, 100)
    autopar.save_checkpoint(saved, model, wait=False)
    with pytest.raises(CheckpointError, match="File too large"):
        autopar.load_checkpoint(saved, model)
    assert "File too large" in caplog.text
    assert value_at(str(saved)) == 1.0


def test_an_error_after_the_last_moment_loses_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a rank that is lost while it is told that the new checkpoint is in place."""
    commit = files.commit

    def late(*args: Any) -> None:
        commit(*args)
        raise OSError("too late")

    monkeypatch.setattr(files, "commit", late)
    with pytest.raises(CheckpointError, match="too late"):
        save_small(str(saved), 2.0)
    assert value_at(str(saved)) == 2.0


def test_a_path_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/autopar")):
        with pytest.raises(CheckpointError, match="cannot write a checkpoint to"):
            autopar.save_checkpoint(path, nn.Linear(2, 2))


def test_the_command_line_says_what_is_inside(saved: Path) -> None:
    result = CliRunner().invoke(main.app, ["checkpoint", "inspect", str(saved)])
    assert result.exit_code == 0, result.output
    expected = (
        r"format 1, written by autopar \S+ with torch \S+\n"
        r"  model      7 tensors, 116 B\n"
        r"  optimizer  1 group of parameters, 84 B in momentum_buffer\n"
        r"  extra      value\n"
        r"  files      2, with the checksums that were written\n"
        r"  0.bias                 float32 3\n"
        r"  0.weight               float32 3x4\n"
    )
    assert re.search(expected, result.output), result.output
    result = CliRunner().invoke(main.app, ["checkpoint", "inspect", str(saved / "nothing")])
    assert result.exit_code == 2 and "there is no checkpoint" in result.output
