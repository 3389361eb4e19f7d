import numpy as np
import pytest
import torch

from fedlightning.datamodules import DirichletPartitioner, IIDPartitioner, TabularFederatedDataModule, describe
from fedlightning.datamodules.csv_tables import Form, numbers_of, read_table

RNG = np.random.default_rng(0)


def write(folder, rows, name="table.csv"):
    path = folder / name
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    return path


def patients(change=lambda row: row, count=90):
    """Rows of three hospitals whose ages and doses differ by far."""
    rows = [["id", "age", "sex", "dose", "hospital", "ill", "days"]]
    for i in range(count):
        hospital = ("Rome", "Oslo", "Bern")[i % 3]
        age = 30 + 10 * (i % 3) + int(RNG.integers(0, 20))
        dose = round(float(RNG.normal(5 * (i % 3), 1 + i % 3)), 3)
        rows.append(
            change([i, age, "fm"[i % 2], dose, hospital, ("no", "yes")[i // 3 % 2], round(float(RNG.uniform()), 4)])
        )
    return rows


def ready(path, **options):
    data = TabularFederatedDataModule(path, **{"target": "ill", "client": "hospital", "drop": ["id", "days"]} | options)
    data.setup()
    return data


def rows_of(data, client, *splits):
    found = [batch for split in splits for batch in data.client_dataloader(client, split)]
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def test_a_table_becomes_a_federation(tmp_path):
    data = ready(write(tmp_path, patients()))
    assert data.client_ids == ["Bern", "Oslo", "Rome"] and data.partition_name == "by hospital"
    assert data.feature_names == ["age", "sex=f", "sex=m", "dose"] and data.class_names == ["no", "yes"]
    assert data.num_classes == 2 and describe(data).counts.sum() == sum(map(data.num_samples, data.client_ids))
    for client in data.client_ids:
        assert [data.num_samples(client, split) for split in ("train", "val", "test")] == [19, 5, 6]
        x, y = rows_of(data, client, "train", "val")
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        for column in (0, 3):  # by the client's own rows, those for testing not among them
            assert x[:, column].mean() == pytest.approx(0, abs=1e-5)
            assert x[:, column].std(correction=0) == pytest.approx(1, abs=1e-5)
        assert set(x[:, 1:3].sum(1).tolist()) == {1.0}


def test_nothing_of_other_clients_and_of_test_rows_is_seen(tmp_path):
    rows = patients()
    one = ready(write(tmp_path, rows))
    others = [[*row[:1], row[1] * 100, row[2], -row[3], *row[4:]] if row[4] == "Rome" else row for row in rows]
    two = ready(write(tmp_path, others, "other.csv"))
    for client in ("Oslo", "Bern"):
        assert torch.equal(rows_of(one, client, "test")[0], rows_of(two, client, "test")[0])
    held = {int(i) for i in one.indices("Rome", "test")}
    changed = [row if i - 1 not in held else [*row[:3], 1e6, *row[4:]] for i, row in enumerate(rows)]
    three = ready(write(tmp_path, changed, "test.csv"))
    assert torch.equal(rows_of(one, "Rome", "val")[0], rows_of(three, "Rome", "val")[0])


def test_statistics_that_are_given_hold_for_all(tmp_path):
    path = write(tmp_path, patients())
    ages = read_table(path)["age"].numbers
    data = ready(path, statistics={"age": [50.0, 10.0]})
    for client in data.client_ids:
        x, _ = rows_of(data, client, "val")
        assert x[:, 0].tolist() == pytest.approx(((ages[data.indices(client, "val")] - 50) / 10).tolist())
    plain = ready(path, scaling=False)
    assert rows_of(plain, "Rome", "test")[0][:, 0].tolist() == ages[plain.indices("Rome", "test")].tolist()


def test_gaps(tmp_path):
    def holes(row):
        gap = ("", "?", "NA", "nan")[row[0] % 4]
        return [row[0], gap if row[0] % 9 == 0 else row[1], gap if row[0] == 5 else row[2],
                gap if row[4] == "Oslo" else row[3], *row[4:]]  # fmt: skip

    path = write(tmp_path, patients(holes))
    data = ready(path)
    for client in data.client_ids:
        x, _ = rows_of(data, client, "train", "val", "test")
        assert x.isfinite().all() and (client != "Oslo" or (x[:, 3] == 0).all())
    gaps = np.isnan(read_table(path)["age"].numbers[data.indices("Rome", "train")])
    held = torch.stack([data.client_dataloader("Rome", "train").dataset[i][0] for i in range(len(gaps))])
    assert gaps.any() and (held[torch.from_numpy(gaps), 0] == 0).all()  # the client's mean
    assert [int((x[:, 1:3].sum(1) == 0).sum()) for x in [rows_of(data, "Bern", "train", "val", "test")[0]]] == [1]
    with pytest.raises(ValueError, match="'age' has 10 gaps, which scaling fills"):
        ready(path, scaling=False)


def test_rows_without_a_target_are_left_out_and_it_is_said(tmp_path):
    path = write(tmp_path, patients(lambda row: [*row[:5], "" if row[0] < 6 else row[5], row[6]]))
    with pytest.warns(UserWarning, match="6 of 90 rows have no 'ill'"):
        data = ready(path)
    assert sum(data.num_samples(c, s) for c in data.client_ids for s in ("train", "val", "test")) == 84


def test_regression_and_partitioners(tmp_path):
    path = write(tmp_path, patients())
    options = {"target": "days", "client": None, "drop": ["id", "hospital", "ill"]}
    data = ready(path, **options, partitioner=IIDPartitioner(4, stratified=False), target_statistics=[0.5, 0.25])
    days = read_table(path)["days"].numbers
    _, y = rows_of(data, "2", "test")
    assert y.tolist() == pytest.approx(((days[data.indices("2", "test")] - 0.5) / 0.25).tolist(), rel=1e-4)
    assert data.num_classes is None and data.class_names is None and y.dtype == torch.float32
    with pytest.raises(ValueError, match="DirichletPartitioner divides samples by label"):
        ready(path, **options, partitioner=DirichletPartitioner(3, 0.5))
    by_class = ready(path, client=None, partitioner=DirichletPartitioner(3, 0.5), drop=["id", "days", "hospital"])
    assert by_class.num_classes == 2 and len(by_class.client_ids) == 3
    ages = ready(path, target="age", drop=["id", "days"], client="hospital")
    assert ages.num_classes is None  # many whole numbers are a measurement
    assert ready(path, target="age", task="classification").num_classes == len(set(read_table(path)["age"].cells))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "il"}, r"no column 'il' \(target\); did you mean 'ill'"),
        ({"client": "clinic"}, r"no column 'clinic' \(client\)"),
        ({"drop": ["no"]}, r"no column 'no' \(drop\)"),
        ({"client": None}, "neither client nor partitioner"),
        ({"partitioner": IIDPartitioner(2)}, "both client='hospital' and partitioner=<IIDPartitioner>"),
        ({"task": "rank"}, "task='rank'"),
        ({"task": "regression"}, "'ill' holds words; a regression needs numbers"),
        ({"statistics": {"age": [1.0, 0.0]}}, "standard deviation > 0"),
        ({"drop": ["id", "days", "age", "sex", "dose"]}, "no column is left as a feature"),
        ({"test_fraction": 1.0}, "test_fraction=1.0"),
        ({"delimiter": ";;"}, "delimiter=';;'; give the one character"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ready(write(tmp_path, patients()), **options)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([["age", "ill"], [1, 2], [3]], "line 3: 1 cells under 2 names"),
        ([["age", "age"], [1, 2]], "two columns of one name"),
        ([["age", ""], [1, 2]], "a column without a name"),
        ([["age", "ill"]], "no rows"),
        (
            [["age", "ill", "hospital"], [1, 0, "a"], [2, 1, "a"], ["x7", 1, "a"]],
            "'age' holds numbers, but 'x7' in sample 3",
        ),
        ([["age", "ill", "hospital"], [1, 0, "a"], ["inf", 1, "a"]], "an infinite number"),
        ([["age", "ill", "hospital"], [1, 0, "a"], [2, 1, ""]], "sample 2 has no 'hospital'"),
        ([["age", "ill", "hospital"], [1, 1, "a"], [2, 1, "a"]], "nothing to learn"),
        (
            [["age", "ill", "hospital"], *[[f"name {i}", i % 2, "a"] for i in range(60)]],
            r"60 different words.*drop: \[age\]",
        ),
    ],
)
def test_damaged_tables_are_refused(tmp_path, rows, sentence):
    with pytest.raises(ValueError, match=sentence):
        ready(write(tmp_path, rows), drop=[])


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the path of a CSV file"):
        ready(tmp_path / "absent.csv")
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(ValueError, match="cannot be read as CSV in UTF-8"):
        ready(tmp_path / "binary")
    # Without strict reading the open quote would take the second row, and the third would follow as if nothing were amiss.
    (tmp_path / "open.csv").write_text('note,ill\n"ache,1\nbad "day",0\nfine,1\n')
    with pytest.raises(ValueError, match=r"open.csv, line 3: .* close each quote"):
        read_table(tmp_path / "open.csv")


