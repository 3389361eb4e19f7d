"""PTB-XL: electrocardiograms, by the site where they were recorded."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlightning.datamodules.csv_tables import column_of, read_table, refuse_twice, whole_of
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.datamodules.groups import codes_of
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.datamodules.views import FileSamples
from fedlightning.errors import import_package
from fedlightning.ranges import NonNegativeInt, checked

LEADS = ("I", "II", "III", "AVR", "AVL", "AVF", "V1", "V2", "V3", "V4", "V5", "V6")
UNCALIBRATED = 200.0
"""What wfdb takes for a gain that is 0 or not there; PTB-XL's is 1000 in a mV."""
CLASSES = ("NORM", "MI", "STTC", "CD", "HYP")
"""The diagnostic superclasses: normal, infarction, ST/T change, conduction disturbance, hypertrophy."""
COLUMNS = ("patient_id", "site", "scp_codes", "strat_fold", "filename_lr", "filename_hr")
FILES = ("ptbxl_database.csv", "scp_statements.csv")
FOLDS = {"train": range(1, 9), "val": (9,), "test": (10,)}


class PTBXLDataModule(NaturalSites):
    """PTB-XL: 21799 electrocardiograms of 12 leads and 10 s; each recording site is a client, five classes.

    Wagner et al. 2020, "PTB-XL, a large publicly available electrocardiography dataset", version 1.0.3; CC BY 4.0.
    Nothing is downloaded: unpack https://physionet.org/content/ptb-xl/1.0.3/ and give its folder as root. Records are
    read by wfdb (the extra `clinical`) when they are asked for.

    `x` is float32 `(batch, 12, 1000)` (100 Hz, in mV) or `(batch, 12, 5000)` (500 Hz). `y` is int64 `(batch,)`, the
    place in `CLASSES`: the diagnostic superclass with the highest likelihood among a record's statements, of those that
    tie the last in `CLASSES`, so that a finding is not hidden by NORM; or with `task="normal"`, 1 if the record has a
    diagnostic statement other than NORM. Records without a diagnostic statement, without a site, and of sites with
    fewer than `min_records` are left out, and a warning counts them. The publisher's folds are kept (8 for training,
    one for validation, one for testing); all records of a patient are in one. A patient recorded at two sites is at
    both of them; a warning counts these, too.

    Args:
        root: Folder of `ptbxl_database.csv`, `scp_statements.csv` and the records.
        batch_size: Number of samples in a batch.
        task: `"superclass"` or `"normal"`.
        rate: Samples in a second: 100 or 500.
        min_records: Fewest records of a site that is a client.
        cache: Keep records in memory (48 kB each at 100 Hz).
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a value is out of its range; from `setup`, if a table is damaged.

    Example:
        >>> from fedlightning.datamodules import PTBXLDataModule
        >>> PTBXLDataModule("data/ptb-xl").rate  # files are read by data.setup()
        100
    """

    common_options = ("task", "rate")
    files = FILES
    way = "unpack https://physionet.org/content/ptb-xl/1.0.3/ there"

    @checked
    def __init__(
        self,
        root: str = "data/ptb-xl",
        batch_size: int = 32,
        *,
        task: Literal["superclass", "normal"] = "superclass",
        rate: Literal[100, 500] = 100,
        min_records: NonNegativeInt = 50,
        cache: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.task, self.rate, self.min_records, self.cache = task, rate, min_records, cache
        self.classes = len(CLASSES) if task == "superclass" else 2

    def read(self) -> SiteSamples:
        source = self.root / FILES[0]
        table = read_table(source, only=COLUMNS)
        folds = whole_of(source, column_of(table, "strat_fold", "split"))
        if not np.isin(folds, range(1, 11)).all():
            raise ValueError(f"{source} has a strat_fold other than 1 to 10; it is not PTB-XL's file.")
        patients = np.array(column_of(table, "patient_id", "patient").cells)
        self._check_folds(patients, folds, source)
        y = self._labels(column_of(table, "scp_codes", "label").cells, source)
        sites = np.array([cell.removesuffix(".0") for cell in column_of(table, "site", "client").cells])
        counts = {site: int(((sites == site) & (y >= 0)).sum()) for site in set(sites.tolist()) - {""}}
        clients = sort_clients(site for site, count in counts.items() if count >= max(1, self.min_records))
        if not clients:
            raise ValueError(f"{source}: no site has {self.min_records} records; use a smaller min_records.")
        kept = (y >= 0) & np.isin(sites, clients)
        self._warn_left_out(
            len(kept), int((y < 0).sum()), int((sites == "").sum()), int(kept.sum()), len(counts) - len(clients)
        )
        sites_by_patient: dict[str, set[str]] = {}
        for patient, site in zip(patients[kept].tolist(), sites[kept].tolist(), strict=True):
            sites_by_patient.setdefault(patient, set()).add(site)
        moved = sum(len(sites_of_patient) > 1 for sites_of_patient in sites_by_patient.values())
        if moved:
            rank_zero_warn(f"{source.name}: {moved} patients have records at two or more sites.", category=UserWarning)
        files = column_of(table, "filename_lr" if self.rate == 100 else "filename_hr", "record").cells
        refuse_twice(source, files, "record")
        rows = {
            site: {
                split: np.flatnonzero(kept & (sites == site) & np.isin(folds, list(numbers)))
                for split, numbers in FOLDS.items()
            }
            for site in clients
        }
        data = Records([self.root / name for name in files], y, 10 * self.rate, self.cache)
        return SiteSamples(data, rows, y, codes_of(patients, len(patients), "record"))

    def _labels(self, cells: list[str], source: Path) -> np.ndarray:
        """Return the class of each record, -1 without a diagnostic statement."""
        statements = read_table(self.root / FILES[1], only=("code", "diagnostic_class"), index="code")
        names = column_of(statements, "code", "statement").cells
        refuse_twice(self.root / FILES[1], names, "statement")
        class_by_statement = dict(zip(names, column_of(statements, "diagnostic_class", "statement").cells, strict=True))
        classes = np.full(len(cells), -1, dtype=np.int64)
        for row, cell in enumerate(cells):
            try:
                codes = {str(code): float(value) for code, value in ast.literal_eval(cell).items()}
            except Exception as error:  # of a damaged cell come many kinds
                raise ValueError(
                    f"{source}, sample {row + 1}: scp_codes {cell[:40]!r} is not a table of statements."
                ) from error
            unknown = next((code for code in codes if code not in class_by_statement), None)
            if unknown is not None:
                raise ValueError(f"{source}, sample {row + 1}: statement {unknown!r} is not in {FILES[1]}.")
            superclasses = [(value, class_by_statement[code]) for code, value in codes.items()]
            scores = [(value, CLASSES.index(name)) for value, name in superclasses if name in CLASSES]
            if scores:
                best = max(scores)[1]
                classes[row] = best if self.task == "superclass" else int(any(kind > 0 for _, kind in scores))
        return classes

    def _check_folds(self, patients: np.ndarray, folds: np.ndarray, source: Path) -> None:
        fold_by_patient: dict[str, int] = {}
        for row, (patient, fold) in enumerate(zip(patients.tolist(), folds.tolist(), strict=True)):
            if fold_by_patient.setdefault(patient, fold) != fold:
                raise ValueError(
                    f"{source}, sample {row + 1}: patient {patient} is in folds {fold_by_patient[patient]} and {fold}; it is "
                    "not PTB-XL's file."
                )

    def _warn_left_out(self, total: int, unlabelled: int, nowhere: int, kept: int, small: int) -> None:
        if kept < total:
            rank_zero_warn(
                f"{type(self).__name__} leaves out {total - kept} of {total} records: {unlabelled} have no diagnostic "
                f"statement, {nowhere} "
                f"no site, and {small} sites have fewer than min_records={self.min_records}.",
                category=UserWarning,
            )


class Records(FileSamples):
    """A dataset of records `(leads, length)` in wfdb's format.

    Args:
        paths: The records, without suffix.
        labels: The class of each record, int64 `(samples,)`.
        length: Samples of a record.
        cache: Keep records in memory, in each process that reads them.

    Raises:
        ValueError: From an access, if a record is damaged; the message names it.
    """

    def __init__(self, paths: list[Path], labels: np.ndarray, length: int, cache: bool = False) -> None:
        super().__init__(len(paths), cache)
        self.paths, self.targets, self.length = paths, torch.from_numpy(labels), length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read_cached(index), self.targets[index]

    def read(self, index: int) -> Tensor:
        path = self.paths[index]
        wfdb = import_package("wfdb", "PTB-XL's records are read by wfdb", "clinical")
        try:
            record = wfdb.rdrecord(str(path), physical=False)
            sums = [None if checksum is None else checksum % 65536 for checksum in record.checksum]
            for wrong, what in (
                (sums != record.calc_checksum(), "the checksum"),
                (tuple(map(str.upper, record.sig_name)) != LEADS, f"leads {record.sig_name}"),
                ({*record.units} != {"mV"}, f"units {record.units}"),
                (record.fs * 10 != self.length, f"{record.fs} samples a second"),
                (UNCALIBRATED in record.adc_gain, "no gain"),
            ):
                if wrong:
                    raise ValueError(f"its head does not fit: {what}")
            signal = np.asarray(record.dac(), dtype=np.float32).T
        except Exception as error:  # wfdb raises many kinds at damaged files
            raise ValueError(f"{path} cannot be read as a record of wfdb ({error}); get it again.") from error
        if signal.shape != (12, self.length) or not np.isfinite(signal).all():
            raise ValueError(
                f"{path} has shape {signal.shape} or a gap; a record has 12 leads of {self.length} samples."
            )
        return torch.from_numpy(np.ascontiguousarray(signal))
