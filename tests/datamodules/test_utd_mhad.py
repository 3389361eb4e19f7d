import numpy as np
import pytest
from scipy.io import savemat

from fedlightning.datamodules import IIDPartitioner, UTDMHADDataModule


def write(root, change=lambda folder: None):
    """The publisher's layout: a file for each action, subject, trial and modality; recordings of different lengths."""
    for folder in ("Inertial", "Skeleton"):
        (root / folder).mkdir(parents=True)
    draw = np.random.default_rng(0)
    for action in (1, 2, 27):
        for subject in (1, 2, 10):
            for trial in (1, 2, 3, 4):
                name, frames = f"a{action}_s{subject}_t{trial}", 20 + trial
                ramp = np.linspace(0, subject, frames)[:, None].repeat(6, axis=1)
                savemat(root / "Inertial" / f"{name}_inertial.mat", {"d_iner": ramp})
                joints = draw.normal(size=(20, 3, 1)) + np.linspace(0, action, frames)
                savemat(root / "Skeleton" / f"{name}_skeleton.mat", {"d_skel": joints})
    change(root)
    return str(root)


def test_subjects_are_clients_with_all_actions_and_the_last_trial_is_tested(tmp_path):
    data = UTDMHADDataModule(write(tmp_path), length=5, val_fraction=0.34)
    data.setup()
    assert data.client_ids == ["1", "2", "10"] and data.modalities_of("10") == ("inertial", "skeleton")
    for client in data.client_ids:
        counts = [data.class_counts(client, split) for split in ("train", "val", "test")]
        assert [counts[0][k] + counts[1][k] for k in (0, 1, 26)] == [3, 3, 3] and counts[2][26] == 1 == counts[2][0]
        x, _ = next(iter(data.client_dataloader(client, "test")))
        assert np.allclose(x["inertial"], np.linspace(0, int(client), 5)[None, None], atol=1e-6)
        assert x["inertial"].shape == (3, 6, 5) and x["skeleton"].shape == (3, 60, 5)


def test_joints_are_relative_to_their_mean_in_the_first_frame(tmp_path):
    data = UTDMHADDataModule(write(tmp_path), length=3)
    data.setup()
    x, y = next(iter(data.client_dataloader("1", "test")))
    joints = x["skeleton"].reshape(3, 20, 3, 3)
    assert np.allclose(joints[..., 0].mean(dim=1), 0, atol=1e-5)
    assert np.allclose(joints[..., 2] - joints[..., 0], y[:, None, None] + 1, atol=1e-5)


def test_other_partitions_and_limits(tmp_path):
    root = write(tmp_path)
    data = UTDMHADDataModule(root, IIDPartitioner(2), max_train=10)
    data.setup()
    assert data.client_ids == ["0", "1"]
    with pytest.raises(ValueError, match="a client of each subject without max_train"):
        UTDMHADDataModule(root, max_train=10).setup()


def alone(root):
    (root / "Skeleton" / "a1_s2_t3_skeleton.mat").unlink()


def cut_short(root):
    (root / "Inertial" / "a2_s1_t1_inertial.mat").write_bytes(b"MATLAB")


def other_shape(root):
    savemat(root / "Skeleton" / "a2_s1_t1_skeleton.mat", {"d_skel": np.zeros((21, 3, 9))})


def other_part(root):
    """At a kind of numbers that there is not scipy ends the process."""
    path = root / "Inertial" / "a2_s1_t1_inertial.mat"
    content = bytearray(path.read_bytes())
    assert content[184] == 9  # float64
    content[184] = 51
    path.write_bytes(content)


def beyond(root):
    ramp = np.linspace(0, 1e39, 20)[:, None].repeat(6, axis=1)
    savemat(root / "Inertial" / "a2_s1_t1_inertial.mat", {"d_iner": ramp})


def other_name(root):
    (root / "Inertial" / "a28_s1_t1_inertial.mat").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (alone, r"a1_s2_t3_inertial.mat has no skeleton recording beside it \(1 such files\)"),
        (cut_short, "a2_s1_t1_inertial.mat cannot be read as a recording"),
        (other_shape, r"a2_s1_t1_skeleton.mat has shape \(9, 63\)"),
        (other_part, r"a2_s1_t1_inertial.mat cannot be read as a recording \(byte 184 begins a part of kind 51\)"),
        (beyond, r"a2_s1_t1_inertial.mat has a number beyond single precision, or far from all others"),
        (other_name, "a28_s1_t1_inertial.mat is not a recording of inertial data by its name"),
    ],
)
def test_damaged_files_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        UTDMHADDataModule(write(tmp_path, change)).setup()


def test_missing_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no recordings in .*Inertial, .*Skeleton"):
        UTDMHADDataModule(str(tmp_path)).prepare_data()


def test_times_that_nobody_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"test_trial=9, and .* leave some for training and some for testing"):
        UTDMHADDataModule(write(tmp_path), test_trial=9).setup()


def test_packed_files_are_read_too(tmp_path):
    def pack(root):
        path = root / "Inertial" / "a2_s1_t1_inertial.mat"
        savemat(path, {"other": np.zeros((3, 5)), "d_iner": np.ones((30, 6), dtype=np.int16)}, do_compression=True)

    data = UTDMHADDataModule(write(tmp_path, pack))
    assert (data._read(tmp_path / "Inertial" / "a2_s1_t1_inertial.mat", "inertial") == 1).all()
