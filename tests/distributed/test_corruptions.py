"""A thousand random damages to a real checkpoint: each one is found, and the good one before it is used."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmtrain_trainer.checkpoint import manifest as manifests
from llmtrain_trainer.checkpoint.manifest import Manifest
from llmtrain_trainer.checkpoint.store import CheckpointStore
from tests.support.ranks import Job, merged

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

SEED = 20240817
NEWEST, BEFORE, OLDEST = "step-00000008", "step-00000006", "step-00000004"
FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json", "run.json")
SHARDS = FILES[:2]
PAGE_BYTES = 4096
EIGHT = {"training": {"steps": 8}}


@dataclass(frozen=True)
class Stock:
    """What damages are made of: whole checkpoints, of which a trial hurts a copy."""

    job: Job
    losses: list[float]
    strangers: Mapping[str, Path]
    """The folder of the newest step as another attempt and as another run have made it."""

    def copy(self, target: Path) -> Path:
        """Return a store of hard links to the whole one: a damage replaces the file it hurts."""
        shutil.copytree(self.job.store, target, copy_function=os.link)
        return target


@dataclass(frozen=True)
class Trial:
    """One checkpoint folder that is to be hurt."""

    stock: Stock
    folder: Path
    chance: random.Random

    def other_step(self) -> Path:
        """Return the whole folder of another step."""
        names = [path.name for path in self.stock.job.store.glob("step-*") if path.name != self.folder.name]
        return self.stock.job.store / self.chance.choice(sorted(names))


def _replace(path: Path, data: bytes) -> None:
    path.unlink()  # the link, not the whole checkpoint's file
    path.write_bytes(data)


def _any(trial: Trial) -> tuple[Path, bytes]:
    path = trial.folder / trial.chance.choice(FILES)
    return path, path.read_bytes()


def _flip_a_bit(trial: Trial) -> None:
    path, data = _any(trial)
    changed = bytearray(data)
    changed[trial.chance.randrange(len(data))] ^= 1 << trial.chance.randrange(8)
    _replace(path, bytes(changed))


def _truncate(trial: Trial) -> None:
    path, data = _any(trial)
    _replace(path, data[: trial.chance.choice((0, trial.chance.randrange(len(data))))])


def _append(trial: Trial) -> None:
    path, data = _any(trial)
    more = trial.chance.choice((b"\0", b"\n", b" ", trial.chance.randbytes(trial.chance.randrange(1, 5000))))
    _replace(path, data + more)


def _delete(trial: Trial) -> None:
    _any(trial)[0].unlink()


def _zero_a_page(trial: Trial) -> None:
    path, data = _any(trial)
    pages = [start for start in range(0, len(data), PAGE_BYTES) if any(data[start : start + PAGE_BYTES])]
    start = trial.chance.choice(pages)
    page = bytes(len(data[start : start + PAGE_BYTES]))
    _replace(path, data[:start] + page + data[start + PAGE_BYTES :])


def _shard_of_another_step(trial: Trial) -> None:
    name = trial.chance.choice(SHARDS)
    _replace(trial.folder / name, (trial.other_step() / name).read_bytes())


def _two_shards_swapped(trial: Trial) -> None:
    first, second = (trial.folder / name for name in SHARDS)
    one, other = first.read_bytes(), second.read_bytes()
    _replace(first, other)
    _replace(second, one)


def _manifest_of_another_step(trial: Trial) -> None:
    _replace(trial.folder / manifests.NAME, (trial.other_step() / manifests.NAME).read_bytes())


def _manifest_of_a_stranger(trial: Trial) -> None:
    stranger = trial.stock.strangers[trial.chance.choice(sorted(trial.stock.strangers))]
    _replace(trial.folder / manifests.NAME, (stranger / manifests.NAME).read_bytes())


def _shard_of_a_stranger(trial: Trial) -> None:
    stranger = trial.stock.strangers[trial.chance.choice(sorted(trial.stock.strangers))]
    name = trial.chance.choice(SHARDS)
    _replace(trial.folder / name, (stranger / name).read_bytes())


DAMAGES: dict[Callable[[Trial], None], int] = {
    _flip_a_bit: 300,
    _truncate: 150,
    _append: 125,
    _zero_a_page: 125,
    _shard_of_another_step: 75,
    _manifest_of_another_step: 50,
    _manifest_of_a_stranger: 50,
    _shard_of_a_stranger: 50,
    _delete: 50,
    _two_shards_swapped: 25,
}
"""How often each is done."""


def _stock(new_job: Callable[..., Job], tmp_path: Path) -> Stock:
    """Have real ranks make the checkpoints of four steps, and the last one again in another attempt and run."""
    job, other = new_job("job", **EIGHT), new_job("other-run", **merged(EIGHT, {"training": {"seed": 5}}))
    for each in (job, other):
        assert each.run(2).wait() == [0, 0]
    losses = job.losses()
    whole = tmp_path / "whole"
    shutil.copytree(job.store, whole)
    shutil.rmtree(job.store / NEWEST)
    # With the same learning rate it would make the same bytes: a manifest of the same truth is no damage.
    again = job.run(2, changes={"training": {"optimizer": {"learningRate": 2e-3}}})
    assert again.events("resumed")[0]["step"] == 6, again.output()
    attempt = tmp_path / "other-attempt"
    shutil.move(job.store / NEWEST, attempt)
    shutil.rmtree(job.store)
    shutil.copytree(whole, job.store)
    assert sorted(path.name for path in (job.store / NEWEST).iterdir()) == sorted(FILES)
    return Stock(job, losses, {"attempt": attempt, "run": other.store / NEWEST})


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _hurt(stock: Stock, store: Path, name: str, damage: Callable[[Trial], None], chance: random.Random) -> None:
    damage(Trial(stock, store / name, chance))
    assert _content(store / name) != _content(stock.job.store / name), f"{damage.__name__} changed nothing"


def _plan(chance: random.Random) -> list[Callable[[Trial], None]]:
    plan = [damage for damage, times in DAMAGES.items() for _ in range(times)]
    chance.shuffle(plan)
    return plan


def test_a_thousand_random_damages_are_found_and_the_good_one_before_is_used(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    stock, chance = _stock(new_job, tmp_path), random.Random(SEED)
    before = {step: _content(stock.job.store / step) for step in (NEWEST, BEFORE, OLDEST)}
    plan = _plan(chance)
    assert len(plan) == 1000
    twice = set(chance.sample(range(len(plan)), 20))
    unnoticed: list[str] = []
    for number, damage in enumerate(plan):
        store = stock.copy(tmp_path / "trial")
        _hurt(stock, store, NEWEST, damage, chance)
        if number in twice:
            _hurt(stock, store, BEFORE, chance.choice(plan), chance)
        found = CheckpointStore(store, uri=f"file://{store}", run_id=stock.job.run_id, attempt=9).newest_good()
        expected, skipped = (OLDEST, [NEWEST, BEFORE]) if number in twice else (BEFORE, [NEWEST])
        whole: Manifest = manifests.read(stock.job.store / expected)
        if found.manifest != whole or [line.partition(":")[0] for line in found.skipped] != skipped:
            hurt = [name for name in FILES if not _same(store, stock.job.store, f"{NEWEST}/{name}")]
            unnoticed.append(f"{number}: {damage.__name__} of {hurt}: {found.skipped}")
        shutil.rmtree(store)
    print(dict(Counter(damage.__name__ for damage in plan)), f"{len(twice)} of them with the one before hurt too")
    assert not unnoticed, f"{len(unnoticed)} unnoticed:\n" + "\n".join(unnoticed)
    assert before == {step: _content(stock.job.store / step) for step in before}, "the stock itself was hurt"


def _same(store: Path, whole: Path, name: str) -> bool:
    return (store / name).exists() and (store / name).read_bytes() == (whole / name).read_bytes()


def test_ranks_resume_from_the_good_one_after_each_kind_of_damage(new_job: Callable[..., Job], tmp_path: Path) -> None:
    stock, chance = _stock(new_job, tmp_path), random.Random(SEED + 1)
    whole = tmp_path / "whole"
    for damage in DAMAGES:
        shutil.rmtree(stock.job.store)
        shutil.copytree(whole, stock.job.store)
        damage(Trial(stock, stock.job.store / NEWEST, chance))
        gang = stock.job.run(2)
        assert gang.wait() == [0, 0], gang.output()
        resumed = gang.events("resumed")[0]
        assert resumed["step"] == 6 and resumed["skipped"][0].startswith(f"{NEWEST}: "), (damage.__name__, resumed)
        assert stock.job.losses() == stock.losses, damage.__name__
        assert stock.job.checkpoints() == [f"step-0000000{step}" for step in (2, 4, 6, 8)], damage.__name__
