from fedlightning.testing.toys import ToyData, federate


def test_a_federation_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = federate(None, ToyData(), None, max_rounds=1)
    assert trainer.server is not None and not list(tmp_path.iterdir())