def with_cell(column, value, row=5):
    rows = patients()
    rows[row][rows[0].index(column)] = value
    return rows


@pytest.mark.parametrize("scale", ["local", "federated", "none"])
@pytest.mark.parametrize("value", ["1e39", "-1e30", "1e12"])
def test_a_cell_that_flattens_its_column_is_refused(tmp_path, scale, value):
    place = write(tmp_path, with_cell("dose", value))
    with pytest.raises(ValueError, match=r"column 'dose' holds -?1e\+\d+ in sample 5, beside which all others"):
        ready(place, scale=scale)
    ready(place, scale=scale, drop=["id", "days", "dose"])  # and an identifier may be as long as it likes


def test_a_target_that_no_sample_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the target 'days' holds 1e\+39 in sample 5"):
        ready(write(tmp_path, with_cell("days", "1e39")), target="days", drop=["id", "ill"])


def test_far_and_sparse_values_are_let_be(tmp_path):
    """A unit of a hospital's own, a rare event, and a column of one value."""
    rows = patients(lambda row: [*row[:3], row[3] * 1e9 if row[4] == "Rome" else row[3], *row[4:]])
    ready(write(tmp_path, rows))
    ready(write(tmp_path, patients(lambda row: [*row[:3], 1e6 if row[0] == 7 else 0, *row[4:]])))


