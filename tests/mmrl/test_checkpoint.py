"""`mmrl.checkpoint`: written whole or not at all, verified when read, one byte at a time."""

import errno
import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from mmrl import checkpoint
from mmrl.checkpoint import (
    checkpoint_directory,
    forget_after,
    latest_checkpoint,
    load_optimizer_tensors,
    optimizer_tensors,
    policy_checksum,
    prune_checkpoints,
    read_checkpoint,
    replace_text,
    write_checkpoint,
)
from mmrl.errors import CheckpointError

FILES = ["manifest.json", "optimizer.safetensors", "policy/model.safetensors", "policy/notes/readme.txt", "trainer.json"]


def save_policy(directory):
    save_file({"weight": torch.arange(3.0)}, directory / "model.safetensors")
    (directory / "notes").mkdir()
    (directory / "notes" / "readme.txt").write_text("hello")


def write(root, step, save=save_policy, **state):
    moments = {"weight.exp_avg": torch.ones(2, 2).T, "weight.step": torch.tensor(3.0)}
    return write_checkpoint(root, step, save_policy=save, state={"train_step": step, **state}, optimizer=moments)


def names(root):
    return sorted(path.name for path in root.iterdir())


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def disk_full(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_written_is_read_back(tmp_path):
    directory = write(tmp_path, 7, best=None)
    assert directory == tmp_path / "step_000007"
    assert sorted(contents(directory)) == FILES
    snapshot = read_checkpoint(directory)
    assert snapshot.state == {"train_step": 7, "best": None}
    assert snapshot.optimizer["weight.exp_avg"].tolist() == [[1, 1], [1, 1]]
    assert snapshot.policy_dir == directory / "policy"
    assert names(tmp_path) == ["latest", "step_000007"]


def test_latest_points_at_the_newest_and_survives_its_loss(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    write(tmp_path, 3)
    write(tmp_path, 20)
    assert latest_checkpoint(tmp_path).name == "step_000020"
    (tmp_path / "latest").write_text("step_000003\n")
    assert latest_checkpoint(tmp_path).name == "step_000003"
    for broken in ("", "step_000099\n"):
        (tmp_path / "latest").write_text(broken)
        assert latest_checkpoint(tmp_path).name == "step_000020"
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path).name == "step_000020"


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_refused_naming_the_file_and_the_older_ones(tmp_path, name):
    write(tmp_path, 1)
    write(tmp_path, 2)
    directory = write(tmp_path, 3)
    whole = (directory / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 25)):
        spoiled = bytearray(whole)
        spoiled[place] ^= 0x20
        (directory / name).write_bytes(spoiled)
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(directory)
        blamed = directory / name if name != "manifest.json" else directory  # it then blames a file that it no longer describes
        assert str(caught.value).startswith(str(blamed))
        assert "Older checkpoints beside it: step_000001, step_000002 (use --checkpoint)" in str(caught.value)
    (directory / name).write_bytes(whole)
    read_checkpoint(directory)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_shortened_file_is_refused_by_name(tmp_path, name):
    write(tmp_path, 1)
    directory = write(tmp_path, 2)
    path = directory / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(directory)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{name}.*Older checkpoints beside it: step_000001") as caught:
        read_checkpoint(directory)
    assert "missing" in str(caught.value) or "not a whole checkpoint" in str(caught.value)


def test_a_newest_checkpoint_without_manifest_is_refused_rather_than_skipped(tmp_path):
    write(tmp_path, 1)
    directory = write(tmp_path, 2)
    (directory / "manifest.json").unlink()
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path) == directory


@pytest.mark.parametrize("manifest", ["3", "null", "{", '{"policy/model.safetensors": 3}', "[[1, 2, 3]]"])
def test_a_manifest_that_is_something_else_is_refused(tmp_path, manifest):
    directory = write(tmp_path, 1)
    (directory / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="step_000001"):
        read_checkpoint(directory)


# Writing that fails


@pytest.mark.parametrize("victim", ["policy", "save_file", "_write_json", "_sync", "file_checksum", "rename"])
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_draft(tmp_path, monkeypatch, victim):
    write(tmp_path, 1)
    before = contents(tmp_path)
    if victim == "rename":
        monkeypatch.setattr(checkpoint.Path, "rename", disk_full)
    elif victim != "policy":
        monkeypatch.setattr(checkpoint, victim, disk_full)
    with pytest.raises(CheckpointError, match=r"step_000002: cannot be written \(.*No space left.*the previous .* is intact"):
        write(tmp_path, 2, save=disk_full if victim == "policy" else save_policy)
    assert contents(tmp_path) == before
    monkeypatch.undo()
    assert read_checkpoint(latest_checkpoint(tmp_path)).state == {"train_step": 1}
    write(tmp_path, 2)
    assert latest_checkpoint(tmp_path).name == "step_000002"


def test_safetensors_has_its_own_way_to_say_that_the_disk_is_full(tmp_path):
    def refuse(directory):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path, 1, save=refuse)
    assert names(tmp_path) == []