@pytest.mark.parametrize("cell", ["1_0", "１０"])
def test_digits_are_plain(tmp_path, cell):
    with pytest.raises(ValueError, match=f"column 'dose' holds numbers, but '{cell}' in sample 5"):
        ready(write(tmp_path, with_cell("dose", cell)))


def test_a_class_of_one_row_is_asked_about(tmp_path):
    place = write(tmp_path, with_cell("ill", "yess"))
    with pytest.warns(UserWarning, match=r"'ill': class 'yess' has one of 90 samples. If that is a slip, correct it"):
        ready(place)
    with pytest.raises(ValueError, match="'ill' has the value 'yess', which is not among classes"):
        ready(place, classes=["no", "yes"])


def test_a_client_of_one_row_is_asked_about(tmp_path):
    with pytest.warns(
        UserWarning, match="'hospital': client 'Romee' has one of 90 samples. If that is a slip, correct it"
    ):
        ready(write(tmp_path, with_cell("hospital", "Romee")))


def test_one_broken_number_among_classes_is_asked_about(tmp_path):
    grades = patients(lambda row: [*row[:5], 1.5 if row[0] == 4 else row[0] % 2, row[6]])
    with pytest.warns(UserWarning, match=r"'ill' holds whole numbers but for 1.5, and is taken for a measurement"):
        ready(write(tmp_path, grades))


@pytest.mark.parametrize("mark", [-1, -100])
def test_a_number_for_no_label_is_no_class(tmp_path, mark):
    grades = patients(lambda row: [*row[:5], (mark, 0, 1)[row[0] % 3], row[6]])
    with pytest.raises(ValueError, match=rf"'ill': 30 of 90 labels are {mark}, by which .* name them all by classes"):
        ready(write(tmp_path, grades))
    assert ready(write(tmp_path, grades), classes=[str(mark), "0", "1"]).num_classes == 3
    assert ready(write(tmp_path, patients(lambda row: [*row[:5], (mark, 1)[row[0] % 2], row[6]]))).num_classes == 2


@pytest.mark.parametrize("cell", ['"{},5"', '"1,{:03}"', "{}%", "\u2212{}"])
def test_numbers_that_are_written_otherwise_are_no_categories(tmp_path, cell):
    rows = patients(lambda row: [*row[:3], cell.format(row[0]), *row[4:]], 40)
    with pytest.raises(ValueError, match=r"column 'dose' holds '.*', which is not a number here: write it as 1234.5"):
        ready(write(tmp_path, rows))
    assert len(ready(write(tmp_path, rows), categorical=["dose"]).feature_names) == 43
    with pytest.raises(ValueError, match=r"column 'dose' holds .* If it is a word, give task='classification'"):
        ready(write(tmp_path, rows), target="dose", drop=["id", "days", "ill"])


def test_names_that_differ_in_spelling_alone_are_asked_about(tmp_path):
    cases = patients(lambda row: [*row[:5], ("no", "yes", "No")[row[0] % 3], row[6]])
    with pytest.warns(UserWarning, match="'ill': 'No' and 'no' differ in spelling alone"):
        ready(write(tmp_path, cases))
    people = patients(lambda row: [f"{row[0] // 2}{'.0' * (row[0] % 2)}", *row[1:]])
    sites = patients(lambda row: [*row[:2], row[2].upper() if row[4] == "Oslo" else row[2], *row[3:]])
    with pytest.warns(UserWarning, match="column 'sex': 'F' and 'f' differ in spelling alone"):
        ready(write(tmp_path, sites))
    with pytest.warns(UserWarning, match="column 'sex': 'm' and 'M' differ in spelling alone"):
        ready(write(tmp_path, sites), categories={"sex": ["f", "m"]})
    with pytest.warns(UserWarning, match="column 'id': '0' and '0.0' differ in spelling alone"):
        ready(write(tmp_path, people), group="id", drop=["days"])


def test_a_name_that_no_file_can_have_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        ready("a" * 300)


@pytest.mark.parametrize(
    ("text", "options", "encoding"),
    [
        ("alter;größe;klinik;tot\n63;1,5;a;1\n71;2,25;b;0\n58;1,7;b;1\n44;2;a;0\n", {}, "utf-8"),
        ("alter\tgröße\tklinik\ttot\n63\t1.5\ta\t1\n71\t2.25\tb\t0\n58\t1.7\tb\t1\n44\t2\ta\t0\n", {}, "utf-8"),
        ("alter;größe;klinik;tot\n63;1,5;a;1\n71;2,25;b;0\n58;1,7;b;1\n44;2;a;0\n", {"encoding": "cp1252"}, "cp1252"),
        ("alter;größe;klinik;tot\n63;1,500;a;1\n71;2,250;b;0\n58;1,700;b;1\n44;2;a;0\n", {"decimal": ","}, "utf-8"),
    ],
)
def test_tables_of_other_countries(tmp_path, text, options, encoding):
    path = tmp_path / "klinik.csv"
    path.write_bytes(text.encode(encoding))
    data = TabularFederatedDataModule(path, "tot", "klinik", scaling=False, test_fraction=0, val_fraction=0, **options)
    data.setup()
    assert (
        data.feature_names == ["alter", "größe"] and data.sample_values("b", "train", "größe") == ["2.25", "1.7"]
    ) or (data.sample_values("b", "train", "größe") == ["2.250", "1.700"])
    dataset = data.client_dataloader("b", "train").dataset
    assert sorted(float(dataset[i][0][1]) for i in range(2)) == pytest.approx([1.7, 2.25])


def test_what_could_be_either_is_asked_about(tmp_path):
    path = tmp_path / "klinik.csv"
    path.write_text("alter;dosis;klinik;tot\n63;1,500;a;1\n71;2,250;b;0\n58;1,700;b;1\n44;2,100;a;0\n")
    with pytest.raises(ValueError, match=r"'1,500', which is not a number here.* or give decimal: ','"):
        TabularFederatedDataModule(path, "tot", "klinik").setup()
    path.write_bytes("größe;klinik;tot\n1;a;0\n".encode("cp1252"))
    with pytest.raises(ValueError, match=r"in UTF-8 .* or give its encoding: cp1252"):
        TabularFederatedDataModule(path, "tot", "klinik").setup()