def test_a_full_disk_while_latest_is_replaced_leaves_two_whole_checkpoints(tmp_path, monkeypatch):
    write(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "replace_text", disk_full)
    with pytest.raises(CheckpointError):
        write(tmp_path, 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["latest", "step_000001", "step_000002"]
    for step in (1, 2):
        read_checkpoint(tmp_path / f"step_00000{step}")


def test_the_draft_of_a_crashed_write_is_ignored_and_cleaned_up(tmp_path):
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step_000001", tmp_path / ".step_000002.partial")
    shutil.copytree(tmp_path / "step_000001", tmp_path / ".step_000000.removed.partial")
    (tmp_path / ".latest.partial").write_text("step_")
    assert latest_checkpoint(tmp_path).name == "step_000001"
    drafts = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    prune_checkpoints(tmp_path, keep_last=1, keep=frozenset())
    assert names(tmp_path) == ["latest", "step_000001"]
    for path in drafts:
        path.mkdir()
    write(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_000001", "step_000003"]


def test_a_step_may_be_written_again(tmp_path):
    write(tmp_path, 1, attempt=1)
    write(tmp_path, 1, attempt=2)
    assert read_checkpoint(tmp_path / "step_000001").state["attempt"] == 2
    assert names(tmp_path) == ["latest", "step_000001"]


def test_text_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    replace_text(path, "old")
    monkeypatch.setattr(checkpoint, "_sync", disk_full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert path.read_text() == "old"


# What is kept


def test_pruning_keeps_the_last_ones_and_the_best(tmp_path):
    for step in (1, 2, 3, 10, 200):
        write(tmp_path, step)
    prune_checkpoints(tmp_path, keep_last=2, keep=frozenset({"step_000002", "step_000077"}))
    assert names(tmp_path) == ["latest", "step_000002", "step_000010", "step_000200"]
    prune_checkpoints(tmp_path, keep_last=5, keep=frozenset())
    assert names(tmp_path) == ["latest", "step_000002", "step_000010", "step_000200"]


def test_forgetting_removes_what_came_after_a_step(tmp_path):
    for step in (1, 9, 10, 11):
        write(tmp_path, step)
    forget_after(tmp_path, 9)
    assert names(tmp_path) == ["latest", "step_000001", "step_000009"]
    assert latest_checkpoint(tmp_path).name == "step_000009"
    forget_after(tmp_path / "absent", 0)


# Policies and optimizers


def test_a_checksum_sees_names_and_bytes_of_every_dtype():
    def module(**tensors):
        policy = nn.Module()
        for name, tensor in tensors.items():
            policy.register_buffer(name, tensor)
        return policy_checksum(policy)

    values = torch.tensor([1.0, -0.0])
    same = module(a=values, b=torch.tensor(3))
    assert module(b=torch.tensor(3), a=values.clone()) == same
    assert module(a=torch.tensor([1.0, 0.0]), b=torch.tensor(3)) != same
    assert module(a=values, c=torch.tensor(3)) != same
    assert module(a=values.bfloat16(), b=torch.tensor(3)) != same
    assert module(a=values, b=torch.tensor(True)) != same
    matrix = torch.arange(6.0).reshape(2, 3)
    assert module(a=matrix.T) == module(a=matrix.T.contiguous())


def trained(seed):
    """A small network after two steps of AdamW, its optimizer and its parameters' names."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(policy[0].parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            policy(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
    return policy, optimizer, {parameter: name for name, parameter in policy.named_parameters()}


def test_an_optimizer_goes_on_from_its_tensors_as_if_never_interrupted(tmp_path):
    policy, optimizer, parameter_names = trained(0)
    saved = optimizer_tensors(optimizer, parameter_names)
    assert sorted(saved) == [f"0.{part}.{entry}" for part in ("bias", "weight") for entry in ("exp_avg", "exp_avg_sq", "step")]
    other, other_optimizer, other_names = trained(1)
    other.load_state_dict(policy.state_dict())
    load_optimizer_tensors(other_optimizer, other_names, {key: value.clone() for key, value in saved.items()}, tmp_path)
    for network, its_optimizer in ((policy, optimizer), (other, other_optimizer)):
        network.zero_grad()
        network(torch.ones(1, 3)).sum().backward()
        its_optimizer.step()
    assert policy_checksum(policy) == policy_checksum(other)


def test_moments_of_an_unknown_parameter_are_refused(tmp_path):
    _, optimizer, parameter_names = trained(0)
    with pytest.raises(CheckpointError, match=r"optimizer state for 'head.weight', which this policy does not train"):
        load_optimizer_tensors(optimizer, parameter_names, {"head.weight.exp_avg": torch.zeros(1)}, tmp_path)


def test_nothing_but_safetensors_and_json_is_read_back(tmp_path):
    directory = write(tmp_path, 1)
    (directory / "optimizer.safetensors").write_bytes(b"\x80\x04N.")  # a pickle of None
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["optimizer.safetensors"] = checkpoint.file_checksum(directory / "optimizer.safetensors")
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(directory)


def test_the_pointer_to_the_newest_checkpoint_is_as_good_as_its_folder(tmp_path):
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    assert checkpoint_directory(tmp_path / "latest") == newest and checkpoint_directory(newest) == newest
    assert read_checkpoint(tmp_path / "latest").directory == newest
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint beside it"):
        checkpoint_directory(tmp_path / "empty" / "latest")