@pytest.mark.parametrize(("decimal", "other"), [(",", "7"), (None, "7,5")])
def test_a_point_that_may_mark_thousands_is_no_fraction_beside_decimal_commas(tmp_path, decimal, other):
    path = tmp_path / "klinik.csv"
    lines = [f"{'950' if i % 2 else f'1.2{i:02d}'};{other};{'ab'[i % 2]};{i // 2 % 2}" for i in range(20)]
    path.write_text("\n".join(["units;dose;hospital;ill", *lines]))
    with pytest.raises(
        ValueError, match=r"column 'units' holds '1.200', which is not a number here.*marks of thousands"
    ):
        ready(path, drop=[], group=False, decimal=decimal)
    ready(path, drop=["units"], group=False, decimal=decimal)
    with pytest.raises(ValueError, match=r"column 'units' holds '1.200', which is not a number here"):
        numbers_of(path, read_table(path, Form(decimal=decimal))["units"])


@pytest.mark.parametrize(
    ("encoding", "sentence"),
    [("rot13", "encoding='rot13', which Python"), ("utf-16", "cannot be read as CSV in utf-16")],
)
def test_encodings_that_the_file_cannot_have(tmp_path, encoding, sentence):
    with pytest.raises(ValueError, match=sentence):
        ready(write(tmp_path, patients()), encoding=encoding)


@pytest.mark.parametrize("day", ["{:02d}.11.2023", "2023-11-{:02d}", "{:02d}/11/23", "2023-11-{:02d} 10:30"])
def test_a_column_of_days_is_said_to_be_one(tmp_path, day):
    rows = patients(lambda row: [day.format(1 + row[0] % 20), *row[1:]])
    rows[0][0] = "admitted"
    with pytest.raises(ValueError, match=r"'admitted' holds '.*', a date, .* drop: \[admitted\]"):
        ready(write(tmp_path, rows), drop=["days"])


def test_a_report_names_classes_as_the_file_does(tmp_path):
    report = describe(ready(write(tmp_path, patients())))
    assert report.classes == ["no", "yes"] and report.rows()[0].keys() >= {"no", "yes"}


def test_what_the_file_alone_decides_is_told(tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"{40 + i},{'fm'[i % 2]},{'ab'[i % 3 > 1]},{i // 2 % 2}" for i in range(40)]
    path.write_text("\n".join(["age,sex,site,y", *rows]))
    data = TabularFederatedDataModule(path, target="y", client="site", batch_size=4)
    data.setup()
    assert data.named_by_file == {"classes": ["0", "1"], "categories": {"sex": ["f", "m"]}}
    named = TabularFederatedDataModule(
        path, target="y", client="site", classes=["0", "1"], categories={"sex": ["f", "m"]}
    )
    named.setup()
    assert named.named_by_file == {}


def test_new_rows_are_scaled_and_coded_as_the_client_s(tmp_path):
    """Whoever loads a model and has new patients: their columns may be in another order, and others may lack."""
    rows = patients()
    data = ready(write(tmp_path, rows))
    place = {name: rows[0].index(name) for name in ("sex", "dose", "age")}
    here = [row for row in rows[1:] if row[4] == "Rome"]
    new = write(tmp_path, [list(place), *([row[at] for at in place.values()] for row in here)], "new.csv")
    x = data.inputs_of(new, "Rome")
    assert x.dtype == torch.float32 and data.feature_names == ["age", "sex=f", "sex=m", "dose"]
    assert torch.equal(x, data._splits["train"].dataset.x[[row[0] for row in here]])
    assert not torch.equal(x, data.inputs_of(new, "Oslo"))
    for change, match in (
        ({"sex": "x"}, "sex=x has no feature"),
        ({"age": "old"}, "column 'age' holds words, and numbers"),
    ):
        row = dict(zip(place, [here[0][at] for at in place.values()], strict=True)) | change
        with pytest.raises(ValueError, match=match):
            data.inputs_of(write(tmp_path, [list(row), list(row.values())], "bad.csv"), "Rome")
    with pytest.raises(ValueError, match="no client 'Ulm'"):
        data.inputs_of(new, "Ulm")
    assert data.named_by_file == ready(data.path).named_by_file  # refused words leave nothing
    agreed = ready(write(tmp_path, rows), scale="federated")
    with pytest.raises(ValueError, match="give the numbers and words of its statistics"):
        agreed.inputs_of(new, "Rome")
    for changed in (rows[:-1], [rows[0], [*rows[1][:3], 100, *rows[1][4:]], *rows[2:]], [rows[0], *rows[:0:-1]]):
        data = ready(write(tmp_path, rows))
        write(tmp_path, changed)
        with pytest.raises(ValueError, match="has changed since setup, and its rows scale the new"):
            data.inputs_of(new, "Rome")
